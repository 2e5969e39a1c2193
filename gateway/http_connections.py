"""Bounds on the connections of the HTTP port: their number, and the time to the end of a request's headers.

aiohttp has neither bound: a client that sends a header a minute, or nothing at all, keeps a connection, and its file, for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from gateway import metrics

__all__ = ["HttpConnections"]

HEADERS_S = 10.0
"""Longest time from the beginning of a connection to the end of its first request's headers. Our choice: aiohttp takes 64 KiB of
headers at most. Between two requests aiohttp's own limit for idle connections holds."""


class HttpConnections:
    """The open connections of one server. `connect` is the protocol factory of the listening socket."""

    def __init__(self, make_protocol: Callable[[], asyncio.Protocol], most: int) -> None:
        """`make_protocol` makes the protocol that serves one connection; at most `most` are open at a time."""
        self._make_protocol = make_protocol
        self._most = most
        self._deadlines: dict[asyncio.BaseTransport, asyncio.TimerHandle | None] = {}
        """Of each open connection; None once its first request has come."""

    def connect(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        return _Bounded(self._make_protocol(), self)

    def received_headers(self, transport: asyncio.BaseTransport | None) -> None:
        """Let the connection live: the headers of a request have come."""
        if transport is not None and (deadline := self._deadlines.get(transport)) is not None:
            deadline.cancel()
            self._deadlines[transport] = None

    def opened(self, transport: asyncio.Transport) -> bool:
        """Count a new connection; return False, and close it, where there are too many."""
        if len(self._deadlines) >= self._most:
            metrics.HTTP_CONNECTIONS_REFUSED.inc()
            transport.abort()
            return False
        loop = asyncio.get_running_loop()
        self._deadlines[transport] = loop.call_later(HEADERS_S, transport.abort)
        return True

    def closed(self, transport: asyncio.BaseTransport) -> None:
        """Count a connection as gone."""
        self.received_headers(transport)
        self._deadlines.pop(transport, None)


class _Bounded(asyncio.Protocol):
    """Passes everything on to the protocol that serves the connection."""

    def __init__(self, protocol: asyncio.Protocol, connections: HttpConnections) -> None:
        self._protocol = protocol
        self._connections = connections
        self._transport: asyncio.BaseTransport | None = None
        """None where the connection was refused."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The loop's own classes (uvloop's) need not derive from asyncio's.
        if self._connections.opened(cast(asyncio.Transport, transport)):
            self._transport = transport
            self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._transport is not None:
            self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received() if self._transport is not None else None

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
