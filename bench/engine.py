"""How fast is the worker's engine, compared with transformers, other engines, and itself without speculation?
`laps-sd bench engine`

One pair of models, one precision, one thread each. The workload consists of cells: prompts of all kinds in
equal parts, or of one kind alone, one of them prompts unlike those that the demo pair was trained on
(`held-out`); temperature 0 or 0.8; a number of requests at a time; each until the end token or `--tokens`.
Cells take turns, and so do the engines within a cell, peers each time in another order; ours with and without
speculation come last, in alternating slices for some seconds. CPU time is measured, so
a busy machine slows all of them alike. A speed is tokens per CPU second; ratios are paired by turn, and a
goal is met by the lower end of the interval.

Peers: transformers' `generate` one by one; its assisted generation, with a constant draft length of 4 and as
it comes; its left-padded batch of 16; its continuous batching (`generate_batch`) of 16 requests. With `--vllm
PYTHON` and `--openvino PYTHON`, interpreters that have them: vLLM eager and compiled, OpenVINO GenAI, both
without speculation and with a draft of 4, on the whole mix at temperature 0.

`--shape memory-bound` is a random pair of 287 M and 15 M weights in bfloat16, `--shape qwen2.5-0.5b` one of
494 M and 20 M; proposals are accepted by a random draw (`--acceptance`).

`--table` compares engines without speculation by precision of the weights and number of threads instead: ours,
OpenVINO, vLLM and llama.cpp, for the demo's target and the shape of Qwen2.5-0.5B.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench._engine.cells import MAX_LENGTH, SEED, cells_for
from bench._engine.configs import other_engines, ours, transformers_modes
from bench._engine.goals import goals, verdict
from bench._engine.heading import facts_of, heading
from bench._engine.measure import measure
from bench._engine.options import arguments
from bench._engine.rows import rows_of
from bench._engine.tables import tables
from bench._table.run import run as run_table
from bench.report import about, finish
from laps_sd.service.model_dir import end_ids


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv, __doc__)
    if options.table:
        return run_table(options, argv)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch
    from transformers.utils import logging as transformers_logging

    from worker_svc.loading import DEMO

    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="laps-sd-engine-") as name, ExitStack() as stack:
        folder = Path(name)
        if options.shape:
            from bench._shapes import write_pair

            options.target, options.draft = write_pair(
                options.shape, folder, dtype=options.dtype, seed=SEED, max_length=MAX_LENGTH
            )
        elif options.target is None:
            options.target, options.draft = DEMO / "target", DEMO / "draft"
        options.ends = end_ids(options.target)
        cells = cells_for(options)
        facts = facts_of(options, cells)
        print(heading(facts, options))
        others, versions = other_engines(options, cells, folder, stack)
        configs = [*ours(options), *([] if options.no_peers else transformers_modes(options)), *others]
        described = {
            **about("engine", argv),
            "pair": options.shape or ("demo" if options.target == DEMO / "target" else "own"),
            "acceptance": options.acceptance,
            "threads": options.threads,
            **facts,
            "dtype": options.dtype,
            "tokens": options.tokens,
            "turns": options.turns,
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
            **versions,
        }
        measure(configs, cells, options.turns)
    rows = rows_of(configs, options)
    tables(rows, options)
    memory_bound = options.shape is not None
    exact = options.dtype == "float32" and options.acceptance is None
    judged = goals(rows, memory_bound=memory_bound, exact=exact)
    for goal in judged:
        if not goal.met and not goal.chief:
            print(f"missed: {goal.text}")
    met, summary = verdict(judged)
    return finish(rows, json_file=options.json, summary=summary, met=met, about=described)


if __name__ == "__main__":
    sys.exit(main())
