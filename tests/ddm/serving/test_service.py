"""`ddm serve` as programs, browsers and strangers meet it: a real server, verified first, on loopback."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.responses import StreamingResponse
from starlette.types import Message
from typer.testing import CliRunner

from aggregator.runtime.proxy import find_nginx
from ddm.cli.main import app
from ddm.errors import BusyError, DigestError, MemoryLimitError, PolicyError, SetupError
from ddm.serving.app import send_in_time
from ddm.system.processes import free_port, spawn, terminate_all
from tests.conftest import PublishedRelease
from tests.support.case import case
from tests.support.pages import active_content
from tests.support.publishing import verify_release
from tests.support.service import (
    HOST,
    Service,
    ask,
    read_answer,
    resident_bytes,
    running_service,
    sample_body,
    seconds_until_closed,
)
from tests.support.waiting import LIMIT_S, wait_until

JSON = {"Content-Type": "application/json"}
NUM_PLACES = 3
# Minutes of sampling, unless its client leaves.
ENDLESS = {"num": 8, "steps": 10_000, "strategy": "full", "solver": "rk4"}
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def one_service(
    published_once: PublishedRelease, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    state = tmp_path_factory.mktemp("state")
    limits = ("--batch", 8, "--queue", NUM_PLACES, "--steps", 10_000)
    with running_service(published_once, state, *limits) as service:
        yield service


@pytest.fixture
def service(one_service: Service) -> Service:
    """The module's server, with nobody in its queue."""
    one_service.leave()
    one_service.wait_for_requests(0)
    return one_service


def run(command: str, *words: object) -> BaseException | None:
    """Run a command of `ddm` in this process; return how it ended, None for well."""
    result = CliRunner().invoke(app, [command, *map(str, words)])
    return result.exception


def images(content: bytes) -> np.ndarray:
    with np.load(BytesIO(content)) as file:
        return np.asarray(file["images"])


def test_answer_to_a_request_alone_has_the_bytes_of_the_file_that_ddm_sample_writes(
    service: Service, published_once: PublishedRelease, tmp_path: Path
) -> None:
    known = ("--root", published_once.root, "--state", tmp_path / "state", "--device", "cpu")
    options = ("--steps", 3, "--seed", 7, "--strategy", "sample", "--prior", "north=1,east=3")
    for name in ("png", "npz"):
        out = tmp_path / f"a.{name}"
        words = (*known, "--num", 5, *options, "--set", "batch=8", "--out", out)
        assert run("sample", published_once.release, *words) is None
        answer = service.sample(
            num=5, steps=3, seed=7, strategy="sample", prior={"north": 1, "east": 3}, format=name
        )
        assert answer.status == 200, answer.body
        assert answer.body == out.read_bytes()
    with Image.open(BytesIO(service.sample(format="png").body)) as picture:
        assert picture.text["Synthetic"] == "true"  # type: ignore[attr-defined]
        assert picture.text["Release"] == service.ask("GET", "/info").json["manifest_digest"]  # type: ignore[attr-defined]


def test_requests_that_came_while_the_server_was_busy_are_drawn_in_one_call_with_the_same_images(
    service: Service,
) -> None:
    wanted = [{"num": 3, "seed": 5}, {"num": 2, "seed": 8, "first": 4}]
    alone = [images(service.sample(steps=3, format="npz", **fields).body) for fields in wanted]
    busy = service.begin(**ENDLESS)
    service.wait_for_requests(1)
    waiting = [service.begin(steps=3, format="npz", **fields) for fields in wanted]
    service.wait_for_requests(3)
    before = service.health
    busy.close()
    together = [images(read_answer(connection).body) for connection in waiting]
    after = service.health
    # The call whose client left, and one for both.
    assert after["calls"] - before["calls"] == 2 and after["images"] - before["images"] == 5
    for own, shared in zip(alone, together, strict=True):
        np.testing.assert_allclose(shared, own, rtol=0, atol=ROUNDING)


def test_full_queue_sends_away_with_a_time_and_whoever_leaves_frees_a_place(
    service: Service,
) -> None:
    for number in range(NUM_PLACES):
        service.begin(**ENDLESS)
        service.wait_for_requests(number + 1)
    refused = service.sample(num=1)
    assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
    assert "Try again" in refused.json["error"]
    # What needs no sampler is answered all the same.
    assert service.ask("GET", "/info").status == 200
    service.open_requests.pop().close()
    service.wait_for_requests(NUM_PLACES - 1)
    service.leave()
    # The call that nobody waits for ends too, although it would take minutes.
    service.wait_for_requests(0)
    assert service.sample(num=1, steps=1).status == 200


def test_format_follows_the_field_and_else_the_header_accept(service: Service) -> None:
    body = b'{"steps": 1}'
    for accept, media_type in (
        ("application/x-npz", "application/x-npz"),
        ("image/png", "image/png"),
        ("text/html, image/*;q=0.5", "image/png"),
        ("*/*", "image/png"),
        # What `curl --json` sends.
        ("application/json", "image/png"),
    ):
        with case(accept):
            answer = service.ask("POST", "/sample", body, {**JSON, "Accept": accept})
            assert answer.status == 200 and answer.headers["content-type"] == media_type
    chosen = b'{"steps": 1, "format": "npz"}'
    answer = service.ask("POST", "/sample", chosen, {**JSON, "Accept": "image/png"})
    assert answer.headers["content-type"] == "application/x-npz"


def test_hostile_request_is_refused_in_one_sentence_and_the_next_one_is_answered(
    service: Service,
) -> None:
    for body, headers, status in (
        (b"{}", {}, 415),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"{}", {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (b"", JSON, 422),
        (b'{"num": NaN}', JSON, 422),
        (b'{"num": -1}', JSON, 422),
        (b'{"num": 9}', JSON, 422),
        (b'{"steps": 10001}', JSON, 422),
        (b'{"seed": 1, "seed": 2}', JSON, 422),
        (b'{"model": "other"}', JSON, 422),
        (b'{"prior": ' + b"[" * 30_000 + b"}", JSON, 422),
        (b'{"class": 1}', JSON, 422),
        (b'{"text": "\xff\xfe"}', JSON, 422),
    ):
        with case(body[:40], headers):
            answer = service.ask("POST", "/sample", body, headers)
            assert answer.status == status
            assert answer.json["error"].endswith(".") and "\n" not in answer.json["error"]
    # The server does not read the rest, which may cost the sender the answer.
    with suppress(ConnectionError):
        assert service.ask("POST", "/sample", b" " * 1_000_000, JSON).status == 413
    service.wait_for_requests(0)
    assert service.sample(steps=1).status == 200


def test_page_of_another_website_gets_nothing_drawn_and_reads_nothing(service: Service) -> None:
    # DNS rebinding: the website's name resolves to this machine.
    assert service.ask("GET", "/info", headers={"Host": "evil.example"}).status == 421
    # A browser asks first whether another origin may send JSON, and no answer allows one.
    asked = service.ask("OPTIONS", "/sample", headers={"Origin": "https://evil.example"})
    assert asked.status == 405
    assert "POST" in asked.json["error"]
    assert "/docs" in service.ask("GET", "/samples").json["error"]
    for answer in (asked, service.sample(steps=1), service.ask("GET", "/")):
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_pages_say_what_the_release_is_and_load_nothing_from_elsewhere(
    service: Service, published_once: PublishedRelease
) -> None:
    release = verify_release(published_once, published_once.release)
    info = service.ask("GET", "/info").json
    assert info["manifest_digest"] == release.manifest_digest
    assert info["shape"] == [1, 4, 4]
    assert info["limits"] == {"num": 8, "steps": 10_000, "requests": NUM_PLACES}
    assert sum(info["silos"].values()) == pytest.approx(1.0)
    own = {"link", "link href=live.css", "link href=data:,", "a href=openapi.json"}
    for path, links in (("/", {"docs", "info", "health"}), ("/docs", {"./"})):
        page = service.ask("GET", path).body.decode()
        assert set(active_content(page)) == own | {f"a href={link}" for link in links}, path
    assert info["manifest_digest"] in service.ask("GET", "/").body.decode()
    description = service.ask("GET", "/openapi.json").json
    fields = description["components"]["schemas"]["SampleRequest"]["properties"]
    assert fields["num"]["maximum"] == 8
    page = service.ask("GET", "/docs").body.decode()
    assert all(f"<code>{name}</code>" in page for name in fields)
    assert all(path in page for path in description["paths"])
    assert all(
        service.ask("GET", path).status in (200, 405)
        for path in (*description["paths"], "/live.css")
    )


def test_endless_head_is_cut_off(service: Service) -> None:
    with socket.create_connection((HOST, service.port), timeout=LIMIT_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 20_000)
        assert connection.recv(64).split()[1] == b"400"


def test_sigterm_finishes_what_is_drawn_refuses_what_waits_and_ends_well(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    with running_service(published_once, tmp_path, "--batch", 4, "--steps", 2000) as service:
        drawn = service.begin(num=4, steps=1000, format="npz")
        service.wait_for_requests(1)
        waiting = service.begin(num=1, steps=1)
        service.wait_for_requests(2)
        service.process.send_signal(signal.SIGTERM)
        refused = read_answer(waiting)
        assert refused.status == 503 and "ending" in refused.json["error"]
        answer = read_answer(drawn)
        assert answer.status == 200 and images(answer.body).shape == (4, 1, 4, 4)
        assert service.process.wait(LIMIT_S) == 0
        assert "Traceback" not in service.process.stderr.read()


def test_release_that_was_tampered_with_is_not_served(
    published: PublishedRelease, tmp_path: Path
) -> None:
    release = verify_release(published, published.release)
    expert = release.folder / release.manifest.experts[0].file.path
    content = bytearray(expert.read_bytes())
    content[-1] ^= 1
    expert.write_bytes(content)
    words = ("--root", published.root, "--state", tmp_path / "state", "--port", free_port())
    assert isinstance(run("serve", published.release, *words), DigestError)


def test_address_port_and_memory_that_cannot_be_are_refused_before_anything_is_served(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    nowhere = ("nowhere", "--root", "nowhere")
    for host, kind in (
        ("0.0.0.0", PolicyError),
        ("::", PolicyError),
        ("192.0.2.1", PolicyError),
        ("example.org", SetupError),
        ("", SetupError),
    ):
        with case(host):
            assert type(run("serve", *nowhere, "--host", host)) is kind
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        assert isinstance(run("serve", *nowhere, "--port", port), BusyError)
    words = ("--root", published_once.root, "--state", tmp_path / "state", "--port", free_port())
    refused = run("serve", published_once.release, *words, "--memory", "1MiB")
    assert isinstance(refused, MemoryLimitError) and "--batch" in refused.remedy


@pytest.mark.slow
def test_slow_clients_are_cut_off_while_others_are_answered(service: Service) -> None:
    with ExitStack() as stack:

        def connect(data: bytes) -> socket.socket:
            connection = socket.create_connection((HOST, service.port), timeout=LIMIT_S)
            stack.enter_context(connection)
            connection.sendall(data)
            return connection

        half_head = connect(b"POST /sample HTTP/1.1\r\n")
        half_body = connect(
            b"POST /sample HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        service.wait_for_requests(1)
        assert service.sample(steps=1).status == 200
        assert read_answer(half_body).status == 408
        assert seconds_until_closed(half_head) < 60
    service.wait_for_requests(0)


def test_answer_that_nobody_takes_gives_its_place_back() -> None:
    """The attack: a client reads a few bytes now and then, so that its connection never stalls."""
    num_sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield b"x"

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal num_sent
        num_sent += 1
        await asyncio.sleep(0.01)

    async def serve_one() -> None:
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        sending = send_in_time(StreamingResponse(pieces()), scope, receive, send, limit_s=0.2)
        await asyncio.wait_for(sending, LIMIT_S)

    asyncio.run(serve_one())
    assert num_sent > 1


@pytest.mark.slow
def test_killed_server_starts_again_at_its_port_and_leaves_nothing_behind(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    port = free_port()
    expected = None
    for _ in range(3):
        with running_service(published_once, tmp_path / "state", port=port) as service:
            answer = service.sample(num=3, steps=2, format="npz").body
            assert expected is None or answer == expected
            expected = answer
            for _ in range(8):
                service.begin(num=64, steps=100, strategy="full")
            wait_until(lambda: service.health["requests"] > 2)
            service.process.kill()
            service.process.wait(LIMIT_S)
        # What a reader remembers, and nothing of the server.
        assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob("*.tmp*"))
        left = {path.relative_to(tmp_path).parts[0] for path in tmp_path.iterdir()}
        assert left == {"state"}


@pytest.mark.slow
def test_memory_stays_bounded_under_hundreds_of_requests(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    with running_service(published_once, tmp_path, "--queue", 16) as service:
        pid = service.process.pid
        for seed in range(50):
            assert service.sample(num=64, steps=1, seed=seed, format="npz").status == 200
        before = resident_bytes(pid)
        for seed in range(400):
            if seed % 8 == 0:
                service.leave()
            service.begin(num=64, steps=1, seed=seed, format="npz")
            assert service.sample(num=64, steps=1, seed=seed).status in (200, 503)
        service.leave()
        service.wait_for_requests(0)
        assert resident_bytes(pid) < before + (64 << 20)


@pytest.mark.slow
@pytest.mark.skipif(find_nginx() is None, reason="nginx is not installed")
def test_nginx_of_the_page_divides_requests_among_two_servers_and_goes_on_when_one_ends(
    published_once: PublishedRelease, tmp_path: Path
) -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "serve.md"
    text = page.read_text("utf-8").partition("```nginx\nupstream")[2].partition("```")[0]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(running_service(published_once, tmp_path / f"state-{number}"))
            for number in range(2)
        ]
        port = free_port()
        text = f"upstream{text}"
        for old, new in (
            ("10.0.0.11:8000", f"{HOST}:{servers[0].port}"),
            ("10.0.0.12:8000", f"{HOST}:{servers[1].port}"),
            ("listen 8080;", f"listen {HOST}:{port};"),
        ):
            assert old in text
            text = text.replace(old, new)
        config = tmp_path / "nginx.conf"
        temporary = "".join(
            f"{name}_temp_path {tmp_path}/{name};"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        config.write_text(
            f"daemon off; pid {tmp_path}/nginx.pid; error_log stderr; events {{}}\n"
            f"http {{ access_log off; {temporary} {text} }}\n"
        )
        nginx = spawn(
            [str(find_nginx()), "-e", "stderr", "-p", str(tmp_path), "-c", str(config)],
            log_path=tmp_path / "nginx.log",
        )
        stack.callback(terminate_all, [nginx])

        def is_up() -> bool:
            try:
                return ask(port, "GET", "/health").status == 200
            except OSError:
                return False

        wait_until(is_up, "nginx")
        body, headers = sample_body({"num": 2, "steps": 2, "seed": 3, "format": "npz"})
        answers = [ask(port, "POST", "/sample", body, headers) for _ in range(6)]
        assert {answer.status for answer in answers} == {200}
        # Whichever server draws, the images are the same.
        assert len({answer.body for answer in answers}) == 1
        assert all(server.health["calls"] > 0 for server in servers)
        servers[0].process.send_signal(signal.SIGTERM)
        assert servers[0].process.wait(LIMIT_S) == 0
        answers = [ask(port, "POST", "/sample", body, headers) for _ in range(4)]
        assert {answer.status for answer in answers} == {200}
