"""Goals of the benchmark, and which of them rows meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench._vllm.decisions import COMPILED, least
from bench._vllm.figures import BURSTS, compared, ratio
from bench._vllm.modes import FCFS, GUESS, LEARNT, NO_HINT, OURS
from bench._vllm.workers import PLAIN, SAMPLING
from bench.report import as_text

GOAL_NO_HINT = 0.70
GOAL_NO_HINT_LEARNT = 0.60
GOAL_GUESS = 0.50
GOAL_PRIORITY = 1.02
GOAL_PRIORITY_P99 = 1.10
GOAL_SPEED = 0.98
GOAL_DECISION_MS = 0.3
GOAL_WORKER = 0.97


@dataclass(frozen=True)
class Goal:
    """Result for one goal."""

    text: str
    met: bool


def goals(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Return all goals that these rows can judge, each by the unfavourable end of its interval."""
    found = []
    for row in compared([row for row in rows if row["measured"] != "shape"]):
        at = f"{row['compared']}, {row['setting']}"
        bounds: list[tuple[str, str, float]] = []
        if row["setting"] == BURSTS:
            bounds += [("ratio_fcfs", "mean / vLLM's FCFS", limit) for limit in _most(row["mode"])]
        if row["mode"] == GUESS and (row["setting"] == BURSTS or not row["setting"].startswith("burst")):
            bounds.append(("ratio_priority", "mean / vLLM's priority", GOAL_PRIORITY))
            bounds.append(("p99_ratio_priority", "p99 / vLLM's priority", GOAL_PRIORITY_P99))
        for key, words, limit in bounds:
            if row[key] is not None:
                text = f"{at}: {row['mode']}, {words} {as_text(row, key)} (goal: at most {limit:.2f})"
                found.append(Goal(text, row[f"{key}_high"] <= limit))
    speeds = [row for row in rows if row["measured"] == "speed"]
    for mode in OURS:
        for figure, how in (("full_speed", "measured"), ("full_speed_by_parts", "by parts")):
            told_speed = ratio(speeds, mode.name, FCFS, figure)
            if told_speed is not None:
                text = f"tokens per CPU second while a full batch waits, {how}, {mode.name} / FCFS: {told_speed} (goal: at least {GOAL_SPEED})"
                found.append(Goal(text, told_speed.low >= GOAL_SPEED))
        cost_ms = least(rows, mode.name, COMPILED, "decision_ms")
        if cost_ms is not None:
            text = f"core and choose of a step, {mode.name}, compiled: {cost_ms:.2f} ms (goal: at most {GOAL_DECISION_MS})"
            found.append(Goal(text, cost_ms <= GOAL_DECISION_MS))
    of_workers = [row for row in rows if row["measured"] == "worker"]
    for mode_name in SAMPLING:
        told_speed = ratio(of_workers, mode_name, PLAIN, "worker_speed")
        if told_speed is not None:
            text = f"tokens per CPU second, {mode_name} / vLLM alone: {told_speed} (goal: at least {GOAL_WORKER})"
            found.append(Goal(text, told_speed.low >= GOAL_WORKER))
    return found


def _most(mode: str) -> list[float]:
    limits = {NO_HINT: GOAL_NO_HINT, NO_HINT + LEARNT: GOAL_NO_HINT_LEARNT, GUESS: GOAL_GUESS}
    return [limits[mode]] if mode in limits else []


def verdict(found: Sequence[Goal]) -> tuple[bool, str]:
    """Return whether all goals are met, and the sentence for the summary line."""
    missed = [goal.text for goal in found if not goal.met]
    met = f"{len(found) - len(missed)} of {len(found)} goals are met"
    return bool(found) and not missed, met + (f"; missed: {'; '.join(missed)}" if missed else "")
