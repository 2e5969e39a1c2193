"""The tables of the benchmark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from bench._serve.results import DRIFT, Measured
from bench.report import as_text, table

WIDTH = 170


def show(
    rows: Sequence[dict[str, Any]],
    lengths: Sequence[dict[str, Any]],
    found: Sequence[dict[str, Any]],
    runs: Sequence[Measured],
) -> None:
    """Print the tables, and notes on what disturbed the runs."""
    for scenario in dict.fromkeys(row["config"] for row in rows):
        table(
            f"{scenario} (work: machine seconds of the worker over those that the calibration foretold)",
            [_order(row) for row in rows if row["config"] == scenario],
            width=WIDTH,
        )
    if lengths:
        _show_lengths(lengths)
    if found:
        keys = ("config", "hints", "goal", "asked", "found")
        table(
            "Goals",
            [{**{key: one[key] for key in keys}, "": "met" if one["met"] else "MISSED"} for one in found],
            width=WIDTH,
        )
    for note in _notes(runs):
        print(f"Note: {note}")


def _order(row: dict[str, Any]) -> dict[str, Any]:
    """Return the line of one policy with one kind of hints."""
    return {
        "hints": row["hints"],
        "policy": row["policy"],
        "mean s": row.get("mean_s", ""),
        "/ fcfs": as_text(row, "ratio_fcfs"),
        "simulated": row.get("simulated_ratio_fcfs", ""),
        "/ srpt-length": as_text(row, "ratio_srpt_length"),
        "simulated ": row.get("simulated_ratio_srpt_length", ""),
        "p99 s": row.get("p99_s", ""),
        "first token s": row.get("first_token_s", ""),
        "slowdown": row.get("mean_slowdown", ""),
        "preempted": row.get("preemptions", ""),
        "work": row.get("busy_ratio", ""),
        "utilised": row.get("utilisation", ""),
        "runs": f"{row['runs']}" + (f", {row['failed_runs']} failed" if row["failed_runs"] else ""),
    }


def _show_lengths(lengths: Sequence[dict[str, Any]]) -> None:
    table(
        f"Estimates of the lengths before the first run ends (ln(length) has a spread of {lengths[0]['spread']:.2f}, "
        f"kinds of prompts explain {lengths[0]['explained_by_kinds']:.0%} of its variance)",
        [
            {
                "hints": row["hints"],
                "requests": row["requests"],
                "tau": row["tau"],
                "rms": row["rms"],
                "cover": row["cover"],
                "explained": f"{row['explained']:.0%}",
                "prompts of the warm-up": f"{row['seen']:.0%}",
            }
            for row in lengths
        ],
        width=WIDTH,
    )


def _notes(runs: Sequence[Measured]) -> Iterator[str]:
    """Yield what disturbed the runs."""
    drifted = [run for run in runs if abs(run.busy_ratio - 1) > DRIFT]
    if drifted:
        worst = max(drifted, key=lambda run: abs(math.log(run.busy_ratio)))
        yield (
            f"in {len(drifted)} of {len(runs)} runs the worker was more than {DRIFT:.0%} off its calibrated speed "
            f"(at worst {worst.busy_ratio:.2f} times the work): loads were not what they are called."
        )
    late_s = max(run.late_s for run in runs)
    if late_s > 0.1:
        yield f"the generator sent a request {late_s:.2f} s late; latencies count from the scheduled time all the same."
