"""Faults of vLLM that users meet with speculation, chunked prefill, LoRA or grammars, by version: a sentence
for each that a configuration can hit. docs/vllm.md has the list with the measurements.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["warnings"]


def warnings(config: Any, version: str, *, spare_lora_place: bool = False) -> Iterator[str]:
    """Yield a sentence for each known fault that this configuration of this version can hit.

    `spare_lora_place`: there is a place more for LoRA adapters than there are adapters.
    """
    on_cpu = config.device_config.device_type == "cpu"
    speculative = config.speculative_config
    if on_cpu and version.startswith("0.32."):
        if speculative is not None:
            yield (
                "vLLM 0.32 on a CPU samples wrong tokens for a batch with draft tokens in which any request has a"
                " temperature, top_p or top_k: use temperature 0, or no speculation"
            )
        if config.scheduler_config.enable_chunked_prefill:
            yield (
                "vLLM 0.32 on a CPU fails on a request with a seed whose prompt is longer than a step"
                " (--max-num-batched-tokens): the engine ends with 'CPU Generator does not use offset'"
            )
        if config.lora_config is not None and not spare_lora_place:
            yield (
                "vLLM 0.32 on a CPU computes requests without a LoRA adapter with that of the last place: set --max-loras to"
                " one more than there are adapters"
            )
    if speculative is not None and not getattr(config, "use_v2_model_runner", False):
        yield "vLLM's first model runner ignores min_p and logit_bias with speculation"
    if speculative is not None and config.structured_outputs_config.backend == "guidance":
        yield (
            "llguidance 1.7 to 1.9 may refuse tokens that a grammar with nested rules allows, after draft"
            " tokens that are not accepted: use another backend of structured outputs, or no speculation"
        )
