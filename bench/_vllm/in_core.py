"""What the drivers share: requests for vLLM's engine core, outcomes of its model runner, names of texts."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any


def core_request(name: str, ids: Sequence[int], params: Any, *, priority: int = 0) -> Any:
    """Return a request for vLLM's engine core. `params`: its SamplingParams."""
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        name, list(ids), None, params, None, time.time(), None, None, None, priority=priority
    )


def model_output(names: list[str], sampled: list[list[int]]) -> Any:
    """Return what a model runner returns for a step: the tokens sampled for each request."""
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=sampled,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def digest(text: Sequence[int]) -> str:
    """Return a short name of a text, to compare texts by."""
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:16]
