"""Which signal should workers be scaled on? The production core in virtual time, signal against signal.
`laps-sd bench autoscale`

Windows of a recorded trace, at their recorded times, run through the core and virtual workers that come and
go: a HorizontalPodAutoscaler sets their number by its own formula, every 15 s, and a new pod needs time
before it works. Only the metric differs, each with several targets, so that every signal is a curve of what
it costs (devices held) against what it gives (latency):

  load         workers that the arriving work keeps busy (`laps_sd_arriving_load`), with the backlog at its default target beside
               it: the two metrics for KEDA, of which Kubernetes takes the one that asks for more workers
  backlog      machine seconds that all unfinished requests still need (`laps_sd_backlog_seconds`)
  requests     unfinished requests (the plain Redis trigger)
  queue        unfinished requests that do not run
  utilisation  share of the time in which ready workers compute
  fixed        a constant number of workers

Windows are drawn at random and may overlap in time: the intervals take them for independent samples, so they are too narrow
where fewer windows than there are do not overlap. The last line has that number.

The default target is the one of `load` with the least product of devices and 99th percentile: beyond it, a share of devices
saved costs a larger share of latency. The run fails when `load` needs more than 0.95 of the devices of the number of
unfinished requests, or more than another signal of a live pool, for the same 99th percentile of latency.

Examples:
  laps-sd bench autoscale --figure autoscale.svg
  laps-sd bench autoscale --targets backlog:2,4,8 --targets requests:4,8 --start-s 300
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench._simulations import add_arguments, run_all
from bench.report import (
    about,
    as_text,
    columns,
    command_line,
    finish,
    interval,
    quantile,
    ratio_interval,
    table,
)
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.settings import CoreSettings
from simulator.autoscaler import SIGNALS, Pods, Scaling
from simulator.cluster import Cluster
from simulator.draw import draw, window_s
from simulator.jobs import Job
from simulator.machine import Machine
from simulator.workload import AcceptanceModel, Arrivals, Kind, Predictor, Workload

TRACE = "traces/azure2023_conv.csv.gz"
OURS = "load"
GOALS = {"requests": 0.95}
"""Devices of `load` over those of another signal, at most; 1 for the others."""
MACHINE = Machine(
    slots=4, round_s=0.120, verified_token_s=0.35e-3, context_token_s=1e-6, prefill_token_s=0.35e-3
)
"""A 70B-like target with a small batch: as that of `bench policy`, four times slower."""
ACCEPTANCE = AcceptanceModel(mean=0.78)
"""Three to four tokens per round."""
EVERY = 5
"""Requests of the trace per request that is used: about 1.1 a second are left, work for some four workers."""
TARGETS: dict[str, tuple[float, ...]] = {
    "load": (0.6, 0.7, 0.8, 0.9, 1.0),
    "backlog": (4, 6, 9, 13, 20, 30),
    "requests": (1.5, 2, 2.5, 3, 4),
    "queue": (0.25, 1, 4),
    "utilisation": (0.6, 0.7, 0.8, 0.88),
    "fixed": (3, 4, 5, 6, 8),
}
"""Targets of each signal, per worker or as a number of workers. Each series goes from more workers than
needed to fewer than the load needs."""
MOST = 16
START_S = 180.0
"""An 8B model on a new pod: 20 s until the container runs on a node that has the image, 40 s to read 16 GB from network storage, 120 s to
compile and capture graphs in vLLM. Our estimate: we had no GPU to measure it on."""
Key = tuple[str, float]
"""(signal, target)"""
Runs = dict[Key, list[dict[str, float]]]
"""Figures of each seed, in order, by signal and target."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_line("autoscale", __doc__)
    parser.add_argument(
        "--targets",
        action="append",
        metavar="SIGNAL:T,T,…",
        help=f"run only the named signals ({', '.join(SIGNALS)}), with these targets; without load nothing is compared, and"
        " the run does not fail",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="windows of the trace, which may overlap (default 3)"
    )
    parser.add_argument("--requests", type=int, default=1200, help="of each window (default 1200)")
    parser.add_argument(
        "--every", type=int, default=EVERY, help=f"one request of the trace in so many (default {EVERY})"
    )
    parser.add_argument(
        "--start-s", type=float, default=START_S, help=f"until a new worker works (default {START_S:g})"
    )
    parser.add_argument("--trace", type=Path, help=f"another trace than {TRACE}; CSV or Mooncake")
    add_arguments(parser)
    parser.add_argument("--figure", type=Path, help="draw the curves into this file (.png or .svg)")
    options = parser.parse_args(given)
    if min(options.seeds, options.processes, options.every) < 1 or options.requests < 2:
        parser.error("--seeds, --every and --processes must be at least 1, --requests at least 2")
    try:
        options.scalings = scalings_of(options)
    except ValueError as error:
        parser.error(f"--targets: {error}")
    return options


def scalings_of(options: argparse.Namespace) -> list[Scaling]:
    """Return all scalings to run. Raise ValueError with the wrong option."""
    wanted: Mapping[str, Sequence[float]] = TARGETS
    if options.targets:
        split = [text.partition(":") for text in options.targets]
        wanted = {name: [float(number) for number in numbers.split(",")] for name, _, numbers in split}
    return [
        Scaling(
            # `Scaling` raises ValueError for an unknown signal.
            signal=signal,  # type: ignore[arg-type]
            target=target,
            most=MOST,
            start_s=options.start_s,
        )
        for signal, targets in wanted.items()
        for target in sorted(set(targets))
    ]


# -- runs -----------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _jobs(workload: Workload, seed: int, data: Path | None) -> list[Job]:
    return draw(workload, MACHINE, 1, seed, data)[0]


def simulate(scaling: Scaling, workload: Workload, seed: int, data: Path | None) -> dict[str, float]:
    """Run one signal and target on one window. Return figures in seconds unless their
    name has another unit.
    """
    jobs = _jobs(workload, seed, data)
    cluster = Cluster(jobs, MACHINE, 0, lambda _, settings: policy_named("laps-sd", settings), CoreSettings())
    pods = Pods(cluster, MACHINE, scaling, first=first_of(scaling, jobs))
    outcome = cluster.run()
    latencies = sorted(fate.latency_s for fate in outcome.fates)
    device_s = pods.device_s(outcome.end_s)
    return {
        "device_s": device_s,
        "devices": device_s / outcome.end_s,
        "busy_share": outcome.busy_s / device_s,
        "mean_s": statistics.fmean(latencies),
        "p50_s": quantile(latencies, 0.50),
        "p99_s": quantile(latencies, 0.99),
        "first_token_s": statistics.fmean(fate.first_token_s - fate.job.arrival_s for fate in outcome.fates),
        "changes": len(pods.changes) - 1,
        "most_devices": max(count for _, count in pods.changes),
        "span_s": outcome.end_s,
    }


def first_of(scaling: Scaling, jobs: Sequence[Job]) -> int:
    """Return the pods at the beginning: as many as the window's work needs on average, the same for every
    signal.
    """
    if scaling.signal == "fixed":
        return int(scaling.target)
    work_s = sum(MACHINE.service_s(job) for job in jobs)
    return min(max(scaling.least, math.ceil(work_s / jobs[-1].arrival_s)), scaling.most)


def run_scalings(options: argparse.Namespace, workload: Workload) -> Runs:
    """Run every signal and target on every window."""
    tasks = {
        (scaling.signal, scaling.target, seed): (scaling, workload, seed, options.data)
        for seed, scaling in itertools.product(range(1, options.seeds + 1), options.scalings)
    }
    found: Runs = {(each.signal, each.target): [] for each in options.scalings}
    for (signal, target, _), figures in run_all(
        simulate, tasks, options.processes, lambda key: f"{key[0]} {key[1]:g}"
    ).items():
        found[signal, target].append(figures)
    return found


# -- results --------------------------------------------------------------------------------------------------------------


def rows_of(runs: Runs) -> list[dict[str, Any]]:
    """Return one row per signal and target, means over seeds with 95 % intervals of the figures that the plot
    shows.
    """
    rows = []
    for (signal, target), own in runs.items():
        row: dict[str, Any] = {"kind": "point", "config": signal, "target": target}
        row |= {figure: statistics.fmean(run[figure] for run in own) for figure in own[0]}
        if len(own) > 1:
            for figure in ("devices", "mean_s", "p99_s"):
                row |= columns(figure, interval([run[figure] for run in own]))
        rows.append(row | {"seeds": len(own)})
    return rows


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (devices, latency) that no other point surpasses in both, the cheapest first."""
    best: list[tuple[float, float]] = []
    for devices, latency_s in sorted(points):
        if not best or latency_s < best[-1][1]:
            best.append((devices, latency_s))
    return best


def devices_for(curve: Sequence[tuple[float, float]], latency_s: float) -> float | None:
    """Return the devices that a curve needs for a latency, between its points on logarithmic axes; None
    outside of its range.
    """
    for (few, slow_s), (many, fast_s) in itertools.pairwise(curve):
        if fast_s <= latency_s <= slow_s:
            part = math.log(slow_s / latency_s) / math.log(slow_s / fast_s)
            return float(few * (many / few) ** part)
    return None


def saving(runs: Runs, rival: str, figure: str) -> list[float]:
    """Return for each seed the devices of `load` over those of a rival for equal latency, geometric mean
    over the rival's curve.
    """
    ratios = []
    for seed in range(len(next(iter(runs.values())))):
        curves = {
            wanted: frontier(
                [
                    (own[seed]["devices"], own[seed][figure])
                    for (name, _), own in runs.items()
                    if name == wanted
                ]
            )
            for wanted in (OURS, rival)
        }
        found = [
            math.log(ours / devices)
            for devices, latency_s in curves[rival]
            if (ours := devices_for(curves[OURS], latency_s)) is not None
        ]
        if found:
            ratios.append(math.exp(statistics.fmean(found)))
    return ratios


def comparisons(runs: Runs) -> list[dict[str, Any]]:
    """Return `load` against each other signal that ran, by mean and by 99th percentile."""
    rivals = [name for name in dict.fromkeys(name for name, _ in runs) if name != OURS]
    if not any(name == OURS for name, _ in runs):
        return []
    rows = []
    for rival, figure in itertools.product(rivals, ("mean_s", "p99_s")):
        ratios = saving(runs, rival, figure)
        if not ratios:
            continue
        rows.append(
            {
                "kind": "comparison",
                "config": rival,
                "figure": figure,
                **columns("ratio_devices", ratio_interval([(ratio, 1.0) for ratio in ratios])),
                "seeds": len(ratios),
            }
        )
    return rows


def verdict(runs: Runs, compared: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """Return a sentence about the devices for equal p99, and whether the goals are met. A signal that has no latency in
    common with `load` cannot be judged, and then they are not met. Without `load` there are no goals.
    """
    names = [name for name in dict.fromkeys(name for name, _ in runs) if name != "fixed"]
    if OURS not in names:
        return "nothing to compare", True
    by_rival = {row["config"]: row for row in compared if row["figure"] == "p99_s"}
    said, met = [], True
    for rival in names:
        if rival == OURS:
            continue
        row = by_rival.get(rival)
        if row is None:
            said.append(f"{rival} not judged, no latency in common with {OURS}")
            met = False
            continue
        said.append(f"{as_text(row, 'ratio_devices', 2)} of {rival}")
        met = met and row["ratio_devices"] <= GOALS.get(rival, 1.0)
    return ", ".join(said) or "nothing to compare", met


def chosen_target(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the target of `load` with the least product of devices and 99th percentile; None if it did not run."""
    own = [row for row in rows if row["kind"] == "point" and row["config"] == OURS]
    best = min(own, key=lambda row: row["devices"] * row["p99_s"], default=None)
    return None if best is None else best["target"]


def disjoint(windows: Sequence[tuple[float, float]]) -> int:
    """Return how many of these windows, from their first to their last second, can be chosen so that no two overlap."""
    count, end_s = 0, -math.inf
    for first_s, last_s in sorted(windows, key=lambda window: window[1]):
        if first_s > end_s:
            count, end_s = count + 1, last_s
    return count


def facts(options: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """Return the facts of the run that the rows do not contain."""
    return {
        "trace": Path(workload.arrivals.file).name,
        "disjoint_windows": disjoint(
            [window_s(workload, MACHINE, seed, options.data) for seed in range(1, options.seeds + 1)]
        ),
        "machine": dataclasses.asdict(MACHINE),
        "scaling": {
            key: value
            for key, value in dataclasses.asdict(options.scalings[0]).items()
            if key not in ("signal", "target")
        },
    }


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    trace = str(options.trace.absolute()) if options.trace else TRACE
    began_s = time.monotonic()
    try:
        workload = Workload(
            requests=options.requests,
            kinds=(Kind(acceptance=ACCEPTANCE),),
            predictor=Predictor(kind="noisy", sigma=0.3),
            arrivals=Arrivals(process="trace", file=trace, load=0.0, every=options.every),
        )
        runs = run_scalings(options, workload)
    except (ValueError, OSError) as error:
        print(f"laps-sd bench autoscale: {error}", file=sys.stderr)
        return 2
    rows, compared = rows_of(runs), comparisons(runs)
    shown = ("config", "target", "devices", "busy_share", "mean_s", "p99_s", "changes", "most_devices")
    table("Workers by signal", [{key: row[key] for key in shown} for row in rows])
    if compared:
        title = "Devices of load, divided by those of another signal, for equal latency"
        own = ("config", "figure", "ratio_devices", "ratio_devices_low", "ratio_devices_high", "seeds")
        table(title, [{key: row[key] for key in own} for row in compared])
    if options.figure is not None:
        from bench.figures import draw_autoscale  # only here: the figure's library is an extra

        draw_autoscale(options.figure, rows)
    said, met = verdict(runs, compared)
    head = about("autoscale", given) | facts(options, workload) | {"chosen_target": chosen_target(rows)}
    minutes = (time.monotonic() - began_s) / 60
    return finish(
        rows + compared,
        about=head,
        json_file=options.json,
        summary=f"devices for equal p99: {said}; target {chosen_target(rows)}; {options.seeds} windows, "
        f"{head['disjoint_windows']} without overlap; {minutes:.1f} minutes",
        met=met,
    )


if __name__ == "__main__":
    sys.exit(main())
