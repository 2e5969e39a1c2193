"""Output as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from gateway.api.http_errors import incident
from gateway.api.openai.errors import error_json
from gateway.api.openai.reply import DONE, Reply, sse
from gateway.calls.generation import Event, Generation
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
    first: Sequence[tuple[int, Event]],
    headers: dict[str, str],
) -> web.StreamResponse:
    """Send server-sent events; events that arrived together are sent together."""
    response = web.StreamResponse(headers=EVENT_STREAM | headers)
    await response.prepare(request)
    try:
        chunks = list(reply.opening())
        events = list(first)
        while True:
            chunks += [chunk for choice, event in events for chunk in reply.chunks(choice, event)]
            if generation.over:
                chunks += reply.closing()
            if chunks:
                await response.write(b"".join(map(sse, chunks)))
            if generation.over:
                break
            chunks, events = [], await _next(generation, response)
    except LapsSdError as error:
        await response.write(sse(error_json(error)))
    except ConnectionError:
        raise
    except Exception as error:
        await response.write(sse(error_json(incident(error, request.path))))
    await response.write(DONE)
    await response.write_eof()
    return response


async def _next(generation: Generation, response: web.StreamResponse) -> list[tuple[int, Event]]:
    """Return the next events; while waiting, send comments that show the client a live connection."""
    while True:
        try:
            async with asyncio.timeout(QUIET_S):
                return await generation.read()
        except TimeoutError:
            await response.write(b": waiting\n\n")
