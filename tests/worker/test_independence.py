"""Deterministic mode, bit by bit: a row's logits do not depend on what else is computed, in sizes that real
models have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config

from tests.worker.pairs import llama_config, write_model
from worker_svc.engine.cache.kv import KV_TILE
from worker_svc.engine.models.linears import LinearStore
from worker_svc.engine.models.load import load_packed
from worker_svc.engine.models.model import PackedModel
from worker_svc.engine.models.plan import Piece
from worker_svc.engine.models.segments import GRANULE, exact_spans

LENGTH = 600  # tokens of the text that is computed in many ways; crosses one tile of keys


@pytest.fixture(scope="module", params=["fused", "through transformers"])
def model(
    request: pytest.FixtureRequest,
    by_kernels_and_by_torch: None,
    tmp_path_factory: pytest.TempPathFactory,
    device: str,
) -> PackedModel:
    if device != "cpu":
        pytest.skip("elsewhere there is no deterministic mode")
    directory = tmp_path_factory.mktemp("independence")
    config = llama_config(hidden_size=256, intermediate_size=704, vocab_size=1024, num_hidden_layers=2)
    write_model(directory, config, seed=0, sharpen=2.0)
    packed = load_packed(
        directory,
        role="target",
        dtype=torch.float32,
        device=torch.device(device),
        max_length=1024,
        deterministic=True,
        fused=request.param == "fused",
    )
    packed.attach(packed.new_pool(blocks=200, block_size=16, region_tokens=512))
    return packed


def text(model: PackedModel, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1024, (LENGTH,), generator=generator).tolist()


@torch.inference_mode()
def logits_in_steps(model: PackedModel, steps: list[list[tuple[int, int]]], watched: int) -> torch.Tensor:
    """Feed text number i by (i, tokens) per step, all of a step in one forward; return logits of every token
    of text `watched`.
    """
    texts = {i for step in steps for i, _ in step}
    places = {i: model.pool.new_table() for i in texts}
    blocks = -(-LENGTH // 16)
    model.pool.hold([(place, blocks, blocks) for place in places.values()])
    out = []
    for step in steps:
        pieces = [Piece(places[i], places[i].length, count) for i, count in step]
        plan = model.planner.plan(pieces)
        ids = torch.zeros(plan.total, dtype=torch.int64, device=model.device)
        for (i, count), row in zip(step, plan.first_row, strict=True):
            start = places[i].length
            ids[row : row + count] = torch.tensor(text(model, i)[start : start + count], device=model.device)
        rows = [
            plan.first_row[at] + n for at, (i, count) in enumerate(step) if i == watched for n in range(count)
        ]
        logits = model.forward(ids, plan, torch.tensor(rows or [0], device=model.device))
        if rows:
            out.append(logits)
        for i, count in step:
            places[i].length += count
    for place in places.values():
        model.pool.release(place)
    return torch.cat(out)


def test_logits_do_not_depend_on_chunks_or_neighbours(model: PackedModel) -> None:
    """The same 60 tokens, and then 540 more, in one go, in chunks, alone, and with company of other lengths."""
    whole = logits_in_steps(model, [[(0, LENGTH)]], 0)
    for steps in (
        [[(0, 1)]] * 20 + [[(0, 3)]] * 10 + [[(0, 550)]],
        [[(0, 64)], [(0, 192)], [(0, 1)], [(0, 2)], [(0, 5)], [(0, 336)]],
        [[(1, 30), (0, 5)], [(0, 5), (1, 1), (2, 7)], [(0, 190), (1, 5), (2, 5)], [(2, 100), (0, 1), (1, 1)], [(0, 399), (2, 5)]],
        [[(0, 250)], *([[(0, 2), (1, 2)]] * 10), [(0, 330)]],
        # Every length of the first tile, each with as few keys as is exact for it, and one that is always 25
        # tokens longer.
        [[(1, 25)], *([[(0, 1), (1, 1)]] * 520), [(0, 80)]],
        # Blocks of query rows that end with one or two: 32 rows are a block.
        [[(0, 17)], [(0, 33)], [(0, 65)], [(0, 98), (1, 17)], [(0, 1), (1, 1)], [(0, 193)], [(0, 193)]],
    ):  # fmt: skip
        assert torch.equal(logits_in_steps(model, steps, 0), whole)


def test_short_contexts_read_as_few_keys_as_is_exact(device: str) -> None:
    spans = exact_spans(group=2, kv_heads=2, size=64, dtype=torch.float32, device=torch.device(device))
    assert list(spans) == sorted(set(spans))
    assert spans[-1] == KV_TILE
    assert all(span % GRANULE == 0 for span in spans)


@pytest.mark.usefixtures("by_kernels_and_by_torch")
def test_a_layout_is_chosen_that_keeps_rows_independent() -> None:
    store = LinearStore(deterministic=True)
    small, large = (torch.randn(n, 256, generator=torch.Generator().manual_seed(n)) for n in (704, 6000))
    for weight in (small, large):
        layer = store.store(weight)
        product = layer or torch.nn.functional.linear
        if store.independent:
            x = torch.randn(300, 256)
            least = store.least_rows
            assert torch.equal(product(x)[:least], product(x[:least]))
            assert torch.allclose(product(x), x @ weight.t(), atol=1e-3)


def test_the_products_of_gpt2_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """Its layers have Conv1D, transformers' own form of a product."""
    config = GPT2Config(vocab_size=1024, n_positions=64, n_embd=768, n_layer=1, n_head=12)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model = load_packed(
            write_model(tmp_path, config, seed=0),
            role="target",
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_length=64,
            deterministic=True,
            fused=True,
        )
        model.attach(model.new_pool(blocks=9 * 38, block_size=16, region_tokens=16))
        alone = logits_in_steps(model, [[(0, 1)]], 0)
        for many in (5, 6, 7, 9):
            together = logits_in_steps(model, [[(i, 1) for i in reversed(range(many))]], 0)
            assert not model.exact or torch.equal(together, alone), many
    finally:
        torch.set_num_threads(threads)


def test_a_product_that_no_layout_was_chosen_for_counts_as_dependent() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16, 16))

    for deterministic in (False, True):
        store = LinearStore(deterministic=deterministic)
        store.apply(nn.Sequential(nn.Embedding(16, 16), nn.LayerNorm((2, 8)), nn.Linear(16, 16)))
        assert store.independent
        store.apply(nn.Sequential(Own()))
        assert store.independent is not deterministic
