"""What does a policy gain? The production core in virtual time, policy against policy. `laps-sd bench policy`

Every policy runs the same jobs (paired by seed); each figure stands as a ratio to FCFS and to the oracle, with the 95 %
interval over seeds. A regime is a file of bench/regimes: arrivals, lengths, acceptance, predictor, machine, and what must
hold there. The command exits non-zero when an expectation of a regime that ran fails.

Examples:
  laps-sd bench policy --regime chat
  laps-sd bench policy --regime all --data ../shared/data --json policy.json
  laps-sd bench policy --trace day.csv --predictor 1.0 --batch 32 --workers 4 --load 0.9 --policy fcfs --policy laps-sd
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.report import Interval, finish, interval, table
from scheduler_svc.core.policies import POLICIES, Policy, policy_named
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.sim.cluster import Cluster, Outcome
from scheduler_svc.sim.jobs import Job
from scheduler_svc.sim.machine import Machine
from scheduler_svc.sim.oracle import Oracle
from scheduler_svc.sim.workload import Acceptance, Arrivals, Predictor, Workload, described, draw

REGIMES = Path(__file__).parent / "regimes"
BESIDE = Path(__file__).parents[2] / "shared" / "data"
ALWAYS = ("fcfs", "oracle", "srpt-length", "sd-index", "laps-sd")
"""Policies that run in every regime that names no others: the yardsticks, the strongest rival, and ours."""
LEVELS_COST = 1.02
"""What the levels of `laps-sd` may cost against its level-free limit, in every regime."""
DISTRIBUTION_POINTS = 200
WIDTH = 190
"""Characters of the widest table."""


# -- what is asked --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """`figure` of `policy` divided by that of `of`, mean over seeds, lies within the bounds."""

    policy: str = "laps-sd"
    figure: str = "mean_s"
    of: str = "fcfs"
    at_most: float = float("inf")
    at_least: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Regime:
    """A workload, machines, settings of the core, and what must hold."""

    title: str
    workers: int = 1
    policies: tuple[str, ...] = ()
    machine: Machine = field(default_factory=Machine)
    workload: Workload = field(default_factory=Workload)
    settings: Mapping[str, Any] = field(default_factory=dict)
    expect: tuple[Expectation, ...] = ()
    name: str = ""

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        """Those of the file, and the one that every regime has."""
        return (*self.expect, Expectation(of="sd-index", at_most=LEVELS_COST))

    @property
    def runs(self) -> tuple[str, ...]:
        """The policies that run, each once."""
        named = [*self.policies] or [*ALWAYS]
        for expected in self.expectations if not self.policies else self.expect:
            named += [expected.policy, expected.of]
        return tuple(dict.fromkeys(named))


def read_regime(path: Path) -> Regime:
    """ValueError names the table and the key that is wrong."""
    with path.open("rb") as file:
        regime = described(Regime, tomllib.load(file), path.name)
    return dataclasses.replace(regime, name=path.stem)


def make_policy(spec: str, jobs: Mapping[str, Job], machine: Machine, settings: CoreSettings) -> Policy:
    """`oracle`, or what production knows."""
    name = spec.partition(":")[0]
    return Oracle(settings, jobs, machine) if name == "oracle" else policy_named(name, settings)


def settings_of(spec: str, common: Mapping[str, Any]) -> CoreSettings:
    """`NAME:setting=value,setting=value` sets what differs from the regime's settings."""
    own: dict[str, Any] = {}
    for part in filter(None, spec.partition(":")[2].split(",")):
        key, _, value = part.partition("=")
        own[key] = {"true": True, "false": False}.get(value) if value in ("true", "false") else float(value)
    return described(CoreSettings, {**common, **own}, spec)


# -- one run --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _jobs(workload: Workload, machine: Machine, workers: int, seed: int, data: Path | None) -> list[Job]:
    return draw(workload, machine, workers, seed, data)


def simulate(regime: Regime, spec: str, seed: int, data: Path | None) -> dict[str, Any]:
    """One policy on the jobs of one seed: plain figures, in seconds unless they say otherwise."""
    machine = regime.machine
    jobs = _jobs(regime.workload, machine, regime.workers, seed, data)
    began_s = time.process_time()
    outcome = Cluster(
        jobs,
        machine,
        regime.workers,
        lambda by_id, settings: make_policy(spec, by_id, machine, settings),
        settings_of(spec, regime.settings),
    ).run()
    return {**figures(outcome, machine, regime.workers), "cpu_s": time.process_time() - began_s}


def figures(outcome: Outcome, machine: Machine, workers: int) -> dict[str, Any]:
    """What is reported of a run."""
    fates = outcome.fates
    latencies = sorted(fate.latency_s for fate in fates)
    after = [fate.perceptible_after for fate in fates if fate.perceptible_after is not None]
    return {
        "mean_s": statistics.fmean(latencies),
        "p50_s": quantile(latencies, 0.50),
        "p90_s": quantile(latencies, 0.90),
        "p99_s": quantile(latencies, 0.99),
        "mean_slowdown": statistics.fmean(fate.latency_s / machine.alone_s(fate.job) for fate in fates),
        "longest_wait_s": max(fate.waited_s for fate in fates),
        "first_token_s": statistics.fmean(fate.first_token_s - fate.job.arrival_s for fate in fates),
        "preemptions": statistics.fmean(fate.preemptions for fate in fates),
        "evictions": statistics.fmean(fate.evictions for fate in fates),
        "utilisation": outcome.busy_s / outcome.end_s / workers,
        "perceptible_share": len(after) / len(fates),
        "perceptible_at_arrival_share": after.count(0) / len(fates),
        "perceptible_after_rounds": statistics.fmean(after) if after else None,
        "level_s": {str(level): outcome.level_s[level] for level in sorted(outcome.level_s)},
        "level_requests": {
            str(level): len(outcome.level_requests[level]) for level in sorted(outcome.level_s)
        },
        "latencies_s": [
            quantile(latencies, (point + 0.5) / DISTRIBUTION_POINTS) for point in range(DISTRIBUTION_POINTS)
        ],
    }


def quantile(ordered: Sequence[float], level: float) -> float:
    """Of values in ascending order: the smallest that at least this share does not exceed."""
    return ordered[min(len(ordered) - 1, int(level * len(ordered)))]


# -- many runs ------------------------------------------------------------------------------------------------------------

Runs = dict[tuple[str, str], list[dict[str, Any]]]
"""(regime, policy): the figures of each seed, in order."""


def run_all(regimes: Sequence[Regime], seeds: int, data: Path | None, processes: int) -> Runs:
    """Every policy of every regime on every seed, in so many processes."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    tasks = [
        (regime, seed, spec) for regime in regimes for seed in range(1, seeds + 1) for spec in regime.runs
    ]
    with (
        Progress(*columns, console=Console(stderr=True)) as shown,
        ProcessPoolExecutor(processes) as pool,
    ):
        bar = shown.add_task("simulating", total=len(tasks))
        futures = {
            pool.submit(simulate, regime, spec, seed, data): (regime.name, spec, seed)
            for regime, seed, spec in tasks
        }
        try:
            for future in as_completed(futures):
                name, spec, seed = futures[future]
                found[name, spec][seed] = future.result()
                shown.update(bar, advance=1, description=f"{name}: {spec}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {key: [by_seed[seed] for seed in sorted(by_seed)] for key, by_seed in found.items()}


def ratio(runs: Runs, regime: str, policy: str, of: str, figure: str) -> Interval:
    """Paired over seeds, on the logarithm (a ratio and its inverse weigh the same). One seed has no interval."""
    pairs = zip(runs[regime, policy], runs[regime, of], strict=True)
    logs = [math.log(ours[figure] / theirs[figure]) for ours, theirs in pairs]
    found = interval(logs) if len(logs) > 1 else Interval(logs[0], logs[0], logs[0])
    return Interval(math.exp(found.middle), math.exp(found.low), math.exp(found.high))


def rows_of(regime: Regime, runs: Runs, seeds: int) -> list[dict[str, Any]]:
    """One aggregated row per policy."""
    rows = []
    for spec in regime.runs:
        own = runs[regime.name, spec]
        row: dict[str, Any] = {"regime": regime.name, "policy": spec}
        for figure in own[0]:
            if isinstance(own[0][figure], float | int):
                row[figure] = statistics.fmean(run[figure] for run in own)
        for base in ("fcfs", "oracle", "srpt-length"):
            if base in regime.runs:
                for figure, label in (("mean_s", ""), ("p99_s", "p99_"), ("longest_wait_s", "longest_wait_")):
                    found = ratio(runs, regime.name, spec, base, figure)
                    key = f"{label}ratio_{base.replace('-', '_')}"
                    row |= {key: found.middle, f"{key}_low": found.low, f"{key}_high": found.high}
        after = [
            run["perceptible_after_rounds"] for run in own if run["perceptible_after_rounds"] is not None
        ]
        row["perceptible_after_rounds"] = statistics.fmean(after) if after else None
        for name in ("level_s", "level_requests"):
            levels = sorted({int(level) for run in own for level in run[name]})
            row[name] = {
                str(level): statistics.fmean(run[name].get(str(level), 0.0) for run in own)
                for level in levels
            }
        row["latencies_s"] = [
            statistics.fmean(values) for values in zip(*(run["latencies_s"] for run in own), strict=True)
        ]
        row["seeds"] = seeds
        rows.append(row)
    return rows


def judged(regime: Regime, runs: Runs) -> list[dict[str, Any]]:
    """Each expectation with what was found."""
    verdicts = []
    for expected in regime.expectations:
        if (regime.name, expected.policy) not in runs or (regime.name, expected.of) not in runs:
            continue
        found = ratio(runs, regime.name, expected.policy, expected.of, expected.figure)
        verdicts.append(
            {
                "regime": regime.name,
                "policy": expected.policy,
                "figure": expected.figure,
                "of": expected.of,
                "found": found.middle,
                "found_low": found.low,
                "found_high": found.high,
                "at_least": expected.at_least,
                "at_most": expected.at_most,
                "met": expected.at_least <= found.middle <= expected.at_most,
            }
        )
    return verdicts


# -- for people -----------------------------------------------------------------------------------------------------------


def show(regime: Regime, rows: Sequence[dict[str, Any]]) -> None:
    """The table of one regime."""

    def spread(row: dict[str, Any], key: str) -> str:
        if key not in row:
            return ""
        return f"{row[key]:.3f} [{row[key + '_low']:.3f}, {row[key + '_high']:.3f}]"

    shown = [
        {
            "policy": row["policy"],
            "mean s": row["mean_s"],
            "/ fcfs": spread(row, "ratio_fcfs"),
            "/ oracle": spread(row, "ratio_oracle"),
            "/ srpt-length": spread(row, "ratio_srpt_length"),
            "p50 s": row["p50_s"],
            "p90 s": row["p90_s"],
            "p99 s": row["p99_s"],
            "slowdown": row["mean_slowdown"],
            "longest wait s": row["longest_wait_s"],
            "preempted": row["preemptions"],
            "evicted": row["evictions"],
        }
        for row in rows
    ]
    table(f"{regime.name}: {regime.title}", shown, width=WIDTH)
    for row in rows:
        carried = {level: seconds for level, seconds in row["level_s"].items() if seconds > 0}
        if row["policy"] in ("oracle",) or len(carried) < 2:
            continue
        total_s = sum(carried.values())
        levels = "  ".join(
            f"{level}: {seconds / total_s:.1%} of time, {row['level_requests'][level]:.0f} requests"
            for level, seconds in carried.items()
        )
        after = row["perceptible_after_rounds"]
        known = (
            f"; perceptible at arrival {row['perceptible_at_arrival_share']:.0%}, ever"
            f" {row['perceptible_share']:.0%}, after {after:.1f} rounds on average"
            if after is not None
            else ""
        )
        print(f"  {row['policy']} by level  {levels}{known}")
    print()


def show_verdicts(verdicts: Sequence[dict[str, Any]]) -> None:
    """What was expected, and what was found."""
    shown = []
    for verdict in verdicts:
        bounds = [f"≥ {verdict['at_least']:.2f}"] if verdict["at_least"] else []
        bounds += [f"≤ {verdict['at_most']:.2f}"] if verdict["at_most"] < float("inf") else []
        shown.append(
            {
                "regime": verdict["regime"],
                "expected": f"{verdict['policy']} {verdict['figure']} / {verdict['of']} {', '.join(bounds)}",
                "found": f"{verdict['found']:.3f} [{verdict['found_low']:.3f}, {verdict['found_high']:.3f}]",
                "": "met" if verdict["met"] else "MISSED",
            }
        )
    table("Expectations (mean over seeds of the paired ratio, 95 % interval)", shown, width=WIDTH)


# -- the command ----------------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="laps-sd bench policy",
        description=(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(sorted(path.stem for path in REGIMES.glob("*.toml")))
    parser.add_argument(
        "--regime",
        action="append",
        help=f"a regime, a file of one, or all (default chat); there are: {names}",
    )
    parser.add_argument(
        "--policy",
        action="append",
        help="only these, as NAME or NAME:setting=value,… (default: what the regime names); there are: "
        + ", ".join([*sorted(POLICIES), "oracle"]),
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(given) if (given := os.environ.get("LAPS_SD_BENCH_DATA")) else BESIDE,
        help="folder with the recordings that regimes name (traces/, acceptance/, prompts/); also LAPS_SD_BENCH_DATA; "
        "default: shared/data beside the checkout",
    )
    parser.add_argument("--seeds", type=int, default=5, help="independent draws of the jobs (default 5)")
    parser.add_argument("--requests", type=int, help="requests per draw (default: the regime's)")
    parser.add_argument("--load", type=float, help="offered load, 1 = what the workers can just do")
    parser.add_argument("--batch", type=int, help="slots of a worker")
    parser.add_argument("--workers", type=int, help="workers")
    parser.add_argument(
        "--kv-tokens", type=int, help="tokens of context that a worker's KV holds (default: endless)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        help="arrivals and lengths from a file: CSV arrival_s,input_tokens,output_tokens or Mooncake",
    )
    parser.add_argument("--acceptance", type=Path, help="replay recorded rounds from a file (JSON lines)")
    parser.add_argument(
        "--predictor", help="error of the length prediction: sigma of its logarithm (0.3, 1.0, …), or none"
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        help="simulations at once (default: one per core)",
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--figure",
        type=Path,
        help="draw latency distribution and mean against load (.png or .svg); takes more runs",
    )
    options = parser.parse_args(argv)
    if options.seeds < 1 or options.processes < 1:
        parser.error("--seeds and --processes must be at least 1")
    for spec in options.policy or ():
        name = spec.partition(":")[0]
        if name != "oracle" and name not in POLICIES:
            parser.error(
                f"--policy: there is no {name!r}; there are: {', '.join([*sorted(POLICIES), 'oracle'])}"
            )
    return options


def regimes_of(options: argparse.Namespace) -> list[Regime]:
    """Those asked for, with what the options change. What is changed has no expectations any more."""
    wanted = options.regime or ["chat"]
    if wanted == ["all"]:
        paths = sorted(REGIMES.glob("*.toml"))
    else:
        paths = [
            path if (path := Path(name)).suffix == ".toml" else REGIMES / f"{name}.toml" for name in wanted
        ]
    return [adapted(read_regime(path), options) for path in paths]


def adapted(regime: Regime, options: argparse.Namespace) -> Regime:
    """The regime with what the options say."""
    workload, machine = regime.workload, regime.machine
    arrivals, predictor, kinds = workload.arrivals, workload.predictor, workload.kinds
    if options.trace is not None:
        arrivals = Arrivals(process="trace", file=str(options.trace.absolute()), load=arrivals.load)
    if options.load is not None:
        arrivals = dataclasses.replace(arrivals, load=options.load)
    if options.predictor is not None:
        known = options.predictor != "none"
        predictor = (
            Predictor(kind="noisy", sigma=float(options.predictor)) if known else Predictor(kind="none")
        )
    if options.acceptance is not None:
        replay = Acceptance(kind="recorded", file=str(options.acceptance.absolute()))
        kinds = tuple(dataclasses.replace(kind, acceptance=replay) for kind in kinds)
    if options.batch is not None:
        machine = dataclasses.replace(machine, slots=options.batch)
    if options.kv_tokens is not None:
        machine = dataclasses.replace(machine, kv_tokens=options.kv_tokens)
    workload = dataclasses.replace(
        workload,
        arrivals=arrivals,
        predictor=predictor,
        kinds=kinds,
        requests=options.requests or workload.requests,
    )
    changed = dataclasses.replace(
        regime, workload=workload, machine=machine, workers=options.workers or regime.workers
    )
    if options.policy:
        changed = dataclasses.replace(changed, policies=tuple(options.policy))
    return changed if changed == regime else dataclasses.replace(changed, expect=())


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        regimes = regimes_of(options)
        began_s = time.monotonic()
        runs = run_all(regimes, options.seeds, options.data, options.processes)
    except (ValueError, OSError) as error:
        print(f"laps-sd bench policy: {error}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    verdicts: list[dict[str, Any]] = []
    for regime in regimes:
        own = rows_of(regime, runs, options.seeds)
        show(regime, own)
        rows += own
        verdicts += judged(regime, runs)
    if verdicts:
        show_verdicts(verdicts)
    missed = [verdict for verdict in verdicts if not verdict["met"]]
    if options.figure is not None:
        from bench.figures import draw_policy  # only here: the figure's library is an extra

        draw_policy(options.figure, regimes[0], rows)
    minutes = (time.monotonic() - began_s) / 60
    return finish(
        [*rows, *({"verdict": True, **verdict} for verdict in verdicts)],
        json_file=options.json,
        summary=f"{len(verdicts) - len(missed)} of {len(verdicts)} expectations hold in {len(regimes)} regimes, "
        f"{options.seeds} seeds each, {minutes:.1f} minutes",
        met=not missed,
    )


if __name__ == "__main__":
    sys.exit(main())
