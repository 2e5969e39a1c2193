"""LAPS-SD inside vLLM: a scheduler class for `vllm serve`, and the parts that its worker engine shares.

`vllm serve MODEL --scheduler-cls laps_vllm.LapsScheduler`; docs/vllm.md is the user's page.

This file imports the scheduler only where it is used: a worker uses `laps_vllm.pausing` and must not import
the scheduling core with it.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `LapsScheduler`, which vLLM looks up here by its name."""
    if name != "LapsScheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from laps_vllm.scheduler import LapsScheduler

    return LapsScheduler
