"""Check that the memory of the processes of a stack does not keep growing."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from laps_sd.stack.local import LocalStack

GROWTH_MIB = 48.0
"""Upper bound of a process's growth after its first `WARM_S` under load, in MiB: arenas and buffers of
hundreds of streams, and no more."""
WARM_S = 20.0
SAMPLE_S = 2.0


class Memory:
    """Resident memory of each component, the process of its engine included, from the time it has settled until
    it ends or the run does."""

    def __init__(
        self, stack: LocalStack, *, warm_s: float = WARM_S, loaded: Callable[[str], bool] = lambda _: True
    ) -> None:
        """Take a component as settled after `warm_s` in which `loaded` was true of it, since it started: without
        a leader, for example, a gateway has no streams yet, and a worker loads its model first."""
        self._stack = stack
        self._loaded = loaded
        self._warm_s = warm_s
        self._seen: dict[tuple[str, int], tuple[float, float | None, float]] = {}
        """(seconds under load, MiB when it had settled, MiB now) by name and process id."""
        self._sampled_at_s: float | None = None

    async def watch(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_S)

    def sample(self) -> None:
        """Take one sample."""
        now = time.monotonic()
        since_s = 0.0 if self._sampled_at_s is None else now - self._sampled_at_s
        self._sampled_at_s = now
        resident = resident_by_group()
        for name, child in self._stack.children.items():
            if child.pid is None or not child.alive or child.pid not in resident:
                continue
            mib = resident[child.pid]
            under_load_s = since_s if self._loaded(name) else 0.0
            warm_s, settled, _ = self._seen.get((name, child.pid), (-under_load_s, None, mib))
            warm_s += under_load_s
            if settled is None and warm_s >= self._warm_s:
                settled = mib
            self._seen[(name, child.pid)] = (warm_s, settled, mib)

    def growth(self) -> dict[str, float]:
        """Return the growth in MiB, the largest of each kind of process."""
        most: dict[str, float] = collections.defaultdict(float)
        for (name, _), (_, settled, last) in self._seen.items():
            if settled is not None:
                kind = name.split("-")[0]
                most[kind] = max(most[kind], last - settled)
        return dict(most)


def resident_by_group() -> dict[int, float]:
    """Return the resident memory of each process group of this machine, in MiB."""
    groups: dict[int, float] = collections.defaultdict(float)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            group = os.getpgid(int(entry.name))
            groups[group] += int(re.findall(r"VmRSS:\s+(\d+)", (entry / "status").read_text())[0]) / 1024
    return groups
