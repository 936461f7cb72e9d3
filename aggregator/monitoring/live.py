"""Serves a live page about a federation: read-only, on loopback, rendered by the server, refreshed without a script.

The page changes nothing and shows no secret, but it names silos and why they were refused to anybody who can reach it.
So it listens on loopback unless `--expose` says otherwise. Other websites cannot read it either: a name that resolves
to this machine (DNS rebinding) shows in the Host header and is refused.
"""

import ipaddress
import threading
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from aggregator.config import Federation
from aggregator.monitoring.labels import page_values
from aggregator.monitoring.prometheus import CONTENT_TYPE, prometheus_text
from aggregator.monitoring.status import FederationStatus, read_status
from ddm.errors import ArchipelagoError, SetupError
from ddm.pages.render import render
from ddm.pages.serving import (
    HostFilter,
    check_exposure,
    listening,
    run_server,
    server_of,
)
from ddm.protocol.base import now_utc

REFRESH_S = 5
# Rates are averages over this time: shards arrive seconds apart.
_RATE_OVER = timedelta(seconds=30)
_CONTENT = "style-src 'self'; img-src data:"


def parse_address(text: str, *, expose: bool) -> tuple[str, int]:
    """Parse the address on which to listen.

    Args:
        text: HOST:PORT, HOST an IP address or `localhost`; port 0 is any free port.
        expose: whether an address that others can reach is allowed.

    Raises:
        SetupError: not of that form.
        PolicyError: an address that others can reach, without `expose`.
    """
    host, _, port = text.rpartition(":")
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
        number = int(port)
        if not 0 <= number < 65536:
            raise ValueError("no port")
    except ValueError as error:
        expected = "HOST:PORT with an IP address or localhost, for example 127.0.0.1:8765"
        raise SetupError("--address", expected=expected, got=ascii(text[:100])) from error
    check_exposure(
        address,
        expose=expose,
        remedy="Better forward the port over SSH: ssh -L 8765:127.0.0.1:8765 HOST. The page asks for no password.",
    )
    return str(address), number


def serve(
    federation: Federation, host: str, port: int, on_listening: Callable[[str], None]
) -> None:
    """Serve the page until a signal stops it.

    Args:
        federation: the operator's folder.
        host: the address to listen on.
        port: the port; 0 for any free one.
        on_listening: called with the page's URL.

    Raises:
        BusyError: the port is taken.
        KeyboardInterrupt: Ctrl-C or SIGTERM.
    """
    with listening(host, port) as (listener, url):
        on_listening(url)
        run_server(server_of(make_app(federation)), listener)


def make_app(federation: Federation) -> Starlette:
    """Make the application: the page, its style sheet, and the same status as JSON."""
    reader = StatusReader(federation)
    style = files("ddm").joinpath("pages/templates/live.css").read_text("utf-8")

    def show_page(request: Request) -> Response:
        paused = "paused" in request.query_params
        show_all = "all" in request.query_params
        values: Mapping[str, Any] = page_values(reader.read(), show_all=show_all)
        html = render("aggregator", "live.html.jinja", refresh_s=REFRESH_S, paused=paused, **values)
        headers = {}
        if not paused:
            # The browser itself loads the page again: its policy allows no script.
            headers["Refresh"] = f"{REFRESH_S}"
        return Response(html, media_type="text/html", headers=headers)

    def show_json(request: Request) -> Response:
        return Response(reader.read().model_dump_json(), media_type="application/json")

    def show_metrics(request: Request) -> Response:
        return Response(prometheus_text(reader.read()), media_type=CONTENT_TYPE)

    def show_style(request: Request) -> Response:
        return Response(style, media_type="text/css")

    def unreadable(request: Request, error: Exception) -> Response:
        text = f"The federation cannot be read now: {error}\n"
        return PlainTextResponse(text, status_code=503, headers={"Refresh": f"{REFRESH_S}"})

    return Starlette(
        routes=[
            Route("/", show_page),
            Route("/status.json", show_json),
            Route("/metrics", show_metrics),
            Route("/live.css", show_style),
        ],
        middleware=[Middleware(HostFilter, content=_CONTENT)],
        exception_handlers={ArchipelagoError: unreadable, OSError: unreadable},
    )


class StatusReader:
    """Reads the federation's status for one request at a time, and keeps earlier ones to compute rates."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._earlier: deque[FederationStatus] = deque()
        self._lock = threading.Lock()

    def read(self) -> FederationStatus:
        """Return the present status."""
        # Starlette answers requests in threads, and two pages may be open.
        with self._lock:
            now = now_utc()
            # A clock that was set back makes an earlier status one of the future, which no rate can be taken from.
            while self._earlier and not timedelta(0) <= now - self._earlier[0].at <= _RATE_OVER:
                self._earlier.popleft()
            earliest = self._earlier[0] if self._earlier else None
            status = read_status(self._federation, now, earliest)
            # Times are whole seconds, and no rate can be computed from two statuses of the same one.
            if not self._earlier or self._earlier[-1].at < now:
                self._earlier.append(status)
            return status
