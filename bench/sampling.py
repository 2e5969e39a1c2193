"""What do top-k, top-p and min-p cost? `laps-sd bench sampling`

One thread, CPU time of the process. The same requests decode at temperature 1 with each restriction and without
any, in turn, each turn in another order; a speed is tokens per CPU second, prefill left out, and a ratio is
paired by turn. On the demo pair with draft tokens and without, in single precision; on random weights of
Qwen2.5-0.5B's shape (vocabulary 151,936) in bfloat16 without. The logits of the random weights are spread by
3, as those of a trained model are about.

Goal: with top-p 0.95 and top-k 40, 0.97 of the speed without them, at every batch size.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench._shapes import PAIRS, random_model
from bench.report import Interval, about, finish, progress, ratio_interval, table

NONE = "none"
CHIEF = "top-p 0.95, top-k 40"
GOAL = 0.97
HALF_B = PAIRS["qwen2.5-0.5b"][0]
SPREAD = 3.0
MAX_LENGTH = 512
PROMPT_TOKENS = 16
WARM_UP_ROUNDS = 4


@dataclass(frozen=True)
class Way:
    """One engine, and what it runs."""

    name: str
    engine: Any
    slice: int
    """Rounds of a slice, as a multiple of those of the large shape."""
    draft_len: int | None
    """Number of draft tokens of every round; None: as many as pay."""
    prompts: Sequence[tuple[int, ...]]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="laps-sd bench sampling", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--shape", choices=("demo", "0.5b", "all"), default="all", help="models to measure (default all)"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="batch sizes (default 1 16)")
    parser.add_argument(
        "--rounds", type=int, default=8, help="rounds of a slice on the large shape; the demo pair has 8 times as many (default 8)"
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=5, help="turns of every restriction (default 5)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(argv)
    if options.turns < 2:
        parser.error("--turns must be 2 at least: one turn has no interval")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    import torch

    from worker_svc.engine.cpu import kernels
    from worker_svc.engine.interface import Sampling

    torch.set_num_threads(1)
    settings = {
        NONE: Sampling(1.0),
        CHIEF: Sampling(1.0, top_p=0.95, top_k=40),
        "top-k 40": Sampling(1.0, top_k=40),
        "top-p 0.95": Sampling(1.0, top_p=0.95),
        "min-p 0.05": Sampling(1.0, min_p=0.05),
    }
    rows = []
    with tempfile.TemporaryDirectory(prefix="laps-sd-sampling-") as folder:
        for way in _ways(options, Path(folder)):
            for batch in options.batch:
                rows += _measure(way, batch, options.rounds * way.slice, options.turns, settings)
    table(
        f"tokens per CPU second of one thread, {options.turns} turns",
        [
            {
                **{name: row[name] for name in ("engine", "batch", "restriction", "tokens_per_cpu_s")},
                "ratio": str(Interval(row["ratio"], row["low"], row["high"])),
            }
            for row in rows
        ],
    )
    chief = [row for row in rows if row["restriction"] == CHIEF]
    worst = min(row["ratio"] for row in chief)
    return finish(
        rows,
        json_file=options.json,
        summary=f"with {CHIEF} at worst {worst:.3f} of the speed without (goal {GOAL})",
        met=worst >= GOAL,
        about={
            **about("sampling", list(argv) if argv is not None else sys.argv[1:]),
            "kernels": kernels.USABLE,
            "torch": torch.__version__,
        },
    )


def _ways(options: argparse.Namespace, folder: Path) -> list[Way]:
    """Return the engines to measure."""
    import torch

    from worker_svc.engine.load import load_engine
    from worker_svc.engine.options import LoadOptions
    from worker_svc.loading import DEMO

    most, found = max(options.batch), []
    sizes = {"slots": most, "max_length": MAX_LENGTH, "deterministic": True}
    if options.shape != "0.5b":
        pair = load_engine(DEMO / "target", DEMO / "draft", LoadOptions(**sizes))
        prompts = _demo_prompts(DEMO / "target", most * options.turns)
        found += [Way("demo, drafts", pair, 8, None, prompts), Way("demo, plain", pair, 8, 0, prompts)]
    if options.shape != "demo":
        progress("writing a model of 0.5 B random weights")
        model = random_model(HALF_B, dtype=torch.bfloat16, device="cpu", seed=0, max_length=MAX_LENGTH)
        logits_now = 0.02 * HALF_B.hidden**0.5  # of hidden states of size 1 and weights of 0.02
        with torch.no_grad():
            model.model.norm.weight.mul_(SPREAD / logits_now)
        model.save_pretrained(folder)
        del model
        large = load_engine(folder, None, LoadOptions(dtype="bfloat16", drafter="none", **sizes))
        draw = random.Random(0)
        prompts = [
            tuple(draw.randrange(HALF_B.vocab) for _ in range(PROMPT_TOKENS))
            for _ in range(most * options.turns)
        ]
        found.append(Way("0.5B, plain", large, 1, 0, prompts))
    return found


def _demo_prompts(target: Path, count: int) -> list[tuple[int, ...]]:
    """Return prompts of all kinds that the demo pair has learnt."""
    from transformers import AutoTokenizer

    from demo.prompts import demo_prompts

    tokenizer = AutoTokenizer.from_pretrained(target)
    return [tuple(tokenizer(prompt.text)["input_ids"]) for prompt in demo_prompts(None, count, 0)]


def _measure(way: Way, batch: int, rounds: int, turns: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each restriction."""
    draw = random.Random(batch)
    speeds: dict[str, list[float]] = {name: [] for name in settings}
    for turn in range(turns):
        prompts = way.prompts[turn * batch : (turn + 1) * batch]
        for name in draw.sample(list(settings), len(settings)):
            speeds[name].append(_speed(way, prompts, rounds, settings[name], turn))
        progress(f"{way.name}, batch {batch}, turn {turn + 1} of {turns}")
    rows = []
    for name, measured in speeds.items():
        ratio = ratio_interval(list(zip(measured, speeds[NONE], strict=True)))
        rows.append(
            {
                "engine": way.name,
                "batch": batch,
                "restriction": name,
                "tokens_per_cpu_s": sum(measured) / turns,
                "ratio": ratio.middle,
                "low": ratio.low,
                "high": ratio.high,
            }
        )
    return rows


def _speed(way: Way, prompts: Sequence[tuple[int, ...]], rounds: int, sampling: Any, turn: int) -> float:
    """Return the tokens per CPU second of some rounds after the first ones."""
    from worker_svc.engine.interface import Specification

    engine, names = way.engine, [str(number) for number in range(len(prompts))]
    if engine.lengths.max_draft_len:
        engine.lengths.fixed = way.draft_len
    for name, prompt in zip(names, prompts, strict=True):
        own = replace(sampling, seed=1000 * turn + int(name))
        engine.add(Specification(name, prompt, (), own, MAX_LENGTH - len(prompt), ignore_eos=True))
    for _ in range(WARM_UP_ROUNDS):
        engine.round(names)
    tokens, began = 0, time.process_time()
    for _ in range(rounds):
        result = engine.round(names)
        tokens += sum(len(report.tokens) for report in result.requests)
        if any(report.finish is not None for report in result.requests):
            break
    spent = time.process_time() - began
    for name in names:
        engine.drop(name)
    return tokens / spent


if __name__ == "__main__":
    sys.exit(main())
