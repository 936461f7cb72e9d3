"""A page to watch a federation: read only, on loopback, drawn on this side, alive without a script.

Nothing can be changed through it and nothing secret is on it, yet it names silos and why they were refused: whoever
reaches it sees them. So it listens on loopback unless told otherwise. Another website's page cannot read it either:
one whose name leads to this machine (DNS rebinding) shows in the Host header and is refused.
"""

import asyncio
import ipaddress
import socket
import threading
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from importlib.resources import files
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from aggregator.config import Federation
from aggregator.monitoring.labels import page_values
from aggregator.monitoring.status import FederationStatus, gather
from aggregator.pages.render import render
from ddm.errors import ArchipelagoError, BusyError, PolicyError, SetupError
from ddm.protocol.base import now_utc
from ddm.system.console import say

REFRESH_S = 5
# Rates are over this long: shards come seconds apart.
_RATE_OVER = timedelta(seconds=30)
_MAX_CONNECTIONS = 32
_CONNECTION_S = 10.0
_MAX_HEAD_BYTES = 8192
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
    "Connection": "close",
}


def parse_address(text: str, *, expose: bool) -> tuple[str, int]:
    """Read where to listen.

    Args:
        text: HOST:PORT, HOST an IP address or `localhost`; port 0 is any free one.
        expose: whether an address that others may reach is meant.

    Raises:
        SetupError: not of that form.
        PolicyError: an address that others may reach, and nobody said that it is meant.
    """
    host, _, port = text.rpartition(":")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
        number = int(port)
        if not 0 <= number < 65536:
            raise ValueError("no port")
    except ValueError as error:
        wanted = "HOST:PORT with an IP address or localhost, for example 127.0.0.1:8765"
        raise SetupError("--address", expected=wanted, got=repr(text[:100])) from error
    if not (address.is_loopback or expose):
        raise PolicyError(
            f"address {address}",
            expected="a loopback address, or --expose",
            got="an address that others may reach",
            remedy="Better, from your own machine: ssh -L 8765:127.0.0.1:8765 and this one. The page asks no password.",
        )
    return str(address), number


def serve(federation: Federation, host: str, port: int) -> None:
    """Serve the page until a signal comes.

    Raises:
        BusyError: the port is taken.
        KeyboardInterrupt: Ctrl-C or SIGTERM.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise BusyError(f"port {port} on {host}", expected="a free port", got=str(error.strerror)) from error
    with listener:
        shown = f"[{host}]" if ":" in host else host
        say(f"Live page: http://{shown}:{listener.getsockname()[1]}/ (Ctrl-C ends it)")
        config = uvicorn.Config(
            make_app(federation),
            http=BriefProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            limit_concurrency=_MAX_CONNECTIONS,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
            timeout_graceful_shutdown=1,
        )
        uvicorn.Server(config).run(sockets=[listener])


class BriefProtocol(H11Protocol):
    """HTTP/1.1 on connections that live for some seconds at most, so that slow readers and writers hold none."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the connection and set its end."""
        super().connection_made(transport)
        self.loop.call_later(_CONNECTION_S, transport.abort)


def make_app(federation: Federation) -> Starlette:
    """Make the application: the page, its style, and the same facts as JSON."""
    watch = Watch(federation)
    style = files("aggregator").joinpath("pages/templates/live.css").read_text("utf-8")

    def page(request: Request) -> Response:
        paused = "paused" in request.query_params
        values: Mapping[str, Any] = page_values(watch.look())
        html = render("live.html.jinja", refresh_s=REFRESH_S, paused=paused, **values)
        return Response(html, media_type="text/html", headers={} if paused else {"Refresh": f"{REFRESH_S}"})

    def facts(request: Request) -> Response:
        return Response(watch.look().model_dump_json(), media_type="application/json")

    def look(request: Request) -> Response:
        return Response(style, media_type="text/css")

    def unreadable(request: Request, error: Exception) -> Response:
        text = f"The federation cannot be read now: {error}\n"
        return PlainTextResponse(text, status_code=503, headers={"Refresh": f"{REFRESH_S}"})

    return Starlette(
        routes=[Route("/", page), Route("/status.json", facts), Route("/live.css", look)],
        middleware=[Middleware(Doorkeeper)],
        exception_handlers={ArchipelagoError: unreadable, OSError: unreadable},
    )


class Watch:
    """Looks at the federation for one reader after the other, and remembers for as long as rates need."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._seen: deque[FederationStatus] = deque()
        self._lock = threading.Lock()

    def look(self) -> FederationStatus:
        """Return the present status."""
        with self._lock:
            now = now_utc()
            while self._seen and not timedelta(0) <= now - self._seen[0].at <= _RATE_OVER:
                self._seen.popleft()
            status = gather(self._federation, now, self._seen[0] if self._seen else None)
            if not self._seen or self._seen[-1].at < now:
                self._seen.append(status)
            return status


class Doorkeeper:
    """Refuses a Host that is a name other than localhost, and gives every answer its headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answer: ASGIApp = self._app
        if not _is_own(Headers(scope=scope).getlist("host")):
            answer = PlainTextResponse("This page answers to its address, not to a name.\n", status_code=421)
        await answer(scope, receive, send_with_headers)


def _is_own(hosts: list[str]) -> bool:
    """Whether the one Host is an address or localhost: a browser that was led here by a name says that name."""
    if len(hosts) != 1:
        return False
    host, _, port = hosts[0].rpartition(":") if not hosts[0].endswith("]") else (hosts[0], "", "")
    host = host or port
    if host == "localhost":
        return True
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
