"""Tensor parallelism: the engine of a worker is one process, and the ranks are processes of vLLM's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

from tests.vllm.one_core import ENVIRONMENT, PAIR, cpu_only, mixed
from tests.worker.drive import finish_all, rotate
from worker_svc.demo import DRAFT_DIR, TARGET_DIR
from worker_svc.engine.interface import DeviceFailed, ModelError, Sampling
from worker_svc.engine.load import load_engine as load_torch
from worker_svc.engine.options import LoadOptions
from worker_svc.engine.vllm.engine import VllmEngine
from worker_svc.engine.vllm.loading import load_core, load_engine

pytestmark = [pytest.mark.timeout(900), cpu_only]
COUNT = 8
TWO_RANKS = replace(
    PAIR,
    sampling="own",
    arguments={**PAIR.arguments, "enforce_eager": True, "tensor_parallel_size": 2},
)


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        # A fork of a process in which torch has computed may stand still.
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        engine, _ = load_engine(TWO_RANKS)
        yield engine
        engine._core.shutdown()


def test_two_ranks_generate_what_one_process_does(engine: VllmEngine) -> None:
    specs = mixed(COUNT, kinds=(Sampling(),))
    options = LoadOptions(slots=COUNT, max_length=PAIR.max_length, dtype="float32")
    expected, *_ = finish_all(load_torch(TARGET_DIR, DRAFT_DIR, options), specs)

    texts, _, reports = finish_all(engine, specs, rotate("keep"))

    assert texts == expected
    assert sum(report.accepted for report in reports) > sum(report.drafted for report in reports) // 6


def test_the_coupling_needs_one_process() -> None:
    with pytest.raises(ModelError, match="set LAPS_SD_VLLM_SAMPLING=own"):
        load_core(replace(TWO_RANKS, sampling="coupled"))


def test_a_rank_that_dies_ends_the_engine(engine: VllmEngine) -> None:
    """Its process then ends, and with it the other ranks. This is the last test with these ranks."""
    specs = mixed(COUNT, kinds=(Sampling(),))
    names = [one.request_id for one in specs]
    for one in specs:
        engine.add(one)
    engine.round(names)
    os.kill(engine._core.model_executor.workers[1].proc.pid, signal.SIGKILL)

    for _ in range(2):
        with pytest.raises(DeviceFailed, match="a step of vLLM failed"):
            for _ in range(40):
                engine.round(names)
