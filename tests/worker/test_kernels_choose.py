"""Restricted choices by the kernels in C: the tokens that torch chooses, bit for bit, whatever the logits are."""

from __future__ import annotations

import random

import pytest
import torch

from tests.worker.test_truncation import SHAPES, normal
from worker_svc.engine.cpu import kernels
from worker_svc.engine.interface import Sampling
from worker_svc.engine.sampling import counter
from worker_svc.engine.sampling.noise import Noise, NoiseOfRows
from worker_svc.engine.sampling.sampling import choose_tokens, rows_for

CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.skipif(not kernels.USABLE, reason="no AVX2, or built without a C compiler"),
    pytest.mark.usefixtures("each_width"),
]


def any_settings(rng: random.Random, vocab: int) -> Sampling:
    return Sampling(
        temperature=rng.choice((0.0, 0.3, 0.7, 1.0, 1.0, 1.7, 1e-5)),
        top_p=rng.choice((1.0, 1.0, 0.95, 0.9, 0.5, 0.999999, 0.01, 1e-9)),
        top_k=rng.choice((0, 0, 1, 2, 5, 40, 64, 1000, vocab - 1, vocab, vocab + 1)),
        min_p=rng.choice((0.0, 0.0, 0.05, 1e-4, 0.9, 1.0)),
        seed=rng.randrange(2**64),
    )


def chosen_by_both(logits: torch.Tensor, settings: list[Sampling], vocab: int) -> tuple[list[int], list[int]]:
    """Return the tokens that the kernels choose, and those that torch chooses."""
    rows = rows_for(settings, vocab, CPU)
    if rows.plain:
        return kernels.choose(logits, range(len(settings)), None), choose_tokens(logits, rows, None).tolist()
    keys = [counter.row_key(one.seed, at) for at, one in enumerate(settings)]
    noise = NoiseOfRows(Noise(vocab), keys)
    choosing = kernels.Choosing(
        rows.inverse_temperature,
        rows.noisy,
        noise.of(None if rows.alike else rows.free) if rows.free else None,
        kernels.Truncation(rows.top_k, rows.top_p, rows.log_min_p, noise.keys),
    )
    found = kernels.choose(logits, range(len(settings)), choosing)
    return found, choose_tokens(logits, rows, Noise(vocab).gumbel(keys)).tolist()


@pytest.mark.parametrize("vocab", [1, 7, 16, 203, 1024, 5001])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_choose_what_torch_chooses(shape: str, vocab: int) -> None:
    """Rows of mixed settings, of which some are greedy and some choose among all tokens."""
    rng, rows = random.Random(f"{shape} {vocab}"), 48
    settings = [any_settings(rng, vocab) for _ in range(rows)]
    settings = [one for one in settings if not kernels.MOST_TOP_K < one.top_k < vocab]
    logits = SHAPES[shape](len(settings), vocab, rng.randrange(1000))
    by_kernels, by_torch = chosen_by_both(logits, settings, vocab)
    assert by_kernels == by_torch


@pytest.mark.parametrize(
    "setting",
    [
        Sampling(1.0, top_p=0.95, top_k=40),
        Sampling(1.0, top_p=0.95),
        Sampling(1.3, top_p=0.5),
        Sampling(1.0, min_p=0.05),
        Sampling(1.0, min_p=0.999),
        Sampling(1.0, top_k=1024, top_p=0.3),
    ],
    ids=["top-k and top-p", "top-p", "small top-p", "min-p", "great min-p", "great top-k"],
)
@pytest.mark.parametrize("scale", [0.001, 1.0, 3.0])
def test_they_do_so_where_more_tokens_are_kept_than_are_listed(setting: Sampling, scale: float) -> None:
    """A large vocabulary, whose length is no multiple of a vector's, and equal settings for all rows."""
    vocab, rows = 40_003, 24
    logits = normal(rows, vocab, 5) * scale
    by_kernels, by_torch = chosen_by_both(logits, [setting] * rows, vocab)
    assert by_kernels == by_torch
    assert len(set(by_kernels)) > 1


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "setting",
    [Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.5), Sampling(1.0, min_p=0.5)],
    ids=["top-k", "top-p", "min-p"],
)
def test_a_restricted_row_that_is_no_number_somewhere_has_no_choice(setting: Sampling, broken: float) -> None:
    for at in (0, 17, 202):
        logits = normal(8, 203, at)
        logits[5, at] = broken
        by_kernels, _ = chosen_by_both(logits, [setting] * 8, 203)
        assert [row for row, token in enumerate(by_kernels) if token < 0] == [5]


def test_a_top_k_that_is_too_great_for_the_kernels_does_no_harm() -> None:
    """Its choice means nothing, but it is a token."""
    by_kernels, _ = chosen_by_both(normal(4, 5000, 1), [Sampling(1.0, top_k=4999)] * 4, 5000)
    assert all(0 <= token < 5000 for token in by_kernels)


@pytest.mark.parametrize(
    "settings",
    [
        [Sampling(1.0, top_k=250, seed=3)],
        [Sampling(1.0, top_k=250, seed=3), Sampling(1.0, seed=4), Sampling(1.0, top_k=200, seed=5)],
        [Sampling(1.0, top_p=1 - 1e-9, seed=3)],
        [Sampling(1.0, top_p=1 - 1e-9, seed=3), Sampling(1.0, seed=4)],
    ],
)
def test_a_restriction_that_restricts_nothing_needs_no_other_noise(settings: list[Sampling]) -> None:
    """A draft may have fewer tokens than top_k keeps of the target's; 1 - 1e-9 is 1 in single precision."""
    rows, wide, narrow = rows_for(settings, 300, CPU), 300, 200
    keys = [counter.row_key(one.seed, at) for at, one in enumerate(settings)]
    noise = Noise(wide).gumbel(keys)
    only_free = torch.full_like(noise, torch.inf)
    only_free[list(rows.free)] = noise[list(rows.free)]
    choosing = kernels.Choosing(
        rows.inverse_temperature,
        rows.noisy,
        only_free if rows.free else None,
        kernels.Truncation(rows.top_k, rows.top_p, rows.log_min_p, NoiseOfRows(Noise(wide), keys).keys),
    )
    logits = normal(len(settings), narrow, 1)
    expected = choose_tokens(logits, rows, noise[:, :narrow]).tolist()
    assert kernels.choose(logits, range(len(settings)), choosing) == expected
