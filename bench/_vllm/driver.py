"""vLLM for `laps-sd bench vllm`: `OTHER_PYTHON -m bench._vllm.driver SETUP.json`, in an interpreter with vLLM.

Prints `{"ready": VERSION}` after loading; then each line on stdin is a question in JSON, answered with one
line. `burst` runs requests through vLLM's engine core in this process, with arrivals and latencies counted in
engine steps; `cost` (without a model) measures the CPU time of decisions on vLLM's scheduler; `plain` and
`engine` run requests by vLLM alone and by a worker. The end of stdin ends it.

The clock of LAPS-SD is virtual here, `STEP_S` for each step, so that equal questions have equal answers.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench._peer_engines.loops import answer_all, open_channel
from bench._vllm.computed_driver import ComputedRuns
from bench._vllm.in_core import (
    LITTLE_MEMORY,
    LoadedCore,
    digest,
    draft_model,
    dtype_of,
    save_learnt,
    scheduler_for,
    timed,
)
from bench._vllm.replay import Recorded, ReplayExecutor
from bench._vllm.shape_driver import ShapeRuns
from bench._vllm.worker_driver import WorkerRuns

STEP_S = 0.020
"""Time of a step on the virtual clock."""


class Engine(LoadedCore):
    """vLLM's engine core with the demo pair; each burst gets a scheduler of its own."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._slots, self._residents = setup["slots"], setup["residents"]
        self._tokens, self._draft_len = setup["tokens"], setup["draft_len"]
        super().__init__(
            {
                "model": setup["target"],
                "dtype": dtype_of(setup["dtype"]),
                "max_model_len": setup["max_length"],
                "max_num_seqs": self._residents,
                "max_num_active_seqs": self._slots,
                "max_num_batched_tokens": setup["budget"],
                "async_scheduling": False,
                "seed": 0,
                "disable_log_stats": True,
                "speculative_config": draft_model(setup["draft"], self._draft_len),
                "enforce_eager": setup["eager"],
                **LITTLE_MEMORY,
            }
        )
        self._recorded: list[Recorded] = []
        self._now_s = 0.0
        self._scheduler_s = {"schedule": 0.0, "update_from_output": 0.0}
        """CPU time of the scheduler."""

    def burst(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Run requests that arrive at given steps, under one scheduler. With `replay`, the model does not run:
        each request emits what it emitted in the last burst that was no replay, which had the same requests.
        """
        scheduler = self._scheduler(asked)
        self._runs += 1
        requests = asked["requests"]
        self._core.model_executor = self._executor
        if asked["replay"]:
            recorded = {f"{self._runs}-{number}": each for number, each in enumerate(self._recorded)}
            self._core.model_executor = ReplayExecutor(scheduler, recorded, self._draft_len)
        arrivals = [request["arrival"] for request in requests]
        ends, service = [0] * len(requests), [0] * len(requests)
        texts: list[list[int]] = [[] for _ in requests]
        traces: list[list[int]] = [[] for _ in requests]
        steps = at = full_steps = full_tokens = 0
        full_cpu_s, full_s, full_scheduler_s, unfinished = 0.0, 0.0, 0.0, 0
        while at < len(requests) or scheduler.has_requests():
            while at < len(requests) and arrivals[at] <= steps:
                self.add(scheduler, at, requests[at], self._tokens)
                at, unfinished = at + 1, unfinished + 1
            full = unfinished >= 2 * self._slots
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            scheduler_s = sum(self._scheduler_s.values())
            tokens = 0
            outputs, executed = self._core.step()
            self._core.post_step(executed)
            steps += 1
            for batch in outputs.values():
                for one in batch.outputs:
                    number = int(one.request_id.split("-")[1])
                    service[number] += 1
                    traces[number].append(len(one.new_token_ids))
                    tokens += len(one.new_token_ids)
                    texts[number] += one.new_token_ids
                    if one.finish_reason is not None:
                        ends[number] = steps
                        unfinished -= 1
            if full:
                full_cpu_s += time.process_time() - began_cpu_s
                full_s += time.perf_counter() - began_s
                full_scheduler_s += sum(self._scheduler_s.values()) - scheduler_s
                full_steps, full_tokens = full_steps + 1, full_tokens + tokens
        if not asked["replay"]:
            self._recorded = [Recorded(text, trace) for text, trace in zip(texts, traces, strict=True)]
        worker: Any = getattr(scheduler, "one_worker", None)
        if asked.get("save"):
            save_learnt(scheduler, asked["save"])
        scheduler.shutdown()
        return {
            "latencies": [end - arrival for end, arrival in zip(ends, arrivals, strict=True)],
            "service": service,
            "lengths": [len(text) for text in texts],
            "texts": [digest(text) for text in texts],
            "steps": steps,
            "full_steps": full_steps,
            "full_tokens": full_tokens,
            "full_cpu_s": full_cpu_s,
            "full_s": full_s,
            "full_scheduler_s": full_scheduler_s,
            "pauses": worker.paused if worker else 0,
            "evictions": getattr(scheduler, "evictions", 0),
        }

    def _scheduler(self, asked: dict[str, Any]) -> Any:
        from laps_vllm.scheduler import Laps

        Laps.clock = staticmethod(lambda: self._now_s)
        scheduler = scheduler_for(
            self._parts,
            kind=asked["scheduler"],
            slots=self._slots,
            residents=self._residents,
            environment=asked.get("environment", {}),
        )
        for name in self._scheduler_s:
            setattr(scheduler, name, timed(getattr(scheduler, name), name, self._scheduler_s))
        schedule = scheduler.schedule

        def and_advance(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._now_s += STEP_S
            return output

        scheduler.schedule = and_advance
        self._core.scheduler = scheduler
        return scheduler


class Decisions:
    """vLLM's scheduler on a virtual runner, whose decisions are timed."""

    def __init__(self, setup: dict[str, Any]) -> None:
        from scheduler_svc.core import COMPILED

        self._compiled = COMPILED

    def cost(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the mean CPU time of a step's parts, with a constant number of requests that wait."""
        from laps_vllm.scheduler import LapsScheduler
        from tests.vllm.virtual import Server, burst

        ours, slots = asked["scheduler"] == "laps", asked["slots"]
        server = Server(
            LapsScheduler if ours else None,
            slots=slots,
            residents=4 * slots if ours else slots,
            blocks=asked["blocks"],
        )
        scheduler = server.scheduler
        # Made before, so that the collector does not look at requests that a server would not have yet.
        jobs = iter(burst(asked["warm"] * slots + asked["steps"] * slots + asked["waiting"], seed=1))
        # As vLLM does after its start: the collector is to look at what is made from here on.
        gc.collect()
        gc.freeze()
        seconds = dict.fromkeys(("schedule", "update_from_output", "choose", "report"), 0.0)
        for name in ("schedule", "update_from_output"):
            setattr(scheduler, name, timed(getattr(scheduler, name), name, seconds))
        if ours:
            scheduler.one_worker = _Watched(scheduler.one_worker, ("choose", "report"), seconds)
        for step in range(asked["warm"] + asked["steps"]):
            if step == asked["warm"]:
                seconds.update(dict.fromkeys(seconds, 0.0))
            while len(scheduler.requests) < slots + asked["waiting"]:
                job = next(jobs)
                kind = job.kind if asked["sends_class"] else ""
                server.add(replace(job, kind=kind, guess=job.guess if asked["guessed"] else None))
            server.step()
        scheduler.shutdown()
        gc.unfreeze()
        return {
            "compiled": self._compiled,
            **{f"{name}_ms": 1e3 * found / asked["steps"] for name, found in seconds.items()},
        }


class _Watched:
    """Replaces an object, which compiled code does not allow to change, and times some of its methods."""

    def __init__(self, thing: Any, names: Sequence[str], seconds: dict[str, float]) -> None:
        self.__dict__["_thing"] = thing
        for name in names:
            self.__dict__[name] = timed(getattr(thing, name), name, seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thing, name)


KINDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "engine": Engine,
    "decisions": Decisions,
    "worker": WorkerRuns,
    "shape": ShapeRuns,
    "computed": ComputedRuns,
}


def main() -> None:
    channel = open_channel()
    import vllm

    setup = json.loads(Path(sys.argv[1]).read_text())
    answers: Any = KINDS[setup["kind"]](setup)
    answer_all(channel, vllm.__version__, lambda asked: getattr(answers, asked["task"])(asked))


if __name__ == "__main__":
    main()
