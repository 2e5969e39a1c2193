"""Workers that cost little CPU: the protocol of WorkerLink, no engine, and reports on a fixed schedule.

Each worker dials a stream of its own and reports a round every `round_s` seconds, as a device would that
takes this long for every round, whatever it contains: the first `slots` requests of the newest list
took part. A request prefills in its first round and gains 1 to 4 tokens in every round (2.7 on average); it
ends when it reaches the length that is drawn from its id. All KV fits, so that nothing is evicted.

Left out: reconnection, and the limits of unacknowledged tokens. A worker that reaches a round after the time
of the next one skips the rounds that it has missed, and counts them as late.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any, NamedTuple

import grpc.aio
import uvloop

from bench._control.latency import Sample, is_sampled
from bench._control.lengths import output_length
from laps_sd.service import wire
from laps_sd.service.leader_link import PROTOCOL_VERSIONS, until_first_ends
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as pb
from laps_sd.v1.worker_link_pb2_grpc import WorkerLinkStub
from worker_svc.link.lists import AssignedList
from worker_svc.runner.messages import Listed

HEARTBEAT_S = 1.0
BLOCK_SIZE = 16
BLOCKS = 1_000_000
"""KV blocks of a worker: more than its requests need."""
MAX_LENGTH = 65_536
VOCABULARY = 32_000
DRAFTED = 3
"""Draft tokens of a request in a round."""
ACCEPTANCE = (5.8, 2.2)
"""Beta distribution of the requests' chances that a draft token is accepted: 2.7 tokens a round."""
SCRIPTS = 64
SCRIPTED_ROUNDS = 128
PREFILL_SHARE_OF_ROUND = 0.001
"""Reported time of the prefill of one token, in rounds; a round reports at most a half."""
SAMPLES_PER_REPORT = 2


@dataclass(frozen=True)
class Fleet:
    """Workers of one process: numbers `first` to `first + count - 1` of `of` workers in all."""

    address: str
    pool: str
    first: int
    count: int
    of: int
    slots: int
    round_s: float
    round_spread: float
    """Share of `round_s` by which a round may be shorter or longer."""
    output_tokens: int
    """Median length of an output."""


class Counters(NamedTuple):
    """Work of the workers of one process since its start."""

    reports: int
    requests: int
    """Requests in these reports; one counts in each report that contains it."""
    tokens: int
    late_rounds: int
    cpu_s: float


class ScriptedRound(NamedTuple):
    """Gain of a request in one round."""

    token_ids: tuple[int, ...]
    accepted: int


@dataclass(slots=True)
class Held:
    """One leased request."""

    request_id: str
    lease_epoch: int
    position: int
    end: int
    """Output tokens at which it ends."""
    script: Sequence[ScriptedRound]
    rounds: int
    to_prefill: int
    sampled: bool
    over: bool = False
    """True once it has ended here or was dropped: it does not run again."""


_rank = attrgetter("rank_class", "index_s", "request_id")
"""Order of requests in a list, but for the reserved ones; see `laps_sd.contract.choose`."""


def scripts(rng: random.Random) -> list[list[ScriptedRound]]:
    """Return the rounds of `SCRIPTS` requests, each with its own chance of acceptance."""
    return [
        [_scripted(rng, acceptance) for _ in range(SCRIPTED_ROUNDS)]
        for acceptance in [rng.betavariate(*ACCEPTANCE) for _ in range(SCRIPTS)]
    ]


def _scripted(rng: random.Random, acceptance: float) -> ScriptedRound:
    accepted = 0
    while accepted < DRAFTED and rng.random() < acceptance:
        accepted += 1
    return ScriptedRound(tuple(rng.randrange(VOCABULARY) for _ in range(accepted + 1)), accepted)


def round_report(number: int, run: Sequence[Held], round_s: float) -> pb.RoundReport:
    """Run one round of these requests, and return its report."""
    report = pb.RoundReport(
        number=number, total_s=round_s, free_target_blocks=BLOCKS // 2, free_draft_blocks=BLOCKS // 2
    )
    plain: list[tuple[Held, int, ScriptedRound]] = []
    prefilled = 0
    for request in run:
        gained, position = request.script[request.rounds % SCRIPTED_ROUNDS], request.position
        request.rounds += 1
        request.position += len(gained.token_ids)
        request.over = request.position >= request.end
        if not request.over and not request.to_prefill:
            plain.append((request, position, gained))
            continue
        report.progress.add(
            request_id=request.request_id,
            lease_epoch=request.lease_epoch,
            position=position,
            token_ids=gained.token_ids,
            drafted=DRAFTED,
            accepted=gained.accepted,
            prefilled=request.to_prefill,
            end=gateway_pb.RequestEnd.KIND_STOP if request.over else None,
        )
        prefilled += request.to_prefill
        request.to_prefill = 0
    if plain:
        requests, positions, gains = zip(*plain, strict=True)
        columns = report.plain
        columns.request_ids.extend([request.request_id for request in requests])
        columns.lease_epochs.extend([request.lease_epoch for request in requests])
        columns.positions.extend(positions)
        columns.token_counts.extend([len(gained.token_ids) for gained in gains])
        columns.token_ids.extend([token_id for gained in gains for token_id in gained.token_ids])
        columns.drafted.extend([DRAFTED] * len(plain))
        columns.accepted.extend([gained.accepted for gained in gains])
    report.prefill_s = round_s * min(0.5, prefilled * PREFILL_SHARE_OF_ROUND)
    report.draft_s = 0.2 * (round_s - report.prefill_s)
    report.verify_s = round_s - report.prefill_s - report.draft_s
    return report


class SyntheticWorker:
    """One worker of a fleet; see the module's docstring."""

    def __init__(self, fleet: Fleet, number: int, scripted: list[list[ScriptedRound]]) -> None:
        self.reports = self.requests = self.tokens = self.late_rounds = 0
        self.samples: list[Sample] = []
        self._fleet = fleet
        self._name = f"synthetic-{number}"
        self._offset_s = fleet.round_s * number / fleet.of
        self._scripts = scripted
        self._held: dict[str, Held] = {}
        self._lists = AssignedList()
        self._newest: tuple[Listed, ...] | None = None
        """The newest list, until a round begins with it."""
        self._listed: list[Held] = []
        self._ended: deque[tuple[int, list[Held]]] = deque()
        """By report that is not acknowledged: the requests that ended with it."""
        self._greeted = asyncio.Event()
        self._rng = random.Random(number)

    async def run(self) -> None:
        """Work until the stream ends. Raise RuntimeError if the scheduler ends it."""
        async with wire.make_channel(self._fleet.address) as channel:
            call: Any = WorkerLinkStub(channel).Connect()
            await call.write(pb.WorkerMessage(hello=self._hello()))
            await until_first_ends(self._read(call), self._write(call))

    def _hello(self) -> pb.WorkerHello:
        fleet = self._fleet
        return pb.WorkerHello(
            worker_id=self._name,
            worker_name=self._name,
            pool=fleet.pool,
            protocol_versions=PROTOCOL_VERSIONS,
            fingerprint="synthetic",
            device="synthetic",
            slots=fleet.slots,
            target_blocks=BLOCKS,
            draft_blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            max_length=MAX_LENGTH,
            max_draft_tokens=DRAFTED,
            vocab_size=VOCABULARY,
        )

    # -- down ----------------------------------------------------------------------------------------------

    async def _read(self, call: Any) -> None:
        while True:
            reply = await call.read()
            if reply is grpc.aio.EOF:
                raise RuntimeError(f"the scheduler ended the stream of {self._name}")
            self._acknowledged(reply.acknowledged_number or reply.acknowledged.number)
            match reply.WhichOneof("message"):
                case "hello":
                    self._greeted.set()
                case "specifications":
                    for leased in reply.specifications.specifications:
                        self._specified(leased)
                case "assignment":
                    self._newest = self._lists.take(reply.assignment)
                case "drop":
                    for request in reply.drop.requests:
                        held = self._held.get(request.request_id)
                        if held is not None and held.lease_epoch <= request.lease_epoch:
                            self._forget(held)
                case "refused":
                    raise RuntimeError(f"the scheduler refuses {self._name}: {reply.refused.detail}")

    def _acknowledged(self, number: int) -> None:
        while self._ended and self._ended[0][0] <= number:
            for ended in self._ended.popleft()[1]:
                self._forget(ended)

    def _specified(self, leased: pb.LeasedSpecification) -> None:
        specification = leased.specification
        request_id = specification.request_id
        if request_id in self._held:
            self._forget(self._held[request_id])
        # A request that moves to another worker ends where it would have here.
        rng = random.Random(request_id)
        length = output_length(rng, self._fleet.output_tokens)
        emitted = len(specification.committed_ids)
        self._held[request_id] = Held(
            request_id=request_id,
            lease_epoch=leased.lease_epoch,
            position=emitted,
            # The last round may pass the end by as many tokens as were drafted.
            end=max(1, min(length, specification.sampling.max_tokens - DRAFTED)),
            script=rng.choice(self._scripts),
            rounds=rng.randrange(SCRIPTED_ROUNDS),
            to_prefill=len(specification.prompt_ids) + emitted,
            sampled=is_sampled(request_id),
        )

    def _forget(self, held: Held) -> None:
        held.over = True
        if self._held.get(held.request_id) is held:
            del self._held[held.request_id]

    # -- up ------------------------------------------------------------------------------------------------

    async def _write(self, call: Any) -> None:
        await self._greeted.wait()
        round_s, spread = self._fleet.round_s, self._fleet.round_spread
        now_s = time.monotonic()
        due_s = (now_s // round_s + 1) * round_s + self._offset_s
        heartbeat_s = now_s
        while True:
            await asyncio.sleep(due_s - time.monotonic())
            if due_s >= heartbeat_s:
                heartbeat_s = due_s + HEARTBEAT_S
                heartbeat = gateway_pb.Heartbeat(sent_ms=time.monotonic_ns() // 1_000_000)
                await call.write(pb.WorkerMessage(heartbeat=heartbeat))
            run = self._chosen()
            if run:
                await call.write(self._round(run))
            due_s += round_s * self._rng.uniform(1 - spread, 1 + spread)
            if (behind_s := time.monotonic() - due_s) > 0:
                missed = math.ceil(behind_s / round_s)
                self.late_rounds += missed
                due_s += missed * round_s

    def _chosen(self) -> list[Held]:
        """Return the requests of the next round."""
        if self._newest is not None:
            best_first = sorted(self._newest, key=_rank)
            found = [(self._held.get(entry.request_id), entry) for entry in best_first]
            self._listed = [
                held for held, entry in found if held is not None and held.lease_epoch == entry.lease_epoch
            ]
            self._newest = None
        return [held for held in self._listed if not held.over][: self._fleet.slots]

    def _round(self, run: list[Held]) -> pb.WorkerMessage:
        """Run a round and return its message, with the samples taken just before it is sent."""
        sampled = [held for held in run if held.sampled][:SAMPLES_PER_REPORT]
        positions = [held.position for held in sampled]
        before = sum([held.position for held in run])
        self.reports += 1
        report = round_report(self.reports, run, self._fleet.round_s)
        message = pb.WorkerMessage(reports=pb.RoundReports(reports=[report]))
        self.requests += len(run)
        self.tokens += sum([held.position for held in run]) - before
        if ended := [held for held in run if held.over]:
            self._ended.append((self.reports, ended))
        sent_s = time.monotonic()
        for held, position in zip(sampled, positions, strict=True):
            self.samples.append(Sample(held.request_id, position, sent_s))
        return message


def worker_process(pipe: Connection, fleet: Fleet) -> None:
    """Run the workers of a fleet until killed, or until the other end of the pipe is closed.

    Each message is answered with (Counters, list of Samples): with the samples since the message before if it
    is true, without any otherwise.
    """
    gc.disable()  # a pause would delay the reports of all workers at once

    async def run() -> None:
        scripted = scripts(random.Random(fleet.first))
        workers = [
            SyntheticWorker(fleet, number, scripted)
            for number in range(fleet.first, fleet.first + fleet.count)
        ]

        running = asyncio.current_task()
        assert running is not None

        def answer() -> None:
            try:
                with_samples = pipe.recv()
            except EOFError:
                running.cancel()
                return
            counters = Counters(
                sum([worker.reports for worker in workers]),
                sum([worker.requests for worker in workers]),
                sum([worker.tokens for worker in workers]),
                sum([worker.late_rounds for worker in workers]),
                time.process_time(),
            )
            samples = [sample for worker in workers for sample in worker.samples] if with_samples else []
            for worker in workers:
                worker.samples.clear()
            os.set_blocking(pipe.fileno(), True)  # the loop has changed that, and samples may fill the pipe
            pipe.send((counters, samples))

        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
        await until_first_ends(*(worker.run() for worker in workers))

    uvloop.run(run())
