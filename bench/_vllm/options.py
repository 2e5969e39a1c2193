"""The command line of `laps-sd bench vllm`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from bench._shapes import PAIRS
from bench.report import command_line

PARTS = ("steps", "speed", "cost", "worker", "clock")
BY_NAME = ("shape", "computed")
"""Parts that run only if they are named: one needs a GPU to be of use, and the other one measures nothing."""
STEP_TIMES_MS = (6.7, 0.015, 8.5, 0.03)
"""Of `computed`: a step without prompts, more for each request of it; a step with one, more for each token of it. The
first two fit an 8B shape on an H100; the others are estimates for vLLM's default compilation."""


def arguments(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Return the options of the command. Exit with a message if one is wrong."""
    parser = command_line("vllm", description)
    parser.add_argument("--vllm", metavar="PYTHON", required=True, help="an interpreter that has vllm")
    parser.add_argument(
        "--parts",
        default=",".join(PARTS),
        help=f"(default {','.join(PARTS)}); by name only: {', '.join(BY_NAME)}",
    )
    parser.add_argument("--seeds", type=int, default=6, help="seeds in steps (default 6)")
    parser.add_argument("--turns", type=int, default=5, help="turns of speed, cost and worker (default 5)")
    parser.add_argument("--clock-seeds", type=int, default=4, help="seeds on the clock (default 4)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="of weights (default: float32 on a CPU, bfloat16 elsewhere)",
    )
    parser.add_argument("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    parser.add_argument("--shape", default="8b", choices=sorted(PAIRS), help="of the model (default 8b)")
    parser.add_argument("--shape-slots", type=int, default=32, help="requests of a step (default 32)")
    parser.add_argument(
        "--shape-residents", type=int, default=128, help="requests with KV at most (default 128)"
    )
    parser.add_argument("--shape-count", type=int, default=400, help="requests of a run (default 400)")
    parser.add_argument(
        "--shape-load",
        type=float,
        default=1.2,
        help="of shape's other arrivals; below 1 hardly any request waits in a large step (default 1.2)",
    )
    parser.add_argument("--shape-seeds", type=int, default=3, help="seeds of shape (default 3)")
    parser.add_argument(
        "--shape-async",
        default="both",
        choices=("on", "off", "both"),
        help="vLLM's async scheduling (default: both, where it has that)",
    )
    parser.add_argument(
        "--shape-quick-start",
        action="store_true",
        help="shape without torch.compile, and with CUDA graphs for steps without prompts only: it starts within a minute,"
        " and a step with a part of a prompt is two to three times slower (default: as vLLM compiles by itself)",
    )
    parser.add_argument(
        "--step-times",
        type=milliseconds,
        default=STEP_TIMES_MS,
        metavar="A,B,C,D",
        help="of computed, ms: A + B for each request without prompts, C + D for each token with them (default"
        f" {','.join(f'{time:g}' for time in STEP_TIMES_MS)})",
    )
    parser.add_argument(
        "--shape-seconds", type=float, default=float("inf"), metavar="S",
        help="begin no run of shape later than this after the start (default: no limit)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=Path, metavar="FILE",
        help="answers with their lengths for shape, lines of {source, model, prompt, output_tokens} (default: drawn)",
    )  # fmt: skip
    parser.add_argument(
        "--compiled", type=Path, metavar="DIR",
        help="a copy of this checkout with a compiled core (COMPILE_CORE=1 python setup.py build_ext --inplace)",
    )  # fmt: skip
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep the logs of engines here (default: they are deleted)"
    )
    options = parser.parse_args(argv)
    options.parts = options.parts.split(",")
    if Path(options.vllm).parent.name:  # a path, and not a name to be looked up
        options.vllm = str(Path(options.vllm).absolute())
    if unknown := set(options.parts) - {*PARTS, *BY_NAME}:
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}")
    if min(options.seeds, options.turns, options.clock_seeds) < 2:
        parser.error("--seeds, --turns and --clock-seeds must be 2 at least: one run has no interval")
    if min(options.shape_slots, options.shape_count, options.shape_seeds) < 1:
        parser.error("--shape-slots, --shape-count and --shape-seeds must be 1 at least")
    if options.shape_residents < options.shape_slots:
        parser.error("--shape-residents must be --shape-slots at least")
    if not 0 < options.shape_load < math.inf:
        parser.error("--shape-load must be above 0")
    return options


def milliseconds(text: str) -> tuple[float, ...]:
    """Return the four times of `--step-times`. Raises argparse.ArgumentTypeError."""
    try:
        times = tuple(float(part) for part in text.split(","))
    except ValueError:
        times = ()
    if len(times) != len(STEP_TIMES_MS) or not all(0 <= time < math.inf for time in times) or not times[0]:
        raise argparse.ArgumentTypeError(f"must be four times in ms, the first above 0, got {text!r}")
    return times
