"""Fixtures of the tests that need an environment with vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def head_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of the EAGLE head of a method, and trains it first if needed:
    that takes a minute, and LAPS_SD_TEST_VLLM_HEADS names a folder that keeps the heads.
    """
    kept = os.environ.get("LAPS_SD_TEST_VLLM_HEADS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("heads")

    def head(method: str) -> Path:
        if not (folder / method / "config.json").exists():
            from tests.vllm.heads import train  # needs torch

            train(method, folder / method)
        return folder / method

    return head
