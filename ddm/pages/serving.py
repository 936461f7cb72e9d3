"""Serves a page of this machine's own to a browser on it: bounded connections, and no website or frame gets at it.

Other websites cannot read such a page: a name that resolves to this machine (DNS rebinding) shows in the Host header
and is refused, answers allow no other origin, and nothing of them is kept in a cache.
"""

import asyncio
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ddm.errors import BusyError, PolicyError
from ddm.system.peers import users_at, written

# The kernel's table is read in pieces. Where connections come and go meanwhile, one that lasts may be missing in it.
_MAX_LOOKS = 5
_MAX_HEAD_BYTES = 8192
# No other site can frame the page, embed its answers or learn its address, and the browser stores none of them.
_HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
    "Connection": "close",
}
_POLICY = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@dataclass(frozen=True)
class ConnectionLimits:
    """The resources that clients of a server may use; the defaults suit a page for one browser with six connections.

    Attributes:
        connection_s: most seconds of one connection.
        head_s: most seconds until a request's head is there; a browser on this machine sends it in milliseconds.
        stall_s: most seconds during which a client takes nothing of an answer.
        max_connections: most connections of all clients together.
        max_of_one_peer: most connections of one user or address other than this process's own user.
        max_of_peers: most connections of all of these together.
        stop_s: most seconds for which a server that ends waits for its connections; None waits until they end.
    """

    connection_s: float = 10.0
    head_s: float = 3.0
    stall_s: float = 10.0
    max_connections: int = 32
    max_of_one_peer: int = 8
    max_of_peers: int = 16
    stop_s: int | None = 1


PAGE_LIMITS = ConnectionLimits()


def check_exposure(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, *, expose: bool, remedy: str
) -> None:
    """Refuse an address that other machines can reach, unless the operator allows it.

    Args:
        address: the address to listen on.
        expose: whether the operator gave --expose.
        remedy: what to do instead.

    Raises:
        PolicyError: others can reach it.
    """
    if address.is_loopback or expose:
        return
    raise PolicyError(
        f"address {address}",
        expected="a loopback address, or --expose",
        got="an address that others can reach",
        remedy=remedy,
    )


@contextmanager
def listening(host: str, port: int) -> "Iterator[tuple[socket.socket, str]]":
    """Listen on an address; yield the socket, and the URL at which a browser finds it.

    Args:
        host: an IP address.
        port: 0 for any free one.

    Raises:
        BusyError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise BusyError(
            f"port {port} on {host}", expected="a free port", got=str(error.strerror)
        ) from error
    with listener:
        port = listener.getsockname()[1]
        url_host = f"[{host}]" if ":" in host else host
        yield listener, f"http://{url_host}:{port}/"


def server_of(
    app: ASGIApp,
    limits: ConnectionLimits = PAGE_LIMITS,
    on_stop: Callable[[], None] = lambda: None,
) -> uvicorn.Server:
    """Return a server for `run_server`; its `should_exit` ends it.

    Args:
        app: answers requests.
        limits: the resources that clients may use.
        on_stop: called when the server begins to end, before it waits for its connections.
    """
    config = uvicorn.Config(
        app,
        # uvicorn makes the protocol itself, so that the limits are attributes of a class.
        http=type(
            "LimitedProtocol",
            (BriefProtocol,),
            {"limits": limits, "places": PlacesForPeers(limits)},
        ),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        limit_concurrency=limits.max_connections,
        # All connections that wait are accepted in one turn of the loop. Another user who opens and closes them without
        # end would fill a longer queue, and the own user's requests would wait behind it at each turn.
        backlog=limits.max_connections,
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        timeout_graceful_shutdown=limits.stop_s,
    )
    return _Server(config, on_stop)


class _Server(uvicorn.Server):
    """See `server_of`."""

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait until all requests are answered, and end."""
        self._on_stop()
        await super().shutdown(sockets)


def run_server(server: uvicorn.Server, listener: socket.socket) -> None:
    """Answer every client until the server ends.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM, however early.
    """
    serving = server.serve(sockets=[listener])
    try:
        asyncio.run(serving)
    finally:
        # Where Ctrl-C came before the server began, Python would warn of a coroutine that never ran.
        serving.close()


class PlacesForPeers:
    """Counts the connections of others than this process's own user, so that nobody keeps the user from the page.

    The attack: another user of the machine opens connections, sends nothing on them, and the server answers everybody
    else that it is busy. Others are not refused altogether, since the page may be read through an SSH tunnel, whose end
    on this machine is a process of the one who logged in; the page's secret address is what keeps others out.
    """

    def __init__(self, limits: ConnectionLimits = PAGE_LIMITS) -> None:
        self._limits = limits
        self._num_by_peer: Counter[str] = Counter()
        self._users: dict[str, int | None] | None = None

    def users_of(
        self, server: tuple[str, int], loop: asyncio.AbstractEventLoop
    ) -> dict[str, int | None]:
        """Return the users of this machine who have the other ends of connections, by the client's address.

        All connections that are accepted in one turn of the loop take one look at the kernel's table: with one look for
        each, anybody who opens connections one after another would keep the server busy. The next turn looks again,
        since another user may have the same address by then.
        """
        if self._users is None:
            self._users = users_at(server)
            loop.call_soon(self._forget_users)
        return self._users

    def _forget_users(self) -> None:
        self._users = None

    def take(self, peer: str) -> bool:
        """Return whether there was a place for one more connection of a peer, and count it if so."""
        if self._num_by_peer[peer] >= self._limits.max_of_one_peer:
            return False
        if self._num_by_peer.total() >= self._limits.max_of_peers:
            return False
        self._num_by_peer[peer] += 1
        return True

    def free(self, peer: str) -> None:
        """Count one connection less."""
        self._num_by_peer[peer] -= 1
        if self._num_by_peer[peer] == 0:
            del self._num_by_peer[peer]


class BriefProtocol(H11Protocol):
    """HTTP/1.1 with limits on each connection, so that slow or many clients cannot keep others from the page.

    Attributes:
        limits: the limits of this server.
        places: counts the connections of this server.
    """

    limits = PAGE_LIMITS
    places = PlacesForPeers()
    # Which peer this connection has a place for; None for the own user's.
    _peer: str | None = None
    _is_watched = False
    _has_resumed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or end it if its peer has too many, and schedule its end."""
        super().connection_made(transport)
        self._admit(transport, looks_left=_MAX_LOOKS - 1)

    def _admit(self, transport: asyncio.Transport, looks_left: int) -> None:
        client = transport.get_extra_info("peername")
        server = transport.get_extra_info("sockname")
        # A connection that was closed at once has no addresses any more.
        if transport.is_closing() or not client or not server:
            transport.abort()
            return
        users = self.places.users_of((server[0], server[1]), self.loop)
        user = users.get(written(client[0], client[1]))
        if user is None and looks_left > 0:
            # It may have been accepted after this turn's look at the table, or that look may have missed it.
            self.loop.call_soon(self._admit, transport, looks_left - 1)
            return
        if user != os.geteuid():
            peer = f"address {client[0]}" if user is None else f"user {user}"
            if not self.places.take(peer):
                # Not counted until its end either: who opens connections faster than they end would fill the server.
                self.connections.discard(self)
                transport.abort()
                return
            self._peer = peer
        self.loop.call_later(self.limits.head_s, self._abort_without_request, transport)
        self.loop.call_later(self.limits.connection_s, transport.abort)

    def pause_writing(self) -> None:
        """Hold the rest of the answer back, and watch whether the client takes what it has."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Go on with the answer."""
        super().resume_writing()
        self._has_resumed = True

    def on_response_complete(self) -> None:
        """Watch whether the client takes the last piece of its answer."""
        super().on_response_complete()
        self._watch_reader()

    def _watch_reader(self, unsent_bytes: int | None = None) -> None:
        """End the connection when the client takes nothing for some time; one that reads slowly may continue."""
        if self._is_watched and unsent_bytes is None:
            return
        now_unsent_bytes = self.transport.get_write_buffer_size()
        self._is_watched = now_unsent_bytes > 0
        if not self._is_watched:
            return
        # What was taken may have been followed by as much: then writing was resumed in between.
        if unsent_bytes is not None and now_unsent_bytes >= unsent_bytes and not self._has_resumed:
            self.transport.abort()
            return
        self._has_resumed = False
        self.loop.call_later(self.limits.stall_s, self._watch_reader, now_unsent_bytes)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the connection's place to others."""
        super().connection_lost(exc)
        if self._peer is not None:
            self.places.free(self._peer)
            self._peer = None

    def _abort_without_request(self, transport: asyncio.Transport) -> None:
        # uvicorn makes the cycle of request and answer once it has all headers.
        if self.cycle is None:
            transport.abort()


class HostFilter:
    """Refuses a Host header with a name other than localhost, and adds the security headers to every response.

    Args:
        app: answers the others.
        content: what the page may load, in the words of a Content-Security-Policy.
        own: whether a host, without its port, is this server; by default any IP address and localhost.
    """

    def __init__(
        self, app: ASGIApp, content: str, own: Callable[[str], bool] | None = None
    ) -> None:
        self._app = app
        self._own = own or _is_address
        self._headers = {
            # Nothing loads or runs but what is listed, even if text that a silo sent got past the template's escaping.
            "Content-Security-Policy": f"default-src 'none'; {content}; {_POLICY}",
            **_HEADERS,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        app: ASGIApp = self._app
        hosts = Headers(scope=scope).getlist("host")
        # DNS rebinding: a website's own name resolves to this machine, and its browser sends that name.
        if len(hosts) != 1 or not self._own(_without_port(hosts[0])):
            text = "Open this page by its IP address or localhost, not by another name.\n"
            app = PlainTextResponse(text, status_code=421)
        await app(scope, receive, send_with_headers)


def _without_port(host: str) -> str:
    # An IPv6 address without a port, as in "[::1]", ends with a bracket and contains colons itself.
    if host.endswith("]"):
        return host
    name, _, port = host.rpartition(":")
    return name or port


def _is_address(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
