"""Bursts and a load on the clock, on a model of a real shape, with lengths that the scheduler cannot see."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench._peers import Peer
from bench._vllm.figures import figures
from bench._vllm.hidden_lengths import Answer, Answers, workload_of
from bench._vllm.modes import FCFS, LEARNT, MODES, NO_HINT, OURS, PRIORITY, SHORTEST, Mode
from bench._vllm.workload import guessed, poisson_arrivals, requests_of
from bench.report import progress

SMOKE_COUNT, SMOKE_LENGTH = 8, 24
WARM_LENGTH = 48
LEARN_COUNT = 600
ON_SHAPE = (
    *(mode for mode in MODES if mode.name in (FCFS, PRIORITY, SHORTEST)),
    *OURS,
    replace(OURS[0], name=NO_HINT + LEARNT, learnt=True),
)
"""The full batches of the first one in a burst give the speed that the load after it is a share of. The true lengths
show how much an order could gain at all."""


@dataclass(frozen=True)
class Plan:
    """What is to run."""

    count: int
    seeds: Sequence[int]
    tokens: int
    load: float
    slots: int
    until_s: float
    """Time of `time.monotonic` from which on no further run begins."""
    within_s: float = 2.0
    """Seconds over which a burst arrives."""
    measured: str = "shape"
    """How the rows are called: shape, or computed."""


def measure(
    peer: Peer, answers: Answers, plan: Plan, ahead: Sequence[bool], folder: Path
) -> Iterator[dict[str, Any]]:
    """Yield a row for each run, with (`ahead`) and without async scheduling: a burst, then a load of other
    requests. The first rows are of eight requests, which show that it works at all.
    """
    smoke = _cut(answers.run(0, SMOKE_COUNT), SMOKE_LENGTH)
    for how in ahead:
        for mode in (ON_SHAPE[0], OURS[2]):
            _, row = _run(peer, mode, smoke, [0.0] * SMOKE_COUNT, 0, how, f"{SMOKE_COUNT} requests", folder)
            yield row | {"measured": "smoke"}
    _learn(peer, answers, folder)
    warm = _cut(answers.run(1, 3 * plan.slots), WARM_LENGTH)
    for how in ahead:
        for mode in (ON_SHAPE[0], OURS[0]):
            _run(peer, mode, warm, [0.0] * len(warm), 0, how, "", folder)
    tokens_per_s, runs = 1.0, 0
    for how in ahead:
        suffix = "" if how else ", not async"
        for seed in plan.seeds:
            for at, setting in enumerate((f"burst of {plan.count}", f"load {plan.load:g}")):
                chosen = _cut(answers.run(2 * seed + at, plan.count), plan.tokens)
                burst = at == 0
                if burst:
                    arrivals = [at * plan.within_s / plan.count for at in range(plan.count)]
                else:
                    mean = statistics.fmean(each.length for each in chosen)
                    arrivals = poisson_arrivals(plan.count, mean / (tokens_per_s * plan.load), seed)
                # FCFS is not always first: what a run takes may depend on how many came before.
                modes = list(ON_SHAPE)
                random.Random(f"{setting}/{seed}").shuffle(modes)
                for mode in modes:
                    if time.monotonic() > plan.until_s:
                        progress("the time for this part is over")
                        return
                    speed, row = _run(peer, mode, chosen, arrivals, seed, how, setting + suffix, folder)
                    if burst and mode is ON_SHAPE[0]:
                        tokens_per_s = speed
                    runs += 1
                    yield row | {"measured": plan.measured, "run": runs}


def _cut(answers: Sequence[Answer], most: int) -> list[Answer]:
    return [replace(each, length=min(each.length, most)) for each in answers]


def _learn(peer: Peer, answers: Answers, folder: Path) -> None:
    """Write what LAPS-SD learns from requests that come in no run."""
    mode = ON_SHAPE[-1]
    chosen = answers.learning(LEARN_COUNT)
    asked = _question(mode, chosen, [0.0] * len(chosen), 0)
    peer.ask(asked | {"task": "learn", "environment": {}, "save": str(folder / mode.file_name)})


def _question(mode: Mode, answers: Sequence[Answer], arrivals: Sequence[float], seed: int) -> dict[str, Any]:
    lengths = [each.length for each in answers]
    requests = requests_of(workload_of(answers, seed), mode, arrivals, lengths, guessed(lengths, seed))
    return {
        "scheduler": mode.scheduler,
        "requests": [request | {"length": length} for request, length in zip(requests, lengths, strict=True)],
    }


def _run(
    peer: Peer,
    mode: Mode,
    answers: Sequence[Answer],
    arrivals: Sequence[float],
    seed: int,
    ahead: bool,
    setting: str,
    folder: Path,
) -> tuple[float, dict[str, Any]]:
    """Return tokens per second, of full batches if there were any, and the row of a run."""
    found = peer.ask(
        _question(mode, answers, arrivals, seed)
        | {"task": "burst", "ahead": ahead, "environment": mode.environment_in(folder)}
    )
    tokens = sum(found["lengths"])
    speed = tokens / found["lasted_s"]
    full_speed = found["full_tokens"] / found["full_s"] if found["full_s"] else None
    first = figures(found["first_token"])
    row = {
        "setting": setting,
        "requests": len(answers),
        "seed": seed,
        "mode": mode.name,
        "async": ahead,
        **{name: round(value, 4) for name, value in figures(found["latencies"]).items()},
        "first_token": round(first["mean"], 4),
        "first_token_p99": round(first["p99"], 4),
        "lasted_s": round(found["lasted_s"], 3),
        "tokens": tokens,
        "right_lengths": sum(
            length == each.length for length, each in zip(found["lengths"], answers, strict=True)
        ),
        "tokens_per_s": round(speed, 1),
        "full_tokens_per_s": full_speed and round(full_speed, 1),
        "full_step_ms": found["full_step_ms"] and round(found["full_step_ms"], 3),
        **{name: found[name] for name in ("steps", "full_steps", "pauses", "evictions")},
        **{
            name: found[name] and round(found[name], 3)
            for kind in ("decode", "mixed")
            for name in (f"{kind}_step_ms", f"{kind}_launch_ms", f"{kind}_s")
        },
        **{name: found[name] for name in ("decode_steps", "mixed_steps")},
        "scheduler_ms": round(found["scheduler_ms"], 4),
        "cpu_ms": round(found["cpu_ms"], 4),
    }
    if setting:
        progress(
            f"{setting}, seed {seed}: {mode.name}, mean {row['mean']:.2f} s, p99 {row['p99']:.2f} s, first token"
            f" {row['first_token']:.2f} s, {row['tokens_per_s']:.0f} tokens/s; {row['decode_steps']} steps without prompts"
            f" took {row['decode_s']:.2f} s, {row['mixed_steps']} with {row['mixed_s']:.2f} s; scheduler"
            f" {row['scheduler_ms']:.2f} ms of CPU a step"
        )
    return full_speed or speed, row
