"""The goals of the benchmark, and which of them the runs meet."""

from __future__ import annotations

import math
from typing import Any

from bench._serve.cases import Case
from bench._serve.results import By, ratio
from bench.report import Interval

CROWDED = ("burst", "overload")
GOAL_FCFS = 0.60
GOAL_SRPT = 1.05
GOAL_SIMULATED = 0.15


def verdicts(by: By) -> list[dict[str, Any]]:
    """Return each goal that the runs can judge, with its result."""
    found: list[dict[str, Any]] = []

    def add(case: Case, what: str, value: Interval | None, shown: str, asked: str, met: bool) -> None:
        ends = (value.low, value.high) if value is not None else (None, None)
        found.append(
            {
                "verdict": True,
                "config": case.scenario,
                "hints": case.hints,
                "goal": what,
                "asked": asked,
                "found": shown if value is not None else "no pair of runs without a failure",
                "ratio": value.middle if value is not None else None,
                "low": ends[0] if ends[0] else None,
                "high": ends[1] if ends[1] is not None and math.isfinite(ends[1]) else None,
                "met": met and value is not None,
            }
        )

    for case in dict.fromkeys(case for case, _ in by):
        policies = [policy for at, policy in by if at == case]
        for of, most in (("fcfs", GOAL_FCFS), ("srpt-length", GOAL_SRPT)):
            if case.scenario in CROWDED and {"laps-sd", of} <= set(policies):
                one = ratio(by, case, "laps-sd", of)
                add(
                    case,
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
            one = ratio(by, case, policy, "fcfs")
            other = ratio(by, case, policy, "fcfs", simulated=True)
            off = one.middle / other.middle - 1 if one is not None and other is not None else math.inf
            shown = (
                f"{one.middle:.3f}, simulated {other.middle:.3f}: {off:+.1%}"
                if one is not None and other is not None
                else ""
            )
            add(
                case,
                f"{policy} / fcfs as simulated",
                one,
                shown,
                f"within {GOAL_SIMULATED:.0%}",
                abs(off) <= GOAL_SIMULATED,
            )
    return found


def _shown(found: Interval | None) -> str:
    if found is None or math.isfinite(found.high):
        return str(found)
    return f"{found.middle:.3f}, and one pair has no interval"
