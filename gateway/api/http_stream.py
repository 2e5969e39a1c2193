"""Output as server-sent events.

Events go straight to the connection's transport, once the link has handled the message that brought the
tokens. The task of a call sleeps; it is needed for the end, for a failure, and for a client that is
behind, whose tokens wait in its stream and are then sent together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import starmap

from aiohttp import HttpVersion11, web

from gateway.api.http_calls import OpenCalls
from gateway.api.http_errors import incident
from gateway.api.openai.answer import StreamedReply
from gateway.calls.generation import Generation
from gateway.calls.output import Piece
from laps_sd.errors import LapsSdError

__all__ = ["Turn", "send_stream"]

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
    reply: StreamedReply,
    first: Sequence[tuple[int, Piece]],
    headers: dict[str, str],
    turn: Turn,
    calls: OpenCalls,
) -> web.StreamResponse:
    """Send server-sent events; pieces that arrived together are sent together."""
    response = web.StreamResponse(headers=EVENT_STREAM | headers)
    chunked = request.version >= HttpVersion11
    if chunked:
        response.enable_chunked_encoding()
    else:
        response.force_close()  # which is the end of the answer, also for a client that keeps connections
    await response.prepare(request)
    sender = _Sender(request, generation, reply, turn, chunked=chunked)
    try:
        async with calls.served():
            await sender.send_all(first)
        last = reply.closing()
    except LapsSdError as error:
        generation.failed(error)
        last = reply.failure(error)
    except ConnectionError:
        raise
    except Exception as error:
        generation.failed(error)
        last = reply.failure(incident(error, request.path))
    finally:
        sender.stop()
    await response.write_eof(last)
    return response


class Turn:
    """The streams whose output arrived in the present turn of the loop. All events are made before any is
    written: a process that reads several of these connections then wakes once, not for each of them."""

    def __init__(self) -> None:
        self._senders: list[_Sender] = []

    def add(self, sender: _Sender) -> None:
        """Send what waits for a stream when the present work of the loop is over."""
        if not self._senders:
            asyncio.get_running_loop().call_soon(self._send)
        self._senders.append(sender)

    def _send(self) -> None:
        senders, self._senders = self._senders, []
        for sender, events in [(sender, sender.take()) for sender in senders]:
            sender.write(events)


class _Sender:
    """Sends one answer between its headers and its last event."""

    def __init__(
        self, request: web.Request, generation: Generation, reply: StreamedReply, turn: Turn, *, chunked: bool
    ) -> None:
        if request.transport is None:
            raise ConnectionResetError("the client has left")
        self._transport = request.transport
        self._protocol = request.protocol
        self._drain = request.writer.drain
        self._generation = generation
        self._reply = reply
        self._turn = turn
        self._chunked = chunked
        self._time = asyncio.get_running_loop().time
        self._wrote_at = self._time()
        self._needs_task = asyncio.Event()
        self._failure: Exception | None = None
        self._stopped = False

    async def send_all(self, first: Sequence[tuple[int, Piece]]) -> None:
        """Send all output, `first` before what follows. Raises the failure of an output."""
        self.write(self._reply.opening() + b"".join(starmap(self._reply.events, first)))
        self._generation.listen(partial(self._turn.add, self))
        while True:
            self.write(self.take())
            await self._needed()
            if self._failure is not None:
                raise self._failure
            if self._generation.over:
                return
            await self._drain()

    def stop(self) -> None:
        """Stop sending: after the end of an answer the client expects the next one."""
        self._stopped = True

    def take(self) -> bytes:
        """Return the events of what waits; none while the client is behind."""
        if self._stopped:
            return b""
        if self._protocol.writing_paused:
            self._needs_task.set()
            return b""
        try:
            events = b"".join(starmap(self._reply.events, self._generation.take()))
        except Exception as error:
            self._failure = error
            self._needs_task.set()
            return b""
        if self._generation.over:
            self._needs_task.set()
        return events

    def write(self, events: bytes) -> None:
        """Write events to the transport."""
        if events and not self._transport.is_closing():
            self._wrote_at = self._time()
            self._transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)

    async def _needed(self) -> None:
        """Wait until the task has something to do. During a silence, send comments that show the client a
        live connection. Raises ConnectionResetError if it is closing."""
        while True:
            if self._transport.is_closing():
                raise ConnectionResetError("the client has left")
            try:
                async with asyncio.timeout_at(self._wrote_at + QUIET_S):
                    await self._needs_task.wait()
                self._needs_task.clear()
                return
            except TimeoutError:
                if self._time() >= self._wrote_at + QUIET_S:
                    self.write(b": waiting\n\n")
