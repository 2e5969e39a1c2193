"""The logits processor for vLLM's second model runner, which a CPU cannot run: its choices, place by place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

import numpy as np
import torch
from vllm.exceptions import VLLMValidationError
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor.loader import (
    build_custom_logits_processors_params_validator,
)

from tests.worker.test_coupled_scores import KINDS, VOCAB
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.engine.sampling import counter
from worker_svc.engine.sampling.noise import Noise
from worker_svc.engine.sampling.sampling import choose_tokens, rows_for
from worker_svc.engine.vllm.coupled_noise import PATH, CoupledNoise
from worker_svc.engine.vllm.parameters import Rules, TokenChooser

RULES = Rules(
    TokenChooser.PROCESSOR, second_runner=True, speculates=True, on_cpu=False, version="0.32.0", eos_ids=[2]
)
PLACES = 10


def request(sampling: Sampling, prompt: int, **more: Any) -> Any:
    return RULES.parameters(Specification("a", (5,) * prompt, (), sampling, 40, **more))


def context(places: list[int], positions: list[int]) -> LogitsContext:
    index = torch.tensor(places, dtype=torch.int32)
    return LogitsContext(
        expanded_idx_mapping=index,
        idx_mapping=index.unique(),
        idx_mapping_np=np.unique(np.array(places)),
        expanded_local_pos=torch.zeros_like(index),
        input_ids=torch.zeros_like(index),
        pos=torch.tensor(positions),
        seq_lens_upper_bound_np=np.zeros(len(places)),
    )


def processor() -> CoupledNoise:
    state = SimpleNamespace(device=torch.device("cpu"), max_num_reqs=PLACES, vocab_size=VOCAB)
    return CoupledNoise(None, state)


def test_a_row_for_each_draft_token_chooses_at_its_position() -> None:
    """Requests at their places, in another order in the batch, each with a prompt of another length."""
    made, noise = processor(), Noise(VOCAB)
    for place, sampling in enumerate(KINDS):
        assert made.add_request(place, request(sampling, 10 + place)) is (sampling.temperature > 0)
    made.apply_staged_writes()
    generator = torch.Generator().manual_seed(0)
    for output in (0, 7, 300):
        rows = [(place, output + at) for place in reversed(range(len(KINDS))) for at in range(5)]
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 3
        kinds = [KINDS[place] for place, _ in rows]
        keys = [counter.row_key(KINDS[place].seed, position) for place, position in rows]
        expected = choose_tokens(logits, rows_for(kinds, VOCAB, "cpu"), noise.gumbel(keys))

        # The row of the first output token is at the last token of the prompt.
        positions = [9 + place + position for place, position in rows]
        chosen = made.apply(logits.clone(), context([place for place, _ in rows], positions)).argmax(-1)

        assert chosen.tolist() == expected.tolist()


def test_a_place_is_used_again() -> None:
    made = processor()
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    made.add_request(3, request(Sampling(1.0, top_k=1, seed=1), 5))
    made.add_request(3, request(Sampling(), 5))
    made.apply_staged_writes()

    assert torch.equal(made.apply(logits.clone(), context([3], [4])), logits)


def test_vllm_finds_it_by_its_name_and_checks_requests() -> None:
    check = build_custom_logits_processors_params_validator([PATH])

    check(request(Sampling(0.7, seed=2**64 - 1), 5))
    wrong = request(Sampling(0.7), 5)
    wrong.extra_args = {"laps_sd": [1.0]}
    with pytest.raises(VLLMValidationError, match="laps_sd must be six numbers"):
        check(wrong)


def test_vllm_applies_bias_and_penalties_and_counts_committed_tokens_itself() -> None:
    """Its second runner takes committed tokens as output, so that nothing is left out of max_tokens."""
    sampling = Sampling(0.7, presence_penalty=1.0, repetition_penalty=1.2, logit_bias=((4, 2.0),))
    made = RULES.parameters(Specification("a", (5, 6), (7, 8), sampling, 40, logprobs=3))

    assert (made.temperature, made.presence_penalty, made.repetition_penalty) == (0.0, 1.0, 1.2)
    assert (made.logit_bias, made.max_tokens, made.logprobs) == ({4: 2.0}, 40, 3)
    assert made.extra_args == {"laps_sd": [0.7, 1.0, 0, 0.0, 0, 2]}
    RULES.check(Specification("a", (5, 6), (7, 8), sampling, 40))
