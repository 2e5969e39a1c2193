"""The injector: it runs the planned faults on a stack of processes."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable, Coroutine

from bench._clients import Outcome
from bench._faults.deadly import DeadlyRequests
from bench._faults.network import Network
from bench._faults.plans import DOUBLE, KINDS, WEIGHTS, Fault, InjectedFault
from bench._faults.processes import Processes
from bench._faults.record import Record
from bench._faults.state import ASK_S, StackState
from bench._faults.victims import Victims
from bench._proxy import Proxy
from laps_sd.stack.local import LocalStack

PATIENCE_S = 2.0
"""Seconds that a fault waits for a possible victim."""
LONG_PATIENCE_S = 20.0
"""Seconds that a fault of several victims waits until all of them are up at once."""


class FaultInjector:
    """Injector of the planned faults: it runs each fault in a task of its own and repairs the damage
    afterwards."""

    def __init__(
        self,
        stack: LocalStack,
        proxies: dict[str, Proxy],
        *,
        now: Callable[[], float],
        workers: int,
        own_pid: int,
        deadly: Callable[[int], Awaitable[Outcome]],
        kinds: tuple[str, ...] = KINDS,
    ) -> None:
        """`deadly` runs a request that ends the process of each worker that runs it."""
        self._stack = stack
        self._now = now
        self._kinds = kinds
        self._weights = [WEIGHTS[kind] for kind in kinds]
        self.state = StackState()
        self.injected: list[InjectedFault] = []
        self.problems: list[str] = []
        self.processes = Processes(stack, self.state, self.problems)
        self._victims = Victims(stack, self.processes, self.state, workers=workers, now=now)
        self._record = Record(stack, self.processes, now)
        self._network = Network(stack, proxies, self.processes, own_pid)
        self._deadly = DeadlyRequests(deadly, self.problems)
        self._tasks: set[asyncio.Task[None]] = set()

    async def watch(self) -> None:
        """Keep `state` up to date until cancelled."""
        while True:
            await self.look()
            for name, child in list(self._stack.children.items()):
                if not child.alive and name not in self.processes.expected_ends:
                    self.processes.expected_ends.add(name)
                    if self._deadly.count_death(name, child.returncode):
                        # Kubernetes starts it again too.
                        self._run(self.processes.start(name), f"{name} again")
                        continue
                    self.problems.append(
                        f"{name} died by itself, exit code {child.returncode}:\n{child.log_tail()}"
                    )
            self._record.note_size()
            await asyncio.sleep(ASK_S)

    async def look(self) -> None:
        """Update `state` once."""
        await self.state.look(self._stack, self._now)

    async def inject(self, fault: Fault) -> None:
        """Begin the fault as soon as there is a victim for its kind; if that takes long, begin one of another
        kind in its place.
        """
        rng = random.Random(fault.draw)
        began_s = self._now()
        while (victims := self._victims.choose(fault, deadly_open=self._deadly.open)) is None:
            await asyncio.sleep(0.05)
            if self._now() - began_s > (LONG_PATIENCE_S if fault.kind in DOUBLE else PATIENCE_S):
                fault = dataclasses.replace(fault, kind=rng.choices(self._kinds, self._weights)[0])
        hits = any(self._carries(name) for name in victims) or fault.kind == "deadly request"
        carried = bool(self.state.unfinished) and hits
        done = InjectedFault(fault, victims, self._now(), carried)
        self.injected.append(done)
        self._victims.spare_recovery(done)
        self._victims.hit(victims)
        self._run(self._carry_out(done), fault.kind)

    async def all_over(self) -> None:
        """Wait until every fault is over and its victims are back."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _run(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _carries(self, name: str) -> bool:
        if name.startswith("worker-"):
            return self.state.listed.get(name, 0) > 0
        if name.startswith("scheduler-"):
            return name == self.state.leader
        # Both gateways have streams while there are more of these than a few; the record has everything.
        return True

    async def _carry_out(self, done: InjectedFault) -> None:
        fault, victims = done.fault, done.victims
        try:
            await self._break(done)
        except Exception as error:
            self.problems.append(
                f"fault {fault.number} ({fault.kind} {victims}) could not be repaired: {error!r}"
            )
        finally:
            self._victims.back(victims)
            done.over_s = self._now()
            self._victims.spare_recovery(done)

    async def _break(self, done: InjectedFault) -> None:
        fault, victims = done.fault, done.victims
        match fault.kind.split():
            case ["scale", "up"]:
                await self.processes.scale_up()
            case ["deadly", "request"]:
                await self._deadly.run(done, self.injected)
            case ["scale", "down"]:
                self.processes.retired.add(victims[0])
                await self.processes.terminate(victims[0])
            case ["drain", "worker"]:
                await self.processes.drain(victims[0])
                await self.processes.ended(victims[0])
                await self.processes.start(victims[0])
            case ["empty", "record"]:
                await self._record.empty()
            case ["empty", "record", "and", "kill", "leader"]:
                done.loses = True
                self.processes.kill(victims[1])
                await self._record.empty()
                await asyncio.sleep(fault.down_s)
                await self.processes.start(victims[1])
            case ["lose", "tail", "of", "record"]:
                await self._record.lose_tail(fault)
            case ["fill", "disk", "of", "record"]:
                await self._record.fill_disk(fault)
            case ["fill", "memory", "of", "record"]:
                await self._record.fill_memory(fault)
            case ["flush", "scripts", "of", "record"]:
                await self._record.flush_scripts()
            case ["half-open", _]:
                await self._network.leave_half_open(victims[0], fault)
            case ["kill", "everything"]:
                # Nothing else that knows the newest requests stays alive.
                done.loses = await self._record.has_unwritten()
                for name in victims:
                    self.processes.kill(name)
                await asyncio.sleep(fault.down_s)
                await self.processes.start("valkey")
                await asyncio.gather(*(self.processes.start(name) for name in victims if name != "valkey"))
            case ["restart", "record"]:
                await self.processes.terminate("valkey")
                await self.processes.start("valkey")
            case ["kill", "leader", "while", "a", "worker", "drains"]:
                await self.processes.drain(victims[1])
                await asyncio.sleep(0.2 * fault.draw)
                self.processes.kill(victims[0])
                await asyncio.sleep(fault.down_s)
                await self.processes.start(victims[0])
                self._stack.children[victims[1]].request_stop()  # the order may have died with the leader
                await self.processes.ended(victims[1])
                await self.processes.start(victims[1])
            case ["kill", "engine"]:
                self.processes.kill_engine(victims[0])
                await self.processes.ended(victims[0])
                await asyncio.sleep(fault.down_s)
                await self.processes.start(victims[0])
            case ["pause", "engine"]:
                await self.processes.pause_engine(victims[0], fault.lasts_s)
            case ["kill", *_]:
                for name in victims:
                    self.processes.kill(name)
                await asyncio.sleep(fault.down_s)
                await asyncio.gather(*(self.processes.start(name) for name in victims))
            case ["pause", *_]:
                for name in victims:
                    self._stack.pause(name)
                await asyncio.sleep(fault.lasts_s)
                for name in victims:
                    self._stack.resume(name)
            case ["stop", *_]:
                await self.processes.terminate(victims[0])
                await self.processes.start(victims[0])
            case ["cut" | "silence" | "half-silence" | "delay" as how, *what]:
                await self._network.disturb(how, what, victims[0], fault)
