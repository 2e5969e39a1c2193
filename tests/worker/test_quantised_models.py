"""Models whose weights are quantised when they are loaded: the text is that of plain decoding with the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.worker.dequantised import assert_text_of, dequantise, specifications
from tests.worker.drive import finish_all
from tests.worker.pairs import load_pair
from worker_svc.engine.cpu import kernels
from worker_svc.engine.cpu.quantised import Quantised, stacked
from worker_svc.engine.interface import ModelError
from worker_svc.engine.models import fused_llama
from worker_svc.engine.quantisation.linear import quantise_model

pytestmark = pytest.mark.skipif(not kernels.USABLE, reason="no AVX2, or no C compiler")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_model_quantised_at_loading_generates_what_its_dequantised_weights_do(
    quantization: Any, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    quantise_model(model, quantization)
    dequantise(model)
    model.save_pretrained(tmp_path)
    assert_text_of(tmp_path, *pair, quantization=quantization)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_text_of_quantised_weights_in_bfloat16_does_not_depend_on_the_batch_nor_on_drafts(
    quantization: str, pair: tuple[Path, Path]
) -> None:
    texts = []
    for slots, draft_len in ((1, 0), (8, 0), (8, 3)):
        engine = load_pair(
            *pair, dtype="bfloat16", deterministic=True, quantization=quantization, slots=slots,
            draft_len=draft_len, max_length=128, prefill_chunk=16,
        )  # fmt: skip
        assert "equal seeds give equal text" in engine.facts[1]
        texts.append(finish_all(engine, specifications())[0])
    assert texts[0] == texts[1] == texts[2]


def test_a_worker_says_that_its_weights_are_quantised(pair: tuple[Path, Path]) -> None:
    engine = load_pair(*pair, quantization="int4", max_length=64)
    assert engine.facts[0].endswith("float32, weights int4 in groups of 64 and int8 in groups of 64")
    assert (
        engine.facts[0].replace(", weights int4 in groups of 64 and int8 in groups of 64", "")
        == (
            load_pair(*pair, max_length=64).facts[0]  # the same number of parameters
        )
    )


def test_fingerprints_tell_quantised_models_apart(pair: tuple[Path, Path]) -> None:
    prints = [load_pair(pair[0], quantization=kind).fingerprint for kind in ("none", "int8", "int4", "int8")]
    assert prints[1] == prints[3]
    assert len(set(prints)) == 3


def test_quantised_weights_need_the_kernels(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "USABLE", False)
    with pytest.raises(ModelError, match=r"quantised weights need the kernels in C \(this CPU has no AVX2\)"):
        load_pair(pair[0], quantization="int8")


def test_the_check_at_loading_finds_rows_in_a_wrong_order(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reversed_(parts: list[Quantised]) -> Quantised:
        return stacked(parts[::-1])

    monkeypatch.setattr(fused_llama, "stacked", reversed_)
    with pytest.raises(ModelError, match="computes something else when packed"):
        load_pair(pair[0], quantization="int8")


def test_a_kernel_that_computes_something_else_is_not_used(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def damaged(weight: Quantised) -> torch.Tensor:
        return kernels_blocks(weight) ^ 1

    kernels_blocks = kernels.blocks
    monkeypatch.setattr(kernels, "blocks", damaged)
    assert "all layers by the kernels" not in load_pair(pair[0], quantization="int8").facts[1]
    assert "the kernels compute something else" in caplog.text
