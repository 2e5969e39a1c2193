"""A TCP proxy whose connections can be cut, or go silent in one direction or both: what a network does to its
users.

Who dialled a connection is found in /proc (Linux), so that one dialler can be cut off from one target while
all dial the same port.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Literal

HOST = "127.0.0.1"
CHUNK_BYTES = 65_536

Direction = Literal["up", "down"]
"""up: from the dialler to the target."""
BOTH: tuple[Direction, ...] = ("up", "down")


def ports_of(pid: int) -> set[int]:
    """Return the local TCP ports of a process's open connections; none if it has ended."""
    inodes = set()
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    except OSError:
        return set()
    ports = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[9] in inodes:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


class Connection:
    """One dialled connection and its other half."""

    def __init__(self, port: int) -> None:
        self.port = port
        """Port of the dialler."""
        self.gates: dict[Direction, asyncio.Event] = {direction: asyncio.Event() for direction in BOTH}
        self.writers: list[asyncio.StreamWriter] = []
        self.is_cut = False
        self.delay_s = 0.0
        """Delay of each piece of data, in either direction."""
        for gate in self.gates.values():
            gate.set()

    def hold(self, directions: tuple[Direction, ...]) -> None:
        """Let nothing pass in these directions; the data waits, as it does in a network that comes back."""
        for direction in directions:
            self.gates[direction].clear()

    def release(self) -> None:
        """Let everything pass again, at once."""
        self.delay_s = 0.0
        for gate in self.gates.values():
            gate.set()

    def cut(self) -> None:
        """Reset both ends."""
        self.is_cut = True
        for writer in self.writers:
            writer.transport.abort()
        self.release()


class Proxy:
    """Proxy that listens from its construction; `serve` within a running loop."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._socket = socket.socket()
        self._socket.bind((HOST, 0))
        self._socket.listen(512)
        self.address = f"{HOST}:{self._socket.getsockname()[1]}"
        self.connections: set[Connection] = set()
        self._cut_off: dict[int, tuple[Direction, ...]] = {}
        self._delayed_s: dict[int, float] = {}
        self._held: dict[int, list[Connection]] = {}
        self._server: asyncio.Server | None = None
        self._taking: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Begin to accept connections."""

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._take(reader, writer))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)

        self._server = await asyncio.start_server(take, sock=self._socket)

    async def close(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        self._socket.close()
        for connection in list(self.connections):
            connection.cut()
        await asyncio.gather(*self._taking, return_exceptions=True)

    def of(self, pid: int) -> list[Connection]:
        """Return the connections that this process has dialled."""
        ports = ports_of(pid)
        return [connection for connection in self.connections if connection.port in ports]

    def cut(self, pid: int) -> int:
        """Reset this process's connections; return their number."""
        connections = self.of(pid)
        for connection in connections:
            connection.cut()
        return len(connections)

    def hold(self, pid: int, directions: tuple[Direction, ...]) -> int:
        """Hold all data between this process and the target, on new connections too, until `release`."""
        self._cut_off[pid] = directions
        connections = self.of(pid)
        for connection in connections:
            connection.hold(directions)
        self._held.setdefault(pid, []).extend(connections)
        return len(connections)

    def delay(self, pid: int, delay_s: float) -> int:
        """Hold each piece of data between this process and the target for `delay_s`, on new connections too,
        until `release`.
        """
        self._delayed_s[pid] = delay_s
        connections = self.of(pid)
        for connection in connections:
            connection.delay_s = delay_s
        self._held.setdefault(pid, []).extend(connections)
        return len(connections)

    def release(self, pid: int) -> None:
        """Restore the network."""
        self._cut_off.pop(pid, None)
        self._delayed_s.pop(pid, None)
        # Not `of(pid)`: the process may have closed its own end by now.
        for connection in self._held.pop(pid, []):
            connection.release()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer.get_extra_info("peername")[1])
        connection.writers.append(writer)
        for pid, directions in self._cut_off.items():
            if connection.port in ports_of(pid):
                connection.hold(directions)
                self._held.setdefault(pid, []).append(connection)
        for pid, delay_s in self._delayed_s.items():
            if connection.port in ports_of(pid):
                connection.delay_s = delay_s
                self._held.setdefault(pid, []).append(connection)
        self.connections.add(connection)
        try:
            target_reader, target_writer = await asyncio.open_connection(*self._target)
        except OSError:  # no process listens: the dialler sees the same
            connection.cut()
            self.connections.discard(connection)
            return
        connection.writers.append(target_writer)
        if connection.is_cut:  # while it was made
            connection.cut()
        try:
            await asyncio.gather(
                self._pump(reader, target_writer, connection, "up"),
                self._pump(target_reader, writer, connection, "down"),
            )
        finally:
            self.connections.discard(connection)
            for end in connection.writers:
                end.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: Connection,
        direction: Direction,
    ) -> None:
        gate = connection.gates[direction]
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await gate.wait()
                if connection.delay_s:
                    await asyncio.sleep(connection.delay_s)
                writer.write(data)
                await writer.drain()
            await gate.wait()
            if writer.can_write_eof():
                writer.write_eof()
