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
    "VersionError",
    "check_names",
    "check_version",
    "refuse_missing",
    "unset_attributes",
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


def check_names(scheduler: type, request: type, output: type, version: str) -> None:
    """Raise VersionError with all names that are missing in this vLLM's Scheduler, Request and
    SchedulerOutput.
    """
    refuse_missing(_missing(scheduler, request, output), version)


def refuse_missing(names: Iterable[str], version: str) -> None:
    """Raise VersionError with the names of vLLM that are used and missing, if there are any."""
    missing = ", ".join(names)
    if missing:
        raise VersionError(f"vLLM {version} has changed what LAPS-SD uses: {missing}")


def unset_attributes(owner: type, title: str, names: Iterable[str]) -> Iterator[str]:
    """Yield the names that a class assigns nowhere: they exist only on its instances."""
    source = inspect.getsource(owner)
    for name in names:
        if f"self.{name} =" not in source and f"self.{name}:" not in source:
            yield f"{title}.{name}"


def _missing(scheduler: type, request: type, output: type) -> Iterator[str]:
    for name in ("schedule", "update_from_output", "finish_requests", "add_request", "shutdown"):
        if not callable(getattr(scheduler, name, None)):
            yield f"Scheduler.{name}"
    preempt = getattr(scheduler, "_preempt_request", None)
    parameters = ["request", "timestamp", "drop_stale_output"]
    if preempt is None or list(inspect.signature(preempt).parameters)[1:4] != parameters:
        yield f"Scheduler._preempt_request({', '.join(parameters)})"
    yield from unset_attributes(scheduler, "Scheduler", _SCHEDULER_ATTRIBUTES)
    yield from unset_attributes(request, "Request", _REQUEST_ATTRIBUTES)
    fields = getattr(output, "__dataclass_fields__", {})
    yield from (f"SchedulerOutput.{name}" for name in _OUTPUT_FIELDS if name not in fields)


_SCHEDULER_ATTRIBUTES = (
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
)
_REQUEST_ATTRIBUTES = (
    "num_computed_tokens",
    "num_output_placeholders",
    "is_prefill_chunk",
    "num_in_flight_tokens",
    "num_stale_output_tokens",
    "drop_stale_output",
    "spec_token_ids",
    "status",
    "arrival_time",
    "sampling_params",
    "priority",
    "max_tokens",
    "lora_request",
    "resumable",
    "num_prompt_tokens",
)
_OUTPUT_FIELDS = (
    "scheduled_new_reqs",
    "scheduled_cached_reqs",
    "num_scheduled_tokens",
    "scheduled_spec_decode_tokens",
)
