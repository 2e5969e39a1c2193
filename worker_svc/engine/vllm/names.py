"""The names of vLLM that the engine uses in addition to those of its scheduler, looked up at start.

Each is an attribute of a class or module of this vLLM. None of them is public: a version that lacks one is
refused with a sentence, before a request fails on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar
from vllm.v1.structured_output.request import StructuredOutputRequest
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from laps_vllm.versions import missing_names, refuse_missing

__all__ = ["check_engine_names"]

_METHODS = (
    (
        EngineCore,
        "__init__",
        ("self", "vllm_config", "executor_class", "log_stats", "executor_fail_callback"),
    ),
    (EngineCore, "preprocess_add_request", ("self", "request")),
    (EngineCore, "add_request", ("self", "request", "request_wave")),
    (EngineCore, "abort_requests", ("self", "request_ids")),
    (EngineCore, "add_lora", ("self", "lora_request")),
    (EngineCore, "pin_lora", ("self", "lora_id")),
    (EngineCore, "step", ("self",)),
    (EngineCore, "step_with_batch_queue", ("self",)),
    (EngineCore, "post_step", ("self", "model_executed")),
    (GuidanceBackend, "compile_grammar", ("self", "request_type", "grammar_spec", "stop_token_ids")),
    (GuidanceGrammar, "accept_tokens", ("self", "request_id", "tokens")),
    (GuidanceGrammar, "validate_tokens", ("self", "tokens")),
    (GuidanceGrammar, "rollback", ("self", "num_tokens")),
    (
        BlockPool,
        "cache_full_blocks",
        ("self", "request", "blocks", "num_cached_blocks", "num_full_blocks"),
    ),
    (BlockPool, "reset_prefix_cache", ("self",)),
    (BlockHashToBlockMap, "pop", ("self", "key", "block_id")),
    (BlockHashToBlockMap, "get_one_block", ("self", "key")),
    (kv_cache_utils, "make_block_hash_with_group_id", ("block_hash", "group_id")),
    (kv_cache_utils, "get_block_hash", ("key",)),
)
_ATTRIBUTES = (
    (BlockPool, ("cached_block_hash_to_block",)),
    (KVCacheCoordinator, ("single_type_managers",)),
    (Request, ("all_token_ids", "block_hashes", "cache_salt")),
)
_OF_THE_FIRST_RUNNER = (
    (GPUModelRunner, "_sample", ("self", "logits", "spec_decode_metadata")),
    (SpecDecodeBaseProposer, "_greedy_sample", ("self", "hidden_states")),
)


def check_engine_names(version: str, *, first_runner: bool) -> None:
    """Raise VersionError with all names that this vLLM lacks, those that `coupling` replaces only if used."""
    refuse_missing(_missing(first_runner), version)


def _missing(first_runner: bool) -> Iterator[str]:
    for owner, name, parameters in (*_METHODS, *(_OF_THE_FIRST_RUNNER if first_runner else ())):
        found = getattr(owner, name, None)
        if found is None or tuple(inspect.signature(found).parameters)[: len(parameters)] != parameters:
            yield f"{owner.__name__}.{name}({', '.join(parameters[1:])})"
    for owner, attributes in _ATTRIBUTES:
        yield from missing_names(owner, attributes)
    if "_grammar" not in StructuredOutputRequest.__dataclass_fields__:
        yield "StructuredOutputRequest._grammar"
    for name in ("ll_matcher", "ll_tokenizer", "vocab_size", "terminated", "rollback_lag"):
        if name not in GuidanceGrammar.__dataclass_fields__:
            yield f"GuidanceGrammar.{name}"
