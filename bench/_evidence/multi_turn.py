"""Section of docs/evidence/placement.md on conversations on the real stack, from `laps-sd bench serve --regime multi-turn`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from bench._evidence.placement import ROUTED
from bench._evidence.results import read_rows
from bench._markdown import table
from bench._serve.multi_turn import (
    CONVERSATIONS,
    INSTRUCTION_TOKENS,
    INSTRUCTIONS,
    PLACEMENTS,
    TURNS,
    WORKERS,
)


def conversing(path: Path) -> Iterator[str]:
    """Yield the section on placements of conversations, with the simulator's figures for the same requests."""
    rows, source, _ = read_rows(path)
    runs = [row for row in rows if not row.get("verdict")]
    goals = [row for row in rows if row.get("verdict")]
    seeds = len({row["seed"] for row in runs})
    yield f"Gateway, scheduler, record and {WORKERS} workers with the demo pair, each a process. {CONVERSATIONS} conversations of {TURNS} turns, each with one of {INSTRUCTIONS} sets of"
    yield f"instructions of {INSTRUCTION_TOKENS} tokens; a turn is sent some seconds after the answer before it, and has the whole conversation in its prompt. {seeds} seeds, each with both"
    yield f"placements. {source}. In brackets: the simulator's figures for the same requests, lengths and rounds."
    yield from table(
        ("placement", "first token s", "mean s", "hits"),
        (
            (
                ROUTED[placement],
                *(
                    f"{statistics.fmean(row[name] for row in own):{form}} [{statistics.fmean(row['simulated'][name] for row in own):{form}}]"
                    for name, form in (("first_token_s", ".2f"), ("mean_s", ".2f"), ("hit_share", ".1%"))
                ),
            )
            for placement in PLACEMENTS
            if (own := [row for row in runs if row["placement"] == placement])
        ),
    )
    yield f"{sum(row['met'] for row in goals)} of {len(goals)} goals are met. *Ratio* is soonest done over least loaded, paired by seed:"
    yield from table(
        ("goal", "found", "ratio", "simulated", ""),
        (
            (
                row["goal"],
                f"{row['found']:.3f}",
                f"{row['low']:.3f} to {row['high']:.3f}",
                f"{row['simulated']:.3f}",
                "met" if row["met"] else "**missed**",
            )
            for row in goals
        ),
    )
    yield ""
