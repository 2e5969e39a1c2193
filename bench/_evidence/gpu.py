"""Section of docs/evidence/engine.md from `laps-sd bench gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench._evidence.results import read_rows
from bench._gpu.options import verdict
from bench._markdown import table

PINNED_SINCE = "2026-11-27"
"""Date of the first results in which copies in host memory are pinned."""


def on_gpu(path: Path) -> Iterator[str]:
    """Yield the section on rounds of our own engine on a GPU."""
    rows, source, about = read_rows(path)
    measured = [row for row in rows if row["skipped"] is None]
    met, found = verdict(rows)
    yield f"{about['device']}, a pair of random weights of the shape `{about['shape']}` in {about['dtype']}, torch {about['torch']}. {source}."
    if beside := about.get("beside"):
        yield f"**It ran beside {beside}**: times are upper bounds."
    yield "The engine runs there, and is not built for it: each layer is a dozen operators of torch, keys and values are gathered before each attention, and no"
    yield "CUDA graph saves the launches. **On GPUs use [workers over vLLM](../how-to/vllm-workers.md).** *Roofline* is what the forwards of a round must take at"
    yield "least: their bytes over the bandwidth of the memory, or their operations over the peak rate. *Kernels* is what the forwards keep the GPU busy; the"
    yield "rest of a round it waits. The draft length is chosen by goodput: 0 where a draft's forward takes as long as the target's, since both wait for launches."
    yield "*Transformers* is its `generate`, without a draft."
    if about["date"] < PINNED_SINCE:
        yield "Swapping uses pinned memory since then: such copies ran at 48 GB/s there and back on an H100, in a program of their own; the engine's have not run there."
    yield from table(
        ("batch", "context", "round ms", "kernels ms", "roofline ms", "× roofline", "draft length", "tokens/s", "/ transformers", "prefill tokens/s", "swap out, in GB/s"),
        (
            (
                f"{row['batch']}",
                f"{row['context']:,}",
                f"{row['round_ms']:.1f}",
                f"{row['kernels_ms']:.1f}",
                _or_dash(row["roofline_ms"], ".1f"),
                _or_dash(row["of_roofline"], ".1f"),
                f"{row['draft_len']:.1f}",
                f"{row['tokens_per_s']:,.0f}",
                _or_dash(row["ratio_transformers"], ".2f"),
                f"{row['prefill_tokens_per_s']:,.0f}",
                f"{row['swap_out_gb_s']:.1f}, {row['swap_in_gb_s']:.1f}",
            )
            for row in measured
        ),
    )  # fmt: skip
    yield from (
        "",
        f"The goal that at batch 32 at most a tenth of a round is not a forward's kernels is {'met' if met else '**missed**'}: {found}.",
        "",
    )


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
