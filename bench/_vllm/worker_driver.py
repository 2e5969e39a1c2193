"""A worker's engine over vLLM, and vLLM alone, on the same loaded model; a part of `bench._vllm.driver`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._vllm.in_core import core_request, digest


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
            speculative={
                "method": "draft_model",
                "model": setup["draft"],
                "num_speculative_tokens": setup["draft_len"],
            },
            sampling=setup["sampling"],
        )
        self._core, chooser = load_core(self._options)
        self._rules = rules_for(self._core.vllm_config, chooser)
        self._tokens = setup["tokens"]
        first: Any = self._core.scheduler
        self._parts: dict[str, Any] = {
            "vllm_config": self._core.vllm_config,
            "kv_cache_config": first.kv_cache_config,
            "structured_output_manager": self._core.structured_output_manager,
            "block_size": first.block_size,
            "hash_block_size": first.block_size,
            "log_stats": False,
        }
        self._runs = 0

    def plain(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Run the requests by vLLM's own scheduler, first come first served."""
        from vllm.v1.core.sched.scheduler import Scheduler

        self._core.scheduler = Scheduler(**self._parts)
        return self._timed(asked, self._plain)

    def engine(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Run the requests by a worker's runner over the engine, in the same order."""
        from worker_svc.engine.vllm.scheduler import RoundScheduler

        self._core.scheduler = RoundScheduler(**self._parts)
        return self._timed(asked, self._engine)

    def _timed(self, asked: dict[str, Any], run: Callable[[list[list[int]], _Run], None]) -> dict[str, Any]:
        self._runs += 1
        found = _Run([[] for _ in asked["ids"]])
        began_s = time.process_time()
        run(asked["ids"], found)
        cpu_s = time.process_time() - began_s
        # The model runner forgets the requests with the next step.
        self._core.step()
        return {
            "cpu_s": cpu_s,
            "tokens": sum(map(len, found.texts)),
            "steps": found.steps,
            "texts": [digest(text) for text in found.texts],
        }

    def _plain(self, prompts: list[list[int]], found: _Run) -> None:
        from vllm import SamplingParams

        core = self._core
        eos_ids = self._rules.eos_ids
        for number, ids in enumerate(prompts):
            params = SamplingParams(
                temperature=0.0, max_tokens=self._tokens, stop_token_ids=eos_ids, detokenize=False
            )
            request, _ = core.preprocess_add_request(core_request(f"{self._runs}-{number}", ids, params))
            core.add_request(request)
        while core.scheduler.has_unfinished_requests():
            outputs, executed = core.step()
            core.post_step(executed)
            found.steps += 1
            for batch in outputs.values():
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
