"""The application: draws images on request, and explains itself on two pages without a script."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ddm.errors import ArchipelagoError, MathError
from ddm.pages.private_page import body_of
from ddm.pages.render import render
from ddm.pages.serving import ConnectionLimits, HostFilter
from ddm.serving.drawing import ReleaseSampler, SampleJob
from ddm.serving.openapi import describe_service
from ddm.serving.queue import QueueFullError, SampleQueue
from ddm.serving.requests import MEDIA_TYPES, Format, ServiceLimits, parse_request

_log = logging.getLogger(__name__)

# The head and the body of a request, which is a few hundred bytes; and the pieces of an answer, one at a time.
_RECEIVE_S = 10.0
_PIECE_BYTES = 1 << 16
# An answer must be taken within this time, and more for each byte: until then it keeps its place.
_TAKING_S = 60.0
_MIN_BYTES_S = 1 << 16
# Behind a proxy all clients are one peer. These connections beyond the queue ask for pages, or are told to come later.
_SPARE_CONNECTIONS = 32
_OWN_CONNECTIONS = 8
_CONTENT = "style-src 'self'; img-src data:"


def connection_limits(limits: ServiceLimits) -> ConnectionLimits:
    """Return what clients of the service may take up."""
    max_connections = limits.requests + _SPARE_CONNECTIONS
    return ConnectionLimits(
        # A full queue of slow requests on a processor.
        connection_s=3600.0,
        head_s=_RECEIVE_S,
        stall_s=30.0,
        max_connections=max_connections,
        max_of_one_peer=max_connections - _OWN_CONNECTIONS,
        max_of_peers=max_connections - _OWN_CONNECTIONS,
        # What is being drawn is finished; everything else has a limit of its own.
        stop_s=None,
    )


def make_app(
    sampler: ReleaseSampler, queue: SampleQueue, limits: ServiceLimits, facts: Mapping[str, Any]
) -> Starlette:
    """Make the application.

    Args:
        sampler: checks requests against the release.
        queue: draws them.
        limits: of this server.
        facts: what the release is.
    """
    description = describe_service(limits)
    style = files("ddm").joinpath("pages/templates/live.css").read_text("utf-8")
    info = {
        **facts,
        "limits": {"num": limits.images, "steps": limits.steps, "requests": limits.requests},
    }
    pages = {
        name: render("ddm", f"{name}.html.jinja", info=info, description=description)
        for name in ("serve", "serve_api")
    }

    async def show_page(request: Request) -> Response:
        return Response(pages["serve"], media_type="text/html")

    async def show_api(request: Request) -> Response:
        return Response(pages["serve_api"], media_type="text/html")

    async def show_style(request: Request) -> Response:
        return Response(style, media_type="text/css")

    async def show_description(request: Request) -> Response:
        return JSONResponse(description)

    async def show_info(request: Request) -> Response:
        return JSONResponse(info)

    async def show_health(request: Request) -> Response:
        if queue.is_closed:
            return _error_response(503, "The server is ending.")
        return JSONResponse(
            {
                "status": "ok",
                "requests": queue.num_open,
                "calls": queue.num_calls,
                "images": queue.num_images,
            }
        )

    return Starlette(
        routes=[
            Route("/", show_page),
            Route("/docs", show_api),
            Route("/live.css", show_style),
            Route("/openapi.json", show_description),
            Route("/info", show_info),
            Route("/health", show_health),
            Route("/sample", _SampleEndpoint(sampler, queue, limits), methods=["POST"]),
        ],
        middleware=[Middleware(HostFilter, content=_CONTENT)],
        exception_handlers={
            HTTPException: _answer_http_error,
            QueueFullError: _answer_full,
            ArchipelagoError: _answer_refusal,
        },
    )


class _SampleEndpoint:
    """Answers ``POST /sample``; an application of its own, so that it holds its place until the answer has left."""

    def __init__(self, sampler: ReleaseSampler, queue: SampleQueue, limits: ServiceLimits) -> None:
        self._sampler = sampler
        self._queue = queue
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with self._queue.place():
            request = Request(scope, receive)
            try:
                job = await self._read_job(request)
            except ClientDisconnect:
                return
            content = await self._draw_unless_gone(job, request)
            if content is None:
                return
            response = StreamingResponse(
                _pieces(content),
                media_type=MEDIA_TYPES[job.format],
                headers={
                    "Content-Length": f"{len(content)}",
                    "Content-Disposition": f'inline; filename="samples.{job.format}"',
                },
            )
            await send_in_time(
                response, scope, receive, send, limit_s=_TAKING_S + len(content) / _MIN_BYTES_S
            )

    async def _read_job(self, request: Request) -> SampleJob:
        # A page of another website can send text without asking first, but not JSON.
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise HTTPException(415, "The request is not application/json.")
        try:
            async with asyncio.timeout(_RECEIVE_S):
                body = await body_of(request)
        except TimeoutError as error:
            raise HTTPException(408, "The request did not arrive in time.") from error
        sample_request = parse_request(body, self._limits)
        image_format = sample_request.format or _accepted_format(request)
        return self._sampler.job_of(sample_request, image_format, self._limits)

    async def _draw_unless_gone(self, job: SampleJob, request: Request) -> bytes | None:
        """Return the file of a job; None where the client has left."""
        drawing = asyncio.create_task(self._queue.draw(job))
        leaving = asyncio.create_task(_wait_for_disconnect(request))
        try:
            await asyncio.wait({drawing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not drawing.done():
                return None
            return drawing.result()
        except (MathError, QueueFullError):
            raise
        except Exception as error:
            # The message may name files of this machine, which are nothing for a stranger.
            _log.exception("samples could not be drawn")
            raise HTTPException(
                500, "The samples could not be drawn; the server's log says why."
            ) from error
        finally:
            # Leaves the queue, where it is still in it.
            drawing.cancel()
            leaving.cancel()


async def send_in_time(
    response: Response, scope: Scope, receive: Receive, send: Send, limit_s: float
) -> None:
    """Send an answer, or close the connection of a client that has not taken it in time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await response(scope, receive, send)


async def _wait_for_disconnect(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    # In pieces, each sent when the client has taken those before: until all have left, the request keeps its place.
    for first in range(0, len(content), _PIECE_BYTES):
        yield content[first : first + _PIECE_BYTES]


def _accepted_format(request: Request) -> Format:
    """Return npz where the header Accept names it; else a picture, also to `curl --json`, which accepts JSON alone."""
    accepted = request.headers.get("accept", "").split(",")
    media_types = {part.partition(";")[0].strip().lower() for part in accepted}
    if MEDIA_TYPES["npz"] in media_types:
        return "npz"
    return "png"


def _error_response(
    status: int, text: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse({"error": text}, status_code=status, headers=headers)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    text = error.detail
    if error.status_code == 404:
        text = "There is no such address here; /docs lists those that there are."
    if error.status_code == 405:
        methods = (error.headers or {}).get("Allow", "another method")
        text = f"This address takes {methods} alone; /docs has an example."
    return _error_response(error.status_code, text, error.headers)


async def _answer_full(request: Request, error: Exception) -> Response:
    retry_s = error.retry_s if isinstance(error, QueueFullError) else 1
    text = f"No request is taken now: {error}. Try again in {retry_s} s."
    return _error_response(503, text, {"Retry-After": f"{retry_s}"})


async def _answer_refusal(request: Request, error: Exception) -> Response:
    return _error_response(422, f"{error}.")
