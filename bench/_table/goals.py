"""Goals of the table, each judged by the lower end of an interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench._engine.goals import Goal
from bench._table.plan import BY_THREADS, NAMES, PREFILL, QUANTIZED, threads_in_words
from bench.report import as_text

BY_TWO_THREADS = {"demo": 1.3, "qwen2.5-0.5b": 1.6}
THREADS_BATCHES = ("batch 1", "batch 16")
DECODE, PREFILLED = 1.0, 0.9
"""Of OpenVINO and vLLM in bfloat16."""
WITH_QUANTIZED = 0.95
"""Of OpenVINO with weights of the same size, at these batch sizes."""


def goals(rows: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Return all goals that these rows can judge."""
    found = []
    for row in rows:
        least = _least(row)
        if least is None or row["ratio"] is None:
            continue
        of = "one thread" if row["comparison"] == BY_THREADS else f"{NAMES[row['engine']]} {row['precision']}"
        text = (
            f"{row['model']}, {threads_in_words(row['threads'])}, {row['task']}: {as_text(row, 'ratio', 2)} of {of} "
            f"(goal {least})"
        )
        found.append(Goal(text, row["ratio_low"] >= least, chief=False))
    return found


def _least(row: Mapping[str, Any]) -> float | None:
    if row["comparison"] == BY_THREADS:
        judged = row["threads"] == 2 and row["task"] in THREADS_BATCHES
        return BY_TWO_THREADS.get(row["model"]) if judged else None
    if row["threads"] > 2:
        return None
    if row["comparison"] == "bfloat16" and row["engine"] in ("openvino", "vllm"):
        return PREFILLED if row["task"] == PREFILL else DECODE
    if row["comparison"] in QUANTIZED and row["engine"] == "openvino" and row["task"] in THREADS_BATCHES:
        return WITH_QUANTIZED
    return None
