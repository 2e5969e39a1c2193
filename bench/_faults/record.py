"""Faults of the record: it loses keys, scripts or its newest writes, or has no disk space or memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

import redis.asyncio as redis_client

from bench._faults.plans import Fault
from bench._faults.processes import Processes
from laps_sd.stack.local import LocalStack

TAIL_S = 1.0
"""Newest writes that a record loses, in seconds: the server syncs every second."""
DISK_BYTES = 4096
"""Bytes that still fit on a full disk."""


class Record:
    """The server of the record."""

    def __init__(self, stack: LocalStack, processes: Processes, now: Callable[[], float]) -> None:
        self._stack = stack
        self._processes = processes
        self._now = now
        self._written: list[tuple[float, Path, int]] = []
        """Sizes of the record's append-only file, each with its time."""

    def note_size(self) -> None:
        """Note the size of the append-only file, and forget sizes older than `TAIL_S`."""
        now_s = self._now()
        with contextlib.suppress(OSError):
            for path in (self._stack.dir / "valkey" / "appendonlydir").glob("*.incr.aof"):
                self._written.append((now_s, path, path.stat().st_size))
        self._written = [entry for entry in self._written if now_s - entry[0] <= TAIL_S]

    async def empty(self) -> None:
        """Delete all keys."""
        async with redis_client.Redis.from_url(self._stack.redis_url) as record:
            await record.flushall()

    async def flush_scripts(self) -> None:
        """Delete the scripts that the server holds."""
        async with redis_client.Redis.from_url(self._stack.redis_url) as record:
            await record.script_flush()

    async def has_unwritten(self) -> bool:
        """Return whether the server answers writes that are not in its file yet, so that SIGKILL would lose
        them.

        It syncs the file every second, in a thread. While a sync lasts it holds new writes back, for two
        seconds at most, and answers them all the same: docs/guarantees.md.
        """
        async with redis_client.Redis.from_url(self._stack.redis_url) as record:
            state = await record.info("persistence")
            return bool(state["aof_pending_bio_fsync"] or state["aof_buffer_length"])

    async def lose_tail(self, fault: Fault) -> None:
        """Simulate a power loss of the record alone: its newest writes are lost, and it is down a while."""
        self._processes.kill("valkey")
        self._stack.children["valkey"].wait(5.0)
        newest = max((entry for entry in self._written if entry[1].exists()), default=None)
        if newest is not None:
            path = newest[1]
            size = min(entry[2] for entry in self._written if entry[1] == path)
            os.truncate(path, min(size, path.stat().st_size))
        await asyncio.sleep(fault.lasts_s)
        await self._processes.start("valkey")

    async def fill_disk(self, fault: Fault) -> None:
        """Limit the size of the server's files; the server takes this for a full disk."""
        pid = self._stack.children["valkey"].pid or 0
        sizes = [size for _, _, size in self._written] or [0]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (max(sizes) + DISK_BYTES, resource.RLIM_INFINITY))
        await asyncio.sleep(fault.lasts_s)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    async def fill_memory(self, fault: Fault) -> None:
        """Limit the memory of the server to a part of what it uses."""
        async with redis_client.Redis.from_url(self._stack.redis_url) as record:
            used = int((await record.info("memory"))["used_memory"])
            await record.config_set("maxmemory", max(1, int(used * fault.draw)))
            await asyncio.sleep(fault.lasts_s)
            await record.config_set("maxmemory", 0)
