"""A model of a real shape without weights in vLLM's engine core, on the clock; a part of `bench._vllm.driver`.

The model is loaded once, and each burst gets a scheduler of its own, which knows nothing yet. The loop is that of
vLLM's engine process: requests that have arrived, a step, its outcome. With async scheduling the scheduler
works while the device runs the step before.

Weights at random end no text where a real model would. The driver replaces each request's token at its length by
the end token before the scheduler reads the outcome, and end tokens before that by another one: to the scheduler
that is a model that ends there. What the device computes does not change with it.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench._shapes import PAIRS, Shape, config_of
from bench._vllm.in_core import (
    END_TOKEN,
    LITTLE_MEMORY,
    LoadedCore,
    dtype_of,
    on_cpu,
    save_learnt,
    scheduler_for,
    timed,
)
from bench._vllm.replay import Recorded, ReplayExecutor

OTHER_TOKEN = 3
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256)
"""Batches for which CUDA graphs are captured at a quick start, up to the size of a step."""
LEARN_STEP_S = 0.010
"""Time of a step without a model, on the clock of LAPS-SD."""
IDLE_S = 0.001
"""Longest sleep while no request is there."""


@dataclass
class Run:
    """Outcome of a burst; times are seconds since its begin."""

    first_s: list[float]
    end_s: list[float]
    lengths: list[int]
    steps: int = 0
    mixed_steps: int = 0
    """Steps with a part of a prompt."""
    tokens: int = 0
    unfinished: int = 0
    full_s: float = 0.0
    full_tokens: int = 0
    full_step_s: list[float] = field(default_factory=list)
    """Times of the steps in which at least a full batch waited."""
    decode_step_s: list[float] = field(default_factory=list)
    mixed_step_s: list[float] = field(default_factory=list)
    """Times from one outcome to the next. Mixed: in this time a step with a part of a prompt ended or was launched;
    with async scheduling these are two of them, and the longer one depends on whether its launch takes longer."""
    decode_launch_s: list[float] = field(default_factory=list)
    mixed_launch_s: list[float] = field(default_factory=list)
    """Times until a step was with the device."""
    lasted_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of the process."""
    scheduler_s: float = 0.0
    """CPU time of the scheduler."""
    _touched_mixed: bool = False

    def launched(self, scheduler_output: Any, launch_s: float) -> None:
        """Take in the launch of a step."""
        mixed = is_mixed(scheduler_output)
        self._touched_mixed |= mixed
        (self.mixed_launch_s if mixed else self.decode_launch_s).append(launch_s)

    def ended(self, scheduler_output: Any) -> None:
        """Take in the kind of a step that is over."""
        mixed = is_mixed(scheduler_output)
        self._touched_mixed |= mixed
        self.mixed_steps += mixed

    def count(self, step_s: float, *, full: bool, tokens: int) -> None:
        """Take in the time since the outcome before, and the tokens that this one brought."""
        self.steps += 1
        (self.mixed_step_s if self._touched_mixed else self.decode_step_s).append(step_s)
        self._touched_mixed = False
        if full:
            self.full_step_s.append(step_s)
            self.full_s += step_s
            self.full_tokens += tokens

    def _mixed_step_ms(self) -> float | None:
        """Return the mean time of a mixed step: what all of them added to the median of the others."""
        if not self.mixed_steps or not self.decode_step_s:
            return None
        usual_s = statistics.median(self.decode_step_s)
        more_s = sum(self.mixed_step_s) - usual_s * len(self.mixed_step_s)
        return 1e3 * (usual_s + more_s / self.mixed_steps)

    def answer(self, requests: Sequence[Mapping[str, Any]], scheduler: Any) -> dict[str, Any]:
        """Return all of it in JSON, and end the scheduler."""
        worker: Any = getattr(scheduler, "one_worker", None)
        scheduler.shutdown()
        arrivals = [request["arrival"] for request in requests]
        steps = max(1, self.steps)
        return {
            "latencies": [end - arrival for end, arrival in zip(self.end_s, arrivals, strict=True)],
            "first_token": [first - arrival for first, arrival in zip(self.first_s, arrivals, strict=True)],
            "lengths": self.lengths,
            "lasted_s": self.lasted_s,
            "steps": self.steps,
            "full_steps": len(self.full_step_s),
            "full_s": self.full_s,
            "full_tokens": self.full_tokens,
            "full_step_ms": _median_ms(self.full_step_s),
            "decode_steps": self.steps - self.mixed_steps,
            "decode_step_ms": _median_ms(self.decode_step_s),
            "decode_launch_ms": _median_ms(self.decode_launch_s),
            "decode_s": sum(self.decode_step_s),
            "mixed_steps": self.mixed_steps,
            "mixed_step_ms": self._mixed_step_ms(),
            "mixed_launch_ms": _median_ms(self.mixed_launch_s),
            "mixed_s": sum(self.mixed_step_s),
            "scheduler_ms": 1e3 * self.scheduler_s / steps,
            "cpu_ms": 1e3 * self.cpu_s / steps,
            "pauses": worker.paused if worker else 0,
            "evictions": getattr(scheduler, "evictions", 0),
        }


def _median_ms(times_s: Sequence[float]) -> float | None:
    return 1e3 * statistics.median(times_s) if times_s else None


class ShapeRuns(LoadedCore):
    """vLLM's engine core with a model of a shape, and bursts on it."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._slots, self._residents = setup["slots"], setup["residents"]
        self._tokens = setup["tokens"]
        dtype = dtype_of(setup["dtype"])
        model = Path(setup["folder"]) / f"shape-{setup['shape']}"
        write_config(PAIRS[setup["shape"]][0], model, dtype=dtype, max_length=setup["max_length"])
        write_tokenizer(setup["words"], model)
        arguments: dict[str, Any] = {
            "model": str(model),
            "load_format": "dummy",
            "skip_tokenizer_init": not setup["words"],
            "dtype": dtype,
            "max_model_len": setup["max_length"],
            "max_num_seqs": self._residents,
            "max_num_active_seqs": self._slots,
            "max_num_batched_tokens": setup["budget"],
            "async_scheduling": None,  # vLLM's default: on GPUs
            "seed": 0,
            "disable_log_stats": True,
            "enforce_eager": setup["eager"],
        }
        if setup["little_memory"] or on_cpu():
            arguments |= LITTLE_MEMORY
        if setup["quick_start"] and not setup["eager"] and not on_cpu():
            sizes = [size for size in GRAPH_SIZES if size < self._slots] + [self._slots]
            # No torch.compile, which takes a minute, and CUDA graphs of decode-only steps alone. A mixed step is
            # then launched kernel by kernel.
            arguments["compilation_config"] = {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sizes,
            }
        super().__init__(arguments)
        self._ahead = self._core.batch_queue is not None
        self._length_of: dict[str, int] = {}

    def learn(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Serve requests by LAPS-SD without the model, and write what it learnt to the file `save`."""
        scheduler, requests = self._begin(asked, ahead=False)
        now_s = scheduler.clock()
        scheduler.clock = lambda: now_s
        recorded = {
            f"{self._runs}-{number}": Recorded([OTHER_TOKEN] * request["length"], [1] * request["length"])
            for number, request in enumerate(requests)
        }
        self._core.model_executor = ReplayExecutor(scheduler, recorded, 0)
        try:
            for number, request in enumerate(requests):
                self.add(scheduler, number, request, self._tokens)
            while scheduler.has_requests():
                self._core.step()
                now_s += LEARN_STEP_S
        finally:
            self._core.model_executor = self._executor
        save_learnt(scheduler, asked["save"])
        scheduler.shutdown()
        return {"learnt": len(requests)}

    def burst(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Run requests at their times under a new scheduler, with or without async scheduling (`ahead`)."""
        ahead = bool(asked["ahead"])
        scheduler, requests = self._begin(asked, ahead=ahead)
        count = len(requests)
        run = Run([0.0] * count, [0.0] * count, [0] * count)
        scheduler_s = self._watch(scheduler, run)
        self._core.model_executor = _Launching(self._executor, run)
        step = self._core.step_with_batch_queue if ahead else self._core.step
        gc.collect()
        at, cpu_s = 0, time.process_time()
        began_s = last_s = time.perf_counter()
        while at < count or scheduler.has_requests() or self._core.batch_queue:
            now_s = time.perf_counter() - began_s
            while at < count and requests[at]["arrival"] <= now_s:
                self.add(scheduler, at, requests[at], self._tokens)
                at, run.unfinished = at + 1, run.unfinished + 1
            if not (scheduler.has_requests() or self._core.batch_queue):
                time.sleep(min(IDLE_S, max(0.0, requests[at]["arrival"] - now_s)))
                last_s = time.perf_counter()
                continue
            full, tokens = run.unfinished >= 2 * self._slots, run.tokens
            outputs, executed = step()
            self._core.post_step(executed)
            ended_s = time.perf_counter()
            take_outputs(outputs, run, ended_s - began_s)
            if outputs is not None:
                run.count(ended_s - last_s, full=full, tokens=run.tokens - tokens)
                last_s = ended_s
            if not executed and scheduler.has_requests():
                time.sleep(IDLE_S)  # as vLLM's engine process does
        run.lasted_s, run.cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        run.scheduler_s = sum(scheduler_s.values())
        self._core.model_executor = self._executor
        return run.answer(requests, scheduler)

    def _begin(self, asked: Mapping[str, Any], *, ahead: bool) -> tuple[Any, Sequence[dict[str, Any]]]:
        if ahead and not self._ahead:
            raise ValueError("vLLM has no async scheduling on this device")
        self._runs += 1
        requests: Sequence[dict[str, Any]] = asked["requests"]
        self._length_of = {f"{self._runs}-{at}": request["length"] for at, request in enumerate(requests)}
        config = self._core.vllm_config
        config.scheduler_config.async_scheduling = self._core.async_scheduling = ahead
        scheduler = scheduler_for(
            self._parts,
            kind=asked["scheduler"],
            slots=self._slots,
            residents=self._residents,
            environment=asked["environment"],
        )
        update = scheduler.update_from_output

        def at_lengths(scheduler_output: Any, model_output: Any) -> Any:
            end_at_lengths(scheduler.requests, model_output, self._length_of)
            return update(scheduler_output, model_output)

        scheduler.update_from_output = at_lengths
        self._core.scheduler = scheduler
        return scheduler, requests

    def _watch(self, scheduler: Any, run: Run) -> dict[str, float]:
        """Note what kind of step is over; return what receives the CPU time of the scheduler's two calls."""
        seconds = {"schedule": 0.0, "update_from_output": 0.0}
        for name in seconds:
            setattr(scheduler, name, timed(getattr(scheduler, name), name, seconds))
        update = scheduler.update_from_output

        def and_note(scheduler_output: Any, model_output: Any) -> Any:
            run.ended(scheduler_output)
            return update(scheduler_output, model_output)

        scheduler.update_from_output = and_note
        return seconds


class _Launching:
    """vLLM's executor, with the time that it takes until a step is with the device."""

    def __init__(self, executor: Any, run: Run) -> None:
        self._executor, self._run = executor, run
        self._launching: Any = None
        self._since_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._launching, self._since_s = scheduler_output, time.perf_counter()
        return self._executor.execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        found = self._executor.sample_tokens(*args, **kwargs)
        self._run.launched(self._launching, time.perf_counter() - self._since_s)
        return found


def is_mixed(scheduler_output: Any) -> bool:
    """Return whether a step computes a part of a prompt. Without draft tokens all other requests compute one
    token each, and then vLLM can run a CUDA graph of the whole step.
    """
    tokens: int = scheduler_output.total_num_scheduled_tokens
    return tokens > len(scheduler_output.num_scheduled_tokens)


def take_outputs(outputs: Mapping[int, Any] | None, run: Run, now_s: float) -> None:
    """Take in what a step brought to each request."""
    for batch in (outputs or {}).values():
        for one in batch.outputs:
            number = int(one.request_id.split("-")[1])
            if one.new_token_ids and not run.lengths[number]:
                run.first_s[number] = now_s
            run.lengths[number] += len(one.new_token_ids)
            run.tokens += len(one.new_token_ids)
            if one.finish_reason is not None:
                run.end_s[number] = now_s
                run.unfinished -= 1


def end_at_lengths(requests: Mapping[str, Any], model_output: Any, length_of: Mapping[str, int]) -> None:
    """Put the end token at each request's length into what a model runner returned, and nowhere else."""
    for name, tokens in zip(model_output.req_ids, model_output.sampled_token_ids or (), strict=False):
        request = requests.get(name)
        if request is None:
            continue
        first = request.num_output_tokens + 1
        for at, token in enumerate(tokens):
            if first + at >= length_of[name]:
                tokens[at] = END_TOKEN
            elif token == END_TOKEN:
                tokens[at] = OTHER_TOKEN


def write_config(shape: Shape, place: Path, *, dtype: str, max_length: int) -> None:
    """Write the directory of a model of this shape, without weights."""
    config_of(
        shape,
        max_length,
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
        bos_token_id=1,
        eos_token_id=END_TOKEN,
    ).save_pretrained(place)


def write_tokenizer(words: Mapping[str, int], place: Path) -> None:
    """Write a tokenizer whose tokens are these words, so that a scheduler can read them; none without words."""
    if not words:
        return
    from tokenizers import Tokenizer, models, pre_tokenizers

    named = {"<unk>": 0, "<begin>": 1, "<end>": END_TOKEN}
    tokenizer = Tokenizer(models.WordLevel(named | dict(words), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(named))
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<begin>", "eos_token": "<end>"}
        )
    )
