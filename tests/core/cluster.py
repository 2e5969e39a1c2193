"""A small simulated cluster: the core, and workers that run `choose` in virtual time.

Zero-latency messages; the time of a round grows with its sequences and their context. Everything is
deterministic.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from laps_sd.contract.choose import NEW_CLOCK, Candidate, ReserveClock, Residency, WorkerState, choose
from laps_sd.contract.ends import End
from scheduler_svc.core.commands import (
    Assign,
    AssignEntry,
    Command,
    Commit,
    Drained,
    Drop,
    Finish,
    Lease,
    Release,
)
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import (
    Arrived,
    EndRequested,
    Event,
    Held,
    Progress,
    RequestFacts,
    ResidencyChange,
    RoundReported,
    WorkerDraining,
    WorkerFacts,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings

DRAFT_LEN = 5


@dataclass(frozen=True)
class Job:
    """A request of the simulation, with its true length."""

    request_id: str
    arrival_s: float
    prompt: int
    output: int
    pace: tuple[int, ...] = (3,)
    """Tokens per round, repeated."""
    priority: int = 0
    workload_class: str = ""
    hint: int | None = None
    max_tokens: int | None = None
    tenant: str = "t"

    def facts(self, sequence: int) -> RequestFacts:
        return RequestFacts(
            request_id=self.request_id,
            sequence=sequence,
            arrival_s=self.arrival_s,
            tenant=self.tenant,
            priority=self.priority,
            workload_class=self.workload_class,
            prompt_tokens=self.prompt,
            max_tokens=self.max_tokens or self.output,
            expected_output_tokens=self.hint,
        )


def facts(
    worker_id: str, slots: int = 1, blocks: int = 1000, block_size: int = 16, max_length: int = 10_000
) -> WorkerFacts:
    return WorkerFacts(worker_id, slots, blocks, blocks, block_size, max_length, DRAFT_LEN)


@dataclass
class Kept:
    """State of a request on a worker."""

    lease_epoch: int
    emitted: int
    rounds: int
    residency: Residency = Residency.NONE
    blocks: int = 0
    ended: bool = False


@dataclass
class SimWorker:
    facts: WorkerFacts
    entries: tuple[AssignEntry, ...] = ()
    kept: dict[str, Kept] = field(default_factory=dict)
    ran: tuple[str, ...] = ()
    round_number: int = 0
    latched: bool = False
    reserve_clock: ReserveClock = NEW_CLOCK
    busy: bool = False
    evictions: int = 0

    def place(self) -> WorkerState:
        f = self.facts
        return WorkerState(
            slots=f.slots,
            block_size=f.block_size,
            target_blocks=f.target_blocks,
            draft_blocks=f.draft_blocks,
            max_growth_tokens=f.max_draft_len + 1,
            kv_latched=self.latched,
            reserve_clock=self.reserve_clock,
        )

    def candidates(self, jobs: dict[str, Job]) -> list[Candidate]:
        listed = [
            (entry, self.kept[entry.request_id]) for entry in self.entries if entry.request_id in self.kept
        ]
        return [
            Candidate(
                request_id=entry.request_id,
                rank_class=entry.rank_class,
                index_s=entry.index_s,
                resume_cost_s=entry.resume_cost_s,
                reserved=entry.reserved,
                pinned=entry.pinned,
                running=entry.request_id in self.ran,
                residency=kept.residency,
                tokens=jobs[entry.request_id].prompt + kept.emitted,
                target_blocks=kept.blocks,
                draft_blocks=kept.blocks,
            )
            for entry, kept in listed
            if not kept.ended
        ]


class Cluster:
    """Simulation of jobs through the core. `check=True` verifies every invariant after every step."""

    def __init__(
        self,
        policy: str,
        workers: list[WorkerFacts],
        settings: CoreSettings | None = None,
        check: bool = True,
    ) -> None:
        settings = settings or CoreSettings()
        self.priors = Priors()
        self.scheduler = Scheduler(policy_named(policy, settings), settings, self.priors)
        self.workers: dict[str, SimWorker] = {}
        self.jobs: dict[str, Job] = {}
        self.committed: dict[str, list[int]] = {}
        self.lease: dict[str, tuple[str | None, int]] = {}
        self.ended: dict[str, End] = {}
        self.finished_s: dict[str, float] = {}
        self.drained: list[str] = []
        self.steps: list[list[Command]] = []
        """Commands of each step."""
        self.served_s: Counter[str] = Counter()
        """Machine seconds of each request by its worker's rounds: its shares of rounds, and its
        own prefill."""
        self.tenant_served_s: Counter[tuple[int, str]] = Counter()
        """Machine seconds by priority and tenant."""
        self.longest_round_s: Counter[str] = Counter()
        """By worker."""
        self.commands: list[tuple[float, Command]] = []
        self.now_s = 0.0
        self._check = check
        self._heap: list[tuple[float, int, str, object]] = []
        self._ticket = 0
        self._ticking = False
        for worker in workers:
            self.at(0.0, "up", worker)

    def at(self, time_s: float, what: str, subject: object) -> None:
        """Schedule an event: up, job, report, lost, drain, reconnect, cancel."""
        self._ticket += 1
        heapq.heappush(self._heap, (time_s, self._ticket, what, subject))

    def submit(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.jobs[job.request_id] = job
            self.at(job.arrival_s, "job", job)

    def run(self, until_s: float = float("inf")) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, ticket, what, subject = heapq.heappop(self._heap)
            self._happen(what, subject, ticket)

    def _happen(self, what: str, subject: object, ticket: int) -> None:
        match what, subject:
            case "up", WorkerFacts() as worker:
                self.workers[worker.worker_id] = SimWorker(worker)
                self.step([WorkerUp(worker, ())])
            case "job", Job() as job:
                self.committed[job.request_id] = []
                self.lease[job.request_id] = (None, 0)
                self.step([Arrived(job.facts(ticket))])
            case "report", (str() as worker_id, SimWorker() as sim, RoundReported() as report):
                if self.workers.get(worker_id) is sim:  # else it died with its report
                    sim.busy = False
                    self._count_service(report)
                    self.step([report])
            case "lost", str() as worker_id:
                if self.workers.pop(worker_id, None) is not None:
                    self.step([WorkerLost(worker_id)])
            case "drain", str() as worker_id:
                self.step([WorkerDraining(worker_id)])
            case "reconnect", str() as worker_id:
                if worker_id not in self.workers:
                    return
                worker = self.workers[worker_id]
                held = tuple(
                    Held(i, k.lease_epoch, k.residency) for i, k in worker.kept.items() if not k.ended
                )
                self.step([WorkerUp(worker.facts, held)])
            case "tick", None:
                self._ticking = False
                self.step([])
            case "cancel", str() as request_id:
                self.step([EndRequested(request_id, End.CANCELLED, "")])
            case other:
                raise AssertionError(other)

    def _count_service(self, report: RoundReported) -> None:
        prefilled = max(1, sum(progress.prefilled for progress in report.progress))
        for progress in report.progress:
            if self.lease[progress.request_id] != (report.worker_id, progress.lease_epoch):
                continue  # taken back while the round was under way: its tokens count for nothing
            seconds = (report.draft_s + report.verify_s) / len(report.progress)
            seconds += report.prefill_s * progress.prefilled / prefilled
            self.served_s[progress.request_id] += seconds
            job = self.jobs[progress.request_id]
            self.tenant_served_s[job.priority, job.tenant] += seconds
        longest = max(self.longest_round_s[report.worker_id], report.total_s)
        self.longest_round_s[report.worker_id] = longest

    def step(self, events: list[Event]) -> None:
        commands = self.scheduler.step(self.now_s, events)
        self.steps.append(commands)
        if self._check:
            self.scheduler.check()
        for command in commands:
            self.commands.append((self.now_s, command))
            self._carry_out(command)
        for worker in self.workers.values():
            if not worker.busy:
                self._round(worker)
        if self.scheduler.has_suspects and not self._ticking:
            self.at(self.now_s + 1.0, "tick", None)
        self._ticking = self.scheduler.has_suspects

    def _carry_out(self, command: Command) -> None:
        match command:
            case Commit():
                assert command.request_id not in self.ended
                assert self.lease[command.request_id][1] == command.lease_epoch
                tokens = self.committed[command.request_id]
                if command.position + len(command.tokens) <= len(tokens) and command.end is None:
                    return
                assert command.position == len(tokens), "nothing lost, nothing twice"
                tokens.extend(command.tokens)
                if command.end is not None:
                    self._end(command.request_id, command.end)
            case Finish(request_id, end):
                assert request_id not in self.ended
                self._end(request_id, end)
            case Lease(request_id, worker_id, lease_epoch):
                assert self.lease[request_id][1] == lease_epoch - 1
                self.lease[request_id] = (worker_id, lease_epoch)
            case Release(request_id, lease_epoch):
                assert self.lease[request_id] == (self.lease[request_id][0], lease_epoch)
                self.lease[request_id] = (None, lease_epoch)
            case Drop(worker_id, requests):
                if worker_id in self.workers:
                    worker = self.workers[worker_id]
                    for request_id, lease_epoch in requests:
                        kept = worker.kept.get(request_id)
                        if kept is not None and kept.lease_epoch <= lease_epoch:
                            del worker.kept[request_id]
            case Assign(worker_id, entries):
                for entry in entries:
                    assert self.lease[entry.request_id] == (worker_id, entry.lease_epoch), (
                        "leased before listed"
                    )
                if worker_id in self.workers:
                    worker = self.workers[worker_id]
                    worker.entries = entries
                    for entry in entries:
                        kept = worker.kept.get(entry.request_id)
                        if kept is None or kept.lease_epoch < entry.lease_epoch:
                            emitted = len(self.committed[entry.request_id])
                            worker.kept[entry.request_id] = Kept(entry.lease_epoch, emitted, emitted)
            case Drained(worker_id):
                self.drained.append(worker_id)

    def _end(self, request_id: str, end: End) -> None:
        self.ended[request_id] = end
        self.finished_s[request_id] = self.now_s

    def _round(self, worker: SimWorker) -> None:
        candidates = worker.candidates(self.jobs)
        choice = choose(candidates, worker.place())
        worker.latched = choice.kv_latched
        worker.reserve_clock = choice.reserve_clock
        changes = []
        for request_id in choice.evict:
            kept = worker.kept[request_id]
            kept.residency, kept.blocks = Residency.NONE, 0
            changes.append(ResidencyChange(request_id, kept.lease_epoch, Residency.NONE))
            worker.evictions += 1
        worker.ran = choice.run
        if not choice.run:
            return
        block_size, growth = worker.facts.block_size, worker.facts.max_draft_len + 1
        progress = []
        context = prefilled = 0
        for request_id in choice.run:
            job, kept = self.jobs[request_id], worker.kept[request_id]
            tokens = job.prompt + kept.emitted
            fresh = tokens if kept.residency is not Residency.DEVICE else 0
            count = min(job.pace[kept.rounds % len(job.pace)], job.output - kept.emitted)
            context += tokens
            prefilled += fresh
            position = kept.emitted
            kept.emitted += count
            kept.rounds += 1
            kept.residency = Residency.DEVICE
            kept.blocks = max(kept.blocks, -(-(tokens - 1 + growth) // block_size))
            end = End.STOP if kept.emitted == job.output else None
            kept.ended = end is not None
            kept.blocks = 0 if kept.ended else kept.blocks
            ids = tuple(range(position, position + count))
            progress.append(
                Progress(request_id, kept.lease_epoch, position, ids, DRAFT_LEN, count - 1, fresh, end, 0, "")
            )
        worker.round_number += 1
        held = sum(kept.blocks for kept in worker.kept.values())
        assert held <= worker.facts.target_blocks
        draft_s = 0.010
        verify_s = 0.020 + 0.09e-3 * growth * len(choice.run) + 3e-7 * context
        prefill_s = 0.09e-3 * prefilled
        total_s = draft_s + verify_s + prefill_s
        free = worker.facts.target_blocks - held
        report = RoundReported(
            worker.facts.worker_id,
            tuple(progress),
            tuple(changes),
            draft_s,
            verify_s,
            prefill_s,
            0.0,
            0.0,
            total_s,
            free,
            free,
        )
        worker.busy = True
        self.at(self.now_s + total_s, "report", (worker.facts.worker_id, worker, report))

    def latencies(self) -> list[float]:
        return [self.finished_s[i] - job.arrival_s for i, job in self.jobs.items()]

    def mean_latency_s(self) -> float:
        return sum(self.latencies()) / len(self.jobs)
