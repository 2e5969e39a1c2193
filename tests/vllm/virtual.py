"""vLLM's real schedulers on a virtual clock: a runner that is a cost model, no weights, no tensors.

The runner proposes `DRAFTS` tokens after each step and accepts each with the job's own probability, as the
model runner's outcome would look to the scheduler. Under async scheduling one step is in flight while the next
one is scheduled.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from bench._vllm.in_core import model_output
from laps_vllm.scheduler import Laps

DEMO = Path(__file__).parents[2] / "worker_svc" / "demo"
BLOCK = 16
DRAFTS = 4
END_TOKEN = 2
MODEL_LENGTH = 512
STEP_S, DRAFT_S, TOKEN_S = 0.020, 0.008, 0.00009
"""Costs of a step, of its drafting and of each token in it: about a 7B model on a GPU."""


@dataclass(frozen=True)
class Job:
    """One request, and what it will do."""

    arrival_s: float
    prompt: int
    length: int
    """Output tokens until its end token."""
    acceptance: float = 0.7
    kind: str = ""
    guess: int | None = None
    priority: int = 0
    adapter: int = 0
    words: tuple[int, ...] = ()
    """Token ids that its prompt begins with; the others differ from prompt to prompt."""


@dataclass
class Outcome:
    """What a run did."""

    latency_s: list[float] = field(default_factory=list)
    steps: int = 0
    computed: int = 0
    """Tokens computed, draft tokens included."""
    makespan_s: float = 0.0

    @property
    def mean_s(self) -> float:
        return sum(self.latency_s) / len(self.latency_s)


def config_of(
    *,
    slots: int,
    residents: int,
    blocks: int,
    asynchronous: bool,
    policy: str = "fcfs",
    budget: int = 512,
    block_size: int = BLOCK,
    tokenizer: bool = False,
    keeps_kv: bool = True,
    chunked: bool = True,
    rank: int = 0,
    watermark: float = 0.0,
) -> tuple[VllmConfig, KVCacheConfig]:
    model = ModelConfig(
        model=str(DEMO / "target"),
        dtype="float32",
        max_model_len=MODEL_LENGTH,
        skip_tokenizer_init=not tokenizer,
    )
    parallel = ParallelConfig()
    parallel.data_parallel_index = rank
    speculative = SpeculativeConfig(
        target_model_config=model,
        target_parallel_config=parallel,
        method="draft_model",
        model=str(DEMO / "draft"),
        num_speculative_tokens=DRAFTS,
    )
    scheduling = SchedulerConfig(
        max_num_seqs=residents,
        max_num_active_seqs=slots,
        max_num_batched_tokens=budget,
        max_model_len=MODEL_LENGTH,
        is_encoder_decoder=False,
        policy=policy,
        async_scheduling=asynchronous,
        enable_chunked_prefill=chunked,
        watermark=watermark,
    )
    cache = CacheConfig(block_size=block_size, gpu_memory_utilization=0.5, enable_prefix_caching=keeps_kv)
    config = VllmConfig(
        model_config=model,
        cache_config=cache,
        parallel_config=parallel,
        scheduler_config=scheduling,
        speculative_config=speculative if keeps_kv else None,
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.async_scheduling = asynchronous
    cache.num_gpu_blocks = blocks
    if not keeps_kv:
        return config, KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    attention = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return config, KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], attention)]
    )


class Server:
    """One vLLM scheduler with a virtual runner."""

    def __init__(
        self,
        cls: Callable[..., Any] | None,
        *,
        slots: int = 4,
        residents: int | None = None,
        blocks: int = 2000,
        asynchronous: bool = False,
        policy: str = "fcfs",
        seed: int = 1,
        tokenizer: bool = False,
        keeps_kv: bool = True,
        chunked: bool = True,
        rank: int = 0,
        watermark: float = 0.0,
    ) -> None:
        config, kv = config_of(
            slots=slots,
            residents=residents or slots,
            blocks=blocks,
            asynchronous=asynchronous,
            policy=policy,
            tokenizer=tokenizer,
            keeps_kv=keeps_kv,
            chunked=chunked,
            rank=rank,
            watermark=watermark,
        )
        cls = cls or (AsyncScheduler if asynchronous else Scheduler)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.now_s = 1000.0
        self.scheduler = cls(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=False,
        )
        if isinstance(self.scheduler, Laps):
            self.scheduler.clock = lambda: self.now_s
        self.slots = slots
        self.asynchronous = asynchronous
        self.jobs: dict[str, Job] = {}
        self.emitted: dict[str, int] = {}
        self.ended: dict[str, float] = {}
        self.in_flight: deque[tuple[Any, dict[str, bool]]] = deque()
        self.steps = self.computed = 0
        self.run_sizes: list[int] = []
        self._random = random.Random(seed)

    def add(self, job: Job, name: str = "", *, structured: Any = None, **sampling: Any) -> str:
        """Add a request. `structured`: what vLLM has for a request whose output has a format, while its grammar compiles;
        `sampling`: more of its parameters, of vLLM's `SamplingParams`.
        """
        name = name or str(len(self.jobs))
        extra: dict[str, Any] = {"workload_class": job.kind} if job.kind else {}
        if job.guess is not None:
            extra["expected_output_tokens"] = job.guess
        usual = {"temperature": 0, "max_tokens": MODEL_LENGTH - job.prompt, "stop_token_ids": [END_TOKEN]}
        params = SamplingParams(**(usual | sampling), extra_args=extra or None)
        number = len(self.jobs)
        request = Request(
            name,
            [*job.words, *(3 + (number * 31 + at) % 900 for at in range(len(job.words), job.prompt))],
            params,
            None,
            arrival_time=self.now_s,
            priority=job.priority,
            block_hasher=self.hasher,
        )
        if structured is not None:
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            request.structured_output_request = structured
        self.jobs[name], self.emitted[name] = job, 0
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.ended.setdefault(name, self.now_s)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self.in_flight)

    def step(self) -> None:
        """Schedule a step, and take in the oldest one that is in flight."""
        scheduler = self.scheduler
        if scheduler.has_requests():
            output = scheduler.schedule()
            partial = {
                name: scheduler.requests[name].is_prefill_chunk for name in output.num_scheduled_tokens
            }
            self.in_flight.append((output, partial))
            self.run_sizes.append(len(output.num_scheduled_tokens))
            if self.asynchronous and len(self.in_flight) < 2 and output.total_num_scheduled_tokens:
                return
        if self.in_flight:
            self._finish(*self.in_flight.popleft())

    def _finish(self, output: Any, partial: dict[str, bool]) -> None:
        if output.total_num_scheduled_tokens:
            self.steps += 1
            self.computed += output.total_num_scheduled_tokens
            self.now_s += STEP_S + DRAFT_S + TOKEN_S * output.total_num_scheduled_tokens
        names = list(output.num_scheduled_tokens)
        sampled = [self._sampled(name, output, partial[name]) for name in names]
        outputs = self.scheduler.update_from_output(output, model_output(names, sampled))
        if not self.asynchronous:
            drafts = [[7] * DRAFTS if tokens else [] for tokens in sampled]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
        for each in outputs.values():
            for one in each.outputs:
                if one.finish_reason is not None:
                    self.ended[one.request_id] = self.now_s

    def _sampled(self, name: str, output: Any, partial: bool) -> list[int]:
        request = self.scheduler.requests.get(name)
        drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
        if request is None or request.is_finished() or (partial and not drafts):
            return []
        job = self.jobs[name]
        accepted = 0
        while accepted < drafts and self._random.random() < job.acceptance:
            accepted += 1
        left = job.length - self.emitted[name]
        tokens = [7] * (accepted + 1)
        if left <= accepted + 1:
            tokens[max(0, left - 1)] = END_TOKEN
        self.emitted[name] += min(accepted + 1, left)
        return tokens

    def check(self) -> None:
        """Assert what holds between any two steps."""
        scheduler = self.scheduler
        assert len(scheduler.running) <= scheduler.max_num_running_reqs
        assert all(size <= self.slots for size in self.run_sizes[-1:])
        names = [request.request_id for request in scheduler.running]
        assert len(set(names)) == len(names)
        if isinstance(scheduler, Laps):
            assert not set(names) & scheduler.waiting.all.keys()
            scheduler.one_worker.core.check()
            for name, request in scheduler.requests.items():
                now = scheduler._now(name)
                if now is not None:
                    assert now == (request.num_tokens, *scheduler.held_and_shared(request))
            if not scheduler.deferred_frees:
                self._check_blocks()

    def _check_blocks(self) -> None:
        """Assert that the blocks of requests, shared ones once, are those that are not free."""
        scheduler, requests = self.scheduler, self.scheduler.requests.values()
        held = [scheduler.held_and_shared(one) for one in requests]
        holders = Counter(run for _, shared in held for run in shared)
        taken = sum(blocks for blocks, _ in held)
        taken -= sum((count - 1) * run.target_blocks for run, count in holders.items())
        assert taken == scheduler.pool_blocks - scheduler.free_blocks()


def run(server: Server, jobs: Sequence[Job], *, check: bool = False) -> Outcome:
    """Run all jobs to their ends."""
    start_s, waiting = server.now_s, deque(sorted(jobs, key=lambda job: job.arrival_s))
    arrivals: dict[str, float] = {}
    while waiting or server.busy:
        while waiting and start_s + waiting[0].arrival_s <= server.now_s:
            job = waiting.popleft()
            arrivals[server.add(job)] = start_s + job.arrival_s
        if not server.busy:
            server.now_s = start_s + waiting[0].arrival_s
            continue
        server.step()
        if check:
            server.check()
    assert server.ended.keys() == arrivals.keys(), "every request has an end"
    assert all(server.emitted[name] == server.jobs[name].length for name in arrivals)
    return Outcome(
        latency_s=[server.ended[name] - at for name, at in arrivals.items()],
        steps=server.steps,
        computed=server.computed,
        makespan_s=server.now_s - start_s,
    )


def burst(count: int, seed: int, *, within_s: float = 2.0) -> list[Job]:
    """Four kinds of requests with lognormal lengths and their own acceptance, at once."""
    kinds = {
        "chat": (60, 0.8, 0.6),
        "code": (120, 0.7, 0.85),
        "short": (12, 0.6, 0.7),
        "story": (180, 0.6, 0.45),
    }
    rng = random.Random(seed)
    jobs = []
    for _ in range(count):
        kind = rng.choice(list(kinds))
        median, sigma, mean = kinds[kind]
        length = max(1, min(300, round(median * rng.lognormvariate(0, sigma))))
        acceptance = min(0.97, max(0.03, rng.betavariate(8 * mean, 8 * (1 - mean))))
        guess = max(1, round(length * rng.lognormvariate(0, 0.5)))
        jobs.append(Job(rng.uniform(0, within_s), rng.randint(16, 150), length, acceptance, kind, guess))
    return jobs
