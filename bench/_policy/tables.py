"""Output of `laps-sd bench policy`: one table of each regime, details of it, the expectations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.report import table, told

WIDTH = 190
"""Characters of the widest table."""


def show(name: str, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of one regime."""
    shown = [
        {
            "policy": row["policy"],
            "mean s": row["mean_s"],
            "/ fcfs": told(row, "ratio_fcfs"),
            "/ oracle": told(row, "ratio_oracle"),
            "/ srpt-length": told(row, "ratio_srpt_length"),
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


def show_details(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print levels, perceptibility and errors of the estimates, as far as a policy has them."""
    levels = [
        {
            "policy": row["policy"],
            "level": int(level),
            "of the time": f"{seconds / sum(row['level_s'].values()):.1%}",
            "requests": f"{row['level_requests'][level]:.0f}",
        }
        for row in rows
        for level, seconds in row["level_s"].items()
        if len(row["level_s"]) > 1
    ]
    if levels:
        table(f"{name}: levels (who ran in several counts in each)", levels, width=WIDTH)
    known = [
        {
            "policy": row["policy"],
            "at arrival": f"{row['perceptible_at_arrival_share']:.1%}",
            "ever": f"{row['perceptible_share']:.1%}",
            "rounds until then, mean": row["perceptible_after_rounds"],
            "p50": row["perceptible_after_rounds_p50"],
            "p90": row["perceptible_after_rounds_p90"],
        }
        for row in rows
        if row["perceptible_after_rounds"] is not None
    ]
    if known:
        table(f"{name}: perceptible (at arrival = after 0 rounds)", known, width=WIDTH)
    wrong = [
        {
            "policy": row["policy"],
            "said at": found["moment"],
            "length from": found["basis"],
            "requests": found["requests"],
            "actual / predicted": found["actual_s"] / found["predicted_s"],
            "p10": found["ratio_p10"],
            "p50": found["ratio_p50"],
            "p90": found["ratio_p90"],
            "rms of ln": found["log_rms"],
        }
        for row in rows
        if row["policy"] != "oracle"
        for found in row["estimates"]
    ]
    if wrong:
        title = f"{name}: remaining service, actual over predicted (sums of all, and by request)"
        table(title, wrong, width=WIDTH)
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
            "found": told(verdict, "found"),
            "": "met" if verdict["met"] else "MISSED",
        }
        for verdict in verdicts
    ]
    table("Expectations (mean over seeds of the paired ratio, 95 % interval)", shown, width=WIDTH)
