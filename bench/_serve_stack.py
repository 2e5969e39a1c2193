"""The stack that `bench serve` measures, and its double in the simulator.

One worker, gateway and record live through all runs; each run has a scheduler of its own, with the policy of
the run, that finds the same priors on the record as all others with the same hints: what was learnt from the
warm-up.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import grpc
import grpc.aio
import redis

from bench._metrics import MetricsPage
from bench._replay import Reply, Send, draw_requests, poisson_times, replay
from bench.report import progress
from gateway.calls.prompts import features_of
from laps_sd.contract.length_features import FeatureHash, packed
from laps_sd.service.keys import ANONYMOUS
from laps_sd.service.wire import channel_options
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from laps_sd.v1 import inference_pb2 as pb
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.estimates.prompt_lengths import PromptLengths
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.start_weights import start_weights
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
        async with grpc.aio.insecure_channel(address, options=channel_options(address)) as channel:
            await channel.channel_ready()
            yield inference_pb2_grpc.InferenceStub(channel).GenerateStream

    def worker(self) -> Reading:
        """Read the worker's counters."""
        page = MetricsPage(self._stack.metrics_url("worker-0"))

        def seconds(phases: Sequence[str]) -> float:
            return sum(page.total("laps_sd_worker_seconds_total", phase=phase) for phase in phases)

        return Reading(page.total("laps_sd_worker_rounds_total"), seconds(BUSY), seconds(OUTSIDE_DECODING))


# -- calibration ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """Knowledge before the first policy is measured."""

    priors: Mapping[float | None, bytes]
    """Priors of the warm-up, with which every scheduler starts, by the error of the hints."""
    warm_up: list[pb.GenerateRequest]
    """Requests of the warm-up."""
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
    sigmas: Sequence[float | None],
    slots: int,
) -> Calibration:
    """Calibrate the stack. The warm-up, which no run measures, teaches lengths, acceptance, costs and what
    guesses are worth, anew with each kind of hints; then every measured request runs alone, which gives its
    length.
    """
    stack.schedule_by("fcfs", None)
    requests = draw_requests(0, warm_up, max_tokens)
    alone = await stack.run_alone(requests, "warm-up")
    lengths = [truth_of(reply) for reply in alone.replies]
    # About as many as the worker can do: batches are full at times, and most requests arrive after others have
    # ended, so that predictions are judged that were made with some experience.
    due_s = poisson_times(0, warm_up, statistics.fmean(truth.alone_s for truth in lengths) / slots)
    priors = {}
    for sigma in sigmas:
        stack.schedule_by("fcfs", None, save_s=SAVE_S)
        progress(f"warm-up with {'no hints' if sigma is None else f'hints of sigma {sigma:g}'}")
        _check(await stack.run(hinted(requests, lengths, sigma, 0), due_s), "warm-up")
        priors[sigma] = stack.learnt()
    admission_s = await _admission_s(stack, sets[0])
    truths = []
    before = stack.worker()
    for number, wanted in enumerate(sets, start=1):
        found = await stack.run_alone(wanted, f"calibration, seed {number} of {len(sets)}")
        truths.append([truth_of(reply) for reply in found.replies])
    measured = stack.worker().since(before)
    return Calibration(
        priors, requests, truths, fitted_machine(priors_of(stack.learnt()), measured, slots), admission_s
    )


async def _admission_s(stack: ServedStack, requests: Sequence[pb.GenerateRequest]) -> float:
    """Return the seconds between two requests at the scheduler when all are sent at once. They are cut after a
    token, since only their arrival counts.
    """
    short = []
    for request in requests:
        changed = pb.GenerateRequest()
        changed.CopyFrom(request)
        changed.sampling.max_tokens = 1
        short.append(changed)
    found = await stack.run(short, [0.0] * len(short))
    _check(found, "calibration")
    accepted = sorted(reply.accepted_s for reply in found.replies)
    return (accepted[-1] - accepted[0]) / max(1, len(accepted) - 1)


def _check(run: Run, title: str) -> None:
    """Raise RuntimeError if a request failed."""
    if failed := [reply.error for reply in run.replies if reply.error]:
        raise RuntimeError(f"{title}: {len(failed)} requests failed: {failed[0]}")


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
    requests: Sequence[pb.GenerateRequest], truths: Sequence[Truth], sigma: float | None, seed: int
) -> list[pb.GenerateRequest]:
    """Return the same requests with `expected_output_tokens`: truth × exp(sigma · z). If sigma is None, return
    them without, and without their class, which names the kind of the prompt: most clients say neither.
    """
    rng = random.Random(f"serve/hints/{seed}")
    found = []
    for request, truth in zip(requests, truths, strict=True):
        changed = pb.GenerateRequest()
        changed.CopyFrom(request)
        if sigma is None:
            changed.workload_class = ""
        else:
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


def priors_of(saved: bytes) -> Priors:
    """Return the priors that a scheduler saved, as the next one reads them."""
    return Priors.from_dict(json.loads(saved), PromptLengths(*start_weights()))


def make_jobs(
    requests: Sequence[pb.GenerateRequest], truths: Sequence[Truth], arrive_s: Sequence[float]
) -> list[Job]:
    """Return the same requests for the simulator."""
    hashed = FeatureHash()
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
            tenant=ANONYMOUS,
            length_features=packed(features_of(request, hashed)),
        )
        for number, (request, truth, arrival_s) in enumerate(zip(requests, truths, arrive_s, strict=True))
    ]


def simulated_latencies(
    policy: str,
    requests: Sequence[pb.GenerateRequest],
    due_s: Sequence[float],
    truths: Sequence[Truth],
    priors: bytes,
    calibration: Calibration,
) -> list[float]:
    """Return the latencies from each scheduled send time, in seconds, with the production core in virtual
    time, from these priors.
    """
    arrive_s: list[float] = []
    for at_s in due_s:
        # Requests sent at once arrive one after another, and the first finds an idle worker.
        arrive_s.append(max(at_s, arrive_s[-1] + calibration.admission_s) if arrive_s else at_s)
    outcome = Cluster(
        make_jobs(requests, truths, arrive_s),
        calibration.machine,
        1,
        lambda _, settings: policy_named(policy, settings),
        CoreSettings(),
        priors=priors_of(priors),
    ).run()
    return [fate.finished_s - at_s for fate, at_s in zip(outcome.fates, due_s, strict=True)]
