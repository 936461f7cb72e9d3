"""Fetches files from web hosts: HTTP within bounds of time, by TLS, with redirects only where they are expected.

The bytes of a file are bounded by the one who reads it (`ddm.fetching.download`). Here

 * a watch ends an exchange in which too few bytes come, from the first packet on: a host that sends one byte now and
   then keeps every time limit of a single read;
 * a redirect is followed at most five times, and only to where the caller expects it: never to another kind of
   address, nor from TLS to plain text;
 * what identifies the reader is sent to the first host alone;
 * nothing is unpacked: bytes are requested as they are.
"""

import re
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from socket import SHUT_RDWR, socket
from types import TracebackType
from typing import NoReturn
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from ddm.errors import AbsentFileError, TransportError
from ddm.fetching.address import DEFAULT_PORTS, is_loopback, origin, url_problem
from ddm.fetching.hosts import CHUNK_BYTES, FetchLimits, InterruptedTransfer, SentFile

MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
# Some hosts of static files say "forbidden" of a file that is not there.
_ABSENT = (403, 404, 410)
_TEMPORARY = (408, 425, 429, 500, 502, 503, 504)
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)")


def is_same_origin(first_url: str, next_url: str) -> bool:
    """Whether two addresses are of one host and port, by the same protocol."""
    return origin(first_url) == origin(next_url)


@dataclass(frozen=True)
class WebRequest:
    """What is asked for.

    Attributes:
        url: in which `url_problem` finds nothing wrong.
        start: the number of the first byte that is wanted.
        headers: sent to the host of `url` alone, since they may say who the reader is.
        may_redirect: whether the first of two addresses may lead to the second.
        see_headers: called with the header fields of every answer of the host of `url`.
    """

    url: str
    start: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    may_redirect: Callable[[str, str], bool] = is_same_origin
    see_headers: Callable[[Mapping[str, str]], None] = lambda headers: None


@dataclass(frozen=True)
class WebHost:
    """A host that serves a release as static files."""

    url: str
    limits: FetchLimits = FetchLimits()

    def __str__(self) -> str:
        return self.url

    @contextmanager
    def open(self, path: str, start: int) -> Iterator[SentFile]:
        """See `ddm.fetching.hosts.Host`."""
        with open_url(WebRequest(f"{self.url}/{path}", start), self.limits) as sent:
            yield sent


@contextmanager
def open_url(request: WebRequest, limits: FetchLimits) -> Iterator[SentFile]:
    """Ask for a file, follow redirects, and yield what comes.

    Raises:
        AbsentFileError: the host has no such file.
        TransportError: the host refuses, is not who its name says, or leads where it must not.
        InterruptedTransfer: it does not answer, or not to the end.
    """
    url = request.url
    for _ in range(MAX_REDIRECTS + 1):
        headers = {
            "User-Agent": "archipelago",
            # A packed answer could unpack to any length.
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        if request.start > 0:
            headers["Range"] = f"bytes={request.start}-"
        is_first_host = is_same_origin(url, request.url)
        if is_first_host:
            headers.update(request.headers)
        with Exchange(url, headers, limits) as exchange:
            response = exchange.response
            if is_first_host:
                request.see_headers({name.lower(): value for name, value in response.getheaders()})
            if response.status not in _REDIRECTS:
                yield _sent_file(exchange, request.start)
                return
            url = _next_url(url, response, request)
    raise TransportError(
        request.url,
        expected=f"the file after at most {MAX_REDIRECTS} redirects",
        got=f"{MAX_REDIRECTS + 1} redirects",
        remedy="The host redirects in a circle. Ask its operator for the address of the release.",
    )


def _next_url(url: str, response: HTTPResponse, request: WebRequest) -> str:
    """Return where a redirect leads, if it may."""
    location = response.getheader("Location") or ""
    try:
        next_url = urljoin(url, location)
    except ValueError:
        # It is not an address at all, which is said below.
        next_url = location
    got = url_problem(next_url)
    if got is None and not request.may_redirect(url, next_url):
        scheme, host, port = origin(next_url)
        got = f"{scheme}://{host}:{port}"
    if got is not None:
        # What the host sent is repeated as ASCII alone.
        raise TransportError(
            url,
            expected="the file, or a redirect within the same host",
            got=f"a redirect to {ascii(got)[1:-1][:200]}",
            remedy="If the release has moved there, give that address; otherwise do not use this one.",
        )
    return next_url


def _sent_file(exchange: "Exchange", start: int) -> SentFile:
    """Return the file in an answer that is not a redirect."""
    response = exchange.response
    status = response.status
    if status == 200:
        return SentFile(0, response.length, exchange.chunks())
    if status == 206:
        content_range = _CONTENT_RANGE.fullmatch(response.getheader("Content-Range") or "")
        if content_range is None or int(content_range[1]) != start:
            raise TransportError(
                exchange.url,
                expected=f"the file from byte {start} on",
                got="another part of it, or one that the host does not name",
                remedy="The host does not serve parts of files as HTTP requires. Fetch from another one.",
            )
        total_bytes = None
        if content_range[2] != "*":
            total_bytes = int(content_range[2])
        return SentFile(start, total_bytes, exchange.chunks())
    if status == 416:
        # The host's file ends before `start`.
        return SentFile(start, start, iter(()))
    _refuse_status(exchange.url, status)


def _refuse_status(url: str, status: int) -> NoReturn:
    got = f"HTTP status {status}"
    if status in _TEMPORARY:
        raise InterruptedTransfer(got)
    if status in _ABSENT:
        raise AbsentFileError(
            url,
            expected="a file of the release",
            got=got,
            remedy="Check the address: it is that of the folder that holds metadata/ and targets/.",
        )
    remedy = "Check the address, or ask the operator of this host."
    if status == 401:
        remedy = (
            "Check the address. If it is of a private repository of the Hub, log in with `hf auth login` "
            "or set HF_TOKEN; other hosts must serve the release to everyone who has the address."
        )
    raise TransportError(url, expected="a file of the release", got=got, remedy=remedy)


class _Connection(HTTPConnection):
    """A connection to a host, over TLS unless on loopback, through the proxy that the environment names."""

    def __init__(self, parts: SplitResult, timeout_s: float) -> None:
        self._server = parts.hostname or ""
        port = parts.port or DEFAULT_PORTS[parts.scheme]
        # A usual port is left out of the field `Host`, which signatures of storage services cover.
        self.default_port = DEFAULT_PORTS[parts.scheme]
        # The certificates that the machine trusts, or those in the file that SSL_CERT_FILE names.
        self._tls = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
        # Shut down by the watch: a copy, since TLS takes the socket itself over.
        self.watched: socket | None = None
        proxy = _proxy_for(parts)
        if proxy is None:
            super().__init__(self._server, port, timeout=timeout_s)
        else:
            super().__init__(proxy.hostname or "", proxy.port or 80, timeout=timeout_s)
            self.set_tunnel(self._server, port, _proxy_headers(proxy))

    def connect(self) -> None:
        super().connect()
        self.watched = self.sock.dup()
        if self._tls is not None:
            self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._server)


def _proxy_for(parts: SplitResult) -> SplitResult | None:
    """Return the proxy that the environment names for a host, such as in `https_proxy`."""
    host = parts.hostname or ""
    text = getproxies().get(parts.scheme, "")
    if not text or is_loopback(parts) or proxy_bypass(host):
        return None
    if "://" not in text:
        text = f"http://{text}"
    return urlsplit(text)


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    credentials = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(credentials.encode()).decode()}"}


class Exchange:
    """One request and its answer, under a watch.

    Args:
        url: what is asked for.
        headers: the header fields.
        limits: how long the host may take.
        body: sent by POST; None for GET.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str], limits: FetchLimits, body: bytes | None = None
    ) -> None:
        self.url = url
        self._body = body
        self._headers = headers
        self._limits = limits
        self._connection = _Connection(urlsplit(url), limits.window_s)
        self._response: HTTPResponse | None = None
        self._num_bytes_in_window = 0
        self._is_too_slow = False
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._watch_rate, daemon=True)

    def __enter__(self) -> "Exchange":
        self._watch.start()
        try:
            parts = urlsplit(self.url)
            target = parts.path or "/"
            if parts.query:
                target = f"{target}?{parts.query}"
            method = "GET" if self._body is None else "POST"
            self._connection.request(method, target, self._body, self._headers)
            self._response = self._connection.getresponse()
        except BaseException as error:
            self._end()
            if isinstance(error, OSError | HTTPException | ValueError):
                self._raise_interrupted(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def response(self) -> HTTPResponse:
        """The answer, whose status and header fields have come."""
        if self._response is None:
            raise InterruptedTransfer("no answer")
        return self._response

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the answer as they come."""
        response = self.response
        while True:
            try:
                # As soon as any are there: `read` would wait until all of these have come.
                data = response.read1(CHUNK_BYTES)
            except (OSError, HTTPException, ValueError) as error:
                self._raise_interrupted(error)
            self._num_bytes_in_window += len(data)
            if self._is_too_slow:
                self._raise_interrupted(None)
            if not data:
                return
            yield data

    def _watch_rate(self) -> None:
        limits = self._limits
        while not self._is_over.wait(limits.window_s):
            if self._num_bytes_in_window < limits.window_bytes:
                self._is_too_slow = True
                watched = self._connection.watched
                if watched is not None:
                    # The other thread, which waits for the next bytes, finds that none will come.
                    with suppress(OSError):
                        watched.shutdown(SHUT_RDWR)
                return
            self._num_bytes_in_window = 0

    def _end(self) -> None:
        self._is_over.set()
        self._watch.join()
        # `getresponse` closes its own side of the connection already, and leaves the answer to the one who reads it.
        if self._response is not None:
            self._response.close()
        self._connection.close()
        if self._connection.watched is not None:
            self._connection.watched.close()

    def _raise_interrupted(self, error: Exception | None) -> NoReturn:
        limits = self._limits
        if self._is_too_slow:
            rate = f"fewer than {limits.window_bytes} bytes in {limits.window_s:g} seconds"
            raise InterruptedTransfer(rate) from error
        if isinstance(error, ssl.SSLCertVerificationError):
            # Tried again it would be the same; and anybody who reads on would talk to a stranger.
            raise TransportError(
                self.url,
                expected="a host whose certificate proves its name",
                got=f"a certificate that does not: {error.verify_message}"[:200],
                remedy="Check the address. If your organisation has a certificate authority of its own, name the file "
                "with its certificate in the environment variable SSL_CERT_FILE.",
            ) from error
        raise InterruptedTransfer(_reason(error)) from error


def _reason(error: Exception | None) -> str:
    """Return what went wrong, without the text of an answer that cannot be read."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError):
        return ascii(error.strerror or str(error) or type(error).__name__)[1:-1][:200]
    return f"an answer that is not HTTP ({type(error).__name__})"
