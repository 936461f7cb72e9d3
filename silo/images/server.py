"""Serves the page on which a person clears flagged images or leaves them out: to one browser on this machine alone.

It listens on loopback, at a free port. Its address holds a random token, which no other user of the machine knows; a
request that changes anything must come from the page itself, by its Origin. Nothing is kept in a cache.
"""

import hmac
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Annotated, Any, Literal

import uvicorn
from pydantic import Field, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ddm.errors import ArchipelagoError
from ddm.pages.serving import HostFilter, listening, server_of
from ddm.protocol.base import Model
from ddm.system.escape import escape_control
from silo.images.decisions import Decision
from silo.images.review import WAITING, Flagged, Review
from silo.images.viewer import View, Viewer

SHOWN = 24  # pictures at once
_HOST = "127.0.0.1"
_MOST_BODY_BYTES = 1 << 16
_CONTENT = "script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
_FILES = {  # of the page: where they lie, and what they are
    "": ("silo", "images/page/review.html", "text/html"),
    "review.js": ("silo", "images/page/review.js", "text/javascript"),
    "review.css": ("silo", "images/page/review.css", "text/css"),
    "live.css": ("ddm", "pages/templates/live.css", "text/css"),
}

Handler = Callable[[Request], Awaitable[Response]]


class Decided(Model):
    """What the page sends.

    Attributes:
        numbers: of pictures.
        decision: None lets them wait again.
        together: whether the others of each one's scan or file go with it, where they are in the same state.
    """

    numbers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=SHOWN)]
    decision: Literal["clear", "leave out"] | None
    together: bool = False


def serve_review(review: Review, viewer: Viewer, on_listening: Callable[[str], None]) -> None:
    """Serve the page until a person is done.

    Args:
        review: the pictures and the decisions.
        viewer: draws them.
        on_listening: called with the page's address, which is a secret.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM.
    """
    token = secrets.token_urlsafe(24)
    with listening(_HOST, 0) as (listener, url):
        servers: list[uvicorn.Server] = []

        def end() -> None:
            servers[0].should_exit = True

        app = make_app(review, viewer, url.rstrip("/"), token, end)
        servers.append(server_of(app))
        on_listening(f"{url}{token}/")
        servers[0].run(sockets=[listener])


def make_app(review: Review, viewer: Viewer, origin: str, token: str, end: Callable[[], None]) -> Starlette:
    """Make the application.

    Args:
        review: the pictures and the decisions.
        viewer: draws them.
        origin: of the page, scheme, address and port.
        token: the first part of each path.
        end: called when a person is done.
    """
    contents = {
        name: (files(package).joinpath(path).read_bytes(), kind) for name, (package, path, kind) in _FILES.items()
    }

    async def static(request: Request) -> Response:
        content, kind = contents[request.url.path.rpartition("/")[2]]
        return Response(content, media_type=kind)

    async def state(request: Request) -> Response:
        query = request.query_params
        shown = query.get("show", WAITING)
        return _json(_state(review, viewer, shown, query.get("flag", ""), _number(query.get("start", "0"))))

    async def picture(request: Request) -> Response:
        number = _number(request.path_params["number"])
        view = viewer.view(review.pictures[number]) if number < len(review.pictures) else None
        if view is None or view.problem:
            return PlainTextResponse("not drawn\n", status_code=404)
        whole = "whole" in request.query_params and view.whole
        return Response(view.whole if whole else view.window, media_type="image/png")

    async def decide(request: Request) -> Response:
        try:
            asked = Decided.model_validate_json(await _body(request))
        except ValidationError:
            return PlainTextResponse("not a decision\n", status_code=400)
        if any(number >= len(review.pictures) for number in asked.numbers):
            return PlainTextResponse("no such picture\n", status_code=400)
        numbers = [
            each for number in asked.numbers for each in (review.with_others(number) if asked.together else [number])
        ]
        review.decide(numbers, None if asked.decision is None else Decision(asked.decision))
        return _json({})

    async def undo(request: Request) -> Response:
        review.undo()
        return _json({})

    async def done(request: Request) -> Response:
        end()
        return _json({})

    changes: dict[str, Handler] = {"decide": decide, "undo": undo, "done": done}
    routes = [
        *(Route(f"/{name}", static) for name in contents),
        Route("/state", state),
        Route("/picture/{number}", picture),
        *(Route(f"/{name}", _own(handler, origin), methods=["POST"]) for name, handler in changes.items()),
    ]
    guards = [
        Middleware(HostFilter, content=_CONTENT, own=(_HOST, "localhost").__contains__),
        Middleware(TokenFilter, token=token),
    ]
    return Starlette(routes=routes, middleware=guards, exception_handlers={ArchipelagoError: _failed, OSError: _failed})


class TokenFilter:
    """Answers only what is asked below a secret path, and takes it off."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        _, given, *rest = f"{scope['path']}".split("/", 2)
        if not rest or not hmac.compare_digest(given.encode(), self._token):
            await PlainTextResponse("Nothing here. Open the address that the command printed.\n", 404)(
                scope, receive, send
            )
            return
        await self._app({**scope, "path": f"/{rest[0]}", "raw_path": None}, receive, send)


def _own(handler: Handler, origin: str) -> Handler:
    """Let only the page itself change anything."""

    async def checked(request: Request) -> Response:
        allowed = {origin, origin.replace(_HOST, "localhost")}
        if request.headers.get("origin") not in allowed or request.headers.get("content-type") != "application/json":
            return PlainTextResponse("Only the page itself may do this.\n", status_code=403)
        return await handler(request)

    return checked


async def _failed(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{error}\n", status_code=503)


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BODY_BYTES:
            return b""
    return body


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _json(content: Mapping[str, Any]) -> Response:
    """Return JSON in ASCII, as names of files may be of any bytes."""
    return Response(json.dumps(content).encode("ascii"), media_type="application/json")


def _state(review: Review, viewer: Viewer, shown: str, flag: str, start: int) -> dict[str, Any]:
    """Return what the page shows, and have it drawn, and then what comes after it."""
    listed = review.listed(shown, flag)
    start = min(start, max(0, len(listed) - 1)) // SHOWN * SHOWN
    near = listed[start : start + 2 * SHOWN]
    viewer.want([review.pictures[number] for number in near])
    return {
        "counts": review.counts,
        "flags": review.flags(shown),
        "listed": len(listed),
        "start": start,
        "shown": SHOWN,
        "undo": review.can_undo,
        "pictures": [_described(review, number, viewer.view(review.pictures[number])) for number in near[:SHOWN]],
    }


def _described(review: Review, number: int, view: View | None) -> dict[str, Any]:
    flagged = review.pictures[number]
    folder, name = os.path.split(flagged.path)
    return {
        "number": number,
        "name": escape_control(name, one_line=True),
        "folder": escape_control(folder, one_line=True),
        "about": _about(flagged),
        "flags": list(flagged.seen.flags),
        "together": len(review.with_others(number)),
        "of": "scan" if flagged.seen.slice else "file",
        "drawn": bool(view and view.window),
        "whole": bool(view and view.whole),
        "problem": view.problem if view else "",
    }


def _about(flagged: Flagged) -> str:
    seen = flagged.seen
    sides = " x ".join(map(str, seen.shape[1:]))
    place = f", image {flagged.place + 1} of its file" if flagged.place else ""
    return f"{seen.kind}, {sides}{place}"
