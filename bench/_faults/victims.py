"""Victims: the components that a fault can hit at the moment, and those that are spared."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bench._faults.plans import Fault, InjectedFault
from bench._faults.processes import Processes
from bench._faults.state import StackState
from laps_sd.stack.local import LocalStack

RECOVERY_S = 10.0
"""Seconds after a record that lost writes is back, in which no fault hits it or its leader, nor, if the
leader died with it, a gateway. The record also loses nothing if a fault hit its leader within this time. Both
faults together are a fault of another kind. The record is emptied and its leader killed only if the gateways
were spared, and led, for this time: then the streams are open at a gateway again, and gateways and workers
are what this fault is survived by."""


class Victims:
    """Choice of victims, with the components that are down and the times of the last faults."""

    def __init__(
        self,
        stack: LocalStack,
        processes: Processes,
        state: StackState,
        *,
        workers: int,
        now: Callable[[], float],
    ) -> None:
        """`workers` is their number at the start."""
        self._stack = stack
        self._processes = processes
        self._state = state
        self._workers = workers
        self._now = now
        self._down: set[str] = set()
        """Components that were hit and are not back yet."""
        self._hit_at_s: dict[str, float] = {}
        self._emptied_at_s = float("-inf")
        self._gateways_restore = False
        """True if the leader died with the record, so that gateways and workers restore the requests."""

    def hit(self, names: Iterable[str]) -> None:
        """Note that a fault hits these components now."""
        for name in names:
            self._down.add(name)
            self._hit_at_s[name] = self._now()

    def back(self, names: Iterable[str]) -> None:
        """Note that these components are back."""
        self._down.difference_update(names)

    def spare_recovery(self, done: InjectedFault) -> None:
        """Spare what restores a record that lost writes, until some time after it is back."""
        if done.fault.kind.startswith(("empty", "lose")):
            self._emptied_at_s = float("inf") if done.over_s is None else done.over_s
            self._gateways_restore = done.fault.kind == "empty record and kill leader"

    def choose(self, fault: Fault, *, deadly_open: bool) -> tuple[str, ...] | None:
        """Return the victims of the fault, or None if there are none at the moment. `deadly_open` is
        true while a deadly request is open.
        """
        processes, down = self._processes, self._down
        words = fault.kind.split()
        leader = self._state.leader
        workers = [
            name for name in processes.workers() if name not in down and self._stack.children[name].alive
        ]
        # One stays up, so that requests continue.
        workers = workers if len(workers) > 1 else []
        busy = [name for name in workers if self._state.listed.get(name, 0)] or workers
        gateways = [] if any(name in down for name in processes.gateways()) else processes.gateways()
        schedulers_up = not any(name in down for name in processes.schedulers())
        leaders = [leader] if leader and schedulers_up else []
        records = ["valkey"] if "valkey" not in down else []
        now = self._now()
        if now - self._emptied_at_s < RECOVERY_S:
            leaders, records = [], []
            gateways = [] if self._gateways_restore else gateways

        def spared(names: list[str]) -> bool:
            return all(now - self._hit_at_s.get(name, float("-inf")) >= RECOVERY_S for name in names)

        led_since_s = self._state.led_since_s
        led = led_since_s is not None and now - led_since_s >= RECOVERY_S

        def one(names: list[str]) -> str | None:
            return names[int(fault.draw * len(names))] if names else None

        chosen: list[str | None]
        match words:
            case ["scale", "up"]:
                return () if len(processes.workers()) < 2 * self._workers else None
            case ["deadly", "request"]:
                return () if not deadly_open and leaders and len(busy) > 2 else None
            case ["scale", "down"]:
                chosen = [one(busy) if len(processes.workers()) > max(2, self._workers // 2) else None]
            case ["empty", "record", "and", *_]:
                streams_are_back = led and spared(processes.gateways())
                chosen = [one(records) if streams_are_back else None, one(leaders)]
            case ["empty", "record"] | ["lose", "tail", "of", "record"]:
                chosen = [one(records) if leaders and spared(processes.schedulers()) else None]
            case ["kill", "everything"]:
                up = [name for name in self._stack.children if name not in down | processes.retired]
                chosen = [*up] if leaders and records and gateways else [None]
            case ["kill" | "pause", "schedulers"]:
                chosen = [*processes.schedulers()] if leaders else [None]
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
                standbys = [name for name in processes.schedulers() if name != leader] if leaders else []
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
