"""Options of the engine over vLLM, and the arguments of vLLM that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["RESERVED", "VllmOptions"]

RESERVED: Mapping[str, str] = {
    "async_scheduling": "set LAPS_SD_VLLM_OVERLAP",
    "data_parallel_size": "start several workers instead",
    "dtype": "set LAPS_SD_DTYPE",
    "enable_chunked_prefill": "a round may compute a part of a context",
    "enable_lora": "set LAPS_SD_ADAPTERS",
    "enable_prefix_caching": "set LAPS_SD_PREFIX_REUSE_TOKENS",
    "kv_cache_memory_bytes": "set LAPS_SD_KV_MEMORY_BYTES",
    "logits_processors": "they would change the choice of tokens",
    "max_loras": "all adapters of LAPS_SD_ADAPTERS stay loaded",
    "max_model_len": "set LAPS_SD_CONTEXT_TOKENS",
    "max_num_active_seqs": "set LAPS_SD_SLOTS",
    "max_num_batched_tokens": "set LAPS_SD_PREFILL_CHUNK",
    "max_num_seqs": "set LAPS_SD_VLLM_RESIDENTS",
    "num_gpu_blocks_override": "set LAPS_SD_KV_BLOCKS",
    "scheduler_cls": "LAPS-SD brings its own",
    "skip_tokenizer_init": "it follows from the model",
    "trust_remote_code": "set LAPS_SD_TRUST_REMOTE_CODE",
}
"""Arguments of vLLM that this engine sets itself, and what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """The options of `loading.load_engine`."""

    # Directory of the model.
    model: Path
    # Requests per round, at most; and requests with KV, running and paused.
    slots: int = 8
    residents: int = 32
    # Longest context, tokens.
    max_length: int = 1024
    # Context tokens computed per round in addition to the tokens of running requests.
    prefill_chunk: int = 512
    # Seconds of a round that computes context, at most, or a few times a round without, whichever is longer;
    # None: any.
    max_round_s: float | None = None
    dtype: str = "float32"
    # Size of the KV pool; None: from `memory_bytes`, or what vLLM finds free.
    blocks: int | None = None
    memory_bytes: int | None = None
    # KV of the same beginning is shared between requests.
    share_prefixes: bool = True
    # Equal seeds give equal text; own: vLLM's sampler chooses.
    sampling: Literal["coupled", "own"] = "coupled"
    # A round is prepared while the device works on the one before (vLLM's async scheduling); auto: where vLLM does
    # so by default.
    overlap: Literal["auto", "on", "off"] = "auto"
    trust_remote_code: bool = False
    # Predict the output lengths that remain, where hidden states can be read.
    length_probe: bool = True
    # Directory of each LoRA adapter, by its name.
    adapters: Mapping[str, Path] = field(default_factory=dict)
    # vLLM's configuration of speculation; None: none.
    speculative: Mapping[str, Any] | None = None
    # Further arguments of vLLM's EngineArgs, as they are.
    arguments: Mapping[str, Any] = field(default_factory=dict)
