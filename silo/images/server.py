"""Serves the page on which a person clears images or leaves them out: to one browser on this machine alone."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ddm.pages.private_page import (
    Handler,
    body_of,
    json_response,
    serve_private_page,
    static_routes,
)
from ddm.protocol.base import Model
from ddm.system.escape import escape_control
from silo.images.decisions import Decision
from silo.images.review import ACCEPTED, WAITING, Review, ReviewPicture
from silo.images.viewer import View, Viewer

SHOWN = 24  # pictures at once
_FILES = {  # of the page: where they lie, and what they are
    "": ("silo", "images/page/review.html", "text/html"),
    "ask.js": ("ddm", "pages/templates/ask.js", "text/javascript"),
    "review.js": ("silo", "images/page/review.js", "text/javascript"),
    "review.css": ("silo", "images/page/review.css", "text/css"),
    "live.css": ("ddm", "pages/templates/live.css", "text/css"),
}


class DecisionRequest(Model):
    """What the page sends.

    Attributes:
        numbers: of pictures.
        decision: None takes back what was decided.
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
    serve_private_page(lambda end: _routes(review, viewer, end), on_listening)


def _routes(
    review: Review, viewer: Viewer, end: Callable[[], None]
) -> tuple[Sequence[Route], Mapping[str, Handler]]:
    async def state(request: Request) -> Response:
        query = request.query_params
        start = _number(query.get("start", "0"))
        return json_response(
            _page_state(review, viewer, query.get("show", WAITING), query.get("flag", ""), start)
        )

    async def picture(request: Request) -> Response:
        number = _number(request.path_params["number"])
        view = viewer.view(review.pictures[number]) if number < len(review.pictures) else None
        if view is None or view.problem:
            return PlainTextResponse("not drawn\n", status_code=404)
        whole = "whole" in request.query_params and view.whole
        return Response(view.whole if whole else view.window, media_type="image/png")

    async def decide(request: Request) -> Response:
        try:
            decision_request = DecisionRequest.model_validate_json(await body_of(request))
        except ValidationError:
            return PlainTextResponse("not a decision\n", status_code=400)
        numbers = list(decision_request.numbers)
        if any(number >= len(review.pictures) for number in numbers):
            return PlainTextResponse("no such picture\n", status_code=400)
        if decision_request.together:
            numbers = [other for number in numbers for other in review.with_others(number)]
        decision = (
            None if decision_request.decision is None else Decision(decision_request.decision)
        )
        review.decide(numbers, decision)
        return json_response({})

    async def undo(request: Request) -> Response:
        review.undo()
        return json_response({})

    async def done(request: Request) -> Response:
        end()
        return json_response({})

    routes = [*static_routes(_FILES), Route("/state", state), Route("/picture/{number}", picture)]
    return routes, {"decide": decide, "undo": undo, "done": done}


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _page_state(
    review: Review, viewer: Viewer, shown: str, flag: str, start: int
) -> dict[str, Any]:
    """Return what the page shows, and have it drawn, and then what comes after it."""
    listed = review.listed(shown, flag)
    start = min(start, max(0, len(listed) - 1)) // SHOWN * SHOWN
    near = listed[start : start + 2 * SHOWN]
    viewer.request([review.pictures[number] for number in near])
    return {
        "counts": review.counts,
        "accepted": len(review.listed(ACCEPTED)),
        "flags": review.flags(shown),
        "listed": len(listed),
        "start": start,
        "shown": SHOWN,
        "undo": review.can_undo,
        "pictures": [
            _described(review, number, viewer.view(review.pictures[number]))
            for number in near[:SHOWN]
        ],
    }


def _described(review: Review, number: int, view: View | None) -> dict[str, Any]:
    picture = review.pictures[number]
    folder, name = os.path.split(picture.path)
    return {
        "number": number,
        "name": escape_control(name, one_line=True),
        "folder": escape_control(folder, one_line=True),
        "about": _about(picture),
        "flags": list(picture.record.flags),
        "together": len(review.with_others(number)),
        "of": "scan" if picture.record.slice else "file",
        "drawn": bool(view and view.window),
        "whole": bool(view and view.whole),
        "problem": view.problem if view else "",
    }


def _about(picture: ReviewPicture) -> str:
    record = picture.record
    sides = " x ".join(str(side) for side in record.shape[1:])
    place = f", image {picture.place + 1} of its file" if picture.place else ""
    return f"{record.kind}, {sides}{place}"
