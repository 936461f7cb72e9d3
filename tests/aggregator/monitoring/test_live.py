"""The live page as a person and as an attacker meet it: a real server by the public command, a real browser."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from aggregator.config import Federation
from aggregator.monitoring.live import REFRESH_S, parse_address
from ddm.errors import PolicyError, SetupError
from ddm.protocol.receipt import AcceptedVerdict, RefusedVerdict
from ddm.system.processes import program
from tests.conftest import PublishedRelease
from tests.support.browser import browser, one_browser, overflow, scripts_off, show_as
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.federation import PASSPHRASE
from tests.support.federation_midway import AggregatorStandIn
from tests.support.waiting import LIMIT_S, wait_until

__all__ = ["browser", "one_browser"]

HOSTILE = "<script>alert(1)</script>"
# The least contrast of text on what lies behind it, WCAG 2.2 AA.
CONTRAST = """
const channel = v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).map(Number);
                     return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
                      if (!c.startsWith('rgba(0, 0, 0, 0')) return c; } return 'rgb(255, 255, 255)'; };
return Math.min(...[...document.body.querySelectorAll(':not(progress)')]
  .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
  .map(e => { const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
              return (a + 0.05) / (b + 0.05); }));
"""


@dataclass(frozen=True)
class Live:
    """A served page and the federation behind it."""

    stage: AggregatorStandIn
    process: "subprocess.Popen[str]"
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(
        self, method: str = "GET", path: str = "/", **headers: str
    ) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        try:
            connection.putrequest(method, path, skip_host="Host" in headers)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            body = answer.read().decode()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body
        finally:
            connection.close()


def serve(fed: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [str(program("aggregator")), "status", str(fed), "--serve", *arguments]
    # A job in the background of a shell ignores Ctrl-C, and its children do; the page must not.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, handler)


@contextmanager
def served(stage: AggregatorStandIn) -> Iterator[Live]:
    with serve(stage.federation.path, "--address", "127.0.0.1:0") as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("Live page: http://127.0.0.1:"), line + process.stderr.read()
            yield Live(stage, process, int(line.partition("127.0.0.1:")[2].partition("/")[0]))
        finally:
            process.kill()


@pytest.fixture(scope="module")
def one_server(
    published_once: PublishedRelease, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live") / "fed"
    shutil.copytree(published_once.tiny.federation.path, folder)
    with served(AggregatorStandIn(Federation(folder))) as live:
        yield live


@pytest.fixture
def live(one_server: Live) -> Live:
    """The module's page, of a federation of which nothing has arrived yet."""
    one_server.stage.clear()
    return one_server


def card(browser: Chrome, silo_id: str) -> str:
    return browser.find_element(By.ID, f"silo-{silo_id}").text


def test_page_shows_what_changes_in_the_folder_by_itself_with_scripts_off(
    live: Live, browser: Chrome
) -> None:
    scripts_off(browser)
    try:
        browser.get(live.url)
        assert "not seen yet" in card(browser, "north")
        live.stage.report("north", "training", 73)
        live.stage.report("east", "refused")
        live.stage.answer("east", RefusedVerdict(code=12, reason="other bytes than were signed"))
        patience = WebDriverWait(browser, 4 * REFRESH_S, ignored_exceptions=[Exception])
        patience.until(lambda page: "working" in card(page, "north"))
        assert "73%" in card(browser, "north")
        assert "refused (12)" in card(browser, "east") and "other bytes than were signed" in card(
            browser, "east"
        )
    finally:
        scripts_off(browser, off=False)


def test_hostile_text_is_text_and_a_phone_never_scrolls_sideways(
    live: Live, browser: Chrome
) -> None:
    live.stage.report("north", HOSTILE)
    live.stage.report("east", "in_outbox")
    live.stage.arrive("east", 1, of=4)
    live.stage.set_aside("north", f"{HOSTILE} " + "unbroken" * 40)
    show_as(browser, "phone")
    browser.get(f"{live.url}?paused")
    assert HOSTILE in card(browser, "north")
    assert not browser.find_elements(By.TAG_NAME, "script")
    assert browser.get_log("browser") == []
    assert overflow(browser) == 0
    # The control: a page that is too wide is noticed.
    browser.execute_script("document.querySelector('h1').style.minWidth = '700px'")
    assert overflow(browser) > 300


def test_progress_is_told_to_those_who_do_not_see_it(live: Live, browser: Chrome) -> None:
    live.stage.report("north", "training", 40)
    live.stage.arrive("east", 1, of=4)
    browser.get(f"{live.url}?paused")
    meters = {
        bar.accessible_name: bar.get_attribute("value")
        for bar in browser.find_elements(By.TAG_NAME, "progress")
    }
    assert meters == {"Training": "40", "Submission 1": "25"}
    assert browser.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en"
    assert (
        len(browser.find_elements(By.TAG_NAME, "main"))
        == len(browser.find_elements(By.TAG_NAME, "h1"))
        == 1
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_enough_contrast(live: Live, browser: Chrome, dark: bool) -> None:
    live.stage.report("north", "training", 40)
    live.stage.report("east", "refused")
    live.stage.answer("east", RefusedVerdict(code=12, reason="other bytes"))
    live.stage.answer("north", AcceptedVerdict())
    show_as(browser, "desktop", dark=dark)
    browser.get(f"{live.url}?paused")
    assert browser.execute_script(CONTRAST) >= 4.5
    browser.execute_script("document.querySelector('h1').style.color = '#888'")
    assert browser.execute_script(CONTRAST) < 4.5 or dark


def test_json_beside_the_page_holds_the_same_facts_and_neither_holds_a_secret(live: Live) -> None:
    live.stage.report("north", "training", 40)
    status, headers, body = live.ask(path="/status.json")
    assert status == 200 and headers["content-type"] == "application/json"
    assert {one["silo_id"]: one["standing"] for one in json.loads(body)["silos"]}[
        "north"
    ] == "working"
    status, headers, metrics = live.ask(path="/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'archipelago_silo_training_progress_ratio{silo="north"} 0.4\n' in metrics
    shown = body + metrics + live.ask()[2]
    secrets = [PASSPHRASE.decode(), str(live.stage.federation.path)]
    for key in [
        *live.stage.federation.keys.glob("*.key"),
        live.stage.federation.path / "tls" / "server.key",
    ]:
        secrets += key.read_text().splitlines()[1:-1]
    assert len(secrets) > 8 and not [secret for secret in secrets if secret in shown]


def test_nothing_but_reading_is_answered(live: Live) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        answers = [live.ask(method, path)[0] for path in ("/", "/status.json", "/metrics")]
        assert answers == [405, 405, 405]


def test_other_paths_lead_nowhere(live: Live) -> None:
    for path in (
        "/../federation.toml",
        "/keys/online.key",
        "/static/../../etc/passwd",
        "//etc/passwd",
        "/%2e%2e/x",
    ):
        assert live.ask(path=path)[0] == 404


def test_page_led_here_by_a_name_is_refused(live: Live) -> None:
    for host in (
        "evil.example",
        f"evil.example:{live.port}",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "",
    ):
        status, _, body = live.ask(Host=host)
        assert status in (400, 421) and "north" not in body, host
    for host in ("localhost", f"127.0.0.1:{live.port}", "[::1]:80"):
        assert live.ask(Host=host)[0] == 200, host
    with socket.create_connection(("127.0.0.1", live.port), timeout=LIMIT_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert connection.recv(64).split()[1] in (b"400", b"421")


def test_every_answer_keeps_other_pages_out(live: Live) -> None:
    for method, path in (("GET", "/"), ("HEAD", "/"), ("GET", "/nothing"), ("POST", "/")):
        status, headers, body = live.ask(method, path)
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; style-src 'self'"
        ), status
        assert headers["x-frame-options"] == "DENY" and headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers and "server" not in headers
        assert body == "" or method != "HEAD"
    assert live.ask()[1]["refresh"] == str(REFRESH_S)
    assert "refresh" not in live.ask(path="/?paused")[1]


def test_crowd_of_connections_is_turned_away_and_the_page_comes_back(live: Live) -> None:
    crowd = [socket.create_connection(("127.0.0.1", live.port), timeout=LIMIT_S) for _ in range(40)]
    try:
        assert live.ask()[0] == 503
    finally:
        for connection in crowd:
            connection.close()
    wait_until(lambda: live.ask()[0] == 200, "the page")


def test_endless_header_is_cut_off(live: Live) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=LIMIT_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000)
        assert connection.recv(64).split()[1] == b"400"


@pytest.mark.slow
def test_slow_sender_is_cut_off(live: Live) -> None:
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", live.port), timeout=LIMIT_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        with suppress(ConnectionResetError):
            assert connection.recv(64) == b""
    # A request has three seconds.
    assert 2 < time.monotonic() - began < 60


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_the_server_at_once_though_somebody_is_connected(
    published: PublishedRelease, number: signal.Signals, code: int
) -> None:
    with (
        served(AggregatorStandIn(published.tiny.federation)) as live,
        socket.create_connection(("127.0.0.1", live.port), timeout=LIMIT_S) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\n")
        assert live.ask()[0] == 200
        os.kill(live.process.pid, number)
        # Well below a second on an idle machine; a server that waits for the connection takes ten.
        assert live.process.wait(timeout=8) == code
        assert "Traceback" not in live.process.stderr.read()


def test_federation_that_cannot_be_read_for_a_while_is_shown_again_afterwards(live: Live) -> None:
    path = live.stage.federation.path / "federation.toml"
    text = path.read_text()
    path.write_text("nonsense = ")
    wait_until(lambda: live.ask()[0] == 503, "a page that says so")
    _, headers, body = live.ask()
    assert "cannot be read" in body and headers["refresh"]
    path.write_text(text)
    wait_until(lambda: live.ask()[0] == 200, "the page")


@pytest.mark.parametrize("address", ["0.0.0.0:8765", "192.0.2.1:80", "[::]:8765"])
def test_address_that_others_reach_is_refused_unless_it_is_meant(address: str) -> None:
    with pytest.raises(PolicyError, check=has_subject("address")):
        parse_address(address, expose=False)
    assert parse_address(address, expose=True)[1] in (8765, 80)


def test_address_that_is_none_is_refused() -> None:
    for address in ["example.org:80", "127.0.0.1", "127.0.0.1:99999", ":80", "127.0.0.1:-1", "x"]:
        with case(address=address), pytest.raises(SetupError, check=has_subject("--address")):
            parse_address(address, expose=True)


def test_exposed_page_says_what_is_seen_and_a_taken_port_is_named(
    published: PublishedRelease,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with serve(published.tiny.federation.path, "--address", address, "--expose") as process:
            _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 6 and "a free port" in said
    assert "WARNING: whoever reaches this port sees" in said
