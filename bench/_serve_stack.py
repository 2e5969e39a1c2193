"""The stack that `bench serve` measures, and its double in the simulator.

One worker, gateway and record live through all runs; each run has a scheduler of its own, with the policy of
the run, that finds the same priors on the record as all others: what was learnt from the warm-up.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio
import redis
from prometheus_client.parser import text_string_to_metric_families

from bench._replay import Reply, Send, draw_requests, replay
from bench.report import progress
from laps_sd.service.wire import channel_options
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from laps_sd.v1 import inference_pb2 as pb
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.store.keys import Keys
from simulator.cluster import Cluster
from simulator.jobs import Job
from simulator.machine import Machine

BLOCK_TOKENS = 16
KV_BLOCKS = 1024
"""16,384 tokens: no run fills them, so the measurement has no KV pressure."""
DRAFT_LEN = 6
SAVE_S = 0.5
"""Seconds between two writes of the priors by the scheduler of the warm-up and the calibration."""
CONNECT_TIMEOUT_S = 30.0
OUTSIDE_DECODING = ("other", "idle")
"""Phases of the worker that take time in every round apart from drafting, verifying and prefill; `waiting`,
for work, is not among them."""
BUSY = ("draft", "verify", "prefill", "swap", *OUTSIDE_DECODING)


@dataclass(frozen=True)
class Truth:
    """True length and drafts of a request. Its seed decides its tokens, so every run must find the same."""

    prompt_tokens: int
    output_tokens: int
    paces: bytes
    drafts: bytes
    alone_s: float
    """Latency with the stack to itself."""


@dataclass(frozen=True)
class Reading:
    """Counters of the worker at one moment."""

    rounds: float
    busy_s: float
    outside_s: float
    """Part of `busy_s`: between rounds, and in rounds outside of the models."""

    def since(self, before: Reading) -> Reading:
        return Reading(
            self.rounds - before.rounds, self.busy_s - before.busy_s, self.outside_s - before.outside_s
        )


@dataclass(frozen=True)
class Run:
    """One replay: the replies in the order of the requests, and the worker's counters over the run."""

    replies: list[Reply]
    worker: Reading


class ServedStack:
    """One-machine stack with a scheduler that changes its policy between runs."""

    def __init__(self, *, slots: int, engine: str, round_s: float) -> None:
        fast = {"LAPS_SD_FAKE_ROUND_S": "0.001", "LAPS_SD_FAKE_OUTPUT_TOKENS": "12"}
        self._stack = LocalStack(
            engine=engine,
            slots=slots,
            policy="fcfs",
            log_level="warning",
            environment={
                "LAPS_SD_KV_BLOCKS": str(KV_BLOCKS),
                "LAPS_SD_BLOCK_SIZE": str(BLOCK_TOKENS),
                "LAPS_SD_MAX_DRAFT_LEN": str(DRAFT_LEN),
                "LAPS_SD_ROUND_FLOOR_S": str(round_s),
                # The same prompts recur: one run would compute them, and the others would find them.
                "LAPS_SD_PREFIX_REUSE_TOKENS": "0",
                # Where every round takes equally long, a draft length chosen by cost would only make runs
                # differ.
                **({"LAPS_SD_DRAFT_LEN": str(DRAFT_LEN)} if round_s else {}),
                **(fast if engine == "fake" else {}),
            },
        )

    def __enter__(self) -> Self:
        self._stack.start()
        self._record = redis.Redis.from_url(self._stack.redis_url)
        return self

    def __exit__(self, *error: object) -> None:
        self._record.close()
        self._stack.stop()

    def schedule_by(self, policy: str, priors: bytes | None, *, save_s: float = 10.0) -> None:
        """Start a new scheduler with this policy and only these priors."""
        stack, keys = self._stack, Keys(self._stack.options.shard)
        stack.check()
        stack.kill("scheduler-0")
        # So that no component waits for the lease of a dead leader.
        self._record.delete(keys.leader(), keys.priors())
        if priors is not None:
            self._record.set(keys.priors(), priors)
        stack.restart("scheduler-0", policy=policy, priors_save_s=save_s)
        stack.wait_ready("gateway-0")
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        with grpc.insecure_channel(stack.scheduler_address) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            request = admin_pb2.ListWorkersRequest()
            while not any(worker.connected for worker in admin.ListWorkers(request, timeout=10).workers):
                if time.monotonic() > deadline:
                    raise RuntimeError("the worker did not find the new scheduler")
                time.sleep(0.02)
            in_force = admin.GetShard(admin_pb2.GetShardRequest(), timeout=10).policy
        if in_force != policy:
            raise RuntimeError(f"the scheduler runs {in_force}, {policy} was asked for")

    def learnt(self) -> bytes:
        """Wait until the scheduler has written its priors and learns no more; return them."""
        key = Keys(self._stack.options.shard).priors()
        before = None
        while True:
            time.sleep(3 * SAVE_S)
            found = self._record.get(key)
            if found is not None and found == before:
                return bytes(found)
            before = found

    async def run(self, requests: Sequence[pb.GenerateRequest], due_s: Sequence[float]) -> Run:
        """Replay the requests."""
        async with self._connected() as send:
            before = self.worker()
            replies = await replay(requests, due_s, send)
        return Run(replies, self.worker().since(before))

    async def run_alone(self, requests: Sequence[pb.GenerateRequest], title: str) -> Run:
        """Run the requests one after another. Raise RuntimeError if one fails."""
        replies: list[Reply] = []
        async with self._connected() as send:
            before = self.worker()
            for number, request in enumerate(requests, start=1):
                replies += await replay([request], [0.0], send, lead_s=0.0)
                if replies[-1].error:
                    raise RuntimeError(f"{title}: request {number} failed: {replies[-1].error}")
                if number % 10 == 0 or number == len(requests):
                    progress(f"{title}: {number} of {len(requests)} requests")
        return Run(replies, self.worker().since(before))

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Send]:
        """Yield the public API over a connection that is up."""
        address = self._stack.gateway_address
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            await channel.channel_ready()
            yield inference_pb2_grpc.InferenceStub(channel).GenerateStream

    def worker(self) -> Reading:
        """Read the worker's counters."""
        with urllib.request.urlopen(self._stack.metrics_url("worker-0")) as answer:
            text = answer.read().decode()
        phases: dict[str, float] = {}
        rounds = 0.0
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "laps_sd_worker_seconds_total":
                    phases[sample.labels["phase"]] = sample.value
                elif sample.name == "laps_sd_worker_rounds_total":
                    rounds = sample.value
        return Reading(
            rounds,
            sum(phases.get(phase, 0.0) for phase in BUSY),
            sum(phases.get(phase, 0.0) for phase in OUTSIDE_DECODING),
        )


# -- calibration ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """Knowledge before the first policy is measured."""

    priors: bytes
    """Priors of the warm-up, with which every scheduler starts."""
    truths: list[list[Truth]]
    """Truths of each set of requests."""
    machine: Machine
    """Worker as the simulator models it."""
    admission_s: float
    """Seconds at the scheduler between two requests that were sent at once."""


async def calibrate(
    stack: ServedStack,
    sets: Sequence[Sequence[pb.GenerateRequest]],
    *,
    warm_up: int,
    max_tokens: int,
    sigma: float,
    slots: int,
) -> Calibration:
    """Calibrate the stack. The warm-up, which no run measures, teaches lengths, acceptance, costs and the
    accuracy of the hints; then every request runs alone, which gives its length.
    """
    stack.schedule_by("fcfs", None, save_s=SAVE_S)
    requests = draw_requests(0, warm_up, max_tokens)
    alone = await stack.run_alone(requests, "warm-up")
    # Again, all at once and with hints: batches are full then, and the hints' error is learnt as in the runs.
    again = await stack.run(
        hinted(requests, [truth_of(reply) for reply in alone.replies], sigma, 0), [0.0] * warm_up
    )
    accepted = sorted(reply.accepted_s for reply in again.replies)
    priors = stack.learnt()
    truths = []
    before = stack.worker()
    for number, wanted in enumerate(sets, start=1):
        found = await stack.run_alone(wanted, f"calibration, seed {number} of {len(sets)}")
        truths.append([truth_of(reply) for reply in found.replies])
    measured = stack.worker().since(before)
    return Calibration(
        priors,
        truths,
        fitted_machine(Priors.from_dict(json.loads(stack.learnt())), measured, slots),
        (accepted[-1] - accepted[0]) / max(1, len(accepted) - 1),
    )


def truth_of(reply: Reply) -> Truth:
    """Return the truth of a request that ran alone."""
    speculation, tokens = reply.ended.speculation, reply.ended.usage.completion_tokens
    rounds = max(1, min(speculation.rounds, tokens))
    whole = len(reply.deltas) == rounds and sum(reply.deltas) == tokens
    # Messages that were joined on the way hide single rounds; their number is known all the same.
    paces = reply.deltas if whole else spread(tokens, rounds)
    refused = spread(max(0, speculation.drafted - (tokens - rounds)), rounds)
    return Truth(
        reply.ended.usage.prompt_tokens,
        tokens,
        bytes(paces),
        bytes(pace - 1 + more for pace, more in zip(paces, refused, strict=True)),
        reply.latency_s,
    )


def spread(total: int, parts: int) -> list[int]:
    """Return `total` in `parts` whole numbers that are as equal as possible."""
    ends = [total * number // parts for number in range(parts + 1)]
    return [high - low for low, high in itertools.pairwise(ends)]


def hinted(
    requests: Sequence[pb.GenerateRequest], truths: Sequence[Truth], sigma: float, seed: int
) -> list[pb.GenerateRequest]:
    """Return the same requests with `expected_output_tokens`: truth × exp(sigma · z)."""
    rng = random.Random(f"serve/hints/{seed}")
    found = []
    for request, truth in zip(requests, truths, strict=True):
        changed = pb.GenerateRequest()
        changed.CopyFrom(request)
        guess = truth.output_tokens * math.exp(sigma * rng.gauss(0, 1))
        changed.expected_output_tokens = max(1, round(guess))
        found.append(changed)
    return found


def fitted_machine(priors: Priors, measured: Reading, slots: int) -> Machine:
    """Return the worker's rounds as the scheduler has learnt them, with the time of a round apart from
    drafting and verifying.
    """
    cost = priors.cost
    fixed_s = cost.round_s(0, 0, 0)
    return Machine(
        slots=slots,
        draft_len=DRAFT_LEN,
        round_s=fixed_s + measured.outside_s / max(1.0, measured.rounds),
        sequence_s=cost.round_s(1, 0, 0) - fixed_s,
        verified_token_s=cost.round_s(0, 1, 0) - fixed_s,
        context_token_s=cost.round_s(0, 0, 1) - fixed_s,
        prefill_token_s=cost.prefill_share_s(1),
        swap_token_s=cost.swap_in_s(1),
        kv_tokens=KV_BLOCKS * BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
    )


# -- the double -----------------------------------------------------------------------------------------------------------


def make_jobs(
    requests: Sequence[pb.GenerateRequest], truths: Sequence[Truth], arrive_s: Sequence[float]
) -> list[Job]:
    """Return the same requests for the simulator."""
    return [
        Job(
            request_id=f"r{number:06d}",
            arrival_s=arrival_s,
            prompt_tokens=truth.prompt_tokens,
            paces=truth.paces,
            drafts=truth.drafts,
            max_tokens=request.sampling.max_tokens,
            predicted_tokens=request.expected_output_tokens or None,
            workload_class=request.workload_class,
        )
        for number, (request, truth, arrival_s) in enumerate(zip(requests, truths, arrive_s, strict=True))
    ]


def simulated_latencies(
    policy: str,
    requests: Sequence[pb.GenerateRequest],
    due_s: Sequence[float],
    truths: Sequence[Truth],
    calibration: Calibration,
) -> list[float]:
    """Return the latencies from each scheduled send time, in seconds, with the production core in virtual
    time.
    """
    arrive_s: list[float] = []
    for at_s in due_s:
        # Requests sent at once arrive one after another, and the first finds an idle worker.
        arrive_s.append(max(at_s, arrive_s[-1] + calibration.admission_s) if arrive_s else at_s)
    priors: dict[str, Any] = json.loads(calibration.priors)
    outcome = Cluster(
        make_jobs(requests, truths, arrive_s),
        calibration.machine,
        1,
        lambda _, settings: policy_named(policy, settings),
        CoreSettings(),
        priors=Priors.from_dict(priors),
    ).run()
    return [fate.finished_s - at_s for fate, at_s in zip(outcome.fates, due_s, strict=True)]
