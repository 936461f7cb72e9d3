"""Serves the page on which a person clears images or leaves them out: to one browser on this machine alone."""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
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

PAGE_SIZE = 24  # pictures at once
# The files of the page: package, path in it, and type.
_FILES = {
    "": ("silo", "images/page/review.html", "text/html"),
    "ask.js": ("ddm", "pages/templates/ask.js", "text/javascript"),
    "review.js": ("silo", "images/page/review.js", "text/javascript"),
    "review.css": ("silo", "images/page/review.css", "text/css"),
    "live.css": ("ddm", "pages/templates/live.css", "text/css"),
}


class DecisionRequest(Model):
    """A decision that the page sends.

    Attributes:
        numbers: the numbers of pictures.
        decision: None takes back what was decided.
        together: whether it is also about the other pictures of the same scans or files that are in the same state.
    """

    numbers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=PAGE_SIZE)]
    decision: Literal["clear", "leave out"] | None
    together: bool = False


def serve_review(
    review: Review,
    viewer: Viewer,
    on_listening: Callable[[str], None],
) -> None:
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
    review: Review,
    viewer: Viewer,
    end: Callable[[], None],
) -> tuple[Sequence[Route], Mapping[str, Handler]]:
    async def state(request: Request) -> Response:
        query = request.query_params
        start = _number(query.get("start", "0"))
        shown = query.get("show", WAITING)
        flag = query.get("flag", "")
        return json_response(_page_state(review, viewer, shown, flag, start))

    async def picture(request: Request) -> Response:
        number = _number(request.path_params["number"])
        view = None
        if number < len(review.pictures):
            view = viewer.view(review.pictures[number])
        # Not drawn yet, or not to be drawn: `state` tells the page which.
        if view is None or view.problem:
            return PlainTextResponse("not drawn\n", status_code=404)
        png = view.window
        if "whole" in request.query_params and view.whole:
            png = view.whole
        return Response(png, media_type="image/png")

    async def decide(request: Request) -> Response:
        try:
            decision_request = DecisionRequest.model_validate_json(await body_of(request))
        except ValidationError:
            return PlainTextResponse("not a decision\n", status_code=400)
        numbers = list(decision_request.numbers)
        if any(number >= len(review.pictures) for number in numbers):
            return PlainTextResponse("no such picture\n", status_code=400)
        if decision_request.together:
            groups = [review.with_others(number) for number in numbers]
            numbers = list(chain.from_iterable(groups))
        decision = None
        if decision_request.decision is not None:
            decision = Decision(decision_request.decision)
        review.decide(numbers, decision)
        return json_response({})

    async def undo(request: Request) -> Response:
        review.undo()
        return json_response({})

    async def done(request: Request) -> Response:
        end()
        return json_response({})

    routes = [
        *static_routes(_FILES),
        Route("/state", state),
        Route("/picture/{number}", picture),
    ]
    return routes, {"decide": decide, "undo": undo, "done": done}


def _number(text: str) -> int:
    """Return a number of a request; 0 for any other text, and for one of this many digits that it would take long."""
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    return 0


def _page_state(
    review: Review,
    viewer: Viewer,
    shown: str,
    flag: str,
    start: int,
) -> dict[str, Any]:
    """Return the content of the page; have it drawn, and then that of the next page."""
    listed = review.listed(shown, flag)
    # After decisions the list may be shorter than the page's start.
    last = max(0, len(listed) - 1)
    start = min(start, last) // PAGE_SIZE * PAGE_SIZE
    near = listed[start : start + 2 * PAGE_SIZE]
    viewer.request([review.pictures[number] for number in near])
    pictures = []
    for number in near[:PAGE_SIZE]:
        view = viewer.view(review.pictures[number])
        pictures.append(_picture_state(review, number, view or View()))
    return {
        "counts": review.counts,
        "accepted": len(review.listed(ACCEPTED)),
        "flags": review.flags(shown),
        "listed": len(listed),
        "start": start,
        "shown": PAGE_SIZE,
        "undo": review.can_undo,
        "pictures": pictures,
    }


def _picture_state(
    review: Review,
    number: int,
    view: View,
) -> dict[str, Any]:
    picture = review.pictures[number]
    folder, name = os.path.split(picture.path)
    return {
        "number": number,
        "name": escape_control(name, one_line=True),
        "folder": escape_control(folder, one_line=True),
        "about": _description(picture),
        "flags": list(picture.record.flags),
        "together": len(review.with_others(number)),
        "of": "scan" if picture.record.slice else "file",
        "drawn": bool(view.window),
        "whole": bool(view.whole),
        "problem": view.problem,
    }


def _description(picture: ReviewPicture) -> str:
    record = picture.record
    sides = " x ".join(str(side) for side in record.shape[1:])
    description = f"{record.kind}, {sides}"
    if picture.place:
        description += f", image {picture.place + 1} of its file"
    return description
