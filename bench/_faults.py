"""Fault injection: a plan that a seed decides, and its execution on a stack of processes.

A plan holds the kind of each fault, its time, its duration and a random draw that picks its victim among
those that can be hit at that time. A component that is still down from an earlier fault is not hit again
before it is back, and one of each pair stays up, unless the kind names more: every line of docs/guarantees.md
is about a fault while the other parts run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import resource
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import redis.asyncio as redis_client

from bench._clients import Outcome
from bench._proxy import BOTH, Direction, Proxy
from laps_sd.stack.local import LocalStack
from laps_sd.stack.readiness import is_serving
from laps_sd.v1 import admin_pb2, admin_pb2_grpc

PATIENCE_S = 2.0
"""Seconds that a fault waits for a possible victim."""
LONG_PATIENCE_S = 20.0
"""Seconds that a fault of several victims waits until all of them are up at once."""
LONGEST_DELAY_S = 0.4
"""Upper bound of the delay of each piece of data on a slow connection, in seconds."""
TAIL_S = 1.0
"""Newest writes that a record loses, in seconds: the server syncs every second."""
DISK_BYTES = 4096
"""Bytes that still fit on a full disk."""
LONGEST_S = 8.0
"""Upper bound of a pause or a silence, in seconds: longer than the lease, the links' silence and a worker's
grace, so that both sides of each bound occur."""
DOWN_S = 2.0
"""Upper bound of the time from a process's kill to its restart, in seconds."""
ASK_S = 0.5
"""Seconds between two queries of the leader and of the components that carry requests."""
LEAVING_S = 60.0
DEADLY_S = 180.0
"""Seconds within which a deadly request has ended, whatever else breaks."""
MOST_DEATHS = 12
"""Upper bound of the workers that one deadly request may end: five if nothing else breaks; more if a worker
is given up and comes back, or is hit by another fault, which the scheduler cannot distinguish."""
RECOVERY_S = 10.0
"""Seconds after a record that lost writes is back, in which no fault hits it or its leader, nor, if the
leader died with it, a gateway. The record also loses nothing if a fault hit its leader within this time. Both
faults together are a fault of another kind. The record is emptied and its leader killed only if the gateways
were spared, and led, for this time: then the streams are open at a gateway again, and gateways and workers
are what this fault is survived by."""

WEIGHTS = {
    "kill worker": 10, "pause worker": 8, "drain worker": 5, "scale down": 4, "scale up": 3,
    "cut worker": 6, "silence worker": 4, "half-silence worker": 4,
    "kill leader": 5, "pause leader": 5, "stop leader": 3, "kill standby": 1,
    "cut leader from record": 4, "silence leader from record": 3, "half-silence leader from record": 3,
    "kill gateway": 6, "pause gateway": 5, "stop gateway": 3,
    "cut gateway": 4, "silence gateway": 3, "half-silence gateway": 3,
    "cut clients": 5, "silence clients": 2, "half-silence clients": 2,
    "pause record": 4, "restart record": 3, "kill record": 3, "empty record": 4,
    "kill leader and record": 2, "kill leader while a worker drains": 2, "kill gateway and worker": 3,
    "empty record and kill leader": 1,
    "lose tail of record": 5, "fill disk of record": 3, "fill memory of record": 3, "flush scripts of record": 2,
    "delay worker": 3, "delay gateway": 3, "delay clients": 2, "delay leader from record": 3,
    "half-open worker": 3, "half-open gateway": 2,
    "kill schedulers": 2, "pause schedulers": 2, "kill gateways": 2, "pause gateways": 2, "kill everything": 2,
    "deadly request": 3,
}  # fmt: skip
DOUBLE = frozenset(
    {
        "kill leader and record",
        "kill leader while a worker drains",
        "kill gateway and worker",
        "empty record and kill leader",
        "lose tail of record",
        "kill schedulers",
        "pause schedulers",
        "kill gateways",
        "pause gateways",
        "kill everything",
        "deadly request",
    }
)
"""Kinds of faults that need several components up at once."""
KINDS = tuple(WEIGHTS)


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the plan."""

    number: int
    after_s: float
    """Seconds since the previous fault."""
    kind: str
    lasts_s: float
    draw: float
    """Choice among the possible victims, 0 to 1."""


def plan(seed: int, count: int, *, every_s: float, kinds: tuple[str, ...] = KINDS) -> list[Fault]:
    """Return the plan of a seed; equal arguments give equal plans."""
    rng = random.Random(seed)
    weights = [WEIGHTS[kind] for kind in kinds]
    faults = []
    for number in range(count):
        after_s = every_s * rng.uniform(0.5, 1.5)
        [kind] = rng.choices(kinds, weights)
        # Short ones are the more interesting half: components come back while the others still react to their
        # absence.
        lasts_s = LONGEST_S * rng.random() ** 2
        faults.append(Fault(number, after_s, kind, lasts_s, rng.random()))
    return faults


@dataclass(slots=True)
class InjectedFault:
    """A fault that was injected, with its victims."""

    fault: Fault
    victims: tuple[str, ...]
    at_s: float
    carried: bool
    """True if at least one victim carried requests."""
    loses: bool = False
    """True if the record lost data, so that the losses that DESIGN permits may occur."""
    over_s: float | None = None


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
        self._proxies = proxies
        self._now = now
        self._workers = workers
        self._own_pid = own_pid
        self._deadly = deadly
        self._deaths: list[str] | None = None
        """Workers that died while a deadly request was open; None while none is open."""
        self._kinds = kinds
        self._weights = [WEIGHTS[kind] for kind in kinds]
        self.state = StackState()
        self.injected: list[InjectedFault] = []
        self.down: set[str] = set()
        """Components that were hit and are not back yet."""
        self.expected_ends: set[str] = set()
        """Processes whose end is expected, because the run stopped or killed them."""
        self._retired: set[str] = set()
        self._hit_at_s: dict[str, float] = {}
        self._emptied_at_s = float("-inf")
        self._gateways_restore = False
        """True if the leader died with the record, so that gateways and workers restore the requests."""
        self._written: list[tuple[float, Path, int]] = []
        """Sizes of the record's append-only file, each with its time."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.problems: list[str] = []

    # -- watching -------------------------------------------------------------------------------------------------------

    async def watch(self, groups: set[int]) -> None:
        """Keep `state` up to date until cancelled; add every process of the run to `groups`."""
        while True:
            await self.look()
            for name, child in list(self._stack.children.items()):
                groups.add(child.pid or 0)
                if not child.alive and name not in self.expected_ends:
                    self.expected_ends.add(name)
                    if self._is_deadly(name, child.returncode):
                        continue
                    self.problems.append(
                        f"{name} died by itself, exit code {child.returncode}:\n{child.log_tail()}"
                    )
            self._watch_the_file()
            await asyncio.sleep(ASK_S)

    def _is_deadly(self, name: str, returncode: int | None) -> bool:
        """Return whether a deadly request ended this worker; if so, start the worker again, as Kubernetes
        does.
        """
        if self._deaths is None or not name.startswith("worker-") or returncode != -signal.SIGKILL:
            return False
        self._deaths.append(name)
        starting = asyncio.create_task(self._start(name), name=f"{name} again")
        self._tasks.add(starting)
        starting.add_done_callback(self._tasks.discard)
        return True

    def _watch_the_file(self) -> None:
        now_s = self._now()
        with contextlib.suppress(OSError):
            for path in (self._stack.dir / "valkey" / "appendonlydir").glob("*.incr.aof"):
                self._written.append((now_s, path, path.stat().st_size))
        self._written = [entry for entry in self._written if now_s - entry[0] <= TAIL_S]

    async def look(self) -> None:
        """Update `state` once."""
        state = self.state
        leader = ""
        for name in self.schedulers():
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.TimeoutError):
                async with grpc.aio.insecure_channel(self._stack.address(name)) as channel:
                    admin = admin_pb2_grpc.AdminStub(channel)
                    workers = await admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=1.0)
                    queue = await admin.ListQueue(admin_pb2.ListQueueRequest(limit=1), timeout=1.0)
                    leader = name
                    state.unfinished = queue.total
                    state.listed = {worker.worker_name: worker.listed for worker in workers.workers}
                    state.draining = {w.worker_name for w in workers.workers if w.draining}
        state.leader = leader
        now = self._now()
        if leader:
            state.leaderless_since_s = None
            if state.led_since_s is None:
                state.led_since_s = now
            return
        state.led_since_s = None
        if state.leaderless_since_s is None:
            state.leaderless_since_s = now
        else:
            state.longest_leaderless_s = max(state.longest_leaderless_s, now - state.leaderless_since_s)

    def schedulers(self) -> list[str]:
        """Return the names of all schedulers."""
        return sorted(name for name in self._stack.children if name.startswith("scheduler-"))

    def gateways(self) -> list[str]:
        """Return the names of all gateways."""
        return sorted(name for name in self._stack.children if name.startswith("gateway-"))

    def workers(self) -> list[str]:
        """Return the names of the workers that are meant to run."""
        return sorted(
            name for name in self._stack.children if name.startswith("worker-") and name not in self._retired
        )

    # -- breaking -------------------------------------------------------------------------------------------------------

    async def inject(self, fault: Fault) -> None:
        """Begin the fault as soon as there is a victim for its kind; if that takes long, begin one of another
        kind in its place.
        """
        rng = random.Random(fault.draw)
        began_s = self._now()
        while (victims := self._victims(fault)) is None:
            await asyncio.sleep(0.05)
            if self._now() - began_s > (LONG_PATIENCE_S if fault.kind in DOUBLE else PATIENCE_S):
                fault = dataclasses.replace(fault, kind=rng.choices(self._kinds, self._weights)[0])
        hits = any(self._carries(name) for name in victims) or fault.kind == "deadly request"
        carried = bool(self.state.unfinished) and hits
        done = InjectedFault(fault, victims, self._now(), carried)
        self.injected.append(done)
        self._record_lost_writes(done)
        self.down.update(victims)
        for name in victims:
            self._hit_at_s[name] = self._now()
        task = asyncio.create_task(self._carry_out(done), name=fault.kind)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _record_lost_writes(self, done: InjectedFault) -> None:
        """Spare what restores a record that lost writes, until some time after it is back."""
        if done.fault.kind.startswith(("empty", "lose")):
            self._emptied_at_s = float("inf") if done.over_s is None else done.over_s
            self._gateways_restore = done.fault.kind == "empty record and kill leader"

    async def all_over(self) -> None:
        """Wait until every fault is over and its victims are back."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _carries(self, name: str) -> bool:
        if name.startswith("worker-"):
            return self.state.listed.get(name, 0) > 0
        if name.startswith("scheduler-"):
            return name == self.state.leader
        # Both gateways have streams while there are more of these than a few; the record has everything.
        return True

    def _victims(self, fault: Fault) -> tuple[str, ...] | None:
        """Return the victims of the fault, or None if there are none at the moment."""
        words = fault.kind.split()
        leader = self.state.leader
        workers = [
            name for name in self.workers() if name not in self.down and self._stack.children[name].alive
        ]
        # One stays up, so that requests continue.
        workers = workers if len(workers) > 1 else []
        busy = [name for name in workers if self.state.listed.get(name, 0)] or workers
        gateways = [] if any(name in self.down for name in self.gateways()) else self.gateways()
        schedulers_up = not any(name in self.down for name in self.schedulers())
        leaders = [leader] if leader and schedulers_up else []
        records = ["valkey"] if "valkey" not in self.down else []
        now = self._now()
        if now - self._emptied_at_s < RECOVERY_S:
            leaders, records = [], []
            gateways = [] if self._gateways_restore else gateways

        def spared(names: list[str]) -> bool:
            return all(now - self._hit_at_s.get(name, float("-inf")) >= RECOVERY_S for name in names)

        led_since_s = self.state.led_since_s
        led = led_since_s is not None and now - led_since_s >= RECOVERY_S

        def one(names: list[str]) -> str | None:
            return names[int(fault.draw * len(names))] if names else None

        chosen: list[str | None]
        match words:
            case ["scale", "up"]:
                return () if len(self.workers()) < 2 * self._workers else None
            case ["deadly", "request"]:
                return () if self._deaths is None and leaders and len(busy) > 2 else None
            case ["scale", "down"]:
                chosen = [one(busy) if len(self.workers()) > max(2, self._workers // 2) else None]
            case ["empty", "record", "and", *_]:
                streams_are_back = led and spared(self.gateways())
                chosen = [one(records) if streams_are_back else None, one(leaders)]
            case ["empty", "record"] | ["lose", "tail", "of", "record"]:
                chosen = [one(records) if leaders and spared(self.schedulers()) else None]
            case ["kill", "everything"]:
                up = [name for name in self._stack.children if name not in self.down | self._retired]
                chosen = [*up] if leaders and records and gateways else [None]
            case ["kill" | "pause", "schedulers"]:
                chosen = [*self.schedulers()] if leaders else [None]
            case ["kill" | "pause", "gateways"]:
                chosen = [*gateways] or [None]
            case [*_, "leader", "from", "record"] | ["kill" | "pause" | "stop", "leader"]:
                chosen = [one(leaders)]
            case ["kill", "leader", "and", "record"]:
                chosen = [one(leaders), one(records)]
            case ["kill", "leader", "while", *_]:
                chosen = [one(leaders), one(busy)]
            case ["kill", "gateway", "and", "worker"]:
                chosen = [one(gateways), one(busy)]
            case ["kill", "standby"]:
                standbys = [name for name in self.schedulers() if name != leader] if leaders else []
                chosen = [one(standbys)]
            case [_, "gateway" | "clients"]:
                chosen = [one(gateways)]
            case [_, "record"] | [_, _, "of", "record"]:
                chosen = [one(records)]
            case _:
                chosen = [one(busy)]
        if any(name is None for name in chosen):
            return None
        return tuple(name for name in chosen if name is not None)

    async def _carry_out(self, done: InjectedFault) -> None:
        fault, victims = done.fault, done.victims
        try:
            await self._break(done)
        except Exception as error:
            self.problems.append(
                f"fault {fault.number} ({fault.kind} {victims}) could not be repaired: {error!r}"
            )
        finally:
            self.down.difference_update(victims)
            done.over_s = self._now()
            self._record_lost_writes(done)

    async def _break(self, done: InjectedFault) -> None:
        fault, victims = done.fault, done.victims
        down_s = DOWN_S * fault.lasts_s / LONGEST_S
        match fault.kind.split():
            case ["scale", "up"]:
                await self._scale_up()
            case ["deadly", "request"]:
                await self._run_deadly(done)
            case ["scale", "down"]:
                self._retired.add(victims[0])
                await self._terminate(victims[0])
            case ["drain", "worker"]:
                await self._drain(victims[0])
                await self._ended(victims[0])
                await self._start(victims[0])
            case ["empty", "record"]:
                await self._empty()
            case ["empty", "record", "and", "kill", "leader"]:
                done.loses = True
                self._kill(victims[1])
                await self._empty()
                await asyncio.sleep(down_s)
                await self._start(victims[1])
            case ["lose", "tail", "of", "record"]:
                await self._lose_tail(fault)
            case ["fill", "disk", "of", "record"]:
                await self._fill_disk(fault)
            case ["fill", "memory", "of", "record"]:
                await self._fill_memory(fault)
            case ["flush", "scripts", "of", "record"]:
                async with redis_client.Redis.from_url(self._stack.redis_url) as record:
                    await record.script_flush()
            case ["half-open", _]:
                await self._leave_half_open(victims[0], fault)
            case ["kill", "everything"]:
                for name in victims:
                    self._kill(name)
                await asyncio.sleep(down_s)
                await self._start("valkey")
                await asyncio.gather(*(self._start(name) for name in victims if name != "valkey"))
            case ["restart", "record"]:
                self.expected_ends.add("valkey")
                self._stack.children["valkey"].request_stop()
                await self._ended("valkey")
                await self._start("valkey")
            case ["kill", "leader", "while", "a", "worker", "drains"]:
                await self._drain(victims[1])
                await asyncio.sleep(0.2 * fault.draw)
                self._kill(victims[0])
                await asyncio.sleep(down_s)
                await self._start(victims[0])
                self._stack.children[victims[1]].request_stop()  # the order may have died with the leader
                await self._ended(victims[1])
                await self._start(victims[1])
            case ["kill", *_]:
                for name in victims:
                    self._kill(name)
                await asyncio.sleep(down_s)
                await asyncio.gather(*(self._start(name) for name in victims))
            case ["pause", *_]:
                for name in victims:
                    self._stack.pause(name)
                await asyncio.sleep(fault.lasts_s)
                for name in victims:
                    self._stack.resume(name)
            case ["stop", *_]:
                await self._terminate(victims[0])
                await self._start(victims[0])
            case ["cut" | "silence" | "half-silence" | "delay" as how, *what]:
                await self._disturb(how, what, victims[0], fault)

    async def _disturb(self, how: str, what: list[str], victim: str, fault: Fault) -> None:
        """Disturb the network: a worker or gateway from its leader, the leader from the record, clients from
        a gateway.
        """
        if what == ["clients"]:
            pid, targets = self._own_pid, [victim]
        else:
            pid = self._stack.children[victim].pid or 0
            targets = ["valkey"] if what[-1] == "record" else self.schedulers()
        proxies = [self._proxies[target] for target in targets]
        if how == "cut":
            for proxy in proxies:
                proxy.cut(pid)
            return
        half: Direction = "up" if fault.draw < 0.5 else "down"
        for proxy in proxies:
            if how == "delay":
                proxy.delay(pid, LONGEST_DELAY_S * fault.draw)
            else:
                proxy.hold(pid, BOTH if how == "silence" else (half,))
        await asyncio.sleep(fault.lasts_s)
        for proxy in proxies:
            proxy.release(pid)

    async def _leave_half_open(self, victim: str, fault: Fault) -> None:
        """Simulate the loss of a machine: the process ends, and its peers get no notice until their
        connections are released.
        """
        pid = self._stack.children[victim].pid or 0
        proxies = [self._proxies[name] for name in self.schedulers()]
        for proxy in proxies:
            proxy.hold(pid, BOTH)
        self._kill(victim)
        await asyncio.sleep(DOWN_S * fault.lasts_s / LONGEST_S)
        await self._start(victim)
        await asyncio.sleep(fault.lasts_s)
        for proxy in proxies:
            proxy.release(pid)

    async def _run_deadly(self, done: InjectedFault) -> None:
        """Run a deadly request, which must end with an error that names the deaths, after a bounded number of
        them.
        """
        deaths: list[str] = []
        self._deaths = deaths
        try:
            async with asyncio.timeout(DEADLY_S):
                outcome = await self._deadly(done.fault.number)
        except TimeoutError:
            self.problems.append(
                f"a deadly request has not ended in {DEADLY_S:g} s; it ended {len(deaths)} workers"
            )
            return
        finally:
            await asyncio.sleep(2 * ASK_S)  # a death just before its end is still to be seen
            self._deaths = None
        lost = any(other.loses and done.at_s <= other.at_s for other in self.injected)
        if "died in a row" not in outcome.error and not lost:
            end = outcome.end and outcome.end.finish_reason
            self.problems.append(
                f"a deadly request, {outcome.request_id}, ended with {end} {outcome.error!r}"
            )
        if len(deaths) > MOST_DEATHS:
            self.problems.append(
                f"a deadly request, {outcome.request_id}, ended {len(deaths)} workers: {deaths}"
            )

    async def _lose_tail(self, fault: Fault) -> None:
        """Simulate a power loss of the record alone: its newest writes are lost, and it is down a while."""
        self._kill("valkey")
        self._stack.children["valkey"].wait(5.0)
        newest = max((entry for entry in self._written if entry[1].exists()), default=None)
        if newest is not None:
            path = newest[1]
            size = min(entry[2] for entry in self._written if entry[1] == path)
            os.truncate(path, min(size, path.stat().st_size))
        await asyncio.sleep(fault.lasts_s)
        await self._start("valkey")

    async def _fill_disk(self, fault: Fault) -> None:
        """Limit the size of the server's files; the server takes this for a full disk."""
        pid = self._stack.children["valkey"].pid or 0
        sizes = [size for _, _, size in self._written] or [0]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (max(sizes) + DISK_BYTES, resource.RLIM_INFINITY))
        await asyncio.sleep(fault.lasts_s)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    async def _fill_memory(self, fault: Fault) -> None:
        async with redis_client.Redis.from_url(self._stack.redis_url) as record:
            used = int((await record.info("memory"))["used_memory"])
            await record.config_set("maxmemory", max(1, int(used * fault.draw)))
            await asyncio.sleep(fault.lasts_s)
            await record.config_set("maxmemory", 0)

    # -- processes --------------------------------------------------------------------------------------------------------

    def _kill(self, name: str) -> None:
        self.expected_ends.add(name)
        self._stack.children[name].signal(signal.SIGKILL)

    async def _terminate(self, name: str) -> None:
        self.expected_ends.add(name)
        self._stack.children[name].request_stop()
        await self._ended(name)

    async def _ended(self, name: str) -> None:
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
                self.problems.append(f"{name} did not leave within {LEAVING_S:g} s of being asked to")
                self._kill(name)
            await asyncio.sleep(0.05)

    async def _start(self, name: str) -> None:
        await asyncio.to_thread(self._stack.restart, name, wait=False)
        self.expected_ends.discard(name)
        await self._ready(name)

    async def _ready(self, name: str) -> None:
        if name == "valkey":
            await asyncio.to_thread(self._stack.wait_ready, name)
            return
        # Not readiness: that of a worker or gateway needs a leader, which may be the next to be hit.
        while self._stack.children[name].alive:
            if await asyncio.to_thread(is_serving, self._stack.address(name), "liveness"):
                return
            await asyncio.sleep(0.1)

    async def _drain(self, name: str) -> None:
        """Order a drain, as an operator does, and repeat the order until a leader takes it. SIGTERM repeats
        an order that was lost with its leader.
        """
        self.expected_ends.add(name)
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with grpc.aio.insecure_channel(
                    self._stack.address(self.state.leader or "scheduler-0")
                ) as channel:
                    await admin_pb2_grpc.AdminStub(channel).DrainWorker(
                        admin_pb2.DrainWorkerRequest(worker=name), timeout=1.0
                    )
                return
            await asyncio.sleep(0.2)
        self._stack.children[name].request_stop()

    async def _scale_up(self) -> None:
        if self._retired:
            name = min(self._retired)
            await self._start(name)
            self._retired.discard(name)
        else:
            name = await asyncio.to_thread(self._stack.add_worker, wait=False)
            await self._ready(name)

    async def _empty(self) -> None:
        async with redis_client.Redis.from_url(self._stack.redis_url) as record:
            await record.flushall()
