"""Recording of one burst of requests under several policies, for the console's demo.

    python -m simulator.recording console/src/demo/recording.json

Equal code gives equal recordings: the jobs come from a seed, and the core decides without a clock.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.views import QueueEntry
from simulator.cluster import Cluster
from simulator.draw import draw
from simulator.jobs import Job
from simulator.machine import Machine
from simulator.workload import Arrivals, Workload

__all__ = ["record", "recording"]

POLICIES = ("fcfs", "laps-sd")
SEED = 1
WORKERS = 2
MACHINE = Machine(slots=4)
WORKLOAD = Workload(requests=120, arrivals=Arrivals(load=2.5))
"""More than the workers can serve at the time: lengths of chats, predicted with an error of about 30 %."""
EVERY_S = 0.1
"""Resolution of the recording, in seconds of the simulation."""

State = tuple[str, int | None, bool | None, str]
"""State, level, whether the request is perceptible, worker."""


def recording() -> dict[str, Any]:
    """Return the recording that the console ships."""
    jobs, _ = draw(WORKLOAD, MACHINE, WORKERS, SEED, None)
    return {
        "workers": WORKERS,
        "slots": MACHINE.slots,
        "requests": [
            {"arrival_s": _rounded(job.arrival_s), "output_tokens": job.output_tokens} for job in jobs
        ],
        "runs": [record(jobs, policy) for policy in POLICIES],
    }


def record(jobs: Sequence[Job], policy: str) -> dict[str, Any]:
    """Run the jobs under a policy and return what a viewer of its queue sees.

    `changes` has one list for each job, in the order of `jobs`: [at_s, state, level, perceptible, worker] at each time at
    which one of these has changed. `ended_s` has the end of each job, `preempted` how often it was paused.
    """
    cluster = Cluster(jobs, MACHINE, WORKERS, lambda _, settings: policy_named(policy, settings))
    changes: dict[str, list[tuple[float, State]]] = {job.request_id: [] for job in jobs}

    def look(now_s: float) -> tuple[()]:
        for entry in cluster.scheduler.queue(now_s, len(jobs)):
            seen = changes[entry.request_id]
            state = _state(entry)
            if not seen or seen[-1][1] != state:
                seen.append((_rounded(now_s), state))
        if cluster.unfinished:
            cluster.at(now_s + EVERY_S, look)
        return ()

    cluster.at(0.0, look)
    fates = {fate.job.request_id: fate for fate in cluster.run().fates}
    in_order = [fates[job.request_id] for job in jobs]
    return {
        "policy": policy,
        "changes": [[[at_s, *state] for at_s, state in changes[job.request_id]] for job in jobs],
        "ended_s": [_rounded(fate.finished_s) for fate in in_order],
        "preempted": [fate.preemptions for fate in in_order],
    }


def _state(entry: QueueEntry) -> State:
    return entry.state.value, entry.level, entry.perceptible, entry.worker_id or ""


def _rounded(seconds: float) -> float:
    return round(seconds, 2)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(recording(), separators=(",", ":")) + "\n")
