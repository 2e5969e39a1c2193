"""Output as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from gateway.api.http_errors import incident
from gateway.api.openai.errors import error_json
from gateway.api.openai.reply import DONE, Reply, sse
from gateway.calls.generation import Generation
from gateway.calls.output import Piece
from laps_sd.errors import LapsSdError

__all__ = ["send_stream"]

QUIET_S = 15.0
"""Seconds of silence after which a stream gets a comment, so that proxies keep it open and a dead client is
noticed."""
EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def send_stream(
    request: web.Request,
    generation: Generation,
    reply: Reply,
    first: Sequence[tuple[int, Piece]],
    headers: dict[str, str],
) -> web.StreamResponse:
    """Send server-sent events; pieces that arrived together are sent together."""
    response = web.StreamResponse(headers=EVENT_STREAM | headers)
    await response.prepare(request)
    try:
        events = reply.opening()
        pieces = first
        while True:
            events += b"".join([reply.events(choice, piece) for choice, piece in pieces])
            if generation.over:
                events += reply.closing()
            if events:
                await response.write(events)
            if generation.over:
                break
            events, pieces = b"", await _next(generation, response)
    except LapsSdError as error:
        await response.write(sse(error_json(error)))
    except ConnectionError:
        raise
    except Exception as error:
        await response.write(sse(error_json(incident(error, request.path))))
    await response.write(DONE)
    await response.write_eof()
    return response


async def _next(generation: Generation, response: web.StreamResponse) -> list[tuple[int, Piece]]:
    """Return the next pieces; while waiting, send comments that show the client a live connection."""
    while True:
        try:
            async with asyncio.timeout(QUIET_S):
                return await generation.read()
        except TimeoutError:
            await response.write(b": waiting\n\n")
