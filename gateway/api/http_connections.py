"""Bounds on the connections of the HTTP port: their number, and the time to the end of a request's headers.

aiohttp has neither bound: a client that sends one header a minute, or nothing at all, keeps a connection, and
its file, for an hour or without limit. With TLS a connection counts from the end of its handshake, for which
the time limit is that of the headers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from gateway import metrics

__all__ = ["HEADERS_S", "HttpConnections"]

HEADERS_S = 10.0
"""Longest time, in seconds, from the beginning of a connection, or from the first bytes after an answer, to
the end of the next request's headers. Our choice: aiohttp takes 64 KiB of headers at most. If no bytes come
after an answer, aiohttp's own limit for idle connections holds (an hour, so that a proxy in front closes them
first), or they are closed to make room for new connections."""


class HttpConnections:
    """The open connections of one server. `connect` is the protocol factory of the listening socket."""

    def __init__(self, make_protocol: Callable[[], asyncio.Protocol], most: int) -> None:
        """Set the factory of the protocol that serves one connection, and the limit: at most `most`
        connections are open at a time."""
        self._make_protocol = make_protocol
        self._most = most
        self._deadlines: dict[asyncio.BaseTransport, asyncio.TimerHandle | None] = {}
        """Timer of each open connection; None while no headers are awaited."""
        self._idle: dict[asyncio.BaseTransport, None] = {}
        """Connections that have answered a request and received nothing since, the longest idle first."""

    def __len__(self) -> int:
        return len(self._deadlines)

    def connect(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        return _Bounded(self._make_protocol(), self)

    @contextmanager
    def request(self, transport: asyncio.BaseTransport | None) -> Iterator[None]:
        """Keep a connection open while a request is answered whose headers have arrived. `transport` is None
        if the connection has ended."""
        if transport is not None and transport in self._deadlines:
            self._idle.pop(transport, None)
            self._await_headers(transport, False)
        try:
            yield
        finally:
            if transport is not None and transport in self._deadlines:
                self._idle[transport] = None

    def opened(self, transport: asyncio.Transport) -> bool:
        """Count a new connection. Beyond the limit, end the longest idle connection to make room; if none is
        idle, end the new connection and return False."""
        if len(self) >= self._most and not self._end_longest_idle():
            metrics.HTTP_CONNECTIONS_REFUSED.inc()
            transport.abort()
            return False
        self._await_headers(transport, True)
        return True

    def received(self, transport: asyncio.BaseTransport) -> None:
        """Start the timer of the next request if these bytes are the first after an answer."""
        if transport in self._idle:
            del self._idle[transport]
            self._await_headers(transport, True)

    def half_closed(self, transport: asyncio.BaseTransport) -> None:
        """End a connection whose client sends nothing any more, if it awaits an answer. aiohttp closes the
        connection too, but only once the client has read what was written; until then its request would go on."""
        awaits_headers = self._deadlines.get(transport) is not None
        if transport in self._deadlines and not awaits_headers and transport not in self._idle:
            cast(asyncio.Transport, transport).abort()

    def close_idle(self) -> None:
        """End the connections whose clients have their answers and have sent nothing since: their next requests
        go to another gateway."""
        for transport in list(self._idle):
            transport.close()

    def closed(self, transport: asyncio.BaseTransport) -> None:
        """Count a connection as closed; a repeated call does nothing."""
        self._idle.pop(transport, None)
        if (deadline := self._deadlines.pop(transport, None)) is not None:
            deadline.cancel()

    def _await_headers(self, transport: asyncio.BaseTransport, awaited: bool) -> None:
        if (deadline := self._deadlines.get(transport)) is not None:
            deadline.cancel()
        # The loop's own classes (uvloop's) need not derive from asyncio's.
        abort = cast(asyncio.Transport, transport).abort
        loop = asyncio.get_running_loop()
        self._deadlines[transport] = loop.call_later(HEADERS_S, abort) if awaited else None

    def _end_longest_idle(self) -> bool:
        for transport in self._idle:
            idle = cast(asyncio.Transport, transport)
            if not idle.get_write_buffer_size():  # its client has the answer
                self.closed(idle)
                idle.abort()
                return True
        return False


class _Bounded(asyncio.Protocol):
    """A protocol that passes everything on to the protocol that serves the connection."""

    def __init__(self, protocol: asyncio.Protocol, connections: HttpConnections) -> None:
        self._protocol = protocol
        self._connections = connections
        self._transport: asyncio.BaseTransport | None = None
        """Transport of the connection; None if the connection was refused."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._connections.opened(cast(asyncio.Transport, transport)):
            self._transport = transport
            self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._connections.received(self._transport)
            self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        if self._transport is None:
            return None
        self._connections.half_closed(self._transport)
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._protocol.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is not None:
            self._connections.closed(self._transport)
            self._protocol.connection_lost(error)
