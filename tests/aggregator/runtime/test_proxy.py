"""nginx itself, as configured for a federation, in front of a stand-in for Flower's server."""

import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from aggregator.keys.tls import make_tls
from aggregator.runtime import proxy
from aggregator.runtime.proxy import (
    Limits,
    answers,
    choose_proxy,
    find_nginx,
    is_loopback,
    nginx_command,
    render_config,
    write_config,
)
from ddm.errors import MissingFileError, SetupError
from ddm.system.processes import free_port, spawn, terminate_all
from tests.support.case import case
from tests.support.errors import has_subject
from tests.support.waiting import LIMIT_S, wait_until

LIMITS = Limits(object_bytes=200_000, body_bytes=100_000, requests=4, header_s=60, body_s=60)
HASTY = replace(LIMITS, header_s=1, body_s=3)
FLEET = "/v1/fleet/pull-messages"
# From the first byte: hasty limits are 1 s and 3 s, the others and nginx's own 60 s, and a loaded machine is slow.
BOUND_S = 45.0

needs_nginx = pytest.mark.skipif(find_nginx() is None, reason="nginx is not installed")


@dataclass
class Upstream:
    """A stand-in for the SuperLink: answers every request, remembers what it was asked."""

    port: int
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)


@contextmanager
def upstream_of(tls: Path) -> Iterator[Upstream]:
    upstream = Upstream(0)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            chunked = self.headers.get("transfer-encoding") == "chunked"
            body, whole = (
                self.chunks() if chunked else self.known(int(self.headers.get("content-length", 0)))
            )
            upstream.requests.append(
                (self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            )
            if not whole:
                self.close_connection = True
                return
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        do_GET = do_POST = do_PUT = answer

        def known(self, num_bytes: int) -> tuple[bytes, bool]:
            body = self.rfile.read(num_bytes)
            return body, len(body) == num_bytes

        def chunks(self) -> tuple[bytes, bool]:
            """Read a body without a length; return what came of it, and whether it came to its end."""
            body = b""
            with suppress(OSError):  # cut off
                while line := self.rfile.readline():
                    num_bytes = int(line, 16)
                    body += self.rfile.read(num_bytes)
                    if self.rfile.readline() == b"\r\n" and num_bytes == 0:
                        return body, True
            return body, False

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):  # a client that leaves midway
                super().handle()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls / "server.pem", tls / "server.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        server.socket = context.wrap_socket(server.socket, server_side=True)
        upstream.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield upstream
        finally:
            server.shutdown()
            thread.join()


@dataclass
class NginxProxy:
    """A running nginx."""

    fed: Path
    port: int
    upstream: Upstream

    @property
    def ca(self) -> Path:
        return self.fed / "tls" / "ca.pem"

    @property
    def log(self) -> str:
        return (self.fed / "flower" / "nginx.log").read_text()

    def connect(self, *, source: str = "127.0.0.1") -> ssl.SSLSocket:
        plain = socket.create_connection(
            ("127.0.0.1", self.port), timeout=LIMIT_S, source_address=(source, 0)
        )
        return ssl.create_default_context(cafile=str(self.ca)).wrap_socket(
            plain, server_hostname="127.0.0.1"
        )

    def ask(self, data: bytes, *, source: str = "127.0.0.1") -> int:
        """Send these bytes; return the status of what comes back, 0 for a connection that was only closed."""
        with self.connect(source=source) as connection:
            with suppress(OSError):  # nginx may refuse before it has read everything
                connection.sendall(data)
            return status_of(connection)

    def post(
        self, target: str = FLEET, *, source: str = "127.0.0.1", body: bytes = b"", more: str = ""
    ) -> int:
        head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
        return self.ask(head.encode() + body, source=source)


def status_of(connection: socket.socket) -> int:
    answer = b""
    with suppress(OSError):
        while b"\r\n" not in answer and (piece := connection.recv(4096)):
            answer += piece
    status_line = re.match(rb"HTTP/1\.[01] ([0-9]{3}) ", answer)
    return int(status_line[1]) if status_line else 0


@contextmanager
def proxy_of(fed: Path, upstream: Upstream, limits: Limits = LIMITS) -> Iterator[NginxProxy]:
    nginx = find_nginx()
    flower = fed / "flower"
    assert nginx
    port = free_port()
    write_config(nginx, flower, render_config("127.0.0.1", port, upstream.port, limits))
    child = spawn(nginx_command(nginx, flower), log_path=flower / "nginx.log")
    try:
        proxy = NginxProxy(fed, port, upstream)

        def check() -> None:
            assert child.running(), child.log_tail()

        wait_until(lambda: answers("127.0.0.1", port, proxy.ca), "an answer of nginx", check=check)
        yield proxy
    finally:
        terminate_all([child])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NginxProxy]:
    # A name that a careless configuration would read as syntax.
    fed = tmp_path_factory.mktemp("a fed; with $odd {name}")
    make_tls(fed / "tls", ["127.0.0.1"], passphrase=b"correct horse")
    with upstream_of(fed / "tls") as upstream, proxy_of(fed, upstream) as proxy:
        yield proxy


@pytest.fixture
def door(running: NginxProxy) -> NginxProxy:
    running.upstream.requests.clear()
    return running


@needs_nginx
def test_request_of_a_silo_passes_as_it_was_sent(door: NginxProxy) -> None:
    assert (
        door.post(body=b"\0\1payload", more="flwr-signature: abc\r\nX-Forwarded-For: 6.6.6.6\r\n")
        == 200
    )
    ((method, path, headers, body),) = door.upstream.requests
    assert (method, path, body) == ("POST", FLEET, b"\0\1payload")
    assert headers["flwr-signature"] == "abc"
    assert headers["x-forwarded-for"] == "127.0.0.1", "a client does not choose where it comes from"


def test_proxy_lets_pass_what_flowers_nodes_ask_for() -> None:
    from flwr.supernode import fleet_http_client

    source = Path(fleet_http_client.__file__).read_text()
    paths = re.findall(r'path="([^"]+)"', source)
    assert len(paths) >= 12
    pattern = re.search(r'"~(\^POST .*)" 1;', render_config("127.0.0.1", 1, 2))
    assert pattern and all(re.match(pattern[1], f"POST {path}") for path in paths)


@needs_nginx
def test_code_submitted_through_the_public_port_is_refused(door: NginxProxy) -> None:
    for target in [
        "/v1/control/start-run",
        "/v1/runtime/push-messages",
        "/v1/fleet",
        "/v1/fleet/",
        "/v1/fleet/a/b",
        "/v1/fleets/pull-messages",
        "/V1/FLEET/pull-messages",
        "/docs",
        "/openapi.json",
        "/health",
        "/",
    ]:
        with case(target=target):
            assert door.post(target) == 403
            assert not door.upstream.requests


@needs_nginx
def test_path_trick_reaches_nothing(door: NginxProxy) -> None:
    for target in [
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/..%2fcontrol/start-run",
        "/v1/fleet/%2e%2e%2fcontrol%2fstart-run",
        "/v1/fleet/..;/control/start-run",
        "/v1/fleet/..\\control\\start-run",
        "/v1/fleet//../control/start-run",
        "//v1/control/start-run",
        "/v1//fleet/pull-messages",
        "/v1/control/start-run?/v1/fleet/pull-messages",
        "/v1/control/start-run#/v1/fleet/pull-messages",
        "/v1/fleet/pull-messages?x=1",
        "/v1/control/../fleet/pull-messages",
        "/v1/fleet/pull%2dmessages",
        "/v1/fleet/pull-messages%00",
        "/v1/fleet/pull-messages/",
        "https://127.0.0.1/v1/control/start-run",
        "https://evil.example/v1/control/start-run",
        "http://127.0.0.1:1/",
        "*",
        "v1/fleet/pull-messages",
    ]:
        with case(target=target):
            assert door.post(target) in (400, 403, 404)
            assert not door.upstream.requests


@needs_nginx
def test_absolute_target_of_a_silos_path_goes_to_flower_and_nowhere_else(door: NginxProxy) -> None:
    assert door.post(f"https://evil.example{FLEET}") == 200
    assert [(path, headers["host"]) for _, path, headers, _ in door.upstream.requests] == [
        (FLEET, "localhost")
    ]


@needs_nginx
def test_second_request_smuggled_behind_a_first_is_judged_by_itself(door: NginxProxy) -> None:
    inner = b"POST /v1/control/start-run HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    outer = f"POST {FLEET} HTTP/1.1\r\nHost: x\r\nContent-Length: %s\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    for length in ("0", str(5 + len(inner))):
        door.ask((outer % length).encode() + inner)
    assert "/v1/control/start-run" not in {path for _, path, _, _ in door.upstream.requests}


@needs_nginx
def test_method_that_no_silo_uses_is_refused(door: NginxProxy) -> None:
    for method in ["GET", "PUT", "DELETE", "CONNECT", "TRACE", "post"]:
        with case(method=method):
            request = f"{method} {FLEET} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            assert door.ask(request.encode()) in (400, 403, 405)
            assert not door.upstream.requests


@needs_nginx
def test_plaintext_is_refused(door: NginxProxy) -> None:
    with socket.create_connection(("127.0.0.1", door.port), timeout=LIMIT_S) as plain:
        plain.sendall(f"POST {FLEET} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        assert status_of(plain) == 400
    assert not door.upstream.requests


@needs_nginx
def test_client_refuses_the_server_when_it_trusts_another_authority(
    door: NginxProxy, tmp_path: Path
) -> None:
    make_tls(tmp_path / "tls", ["127.0.0.1"], passphrase=b"correct horse")
    context = ssl.create_default_context(cafile=str(tmp_path / "tls" / "ca.pem"))
    with (
        socket.create_connection(("127.0.0.1", door.port), timeout=LIMIT_S) as plain,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        context.wrap_socket(plain, server_hostname="127.0.0.1")
    assert not answers("127.0.0.1", door.port, tmp_path / "tls" / "ca.pem")


@needs_nginx
def test_proxy_refuses_a_server_behind_it_that_another_authority_signed(tmp_path: Path) -> None:
    for name in ("fed", "other"):
        make_tls(tmp_path / name / "tls", ["127.0.0.1"], passphrase=b"correct horse")
    with (
        upstream_of(tmp_path / "other" / "tls") as foreign,
        proxy_of(tmp_path / "fed", foreign) as door,
    ):
        assert door.post() == 502
        assert not foreign.requests


@needs_nginx
@pytest.mark.parametrize(
    "bomb",
    [
        f"POST {FLEET} HTTP/1.1\r\nHost: x\r\nX-Bomb: {'b' * 100_000}\r\n\r\n",
        f"POST {FLEET} HTTP/1.1\r\nHost: x\r\n"
        + "".join(f"X-{i}: {'b' * 100}\r\n" for i in range(5000))
        + "\r\n",
        f"POST /{'a' * 100_000} HTTP/1.1\r\nHost: x\r\n\r\n",
        f"POST {FLEET} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
        f"POST {FLEET} HTTP/1.1\r\nHost: x\r\nContent-Length: {LIMITS.body_bytes + 1}\r\n\r\n",
        "\x16\x03\x01" + "\0" * 5000,
    ],
    ids=["one large header", "many headers", "long path", "absurd length", "large body", "no HTTP"],
)
def test_header_bomb_is_refused(door: NginxProxy, bomb: str) -> None:
    assert door.ask(bomb.encode()) in (400, 413, 414, 431)
    assert not door.upstream.requests


@needs_nginx
def test_body_without_a_length_is_cut_off_at_the_limit(door: NginxProxy) -> None:
    piece = b"%x\r\n" % 50_000 + b"b" * 50_000 + b"\r\n"
    head = f"POST {FLEET} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert door.ask(head + piece * 50) in (0, 413)
    assert sum(len(body) for *_, body in door.upstream.requests) <= LIMITS.body_bytes


@needs_nginx
def test_only_an_object_may_be_large(door: NginxProxy) -> None:
    """The attack: Flower parses a body before it asks whose it is, and 8 MiB of empty parts take 200 MiB."""
    body = bytes(LIMITS.body_bytes + 1)
    num_before = len(door.upstream.requests)
    assert door.post("/v1/fleet/push-object", body=body) == 200
    assert door.post("/v1/fleet/push-messages", body=body) == 413
    assert door.post("/v1/fleet/push-object", body=bytes(LIMITS.object_bytes + 1)) == 413
    for trick in ("/v1/fleet//push-object", "/v1/fleet/push-object/", "/v1/fleet/push-objec%74"):
        assert door.post(trick, body=body) in (403, 413)
    passed = door.upstream.requests[num_before:]
    assert [path for _, path, _, _ in passed] == ["/v1/fleet/push-object"]


@needs_nginx
def test_body_without_a_length_below_the_limit_passes(door: NginxProxy) -> None:
    piece = b"%x\r\n" % 1000 + b"b" * 1000 + b"\r\n"
    head = f"POST {FLEET} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
    assert door.ask(head + piece * 3 + b"0\r\n\r\n") == 200
    bodies = [body for *_, body in door.upstream.requests]
    assert b"b" * 3000 in bodies
    # one that was cut off a moment ago may come to its end only now
    assert max(map(len, bodies)) <= LIMITS.body_bytes


def trickle(connections: list[ssl.SSLSocket], data: bytes) -> float:
    """Send a byte now and then until every connection is closed; return after how long that was."""
    started = time.monotonic()
    pending = list(connections)
    position = 0
    while pending:
        assert time.monotonic() < started + BOUND_S, f"{len(pending)} connections still open"
        for connection in list(pending):
            connection.settimeout(0.01)
            try:
                connection.sendall(data[position % len(data) :][:1])
                closed = connection.recv(4096) == b""
            except TimeoutError:
                closed = False
            except OSError:
                closed = True
            if closed:
                pending.remove(connection)
        position += 1
        time.sleep(0.05)
    return time.monotonic() - started


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[NginxProxy]:
    make_tls(tmp_path / "tls", ["127.0.0.1"], passphrase=b"correct horse")
    with upstream_of(tmp_path / "tls") as upstream, proxy_of(tmp_path, upstream, HASTY) as proxy:
        yield proxy


def promptly(door: NginxProxy) -> int:
    """Post until nginx does not find that slow as well, as it may on a busy machine."""
    statuses = (door.post(more="flwr-signature: swift\r\n") for _ in range(10))
    return next((status for status in statuses if status not in (0, 408)), 0)


@needs_nginx
def test_slow_loris_is_dropped_while_others_are_served(hasty: NginxProxy) -> None:
    with ExitStack() as stack:
        lorises = [stack.enter_context(hasty.connect()) for _ in range(20)]
        for loris in lorises:
            with suppress(OSError):  # dropped already
                loris.sendall(
                    f"POST {FLEET} HTTP/1.1\r\nHost: x\r\nflwr-signature: slow\r\n".encode()
                )
        assert promptly(hasty) == 200
        assert trickle(lorises, b"X-Slow: 1\r\n") < BOUND_S
    # What the upstream was sent before may still come in, without a signature.
    signatures = [headers.get("flwr-signature") for _, _, headers, _ in hasty.upstream.requests]
    assert {signature for signature in signatures if signature} == {"swift"}


@needs_nginx
def test_body_that_stops_midway_is_dropped(hasty: NginxProxy) -> None:
    with hasty.connect() as connection:
        connection.sendall(
            f"POST {FLEET} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf".encode()
        )
        connection.settimeout(BOUND_S)
        assert status_of(connection) in (0, 408)


@needs_nginx
def test_one_address_cannot_take_up_all_requests(door: NginxProxy) -> None:
    with ExitStack() as stack:
        for _ in range(LIMITS.requests):
            connection = stack.enter_context(door.connect())
            connection.sendall(
                f"POST {FLEET} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n".encode()
            )
        # nginx counts a request once it has read its headers, which it does after the connection was accepted.
        wait_until(lambda: door.post() == 429, "nginx to count the unfinished requests")
        assert door.post(source="127.0.0.2") == 200, "another address"


@needs_nginx
def test_refusals_are_logged_without_what_they_carried(door: NginxProxy) -> None:
    for target in (
        f"/v1/control/x?{'s3cret' * 20}",
        "/" + "s3cret" * 20,
        "/v1/control/start-run\x1b[2Js3cret",
    ):
        door.post(
            target,
            body=b"s3cret",
            more="X-Token: s3cret\r\nReferer: s3cret\r\nUser-Agent: s3cret\r\n",
        )
    door.post("/v1/control/start-run")
    door.post()
    wait_until(lambda: " 403 /v1/control/start-run " in door.log, "a line in the log")
    line = next(line for line in door.log.splitlines() if " 403 /v1/control/start-run " in line)
    assert re.fullmatch(r"\S+ 127\.0\.0\.1 403 /v1/control/start-run [0-9]+ bytes [0-9.]+ s", line)
    assert "s3crets3crets3crets3crets3crets3crets3crets3crets3crets3crets3" not in door.log
    assert not any(word in door.log for word in ("X-Token", "Referer", "\x1b", "?s3cret"))
    assert " 200 " not in door.log, (
        "what is served is not logged: silos ask every few seconds for weeks"
    )


@needs_nginx
def test_nothing_is_written_outside_the_federation(door: NginxProxy) -> None:
    text = (door.fed / "flower" / "nginx.conf").read_text()
    paths = re.findall(
        r"^\s*(?:pid|\w+_path|ssl_certificate\w*|proxy_ssl_trusted_certificate) (\S+);", text, re.M
    )
    assert len(paths) == 9 and not [path for path in paths if path.startswith("/")]
    assert {path.name for path in (door.fed / "flower" / "nginx").iterdir()} >= {
        "nginx.pid",
        "body",
        "proxy",
    }


@needs_nginx
def test_configuration_that_nginx_does_not_accept_is_refused(tmp_path: Path) -> None:
    make_tls(tmp_path / "tls", ["127.0.0.1"], passphrase=b"correct horse")
    nginx = find_nginx()
    assert nginx
    with pytest.raises(SetupError, match="no_such_directive"):
        write_config(nginx, tmp_path / "flower", "no_such_directive on;\n")
    with pytest.raises(SetupError, match="bind"):
        write_config(nginx, tmp_path / "flower", render_config("192.0.2.1", 9092, 9093))
    write_config(nginx, tmp_path / "flower", render_config("127.0.0.1", free_port(), 9093))


def test_host_that_is_more_than_a_host_is_refused() -> None:
    for host in ["", "a b", "x; include /etc/passwd", "h{", "$host", "ü.example", "a\nb"]:
        with case(host=host), pytest.raises(SetupError):
            render_config(host, 9092, 9093)


def test_address_of_ipv6_is_written_in_brackets() -> None:
    assert "listen [::1]:9092 ssl;" in render_config("::1", 9092, 9093)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.1", "::1"])
def test_loopback_needs_no_nginx(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "find_nginx", lambda: None)
    assert is_loopback(host) and choose_proxy(host) is None


def test_port_stays_closed_to_a_network_where_nginx_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for host in ["0.0.0.0", "::", "fed.example.org", "127.0.0.1.example.org", "10.0.0.1"]:
        with case(host=host):
            monkeypatch.setattr(proxy, "find_nginx", lambda: None)
            with pytest.raises(MissingFileError, check=has_subject("nginx")) as refused:
                choose_proxy(host)
            assert "nginx" in refused.value.remedy
            monkeypatch.setattr(proxy, "find_nginx", lambda: Path("/usr/sbin/nginx"))
            assert choose_proxy(host) == Path("/usr/sbin/nginx")


def test_server_that_accepts_and_says_nothing_does_not_count_as_answering(tmp_path: Path) -> None:
    make_tls(tmp_path / "tls", ["127.0.0.1"], passphrase=b"correct horse")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not answers(
            "127.0.0.1", silent.getsockname()[1], tmp_path / "tls" / "ca.pem", timeout_s=0.2
        )
    with upstream_of(tmp_path / "tls") as control:
        assert answers("127.0.0.1", control.port, tmp_path / "tls" / "ca.pem")
