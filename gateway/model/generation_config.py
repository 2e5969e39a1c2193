"""Sampling parameters that a model's generation_config.json recommends: the defaults of requests that set none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laps_sd.contract.sampling import BOUNDS
from laps_sd.v1.inference_pb2 import SamplingParams

__all__ = ["recommended"]

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The fields that vLLM reads too, besides the length limit."""


def recommended(config: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters in a generation_config.json; those that are absent or null stay absent.

    Raises ValueError with a text that begins with the field's name.
    """
    found = SamplingParams()
    for name in NAMES:
        value = config.get(name)
        if value is None:
            continue
        bounds = BOUNDS[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in bounds:
            raise ValueError(f"{name} {bounds}, got {value!r:.40}")
        setattr(found, name, int(value) if name == "top_k" else float(value))
    longest = config.get("max_new_tokens")
    if longest is not None:
        if isinstance(longest, bool) or not isinstance(longest, int) or not 1 <= longest < 2**31:
            raise ValueError(f"max_new_tokens must be a whole number above 0, got {longest!r:.40}")
        found.max_tokens = longest
    return found
