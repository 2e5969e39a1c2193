"""The last known state of the stack, from its schedulers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc.aio

from laps_sd.stack.local import LocalStack
from laps_sd.v1 import admin_pb2, admin_pb2_grpc

ASK_S = 0.5
"""Seconds between two queries of the leader and of the components that carry requests."""


@dataclass(slots=True)
class StackState:
    """Last known state of the stack."""

    leader: str = ""
    led_since_s: float | None = None
    leaderless_since_s: float | None = None
    longest_leaderless_s: float = 0.0
    unfinished: int = 0
    listed: dict[str, int] = field(default_factory=dict)
    """Requests on the list of each worker."""
    draining: set[str] = field(default_factory=set)

    def loads(self, name: str) -> bool:
        """Return whether a component can have requests: there is a leader, and to it a worker has connected."""
        return bool(self.leader) and (not name.startswith("worker-") or name in self.listed)

    async def look(self, stack: LocalStack, now: Callable[[], float]) -> None:
        """Update the state once, from the answers of the schedulers."""
        leader = ""
        for name in names(stack, "scheduler-"):
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.TimeoutError):
                async with grpc.aio.insecure_channel(stack.address(name)) as channel:
                    admin = admin_pb2_grpc.AdminStub(channel)
                    workers = await admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=1.0)
                    queue = await admin.ListQueue(admin_pb2.ListQueueRequest(limit=1), timeout=1.0)
                    leader = name
                    self.unfinished = queue.total
                    self.listed = {worker.worker_name: worker.listed for worker in workers.workers}
                    self.draining = {w.worker_name for w in workers.workers if w.draining}
        self.leader = leader
        now_s = now()
        if leader:
            self.leaderless_since_s = None
            if self.led_since_s is None:
                self.led_since_s = now_s
            return
        self.led_since_s = None
        if self.leaderless_since_s is None:
            self.leaderless_since_s = now_s
        else:
            self.longest_leaderless_s = max(self.longest_leaderless_s, now_s - self.leaderless_since_s)


def names(stack: LocalStack, prefix: str) -> list[str]:
    """Return the names of all components that start with the prefix, sorted."""
    return sorted(name for name in stack.children if name.startswith(prefix))
