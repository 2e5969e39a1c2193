"""The fingerprint of an engine over vLLM: workers with equal ones give the same text, up to arithmetic."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worker_svc.engine.models.fingerprint import fingerprint as fingerprint_of
from worker_svc.engine.vllm.parameters import TokenChooser

__all__ = ["fingerprint"]

NOISE_VERSION = "vllm-gumbel-2"
"""Changes with the rule that chooses tokens."""


def fingerprint(
    config: Any,
    chooser: TokenChooser,
    eos_ids: Sequence[int],
    version: str,
    adapters: Sequence[tuple[str, str]] = (),
) -> str:
    """Return a hash of all that decides the text: model, vLLM, arithmetic, what chooses tokens, and what ends it.

    `eos_ids` may come from generation_config.json. `adapters`: see `adapters.identity`.
    """
    model, parallel, speculative = config.model_config, config.parallel_config, config.speculative_config
    directory = Path(model.model)
    parts = [
        NOISE_VERSION,
        version,
        fingerprint_of(directory, code=model.trust_remote_code)
        if directory.is_dir()
        else f"{model.model}@{model.revision}",
        str(model.dtype),
        str(model.quantization),
        str(model.hf_overrides),
        str(config.cache_config.cache_dtype),
        chooser.name,
        list(eos_ids),
        [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        speculative and [speculative.method, str(speculative.model), speculative.num_speculative_tokens],
    ]
    if adapters:
        parts.append(list(adapters))
    text = json.dumps(parts, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
