"""The cores that a process may use, and how many threads its workers get."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from laps_sd.cli import up
from laps_sd.errors import StartupError
from laps_sd.service.cores import Cores, usable_cores


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a machine of four cores with two hardware threads each, of which the process may use six CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 4, 5, 7}, raising=False)
    for cpu in range(8):
        write(
            tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
            f"{cpu % 4},{cpu % 4 + 4}\n",
        )
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_one_thread_for_each_core_of_the_affinity(system: Path) -> None:
    found = usable_cores(system)

    assert found == Cores(cpus=(0, 1, 2, 7, 4, 5), cores=4, quota=math.inf)
    assert (found.threads, found.most_threads) == (4, 6)


@pytest.mark.parametrize(
    ("quota", "threads", "most"),
    [("250000 100000", 2, 3), ("50000 100000", 1, 1), ("max 100000", 4, 6), ("900000 100000", 4, 6)],
)
def test_a_quota_of_the_cgroup_limits_them(system: Path, quota: str, threads: int, most: int) -> None:
    write(system / "proc/self/cgroup", "0::/pods/one\n")
    write(system / "sys/fs/cgroup/pods/one/cpu.max", "max 100000\n")
    write(system / "sys/fs/cgroup/pods/cpu.max", quota + "\n")

    found = usable_cores(system)

    assert (found.threads, found.most_threads) == (threads, most)


@pytest.mark.parametrize(("quota", "threads"), [("300000", 3), ("-1", 4)])
def test_so_does_one_of_the_first_kind_of_cgroups(system: Path, quota: str, threads: int) -> None:
    write(system / "proc/self/cgroup", "5:memory:/a\n3:cpu,cpuacct:/a\n1:name=systemd:/b\n")
    write(system / "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", quota)
    write(system / "sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000")

    assert usable_cores(system).threads == threads


def test_a_system_that_tells_nothing_has_the_cpus_of_the_affinity(tmp_path: Path) -> None:
    found = usable_cores(tmp_path)

    assert found.threads == found.most_threads == len(os.sched_getaffinity(0))


def with_cores(cpus: int, cores: int, quota: float = math.inf) -> Cores:
    return Cores(tuple(range(cpus)), cores, quota)


@pytest.mark.parametrize(
    ("engine", "workers", "threads"),
    [("auto", 1, 8), ("auto", 3, 2), ("auto", 9, 1), ("auto", 0, 8), ("vllm", 1, 1)],
)
def test_the_workers_of_a_machine_divide_its_cores(
    monkeypatch: pytest.MonkeyPatch, engine: str, workers: int, threads: int
) -> None:
    monkeypatch.setattr(up, "usable_cores", lambda: with_cores(16, 8))

    assert up.threads_of_each(None, engine, workers) == (threads, "")


@pytest.mark.parametrize(("workers", "threads"), [(1, 256), (2, 192)])
def test_no_worker_gets_more_threads_than_it_can_use(
    monkeypatch: pytest.MonkeyPatch, workers: int, threads: int
) -> None:
    monkeypatch.setattr(up, "usable_cores", lambda: with_cores(768, 384))

    assert up.threads_of_each(None, "auto", workers) == (threads, "")


def test_more_threads_than_cpus_are_refused_and_all_workers_together_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(up, "usable_cores", lambda: with_cores(16, 8))

    assert up.threads_of_each(8, "auto", 2) == (8, "")
    assert up.threads_of_each(8, "auto", 3) == (
        8,
        "3 workers of 8 threads share 16 CPUs, so they are slower than with fewer threads",
    )
    assert up.threads_of_each(1, "auto", 99) == (1, "")
    with pytest.raises(
        StartupError, match="--threads must be at most 16, the CPUs that this process may use, got 17"
    ):
        up.threads_of_each(17, "auto", 1)
