"""The scores of the logits processor for vLLM choose what `sampling` chooses; no vLLM is needed."""

from __future__ import annotations

import pytest
import torch

from worker_svc.engine.interface import Sampling
from worker_svc.engine.sampling import counter
from worker_svc.engine.sampling.noise import Noise, weyl_of
from worker_svc.engine.sampling.sampling import choose_tokens, rows_for
from worker_svc.engine.vllm.coupled_scores import coupled_scores, signed64

VOCAB = 1024
KINDS = (
    Sampling(),
    Sampling(0.8, seed=5),
    Sampling(1.0, top_p=0.9, seed=2**64 - 3),
    Sampling(0.7, top_k=20, seed=2**63),
    Sampling(1.0, min_p=0.05, seed=77),
    Sampling(1.3, top_k=50, top_p=0.8, min_p=0.01, seed=1),
    Sampling(2.0, top_k=VOCAB, seed=9),
)


def settings_of(kinds: list[Sampling]) -> tuple[torch.Tensor, torch.Tensor]:
    floats = torch.tensor([[one.temperature, one.top_p, one.min_p] for one in kinds])
    return floats, torch.tensor([[one.top_k or VOCAB, signed64(one.seed)] for one in kinds])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_choice_is_that_of_sampling_in_every_row(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = Noise(VOCAB)
    kinds = [one for one in KINDS for _ in range(5)]
    for first in (0, 3, 1000, 2**31):
        logits = (torch.randn(len(kinds), VOCAB, generator=generator) * 3).to(dtype)
        positions = [first + at % 5 for at in range(len(kinds))]
        keys = [counter.row_key(one.seed, at) for one, at in zip(kinds, positions, strict=True)]
        expected = choose_tokens(logits, rows_for(kinds, VOCAB, "cpu"), noise.gumbel(keys))

        scores = coupled_scores(
            logits, *settings_of(kinds), torch.tensor(positions), weyl_of(VOCAB, "cpu"), truncates=True
        )

        assert scores.argmax(-1).tolist() == expected.tolist()


def test_masked_tokens_stay_masked_and_greedy_rows_stay_as_they_are() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[:, 5:] = -torch.inf
    kinds = [Sampling(), Sampling(1.5, top_p=0.99, seed=3)]
    scores = coupled_scores(
        logits, *settings_of(kinds), torch.tensor([0, 0]), weyl_of(VOCAB, "cpu"), truncates=True
    )

    assert torch.equal(scores[0], logits[0])
    assert scores[1].argmax() < 5
    assert scores[1, 5:].eq(-torch.inf).all()


def test_without_truncation_the_scores_are_all_there() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    scores = coupled_scores(
        logits,
        *settings_of([Sampling(1.0, seed=8)]),
        torch.tensor([17]),
        weyl_of(VOCAB, "cpu"),
        truncates=False,
    )
    expected = logits + Noise(VOCAB).gumbel([counter.row_key(8, 17)])

    assert torch.allclose(scores, expected, atol=1e-4)
