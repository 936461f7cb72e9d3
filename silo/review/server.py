"""Serves the page on which a person reads what would leave, and approves it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ddm.errors import DigestError
from ddm.pages.private_page import (
    Handler,
    body_of,
    json_response,
    serve_private_page,
    static_routes,
)
from ddm.pages.render import render
from ddm.pages.serving import ConnectionLimits
from ddm.protocol.base import Digest, Model, now_utc
from silo.config import Site
from silo.review.contents import CHANGED_REMEDY, as_text, open_verified, verified_blocks
from silo.review.facts import OutgoingFile, ReviewFacts
from silo.review.leaks import expert_leaks
from silo.review.samples import ExpertSheets
from silo.worker.approval import approve, find_approval
from silo.worker.state import load_state, state_path

# A download of weights may take this long.
_LIMITS = ConnectionLimits(connection_s=600.0)
_FILES = {
    "ask.js": ("ddm", "pages/templates/ask.js", "text/javascript"),
    "approve.js": ("silo", "review/page/approve.js", "text/javascript"),
    "approve.css": ("silo", "review/page/approve.css", "text/css"),
    "live.css": ("ddm", "pages/templates/live.css", "text/css"),
}


class ApprovalRequest(Model):
    """What the page sends to approve: the digest of the draft that a person saw."""

    submission_digest: Digest


def serve_approval(
    site: Site,
    facts: ReviewFacts,
    sheets: ExpertSheets,
    on_listening: Callable[[str], None],
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
    serve_private_page(lambda end: _handlers(site, facts, sheets, end), on_listening, _LIMITS)


def _handlers(
    site: Site,
    facts: ReviewFacts,
    sheets: ExpertSheets,
    end: Callable[[], None],
) -> tuple[Sequence[Route], Mapping[str, Handler]]:
    # Made once. What a person reads does not change until the page ends, whatever happens to the files meanwhile.
    page = render(
        "silo",
        "approve.html.jinja",
        facts=facts,
        draft=facts.draft,
        findings=expert_leaks(site, facts),
    )

    def requested_file(request: Request) -> OutgoingFile | None:
        number: int = request.path_params["number"]
        if number >= len(facts.files):
            return None
        return facts.files[number]

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page)

    async def show_contents(request: Request) -> Response:
        file = requested_file(request)
        if file is None:
            return PlainTextResponse("no such file\n", status_code=404)
        # Reading large tensors takes seconds, in which the page must still answer.
        try:
            text = await run_in_threadpool(as_text, file.local, file.digest)
        except DigestError as error:
            return _changed(error)
        number = request.path_params["number"]
        html = render("silo", "contents.html.jinja", file=file, number=number, text=text)
        return HTMLResponse(html)

    async def download(request: Request) -> Response:
        file = requested_file(request)
        if file is None:
            return PlainTextResponse("no such file\n", status_code=404)
        try:
            handle = await run_in_threadpool(open_verified, file.local, file.digest)
        except DigestError as error:
            return _changed(error)
        name = file.path.replace("/", "_")
        headers = {
            "Content-Disposition": f'attachment; filename="{name}"',
            "Content-Length": str(file.bytes),
        }
        blocks = verified_blocks(handle, file.digest)
        return StreamingResponse(blocks, media_type="application/octet-stream", headers=headers)

    async def show_state(request: Request) -> Response:
        sheets_json = [asdict(sheet) for sheet in sheets.sheets]
        return json_response({**_state(site, facts), "sheets": sheets_json, "done": sheets.is_done})

    async def approve_draft(request: Request) -> Response:
        return await _decide(request, facts, lambda digest: approve(site, digest))

    async def end_page(request: Request) -> Response:
        end()
        return json_response({})

    routes = [
        Route("/", show_page),
        Route("/view/{number:int}", show_contents),
        Route("/file/{number:int}", download),
        Route("/state", show_state),
        *static_routes(_FILES),
    ]
    return routes, {"approve": approve_draft, "done": end_page}


def _changed(error: DigestError) -> Response:
    """Answer that a file is no longer the one that the page names: a person must not inspect other bytes."""
    return PlainTextResponse(f"{error}. {CHANGED_REMEDY}\n", status_code=409)


async def _decide(
    request: Request,
    facts: ReviewFacts,
    decide: Callable[[str], object],
) -> Response:
    """Decide about the draft that this page shows, and about no other."""
    try:
        approval = ApprovalRequest.model_validate_json(await body_of(request))
    except ValidationError:
        return PlainTextResponse("not a digest\n", status_code=400)
    # Files may have changed since the page was made: a person approves what the page showed.
    if approval.submission_digest != facts.draft.digest:
        return PlainTextResponse("not the draft that this page shows\n", status_code=400)
    # In a thread, since to approve writes to disk, and the page must answer meanwhile.
    await run_in_threadpool(decide, approval.submission_digest)
    return json_response({})


def _state(site: Site, facts: ReviewFacts) -> dict[str, Any]:
    """Describe for the page whether its draft still waits, and whether somebody approved it meanwhile."""
    state = load_state(state_path(site.private))
    # The same plan may have another draft by now, after a refusal for instance: this page is not about that one.
    is_waiting = (
        state.state == "awaiting_approval" and state.submission_digest == facts.draft.digest
    )
    is_approved = False
    if is_waiting:
        approval = find_approval(site, facts.draft, by_policy=False, now=now_utc())
        is_approved = approval is not None
    return {
        "state": state.state,
        "waits": is_waiting and not is_approved,
        "approved": is_approved,
    }
