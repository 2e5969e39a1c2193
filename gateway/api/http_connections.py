"""Bounds on the connections of the HTTP port: their number, their age, the time to the end of a request's headers,
and the time in which a client reads nothing.

aiohttp has no such bounds: a client that sends one header a minute, or nothing at all, keeps a connection, and
its file, for an hour or without limit. Connections are counted from their acceptance on, before the TLS
handshake, of which asyncio's servers show nothing.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import cast

from gateway import metrics
from gateway.settings import STALLED_S
from laps_sd.service.log import get_logger

__all__ = ["HEADERS_S", "HttpConnections"]

log = get_logger(__name__)

HEADERS_S = 10.0
"""Longest time, in seconds, of a TLS handshake, and from the beginning of a connection, or from the first bytes
after an answer, to the end of the next request's headers. Our choice: aiohttp takes 64 KiB of headers at most.
If no bytes come after an answer, aiohttp's own limit for idle connections holds (an hour, so that a proxy in
front closes them first), or they are closed to make room for new connections."""
ACCEPTED_TOGETHER = 128
"""Most connections that are accepted before the loop does other work."""
ACCEPT_AGAIN_S = 1.0
"""Pause after a failure to accept: mostly no file descriptor is left. asyncio's choice."""
AGE_SPREAD = 0.1
"""Part of the largest age by which that of a connection differs at most, so that clients that connected together
do not connect again together. gRPC's choice."""


class HttpConnections:
    """The open connections of one listening socket."""

    def __init__(self, make_protocol: Callable[[], asyncio.Protocol], most: int, max_age_s: float) -> None:
        """Set the factory of the protocol that serves one connection, and the limits: at most `most`
        connections are open at a time, and none is used for a new request when it is older than `max_age_s`."""
        self.make_protocol = make_protocol
        self._most = most
        self._max_age_s = max_age_s
        self._open: set[_Connection] = set()
        self._waiting: dict[_Connection, None] = {}
        """Connections on which no request is being answered, by the time of their beginning, of their last answer,
        or of the first bytes of their next request."""
        self._listener: socket.socket | None = None
        self._paused: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def listen(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accept the connections of a socket until `stop_listening`."""
        listener.setblocking(False)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener, tls)

    def stop_listening(self) -> None:
        """Accept no new connections, and end those whose clients have their answers and have sent nothing since:
        their next requests go to another gateway."""
        if self._listener is None:
            return
        if self._paused is not None:
            self._paused.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        for connection in list(self._waiting):
            if connection.deadline is None:
                connection.close()

    @contextmanager
    def request(self, transport: asyncio.Transport | None) -> Iterator[None]:
        """Keep a connection open while a request is answered whose headers have arrived. `transport` is None
        if the connection has ended."""
        connection = self._connection_of(transport)
        if connection is not None:
            self._waiting.pop(connection, None)
            connection.await_headers(False)
        try:
            yield
        finally:
            if connection in self._open:
                self._waiting[connection] = None

    def is_old(self, transport: asyncio.Transport | None) -> bool:
        """Return whether the client of this connection should use another one for its next request."""
        connection = self._connection_of(transport)
        return connection is not None and asyncio.get_running_loop().time() >= connection.old_at

    def is_waiting(self, connection: _Connection) -> bool:
        """Return whether no request is being answered on a connection."""
        return connection in self._waiting

    def begins(self, connection: _Connection) -> None:
        """Start the timer of the next request: these are its first bytes."""
        del self._waiting[connection]
        self._waiting[connection] = None
        connection.await_headers(True)

    def closed(self, connection: _Connection) -> None:
        """Count a connection as closed; a repeated call does nothing."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)
        connection.await_headers(False)

    def _connection_of(self, transport: asyncio.Transport | None) -> _Connection | None:
        connection = None if transport is None else transport.get_protocol()
        return connection if isinstance(connection, _Connection) and connection in self._open else None

    def _accept(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        for _ in range(ACCEPTED_TOGETHER):
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("HTTP connections cannot be accepted", error=error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                self._paused = loop.call_later(ACCEPT_AGAIN_S, self.listen, listener, tls)
                return
            if len(self) >= self._most and not self._end_longest_waiting():
                metrics.HTTP_CONNECTIONS_REFUSED.inc()
                accepted.close()
                continue
            accepted.setblocking(False)
            age_s = self._max_age_s * random.uniform(1 - AGE_SPREAD, 1 + AGE_SPREAD)
            connection = _Connection(self, asyncio.get_running_loop().time() + age_s)
            self._open.add(connection)
            self._waiting[connection] = None
            connection.begin(accepted, tls)

    def _end_longest_waiting(self) -> bool:
        """End the connection that waits for a request for the longest time; return False if there is none."""
        for connection in self._waiting:
            if connection.abort():
                self.closed(connection)
                return True
        return False


class _Connection(asyncio.Protocol):
    """A connection, which passes everything on to the protocol that serves it."""

    def __init__(self, connections: HttpConnections, old_at: float) -> None:
        self.old_at = old_at
        """Time of the loop from which on the connection is used for no new request."""
        self.deadline: asyncio.TimerHandle | None = None
        """Timer of the headers; None while none are awaited."""
        self._connections = connections
        self._task: asyncio.Task[None] | None = None
        self._begun = False
        """The task has started, so that it can be cancelled."""
        self._transport: asyncio.Transport | None = None
        """Transport of the connection; None before the end of its TLS handshake."""
        self._protocol: asyncio.Protocol | None = None
        """Protocol that serves the connection; None if it was refused."""
        self._stalled: asyncio.TimerHandle | None = None
        """Timer of what the client has to read; None while little waits for it."""

    def begin(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Serve an accepted socket, after the TLS handshake if there is one."""
        self._task = asyncio.create_task(self._begin(accepted, tls))

    async def _begin(self, accepted: socket.socket, tls: ssl.SSLContext | None) -> None:
        if not self._connections.is_waiting(self):  # it was ended to make room
            accepted.close()
            return
        self._begun = True
        try:
            with suppress(OSError):  # the client has left, speaks no TLS, or took too long
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self,
                    accepted,
                    ssl=tls,
                    ssl_handshake_timeout=None if tls is None else HEADERS_S,
                )
        finally:
            if self._transport is None:
                self._connections.closed(self)

    def abort(self) -> bool:
        """End the connection at once, unless its client still reads an answer; return whether it ended."""
        if self._transport is None:
            if self._task is not None and self._begun:
                self._task.cancel()
        elif self._transport.get_write_buffer_size():
            return False
        else:
            self._transport.abort()
        return True

    def close(self) -> None:
        """End the connection once its client has what was written."""
        if self._transport is None:
            self.abort()
        else:
            self._transport.close()

    def await_headers(self, awaited: bool) -> None:
        """Start the timer of a request's headers, or stop it."""
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        if awaited:
            assert self._transport is not None, "headers come after the handshake"
            self.deadline = asyncio.get_running_loop().call_later(HEADERS_S, self._transport.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The loop's own classes (uvloop's) need not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        if not self._connections.is_waiting(self):  # it was ended to make room
            self._transport.abort()
            return
        self._protocol = self._connections.make_protocol()
        self.await_headers(True)
        self._protocol.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._protocol is not None:
            if self.deadline is None and self._connections.is_waiting(self):
                self._connections.begins(self)
            self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        if self._protocol is None:
            return None
        if self._transport is not None and not self._connections.is_waiting(self):
            # The client sends nothing any more and awaits an answer. aiohttp closes the connection too, but only
            # once the client has read what was written; until then its request would go on.
            self._transport.abort()
        return self._protocol.eof_received()

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._await_reading(None)
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._stop_stalled()
            self._protocol.resume_writing()

    def _await_reading(self, before: int | None) -> None:
        """End the connection if its client has read nothing since `before` bytes waited for it; else look again
        later."""
        assert self._transport is not None, "it is written to"
        size = self._transport.get_write_buffer_size()
        if before is not None and size >= before:
            self._transport.abort()
        else:
            loop = asyncio.get_running_loop()
            self._stalled = loop.call_later(STALLED_S, self._await_reading, size)

    def _stop_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_stalled()
        self._connections.closed(self)
        if self._protocol is not None:
            self._protocol.connection_lost(error)
