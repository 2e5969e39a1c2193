"""Hints of a request: `vllm_xargs` of the OpenAI API, which vLLM passes on as `SamplingParams.extra_args`.

A scheduler cannot refuse a request, so a hint out of bounds is ignored, and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["MAX_CLASS_CHARACTERS", "MAX_EXPECTED_TOKENS", "Hints", "hints_of"]

MAX_CLASS_CHARACTERS = 64
"""The same bound as in a gateway of LAPS-SD."""
MAX_EXPECTED_TOKENS = 2**31 - 1


class Hints(NamedTuple):
    """Hints of a client about a request, within bounds."""

    workload_class: str
    """Kind of request, whose lengths and acceptance are learned together; empty: none given."""
    expected_output_tokens: int | None
    invalid: tuple[str, ...]
    """Names of the hints that were ignored."""


def hints_of(extra_args: Mapping[str, Any] | None) -> Hints:
    """Return the hints in `extra_args`; others in there have no meaning here."""
    extra = extra_args or {}
    invalid = []
    workload_class = extra.get("workload_class", "")
    if not isinstance(workload_class, str) or len(workload_class) > MAX_CLASS_CHARACTERS:
        workload_class = ""
        invalid.append("workload_class")
    expected = extra.get("expected_output_tokens")
    if expected is not None and not _is_count(expected):
        expected = None
        invalid.append("expected_output_tokens")
    return Hints(workload_class, expected, tuple(invalid))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_EXPECTED_TOKENS
