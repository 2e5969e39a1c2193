"""Requests with their arrivals and hints. Equal seeds give equal requests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench._vllm.modes import Mode

if TYPE_CHECKING:
    from demo.prompts import Prompt

GUESS_SIGMA = 0.5
"""Guessed lengths are the true ones times exp(σ z), as good predictors are."""


@dataclass(frozen=True)
class Workload:
    """Requests of one run; what a mode sends of them is up to the mode."""

    seed: int
    ids: Sequence[Sequence[int]]
    kinds: Sequence[str]

    def __len__(self) -> int:
        return len(self.ids)

    def without(self, others: Iterable[Workload]) -> Workload:
        """Return the requests whose prompts are in no other workload."""
        known = {tuple(ids) for other in others for ids in other.ids}
        kept = [number for number, ids in enumerate(self.ids) if tuple(ids) not in known]
        return Workload(self.seed, [self.ids[n] for n in kept], [self.kinds[n] for n in kept])


def demo_workload(count: int, seed: int) -> Workload:
    """Return prompts of all kinds that the demo pair knows, in equal parts."""
    from demo.prompts import demo_prompts

    return _workload(demo_prompts(None, count, seed), seed)


def distinct_workloads(runs: int, count: int, seed: int) -> list[Workload]:
    """Return workloads in which no prompt comes twice, neither in one nor in two of them. Each has prompts of all kinds
    that the demo pair knows; of a kind with few different prompts it has fewer than of the others."""
    from demo.prompts import KINDS, demo_prompts

    missing = runs * count
    kinds: list[list[Prompt]] = [
        list({prompt.text: prompt for prompt in demo_prompts(kind, missing // len(KINDS) * 2, seed)}.values())
        for kind in KINDS
    ]
    placed: list[tuple[float, Prompt]] = []
    for number, prompts in enumerate(sorted(kinds, key=len)):
        share = min(len(prompts), -(-missing // (len(KINDS) - number)))
        missing -= share
        placed += [((at + 0.5) / share, prompt) for at, prompt in enumerate(prompts[:share])]
    placed.sort(key=lambda each: each[0])
    rng = random.Random(f"distinct/{seed}")
    workloads = []
    for run in range(runs):
        of_run = [prompt for _, prompt in placed[run * count : (run + 1) * count]]
        rng.shuffle(of_run)
        workloads.append(_workload(of_run, seed + run))
    return workloads


def _workload(prompts: Sequence[Prompt], seed: int) -> Workload:
    from tokenizers import Tokenizer

    from worker_svc.demo import TARGET_DIR

    tokenizer = Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))
    ids = [tokenizer.encode(prompt.text + "\n").ids for prompt in prompts]
    return Workload(seed, ids, [prompt.kind for prompt in prompts])


def guessed(lengths: Sequence[int], seed: int) -> list[int]:
    """Return a guess of each length: lognormal around it, at least one token."""
    rng = random.Random(f"guess/{seed}")
    return [max(1, round(length * rng.lognormvariate(0, GUESS_SIGMA))) for length in lengths]


def burst_arrivals(count: int, within: int) -> list[int]:
    """Return steps of arrival, evenly over the first `within` steps."""
    return [number * within // count for number in range(count)]


def load_arrivals(service: Sequence[int], slots: int, load: float, seed: int) -> list[int]:
    """Return steps of Poisson arrivals at this load: the share of the step's places that the requests take,
    by their own steps (`service`).
    """
    gap = sum(service) / len(service) / slots / load
    return [int(step) for step in poisson_arrivals(len(service), gap, seed)]


def poisson_arrivals(count: int, gap: float, seed: int) -> list[float]:
    """Return Poisson arrivals at this mean distance."""
    rng = random.Random(f"load/{seed}")
    return list(itertools.accumulate(rng.expovariate(1 / gap) for _ in range(count)))


def requests_of(
    workload: Workload, mode: Mode, arrivals: Sequence[float], lengths: Sequence[int], guesses: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the requests as a mode sends them: hints of LAPS-SD, or vLLM's priority (smaller first)."""
    given = {"": None, "guessed": guesses, "true": lengths}[mode.lengths]
    found = []
    for number, (ids, kind) in enumerate(zip(workload.ids, workload.kinds, strict=True)):
        hints: dict[str, Any] = {"workload_class": kind} if mode.sends_class else {}
        if given is not None and mode.scheduler == "laps":
            hints["expected_output_tokens"] = given[number]
        priority = given[number] if given is not None and mode.scheduler == "priority" else 0
        found.append({"ids": list(ids), "arrival": arrivals[number], "hints": hints, "priority": priority})
    return found
