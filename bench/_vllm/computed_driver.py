"""vLLM's real schedulers on a virtual clock, with the time of each step by a formula; a part of `bench._vllm.driver`.

It answers the questions of `shape_driver`, so the same requests run under the same modes: no model runs, and no
clock of a machine is in it, except that LAPS-SD decides with interpreted code that costs a given time. With async
scheduling a step is launched while the device works on the one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench._shapes import PAIRS
from bench._vllm.in_core import core_request, model_output, save_learnt, scheduler_for
from bench._vllm.shape_driver import (
    LEARN_STEP_S,
    OTHER_TOKEN,
    Run,
    end_at_lengths,
    is_mixed,
    take_outputs,
    write_config,
    write_tokenizer,
)

BLOCK = 16
"""Tokens of a KV block: vLLM's default on GPUs."""


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step. Mixed: a step with a part of a prompt in it."""

    decode_ms: float
    decode_row_ms: float
    """For each request of a step, more."""
    mixed_ms: float
    mixed_token_ms: float
    """For each token of a mixed step, more."""
    launch_ms: float = 3.0
    """CPU time to launch a step that is a CUDA graph."""
    after_launch_ms: float = 2.0
    """Of `mixed_ms`, what the device still takes when the CPU has launched the step."""
    fcfs_ms: float = 0.7
    laps_ms: float = 1.5
    """CPU time of the scheduler in a step: vLLM's own, and LAPS-SD's."""

    def step_s(self, output: Any) -> tuple[float, float]:
        """Return the seconds that the CPU and the device take for a step."""
        rows, tokens = len(output.num_scheduled_tokens), output.total_num_scheduled_tokens
        if not is_mixed(output):
            return self.launch_ms / 1e3, (self.decode_ms + self.decode_row_ms * rows) / 1e3
        launch_ms = max(self.launch_ms, self.mixed_ms - self.after_launch_ms)
        return launch_ms / 1e3, (self.mixed_ms + self.mixed_token_ms * tokens) / 1e3


class ComputedRuns:
    """vLLM's schedulers without a model, and bursts on them."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.structured_output import StructuredOutputManager

        self._slots, self._residents = setup["slots"], setup["residents"]
        self._tokens, self._times = setup["tokens"], StepTimes(**setup["step_times"])
        model = Path(setup["folder"]) / f"shape-{setup['shape']}"
        shape = PAIRS[setup["shape"]][0]
        write_config(shape, model, dtype="bfloat16", max_length=setup["max_length"])
        write_tokenizer(setup["words"], model)
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=not setup["words"],
            dtype="bfloat16",
            max_model_len=setup["max_length"],
            max_num_seqs=self._residents,
            max_num_active_seqs=self._slots,
            max_num_batched_tokens=setup["budget"],
            block_size=BLOCK,
            disable_log_stats=True,
            enforce_eager=True,
        ).create_engine_config()
        blocks = setup["kv_tokens"] // BLOCK
        config.cache_config.num_gpu_blocks = blocks
        self._config = config
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._parts = {
            "vllm_config": config,
            "kv_cache_config": _kv(shape, blocks),
            "structured_output_manager": StructuredOutputManager(config),
            "block_size": BLOCK,
            "hash_block_size": BLOCK,
            "log_stats": False,
        }
        self._runs = 0
        self._now_s = 0.0

    def about(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return on what it runs, and how."""
        return {"device": "none", "async": True, "step_times": asdict(self._times)}

    def learn(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Serve requests by LAPS-SD, and write what it learnt to the file `save`."""
        scheduler, _ = self._serve(asked, ahead=False, learning=True)
        save_learnt(scheduler, asked["save"])
        scheduler.shutdown()
        return {"learnt": len(asked["requests"])}

    def burst(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Run requests at their times under a new scheduler."""
        scheduler, run = self._serve(asked, ahead=bool(asked["ahead"]), learning=False)
        return run.answer(asked["requests"], scheduler)

    def _serve(self, asked: Mapping[str, Any], *, ahead: bool, learning: bool) -> tuple[Any, Run]:
        self._runs += 1
        requests: Sequence[dict[str, Any]] = asked["requests"]
        count = len(requests)
        length_of = {f"{self._runs}-{at}": request["length"] for at, request in enumerate(requests)}
        self._config.scheduler_config.async_scheduling = ahead
        scheduler = scheduler_for(
            self._parts,
            kind=asked["scheduler"],
            slots=self._slots,
            residents=self._residents,
            environment=asked["environment"],
        )
        self._now_s = 0.0
        if asked["scheduler"] == "laps":
            began_s = scheduler.clock()
            scheduler.clock = lambda: began_s + self._now_s
        times = self._times
        cpu_s = 0.0
        if not learning:
            cpu_s = (times.laps_ms if asked["scheduler"] == "laps" else times.fcfs_ms) / 1e3
        run = Run([0.0] * count, [0.0] * count, [0] * count)
        in_flight: deque[tuple[Any, list[str], float]] = deque()
        at, free_s, last_s = 0, 0.0, 0.0
        while at < count or scheduler.has_requests() or in_flight:
            while at < count and requests[at]["arrival"] <= self._now_s:
                self._add(scheduler, at, requests[at])
                at, run.unfinished = at + 1, run.unfinished + 1
            if not (scheduler.has_requests() or in_flight):
                last_s = self._now_s = requests[at]["arrival"]
                continue
            full, tokens = run.unfinished >= 2 * self._slots, run.tokens
            if scheduler.has_requests():
                output = scheduler.schedule()
                if output.total_num_scheduled_tokens:
                    sampling = [
                        name
                        for name in output.num_scheduled_tokens
                        if not scheduler.requests[name].is_prefill_chunk
                    ]
                    launch_s, device_s = (0.0, LEARN_STEP_S) if learning else times.step_s(output)
                    self._now_s += cpu_s
                    free_s = max(free_s, self._now_s) + device_s
                    self._now_s += launch_s
                    run.launched(output, launch_s)
                    in_flight.append((output, sampling, free_s))
                    if ahead and len(in_flight) < 2:
                        continue
            if not in_flight:
                continue
            output, sampling, done_s = in_flight.popleft()
            self._now_s = max(self._now_s, done_s)
            names = list(output.num_scheduled_tokens)
            ends = set(sampling)
            made = model_output(names, [[OTHER_TOKEN] if name in ends else [] for name in names])
            end_at_lengths(scheduler.requests, made, length_of)
            outputs = scheduler.update_from_output(output, made)
            take_outputs(outputs, run, self._now_s)
            run.ended(output)
            run.count(self._now_s - last_s, full=full, tokens=run.tokens - tokens)
            last_s = self._now_s
        run.lasted_s = self._now_s
        run.scheduler_s = run.cpu_s = cpu_s * run.steps
        return scheduler, run

    def _add(self, scheduler: Any, number: int, request: Mapping[str, Any]) -> None:
        from vllm.v1.request import Request

        asked = core_request(f"{self._runs}-{number}", request, self._tokens)
        asked.arrival_time = request["arrival"]
        scheduler.add_request(Request.from_engine_core_request(asked, self._hasher))


def _kv(shape: Any, blocks: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)]
    )
