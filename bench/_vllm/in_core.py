"""What the drivers share: an engine core's parts, schedulers for it, requests, outcomes of its model runner."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

END_TOKEN = 2
"""Of the demo pair, and of models of a shape."""
LITTLE_MEMORY_BYTES = 2**30
"""KV of a small model; vLLM would take nearly all the memory of a device, and several engines share one."""
LITTLE_MEMORY_SHARE = 0.1
"""Share of a device's memory that vLLM must find free for it."""
LITTLE_MEMORY = {
    "kv_cache_memory_bytes": LITTLE_MEMORY_BYTES,
    "gpu_memory_utilization": LITTLE_MEMORY_SHARE,
}


def draft_model(directory: str, length: int) -> dict[str, Any]:
    """Return the configuration of speculation with a draft model."""
    return {"method": "draft_model", "model": directory, "num_speculative_tokens": length}


def on_cpu() -> bool:
    """Return whether this vLLM runs on a CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def dtype_of(wanted: str) -> str:
    """Return the dtype of weights; auto is float32 on a CPU and bfloat16 elsewhere."""
    if wanted != "auto":
        return wanted
    return "float32" if on_cpu() else "bfloat16"


def about_core(core: Any) -> dict[str, Any]:
    """Return in words what a loaded engine core runs on, and how."""
    from vllm.platforms import current_platform

    config = core.vllm_config
    compilation = config.compilation_config
    return {
        "device": "CPU" if on_cpu() else str(current_platform.get_device_name()),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "async": core.batch_queue is not None,
        "compilation": getattr(compilation.mode, "name", str(compilation.mode)),
        "cuda_graphs": getattr(compilation.cudagraph_mode, "name", str(compilation.cudagraph_mode)),
        "kv_tokens": core.scheduler.kv_cache_config.num_blocks * core.scheduler.block_size,
    }


class LoadedCore:
    """vLLM's engine core in this process, which takes one scheduler after another."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """`arguments`: those of vLLM's `EngineArgs`."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        config = EngineArgs(**arguments).create_engine_config()
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._executor = self._core.model_executor
        self._parts = parts_of(self._core)
        self._runs = 0

    def about(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return on what it runs, and how."""
        return about_core(self._core)

    def add(self, scheduler: Any, number: int, request: Mapping[str, Any], tokens: int) -> None:
        """Hand a request of this number of tokens at most to a scheduler."""
        asked = core_request(f"{self._runs}-{number}", request, tokens)
        made, _ = self._core.preprocess_add_request(asked)
        scheduler.add_request(made)


def timed(call: Callable[..., Any], name: str, seconds: dict[str, float]) -> Callable[..., Any]:
    """Return a call that adds its CPU time to `seconds`."""

    def and_count(*args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            seconds[name] += time.thread_time() - began_s

    return and_count


def parts_of(core: Any) -> dict[str, Any]:
    """Return the parts of an engine core that each of its schedulers is made of."""
    first = core.scheduler
    coordinator = first.kv_cache_manager.coordinator
    return {
        "vllm_config": core.vllm_config,
        "kv_cache_config": first.kv_cache_config,
        "structured_output_manager": core.structured_output_manager,
        "block_size": first.block_size,
        "hash_block_size": getattr(coordinator, "hash_block_size", first.block_size),
        "log_stats": False,
    }


def scheduler_for(
    parts: Mapping[str, Any], *, kind: str, slots: int, residents: int, environment: Mapping[str, str]
) -> Any:
    """Return a new scheduler. `kind`: laps, or a policy of vLLM's own (fcfs, priority); `environment`: variables
    that it reads when it is made.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    from laps_vllm.scheduler import LapsScheduler

    scheduling = parts["vllm_config"].scheduler_config
    ours = kind == "laps"
    scheduling.policy = "fcfs" if ours else kind
    scheduling.max_num_seqs = residents if ours else slots
    plain = AsyncScheduler if scheduling.async_scheduling else Scheduler
    make: Any = LapsScheduler if ours else plain
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        return make(**parts)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def save_learnt(scheduler: Any, file: str) -> None:
    """Write what a scheduler of LAPS-SD has learnt to a file."""
    from laps_vllm.learnt_file import LearntFile

    learnt = LearntFile(Path(file))
    learnt.keep(scheduler.one_worker.core.priors)
    learnt.save()


def core_request(name: str, request: Mapping[str, Any], tokens: int) -> Any:
    """Return a request for vLLM's engine core, of this number of tokens at most."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    params = SamplingParams(
        temperature=0.0,
        max_tokens=tokens,
        stop_token_ids=[END_TOKEN],
        detokenize=False,
        extra_args=request.get("hints") or None,
    )
    return EngineCoreRequest(
        name, list(request["ids"]), None, params, None, time.time(), None, None, None,
        priority=request.get("priority", 0),
    )  # fmt: skip


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
