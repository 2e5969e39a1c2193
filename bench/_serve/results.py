"""Results of runs: what is measured of each, and which count."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench._serve.cases import Case
from bench.report import Interval, quantile, ratio_interval

DRIFT = 0.25
"""Difference of a worker's machine time from the predicted one, as a share, above which a note says that something else
on the machine disturbed the run."""


@dataclass(frozen=True)
class Figures:
    """Figures of one run, or of its double in the simulator. Seconds from the scheduled send times."""

    latencies_s: list[float]
    first_token_s: float
    slowdown: float
    preemptions: float

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.latencies_s)


@dataclass(frozen=True)
class Measured:
    """Result of one policy with one seed."""

    case: Case
    policy: str
    seed: int
    found: Figures
    predicted_mean_s: float
    busy_ratio: float
    """Machine seconds of the worker over those that the calibration predicted."""
    utilisation: float
    """Machine seconds of the worker over the time from the first send to the last end. Below 1 in a burst:
    the worker waited for the rest of the stack."""
    late_s: float
    failures: list[str]
    sent: str


By = Mapping[tuple[Case, str], Mapping[int, Measured]]
"""Runs that count, by (case, policy), then by seed."""


def counted(runs: Sequence[Measured]) -> dict[tuple[Case, str], dict[int, Measured]]:
    found: dict[tuple[Case, str], dict[int, Measured]] = {}
    for run in runs:
        own = found.setdefault((run.case, run.policy), {})
        if not run.failures:
            own[run.seed] = run
    return found


def ratio(by: By, case: Case, policy: str, of: str, *, simulated: bool = False) -> Interval | None:
    """Return the ratio of the mean latencies, over pairs of the same seed. Return None without a
    pair; one pair alone shows no spread, so its interval has no ends.
    """
    ours, theirs = by.get((case, policy), {}), by.get((case, of), {})
    pairs = []
    for key in sorted(ours.keys() & theirs.keys()):
        pair = (ours[key], theirs[key])
        one, other = (run.predicted_mean_s if simulated else run.found.mean_s for run in pair)
        pairs.append((one, other))
    if len(pairs) > 1:
        return ratio_interval(pairs)
    return Interval(pairs[0][0] / pairs[0][1], 0.0, math.inf) if pairs else None


def rows_of(by: By, runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return one row for each policy in each case; figures are means over runs, p99 is of all their
    requests.
    """
    rows = []
    for (case, policy), own in by.items():
        every = [run for run in runs if (run.case, run.policy) == (case, policy)]
        row: dict[str, Any] = {
            "config": case.scenario,
            "hints": case.hints,
            "policy": policy,
            "runs": len(own),
            "failed_runs": len(every) - len(own),
        }
        if own:
            latencies_s = sorted(latency_s for run in own.values() for latency_s in run.found.latencies_s)
            row |= {
                "mean_s": statistics.fmean(run.found.mean_s for run in own.values()),
                "p50_s": quantile(latencies_s, 0.50),
                "p99_s": quantile(latencies_s, 0.99),
                "first_token_s": statistics.fmean(run.found.first_token_s for run in own.values()),
                "mean_slowdown": statistics.fmean(run.found.slowdown for run in own.values()),
                "preemptions": statistics.fmean(run.found.preemptions for run in own.values()),
                "busy_ratio": statistics.fmean(run.busy_ratio for run in own.values()),
                "utilisation": statistics.fmean(run.utilisation for run in own.values()),
                "late_s": max(run.late_s for run in own.values()),
                "simulated_mean_s": statistics.fmean(run.predicted_mean_s for run in own.values()),
            }
        for of in ("fcfs", "srpt-length"):
            found = ratio(by, case, policy, of)
            predicted = ratio(by, case, policy, of, simulated=True)
            if found is not None and predicted is not None:
                key = f"ratio_{of.replace('-', '_')}"
                # JSON has no infinity: a single pair has no ends.
                ends = (end if 0 < end < math.inf else None for end in (found.low, found.high))
                row |= dict(zip((f"{key}_low", f"{key}_high"), ends, strict=True))
                row |= {key: found.middle, f"simulated_{key}": predicted.middle}
        rows.append(row)
    return rows


def run_row(run: Measured) -> dict[str, Any]:
    """Return the row of one run."""
    return {
        "run": True,
        "config": run.case.scenario,
        "hints": run.case.hints,
        "policy": run.policy,
        "seed": run.seed,
        "mean_s": None if run.failures else run.found.mean_s,
        "simulated_mean_s": run.predicted_mean_s,
        "busy_ratio": run.busy_ratio,
        "utilisation": run.utilisation,
        "late_s": run.late_s,
        "sent": run.sent,
        "failures": run.failures,
    }
