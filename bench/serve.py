"""What does a policy gain on the real system? `laps-sd bench serve`

The one-machine stack (record, scheduler, worker with the shipped demo pair, gateway, each a process) serves the same requests
under one policy after another: same prompts, seeds, hints and send times, through the public gRPC API, from an open-loop client.
The output compares the measurement with the simulator's prediction with the production core for the same requests, from a calibration
run on the same stack: true lengths and rounds of every request, and what a round and a prefill cost this worker.

Scenarios: `burst` sends everything at once; `overload` twice as much as the worker can do (with less, a queue hardly builds in
so few requests); `load-0.7` seven tenths of it. One slot by default: there the machine share of a request is its own round,
every decision counts, and the reserved share is a thirty-second of the time; with two to four slots it would be a quarter to a
half of the machine.

Every round takes the same time (`--round-ms`): the worker really computes it and then waits for the rest of it, as it waits for a GPU.
A shared machine may be at half its speed for minutes; without this the order of the runs would decide. `--round-ms 0` lets rounds take what
they take, and needs a machine to itself.

Every scheduler starts with the same priors, learnt from a warm-up that no run measures. Policies take turns in changing order. A
run in which a request failed, or had another text than alone, does not count, and is reported; one in which something else on the
machine slowed the worker down is repeated.

Goals (over the pairs of runs of a seed, 95 % interval of the mean log-ratio): with burst and overload the mean latency of laps-sd at
least 30 % below fcfs, and not above srpt-length by more than 5 %, both by the upper end; every policy's ratio to fcfs within
15 % of the simulated one.

Examples:
  laps-sd bench serve
  laps-sd bench serve --scenario burst --policy fcfs --policy srpt-length --policy laps-sd --requests 24 --seeds 2
  laps-sd bench serve --trace day.csv --load 0.9 --predictor 1.0 --json serve.json --figure serve.svg
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._policy.run import quantile
from bench._replay import digest, draw_requests, poisson_times, stretched, traced_requests
from bench._serve_stack import (
    Calibration,
    Run,
    ServedStack,
    Truth,
    calibrate,
    hinted,
    make_jobs,
    simulated_latencies,
)
from bench.report import Interval, about, finish, progress, ratio_interval, table
from laps_sd.errors import StartupError
from laps_sd.v1 import inference_pb2 as pb
from scheduler_svc.core.policies import POLICIES

ALL_POLICIES = ("fcfs", "srpt-length", "laps-sd", "sjf-length", "las", "laps-sd-paper", "sd-index")
LOADS = {"burst": None, "overload": 2.0, "load-0.7": 0.7}
"""Arrival rate × mean machine seconds of a request; None: all at once."""
CROWDED = ("burst", "overload")
GOAL_FCFS = 0.70
GOAL_SRPT = 1.05
GOAL_SIMULATED = 0.15
DRIFT = 0.25
"""Excess of a worker's machine time over the predicted one, as a share, above which something else on the
machine disturbed the run. Such a run is repeated, whatever its result, up to `REPEATS` times; if all were
disturbed, the last one counts and is reported as disturbed."""
REPEATS = 2
WIDTH = 170


@dataclass(frozen=True)
class Workload:
    """Requests of one seed in one scenario."""

    requests: list[pb.GenerateRequest]
    due_s: list[float]
    truths: list[Truth]
    digest: str


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
    """Result of one policy in one turn of one seed."""

    scenario: str
    policy: str
    seed: int
    turn: int
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
    repeats: int = 0
    """Disturbed runs that were discarded before this one."""

    @property
    def disturbed(self) -> bool:
        return self.busy_ratio > 1 + DRIFT


# -- workloads ------------------------------------------------------------------------------------------------------------


def workloads(
    options: argparse.Namespace, sets: Sequence[Any], calibration: Calibration
) -> dict[tuple[str, int], Workload]:
    """Return the workloads by scenario and seed."""
    found = {}
    for number, (requests, times_s) in enumerate(sets):
        seed = number + 1
        truths = calibration.truths[number]
        ready = hinted(requests, truths, options.predictor, seed)
        jobs = make_jobs(ready, truths, [0.0] * len(ready))
        mean_s = statistics.fmean(calibration.machine.service_s(job) for job in jobs)
        for scenario in options.scenario:
            due_s = due_times(scenario, seed, len(ready), mean_s, times_s, options.load)
            found[scenario, seed] = Workload(ready, due_s, truths, digest(ready, due_s))
    return found


def due_times(
    scenario: str, seed: int, count: int, mean_s: float, traced_s: Sequence[float] | None, load: float | None
) -> list[float]:
    """Return the send times, ascending, in seconds from the start."""
    if scenario == "trace":
        assert traced_s is not None
        return stretched(traced_s, mean_s / load) if load else list(traced_s)
    offered = LOADS[scenario]
    return [0.0] * count if offered is None else poisson_times(seed, count, mean_s / offered)


def in_turn(policies: Sequence[str], place: int) -> list[str]:
    """Return the policies in the order of this turn: another one begins each time, and every other turn has
    the reverse order, so that drift of the machine affects all equally.
    """
    start = place % len(policies)
    order = [*policies[start:], *policies[:start]]
    return order[::-1] if place % 2 else order


# -- runs -----------------------------------------------------------------------------------------------------------------


def judge(run: Run, workload: Workload) -> tuple[Figures | None, list[str]]:
    """Return the figures of a run, and its errors; a run with errors does not count."""
    failures = []
    for number, (reply, truth) in enumerate(zip(run.replies, workload.truths, strict=True), start=1):
        tokens = reply.ended.usage.completion_tokens
        if reply.error:
            failures.append(f"request {number}: {reply.error}")
        elif tokens != truth.output_tokens:
            failures.append(f"request {number}: {tokens} tokens, {truth.output_tokens} when it ran alone")
    if failures:
        return None, failures
    replies = run.replies
    slowdowns = [
        reply.latency_s / truth.alone_s for reply, truth in zip(replies, workload.truths, strict=True)
    ]
    return (
        Figures(
            [reply.latency_s for reply in replies],
            statistics.fmean(reply.first_token_s for reply in replies),
            statistics.fmean(slowdowns),
            statistics.fmean(reply.ended.timing.preemptions for reply in replies),
        ),
        [],
    )


async def measure(options: argparse.Namespace) -> tuple[list[Measured], Calibration]:
    """Calibrate, then run everything."""
    sets: list[tuple[list[pb.GenerateRequest], list[float] | None]] = []
    for seed in range(1, options.seeds + 1):
        if options.trace is not None:
            sets.append(traced_requests(options.trace, seed, options.requests))
        else:
            sets.append((draw_requests(seed, options.requests, options.max_tokens), None))
    began_s = time.monotonic()
    progress("starting the stack")
    round_s = options.round_ms / 1000 if options.engine == "demo" else 0.0
    with ServedStack(slots=options.slots, engine=options.engine, round_s=round_s) as stack:
        calibration = await calibrate(
            stack,
            [requests for requests, _ in sets],
            warm_up=options.warm_up,
            max_tokens=options.max_tokens,
            sigma=options.predictor,
            slots=options.slots,
        )
        loads = workloads(options, sets, calibration)
        progress(f"calibrated after {time.monotonic() - began_s:.0f} s: {described(calibration, loads)}")
        plan = [
            (scenario, seed, turn, policy)
            for place, (seed, turn) in enumerate(
                (s, t) for s in range(1, options.seeds + 1) for t in range(options.turns)
            )
            for scenario in options.scenario
            for policy in in_turn(options.policy, place)
        ]
        found = []
        began_s = time.monotonic()
        for number, (scenario, seed, turn, policy) in enumerate(plan, start=1):
            one = await undisturbed(stack, calibration, loads[scenario, seed], scenario, seed, turn, policy)
            found.append(one)
            left_s = (time.monotonic() - began_s) / number * (len(plan) - number)
            said = (
                f"mean {one.found.mean_s:.2f} s (simulated {one.predicted_mean_s:.2f}), worker {one.utilisation:.0%} busy"
                if not one.failures
                else "FAILED"
            )
            progress(
                f"{number}/{len(plan)}  seed {seed}, {scenario}, {policy}: {said}; about {left_s / 60:.1f} minutes left"
            )
            for failure in one.failures[:3]:
                progress(f"    {failure}")
    return found, calibration


async def undisturbed(
    stack: ServedStack,
    calibration: Calibration,
    load: Workload,
    scenario: str,
    seed: int,
    turn: int,
    policy: str,
) -> Measured:
    """Run once, and repeat the run if it was disturbed."""
    repeats = 0
    while True:
        one = await measure_one(stack, calibration, load, scenario, seed, turn, policy)
        if one.failures or not one.disturbed or repeats == REPEATS:
            return dataclasses.replace(one, repeats=repeats)
        repeats += 1


async def measure_one(
    stack: ServedStack,
    calibration: Calibration,
    load: Workload,
    scenario: str,
    seed: int,
    turn: int,
    policy: str,
) -> Measured:
    """Run one policy on one workload."""
    stack.schedule_by(policy, calibration.priors)
    run = await stack.run(load.requests, load.due_s)
    found, failures = judge(run, load)
    predicted_s = simulated_latencies(policy, load.requests, load.due_s, load.truths, calibration)
    jobs = make_jobs(load.requests, load.truths, load.due_s)
    expected_s = sum(calibration.machine.service_s(job) for job in jobs)
    return Measured(
        scenario,
        policy,
        seed,
        turn,
        found or Figures([], 0.0, 0.0, 0.0),
        statistics.fmean(predicted_s),
        run.worker.busy_s / expected_s,
        run.worker.busy_s
        / max(at_s + reply.latency_s for at_s, reply in zip(load.due_s, run.replies, strict=True)),
        max(reply.late_s for reply in run.replies),
        failures,
        load.digest,
    )


def described(calibration: Calibration, loads: Mapping[tuple[str, int], Workload]) -> str:
    """Return the machine and the requests as one line."""
    machine = calibration.machine
    truths = [truth for own in calibration.truths for truth in own]
    lengths = sorted(truth.output_tokens for truth in truths)
    load = next(iter(loads.values()))
    services = [machine.service_s(job) for job in make_jobs(load.requests, load.truths, load.due_s)]
    rounds = statistics.fmean(len(truth.paces) for truth in truths)
    return (
        f"a round of one request takes {machine.decode_s(1, 100) * 1e3:.1f} ms, a request {statistics.fmean(services):.3f} "
        f"machine seconds, {rounds:.0f} rounds and {statistics.fmean(lengths):.0f} tokens on average (p10 {quantile(lengths, 0.1)}, "
        f"p50 {quantile(lengths, 0.5)}, p90 {quantile(lengths, 0.9)})"
    )


# -- figures --------------------------------------------------------------------------------------------------------------

By = Mapping[tuple[str, str], Mapping[tuple[int, int], Measured]]
"""Runs that count, by (scenario, policy), then by (seed, turn)."""


def counted(runs: Sequence[Measured]) -> dict[tuple[str, str], dict[tuple[int, int], Measured]]:
    found: dict[tuple[str, str], dict[tuple[int, int], Measured]] = {}
    for run in runs:
        own = found.setdefault((run.scenario, run.policy), {})
        if not run.failures:
            own[run.seed, run.turn] = run
    return found


def ratio(by: By, scenario: str, policy: str, of: str, *, simulated: bool = False) -> Interval | None:
    """Return the ratio of the mean latencies, over pairs of the same seed and turn. Return None without a
    pair; one pair alone shows no spread, so its interval has no ends.
    """
    ours, theirs = by.get((scenario, policy), {}), by.get((scenario, of), {})
    pairs = []
    for key in sorted(ours.keys() & theirs.keys()):
        pair = (ours[key], theirs[key])
        one, other = (run.predicted_mean_s if simulated else run.found.mean_s for run in pair)
        pairs.append((one, other))
    if len(pairs) > 1:
        return ratio_interval(pairs)
    return Interval(pairs[0][0] / pairs[0][1], 0.0, math.inf) if pairs else None


def rows_of(by: By, runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return one row for each policy in each scenario; figures are means over runs, p99 is of all their
    requests.
    """
    rows = []
    for (scenario, policy), own in by.items():
        every = [run for run in runs if (run.scenario, run.policy) == (scenario, policy)]
        row: dict[str, Any] = {
            "config": scenario,
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
            found = ratio(by, scenario, policy, of)
            predicted = ratio(by, scenario, policy, of, simulated=True)
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
        "config": run.scenario,
        "policy": run.policy,
        "seed": run.seed,
        "turn": run.turn,
        "mean_s": None if run.failures else run.found.mean_s,
        "simulated_mean_s": run.predicted_mean_s,
        "busy_ratio": run.busy_ratio,
        "utilisation": run.utilisation,
        "late_s": run.late_s,
        "repeats": run.repeats,
        "sent": run.sent,
        "failures": run.failures,
    }


@dataclass(frozen=True, kw_only=True)
class Goals:
    """Goals of the benchmark."""

    fcfs: float = GOAL_FCFS
    srpt: float = GOAL_SRPT
    simulated: float = GOAL_SIMULATED


def verdicts(by: By, goals: Goals) -> list[dict[str, Any]]:
    """Return each goal that the runs can judge, with its result."""
    found: list[dict[str, Any]] = []

    def add(scenario: str, what: str, value: Interval | None, shown: str, asked: str, met: bool) -> None:
        ends = (value.low, value.high) if value is not None else (None, None)
        found.append(
            {
                "verdict": True,
                "config": scenario,
                "goal": what,
                "asked": asked,
                "found": shown if value is not None else "no pair of runs without a failure",
                "ratio": value.middle if value is not None else None,
                "low": ends[0] if ends[0] else None,
                "high": ends[1] if ends[1] is not None and math.isfinite(ends[1]) else None,
                "met": met and value is not None,
            }
        )

    scenarios = dict.fromkeys(scenario for scenario, _ in by)
    for scenario in scenarios:
        policies = [policy for at, policy in by if at == scenario]
        for of, most in (("fcfs", goals.fcfs), ("srpt-length", goals.srpt)):
            if scenario in CROWDED and {"laps-sd", of} <= set(policies):
                one = ratio(by, scenario, "laps-sd", of)
                add(
                    scenario,
                    f"mean latency, laps-sd / {of}",
                    one,
                    _shown(one),
                    f"upper end ≤ {most:.2f}",
                    one is not None and one.high <= most,
                )
        if "fcfs" not in policies:
            continue
        for policy in policies:
            if policy == "fcfs":
                continue
            one = ratio(by, scenario, policy, "fcfs")
            other = ratio(by, scenario, policy, "fcfs", simulated=True)
            off = one.middle / other.middle - 1 if one is not None and other is not None else math.inf
            shown = (
                f"{one.middle:.3f}, simulated {other.middle:.3f}: {off:+.1%}"
                if one is not None and other is not None
                else ""
            )
            add(
                scenario,
                f"{policy} / fcfs as simulated",
                one,
                shown,
                f"within {goals.simulated:.0%}",
                abs(off) <= goals.simulated,
            )
    return found


def _shown(found: Interval | None) -> str:
    if found is None or math.isfinite(found.high):
        return str(found)
    return f"{found.middle:.3f}, and one pair has no interval"


def show(rows: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]], runs: Sequence[Measured]) -> None:
    """Print the tables."""

    def spread(row: dict[str, Any], key: str) -> str:
        if key not in row:
            return ""
        low, high = row[f"{key}_low"], row[f"{key}_high"]
        return f"{row[key]:.3f}" + (
            f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
        )

    for scenario in dict.fromkeys(row["config"] for row in rows):
        shown = [
            {
                "policy": row["policy"],
                "mean s": row.get("mean_s", ""),
                "/ fcfs": spread(row, "ratio_fcfs"),
                "simulated": row.get("simulated_ratio_fcfs", ""),
                "/ srpt-length": spread(row, "ratio_srpt_length"),
                "simulated ": row.get("simulated_ratio_srpt_length", ""),
                "p99 s": row.get("p99_s", ""),
                "first token s": row.get("first_token_s", ""),
                "slowdown": row.get("mean_slowdown", ""),
                "preempted": row.get("preemptions", ""),
                "work": row.get("busy_ratio", ""),
                "utilised": row.get("utilisation", ""),
                "runs": f"{row['runs']}" + (f", {row['failed_runs']} failed" if row["failed_runs"] else ""),
            }
            for row in rows
            if row["config"] == scenario
        ]
        table(
            f"{scenario} (work: machine seconds of the worker over those that the calibration foretold)",
            shown,
            width=WIDTH,
        )
    if found:
        keys = ("config", "goal", "asked", "found")
        table(
            "Goals",
            [{**{key: one[key] for key in keys}, "": "met" if one["met"] else "MISSED"} for one in found],
            width=WIDTH,
        )
    repeated = sum(run.repeats for run in runs)
    if repeated:
        print(
            f"Note: {repeated} runs were repeated, because something else slowed the worker down by more than {DRIFT:.0%}."
        )
    drifted = [run for run in runs if abs(run.busy_ratio - 1) > DRIFT]
    if drifted:
        worst = max(drifted, key=lambda run: abs(math.log(run.busy_ratio)))
        print(
            f"Note: in {len(drifted)} of {len(runs)} runs that count the worker was more than {DRIFT:.0%} off its calibrated speed "
            f"(at worst {worst.busy_ratio:.2f} times the work): loads were not what they are called."
        )
    late_s = max(run.late_s for run in runs)
    if late_s > 0.1:
        print(
            f"Note: the generator sent a request {late_s:.2f} s late; latencies count from the scheduled time all the same."
        )


# -- the command ----------------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="laps-sd bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=sorted(POLICIES),
        help=f"only these (default: {', '.join(ALL_POLICIES)})",
    )
    parser.add_argument(
        "--scenario", action="append", choices=list(LOADS), help="only these (default: all three)"
    )
    parser.add_argument(
        "--requests", type=int, default=36, help="requests per run (default 36: three of each kind)"
    )
    parser.add_argument(
        "--seeds", type=int, default=6, help="independent sets of requests and arrivals (default 6)"
    )
    parser.add_argument(
        "--turns", type=int, default=1, help="runs of every policy with each seed (default 1)"
    )
    parser.add_argument("--slots", type=int, default=1, help="requests in a round of the worker (default 1)")
    parser.add_argument(
        "--round-ms",
        type=float,
        default=15.0,
        metavar="MS",
        help="least time of a round; more than twice what one needs, to be sure (default 15; 0: as long as it takes)",
    )
    parser.add_argument(
        "--predictor",
        type=float,
        default=0.3,
        metavar="SIGMA",
        help="error of the length hints (default 0.3)",
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="limit of each request (default 256)")
    parser.add_argument("--warm-up", type=int, default=36, help="requests that teach the priors (default 36)")
    parser.add_argument(
        "--trace", type=Path, help="arrivals and lengths from a CSV arrival_s,input_tokens,output_tokens"
    )
    parser.add_argument(
        "--load", type=float, help="stretch the trace's arrivals to this load (default: as they stand)"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--figure", type=Path, help="draw measured and simulated ratios into this .png or .svg"
    )
    parser.add_argument("--engine", choices=("demo", "fake"), default="demo", help=argparse.SUPPRESS)
    for name in ("fcfs", "srpt", "simulated"):
        parser.add_argument(
            f"--goal-{name}", type=float, default=getattr(Goals(), name), help=argparse.SUPPRESS
        )
    options = parser.parse_args(argv)
    for name in ("requests", "seeds", "turns", "slots", "max_tokens", "warm_up"):
        least = 2 if name in ("requests", "warm_up") else 1
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")
    if not 0 <= options.round_ms <= 1000:
        parser.error("--round-ms must be from 0 to 1000")
    if options.predictor < 0:
        parser.error("--predictor must not be negative")
    if options.load is not None and (options.trace is None or options.load <= 0):
        parser.error("--load needs --trace, and must be more than 0")
    if options.trace is not None and options.scenario:
        parser.error("--trace is a scenario of its own: leave out --scenario")
    options.scenario = (
        ["trace"] if options.trace is not None else list(dict.fromkeys(options.scenario or LOADS))
    )
    options.policy = list(dict.fromkeys(options.policy or ALL_POLICIES))
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    began_s = time.monotonic()
    try:
        runs, _ = asyncio.run(measure(options))
    except (StartupError, ValueError, OSError, RuntimeError) as error:
        print(f"laps-sd bench serve: {error}", file=sys.stderr)
        return 2
    by = counted(runs)
    rows = rows_of(by, runs)
    found = verdicts(
        by, Goals(fcfs=options.goal_fcfs, srpt=options.goal_srpt, simulated=options.goal_simulated)
    )
    show(rows, found, runs)
    if options.figure is not None:
        from bench.figures import ratios

        ratios(options.figure, rows)
    met = [one for one in found if one["met"]]
    failed = sum(bool(run.failures) for run in runs)
    summary = f"{len(met)} of {len(found)} goals hold over {options.seeds} seeds, {(time.monotonic() - began_s) / 60:.1f} minutes"
    if failed:
        summary += f"; {failed} of {len(runs)} runs failed and count for nothing"
    each = [run_row(run) for run in runs]
    return finish(
        [*rows, *each, *found],
        json_file=options.json,
        summary=summary,
        met=len(met) == len(found),
        about=about("serve", sys.argv[1:] if argv is None else argv),
    )


if __name__ == "__main__":
    sys.exit(main())
