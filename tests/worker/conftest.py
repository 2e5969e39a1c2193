"""Fixtures of the worker's tests. The device is taken from LAPS_SD_TEST_DEVICE (default: cpu)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def device() -> str:
    return os.environ.get("LAPS_SD_TEST_DEVICE", "cpu")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: bits and times are those of one thread, on any machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["kernels", "torch"])
def by_kernels_and_by_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Test each user of this fixture twice: with the kernels in C, and with torch's operators, which are used
    where the kernels are not supported.
    """
    from worker_svc.engine.cpu import kernels

    if request.param == "kernels" and not kernels.USABLE:
        pytest.skip("no AVX2, or built without a C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "USABLE", request.param == "kernels")
        yield


@pytest.fixture(params=["AVX-512 BF16", "AVX-512", "AVX2"])
def each_width(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test for each width of vectors that this machine has."""
    from worker_svc.engine.cpu import kernels

    widths = {"AVX-512 BF16": kernels.AVX512_BF16, "AVX-512": kernels.AVX512, "AVX2": kernels.AVX2}
    if kernels._kernels.use(widths[request.param]) < widths[request.param]:
        pytest.skip("not on this machine")
    yield
    kernels._kernels.use(kernels.AMX)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write a tiny random target, and a draft that agrees with it about half of the time."""
    from tests.worker.pairs import llama_config, write_draft_of, write_model

    root = tmp_path_factory.mktemp("pair")
    target = write_model(root / "target", llama_config(), seed=0)
    return target, write_draft_of(target, root / "draft", noise=0.25, seed=1)
