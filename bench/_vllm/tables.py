"""Tables of the benchmark, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench._vllm.figures import compared
from bench.report import as_text, table

ON_SHAPE = (
    "setting",
    "mean",
    "p99",
    "first_token",
    "tokens_per_s",
    "full_tokens_per_s",
    "pauses",
    "evictions",
)
IN_PARTS = (
    *(
        "decode_steps",
        "decode_step_ms",
        "decode_launch_ms",
        "mixed_steps",
        "mixed_step_ms",
        "mixed_launch_ms",
    ),
    *("scheduler_ms", "cpu_ms"),
)
"""Steps without a part of a prompt and with one, and CPU time of a step."""


def tables(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the ratios, and the costs."""
    found = compared(rows)
    if found:
        table(
            "Latencies (steps, or seconds on the clock) and ratios with 95 % intervals, paired by run",
            [
                {
                    "measured": row["compared"],
                    "setting": row["setting"],
                    "mode": row["mode"],
                    "mean": row["mean"],
                    "p99": row["p99"],
                    "mean / fcfs": as_text(row, "ratio_fcfs") or "–",
                    "p99 / fcfs": as_text(row, "p99_ratio_fcfs") or "–",
                    "mean / priority": as_text(row, "ratio_priority") or "–",
                    "p99 / priority": as_text(row, "p99_ratio_priority") or "–",
                }
                for row in found
            ],
            width=160,
        )
    for measured, keys in (
        *((part, (*ON_SHAPE, *IN_PARTS)) for part in ("shape", "computed")),
        ("speed", ("full_steps", "full_tokens", "full_cpu_s", "full_speed", "scheduler_share")),
        ("worker", ("tokens", "steps", "cpu_s", "worker_speed", "same_texts")),
        ("cost", ("core", "decision_ms", "choose_ms", "report_ms", "schedule_ms", "update_from_output_ms")),
    ):
        of_kind = [row for row in rows if row["measured"] == measured]
        if of_kind:
            shown = [{key: row.get(key) for key in ("seed", "mode", *keys)} for row in of_kind]
            table(measured, shown, width=160)
