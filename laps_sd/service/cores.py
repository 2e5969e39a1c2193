"""The cores that this process may use: those of its affinity, as far as the CPU quota of its cgroup goes."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MOST_THREADS", "Cores", "usable_cores"]

MOST_THREADS = 256
"""Threads of a worker's kernels, at most; of threads.h."""


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores that a process may compute on."""

    cpus: tuple[int, ...]
    """Its CPUs: one of each core first, then the other hardware threads of these cores."""
    cores: int
    """Number of cores that these are."""
    quota: float
    """Seconds of CPU time that it may take in a second, of all its threads."""

    @property
    def threads(self) -> int:
        """Number of threads that speed computing up: one for each core, within the quota; at least 1.

        Two hardware threads of a core share its arithmetic units and its way to memory.
        """
        return max(1, math.floor(min(self.cores, self.quota)))

    @property
    def most_threads(self) -> int:
        """Number of threads that can run at the same time."""
        return max(1, math.ceil(min(len(self.cpus), self.quota)))

    def excess(self, threads: int) -> str:
        """Return the end of a sentence about a number of threads that cannot run at the same time; empty if
        they can."""
        if threads <= self.most_threads:
            return ""
        return f"must be at most {self.most_threads}, the CPUs that this process may use, got {threads}"


def usable_cores(system: Path = Path("/")) -> Cores:
    """Return what this process may use now. `system`: directory that contains `proc` and `sys`."""
    if hasattr(os, "sched_getaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
    else:
        cpus = list(range(os.cpu_count() or 1))
    firsts: dict[str, int] = {}
    for cpu in cpus:
        topology = system / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        firsts.setdefault(_text(topology) or str(cpu), cpu)
    others = [cpu for cpu in cpus if cpu not in firsts.values()]
    return Cores((*firsts.values(), *others), len(firsts), _quota(system))


def _quota(system: Path) -> float:
    """Return the smallest quota of this process's cgroup and the groups around it, in cores; infinite: none."""
    found = math.inf
    for line in _text(system / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = system / "sys/fs/cgroup" / ("cpu" if controllers else "")
        own = top / group.lstrip("/")
        for folder in (own, *own.parents):
            found = min(found, _quota_of(folder))
            if folder == top:
                break
    return found


def _quota_of(folder: Path) -> float:
    quota, _, period = _text(folder / "cpu.max").partition(" ")  # cgroup v2
    if not quota:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max", or no such file
        return math.inf
    return cores if cores > 0 else math.inf


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
