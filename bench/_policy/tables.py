"""Output of `laps-sd bench policy`: one table of each regime, and the expectations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.report import as_text, table

WIDTH = 190
"""Characters of the widest table."""


def show(name: str, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of one regime."""
    shown = [
        {
            "policy": row["policy"],
            "mean s": row["mean_s"],
            "/ fcfs": as_text(row, "ratio_fcfs"),
            "/ oracle": as_text(row, "ratio_oracle"),
            "/ srpt-length": as_text(row, "ratio_srpt_length"),
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
    table(f"{name}: {title}", shown, width=WIDTH)
    print()


def expected_text(verdict: Mapping[str, Any]) -> str:
    """Return the subject of a verdict as text: the figure, its divisor, the bounds."""
    bounds = [f"≥ {verdict['at_least']:g}"] if verdict["at_least"] else []
    bounds += [f"≤ {verdict['at_most']:.2f}"] if verdict["at_most"] is not None else []
    what = f"{verdict['figure']} / {verdict['of']}" if verdict["of"] else verdict["figure"]
    return f"{what} {', '.join(bounds)}"


def show_verdicts(verdicts: Sequence[dict[str, Any]]) -> None:
    """Print the expectations, each with its result."""
    shown = [
        {
            "regime": verdict["regime"],
            "expected": f"{verdict['policy']} {expected_text(verdict)}",
            "found": as_text(verdict, "found"),
            "": "met" if verdict["met"] else "MISSED",
        }
        for verdict in verdicts
    ]
    table("Expectations (mean over seeds of the paired ratio, 95 % interval)", shown, width=WIDTH)
