"""A page for one person at this machine: its address holds a random token, and only the page itself changes anything.

It listens on loopback, at a free port. No other user of the machine knows the token, or takes up more than some of the
connections; a request that changes anything must come from the page itself, by its Origin. Nothing is kept in a cache.
"""

import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ddm.errors import ArchipelagoError
from ddm.pages.serving import (
    PAGE_LIMITS,
    ConnectionLimits,
    HostFilter,
    listening,
    run_server,
    server_of,
)

Handler = Callable[[Request], Awaitable[Response]]
Routes = Callable[[Callable[[], None]], tuple[Sequence[Route], Mapping[str, Handler]]]
"""Called with what ends the server; returns what is read, and what changes something, each by its name."""

_HOST = "127.0.0.1"
_MAX_BODY_BYTES = 1 << 16
_CONTENT = "script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"


def serve_private_page(
    make_routes: Routes,
    on_listening: Callable[[str], None],
    limits: ConnectionLimits = PAGE_LIMITS,
) -> None:
    """Serve a page until its own code ends it.

    Args:
        make_routes: what it answers; a change is sent as JSON, by POST.
        on_listening: called with the page's address, which is a secret.
        limits: the resources that clients may use.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM.
    """
    # 192 bits. Other users of this machine can reach the port as well, and would have to guess them.
    token = secrets.token_urlsafe(24)
    with listening(_HOST, 0) as (listener, url):
        servers: list[uvicorn.Server] = []

        def end() -> None:
            servers[0].should_exit = True

        routes, changes = make_routes(end)
        servers.append(server_of(_app(routes, changes, url.rstrip("/"), token), limits))
        on_listening(f"{url}{token}/")
        run_server(servers[0], listener)


def static_routes(contents: Mapping[str, tuple[str, str, str]]) -> list[Route]:
    """Return what serves files of packages.

    Args:
        contents: package, path in it and media type of each, by its name; the page itself is called ``""``.
    """
    responses = {}
    for name, (package, path, media_type) in contents.items():
        responses[name] = (files(package).joinpath(path).read_bytes(), media_type)

    async def answer_static(request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        content, media_type = responses[name]
        return Response(content, media_type=media_type)

    return [Route(f"/{name}", answer_static) for name in responses]


def json_response(content: Mapping[str, Any]) -> Response:
    """Return JSON in ASCII, as names of files may be of any bytes."""
    return Response(json.dumps(content).encode("ascii"), media_type="application/json")


async def body_of(request: Request) -> bytes:
    """Return what was sent.

    Raises:
        HTTPException: it is too much.
    """
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise HTTPException(413, f"The request has more than {_MAX_BODY_BYTES} bytes.")
    return body


class TokenFilter:
    """Answers only requests below a secret path, and removes that path from them."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        _, token, *rest = f"{scope['path']}".split("/", 2)
        # Compared in constant time, so that answers do not show how much of a guess was right.
        if not rest or not hmac.compare_digest(token.encode(), self._token):
            text = "Nothing here. Open the address that the command printed.\n"
            await PlainTextResponse(text, 404)(scope, receive, send)
            return
        await self._app({**scope, "path": f"/{rest[0]}", "raw_path": None}, receive, send)


def _app(
    routes: Sequence[Route], changes: Mapping[str, Handler], origin: str, token: str
) -> Starlette:
    change_routes = [
        Route(f"/{name}", _from_page_only(handler, origin), methods=["POST"])
        for name, handler in changes.items()
    ]
    filters = [
        Middleware(HostFilter, content=_CONTENT, own=(_HOST, "localhost").__contains__),
        Middleware(TokenFilter, token=token),
    ]
    failures = {ArchipelagoError: _failed, OSError: _failed}
    return Starlette(
        routes=[*routes, *change_routes], middleware=filters, exception_handlers=failures
    )


def _from_page_only(handler: Handler, origin: str) -> Handler:
    """Let only the page itself change anything."""

    async def checked(request: Request) -> Response:
        # Cross-site request forgery: a browser names the page from which a request came, and another page cannot send
        # JSON without asking first.
        allowed_origins = {origin, origin.replace(_HOST, "localhost")}
        is_from_page = request.headers.get("origin") in allowed_origins
        is_json = request.headers.get("content-type") == "application/json"
        if not (is_from_page and is_json):
            return PlainTextResponse("Only the page itself may do this.\n", status_code=403)
        return await handler(request)

    return checked


async def _failed(request: Request, error: Exception) -> Response:
    text = f"{error}."
    if isinstance(error, ArchipelagoError):
        text += f" {error.remedy}"
    return PlainTextResponse(f"{text}\n", status_code=503)
