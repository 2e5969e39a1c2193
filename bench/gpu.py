"""What does a round cost on a GPU, and how much of that is unavoidable? `laps-sd bench gpu`

A random pair of the shape of real ones (8.0 B and 0.5 B weights in bfloat16), with draft tokens accepted by a
random draw. For each batch size and context length: every request is prefilled to that length, then rounds
are timed. A round is compared with the roofline: what its forwards must at least take if all weights and keys
and values cross the memory bus once per forward (bytes over bandwidth), or all products are done at the peak
rate (operations over operations per second), whichever is longer. Its share that is not the draft's and the
target's forwards is what the engine adds: choosing, bookkeeping, waiting for the host.

Forwards are timed by events on the device; what their kernels take, gaps between them left out, by the
profiler in a few more rounds. Then swapping, and transformers' `generate` with the same prompts, decoding
alone.

Goal: at batch 32 at most a tenth of a round is not draft or verify kernels. On the CPU (`--device cpu --shape
tiny`) it runs to test the driver.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench._gpu.options import ACCEPTANCE, TEMPERATURE, arguments, verdict
from bench._gpu.pair import Bench
from bench.report import about, finish, progress, table


@contextmanager
def one_thread(options: argparse.Namespace) -> Iterator[None]:
    """Use one thread on the CPU, as all benchmarks here do."""
    import torch

    before = torch.get_num_threads()
    if options.device == "cpu":
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measure(options: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Return a row for each batch size and context, and the device's name."""
    from worker_svc.engine.interface import OutOfBlocks, OutOfMemory

    with one_thread(options):
        bench = Bench(options)
        pairs = [(batch, context) for context in options.context for batch in options.batch]
        speeds: dict[tuple[int, int], float | None] = {}
        for batch, context in [] if options.no_peers else pairs:
            progress(f"transformers, batch {batch}, context {context}")
            speeds[batch, context] = bench.transformers(batch, context)
        bench.build_engine()
        swaps = {context: bench.swap(context) for context in options.context}
        rows = []
        for batch, context in pairs:
            needed = bench.blocks_for(batch, context)
            progress(f"engine, batch {batch}, context {context}")
            try:
                if needed > bench.blocks:
                    raise OutOfMemory(
                        f"keys and values need {needed} blocks, the device holds {bench.blocks}"
                    )
                row = bench.rounds(batch, context)
            except (OutOfMemory, OutOfBlocks) as error:
                rows.append({"batch": batch, "context": context, "skipped": str(error)})
                continue
            theirs = speeds.get((batch, context))
            row |= swaps[context] | {
                "transformers_tokens_per_s": theirs,
                "ratio_transformers": None if theirs is None else row["tokens_per_s"] / theirs,
            }
            rows.append(row)
        return rows, bench.name


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv, __doc__)
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("There is no GPU here; --device cpu --shape tiny tests the driver.")
    rows, name = measure(options)
    shown = (
        ("round ms", "round_ms"), ("draft", "draft_ms"), ("verify", "verify_ms"), ("kernels", "kernels_ms"), ("other", "other_share"),
        ("roofline ms", "roofline_ms"), ("× roofline", "of_roofline"), ("γ", "draft_len"), ("tokens/round", "tokens_per_round"),
        ("tokens/s", "tokens_per_s"), ("× transformers", "ratio_transformers"), ("prefill tokens/s", "prefill_tokens_per_s"),
        ("swap out GB/s", "swap_out_gb_s"), ("in", "swap_in_gb_s"),
    )  # fmt: skip
    table(
        f"rounds of the {options.shape} pair in {options.dtype} on {name}",
        [
            {
                "batch": row["batch"],
                "context": row["context"],
                **{label: "" if row.get(key) is None else f"{row[key]:.3g}" for label, key in shown},
            }
            for row in rows
        ],
        width=200,
    )
    for row in rows:
        if row["skipped"] is not None:
            print(f"batch {row['batch']}, context {row['context']} was left out: {row['skipped']}")
    met, summary = verdict(rows)
    described = {
        **about("gpu", argv),
        "device": name,
        "shape": options.shape,
        "dtype": options.dtype,
        "acceptance": ACCEPTANCE,
        "draft_len": "auto" if options.draft_len is None else options.draft_len,
        "temperature": TEMPERATURE,
        "rounds": options.rounds,
        "torch": torch.__version__,
    }
    return finish(rows, json_file=options.json, summary=summary, met=met, about=described)


if __name__ == "__main__":
    sys.exit(main())
