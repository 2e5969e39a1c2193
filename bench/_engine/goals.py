"""Goals of the benchmark, and which of them rows meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench._engine.cells import BOTH, MIXED
from bench._engine.configs import SPECULATIVE
from bench._engine.held_out import HELD_OUT
from bench.report import as_text

GOAL_ASSISTED = 2.2
GOAL_PLAIN_AT_ONE = 1.3
GOAL_PLAIN = 0.97
GOAL_HELD_OUT = 0.98
GOAL_BATCH = 1.7
GOAL_VLLM = {1: 1.4, 4: 1.25, 16: 1.0, 64: 0.9}
GOAL_FORWARD = 1.1
FORWARD_BATCHES = (1, 4, 16)


@dataclass(frozen=True)
class Goal:
    """Result of a row for one goal."""

    text: str
    met: bool
    chief: bool  # of the whole mix; the others are reported only where they are missed


def goals(
    rows: Sequence[Mapping[str, Any]], *, memory_bound: bool = False, exact: bool = False
) -> list[Goal]:
    """Return all goals that these rows can judge. With `exact`, one of them is the same text with and without
    speculation.
    """
    found = []
    for row in rows:
        at = f"batch {row['batch']}"
        whole = row["kind"] == MIXED and row["temperature"] == BOTH
        if not whole:
            at = f"{row['kind']} at temperature {row['temperature']}, {at}"
        least: dict[str, float] = {}
        if row["config"] == SPECULATIVE:
            at_one = whole and row["batch"] == 1 and not memory_bound
            goal = GOAL_HELD_OUT if row["kind"] == HELD_OUT else GOAL_PLAIN
            least["ratio_plain"] = GOAL_PLAIN_AT_ONE if at_one else goal
            if not memory_bound:
                least |= {"ratio_assisted": GOAL_ASSISTED, "ratio_peer_batch": GOAL_BATCH} if whole else {}
                least |= {"ratio_vllm": GOAL_VLLM[row["batch"]]} if row["batch"] in GOAL_VLLM else {}
            if exact and row["identical"] is not None and row["temperature"] != BOTH:
                text = f"{at}: {row['identical']:.3f} of the texts are as without speculation"
                found.append(Goal(text, row["identical"] == 1, False))
        for name, goal in least.items():
            if row.get(name) is not None:
                text = f"{at}: {as_text(row, name, 2)} of {name[6:].replace('_', ' ')} (goal {goal})"
                found.append(Goal(text, row[f"{name}_low"] >= goal, whole or name == "ratio_vllm"))
        if memory_bound and row.get("forward") is not None and row["batch"] in FORWARD_BATCHES:
            text = f"{at}: a forward takes {as_text(row, 'forward', 2)} of vllm's (goal {GOAL_FORWARD})"
            found.append(Goal(text, row["forward_high"] <= GOAL_FORWARD, True))
    return found


def verdict(found: Sequence[Goal]) -> tuple[bool, str]:
    """Return whether all goals are met, and the sentence for the summary line."""
    others = [goal for goal in found if not goal.chief]
    texts = [goal.text + ("" if goal.met else " MISSED") for goal in found if goal.chief]
    if others:
        texts.append(f"{sum(goal.met for goal in others)} of {len(others)} others")
    return bool(found) and all(goal.met for goal in found), "; ".join(texts)
