"""Properties of a stack that bad input must not change: its processes, their memory and logs, and the results
of other clients.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio

from laps_sd.stack.local import LocalStack
from laps_sd.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from laps_sd.v1 import inference_pb2 as pb
from tests.helpers import wait_until_async
from tests.system.calls import Outcome, seeded, stream_all
from tests.system.hostile import rss_mib
from tests.system.tally import Tally


def beside() -> list[pb.GenerateRequest]:
    """Return the requests of well-behaved clients during the test."""
    return [seeded(f"Story {i}:", seed=100 + i, max_tokens=24, ignore_eos=True) for i in range(6)]


@dataclass
class Watch:
    """Properties of a stack that bad input must not change."""

    stack: LocalStack
    pids: dict[str, int | None]
    rss: dict[str, float]

    @classmethod
    def over(cls, stack: LocalStack) -> Watch:
        pids = {name: child.pid for name, child in stack.children.items()}
        rss = {name: rss_mib(pid) for name, pid in pids.items() if pid is not None}
        return cls(stack, pids, rss)

    def grown(self) -> dict[str, float]:
        return {name: rss_mib(pid) - self.rss[name] for name, pid in self.pids.items() if pid is not None}

    def check_alive(self) -> None:
        """Check that the processes are the same, and that none of them wrote a traceback."""
        self.stack.check()
        assert {name: child.pid for name, child in self.stack.children.items()} == self.pids
        for name in self.pids:
            log = self.stack.log(name)
            assert "Traceback" not in log, f"{name}: {log[max(0, log.index('Traceback') - 500) :][:3000]}"

    def check_memory(self, most_mib: float) -> None:
        grown = self.grown()
        for name in ("gateway-0", "scheduler-0"):
            assert grown[name] < most_mib, f"{name} has grown by {grown[name]:.0f} MiB"

    def check(self, tally: Tally, *, count: int, most_mib: float) -> None:
        """Check that this many inputs were all answered rightly, and harmed nothing; print the counts of
        their results.
        """
        growth = ", ".join(f"{name} {mib:+.0f}" for name, mib in self.grown().items())
        print(f"\n{tally}\n  resident memory, MiB: {growth}")
        self.check_alive()
        assert not tally.complaints, f"{len(tally.complaints)} wrong answers:\n" + "\n".join(
            tally.complaints[:20]
        )
        assert tally.inputs == count
        self.check_memory(most_mib)


class Beside:
    """A client that repeats the same requests, and compares each result with the one without other input."""

    def __init__(self, stub: Any, alone: list[Outcome]) -> None:
        self._stub = stub
        self._alone = alone
        self._stop = False
        self.rounds = 0

    async def run(self) -> None:
        while not self._stop:
            outcomes = await stream_all(self._stub, beside())
            for outcome, alone in zip(outcomes, self._alone, strict=True):
                assert outcome.tokens == alone.tokens
                assert outcome.text == alone.text
            self.rounds += 1
            await asyncio.sleep(0.05)

    def stop(self) -> None:
        self._stop = True


@contextlib.asynccontextmanager
async def undisturbed(stack: LocalStack) -> AsyncIterator[list[Outcome]]:
    """Run well-behaved clients during the body; yield their results from before it. They get the same
    throughout.
    """
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        alone = await stream_all(stub, beside())
        watcher = Beside(stub, alone)
        running = asyncio.create_task(watcher.run())
        try:
            yield alone
        finally:
            watcher.stop()
            await running
        assert watcher.rounds > 0


async def queue(stack: LocalStack) -> admin_pb2.ListQueueResponse:
    async with grpc.aio.insecure_channel(stack.scheduler_address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        return await admin.ListQueue(admin_pb2.ListQueueRequest(limit=10_000), timeout=60)


async def check_queue_empties(stack: LocalStack, *, timeout_s: float = 60.0) -> None:
    async def empty() -> bool:
        found = await queue(stack)
        return found.total == 0 and not found.entries

    await wait_until_async(
        empty, description="the scheduler's queue is empty", timeout_s=timeout_s, every_s=0.2
    )
