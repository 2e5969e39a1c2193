"""Hidden states that a forward copies out are those of transformers, for any decoder and on every path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.worker.pairs import VOCAB, llama_config, write_model
from tests.worker.test_load import GPT, SMALL
from worker_svc.engine.models.hidden import HiddenRows
from worker_svc.engine.models.load import load_packed
from worker_svc.engine.models.model import PackedModel
from worker_svc.engine.models.plan import Piece

CONFIGS = {
    "llama": llama_config(num_hidden_layers=4),
    "qwen3": transformers.Qwen3Config(**{**SMALL, "num_hidden_layers": 3}, head_dim=32),
    "gpt2": transformers.GPT2Config(**GPT),
    "opt": transformers.OPTConfig(**{**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "one layer": llama_config(num_hidden_layers=1),
}
TEXTS = (13, 5)  # tokens of two contexts


def text(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCAB, (TEXTS[number],), generator=generator).tolist()


def load(directory: Path, device: str, *, fused: bool, dtype: torch.dtype = torch.float32) -> PackedModel:
    packed = load_packed(
        directory,
        role="target",
        dtype=dtype,
        device=torch.device(device),
        max_length=64,
        deterministic=dtype == torch.float32,
        fused=fused,
    )
    packed.attach(packed.new_pool(blocks=16, block_size=8, region_tokens=64))
    return packed


@torch.inference_mode()
def forward(model: PackedModel, hidden: HiddenRows | None, at: list[tuple[int, int]]) -> torch.Tensor:
    """Prefill both texts in one forward, and return the logits of their ends. `at`: (text, position) of the rows that
    `hidden` is to have.
    """
    places = [model.pool.new_table() for _ in TEXTS]
    model.pool.hold([(place, 2, 2) for place in places])
    plan = model.planner.plan([Piece(place, 0, count) for place, count in zip(places, TEXTS, strict=True)])
    ids = torch.zeros(plan.total, dtype=torch.int64, device=model.device)
    for number, row in enumerate(plan.first_row):
        ids[row : row + TEXTS[number]] = torch.tensor(text(number), device=model.device)
    if hidden is not None:
        hidden.rows = [plan.first_row[number] + position for number, position in at]
    ends = [row + count - 1 for row, count in zip(plan.first_row, TEXTS, strict=True)]
    logits = model.forward(ids, plan, torch.tensor(ends, device=model.device), hidden)
    for place in places:
        model.pool.release(place)
    return logits


@torch.inference_mode()
def expected(directory: Path, layer: int, at: list[tuple[int, int]]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    states = [
        model(input_ids=torch.tensor([text(number)]), output_hidden_states=True).hidden_states[layer][0]
        for number in range(len(TEXTS))
    ]
    return torch.stack([states[number][position] for number, position in at])


@pytest.mark.usefixtures("by_kernels_and_by_torch")
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "transformers"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_hidden_states_are_those_of_transformers(
    config: PretrainedConfig, fused: bool, tmp_path: Path, device: str
) -> None:
    directory = write_model(tmp_path / "model", config, seed=0)
    model = load(directory, device, fused=fused)
    assert model.hidden_size == 64
    at = [(0, 12), (1, 4), (0, 0), (1, 4)]
    for layer in range(config.num_hidden_layers):
        hidden = HiddenRows(layer, [])
        logits = forward(model, hidden, at)
        found = torch.from_numpy(hidden.on_host())
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected(directory, layer, at), rtol=1e-4, atol=1e-4)
        assert torch.equal(logits, forward(model, None, at)), "copying changes no bit"


@pytest.mark.usefixtures("by_kernels_and_by_torch")
def test_hidden_states_in_half_precision_are_close(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", llama_config(num_hidden_layers=4), seed=0)
    model = load(directory, "cpu", fused=True, dtype=torch.bfloat16)
    at = [(0, 12), (1, 4)]
    hidden = HiddenRows(2, [])
    forward(model, hidden, at)
    right = expected(directory, 2, at)
    error = (torch.from_numpy(hidden.on_host()) - right).norm() / right.norm()
    assert error < 0.02


def test_a_hook_is_removed_after_the_forward(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", CONFIGS["gpt2"], seed=0)
    model = load(directory, "cpu", fused=True)
    hidden = HiddenRows(1, [])
    forward(model, hidden, [(0, 3)])
    before = hidden.states.clone()
    forward(model, HiddenRows(1, []), [(1, 2)])
    assert torch.equal(hidden.states, before)
