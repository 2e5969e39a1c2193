"""The setting LAPS_SD_VLLM_ARGS: arguments of vLLM as a JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from worker_svc.engine.vllm.options import RESERVED

__all__ = ["arguments_of", "problems_of"]

MAX_CHARACTERS = 16_384
"""Far more than a configuration of vLLM needs, and little enough for an environment variable."""


def arguments_of(text: str | None) -> dict[str, Any]:
    """Return the arguments of a text without problems."""
    arguments: dict[str, Any] = json.loads(text) if text else {}
    return arguments


def problems_of(text: str | None) -> Iterator[str]:
    """Yield a sentence for each problem of a text."""
    if not text:
        return
    if len(text) > MAX_CHARACTERS:
        yield f"LAPS_SD_VLLM_ARGS must have at most {MAX_CHARACTERS} characters, got {len(text)}."
        return
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        yield f"LAPS_SD_VLLM_ARGS must be a JSON object: {error}."
        return
    if not isinstance(arguments, dict):
        yield 'LAPS_SD_VLLM_ARGS must be a JSON object, such as {"tensor_parallel_size": 2}.'
        return
    for name in sorted(RESERVED.keys() & arguments.keys()):
        yield f"LAPS_SD_VLLM_ARGS must not have {name!r}: {RESERVED[name]}."
    speculative = arguments.get("speculative_config")
    if speculative is not None and not isinstance(speculative, dict):
        yield "LAPS_SD_VLLM_ARGS has a 'speculative_config' that is not an object."
    model = arguments.get("model")
    if model is not None and not isinstance(model, str):
        yield "LAPS_SD_VLLM_ARGS has a 'model' that is not a string."
