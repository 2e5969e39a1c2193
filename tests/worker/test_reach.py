"""Layers that do not see the whole context: served as transformers computes them, or refused in one sentence."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import masking_utils

import worker_svc.engine.models.model as packed_model
from tests.worker.drive import finish_all
from tests.worker.pairs import VOCAB, load_pair, with_own_code, write_draft_of, write_model
from tests.worker.plain import MARGIN, PlainDecoder
from tests.worker.test_load import SMALL
from worker_svc.engine.cpu import kernels
from worker_svc.engine.interface import ModelError, Sampling, Specification
from worker_svc.engine.models.reach import FULL, Reach, reach_of
from worker_svc.engine.models.segments import Planner

LENGTH = 200
WINDOW = 24
DEEP = {**SMALL, "num_hidden_layers": 4}
SERVED = {
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=WINDOW),
    "phi3": transformers.Phi3Config(**SMALL, sliding_window=WINDOW),
    "qwen2, the second layer": transformers.Qwen2Config(**SMALL, sliding_window=WINDOW, use_sliding_window=True, max_window_layers=1),
    "gemma3": transformers.Gemma3TextConfig(**{**SMALL, "num_hidden_layers": 7}, head_dim=16, sliding_window=WINDOW),
    "cohere2": transformers.Cohere2Config(**DEEP, sliding_window=WINDOW),
    "olmo3": transformers.Olmo3Config(**DEEP, sliding_window=WINDOW),
    "llama4": transformers.Llama4TextConfig(**DEEP, num_local_experts=2, num_experts_per_tok=1, head_dim=16, intermediate_size_mlp=96,
                                            attention_chunk_size=WINDOW),
}  # fmt: skip


def visible(mask: Any, length: int) -> Reach | None:
    return reach_of(mask, length, torch.device("cpu"))


def test_reaches_are_read_from_the_masks_of_transformers() -> None:
    window = masking_utils.sliding_window_causal_mask_function
    none_padded = torch.zeros(1, dtype=torch.int64)

    assert visible(masking_utils.causal_mask_function, 500) == FULL
    assert visible(window(7), 500) == Reach(window=7)
    assert visible(window(1), 500) == Reach(window=1)
    assert visible(masking_utils.chunked_causal_mask_function(64, none_padded), 500) == Reach(chunk=64)


@pytest.mark.parametrize("length", [63, 64, 65])
def test_a_limit_is_one_for_longer_contexts_only(length: int) -> None:
    none_padded = torch.zeros(1, dtype=torch.int64)
    limited = length > 64

    window = visible(masking_utils.sliding_window_causal_mask_function(64), length)
    assert window == (Reach(window=64) if limited else FULL)
    chunk = visible(masking_utils.chunked_causal_mask_function(64, none_padded), length)
    assert chunk is not None and (chunk.limit == 64) is limited


@pytest.mark.parametrize(
    "mask",
    [
        masking_utils.bidirectional_mask_function,
        lambda _, __, q, kv: (kv <= q) & ((q - kv) % 2 == 0),
        lambda _, __, q, kv: (kv <= q) & ((kv < 4) | (kv > q - 64)),
        lambda _, __, q, kv: (kv <= q) & (kv > q - 64) & (kv // 100 == q // 100),
    ],
    ids=["later keys", "every other key", "first keys and a window", "window and chunk"],
)
def test_other_masks_have_no_reach(mask: Any) -> None:
    assert visible(mask, 500) is None


@pytest.mark.parametrize("name", SERVED)
def test_texts_beyond_a_window_are_those_of_plain_decoding(name: str, tmp_path: Path, device: str) -> None:
    """With drafts, ragged batches, and prefill in chunks, some of which begin after the first window."""
    target = write_model(tmp_path / "target", SERVED[name], seed=2, sharpen=2.0)
    draft = write_draft_of(target, tmp_path / "draft", noise=0.25, seed=1)
    engine = load_pair(
        target, draft, device=device, slots=3, max_length=LENGTH, draft_len=2, prefill_chunk=20
    )
    rng = random.Random(2)
    specs = [
        Specification(
            f"r{n}",
            tuple(rng.randrange(VOCAB) for _ in range(prompt)),
            (),
            Sampling(n % 2, seed=n),
            20,
            ignore_eos=True,
        )
        for n, prompt in enumerate((3, 19, 40, 90, 170))
    ]
    output, *_ = finish_all(engine, specs)
    decoder = PlainDecoder(str(target), device)
    for spec in specs:
        text = decoder.decode(spec)
        assert output[spec.request_id] == text.tokens or min(text.margins) < MARGIN


def test_contexts_that_a_window_covers_have_the_kernels(tmp_path: Path) -> None:
    directory = write_model(tmp_path, SERVED["mistral"], seed=0)

    _, within, _ = load_pair(directory, max_length=WINDOW, draft_len=2).facts
    _, beyond, _ = load_pair(directory, max_length=WINDOW + 1, draft_len=2).facts

    assert ("by the kernels in C" in within) is kernels.USABLE
    assert "torch's operators in place of the kernels in C" in beyond
    assert f"a sliding window of {WINDOW} tokens" in beyond


def test_the_self_check_finds_windows_that_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts are shorter than the window of the model."""
    directory = write_model(tmp_path, SERVED["mistral"], seed=0)
    assert packed_model.CHECKED < WINDOW

    def sees_all(*arguments: Any, reaches: tuple[Reach, ...], **others: Any) -> Planner:
        return Planner(*arguments, reaches=(FULL,) * len(reaches), **others)

    monkeypatch.setattr(packed_model, "Planner", sees_all)
    with pytest.raises(ModelError, match=f"in contexts of {WINDOW} tokens and more"):
        load_pair(directory, max_length=LENGTH, drafter="none")


def test_the_self_check_refuses_a_window_that_it_cannot_make_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_model(tmp_path, SERVED["mistral"], seed=0)
    monkeypatch.setattr(packed_model, "lengths_within", lambda *_: {})
    with pytest.raises(ModelError, match=f"sliding window of {WINDOW} tokens, which cannot be checked"):
        load_pair(directory, max_length=LENGTH, drafter="none")


def test_a_model_with_a_mask_of_its_own_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Its mask is causal in every text that a check could try, and the reach of longer ones is not known."""
    directory = with_own_code(
        pair[0],
        tmp_path / "own",
        first="import torch\n",
        methods="    def forward(self, input_ids, **others):\n"
        "        tokens = input_ids.shape[1]\n"
        "        mask = torch.ones((1, 1, tokens, tokens), dtype=torch.bool).tril().triu(-100)\n"
        "        return super().forward(input_ids, attention_mask=mask, **others)\n",
    )
    with pytest.raises(ModelError, match="hides keys by a mask of its own: use --engine vllm"):
        load_pair(directory, max_length=LENGTH, draft_len=2, trust_remote_code=True)
