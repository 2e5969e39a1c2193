"""A shard in steady state around the real core: fixed numbers of queued requests and workers, and a new request for each one that ends.

Workers are virtual: they hold what they were assigned, choose with `laps_sd.contract.choose` as real ones do, and report a round
when one is requested. All randomness comes from one seed, so two shards of the same size see the same events.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from laps_sd.contract.choose import NEW_CLOCK, Candidate, Residency, WorkerState, choose
from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Assign, AssignEntry, Command, Drop
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import (
    Arrived,
    Event,
    Progress,
    RequestFacts,
    ResidencyChange,
    RoundReported,
    WorkerFacts,
    WorkerUp,
)
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings

DRAFT_LEN = 5
BLOCK_SIZE = 16
MAX_LENGTH = 2048
CLASSES = ("", "chat", "code", "summary")
ARRIVALS_PER_STEP = 256
"""Arrivals per step while the queue is filled."""
WARM_UP_STEPS = 20
"""Steps of the warm-up, each of `priors_interval_s`: afterwards the core publishes its priors at that
interval."""


@dataclass(slots=True)
class _Job:
    """True output of a request, and its progress on the worker. Made when the request is first listed."""

    prompt: int
    output: int
    acceptance: float
    lease_epoch: int
    emitted: int = 0
    residency: Residency = Residency.NONE
    blocks: int = 0


class VirtualWorker:
    """Worker without a model, as it behaves between two reports."""

    def __init__(self, facts: WorkerFacts, rng: random.Random) -> None:
        self.facts = facts
        self.entries: dict[str, AssignEntry] = {}
        self.jobs: dict[str, _Job] = {}
        self._ran: frozenset[str] = frozenset()
        self._latched = False
        self._reserve_clock = NEW_CLOCK
        self._rng = rng

    def assign(self, command: Assign, shard: VirtualShard) -> None:
        self.entries = {entry.request_id: entry for entry in command.entries}
        for entry in command.entries:
            if entry.request_id not in self.jobs:
                self.jobs[entry.request_id] = shard.job(entry)

    def drop(self, request_id: str, shard: VirtualShard) -> None:
        self.entries.pop(request_id, None)
        job = self.jobs.pop(request_id, None)
        if job is not None:
            shard.emitted[request_id] = job.emitted

    def report(self) -> RoundReported:
        facts = self.facts
        place = WorkerState(
            slots=facts.slots,
            block_size=facts.block_size,
            target_blocks=facts.target_blocks,
            draft_blocks=facts.draft_blocks,
            max_growth_tokens=facts.max_draft_len + 1,
            kv_latched=self._latched,
            reserve_clock=self._reserve_clock,
        )
        choice = choose([self._candidate(entry) for entry in self.entries.values()], place)
        self._latched = choice.kv_latched
        self._reserve_clock = choice.reserve_clock
        changes = []
        for request_id in choice.evict:
            job = self.jobs[request_id]
            job.residency, job.blocks = Residency.NONE, 0
            changes.append(ResidencyChange(request_id, job.lease_epoch, Residency.NONE))
        self._ran = frozenset(choice.run)
        progress = tuple(self._advance(request_id) for request_id in choice.run)
        context = sum(
            self.jobs[request_id].prompt + self.jobs[request_id].emitted for request_id in choice.run
        )
        prefilled = sum(one.prefilled for one in progress)
        for one in progress:
            if one.end is not None:
                del self.jobs[one.request_id], self.entries[one.request_id]
        free = facts.target_blocks - sum(job.blocks for job in self.jobs.values())
        draft_s = 0.010
        verify_s = 0.020 + 0.09e-3 * (DRAFT_LEN + 1) * len(progress) + 3e-7 * context
        prefill_s = 0.09e-3 * prefilled
        return RoundReported(
            worker_id=facts.worker_id,
            progress=progress,
            residency=tuple(changes),
            draft_s=draft_s,
            verify_s=verify_s,
            prefill_s=prefill_s,
            swap_s=0.0,
            idle_s=0.0,
            total_s=draft_s + verify_s + prefill_s,
            free_target_blocks=free,
            free_draft_blocks=free,
        )

    def _candidate(self, entry: AssignEntry) -> Candidate:
        job = self.jobs[entry.request_id]
        return Candidate(
            request_id=entry.request_id,
            rank_class=entry.rank_class,
            index_s=entry.index_s,
            resume_cost_s=entry.resume_cost_s,
            reserved=entry.reserved,
            pinned=entry.pinned,
            running=entry.request_id in self._ran,
            residency=job.residency,
            tokens=job.prompt + job.emitted,
            target_blocks=job.blocks,
            draft_blocks=job.blocks,
        )

    def _advance(self, request_id: str) -> Progress:
        job = self.jobs[request_id]
        context = job.prompt + job.emitted
        prefilled = 0 if job.residency is Residency.DEVICE else context
        accepted = 0
        while accepted < DRAFT_LEN and self._rng.random() < job.acceptance:
            accepted += 1
        count = min(accepted + 1, job.output - job.emitted)
        position = job.emitted
        job.emitted += count
        job.residency = Residency.DEVICE
        needed = -(-(context + DRAFT_LEN) // BLOCK_SIZE)
        job.blocks = max(job.blocks, needed)
        return Progress(
            request_id=request_id,
            lease_epoch=job.lease_epoch,
            position=position,
            tokens=tuple(range(position, position + count)),
            drafted=DRAFT_LEN,
            accepted=accepted,
            prefilled=prefilled,
            end=End.STOP if job.emitted == job.output else None,
            cut_characters=0,
            error="",
            tested_by_position=(1,) * min(accepted + 1, DRAFT_LEN),
            accepted_by_position=(1,) * accepted + (0,) * (accepted < DRAFT_LEN),
        )


class VirtualShard:
    """The core, its workers, and the arrivals that keep the queue at its length."""

    def __init__(self, *, queued: int, workers: int, slots: int, policy: str, seed: int = 1) -> None:
        """`queued` requests wait in addition to those that fill the workers' lists."""
        self.now_s = 0.0
        self.emitted: dict[str, int] = {}
        """Output tokens of requests that were taken back, from which they continue."""
        self.arrivals = 0
        self._seed = seed
        self._rng = random.Random(seed)
        settings = CoreSettings()
        self.core = Scheduler(policy_named(policy, settings), settings, Priors())
        self.workers: dict[str, VirtualWorker] = {}
        self._queued = queued
        self._slots = slots
        # Room for the slots and a quarter more: paused requests lose their KV at times, as on a real device.
        blocks = max(MAX_LENGTH, slots * 600 * 5 // 4) // BLOCK_SIZE
        for number in range(workers):
            facts = WorkerFacts(
                f"worker-{number:04d}", slots, blocks, blocks, BLOCK_SIZE, MAX_LENGTH, DRAFT_LEN
            )
            self.workers[facts.worker_id] = VirtualWorker(facts, self._rng)

    def start(self) -> None:
        """Connect all workers, and queue as many requests as fill their lists."""
        self.step([WorkerUp(worker.facts, ()) for worker in self.workers.values()])
        while self.core.totals().queued == 0:
            self.step([self._arrival() for _ in range(min(self._slots, ARRIVALS_PER_STEP))])
        # Some minutes pass: a core that has just begun computes all ranks again far more often than later.
        for _ in range(WARM_UP_STEPS):
            self.now_s += self.core.settings.priors_interval_s
            self.step([])

    def fill(self) -> None:
        """Queue the rest."""
        while (missing := self._queued - self.core.totals().queued) > 0:
            self.step([self._arrival() for _ in range(min(missing, ARRIVALS_PER_STEP))])

    def step(self, events: list[Event]) -> None:
        self.carry_out(self.core.step(self.now_s, events))

    def next_events(self, worker: VirtualWorker) -> list[Event]:
        """Return the worker's next report, and arrivals in place of the requests that left the queue."""
        report = worker.report()
        self.now_s += report.total_s / len(self.workers)
        missing = self._queued - self.core.totals().queued
        return [report, *(self._arrival() for _ in range(missing))]

    def carry_out(self, commands: list[Command]) -> None:
        """Apply the commands to the workers; the record is assumed to agree."""
        for command in commands:
            if isinstance(command, Assign):
                self.workers[command.worker_id].assign(command, self)
            elif isinstance(command, Drop):
                for request_id, _ in command.requests:
                    self.workers[command.worker_id].drop(request_id, self)

    def _arrival(self) -> Arrived:
        self.arrivals += 1
        rng = self._rng
        facts = RequestFacts(
            request_id=f"shard0-{self.arrivals:026d}",  # as long as real ones
            sequence=self.arrivals,
            arrival_s=self.now_s,
            tenant="tenant",
            priority=0,
            workload_class=rng.choice(CLASSES),
            prompt_tokens=rng.randint(16, 512),
            max_tokens=1024,
            expected_output_tokens=rng.randint(16, 512) if rng.random() < 0.5 else None,
        )
        return Arrived(facts)

    def job(self, entry: AssignEntry) -> _Job:
        """Return the job of this request; it is the same for every worker."""
        rng = random.Random(f"{self._seed} {entry.request_id}")
        return _Job(
            prompt=rng.randint(16, 512),
            output=max(1, min(1024, round(rng.lognormvariate(5.0, 0.8)))),
            acceptance=rng.betavariate(5.4, 2.6),
            lease_epoch=entry.lease_epoch,
            emitted=self.emitted.pop(entry.request_id, 0),
        )
