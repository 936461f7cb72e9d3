"""Serves the page on which a person reads what would leave, and approves it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from ddm.pages.render import render
from ddm.pages.secret import Handler, body_of, json_response, serve_secret, static_routes
from ddm.protocol.base import Digest, Model, now_utc
from silo.config import Site
from silo.review.contents import as_text
from silo.review.facts import Facts, Leaving
from silo.review.leaks import expert_leaks
from silo.review.samples import SampleSheets
from silo.worker.approval import approve, find_approval
from silo.worker.state import load_state, state_path

_CONNECTION_S = 600.0  # a download of weights may take this long
_FILES = {
    "ask.js": ("ddm", "pages/templates/ask.js", "text/javascript"),
    "approve.js": ("silo", "review/page/approve.js", "text/javascript"),
    "approve.css": ("silo", "review/page/approve.css", "text/css"),
    "live.css": ("ddm", "pages/templates/live.css", "text/css"),
}


class ApprovalRequest(Model):
    """What the page sends: the digest of the draft that a person saw."""

    submission_digest: Digest


def serve_approval(
    site: Site, facts: Facts, sheets: SampleSheets, on_listening: Callable[[str], None]
) -> None:
    """Serve the page until a person is done.

    Args:
        site: this silo's.
        facts: what the page shows.
        sheets: samples of the experts.
        on_listening: called with the page's address, which is a secret.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM.
    """
    serve_secret(lambda end: _answers(site, facts, sheets, end), on_listening, _CONNECTION_S)


def _answers(
    site: Site, facts: Facts, sheets: SampleSheets, end: Callable[[], None]
) -> tuple[Sequence[Route], Mapping[str, Handler]]:
    page = render(
        "silo",
        "approve.html.jinja",
        facts=facts,
        draft=facts.draft,
        findings=expert_leaks(site, facts),
    )

    def chosen(request: Request) -> Leaving | None:
        number = request.path_params["number"]
        return facts.files[number] if number < len(facts.files) else None

    async def whole(request: Request) -> Response:
        return HTMLResponse(page)

    async def view(request: Request) -> Response:
        if (file := chosen(request)) is None:
            return PlainTextResponse("no such file\n", status_code=404)
        text = await run_in_threadpool(as_text, file.local)
        number = request.path_params["number"]
        return HTMLResponse(
            render("silo", "contents.html.jinja", file=file, number=number, text=text)
        )

    async def file(request: Request) -> Response:
        if (found := chosen(request)) is None:
            return PlainTextResponse("no such file\n", status_code=404)
        name = found.path.replace("/", "_")
        return FileResponse(found.local, media_type="application/octet-stream", filename=name)

    async def state(request: Request) -> Response:
        drawn = [asdict(sheet) for sheet in sheets.sheets]
        return json_response({**_state(site, facts), "sheets": drawn, "done": sheets.done})

    async def approved(request: Request) -> Response:
        return await _decide(request, facts, lambda digest: approve(site, digest))

    async def done(request: Request) -> Response:
        end()
        return json_response({})

    routes = [
        Route("/", whole),
        Route("/view/{number:int}", view),
        Route("/file/{number:int}", file),
        Route("/state", state),
        *static_routes(_FILES),
    ]
    return routes, {"approve": approved, "done": done}


async def _decide(request: Request, facts: Facts, decide: Callable[[str], object]) -> Response:
    """Decide about the draft that this page shows, and about no other."""
    try:
        asked = ApprovalRequest.model_validate_json(await body_of(request))
    except ValidationError:
        return PlainTextResponse("not a digest\n", status_code=400)
    if asked.submission_digest != facts.draft.digest:
        return PlainTextResponse("not the draft that this page shows\n", status_code=400)
    await run_in_threadpool(decide, asked.submission_digest)
    return json_response({})


def _state(site: Site, facts: Facts) -> dict[str, Any]:
    state = load_state(state_path(site.private))
    waits = state.state == "awaiting_approval" and state.submission_digest == facts.draft.digest
    approved = (
        waits and find_approval(site, facts.draft, by_policy=False, now=now_utc()) is not None
    )
    return {"state": state.state, "waits": waits and not approved, "approved": approved}
