"""The tables of the benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench._engine.cells import BOTH, MIXED
from bench._engine.configs import PLAIN, SPECULATIVE
from bench._engine.rows import RIVALS
from bench._table.plan import threads_in_words
from bench.report import as_text, table


def tables(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print one table of the whole mix, with all rivals, and one of each kind alone."""
    labels = [label for label in RIVALS if any(row[f"ratio_{label}"] is not None for row in rows)]
    table(
        f"engine, {options.dtype}, {threads_in_words(options.threads)}, tokens per CPU second",
        [
            {
                "config": row["config"],
                "batch": row["batch"],
                "temperature": str(row["temperature"]),
                "tokens/s": row["tokens_per_cpu_s"],
                "ms/round": "" if row["decode_ms"] is None else f"{row['decode_ms']:.3g}",
                "identical": "" if row["identical"] is None else f"{row['identical']:.3f}",
                **{label.replace("_", " "): as_text(row, f"ratio_{label}", 2) for label in labels},
                "draft": f"{row['draft_len']:.2f}" if "draft_len" in row else "",
                "accepted": f"{row['accepted_of_tested']:.2f}" if row.get("draft_len") else "",
            }
            for row in rows
            if row["kind"] == MIXED and (row["temperature"] in (BOTH, 0.0))
        ],
        width=160,
    )
    alone = [
        row
        for row in rows
        if row["kind"] != MIXED and row["config"].startswith("ours") and row["config"] != PLAIN
    ]
    if alone:
        batches = sorted({row["batch"] for row in alone})
        by_batch = {(row["config"], row["kind"], row["temperature"], row["batch"]): row for row in alone}
        table(
            "each kind alone, and all kinds with rising and falling numbers of requests: ratio to our own plain decoding",
            [
                {
                    "config": config,
                    "kind": kind,
                    "temperature": str(temperature),
                    **{
                        f"batch {batch}": as_text(
                            by_batch.get((config, kind, temperature, batch), {}), "ratio_plain", 2
                        )
                        for batch in batches
                    },
                }
                for config, kind, temperature in dict.fromkeys(
                    (row["config"], row["kind"], row["temperature"]) for row in alone
                )
                if temperature != BOTH
            ],
            width=160,
        )
    for row in rows:
        if row["config"] == SPECULATIVE and row["temperature"] == BOTH and "draft_len_top" in row:
            parts = [f"{row[name]:.2f} {words}" for name, words in (
                ("draft_len_rising", "with few requests"), ("draft_len_top", f"with {row['batch']}"),
                ("draft_len_falling", "with few again")) if name in row]  # fmt: skip
            print("draft length on the ramp: " + ", ".join(parts))
