"""The versions of vLLM that are supported, and the check of every name of vLLM that this package uses.

vLLM declares its scheduler interface as not public. Two minor versions are supported, and a start with
another one fails with a sentence.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "SUPPORTED",
    "UNTESTED_VARIABLE",
    "USED",
    "VersionError",
    "check_names",
    "check_version",
    "missing_names",
    "refuse_missing",
]

SUPPORTED = ("0.32", "0.33")
UNTESTED_VARIABLE = "LAPS_SD_VLLM_UNTESTED"


class VersionError(RuntimeError):
    """This vLLM cannot be used. The message names the versions that can, and what to do."""


def check_version(version: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise VersionError unless this version of vLLM is supported or `LAPS_SD_VLLM_UNTESTED=1` is set."""
    minor = ".".join(version.split(".")[:2])
    if minor not in SUPPORTED and environ.get(UNTESTED_VARIABLE) != "1":
        raise VersionError(
            f"LAPS-SD supports vLLM {' and '.join(SUPPORTED)}, and this is vLLM {version}: install one of them, or "
            f"set {UNTESTED_VARIABLE}=1 to try it all the same"
        )


def check_names(version: str, *owners: type) -> None:
    """Raise VersionError with all names that these classes of this vLLM lack; `USED` has the names."""
    refuse_missing(_missing(owners), version)


def refuse_missing(names: Iterable[str], version: str) -> None:
    """Raise VersionError with the names of vLLM that are used and missing, if there are any."""
    missing = ", ".join(names)
    if missing:
        raise VersionError(f"vLLM {version} has changed what LAPS-SD uses: {missing}")


def missing_names(owner: type, names: Iterable[str]) -> Iterator[str]:
    """Yield the names that neither a class nor, by its source, an instance of it has."""
    source = inspect.getsource(owner)
    fields = getattr(owner, "__dataclass_fields__", ())
    for name in names:
        assigned = f"self.{name} =" in source or f"self.{name}:" in source
        if not (assigned or name in fields or hasattr(owner, name)):
            yield f"{owner.__name__}.{name}"


def _missing(owners: Iterable[type]) -> Iterator[str]:
    for owner in owners:
        yield from missing_names(owner, USED[owner.__name__])
        if owner.__name__ == "Scheduler":
            preempt = getattr(owner, "_preempt_request", None)
            parameters = ["request", "timestamp", "drop_stale_output"]
            if preempt is None or list(inspect.signature(preempt).parameters)[1:4] != parameters:
                yield f"Scheduler._preempt_request({', '.join(parameters)})"


_SCHEDULER = (
    "schedule",
    "update_from_output",
    "finish_requests",
    "add_request",
    "shutdown",
    "get_num_unfinished_requests",
    "running",
    "waiting",
    "requests",
    "kv_cache_manager",
    "kv_cache_config",
    "block_size",
    "max_model_len",
    "max_num_running_reqs",
    "max_num_scheduled_tokens",
    "max_num_active_reqs",
    "num_lookahead_tokens",
    "num_spec_tokens",
    "kv_holding_waiting",
    "num_waiting_for_streaming_input",
    "finished_recving_kv_req_ids",
    "deferred_frees",
    "requires_kv_delivery",
    "lora_config",
    "scheduler_config",
    "vllm_config",
    "structured_output_manager",
    "_pause_state",
)
_REQUEST = (
    "request_id",
    "prompt_token_ids",
    "num_tokens",
    "num_tokens_with_spec",
    "num_output_tokens",
    "output_token_ids",
    "append_output_token_ids",
    "is_finished",
    "num_computed_tokens",
    "num_output_placeholders",
    "num_nans_in_logits",
    "is_prefill_chunk",
    "num_in_flight_tokens",
    "num_stale_output_tokens",
    "drop_stale_output",
    "spec_token_ids",
    "status",
    "arrival_time",
    "sampling_params",
    "structured_output_request",
    "priority",
    "max_tokens",
    "lora_request",
    "resumable",
    "num_prompt_tokens",
)
_SCHEDULER_OUTPUT = (
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "scheduled_spec_decode_tokens",
)
USED: Mapping[str, tuple[str, ...]] = {
    "Scheduler": _SCHEDULER,
    "Request": _REQUEST,
    "SchedulerOutput": _SCHEDULER_OUTPUT,
    "KVCacheManager": ("get_blocks", "block_pool"),
    "BlockPool": ("get_num_free_blocks",),
}
"""The names that are used, by the class of vLLM that has them."""
