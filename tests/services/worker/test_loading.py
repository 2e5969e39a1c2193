"""The engine that the settings of a worker describe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from laps_sd.errors import StartupError
from laps_sd.service.config import load as load_settings
from laps_sd.service.cores import Cores
from worker_svc import loading
from worker_svc.engine.cpu import kernels
from worker_svc.engine.engine import SpeculativeEngine
from worker_svc.engine.interface import ModelError
from worker_svc.engine.vllm.options import VllmOptions
from worker_svc.loading import DEMO, load
from worker_svc.settings import WorkerSettings

DRAFT = str(DEMO / "draft")


def vllm(**values: Any) -> WorkerSettings:
    return load_settings(WorkerSettings, {"engine": "vllm", **values}, environ={})


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[VllmOptions]:
    """Return the options that reach the loading of vLLM, which is not here."""
    taken: list[VllmOptions] = []

    def load_engine(options: VllmOptions, _: Callable[[], None]) -> tuple[object, tuple[str, ...]]:
        taken.append(options)
        if options.slots == 7:
            raise ModelError("vLLM cannot load it: no")
        return object(), ("a fault",)

    module = ModuleType("worker_svc.engine.vllm.loading")
    module.load_engine = load_engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "worker_svc.engine.vllm.loading", module)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "1")
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "")  # whatever it was comes back at the end
    monkeypatch.delenv("VLLM_NO_USAGE_STATS")
    return taken


def test_vllm_sends_no_statistics_about_its_use_unless_told_to(
    loaded: list[VllmOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(vllm())
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"

    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    load(vllm())
    assert os.environ["VLLM_NO_USAGE_STATS"] == "0"


def test_vllm_gets_the_demo_pair_and_the_sizes(loaded: list[VllmOptions]) -> None:
    load(vllm(slots=3, kv_blocks=40, prefix_reuse_tokens=0, context_tokens=99))

    (options,) = loaded
    assert (options.model, options.slots, options.residents) == (DEMO / "target", 3, 12)
    assert (options.blocks, options.share_prefixes, options.max_length) == (40, False, 99)
    assert options.speculative == {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"draft_len": 2}, {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 2}),
        ({"max_draft_len": 3}, {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3}),
        ({"max_draft_len": 0}, None),
        ({"drafter": "none"}, None),
        (
            {"drafter": "lookup"},
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4},
        ),
        ({"target": DEMO / "target"}, None),
        ({"vllm_args": '{"speculative_config": {"method": "mtp"}}'}, {"method": "mtp"}),
        ({"vllm_args": '{"speculative_config": null}'}, None),
    ],
)
def test_speculation_is_that_of_the_settings_unless_the_arguments_have_it(
    loaded: list[VllmOptions], values: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    load(vllm(**values))

    assert loaded[0].speculative == expected


def test_a_model_may_be_named_among_the_arguments(loaded: list[VllmOptions]) -> None:
    load(vllm(vllm_args=f'{{"model": "{DEMO / "target"}", "quantization": "fp8"}}'))

    assert (loaded[0].model, loaded[0].arguments) == (DEMO / "target", {"quantization": "fp8"})
    with pytest.raises(StartupError, match="the 'model' of LAPS_SD_VLLM_ARGS must name a model directory"):
        load(vllm(vllm_args='{"model": "/no/such/folder"}'))


def test_adapters_are_directories(loaded: list[VllmOptions], tmp_path: Path) -> None:
    load(vllm(adapters=(f"sql={tmp_path}",)))

    assert loaded[0].adapters == {"sql": tmp_path}
    with pytest.raises(StartupError, match="no directory /no/such/folder: LAPS_SD_ADAPTERS must name"):
        load(vllm(adapters=("sql=/no/such/folder",)))


def test_a_model_that_cannot_be_served_is_one_sentence(loaded: list[VllmOptions]) -> None:
    with pytest.raises(StartupError, match=r"^The model cannot be served: vLLM cannot load it: no\.$"):
        load(vllm(slots=7))


def test_a_known_fault_is_logged(loaded: list[VllmOptions], capfd: pytest.CaptureFixture[str]) -> None:
    load(vllm())

    said = capfd.readouterr()
    assert "a fault" in said.out + said.err


def test_without_vllm_the_sentence_names_the_environment(
    loaded: list[VllmOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "worker_svc.engine.vllm.loading", None)
    with pytest.raises(StartupError, match=r"needs vLLM in the Python environment .* --worker-python"):
        load(vllm(target=Path(DEMO / "target")))


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"kv_blocks": 2**24, "block_size": 4096}, "can't allocate memory: you tried to allocate"),
        ({"kv_memory_bytes": 2**60, "block_size": 1}, "MemoryError"),
    ],
)
def test_kv_that_the_memory_cannot_hold_is_one_sentence(sizes: dict[str, int], reason: str) -> None:
    """No address space holds the pool, or even a byte for each block."""
    values = {"threads": 1, "drafter": "none", "length_probe": False, **sizes}
    settings = load_settings(WorkerSettings, values, environ={})
    with pytest.raises(StartupError) as refused:
        load(settings)
    sentence = str(refused.value)
    assert sentence.startswith("The device has no memory for the model pair and its KV (")
    assert reason in sentence
    assert "set a smaller LAPS_SD_KV_MEMORY_BYTES" in sentence
    assert "\n" not in sentence


def test_another_error_while_a_model_is_loaded_is_no_shortage_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("the kernel is wrong")

    monkeypatch.setattr("worker_svc.engine.load.load_engine", fails)
    with pytest.raises(RuntimeError, match="the kernel is wrong"):
        load(load_settings(WorkerSettings, {"threads": 1}, environ={}))


@pytest.mark.skipif(not kernels.USABLE, reason="no kernels")
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "engine: cpu, 3 threads, float32; all layers"),
        ({"threads": 2}, "engine: cpu, 2 threads, float32; all layers"),
        ({"threads": 1}, "engine: cpu, 1 thread, float32; all layers"),
        ({"pin_threads": True}, "engine: cpu, 3 threads on cores 0, 1, 2, float32; all layers"),
    ],
)
def test_a_worker_computes_with_as_many_threads_as_it_has_cores_and_says_so(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], words: str
) -> None:
    monkeypatch.setattr(loading, "usable_cores", lambda: Cores((0, 1, 2, 3, 4, 5), 3, 5.5))
    engine = load(load_settings(WorkerSettings, {"draft_len": 2, **values}, environ={}))
    kernels.use_threads(1)

    assert isinstance(engine, SpeculativeEngine)
    assert engine.facts[1].startswith(words)
    assert torch.get_num_threads() == 1, "all is computed by the kernels"


@pytest.mark.parametrize("pin_threads", [False, True])
def test_a_machine_may_have_more_cores_than_a_worker_uses(
    monkeypatch: pytest.MonkeyPatch, pin_threads: bool
) -> None:
    monkeypatch.setattr(loading, "usable_cores", lambda: Cores(tuple(range(768)), 384, 768.0))
    settings = load_settings(WorkerSettings, {"pin_threads": pin_threads}, environ={})
    kernels.use_threads(*loading._threads(settings))
    kernels.use_threads(1)


@pytest.mark.parametrize("engine", ["demo", "vllm"])
def test_more_threads_than_cpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, loaded: list[VllmOptions], engine: str
) -> None:
    monkeypatch.setattr(loading, "usable_cores", lambda: Cores((0, 1, 2, 3), 2, 2.5))
    settings = load_settings(WorkerSettings, {"engine": engine, "threads": 4}, environ={})
    with pytest.raises(
        StartupError, match="LAPS_SD_THREADS must be at most 3, the CPUs that this process may use, got 4"
    ):
        load(settings)
