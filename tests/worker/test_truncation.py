"""What top_k, top_p and min_p keep, in torch: the definition, whatever the logits are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from worker_svc.engine.sampling import truncation


def normal(rows: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def one_huge(rows: int, vocab: int, seed: int) -> torch.Tensor:
    logits = normal(rows, vocab, seed)
    logits[:, seed % vocab] = 3e4
    return logits


def shuffled_steps(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Scores in distances whose weights end within one vector of the sums."""
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    return (-0.7 * torch.arange(vocab))[order].repeat(rows, 1)


def excluded(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Scores of -inf after the division, from finite logits, for most tokens but the last."""
    logits = normal(rows, vocab, seed)
    logits[:, :-1][normal(rows, vocab - 1, seed + 1) > -1] = torch.finfo(torch.float32).min
    return logits


SHAPES: dict[str, Callable[[int, int, int], torch.Tensor]] = {
    "usual": lambda rows, vocab, seed: normal(rows, vocab, seed) * 3,
    "flat": lambda rows, vocab, seed: normal(rows, vocab, seed) * 0.01,
    "sharp": lambda rows, vocab, seed: normal(rows, vocab, seed) * 30,
    "many ties": lambda rows, vocab, seed: (normal(rows, vocab, seed) * 2).round(),
    "all equal": lambda rows, vocab, _seed: torch.full((rows, vocab), -1.25),
    "zeros of both signs": lambda rows, vocab, seed: torch.where(normal(rows, vocab, seed) > 0, 0.0, -0.0),
    "ties after the division": lambda rows, vocab, seed: 1e4 + normal(rows, vocab, seed) * 0.01,
    "rising": lambda rows, vocab, _seed: torch.linspace(-4, 4, vocab).repeat(rows, 1),
    "falling": lambda rows, vocab, _seed: torch.linspace(4, -4, vocab).repeat(rows, 1),
    "one huge": one_huge,
    "steps": shuffled_steps,
    "excluded by a finite number": excluded,
}


def plainly_kept(scores: list[float], weights: list[int], top_k: int, top_p: float, least: float) -> set[int]:
    """The definition, word by word, in integers."""
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))[:top_k]
    whole, before, kept = sum(weights[token] for token in order), 0, set()
    for token in order:
        if before < max(top_p * whole, 1.0) and scores[token] >= least:
            kept.add(token)
        before += weights[token]
    return kept


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("candidates", [40, 64, 203])
def test_torch_keeps_what_the_definition_says(shape: str, candidates: int, device: str) -> None:
    """Also where equal scores lie on both sides of the last candidate."""
    rng, vocab, rows = random.Random(candidates), 203, 40
    scores = SHAPES[shape](rows, vocab, 3)
    top_k = [rng.choice((1, 2, 40, 100, vocab)) for _ in range(rows)]
    top_p = torch.tensor([rng.choice((2.0, 0.95, 0.5, 1e-9)) for _ in range(rows)])[:, None]
    log_min_p = torch.tensor([rng.choice((-math.inf, -3.0, 0.0)) for _ in range(rows)])[:, None]
    most = scores.amax(-1, keepdim=True)
    weights = truncation.weights(scores, most)
    assert int(weights.min()) >= 0 and weights.amax(-1).eq(2**truncation.WHOLE_LOG2).all()
    complete = 0
    for row in range(rows):
        expected = plainly_kept(
            scores[row].tolist(), weights[row].tolist(), top_k[row], float(top_p[row]), float(most[row] + log_min_p[row])
        )  # fmt: skip
        one = slice(row, row + 1)
        _, ids, keep, known = truncation.kept(
            scores[one].to(device), torch.tensor([[top_k[row]]], device=device), top_p[one].to(device), log_min_p[one].to(device), candidates
        )  # fmt: skip
        complete += known
        if known:
            assert set(ids[keep].tolist()) == expected
        elif candidates >= top_k[row] and len(expected) < candidates:
            lowest = scores[row].topk(candidates).values[-1]
            assert any(scores[row, token] == lowest for token in expected), "nothing was in doubt"
    if candidates == vocab:
        assert complete == rows
    elif shape == "usual":
        assert complete > rows // 4


def test_weights_are_the_probabilities(device: str) -> None:
    scores = torch.linspace(-20, 0, 4001, device=device)[None]
    expected = scores.double().exp() * 2**truncation.WHOLE_LOG2
    error = truncation.weights(scores, scores[:, -1:]).double() - expected
    assert bool((error.abs() <= 1 + 4e-7 * expected).all())
