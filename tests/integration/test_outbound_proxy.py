"""A site behind a real HTTPS proxy that asks for user and password; each failure says what to do, and that helps."""

import json
import os
import re
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from aggregator.keys.tls import make_tls
from ddm.system.processes import terminate_all
from silo.config import Site
from silo.courier.reach import explain, proxy_for
from tests.silo.check.test_check import TlsServer
from tests.support.case import case
from tests.support.operators import Operators, set_up_federation
from tests.support.tinyproxy import AVAILABLE, Tinyproxy, run_tinyproxy
from tests.support.waiting import wait_until

VARIABLES = [
    variable
    for name in ("https_proxy", "all_proxy", "no_proxy", "http_proxy")
    for variable in (name, name.upper())
]
FAR = "127.0.0.2"  # an address of loopback that `no_proxy` of Flower's programs does not name

needs_tinyproxy = pytest.mark.skipif(not AVAILABLE, reason="tinyproxy is not installed")


@pytest.fixture(autouse=True)
def no_proxy_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


CHOICES = [
    ({}, "a.org", None),
    ({"https_proxy": "http://u:p@proxy:3128"}, "a.org", "proxy"),
    ({"HTTPS_PROXY": "proxy:3128"}, "a.org", "proxy"),
    ({"all_proxy": "http://proxy:3128"}, "a.org", "proxy"),
    ({"http_proxy": "http://proxy:3128"}, "a.org", None),
    ({"https_proxy": "http://proxy", "no_proxy": "b.org, .a.org"}, "x.a.org", None),
    ({"https_proxy": "http://proxy", "no_proxy": "*"}, "a.org", None),
    ({"https_proxy": "http://proxy", "no_proxy": "10.0.0.1"}, "10.0.0.1", None),
    ({"https_proxy": "http://proxy", "no_proxy": "10.0.0.1"}, "10.0.0.11", "proxy"),
]


def test_proxy_is_the_one_that_flowers_client_takes() -> None:
    trusting = ssl.create_default_context()
    for environment, host, expected in CHOICES:
        with case(environment=environment, host=host), pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            proxy = proxy_for(host)
            assert (proxy.hostname if proxy else None) == expected
            with httpx.Client(verify=trusting) as client:
                transport = client._transport_for_url(httpx.URL(f"https://{host}:9092/"))
                assert (transport is not client._transport) == (expected is not None)


@needs_tinyproxy
def test_each_failure_of_a_real_proxy_says_what_to_do_and_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tls(tmp_path / "tls", ["127.0.0.1"], passphrase=b"correct horse")
    server = TlsServer(tmp_path / "tls")
    ca = tmp_path / "tls" / "ca.pem"
    address = f"127.0.0.1:{server.port}"
    try:
        with run_tinyproxy(tmp_path / "proxy", server.port) as proxy:
            monkeypatch.setenv("https_proxy", proxy.url())
            assert explain(address, ca) is None
            assert f"CONNECT {address}" in proxy.log()
            for what, url in {
                "wrong": proxy.url(password="wr0ng"),
                "none": f"http://127.0.0.1:{proxy.port}",
            }.items():
                with case(password=what):
                    monkeypatch.setenv("https_proxy", url)
                    said = explain(address, ca) or ""
                    assert "right user and password" in said and f"127.0.0.1:{proxy.port}" in said
                    assert "wr0ng" not in said and "ward" not in said
            monkeypatch.setenv("https_proxy", proxy.url())
            assert "let this machine CONNECT" in (explain("127.0.0.1:1", ca) or "")
            server.close()
            wait_until(lambda: explain(address, ca), "a server that accepts no more")
            assert "aggregator run" in (explain(address, ca) or "")
            proxy.stop()
            assert f"Ask whether the proxy 127.0.0.1:{proxy.port} is running" in (
                explain(address, ca) or ""
            )
    finally:
        server.close()


@pytest.fixture
def operators(tmp_path: Path) -> Iterator[Operators]:
    operators = Operators(tmp_path)
    yield operators
    terminate_all(operators.running.values())


def log_of(operators: Operators) -> str:
    return operators.running["north-courier"].log_tail(65536)


def start_courier(operators: Operators, url: str | None) -> None:
    if "north-courier" in operators.running:
        operators.running["north-courier"].terminate()
        (operators.folder / "logs" / "north-courier.log").unlink()
    operators.environment.pop("https_proxy", None)
    if url:
        operators.environment["https_proxy"] = url
    operators.serve("north-courier", "silo", "run", operators.folder / "north", "--only", "courier")


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_tinyproxy
def test_courier_works_through_a_proxy_alone_and_says_what_is_wrong_with_it(
    operators: Operators, tmp_path: Path
) -> None:
    set_up_federation(operators, host=FAR)
    host, _, port = json.loads((operators.fed / "invitation.json").read_text())[
        "address"
    ].rpartition(":")
    assert host == FAR
    site = Site(tmp_path / "north")
    operators.serve("aggregator", "aggregator", "run", operators.fed)
    with run_tinyproxy(tmp_path / "proxy", int(port)) as proxy:
        start_courier(operators, proxy.url(password="wr0ng"))
        operators.wait_until(
            lambda: "right user and password" in log_of(operators), "a word about the password"
        )
        assert not any(site.inbox.iterdir()) and "wr0ng" not in log_of(operators)

        proxy.stop()
        start_courier(operators, proxy.url())
        operators.wait_until(lambda: "is running" in log_of(operators), "a word about the proxy")
        assert f"the proxy 127.0.0.1:{proxy.port}" in log_of(operators)

        proxy.start()  # what was said to do helps, without a restart
        operators.wait_until(lambda: "courier: connected" in log_of(operators), "the connection")
        operators.serve(
            "north-worker", "silo", "run", operators.folder / "north", "--only", "worker"
        )
        through(proxy, operators, int(port))
        operators.wait_until(lambda: operators.ended_well("north-worker"), "the receipt")
        status = json.loads(operators.call("silo", "status", site.path, "--json"))
        assert status["state"] == "accepted"
        assert len(re.findall(rf"CONNECT {FAR}:{port}", proxy.log())) >= 2
        assert "CONNECT 127.0.0.1:" not in proxy.log(), (
            "programs of this machine talk to each other directly"
        )


def through(proxy: Tinyproxy, operators: Operators, port: int) -> None:
    """The courier's programs hold connections with the proxy, and none with the aggregator."""
    assert proxy.process
    pids = {
        str(operators.running["north-courier"].pid),
        *map(str, operators.pids("north-courier", "")),
    }
    said = subprocess.run(
        ["ss", "-Htnp", "dst", f"{FAR}:{port}"], capture_output=True, text=True, check=True
    ).stdout
    direct = [line for line in said.splitlines() if pids & set(re.findall(r"pid=(\d+)", line))]
    assert not direct, direct
    if os.geteuid() == 0:
        assert f"pid={proxy.process.pid}" in said
