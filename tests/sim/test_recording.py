"""The recording of the console's demo, and what a new one is made of."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.core.policies import POLICIES
from simulator.jobs import Job
from simulator.recording import POLICIES as RECORDED
from simulator.recording import record

SHIPPED: Any = json.loads((Path(__file__).parents[2] / "console/src/demo/recording.json").read_text())
STATES = {"queued", "listed", "running"}


def burst(count: int) -> list[Job]:
    """Return requests that arrive within a second, every third of them long."""
    return [
        Job(
            request_id=f"r{number}",
            arrival_s=number / count,
            prompt_tokens=10,
            paces=bytes([3] * (100 if number % 3 == 0 else 10)),
            max_tokens=400,
        )
        for number in range(count)
    ]


def check(run: Any, arrivals: list[float]) -> None:
    assert len(run["changes"]) == len(run["ended_s"]) == len(run["preempted"]) == len(arrivals)
    for changes, ended_s, arrival_s in zip(run["changes"], run["ended_s"], arrivals, strict=True):
        times = [change[0] for change in changes]
        assert times == sorted(set(times))
        assert arrival_s <= times[0] and times[-1] <= ended_s
        assert all(state in STATES for _, state, *_ in changes)
        assert all(change[1:] != before[1:] for before, change in itertools.pairwise(changes))


@pytest.mark.parametrize("policy", RECORDED)
def test_a_recording_has_each_request_from_its_arrival_to_its_end(policy: str) -> None:
    jobs = burst(30)
    run = record(jobs, policy)
    check(run, [job.arrival_s for job in jobs])
    levels = {change[2] for changes in run["changes"] for change in changes}
    assert (levels == {None}) == (policy == "fcfs")
    assert any(run["preempted"]) == (policy != "fcfs")
    assert run == record(jobs, policy)


def test_the_shipped_recording_can_be_replayed() -> None:
    assert tuple(run["policy"] for run in SHIPPED["runs"]) == RECORDED
    assert set(RECORDED) <= POLICIES.keys()
    for run in SHIPPED["runs"]:
        check(run, [request["arrival_s"] for request in SHIPPED["requests"]])
