"""Clients that cost next to nothing while a stream runs: they note what arrived and when, and read it
afterwards.

A client library takes several times as long over a message as the server did. On a machine that both share,
the delay that is then measured is the client's. Here a connection is one `asyncio.Protocol`, and only the
headers of HTTP/2 frames are looked at on arrival, because settings and pings want an answer.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterator
from typing import cast

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_INITIAL_WINDOW_SIZE = 4
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_LARGEST_WINDOW, _FIRST_WINDOW = 2**31 - 1, 65_535


class Arrivals(asyncio.Protocol):
    """One request and all data received. `ended` is done when the other side has sent everything."""

    def __init__(self, request: bytes) -> None:
        self.body: list[tuple[float, bytes]] = []
        """Pieces of the answer's body, each with its arrival time (monotonic clock)."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionError("the connection closed before the stream ended"))

    def _end(self, error: Exception | None = None) -> None:
        if not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)

    def _in_parts(self, sizes: Iterator[int], whole: bytes) -> list[tuple[float, bytes]]:
        """Return `whole`, which is the body, cut into parts of these sizes; the time of a part is that of its
        last byte.
        """
        parts, start, pieces = [], 0, iter(self.body)
        reached, now = 0, 0.0
        for size in sizes:
            while reached < start + size:
                now, piece = next(pieces)
                reached += len(piece)
            parts.append((now, whole[start : start + size]))
            start += size
        return parts


class GrpcArrivals(Arrivals):
    """Call with one request message, over a connection of its own, with windows that
    never close (RFC 9113).
    """

    def __init__(self, path: str, message: bytes) -> None:
        names = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        # Each a literal header field without indexing and without Huffman coding (RFC 7541, section 6.2.2).
        fields = b"".join(
            b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
            for name, value in names.items()
        )
        windows = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _LARGEST_WINDOW)
        super().__init__(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, windows)
            + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _LARGEST_WINDOW - _FIRST_WINDOW))
            + _frame(_HEADERS, _END_HEADERS, 1, fields)
            + _frame(_DATA, _END_STREAM, 1, struct.pack(">BI", 0, len(message)) + message)
        )
        self._unread = b""

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        data = self._unread + data
        at = 0
        while len(data) - at >= 9:
            end = at + 9 + int.from_bytes(data[at : at + 3])
            if end > len(data):
                break
            kind, flags = data[at + 3], data[at + 4]
            if kind == _DATA:
                self.body.append((now, data[at + 9 : end]))
            elif kind in (_SETTINGS, _PING) and not flags & _ACK:
                self._transport.write(_frame(kind, _ACK, 0, data[at + 9 : end] if kind == _PING else b""))
            elif kind in (_RST_STREAM, _GOAWAY):
                self._end(ConnectionError(f"HTTP/2 frame of type {kind}: {data[at + 9 : end]!r}"))
            if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
                self._end()
            at = end
        self._unread = data[at:]

    def messages(self) -> list[tuple[float, bytes]]:
        """Return the arrival time of each message, and the message, serialized."""
        whole = b"".join(piece for _, piece in self.body)

        def sizes() -> Iterator[int]:
            at = 0
            while at < len(whole):
                size = 5 + int.from_bytes(whole[at + 1 : at + 5])
                yield size
                at += size

        return [(now, part[5:]) for now, part in self._in_parts(sizes(), whole)]


class HttpArrivals(Arrivals):
    """POST of JSON by HTTP/1.1, and its answer in chunks (RFC 9112, section 7.1)."""

    def __init__(self, path: str, body: bytes) -> None:
        self._tail = b""
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        super().__init__(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self.body.append((time.monotonic(), data))
        self._tail = (self._tail + data)[-len(_LAST_CHUNK) :]  # it may arrive in pieces
        if self._tail == _LAST_CHUNK:
            self._end()

    def answer(self) -> tuple[dict[str, str], list[tuple[float, bytes]]]:
        """Return the headers by their lower-case names, and the chunks with their arrival times."""
        whole = b"".join(piece for _, piece in self.body)
        head, _, chunks = whole.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        if " 200 " not in lines[0]:
            raise ConnectionError(f"{lines[0]}: {chunks[:500]!r}")

        def sizes() -> Iterator[int]:
            at = len(head) + 4
            yield at
            while at < len(whole):
                line = whole.index(b"\r\n", at)
                size = line + 2 - at + int(whole[at:line], 16) + 2
                yield size
                at += size

        parts = self._in_parts(sizes(), whole)[1:]
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines[1:])
        }
        return headers, [(now, part.partition(b"\r\n")[2][:-2]) for now, part in parts]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload
