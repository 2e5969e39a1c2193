"""The names of vLLM that a worker uses in addition to those of the scheduler, and the check of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from laps_vllm.versions import USED, VersionError
from worker_svc.engine.vllm import names
from worker_svc.engine.vllm.names import check_engine_names

FOLDER = Path(names.__file__).parent


def test_this_vllm_has_them() -> None:
    check_engine_names("9.9", first_runner=True)


def test_a_vllm_that_lacks_what_the_engine_uses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(EngineCore, "post_step")
    monkeypatch.setattr(GPUModelRunner, "_sample", check_engine_names)

    with pytest.raises(VersionError) as caught:
        check_engine_names("9.9", first_runner=True)
    assert str(caught.value) == (
        "vLLM 9.9 has changed what LAPS-SD uses: EngineCore.post_step(model_executed), "
        "GPUModelRunner._sample(logits, spec_decode_metadata)"
    )


def test_all_that_is_used_of_a_request_is_looked_up() -> None:
    used = {
        one.attr
        for file in FOLDER.glob("*.py")
        for one in ast.walk(ast.parse(file.read_text()))
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "request"
    }
    of_request = {name for owner, found in names._ATTRIBUTES if owner is Request for name in found}

    assert used <= of_request | set(USED["Request"])
