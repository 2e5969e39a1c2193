"""LoRA adapters of the engine over vLLM: each request has the text of the model that its adapter makes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

import torch
from safetensors.torch import load_file, save_file

from tests.vllm.one_core import ENVIRONMENT, PAIR, Texts, cpu_only, mixed
from tests.worker.drive import finish_all, rotate
from worker_svc.demo import DRAFT_DIR, TARGET_DIR
from worker_svc.engine.interface import ModelError, Specification
from worker_svc.engine.load import load_engine as load_torch
from worker_svc.engine.options import LoadOptions
from worker_svc.engine.vllm.adapters import arguments_for, identity
from worker_svc.engine.vllm.engine import VllmEngine
from worker_svc.engine.vllm.loading import load_engine

pytestmark = [pytest.mark.timeout(900), cpu_only]
RANK = 4
NAMES = ("", "red", "blue")
"""Adapters of the requests, in turn; empty: none."""


def write_adapter(directory: Path, seed: int, *, rank: int = RANK) -> Path:
    """Write random weights for the projections of attention and MLP; return the directory."""
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in load_file(TARGET_DIR / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=random)
            weights[f"{prefix}.lora_B.weight"] = 0.02 * torch.randn(weight.shape[0], rank, generator=random)
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "target_modules": [f"{one}_proj" for one in ("q", "k", "v", "o", "gate", "up", "down")],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged(directory: Path, adapter: Path) -> Path:
    """Write the target with an adapter in its weights; return the directory."""
    shutil.copytree(TARGET_DIR, directory)
    weights, low_rank = (
        load_file(TARGET_DIR / "model.safetensors"),
        load_file(adapter / "adapter_model.safetensors"),
    )
    for name in weights:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if (down := low_rank.get(f"{prefix}.lora_A.weight")) is not None:
            weights[name] = weights[name] + (low_rank[f"{prefix}.lora_B.weight"] @ down).to(
                weights[name].dtype
            )
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, seed) for seed, name in enumerate(NAMES[1:])}


@pytest.fixture(scope="module")
def engine(adapters: dict[str, Path]) -> Iterator[VllmEngine]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield load_engine(replace(PAIR, adapters=adapters))[0]


def requests() -> list[Specification]:
    """Return requests of all adapters, beside each other, with the salts that a gateway gives them."""
    return [replace(one, adapter=NAMES[at % 3], cache_salt=NAMES[at % 3]) for at, one in enumerate(mixed(18))]


@pytest.fixture(scope="module")
def expected(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """Return the texts of the torch engine with the models that the adapters make."""
    folder = tmp_path_factory.mktemp("merged")
    options = LoadOptions(slots=20, max_length=512, max_draft_len=4, draft_len=4)
    texts: Texts = {}
    for name in NAMES:
        target = merged(folder / name, adapters[name]) if name else TARGET_DIR
        own = [replace(one, adapter="", cache_salt="") for one in requests() if one.adapter == name]
        texts |= finish_all(load_torch(target, DRAFT_DIR, options), own)[0]
    return texts


@pytest.fixture(scope="module")
def texts(engine: VllmEngine) -> Texts:
    """Return the texts of all requests at once."""
    found: Texts = finish_all(engine, requests())[0]
    return found


def test_the_adapters_change_the_text(expected: Texts, engine: VllmEngine) -> None:
    plain = finish_all(engine, [replace(one, adapter="", cache_salt="") for one in requests()])[0]

    changed = [one.adapter for one in requests() if expected[one.request_id] != plain[one.request_id]]
    assert {*changed} == {"red", "blue"}
    assert len(changed) > 6


def test_each_request_has_the_text_of_its_adapter(texts: Texts, expected: Texts) -> None:
    """Those without an adapter have the text of the torch engine; the others up to arithmetic, since the weights of an
    adapter are not added to the target's.
    """
    equal = [one.adapter for one in requests() if texts[one.request_id] == expected[one.request_id]]

    assert equal.count("") == 6
    assert equal.count("red") >= 4
    assert equal.count("blue") >= 3
    assert all(texts[one.request_id][:5] == expected[one.request_id][:5] for one in requests())


def test_the_text_does_not_depend_on_evictions_or_crashes(engine: VllmEngine, texts: Texts) -> None:
    assert finish_all(engine, requests(), rotate("evict"))[0] == texts

    later = [replace(one, committed_ids=tuple(texts[one.request_id][:7])) for one in requests()]
    assert finish_all(engine, later)[0] == texts


def test_an_unknown_adapter_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(ValueError, match=r"adapter 'green' is not among .* \(LAPS_SD_ADAPTERS\): blue, red"):
        engine.add(replace(requests()[0], adapter="green"))


def test_workers_with_other_adapters_have_another_fingerprint(
    adapters: dict[str, Path], tmp_path: Path
) -> None:
    other = write_adapter(tmp_path / "other", seed=7)

    assert identity(adapters) == identity(dict(reversed(adapters.items())))
    assert identity(adapters) != identity({**adapters, "red": other})


def test_a_broken_adapter_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    too_large = write_adapter(tmp_path / "large", seed=1, rank=513)

    with pytest.raises(ModelError, match=r"the adapter 'red': .*adapter_config.json cannot be read"):
        arguments_for({"red": tmp_path / "empty"}, on_cpu=True)
    with pytest.raises(ModelError, match="the adapter 'red' has rank 513, and vLLM takes at most 512"):
        arguments_for({"red": too_large}, on_cpu=True)


def test_a_rank_is_rounded_up_to_one_that_vllm_has(adapters: dict[str, Path]) -> None:
    assert arguments_for(adapters, on_cpu=False) == {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    assert arguments_for({}, on_cpu=True) == {}
