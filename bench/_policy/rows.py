"""Rows of results: figures of the seeds of a regime put together, and the mean against the load."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bench._policy.regime import OURS, Regime
from bench._policy.run import DISTRIBUTION_POINTS, Runs
from bench.report import Interval, columns, quantile, ratio_interval
from scheduler_svc.core.estimates.errors import Moment

SWEEP_SHARE = 1 / 3
"""Share of a regime's requests at each load of `--loads`: it shows a course, and no goal is judged by it."""
SWEPT = ("fcfs", "oracle", "srpt-length", "laps-sd")
"""Policies that `--loads` shows of a regime that runs them all; of other regimes it shows all that run."""


def ratio(
    runs: Runs,
    regime: str,
    policy: str,
    of: str,
    figure: str,
    of_figure: str = "",
    of_regime: str = "",
) -> Interval:
    """Return the ratio, paired over seeds."""
    runs_of_both = zip(runs[regime, policy], runs[of_regime or regime, of], strict=True)
    return ratio_interval([(ours[figure], theirs[of_figure or figure]) for ours, theirs in runs_of_both])


def rows_of(regime: Regime, runs: Runs, seeds: int) -> list[dict[str, Any]]:
    """Return one aggregated row per policy."""
    rows = []
    for spec in regime.runs:
        own = runs[regime.name, spec]
        row: dict[str, Any] = {"kind": "policy", "regime": regime.name, "policy": spec}
        for figure in own[0]:
            if isinstance(own[0][figure], float | int):
                row[figure] = statistics.fmean(run[figure] for run in own)
        for base in ("fcfs", "oracle", "srpt-length"):
            if base in regime.runs:
                for figure, label in (("mean_s", ""), ("p99_s", "p99_"), ("longest_wait_s", "longest_wait_")):
                    found = ratio(runs, regime.name, spec, base, figure)
                    row |= columns(f"{label}ratio_{base.replace('-', '_')}", found)
        if spec == OURS:
            row["ratios"] = {
                other: dataclasses.astuple(ratio(runs, regime.name, spec, other, "mean_s"))
                for other in regime.runs
                if other != spec
            }
        for name in ("", "_p50", "_p90"):
            key = f"perceptible_after_rounds{name}"
            after = [run[key] for run in own if run[key] is not None]
            row[key] = statistics.fmean(after) if after else None
        for name in ("level_s", "level_requests"):
            levels = sorted({int(level) for run in own for level in run[name]})
            row[name] = {
                str(level): statistics.fmean(run[name].get(str(level), 0.0) for run in own)
                for level in levels
            }
        pooled = sorted(itertools.chain.from_iterable(run["latencies_s"] for run in own))
        row["latencies_s"] = [
            float(f"{quantile(pooled, (point + 0.5) / DISTRIBUTION_POINTS):.4g}")
            for point in range(DISTRIBUTION_POINTS)
        ]
        row["estimates"] = pooled_estimates([run["estimates"] for run in own])
        row["seeds"] = seeds
        rows.append(row)
    return rows


def pooled_estimates(runs: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the estimates pooled over seeds: sums are added, the root mean square is that of all, quantiles
    are weighted means of the seeds'.
    """
    by: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for found in itertools.chain.from_iterable(runs):
        by[found["moment"], found["basis"]].append(found)
    order = [moment.value for moment in Moment]
    pooled = []
    for (moment, basis), parts in sorted(by.items(), key=lambda item: (order.index(item[0][0]), item[0][1])):
        counts = [part["requests"] for part in parts]
        row = {"moment": moment, "basis": basis, "requests": sum(counts)}
        row |= {key: sum(part[key] for part in parts) for key in ("predicted_s", "actual_s")}
        row["log_rms"] = math.sqrt(statistics.fmean([part["log_rms"] ** 2 for part in parts], counts))
        for key in ("ratio_p10", "ratio_p50", "ratio_p90"):
            row[key] = statistics.fmean([part[key] for part in parts], counts)
        pooled.append(row)
    return pooled


def short(value: Any) -> Any:
    """Return the value with six significant digits: more than the seeds justify, in a
    file of moderate size.
    """
    match value:
        case float():
            return float(f"{value:.6g}")
        case dict():
            return {key: short(each) for key, each in value.items()}
        case list() | tuple():
            return [short(each) for each in value]
    return value


def at_loads(regime: Regime, loads: Sequence[float]) -> list[Regime]:
    """Return the regime at each load, shorter and without expectations. Raise ValueError
    if it has no load.
    """
    arrivals = regime.workload.arrivals
    if arrivals.process == "burst":
        raise ValueError(f"--loads: {regime.name} is a burst and has no load")
    requests = max(1, round(regime.workload.requests * SWEEP_SHARE))
    return [
        dataclasses.replace(
            regime,
            name=f"{regime.name} at load {load:g}",
            policies=SWEPT if set(SWEPT) <= set(regime.runs) else regime.runs,
            expect=(),
            workload=dataclasses.replace(
                regime.workload, requests=requests, arrivals=dataclasses.replace(arrivals, load=load)
            ),
        )
        for load in loads
    ]


def sweep_rows(regime: Regime, loads: Sequence[float], runs: Runs) -> list[dict[str, Any]]:
    """Return one row per load and policy."""
    return [
        {
            "kind": "sweep",
            "regime": regime.name,
            "load": load,
            "requests": at.workload.requests,
            "policy": spec,
            "mean_s": statistics.fmean(run["mean_s"] for run in runs[at.name, spec]),
        }
        for load, at in zip(loads, at_loads(regime, loads), strict=True)
        for spec in at.runs
    ]
