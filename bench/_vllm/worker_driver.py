"""A worker's engine over vLLM, and vLLM alone, on the same loaded model; a part of `bench._vllm.driver`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._vllm.in_core import (
    LITTLE_MEMORY_BYTES,
    LITTLE_MEMORY_SHARE,
    about_core,
    core_request,
    digest,
    draft_model,
    dtype_of,
    parts_of,
)


@dataclass
class _Run:
    """Texts of the requests so far, and steps of the engine."""

    texts: list[list[int]]
    steps: int = 0


class WorkerRuns:
    """vLLM's engine core, loaded as a worker loads it."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from worker_svc.engine.vllm.loading import load_core, rules_for
        from worker_svc.engine.vllm.options import VllmOptions

        self._options = VllmOptions(
            model=Path(setup["target"]),
            slots=setup["slots"],
            residents=setup["residents"],
            max_length=setup["max_length"],
            prefill_chunk=setup["budget"],
            speculative=draft_model(setup["draft"], setup["draft_len"]),
            sampling=setup["sampling"],
            dtype=dtype_of(setup["dtype"]),
            memory_bytes=LITTLE_MEMORY_BYTES,
            arguments={"enforce_eager": setup["eager"], "gpu_memory_utilization": LITTLE_MEMORY_SHARE},
        )
        self._core, chooser = load_core(self._options)
        self._rules = rules_for(self._core.vllm_config, chooser)
        self._tokens = setup["tokens"]
        self._parts = parts_of(self._core)
        self._ahead = self._core.batch_queue is not None
        self._runs = 0

    def about(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return on what it runs, and how."""
        return about_core(self._core)

    def plain(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Run the requests by vLLM's own scheduler, first come first served."""
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        self._core.scheduler = (AsyncScheduler if self._ahead else Scheduler)(**self._parts)
        return self._timed(asked, self._plain)

    def engine(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Run the requests by a worker's runner over the engine, in the same order."""
        from worker_svc.engine.vllm.scheduler import round_scheduler

        self._core.scheduler = round_scheduler(**self._parts)
        return self._timed(asked, self._engine)

    def _timed(self, asked: dict[str, Any], run: Callable[[list[list[int]], _Run], None]) -> dict[str, Any]:
        self._runs += 1
        found = _Run([[] for _ in asked["ids"]])
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        run(asked["ids"], found)
        lasted_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        # The model runner forgets the requests with the next step.
        while self._core.scheduler.has_requests() or self._core.batch_queue:
            self._core.step_fn()
        return {
            "lasted_s": lasted_s,
            "cpu_s": cpu_s,
            "tokens": sum(map(len, found.texts)),
            "steps": found.steps,
            "texts": [digest(text) for text in found.texts],
        }

    def _plain(self, prompts: list[list[int]], found: _Run) -> None:
        core = self._core
        for number, ids in enumerate(prompts):
            asked = core_request(f"{self._runs}-{number}", {"ids": ids}, self._tokens)
            request, _ = core.preprocess_add_request(asked)
            core.add_request(request)
        while core.scheduler.has_unfinished_requests():
            outputs, executed = core.step_fn()
            core.post_step(executed)
            found.steps += outputs is not None
            for batch in (outputs or {}).values():
                for one in batch.outputs:
                    found.texts[int(one.request_id.split("-")[1])] += one.new_token_ids

    def _engine(self, prompts: list[list[int]], found: _Run) -> None:
        from worker_svc.engine.interface import Sampling, Specification
        from worker_svc.engine.vllm.engine import VllmEngine
        from worker_svc.runner.messages import Acknowledged, Assigned, Listed, Outcome, Round, Specified
        from worker_svc.runner.runner import Runner
        from worker_svc.runner.thread import QueueInbox

        engine = VllmEngine(self._core, self._rules, slots=self._options.slots, fingerprint="", formats=False)
        inbox = QueueInbox()

        def deliver(outcome: Outcome) -> None:
            if isinstance(outcome, Round):
                found.steps += 1
                inbox.put(Acknowledged(outcome.number))
                for _, one in outcome.progress:
                    found.texts[int(one.request_id.split("-")[1])] += one.tokens

        runner = Runner(engine, inbox, deliver)
        names = [f"{self._runs}-{number}" for number in range(len(prompts))]
        for name, ids in zip(names, prompts, strict=True):
            inbox.put(Specified(Specification(name, tuple(ids), (), Sampling(), self._tokens), 1))
        inbox.put(
            Assigned(
                tuple(Listed(name, 1, 0, float(at + 1), 0.0, False, False) for at, name in enumerate(names))
            )
        )
        while runner.turn():
            pass
