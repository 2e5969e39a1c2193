"""Checkpoints of GPTQ, AWQ and GGUF: their layers are read exactly, the text is that of plain decoding with the dequantised
weights, and what cannot be read is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from tests.worker.dequantised import assert_text_of, dequantise
from tests.worker.packed import Packer, awq, gptq, write_gguf, write_packed
from tests.worker.pairs import VOCAB, load_pair, write_model
from worker_svc.engine.cpu import kernels
from worker_svc.engine.interface import ModelError
from worker_svc.engine.quantisation.checkpoint import load_quantised
from worker_svc.engine.quantisation.linear import QuantisedLinear

pytestmark = pytest.mark.skipif(not kernels.USABLE, reason="no AVX2, or no C compiler")

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
KEPT: dict[str, tuple[Packer, dict[str, Any]]] = {
    "gptq": (gptq(32), GPTQ),
    "gptq, zero points": (gptq(32, symmetric=False), GPTQ),
    "gptq, second version": (
        gptq(64, symmetric=False, stored_less=0),
        {**GPTQ, "checkpoint_format": "gptq_v2"},
    ),
    "gptq, one group": (gptq(-1), {**GPTQ, "group_size": -1}),
    "awq": (awq(32), AWQ),
}
DEQUANTISED: dict[str, tuple[Packer, dict[str, Any]]] = {
    "gptq, ordered inputs": (gptq(32, symmetric=False, order=True), {**GPTQ, "desc_act": True}),
    "gptq, 8 bits": (gptq(32, bits=8), {**GPTQ, "bits": 8}),
    "awq, small groups": (awq(16), AWQ),
}


@pytest.mark.parametrize("name", [*KEPT, *DEQUANTISED])
def test_layers_of_gptq_and_awq_are_read_exactly(name: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    packer, described = {**KEPT, **DEQUANTISED}[name]
    packed, dequantised = write_packed(pair[0], tmp_path, packer, described)
    model = load_quantised(packed, dtype=torch.float32, trust_remote_code=False)
    quantised = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert len(quantised) == (14 if name in KEPT else 0)
    dequantise(model)
    expected = AutoModelForCausalLM.from_pretrained(dequantised, dtype=torch.float32).state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", ["gptq, zero points", "awq", "gptq, ordered inputs"])
def test_a_gptq_or_awq_checkpoint_generates_what_its_dequantised_weights_do(
    name: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    packer, described = {**KEPT, **DEQUANTISED}[name]
    packed, dequantised = write_packed(pair[0], tmp_path, packer, described)
    assert_text_of(dequantised, packed, packed)


def test_stored_numbers_that_are_no_parameters_are_read_too(tmp_path: Path) -> None:
    """Gemma 4 scales the output of each layer by a buffer of the checkpoint."""
    config = Gemma4TextConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, global_head_dim=32, hidden_size_per_layer_input=0,
        max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    source = write_model(tmp_path / "source", config, seed=2)
    model = AutoModelForCausalLM.from_pretrained(source)
    for layer in model.model.layers:
        layer.layer_scalar.fill_(0.5)
    model.save_pretrained(source)
    packed, dequantised = write_packed(source, tmp_path, *KEPT["gptq"])
    assert_text_of(dequantised, packed)


def test_layers_that_do_not_fit_are_said_and_may_be_quantised_again(
    pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed, _ = write_packed(pair[0], tmp_path, *DEQUANTISED["gptq, ordered inputs"])
    engine = load_pair(packed, max_length=64)
    assert "weights int" not in engine.facts[0]
    assert "14 layers are served as torch.float32" in caplog.text
    assert "weights int8 in groups" in load_pair(packed, max_length=64, quantization="int8").facts[0]


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4), ("Q5_0", None), ("F16", None)])
def test_a_gguf_file_generates_what_its_dequantised_weights_do(
    kind: str, bits: int | None, pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("gguf")
    packed, dequantised = write_gguf(pair[0], tmp_path, kind)
    assert_text_of(dequantised, packed)
    facts = load_pair(packed, max_length=64).facts[0]
    assert (f"weights int{bits} in groups of 32" in facts) if bits else ("weights int" not in facts)
    assert ("weights of type Q5_0" in caplog.text) == (kind == "Q5_0")


REFUSED = {
    "three bits": ({**GPTQ, "bits": 3}, "gptq weights of 3 bits: 4 and 8 bits are served"),
    "another method": (
        {"quant_method": "fp8"},
        "quantised by 'fp8': of the methods in config.json, gptq and awq",
    ),
    "no method": ({}, "quantised by None"),
    "no object": ("int4", "no object"),
    "another layout": ({**AWQ, "version": "gemv"}, "version 'gemv'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_are_refused(name: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    described, expected = REFUSED[name]
    shutil.copytree(pair[0], tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": described}))
    with pytest.raises(ModelError, match=expected) as caught:
        load_pair(tmp_path / "model")
    assert "\n" not in str(caught.value)


DAMAGED = {
    "no zero points": (
        lambda tensors, name: tensors.pop(f"{name}.qzeros"),
        "lacks scales, qweight or qzeros in",
    ),
    "no norm": (lambda tensors, _: tensors.pop("model.norm.weight"), "lacks weights: model.norm.weight"),
    "fewer words": (
        lambda tensors, name: tensors.update({f"{name}.qweight": tensors[f"{name}.qweight"][1:].clone()}),
        r"has \(7, 64\) words and \(2, 64\) scales for 64 outputs of 64 inputs in",
    ),
    "groups that do not exist": (
        lambda tensors, name: tensors.update({f"{name}.g_idx": tensors[f"{name}.g_idx"] + 1}),
        "inputs in groups that do not exist",
    ),
    "scales of an activation": (
        lambda tensors, _: tensors.update({"model.layers.0.mlp.act.scales": torch.ones(128)}),
        r"scales that belong to no weight \(model.layers.0.mlp.act.scales\)",
    ),
    "another shape": (
        lambda tensors, _: tensors.update({"model.norm.weight": torch.ones(3)}),
        "weights of another shape: model.norm.weight",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_checkpoints_are_refused(name: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    damage, expected = DAMAGED[name]
    packed, _ = write_packed(pair[0], tmp_path, *KEPT["gptq"])
    tensors = load_file(packed / "model.safetensors")
    damage(tensors, "model.layers.1.self_attn.q_proj")
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=expected) as caught:
        load_pair(packed)
    assert "\n" not in str(caught.value)


def test_gguf_files_that_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "good").mkdir()
    packed, _ = write_gguf(pair[0], tmp_path / "good", "Q8_0")
    file, config = packed / "model.gguf", packed / "config.json"
    shutil.copy(file, packed / "other.gguf")
    with pytest.raises(ModelError, match="has 2 GGUF files, and one is served"):
        load_pair(packed)
    (packed / "other.gguf").unlink()
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    with pytest.raises(ModelError, match="do not go together"):
        load_pair(packed)
    config.write_text(json.dumps({**settings, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ModelError, match="is a gpt2: of GGUF files, llama, mistral, qwen2, qwen3 are served"):
        load_pair(packed)
    config.write_text(json.dumps(settings))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"is no GGUF file|cannot be loaded"):
        load_pair(packed)
