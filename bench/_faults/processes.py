"""Processes of the stack under faults: they are killed, stopped, drained, and started again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

import grpc.aio

from bench._faults.state import StackState, names
from laps_sd.stack.local import LocalStack
from laps_sd.stack.readiness import is_serving
from laps_sd.v1 import admin_pb2, admin_pb2_grpc

LEAVING_S = 60.0
ENGINE_MODULE = "worker_svc.runner.process"
"""Module of the process of a worker's engine."""


class Processes:
    """Processes of the stack, by the names of their components."""

    def __init__(self, stack: LocalStack, state: StackState, problems: list[str]) -> None:
        """`problems` receives what goes wrong."""
        self._stack = stack
        self._state = state
        self._problems = problems
        self.expected_ends: set[str] = set()
        """Processes whose end is expected, because the run stopped or killed them."""
        self.retired: set[str] = set()
        """Workers that were scaled down."""
        self._starting: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def schedulers(self) -> list[str]:
        """Return the names of all schedulers."""
        return names(self._stack, "scheduler-")

    def gateways(self) -> list[str]:
        """Return the names of all gateways."""
        return names(self._stack, "gateway-")

    def workers(self) -> list[str]:
        """Return the names of the workers that are meant to run."""
        return [name for name in names(self._stack, "worker-") if name not in self.retired]

    def kill(self, name: str) -> None:
        """Send SIGKILL."""
        self.expected_ends.add(name)
        self._stack.children[name].signal(signal.SIGKILL)

    def kill_engine(self, name: str) -> None:
        """Send SIGKILL to the process of a worker's engine; the worker then ends by itself."""
        self.expected_ends.add(name)
        for pid in self._engines(name):
            os.kill(pid, signal.SIGKILL)

    async def pause_engine(self, name: str, lasts_s: float) -> None:
        """Stop the process of a worker's engine for a while; the worker itself continues."""
        engines = self._engines(name)
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(lasts_s)
        for pid in engines:
            os.kill(pid, signal.SIGCONT)

    def _engines(self, name: str) -> list[int]:
        """Return the process ids of a worker's engine: one, or none while the worker ends."""
        group = self._stack.children[name].pid
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if os.getpgid(int(entry.name)) == group and ENGINE_MODULE in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
        return found

    async def terminate(self, name: str) -> None:
        """Send SIGTERM, and wait until the process ends."""
        self.expected_ends.add(name)
        self._stack.children[name].request_stop()
        await self.ended(name)

    async def ended(self, name: str) -> None:
        """Wait until a drained process ends. If the order was lost with its leader, SIGTERM repeats it. A
        process that stays far longer than its own bound is recorded as a problem, and killed, as an
        orchestrator would.
        """
        child = self._stack.children[name]
        began = time.monotonic()
        asked_again = False
        while child.alive:
            waited_s = time.monotonic() - began
            if waited_s > LEAVING_S / 4 and not asked_again:
                asked_again = True
                child.request_stop()
            if waited_s > LEAVING_S:
                self._problems.append(f"{name} did not leave within {LEAVING_S:g} s of being asked to")
                self.kill(name)
            await asyncio.sleep(0.05)

    async def start(self, name: str) -> None:
        """Start the process again unless another fault has done so since, and wait until it answers. A worker
        can be hit by a fault and by a deadly request at once. One that was scaled down stays away.
        """
        async with self._starting[name]:
            # On a busy machine a killed process can still be there.
            gone = name in self.expected_ends or not self._stack.children[name].alive
            if gone and name not in self.retired:
                await asyncio.to_thread(self._stack.restart, name, wait=False)
                if name not in self.retired:
                    self.expected_ends.discard(name)
        if name not in self.retired:
            await self._ready(name)

    async def _ready(self, name: str) -> None:
        if name == "valkey":
            await asyncio.to_thread(self._stack.wait_ready, name)
            return
        # Not readiness: that of a worker or gateway needs a leader, which may be the next to be hit. A worker
        # lives long before it has loaded its model.
        service = "engine" if name.startswith("worker-") else "liveness"
        while self._stack.children[name].alive:
            if await asyncio.to_thread(is_serving, self._stack.address(name), service):
                return
            await asyncio.sleep(0.1)

    async def drain(self, name: str) -> None:
        """Order a drain, as an operator does, and repeat the order until a leader takes it. SIGTERM repeats
        an order that was lost with its leader.
        """
        self.expected_ends.add(name)
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with grpc.aio.insecure_channel(
                    self._stack.address(self._state.leader or "scheduler-0")
                ) as channel:
                    await admin_pb2_grpc.AdminStub(channel).DrainWorker(
                        admin_pb2.DrainWorkerRequest(worker=name), timeout=1.0
                    )
                return
            await asyncio.sleep(0.2)
        self._stack.children[name].request_stop()

    async def scale_up(self) -> None:
        """Start a worker that was scaled down before, or a new one."""
        if self.retired:
            name = min(self.retired)
            self.retired.discard(name)
            await self.start(name)
        else:
            name = await asyncio.to_thread(self._stack.add_worker, wait=False)
            await self._ready(name)
