"""What does the prefix cache gain, and what does it cost to read KV in place? `laps-sd bench prefix`

The target of the demo pair alone, one thread, single precision, CPU time of the process. Prompts begin with
the same `tokens` and differ in their last token. Two engines take turns:

    computed   nothing is reused
    shared     all read the same blocks

*First* is the round that gives a request its first token, alone. *Round* is one decoding round of `--batch`
requests with the same start.

Goal: with the least start that a worker reuses by default, a first token takes at most half as long as
without, and sharing costs no round anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from typing import TYPE_CHECKING

from bench.report import about, command_line, finish, progress, table
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.engine.options import LoadOptions
from worker_svc.settings import WorkerSettings

if TYPE_CHECKING:
    from worker_svc.engine.engine import SpeculativeEngine

WAYS = ("computed", "shared")
GOAL_FIRST = 0.5
GOAL_ROUND = 1.1  # of the rounds without reuse: no difference, apart from the accuracy of the measurement


def arguments() -> argparse.Namespace:
    parser = command_line("prefix", __doc__)
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(part) for part in text.split(",")],
        help="lengths of the known start (default: the worker's LAPS_SD_PREFIX_REUSE_TOKENS, 256, 1024, 1920)",
    )
    parser.add_argument("--batch", type=int, default=8, help="requests with the same start (default 8)")
    parser.add_argument("--rounds", type=int, default=16, help="decoding rounds of each turn (default 16)")
    parser.add_argument("--turns", type=int, default=7, help="turns of every way (default 7)")
    return parser.parse_args()


def engine_of(way: str, options: argparse.Namespace, longest: int) -> SpeculativeEngine:
    """Return an engine of the target alone, with blocks for two batches of starts of `longest` tokens."""
    from worker_svc.engine.load import load_engine
    from worker_svc.loading import DEMO

    return load_engine(
        DEMO / "target",
        options=LoadOptions(
            slots=options.batch,
            blocks=4 * options.batch * -(-(longest + 64) // 16),
            max_length=2048,
            drafter="none",
            prefill_chunk=4096,
            prefix_reuse_tokens=0 if way == "computed" else 16,
        ),
    )


def take_turn(
    way: str, engine: SpeculativeEngine, start: list[int], options: argparse.Namespace
) -> tuple[float, float]:
    """Run requests with this start. Return the CPU ms of a first token and of a decoding round."""
    names = [str(number) for number in range(options.batch)]
    for number in range(-1, options.batch):
        engine.add(
            Specification(
                str(number), (*start, 3 + number % 1000), (), Sampling(0.8, seed=number + 1), 100,
                ignore_eos=True,
            )
        )  # fmt: skip
    engine.round(["-1"])  # this request makes the start known
    began = time.process_time()
    (report,) = engine.round(names[:1]).requests
    first_ms = 1e3 * (time.process_time() - began)
    assert (report.cached > 0) == (way != "computed")
    while not all(report.tokens for report in engine.round(names).requests):
        pass
    began = time.process_time()
    for _ in range(options.rounds):
        engine.round(names)
    round_ms = 1e3 * (time.process_time() - began) / options.rounds
    for name in engine.known():
        engine.drop(name)
    return first_ms, round_ms


def measure(
    engines: dict[str, SpeculativeEngine], tokens: int, draw: random.Random, options: argparse.Namespace
) -> dict[str, float]:
    """Return the row of a start of this many tokens."""
    first_ms: dict[str, list[float]] = {way: [] for way in WAYS}
    round_ms: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(options.turns):
        start = [draw.randrange(3, 1024) for _ in range(tokens)]
        for way in draw.sample(WAYS, len(WAYS)):
            first, each = take_turn(way, engines[way], start, options)
            first_ms[way].append(first)
            round_ms[way].append(each)
        progress(f"{tokens} tokens, turn {turn + 1} of {options.turns}")
    return {
        "tokens": tokens,
        **{f"first_{way}_ms": statistics.median(first_ms[way]) for way in WAYS},
        **{f"round_{way}_ms": statistics.median(round_ms[way]) for way in WAYS},
    }


def main() -> int:
    options = arguments()
    import torch

    torch.set_num_threads(1)
    least = next(
        one.default for one in dataclasses.fields(WorkerSettings) if one.name == "prefix_reuse_tokens"
    )
    longest = max(options.tokens or [1920])
    engines = {way: engine_of(way, options, longest) for way in WAYS}
    draw = random.Random(0)
    rows = [measure(engines, tokens, draw, options) for tokens in options.tokens or [least, 256, 1024, 1920]]
    table(
        f"a known start, {options.batch} requests, CPU ms (median of {options.turns})",
        [{name.removesuffix("_ms").replace("_", ", "): value for name, value in row.items()} for row in rows],
    )
    first = rows[0]["first_shared_ms"] / rows[0]["first_computed_ms"]
    worst = max(row["round_shared_ms"] / row["round_computed_ms"] for row in rows)
    return finish(
        rows,
        json_file=options.json,
        summary=f"first token {first:.2f} of computing {rows[0]['tokens']} tokens (goal {GOAL_FIRST}); "
        f"rounds after that at worst {worst:.2f} of those without reuse (goal {GOAL_ROUND})",
        met=first <= GOAL_FIRST and worst <= GOAL_ROUND,
        about={**about("prefix"), "torch": torch.__version__},
    )


if __name__ == "__main__":
    sys.exit(main())
