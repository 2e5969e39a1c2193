"""The judgement of a run: its goals, rows and summary."""

from __future__ import annotations

import argparse
import collections
from typing import Any

from bench._clients import Outcome
from bench._faults.injector import FaultInjector
from bench._memory import GROWTH_MIB, Memory
from bench.report import progress, table

SUCCESS_GOAL = 0.995
CARRYING_GOAL = 0.8


def judge(
    options: argparse.Namespace,
    violations: list[str],
    *,
    outcomes: list[Outcome],
    tokens: int,
    injector: FaultInjector,
    memory: Memory,
    broken_s: float,
) -> tuple[list[dict[str, Any]], str]:
    """Judge the run, add what it violates to `violations`, and print its tables. Return its rows and the
    sentence for the summary line. `broken_s`: seconds from the first request until all faults were over.
    """
    wrong, allowed = _wrong(outcomes, injector)
    violations += wrong
    requests = [outcome for outcome in outcomes if outcome.number >= 0]  # without second calls for the same
    successful = sum(outcome.end is not None and not outcome.error for outcome in requests)
    share = successful / max(1, len(requests))
    carried = sum(done.carried for done in injector.injected) / max(1, len(injector.injected))
    growth = memory.growth()
    violations += _missed(options, successful, share, carried, growth)
    by_kind = collections.Counter(done.fault.kind for done in injector.injected)
    rows = [
        {
            "config": f"{options.engine}, {options.workers} workers, seed {options.seed}",
            "faults": len(injector.injected),
            "carried_ratio": carried,
            "requests": len(requests),
            "second_calls": len(outcomes) - len(requests),
            "successful": successful,
            "tokens": tokens,
            "explicit_errors": allowed,
            "violations": len(violations),
            "refused_calls": sum(outcome.refused for outcome in outcomes),
            "longest_without_leader_s": injector.state.longest_leaderless_s,
            "growth_mib": max(growth.values(), default=0.0),
            "seconds": broken_s,
        }
    ]
    table("Faults", [{"kind": kind, "faults": count} for kind, count in sorted(by_kind.items())])
    table("Chaos", rows, width=160)
    summary = (
        f"{len(injector.injected)} faults, {carried:.0%} on what had requests; {successful} of {len(requests)} requests and {tokens} "
        f"tokens completed (floor {options.faults} requests), {allowed} ended with an explicit error where that is allowed, "
        f"{len(violations)} violations"
    )
    return rows, summary


def _wrong(outcomes: list[Outcome], injector: FaultInjector) -> tuple[list[str], int]:
    """Return what is wrong with each request, and the number of allowed errors: of requests that were under way
    when the record may have lost data."""
    violations: list[str] = []
    allowed = 0
    loses = [done for done in injector.injected if done.loses]
    for outcome in outcomes:
        who = f"request {outcome.number}, {outcome.request_id or outcome.key} ({outcome.began_s:.1f} to {outcome.over_s:.1f} s)"
        violations += [f"{who}: {problem}" for problem in outcome.problems]
        if not outcome.error:
            continue
        if any(outcome.began_s <= done.at_s <= outcome.over_s for done in loses):
            allowed += 1
            progress(f"allowed: {who}: {outcome.error}")
        else:
            violations.append(f"{who}: {outcome.error}")
    return violations, allowed


def _missed(
    options: argparse.Namespace, successful: int, share: float, carried: float, growth: dict[str, float]
) -> list[str]:
    """Return the goals of the whole run that were missed."""
    missed = []
    if share < SUCCESS_GOAL:
        missed.append(f"{share:.2%} ended successfully, the goal is {SUCCESS_GOAL:.1%}")
    if carried < CARRYING_GOAL:
        missed.append(f"{carried:.0%} of the faults hit a component that had requests")
    if successful < options.faults:
        missed.append(f"{successful} requests completed, the floor is {options.faults}")
    return missed + [
        f"a {kind} grew by {mib:.0f} MiB, allowed are {GROWTH_MIB:.0f}"
        for kind, mib in growth.items()
        if mib > GROWTH_MIB
    ]
