"""Requests of the benchmark, in cells that are generated together."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench._engine.held_out import HELD_OUT, held_out_prompts

MAX_LENGTH = 512
PEER_BATCH = 16
MIXED = "mixed"
RAMP = "ramp"
TEMPERATURES = (0.0, 0.8)
BOTH = "both"
LEAST_PROMPTS = 48
LEAST_OF_A_KIND = 32
PROMPT_TOKENS = 64  # of a random pair
SEED = 0  # of prompts, and of random weights


@dataclass(frozen=True)
class Prompted:
    """One request: token ids of its prompt, temperature, and a number that seeds it."""

    ids: tuple[int, ...]
    temperature: float
    number: int


@dataclass(frozen=True)
class Cell:
    """Requests that are generated together, of one kind and one temperature, at most `batch` at a time."""

    # A kind of prompt; "mixed": equal parts of each; "ramp": the same, with a number at a time that rises to
    # `batch` and falls again.
    kind: str
    temperature: float
    batch: int
    requests: tuple[Prompted, ...]

    @property
    def key(self) -> tuple[str, float, int]:
        """Return the key that distinguishes cells."""
        return self.kind, self.temperature, self.batch

    def at_once(self, served: int) -> int:
        """Return how many requests may run together once `served` were admitted."""
        if self.kind != RAMP:
            return self.batch
        done = served / len(self.requests)
        return max(1, round(self.batch * (1 - abs(2 * done - 1))))


def cells_for(options: argparse.Namespace) -> list[Cell]:
    """Return all cells: the mix and each kind alone at every batch size, and the ramp up to the largest."""
    texts = _random_texts(options) if options.shape else _demo_texts(options)
    found = [
        _cell(kind, temperature, batch, ids)
        for batch in sorted({*options.batch, *([] if options.no_peers else [1, PEER_BATCH])})
        for kind, ids in texts(batch)
        if batch in options.batch or kind == MIXED
        for temperature in TEMPERATURES
    ]
    most = max(options.batch)
    if most > 1:
        ramp = next(ids for kind, ids in texts(most) if kind == MIXED)
        found += [_cell(RAMP, temperature, most, ramp) for temperature in TEMPERATURES]
    return found


def _cell(kind: str, temperature: float, batch: int, ids: Sequence[tuple[int, ...]]) -> Cell:
    requests = tuple(Prompted(one, temperature, number) for number, one in enumerate(ids))
    return Cell(kind, temperature, batch, requests)


def _demo_texts(
    options: argparse.Namespace,
) -> Callable[[int], Iterator[tuple[str, list[tuple[int, ...]]]]]:
    from transformers import AutoTokenizer

    from demo.prompts import KINDS, demo_prompts

    tokenizer = AutoTokenizer.from_pretrained(options.target)
    kinds = {"all": [*KINDS, HELD_OUT], "none": []}.get(options.kinds, options.kinds.split(","))

    def texts(batch: int) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
        for kind in (MIXED, *kinds):
            count = max(LEAST_PROMPTS, 2 * batch) if kind == MIXED else max(LEAST_OF_A_KIND, batch)
            if kind == HELD_OUT:
                prompts = held_out_prompts(count)
            else:
                demo = demo_prompts(None if kind == MIXED else kind, count, SEED)
                prompts = [one.text for one in demo]
            yield kind, [tuple(tokenizer(prompt)["input_ids"]) for prompt in prompts]

    return texts


def _random_texts(
    options: argparse.Namespace,
) -> Callable[[int], Iterator[tuple[str, list[tuple[int, ...]]]]]:
    from bench._shapes import PAIRS

    vocab = PAIRS[options.shape][0].vocab

    def texts(batch: int) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
        rng = random.Random(SEED)
        count = max(4, batch)
        yield MIXED, [tuple(rng.randrange(vocab) for _ in range(PROMPT_TOKENS)) for _ in range(count)]

    return texts
