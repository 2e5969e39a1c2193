"""The dtype of a model where the settings leave it open, and what it means for determinism and fingerprints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from laps_sd.service.model_dir import stored_dtype
from tests.worker.pairs import load_pair
from worker_svc.engine.cpu import kernels
from worker_svc.engine.models import dtypes
from worker_svc.engine.models.dtypes import dtype_for

CPU, CUDA = torch.device("cpu"), torch.device("meta")
DEMO = Path(__file__).parents[2] / "worker_svc" / "demo"


def directory_of(tmp_path: Path, text: str) -> Path:
    (tmp_path / "config.json").write_text(text)
    return tmp_path


@pytest.fixture
def no_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without instructions for bfloat16 and without AVX-512."""
    monkeypatch.setattr(kernels, "KIND", kernels.AVX2)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(dtypes, "_torch_has_it", lambda: False)


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ('{"dtype": "bfloat16"}', "bfloat16"),
        ('{"torch_dtype": "float16"}', "float16"),
        ('{"text_config": {"dtype": "bfloat16"}}', "bfloat16"),
        ("{}", "float32"),
        ('{"dtype": 3}', "float32"),
        ('{"text_config": 3}', "float32"),
        ("[]", "float32"),
        ("{", "float32"),
    ],
)
def test_the_dtype_of_a_model_is_that_of_its_config(text: str, stored: str, tmp_path: Path) -> None:
    assert stored_dtype(directory_of(tmp_path, text)) == stored
    assert stored_dtype(tmp_path / "nowhere") == "float32"


def test_auto_is_the_dtype_of_the_model_where_the_device_computes_in_it(
    tmp_path: Path, no_half: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(stored: str, device: torch.device) -> str:
        return dtype_for("auto", directory_of(tmp_path, json.dumps({"dtype": stored})), device)

    stored = ["float32", "bfloat16", "float16", "float8_e4m3fn"]
    assert [chosen(each, CUDA) for each in stored] == ["float32", "bfloat16", "float16", "float32"]
    assert [chosen(each, CPU) for each in stored] == ["float32"] * 4
    monkeypatch.setattr(kernels, "KIND", kernels.AVX512)
    assert [chosen(each, CPU) for each in stored] == ["float32", "bfloat16", "float32", "float32"]
    monkeypatch.setattr(kernels, "KIND", 0)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert chosen("bfloat16", CPU) == "bfloat16"


def test_a_dtype_that_is_set_is_taken_as_it_is(tmp_path: Path, no_half: None) -> None:
    directory = directory_of(tmp_path, '{"dtype": "float32"}')
    assert dtype_for("bfloat16", directory, CPU) == "bfloat16"
    with pytest.raises(ValueError, match="dtype must be auto, float32, bfloat16 or float16, not 'int8'"):
        dtype_for("int8", directory, CPU)


def test_the_demo_pair_is_computed_in_float32_everywhere() -> None:
    assert {stored_dtype(DEMO / role) for role in ("target", "draft")} == {"float32"}


def test_an_engine_with_auto_is_one_with_the_dtype_that_it_stands_for(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "KIND", kernels.AVX512_BF16)
    target = Path(shutil.copytree(pair[0], tmp_path / "target"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))

    auto = load_pair(target, pair[1], dtype="auto", max_length=64, draft_len=2)
    named = load_pair(target, pair[1], dtype="bfloat16", max_length=64, draft_len=2)

    assert auto.facts[0].endswith(", bfloat16")
    assert auto.fingerprint == named.fingerprint


def test_bfloat16_is_deterministic_by_default_where_the_kernels_compute_all(
    by_kernels_and_by_torch: None, pair: tuple[Path, Path]
) -> None:
    """Machines of both kinds share a pool: the fingerprint has what is set, not what follows from it."""
    by_kernels = kernels.multiply(torch.zeros((32, 32), dtype=torch.bfloat16))

    engine = load_pair(*pair, dtype="bfloat16", max_length=64, draft_len=2)

    assert ("equal seeds give equal text" in engine.facts[1]) is by_kernels
    assert ("the text may depend on the batch" in engine.facts[1]) is not by_kernels
    off = load_pair(*pair, dtype="bfloat16", deterministic=False, max_length=64, draft_len=2)
    assert "the text may depend on the batch" in off.facts[1]
    assert engine.fingerprint == off.fingerprint
