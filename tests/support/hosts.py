"""Hosts of releases on loopback: a plain web server, honest or not, over TLS too, that counts what it sends."""

import datetime
import ipaddress
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

SENT_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Request:
    """What was asked for: the path, the first byte, and the header fields by their names in lower case."""

    path: str
    start: int
    headers: dict[str, str]


Answer = Callable[["HostHandler"], None]


@dataclass
class HostState:
    """What a host serves, and what it did.

    Attributes:
        folder: served as it is.
        answers: what is done for a path in place of serving it.
        requests: in their order.
        num_bytes: sent as bodies.
        over: set when the host ends; a stalling answer waits for it.
    """

    folder: Path
    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    num_bytes: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def paths(self) -> list[str]:
        """The paths that were asked for, in their order."""
        return [request.path for request in self.requests]


class HostHandler(BaseHTTPRequestHandler):
    """Serves files, from any byte on."""

    protocol_version = "HTTP/1.1"
    state: HostState

    def do_GET(self) -> None:
        self.request_seen()
        answer = self.state.answers.get(self.path)
        try:
            if answer is not None:
                answer(self)
            else:
                self.send_file(self.state.folder / self.path.lstrip("/"))
        except OSError:
            self.close_connection = True

    def request_seen(self) -> Request:
        start = 0
        if "Range" in self.headers:
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.path, start, headers)
        self.state.requests.append(request)
        return request

    def send_file(self, path: Path, **headers: str) -> None:
        """Send a file from the byte on that was asked for."""
        if not path.is_file():
            self.send_head(404, 0)
            return
        self.send_data(path.read_bytes(), **headers)

    def send_data(self, data: bytes, **headers: str) -> None:
        """Send bytes from the one on that was asked for."""
        start = self.state.requests[-1].start
        if start >= len(data) > 0:
            self.send_head(416, 0)
            return
        status = 200
        if start:
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.send_head(status, len(data) - start, **headers)
        self.send_body(data[start:])

    def send_head(self, status: int, length: int | None, **headers: str) -> None:
        """Send a status and header fields; underscores in their names stand for hyphens."""
        self.send_response(status)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()

    def send_body(self, data: bytes) -> None:
        """Count a part of a body, and send it: a caller that received it finds it counted."""
        for begin in range(0, len(data), SENT_AT_ONCE):
            piece = data[begin : begin + SENT_AT_ONCE]
            self.state.num_bytes += len(piece)
            self.wfile.write(piece)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *arguments: object) -> None:
        """Say nothing of clients that left, as those do that refuse."""


@contextmanager
def serve(
    handler: type[HostHandler], state: HostState, tls: ssl.SSLContext | None = None
) -> Iterator[str]:
    """Serve on a free port of loopback; yield the address."""
    bound = type("BoundHandler", (handler,), {"state": state})
    with _QuietServer(("127.0.0.1", 0), bound) as server:
        scheme = "http"
        if tls is not None:
            scheme = "https"
            server.socket = tls.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"{scheme}://127.0.0.1:{server.server_address[1]}"
        finally:
            state.over.set()
            server.shutdown()
            thread.join()


def endless(handler: HostHandler) -> None:
    """Send a file that never ends and has no stated length."""
    handler.send_head(200, None)
    while not handler.state.over.is_set():
        handler.send_body(b" " * SENT_AT_ONCE)


def silent(handler: HostHandler) -> None:
    """Send one byte, and then nothing."""
    handler.send_head(200, None)
    handler.send_body(b" ")
    handler.state.over.wait()


def trickling(pause_s: float) -> Answer:
    """Send one byte now and then, faster than any limit of a single read."""

    def trickle(handler: HostHandler) -> None:
        handler.send_head(200, None)
        while not handler.state.over.wait(pause_s):
            handler.send_body(b" ")

    return trickle


def trickling_headers(pause_s: float) -> Answer:
    """Send header fields without end, a letter now and then."""

    def trickle(handler: HostHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        while not handler.state.over.wait(pause_s):
            handler.wfile.write(b"a")

    return trickle


def redirecting(location: str, status: int = 302) -> Answer:
    """Lead elsewhere."""
    return lambda handler: handler.send_head(status, 0, Location=location)


def replacing(data: bytes) -> Answer:
    """Send other bytes."""
    return lambda handler: handler.send_data(data)


def breaking_off(path: Path, num_bytes: int) -> Answer:
    """Promise the whole file from the byte on that was asked for, and end after so many bytes of it."""

    def break_off(handler: HostHandler) -> None:
        data = path.read_bytes()
        start = handler.state.requests[-1].start
        status = 200
        headers = {}
        if start:
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        handler.send_head(status, len(data) - start, **headers)
        handler.send_body(data[start : start + num_bytes])

    return break_off


@dataclass(frozen=True)
class TestAuthority:
    """A certificate authority of a test, and a host's key with a certificate of it for 127.0.0.1.

    Attributes:
        ca: the authority's certificate, as SSL_CERT_FILE names it.
        server: TLS of a host.
    """

    __test__ = False

    ca: Path
    server: ssl.SSLContext

    @classmethod
    def make(cls, folder: Path) -> "TestAuthority":
        """Make an authority, and a certificate for loopback."""
        ca_key = ec.generate_private_key(ec.SECP256R1())
        ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of a test")])
        ca = _certificate(ca_name, ca_name, ca_key, ca_key, is_authority=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "host of a test")])
        certificate = _certificate(name, ca_name, key, ca_key, is_authority=False)
        pem = serialization.Encoding.PEM
        (folder / "ca.pem").write_bytes(ca.public_bytes(pem))
        (folder / "host.pem").write_bytes(
            certificate.public_bytes(pem)
            + key.private_bytes(
                pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "host.pem")
        return cls(folder / "ca.pem", context)


def _certificate(
    name: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .sign(issuer_key, hashes.SHA256())
    )


def seconds_of(work: Callable[[], object]) -> float:
    """How long a call takes."""
    begin = time.monotonic()
    work()
    return time.monotonic() - begin
