"""The facts that a worker logs: the models, what computes them and why, and the room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from tests.worker.pairs import VOCAB, llama_config, load_pair, write_model
from tests.worker.test_load import SMALL
from worker_svc.engine.cpu import kernels
from worker_svc.engine.facts import stored_parameters
from worker_svc.engine.models.model import PackedModel

DEMO = Path(__file__).parents[2] / "worker_svc" / "demo"


def test_the_demo_pair_says_what_it_is_and_how_it_runs() -> None:
    model, engine, room = load_pair(
        DEMO / "target", DEMO / "draft", slots=2, max_length=256, draft_len=2
    ).facts

    assert model == (
        "model: target (LlamaForCausalLM, 4.7 M parameters), draft (LlamaForCausalLM, 328.1 k parameters), float32"
    )
    assert engine.startswith("engine: cpu, 1 thread, float32; ")
    assert ("all layers by the kernels in C" in engine) is kernels.USABLE
    assert re.search(
        r"; weights are read at \d+\.\d GB/s; draft tokens: the draft model or prompt lookup; equal seeds",
        engine,
    )
    assert room.startswith("room: 256 tokens of context, 2 slots, KV for 544 tokens (34 blocks of 16, ")
    assert room.endswith("): 2.1 whole contexts")


def test_a_model_without_the_short_path_says_what_falls_back_and_why(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=0, eos_token_id=1
    )
    _, engine, _ = load_pair(
        write_model(tmp_path, config, seed=2), slots=2, max_length=128, drafter="lookup", draft_len=2
    ).facts

    assert "by transformers, since GPT2LMHeadModel has no short forward here" in engine
    assert ("attention by the kernels in C" in engine) is kernels.USABLE
    assert "draft tokens: prompt lookup" in engine


def test_metrics_name_what_computes_the_rounds(pair: tuple[Path, Path], tmp_path: Path) -> None:
    by_kernels = load_pair(pair[0], max_length=64, drafter="none").computed_by
    windowed = transformers.MistralConfig(**SMALL, sliding_window=16)
    by_torch = load_pair(
        write_model(tmp_path / "a", windowed, seed=2), max_length=64, drafter="none"
    ).computed_by
    experts = transformers.Qwen2MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                          shared_expert_intermediate_size=32)  # fmt: skip
    mixed = load_pair(write_model(tmp_path / "b", experts, seed=2), max_length=64, drafter="none").computed_by

    usable = kernels.USABLE
    assert by_kernels[:3] == ("all_in_c" if usable else "torch", "float32", 1)
    assert by_torch[:3] == ("torch", "float32", 1)
    assert mixed[:3] == ("attention_in_c" if usable else "torch", "float32", 1)
    assert min(by_kernels.weight_bytes_per_s, by_torch.weight_bytes_per_s) > 0
    assert mixed.weight_bytes_per_s == 0, "a row reads a part of the experts"


def test_a_round_reads_all_weights_but_those_of_an_embedding(tmp_path: Path) -> None:
    sizes = {}
    for tied in (False, True):
        directory = write_model(tmp_path / str(tied), llama_config(tie_word_embeddings=tied), seed=0)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        packed = PackedModel(model, role="target", max_length=64, deterministic=None)
        sizes[tied] = (packed.bytes_read, 4 * model.num_parameters())
    embedding = 4 * VOCAB * 64
    assert sizes[True][0] == sizes[True][1]
    assert sizes[False][0] == sizes[False][1] - embedding


def test_kernels_say_why_they_do_not_serve_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BUILT", True)
    monkeypatch.setattr(kernels, "USABLE", True)
    cpu = torch.device("cpu")
    assert kernels.why_not(cpu, torch.float32, 64) == ""
    assert "not in float16" in kernels.why_not(cpu, torch.float16, 64)
    assert "a head has 24" in kernels.why_not(cpu, torch.float32, 24)
    assert "for CPUs" in kernels.why_not(torch.device("meta"), torch.float32, 64)
    monkeypatch.setattr(kernels, "USABLE", False)
    assert "no AVX2" in kernels.why_not(cpu, torch.float32, 64)
    monkeypatch.setattr(kernels, "BUILT", False)
    monkeypatch.setattr(kernels, "MISSED", True)
    assert "without a C compiler" in kernels.why_not(cpu, torch.float32, 64)


def test_the_number_of_weights_is_in_the_headers_of_the_files(tmp_path: Path) -> None:
    directory = write_model(tmp_path, transformers.Qwen3Config(**SMALL, head_dim=32), seed=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)

    assert stored_parameters(directory) == model.num_parameters()
    assert stored_parameters(tmp_path / "nowhere") is None
