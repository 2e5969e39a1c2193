"""How well does a worker predict the output length that remains, and what does it cost? `laps-sd bench probe`

The shipped pair, or `--target` and `--draft`, in the worker's engine, `--batch` requests at a time. The kinds of
prompts are those that say little about the length of their answer (`--kinds all` takes every kind); at this
temperature the model's end token decides most lengths.

Accuracy is prequential: what the probe predicted during a request is compared when that ends, and learnt from after
that. A row is a stage: after the prompt, and by output tokens. The others know the ends of the same requests: the
constant is the mean of ln(remaining tokens) at that stage, the table is the scheduler's own estimate for requests
of one class. Errors are root mean squares of ln(true/predicted), order is Kendall's tau. Requests that were cut at
`--tokens` are left out, and so are the first `--first`. A prediction counts here whether or not the worker would
have sent it; "sent" is the share that it did.

Cost is CPU time of the same rounds with and without the probe, in alternating slices of one engine, with a constant
number of draft tokens. Two engines would differ by up to 1 % in any case, because their memory lies differently.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.report import Interval, about, command_line, finish, kendall_tau, progress, ratio_interval, table

KINDS = ("story", "log", "json", "prose")
MAX_LENGTH = 1024
SEED = 7
DRAFT_LEN = 3
SLICE_S = 0.03
"""CPU seconds after which the other side has its turn."""
GOAL_COST = 1.01
GOAL_ERROR = 0.9
"""The probe's error after the prompt, as a share of the constant's."""
FEWEST = 20
"""Looks of a stage that make a row."""


@dataclass
class Judged:
    """One look at a request that ended by itself. All but the stage are of ln(remaining tokens)."""

    stage: int
    truth: float
    probe: float
    constant: float
    table: float
    sent: bool


@dataclass
class Judge:
    """Compares looks with the truth, request by request, in the order of their ends."""

    looks: list[Judged] = field(default_factory=list)
    ended: int = 0
    cut: int = 0

    def __post_init__(self) -> None:
        from scheduler_svc.core.estimates.lengths import LengthTable

        self._table = LengthTable()
        self._sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def judge(self, looks: Sequence[Any], output_tokens: int, most: int, sent: Any, *, first: int) -> None:
        """Take in the looks of a request that ended by itself; those of the `first` requests are only learnt from."""
        from worker_svc.engine.length_probe.errors import stage_of

        self.ended += 1
        for look in looks:
            stage, truth = stage_of(look.output_tokens), math.log(output_tokens - look.output_tokens)
            count, total = self._sums[stage]
            if self.ended > first and look.predicted is not None and count:
                left = self._table.left(look.output_tokens, most).mean
                self.looks.append(
                    Judged(stage, truth, look.predicted, total / count, math.log(left), sent(stage))
                )
            self._sums[stage] = [count + 1, total + truth]
        self._table.observe(output_tokens)
        if self._table.stale:
            self._table.rebuild(None)


def judged_engine(options: argparse.Namespace, *, judge: Judge | None = None) -> Any:
    """Return an engine for two batches, whose looks are judged where there is a judge."""
    from worker_svc.engine.load import load_engine
    from worker_svc.engine.options import LoadOptions

    engine = load_engine(
        options.target,
        options.draft,
        LoadOptions(
            slots=2 * options.batch, max_length=MAX_LENGTH, max_draft_len=DRAFT_LEN, draft_len=DRAFT_LEN
        ),
    )  # fmt: skip
    if judge is not None:
        own: Any = engine.length_probe
        learn = own.learn

        def learnt(watched: Any, output_tokens: int, *, cut: bool) -> None:
            if cut:
                judge.cut += 1
            else:
                judge.judge(
                    watched.looks, output_tokens, options.tokens, own.errors.good, first=options.first
                )
            learn(watched, output_tokens, cut=cut)

        own.learn = learnt
    return engine


def rounds(engine: Any, specs: Sequence[Any], batch: int) -> Iterator[None]:
    """Run the requests, first come first served; yield after each round."""
    waiting, running = list(reversed(specs)), list[str]()
    while waiting or running:
        while waiting and len(running) < batch:
            engine.add(waiting[-1])
            running.append(waiting.pop().request_id)
        for report in engine.round(running).requests:
            if report.finish is not None:
                if report.error is not None:
                    raise RuntimeError(report.error)
                running.remove(report.request_id)
                engine.drop(report.request_id)
        yield


def side_by_side(engine: Any, specs: Sequence[Any], batch: int) -> tuple[float, float]:
    """Return the CPU seconds of the same rounds with and without the probe of an engine, in slices that alternate."""
    from worker_svc.engine.round.remaining import Remaining

    probe = engine.rounds.remaining
    going = [
        (name, remaining, rounds(engine, [replace(spec, request_id=f"{name}-{spec.request_id}") for spec in specs], batch))
        for name, remaining in (("with", probe), ("without", Remaining(None)))
    ]  # fmt: skip
    spent = dict.fromkeys(("with", "without"), 0.0)
    while going:
        for one in list(going):
            name, engine.rounds.remaining, run = one
            began = time.process_time()
            while time.process_time() - began < SLICE_S:
                if next(run, run) is run:
                    going.remove(one)
                    break
            spent[name] += time.process_time() - began
        going.reverse()  # neither is always the first
    engine.rounds.remaining = probe
    return spent["with"], spent["without"]


def specs_of(options: argparse.Namespace, turn: int = 0) -> list[Any]:
    from transformers import AutoTokenizer

    from demo.prompts import KINDS as EVERY
    from demo.prompts import demo_prompts
    from worker_svc.engine.interface import Sampling, Specification

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    kinds = EVERY if options.kinds == "all" else options.kinds.split(",")
    prompts = [one for kind in kinds for one in demo_prompts(kind, options.prompts, SEED)]
    random.Random(SEED).shuffle(prompts)
    return [
        Specification(
            f"{turn}-{n}", tuple(tokenizer(one.text)["input_ids"]), (), Sampling(1.0, seed=n + 1000 * turn), options.tokens
        )
        for n, one in enumerate(prompts)
    ]  # fmt: skip


def stage_name(stage: int) -> str:
    if stage == 0:
        return "after the prompt"
    return f"from {4 ** (stage - 1)} tokens"


def rows_of(judge: Judge) -> list[dict[str, Any]]:
    """Return a row for each stage that has enough looks."""
    by_stage: dict[int, list[Judged]] = defaultdict(list)
    for look in judge.looks:
        by_stage[look.stage].append(look)
    rows = []
    for stage, looks in sorted(by_stage.items()):
        if len(looks) < FEWEST:
            continue
        truths = [look.truth for look in looks]
        rows.append(
            {
                "stage": stage_name(stage),
                "looks": len(looks),
                "rms probe": rms(truths, [look.probe for look in looks]),
                "rms constant": rms(truths, [look.constant for look in looks]),
                "rms table": rms(truths, [look.table for look in looks]),
                "tau probe": kendall_tau(truths, [look.probe for look in looks]),
                "tau table": kendall_tau(truths, [look.table for look in looks]),
                "sent": sum(look.sent for look in looks) / len(looks),
            }
        )
    return rows


def rms(truths: Sequence[float], predicted: Sequence[float]) -> float:
    errors = [(truth - one) ** 2 for truth, one in zip(truths, predicted, strict=True)]
    return math.sqrt(sum(errors) / len(errors))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    from worker_svc.loading import DEMO

    parser = command_line("probe", __doc__)
    parser.add_argument("--target", type=Path, default=None, help="directory of a target model")
    parser.add_argument("--draft", type=Path, default=None, help="directory of its draft model")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of prompts, or all")
    parser.add_argument("--prompts", type=int, default=150, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=600, help="largest output")
    parser.add_argument("--batch", type=int, default=16, help="requests at a time")
    parser.add_argument(
        "--first", type=int, default=90, help="requests that are not judged, only learnt from"
    )
    parser.add_argument(
        "--turns", type=int, default=4, help="passes that measure the cost; 0: it is not measured"
    )
    options = parser.parse_args(argv)
    if options.target is None:
        options.target, options.draft = DEMO / "target", DEMO / "draft"
    return options


def cost(options: argparse.Namespace) -> Interval | None:
    """Return the CPU time with the probe over that without; None: it is not measured."""
    if options.turns < 2:
        return None
    engine = judged_engine(options)
    pairs = []
    for turn in range(options.turns + 1):
        pair = side_by_side(engine, specs_of(options, turn), options.batch)
        if turn:  # the first one warms up, and teaches the probe
            pairs.append(pair)
        progress(f"cost, pass {turn} of {options.turns}: {pair[0]:.2f} s with, {pair[1]:.2f} s without")
    return ratio_interval(pairs)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    judge = Judge()
    for _ in rounds(judged_engine(options, judge=judge), specs_of(options), options.batch):
        pass
    rows = rows_of(judge)
    if rows:
        table(f"{judge.ended} requests ended by themselves, {judge.cut} were cut", rows)
    ratio = cost(options)
    summary = "no stage has enough looks"
    met = False
    if rows:
        share = rows[0]["rms probe"] / rows[0]["rms constant"]
        summary = f"{rows[0]['stage']} the probe's error is {share:.2f} of the constant's (goal {GOAL_ERROR})"
        met = share <= GOAL_ERROR
    if ratio is not None:
        summary += f", CPU time with it is {ratio} of that without (goal {GOAL_COST})"
        met = met and ratio.middle <= GOAL_COST
    described = {**about("probe", argv), "cost": ratio and str(ratio)}
    return finish(rows, json_file=options.json, summary=summary, met=met, about=described)


if __name__ == "__main__":
    sys.exit(main())
