"""How long does a long prompt delay requests that decode, and they it? `laps-sd bench prefill`

A random target of a small model's shape (135 M weights, bfloat16), one thread, no draft tokens, CPU time of the process. Eight
requests decode; then a long prompt arrives, and rounds run until it has its first token. All ways use the
same engine and weights, and take turns:

    by tokens     a round computes 512 context tokens, however long that takes
    N s           in addition, a round takes at most N seconds, or 3 times the round without context if that is longer

*Gap* is the longest round, since every decoding request gets a token in each: in milliseconds, and in rounds
without context. *First token* is that of the long prompt, and relative to *by tokens*.

Goals: at the worker's default the longest gap is at most 4 rounds without context; at twice the default the first token
takes at most 1.3 times as long as by tokens alone. Both at once are out of reach: of 4 rounds' time one is decoding, so that
context gets three quarters at most.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from bench._shapes import Shape, random_model
from bench.report import about, command_line, finish, progress, table

SHAPE = Shape(layers=30, hidden=576, heads=9, kv_heads=3, head_size=64, inner=1536, vocab=49152)
"""SmolLM-135M's."""
TOKENS = 4000
"""Of the long prompt."""
BATCH, CONTEXT = 8, 256
"""Requests that decode, and tokens of their prompts."""
CHUNK = 512
"""Context tokens of a round, at most."""
PLAIN_ROUNDS = 24
"""Rounds without context on either side of the prompts, from which the time of such a round is known."""
GOAL_GAP = 4.0
GOAL_FIRST = 1.3


def arguments() -> argparse.Namespace:
    parser = command_line("prefill", __doc__)
    parser.add_argument(
        "--max-round-s",
        type=lambda text: [float(part) for part in text.split(",")],
        help="limits to measure (default: 0, the worker's, and its double)",
    )
    parser.add_argument("--turns", type=int, default=3, help="turns of every way (default 3)")
    return parser.parse_args()


def default_limit_s() -> float:
    """Return the worker's default of LAPS_SD_MAX_ROUND_S."""
    from worker_svc.settings import WorkerSettings

    limit_s = next(one.default for one in dataclasses.fields(WorkerSettings) if one.name == "max_round_s")
    assert isinstance(limit_s, float)
    return limit_s


class Bench:
    """The engine, and the requests that decode in it."""

    def __init__(self) -> None:
        import torch

        from worker_svc.engine.load import load_engine
        from worker_svc.engine.options import LoadOptions

        torch.set_num_threads(1)
        longest = TOKENS + 1024
        self._names: Iterator[int] = itertools.count()
        with tempfile.TemporaryDirectory() as folder:
            model = random_model(SHAPE, dtype=torch.bfloat16, device="cpu", seed=0, max_length=longest)
            model.save_pretrained(folder)
            self._engine = load_engine(
                folder,
                options=LoadOptions(
                    dtype="bfloat16",
                    slots=BATCH + 1,
                    blocks=(BATCH * (CONTEXT + 1024) + longest) // 16,
                    max_length=longest,
                    drafter="none",
                    prefill_chunk=CHUNK,
                    length_probe=False,
                ),
            )

    def run(self, limit_s: float | None, draw: random.Random) -> dict[str, float]:
        """Return the measurements of one way; `limit_s` None: by tokens."""
        engine = self._engine
        engine.rounds.planner.max_round_s = None
        decoding = [self._add(CONTEXT, 1000, draw) for _ in range(BATCH)]
        while not all(report.tokens for report in engine.round(decoding).requests):
            pass
        engine.rounds.planner.max_round_s = limit_s
        plain = [self._seconds(decoding) for _ in range(PLAIN_ROUNDS)]
        prompt = self._add(TOKENS, 2, draw)
        rounds: list[float] = []
        while True:
            began = time.process_time()
            *others, own = engine.round([*decoding, prompt]).requests
            rounds.append(time.process_time() - began)
            assert all(report.tokens for report in others)
            if own.tokens:
                break
        engine.drop(prompt)
        plain += [self._seconds(decoding) for _ in range(PLAIN_ROUNDS)]
        for name in decoding:
            engine.drop(name)
        plain_s = statistics.median(plain)
        return {
            "plain_s": plain_s,
            "gap_s": max(rounds),
            "gap_rounds": max(rounds) / plain_s,
            "mean_gap_s": statistics.fmean(rounds),
            "rounds": len(rounds),
            "first_s": sum(rounds),
        }

    def _add(self, tokens: int, output: int, draw: random.Random) -> str:
        from worker_svc.engine.interface import Sampling, Specification

        name = str(next(self._names))
        ids = tuple(draw.randrange(3, SHAPE.vocab) for _ in range(tokens))
        self._engine.add(Specification(name, ids, (), Sampling(0.8, seed=1), output, ignore_eos=True))
        return name

    def _seconds(self, names: list[str]) -> float:
        began = time.process_time()
        self._engine.round(names)
        return time.process_time() - began


def measure(options: argparse.Namespace, limits_s: list[float]) -> list[dict[str, Any]]:
    """Return a row for each way: medians of the turns, and ratios that are paired by turn."""
    bench, draw = Bench(), random.Random(0)
    ways: list[float | None] = [None, *limits_s]
    taken: dict[float | None, list[dict[str, float]]] = {way: [] for way in ways}
    for turn in range(options.turns):
        for way in draw.sample(ways, len(ways)):
            progress(f"turn {turn + 1} of {options.turns}, {named(way)}")
            taken[way].append(bench.run(way, random.Random(turn)))
    rows: list[dict[str, Any]] = []
    for way in ways:
        row: dict[str, Any] = {"max_round_s": way}
        row |= {name: statistics.median(one[name] for one in taken[way]) for name in taken[way][0]}
        row["of_by_tokens"] = statistics.median(
            one["first_s"] / other["first_s"] for one, other in zip(taken[way], taken[None], strict=True)
        )
        rows.append(row)
    return rows


def named(way: float | None) -> str:
    """Return the name of a way."""
    return "by tokens" if way is None else f"{way:g} s"


def main() -> int:
    options = arguments()
    default_s = default_limit_s()
    limits_s = options.max_round_s or [0.0, default_s, 2 * default_s]
    rows = measure(options, limits_s)
    table(
        f"{TOKENS} prompt tokens and {BATCH} requests that decode, CPU time (median of {options.turns})",
        [
            {
                "": named(row["max_round_s"]),
                "plain round ms": f"{1e3 * row['plain_s']:.1f}",
                "longest gap ms": f"{1e3 * row['gap_s']:.1f}",
                "in plain rounds": f"{row['gap_rounds']:.2f}",
                "mean gap ms": f"{1e3 * row['mean_gap_s']:.1f}",
                "rounds": f"{row['rounds']:.0f}",
                "first token s": f"{row['first_s']:.2f}",
                "of by tokens": f"{row['of_by_tokens']:.2f}",
            }
            for row in rows
        ],
        width=140,
    )
    usual = next((row for row in rows if row["max_round_s"] == default_s), rows[1])
    longer = next((row for row in rows if row["max_round_s"] == 2 * default_s), rows[-1])
    return finish(
        rows,
        json_file=options.json,
        summary=f"at {named(usual['max_round_s'])}: longest gap {usual['gap_rounds']:.1f} plain rounds (goal {GOAL_GAP:g}), "
        f"first token {usual['of_by_tokens']:.2f} of that by tokens; at {named(longer['max_round_s'])}: "
        f"{longer['gap_rounds']:.1f} and {longer['of_by_tokens']:.2f} (goal {GOAL_FIRST:g})",
        met=usual["gap_rounds"] <= GOAL_GAP and longer["of_by_tokens"] <= GOAL_FIRST,
        about=about("prefill"),
    )


if __name__ == "__main__":
    sys.exit(main())
