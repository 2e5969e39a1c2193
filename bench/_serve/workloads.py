"""Requests and send times of each scenario, and the order of the policies."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench._replay import digest, poisson_times
from bench._serve.cases import Case
from bench._serve_stack import Calibration, Truth, hinted, make_jobs
from laps_sd.v1 import inference_pb2 as pb

LOADS = {"burst": None, "overload": 2.0, "load-0.7": 0.7}
"""Arrival rate × mean machine seconds of a request; None: all at once."""


@dataclass(frozen=True)
class Workload:
    """Requests of one seed in one case."""

    case: Case
    requests: list[pb.GenerateRequest]
    due_s: list[float]
    truths: list[Truth]
    priors: bytes
    """What the scheduler has learnt before."""
    digest: str


def workloads(
    options: argparse.Namespace, sets: Sequence[list[pb.GenerateRequest]], calibration: Calibration
) -> dict[tuple[Case, int], Workload]:
    """Return the workloads by case and seed. Send times are the same with each kind of hints."""
    found = {}
    for seed, (requests, truths) in enumerate(zip(sets, calibration.truths, strict=True), start=1):
        jobs = make_jobs(requests, truths, [0.0] * len(requests))
        mean_s = statistics.fmean(calibration.machine.service_s(job) for job in jobs)
        for scenario in options.scenario:
            offered, count = LOADS[scenario], len(requests)
            due_s = [0.0] * count if offered is None else poisson_times(seed, count, mean_s / offered)
            for sigma in options.predictor:
                case, ready = Case(scenario, sigma), hinted(requests, truths, sigma, seed)
                found[case, seed] = Workload(
                    case, ready, due_s, truths, calibration.priors[sigma], digest(ready, due_s)
                )
    return found


def in_turn(policies: Sequence[str], place: int) -> list[str]:
    """Return the policies in the order of this turn: another one begins each time, and every other turn has
    the reverse order, so that drift of the machine affects all equally.
    """
    start = place % len(policies)
    order = [*policies[start:], *policies[:start]]
    return order[::-1] if place % 2 else order
