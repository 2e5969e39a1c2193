"""Runs of the stack, one policy after another."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench._replay import draw_requests
from bench._serve.cases import Case
from bench._serve.lengths import lengths_row
from bench._serve.results import Figures, Measured
from bench._serve.workloads import Workload, in_turn, workloads
from bench._serve_stack import Calibration, Run, ServedStack, calibrate, make_jobs, simulated_latencies
from bench.report import progress, quantile
from laps_sd.v1 import inference_pb2 as pb


async def measure(options: argparse.Namespace) -> tuple[list[Measured], list[dict[str, Any]]]:
    """Calibrate, then run everything. Return the runs, and a row on the lengths with each kind of hints."""
    seeds = range(1, options.seeds + 1)
    sets = [draw_requests(seed, options.requests, options.max_tokens) for seed in seeds]
    began_s = time.monotonic()
    progress("starting the stack")
    round_s = options.round_ms / 1000 if options.engine == "demo" else 0.0
    with ServedStack(slots=options.slots, engine=options.engine, round_s=round_s) as stack:
        calibration = await calibrate(
            stack,
            sets,
            warm_up=options.warm_up,
            max_tokens=options.max_tokens,
            sigmas=options.predictor,
            slots=options.slots,
        )
        loads = workloads(options, sets, calibration)
        progress(f"calibrated after {time.monotonic() - began_s:.0f} s: {described(calibration, loads)}")
        lengths = [
            lengths_of(loads, sets, Case(options.scenario[0], sigma), calibration)
            for sigma in options.predictor
        ]
        plan = [
            (Case(scenario, sigma), seed, policy)
            for seed in seeds
            for scenario in options.scenario
            for sigma in options.predictor
            for policy in in_turn(options.policy, seed - 1)
        ]
        found = []
        began_s = time.monotonic()
        for number, (case, seed, policy) in enumerate(plan, start=1):
            one = await measure_one(stack, calibration, loads[case, seed], seed, policy)
            found.append(one)
            left_s = (time.monotonic() - began_s) / number * (len(plan) - number)
            said = (
                f"mean {one.found.mean_s:.2f} s (simulated {one.predicted_mean_s:.2f}), worker {one.utilisation:.0%} busy"
                if not one.failures
                else "FAILED"
            )
            progress(
                f"{number}/{len(plan)}  seed {seed}, {case.scenario}, hints {case.hints}, {policy}: {said}; about {left_s / 60:.1f} minutes left"
            )
            for failure in one.failures[:3]:
                progress(f"    {failure}")
    return found, lengths


def lengths_of(
    loads: Mapping[tuple[Case, int], Workload],
    sets: Sequence[list[pb.GenerateRequest]],
    case: Case,
    calibration: Calibration,
) -> dict[str, Any]:
    """Return the row on the lengths of all requests in this case; requests of other scenarios are the same."""
    own = [load for (of, _), load in loads.items() if of == case]
    kinds = [request.workload_class for requests in sets for request in requests]
    return lengths_row(own, kinds, calibration.warm_up)


async def measure_one(
    stack: ServedStack,
    calibration: Calibration,
    load: Workload,
    seed: int,
    policy: str,
) -> Measured:
    """Run one policy on one workload."""
    stack.schedule_by(policy, load.priors)
    run = await stack.run(load.requests, load.due_s)
    found, failures = judge(run, load)
    predicted_s = simulated_latencies(
        policy, load.requests, load.due_s, load.truths, load.priors, calibration
    )
    jobs = make_jobs(load.requests, load.truths, load.due_s)
    expected_s = sum(calibration.machine.service_s(job) for job in jobs)
    return Measured(
        load.case,
        policy,
        seed,
        found or Figures([], 0.0, 0.0, 0.0),
        statistics.fmean(predicted_s),
        run.worker.busy_s / expected_s,
        run.worker.busy_s
        / max(at_s + reply.latency_s for at_s, reply in zip(load.due_s, run.replies, strict=True)),
        max(reply.late_s for reply in run.replies),
        failures,
        load.digest,
    )


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


def described(calibration: Calibration, loads: Mapping[tuple[Case, int], Workload]) -> str:
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
