"""Simulation of jobs on the production core and virtual workers, which choose as real ones do
(`laps_sd.contract.choose`).
"""

from __future__ import annotations

import hashlib
import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from laps_sd.contract.choose import NEW_CLOCK, Candidate, Residency, WorkerState, choose
from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Assign, AssignEntry, Command, Commit, Drained, Drop
from scheduler_svc.core.estimates.errors import EstimateErrors
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import (
    Arrived,
    Event,
    Progress,
    ResidencyChange,
    RoundReported,
    WorkerFacts,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.policies.base import Policy
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from simulator.jobs import Job
from simulator.machine import Machine

# Token ids mean nothing here; the core counts them.
_TOKENS = tuple((0,) * count for count in range(256))


@dataclass(slots=True)
class _Kept:
    """State of a request on a worker."""

    job: Job
    lease_epoch: int
    rounds: int
    emitted: int
    residency: Residency = Residency.NONE
    blocks: int = 0
    missing: int = 0
    """Context tokens that are still to be computed."""
    ended: bool = False
    """Mark of an ended request until its last report arrives: a list that was sent before must not start it
    again."""


@dataclass(slots=True)
class Fate:
    """Result of one job."""

    job: Job
    first_token_s: float = 0.0
    finished_s: float = 0.0
    """Time on the simulation's clock."""
    running_s: float = 0.0
    """Time in the rounds of this request."""
    preemptions: int = 0
    evictions: int = 0
    perceptible_after: int | None = None
    """Rounds until the policy ranked it as perceptible; 0: at arrival; None: never."""

    @property
    def latency_s(self) -> float:
        """Return the time from arrival to end."""
        return self.finished_s - self.job.arrival_s

    @property
    def waited_s(self) -> float:
        """Return the total time in which it did not run."""
        return self.latency_s - self.running_s


@dataclass(slots=True)
class Outcome:
    """Result of one run."""

    fates: list[Fate]
    busy_s: float = 0.0
    """Time in rounds, all workers together."""
    end_s: float = 0.0
    swapped_tokens: int = 0
    prefilled_tokens: int = 0
    steps: int = 0
    level_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Machine seconds by the level of the requests when their round was reported; the total is `busy_s`."""
    level_requests: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Ids of the requests that ran in a level."""
    estimate_errors: EstimateErrors = field(default_factory=EstimateErrors)
    """Errors of the core's estimates of remaining service."""
    digest: str = ""
    """Digest of all commands, if requested: equal digests mean equal decisions."""
    priors: Priors = field(default_factory=Priors)
    """Learned priors at the end of the run."""


class _Worker:
    """Virtual worker: its list, the state of its requests, and its current round."""

    def __init__(self, facts: WorkerFacts, machine: Machine) -> None:
        self.facts = facts
        self.machine = machine
        self.entries: tuple[AssignEntry, ...] = ()
        self.kept: dict[str, _Kept] = {}
        self.ran: frozenset[str] = frozenset()
        self.latched = False
        self.reserve_clock = NEW_CLOCK
        self.busy = False
        self.busy_s = 0.0
        """Time in rounds so far, the current one included."""
        self.free_blocks = facts.target_blocks

    def choose(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the requests of the next round, and the requests whose blocks are released."""
        candidates = []
        for entry in self.entries:
            kept = self.kept.get(entry.request_id)
            if kept is None or kept.ended or kept.lease_epoch != entry.lease_epoch:
                continue
            candidates.append(
                Candidate(
                    entry.request_id,
                    entry.rank_class,
                    entry.index_s,
                    entry.resume_cost_s,
                    entry.reserved,
                    entry.pinned,
                    entry.request_id in self.ran,
                    kept.residency,
                    kept.job.prompt_tokens + kept.emitted,
                    kept.blocks,
                    0,
                )
            )
        facts = self.facts
        choice = choose(
            candidates,
            WorkerState(
                slots=facts.slots,
                block_size=facts.block_size,
                target_blocks=facts.target_blocks,
                draft_blocks=0,  # the draft's cache is cheap to drop: only the target's counts
                max_growth_tokens=facts.max_draft_len + 1,
                kv_latched=self.latched,
                reserve_clock=self.reserve_clock,
            ),
        )
        self.latched = choice.kv_latched
        self.reserve_clock = choice.reserve_clock
        return choice.run, choice.evict

    def resize(self, kept: _Kept, blocks: int) -> None:
        """Set the number of blocks of its KV."""
        self.free_blocks += kept.blocks - blocks
        kept.blocks = blocks

    def grow(self, kept: _Kept, tokens: int) -> None:
        """Reserve blocks for its context and the tokens that a round may add."""
        facts = self.facts
        needed = -(-(tokens + facts.max_draft_len) // facts.block_size)
        if needed > kept.blocks:
            self.resize(kept, needed)

    def drop(self, request_id: str, lease_epoch: int) -> None:
        """Forget a request, unless it has been leased here again since."""
        kept = self.kept.get(request_id)
        if kept is not None and kept.lease_epoch <= lease_epoch:
            self.resize(kept, 0)
            del self.kept[request_id]


Outside = Callable[[float], Sequence[Event]]
"""Callback from outside: it observes the cluster at a time on the simulation's clock, and returns the events
of that time."""

_Happening = Event | tuple[Command, ...] | _Worker | Outside
"""One entry of the simulation: an event for the core, commands for the workers, the end of a worker's round,
or a callback from outside."""


class Cluster:
    """One run of jobs over equal workers. Deterministic: equal arguments give equal outcomes.

    Workers join and leave by the events of a real shell: `WorkerUp` of a new worker, `WorkerDraining`. A
    worker that the core reports as drained is removed at once.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        machine: Machine,
        workers: int,
        make_policy: Callable[[Mapping[str, Job], CoreSettings], Policy],
        settings: CoreSettings | None = None,
        *,
        priors: Priors | None = None,
        digest: bool = False,
        check: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        settings = settings or CoreSettings()
        self._by_id = {job.request_id: job for job in jobs}
        if len(self._by_id) != len(jobs):
            raise ValueError("two jobs have the same request id")
        self.scheduler = Scheduler(make_policy(self._by_id, settings), settings, priors or Priors())
        self._machine = machine
        self._workers: dict[str, _Worker] = {}
        self._fates = {job.request_id: Fate(job) for job in jobs}
        self._emitted = dict.fromkeys(self._by_id, 0)
        self._rounds = dict.fromkeys(self._by_id, 0)
        self._ended = 0
        self._outcome = Outcome(
            list(self._fates.values()),
            priors=self.scheduler.priors,
            estimate_errors=self.scheduler.estimate_errors,
        )
        self._hash = hashlib.sha256() if digest else None
        self._check = check
        self._on_progress = on_progress
        self._heap: list[tuple[float, int, _Happening]] = []
        self._tickets = 0
        for number in range(workers):
            self._at(0.0, WorkerUp(machine.facts(f"w{number}"), ()))
        in_order = sorted(jobs, key=lambda job: job.arrival_s)
        for sequence, job in enumerate(in_order, start=1):
            self._at(job.arrival_s, Arrived(job.facts(sequence)))

    def run(self) -> Outcome:
        """Run until every job has ended. RuntimeError if a job cannot end."""
        heap, outcome = self._heap, self._outcome
        while heap:
            now_s = heap[0][0]
            events: list[Event] = []
            while heap and heap[0][0] == now_s:
                what = heapq.heappop(heap)[2]
                if isinstance(what, tuple):
                    self._carry_out(now_s, what, ())
                elif isinstance(what, _Worker):
                    self._round(now_s, what)
                elif callable(what):
                    events += what(now_s)
                else:
                    events.append(what)
            if events:
                self._step(now_s, events)
        if self._ended < len(self._fates):
            raise RuntimeError(f"{len(self._fates) - self._ended} jobs did not end: they fit no worker")
        outcome.digest = self._hash.hexdigest() if self._hash else ""
        return outcome

    @property
    def unfinished(self) -> int:
        """Return the number of jobs that have not ended, those before their arrival included."""
        return len(self._fates) - self._ended

    def busy_s(self, worker_id: str) -> float:
        """Return the seconds that a worker has spent in rounds; its current round counts as a whole. 0 before
        it was up.
        """
        worker = self._workers.get(worker_id)
        return 0.0 if worker is None else worker.busy_s

    def at(self, when_s: float, act: Outside) -> None:
        """Call `act` at `when_s`; the core receives the returned events in the same step as others of that
        time.
        """
        self._at(when_s, act)

    def _at(self, when_s: float, what: _Happening) -> None:
        self._tickets += 1
        heapq.heappush(self._heap, (when_s, self._tickets, what))

    def _step(self, now_s: float, events: list[Event]) -> None:
        outcome, scheduler = self._outcome, self.scheduler
        outcome.steps += 1
        for event in events:
            if isinstance(event, RoundReported):
                self._charge_levels(event)
            elif isinstance(event, WorkerUp):
                self._workers[event.facts.worker_id] = _Worker(event.facts, self._machine)
        commands = scheduler.step(now_s, events)
        if self._check:
            scheduler.check()
        if self._hash is not None:
            self._hash.update(repr((now_s, commands)).encode())
        reporters = []
        for event in events:
            if isinstance(event, RoundReported):
                self._look_at(event)
                reporters.append(self._workers[event.worker_id])
            elif isinstance(event, Arrived):
                rank = scheduler.rank_of(event.facts.request_id)
                if rank is not None and rank.perceptible:
                    self._fates[event.facts.request_id].perceptible_after = 0
        for command in commands:
            if isinstance(command, Commit):
                self._committed(now_s, command)
            elif isinstance(command, Drained):
                self._at(now_s, WorkerLost(command.worker_id))
        if self._machine.message_s:
            orders = tuple(command for command in commands if isinstance(command, Assign | Drop))
            if orders:
                self._at(now_s + self._machine.message_s, orders)
        else:
            for worker in reporters:
                worker.busy = False
            self._carry_out(now_s, commands, reporters)

    def _charge_levels(self, report: RoundReported) -> None:
        """Charge a round to the levels of its requests, before the core has received the report and ranked
        them again.
        """
        outcome = self._outcome
        share_s = report.total_s / len(report.progress)
        for progress in report.progress:
            rank = self.scheduler.rank_of(progress.request_id)
            if rank is not None:
                outcome.level_s[rank.level] += share_s
                outcome.level_requests[rank.level].add(progress.request_id)

    def _look_at(self, report: RoundReported) -> None:
        """Record the rounds after which requests become perceptible; drop the ended ones."""
        worker = self._workers[report.worker_id]
        for progress in report.progress:
            if progress.end is not None:
                worker.drop(progress.request_id, progress.lease_epoch)
            rank = self.scheduler.rank_of(progress.request_id)
            if rank is None:
                continue
            fate = self._fates[progress.request_id]
            if rank.perceptible and fate.perceptible_after is None:
                fate.perceptible_after = self._rounds[progress.request_id] + 1

    def _committed(self, now_s: float, command: Commit) -> None:
        request_id = command.request_id
        fate = self._fates[request_id]
        if command.position != self._emitted[request_id] or fate.finished_s:
            raise RuntimeError(f"{request_id}: tokens lost or committed twice")
        if command.tokens:
            if not command.position:
                fate.first_token_s = now_s
            self._emitted[request_id] += len(command.tokens)
            self._rounds[request_id] += 1
        if command.end is not None:
            fate.finished_s = now_s
            fate.preemptions = command.standing.preemptions
            self._ended += 1
            self._outcome.end_s = now_s
            if self._on_progress is not None:
                self._on_progress(self._ended)

    def _carry_out(self, now_s: float, commands: Sequence[Command], idle: Sequence[_Worker]) -> None:
        """Deliver commands to workers; workers without a current round start one."""
        told = dict.fromkeys(idle)
        for command in commands:
            if isinstance(command, Drop):
                worker = self._workers[command.worker_id]
                for request_id, lease_epoch in command.requests:
                    worker.drop(request_id, lease_epoch)
            elif isinstance(command, Assign):
                worker = self._workers[command.worker_id]
                worker.entries = command.entries
                for entry in command.entries:
                    self._keep(worker, entry)
                told[worker] = None
        for worker in told:
            if not worker.busy:
                self._round(now_s, worker)

    def _keep(self, worker: _Worker, entry: AssignEntry) -> None:
        request_id = entry.request_id
        kept = worker.kept.get(request_id)
        if kept is not None and kept.lease_epoch >= entry.lease_epoch:
            return
        if self._fates[request_id].finished_s:
            return  # this list was sent before the end of the request was received
        if kept is not None:
            worker.resize(kept, 0)
        worker.kept[request_id] = _Kept(
            self._by_id[request_id], entry.lease_epoch, self._rounds[request_id], self._emitted[request_id]
        )

    def _round(self, now_s: float, worker: _Worker) -> None:
        worker.busy = False
        run, evict = worker.choose()
        machine, outcome = self._machine, self._outcome
        moved = 0
        changes = []
        evicted_to = Residency.HOST if machine.host_memory else Residency.NONE
        for request_id in evict:
            kept = worker.kept[request_id]
            worker.resize(kept, 0)
            kept.residency = evicted_to
            if machine.host_memory:
                moved += kept.job.prompt_tokens + kept.emitted
            changes.append(ResidencyChange(request_id, kept.lease_epoch, evicted_to))
            self._fates[request_id].evictions += 1
        worker.ran = frozenset(run)
        if not run:
            return
        progress = []
        context = prefilled = decoding = verified = 0
        budget = machine.prefill_chunk or 1 << 62
        for request_id in run:
            kept = worker.kept[request_id]
            tokens = kept.job.prompt_tokens + kept.emitted
            if kept.residency is Residency.NONE:
                kept.missing = tokens
            elif kept.residency is Residency.HOST:
                moved += tokens
            kept.residency = Residency.DEVICE
            fresh = min(kept.missing, budget)
            kept.missing -= fresh
            budget -= fresh
            prefilled += fresh
            worker.grow(kept, tokens)
            if kept.missing:
                progress.append(self._waits(kept, fresh))
                continue
            decoding += 1
            verified += kept.job.drafted(kept.rounds, machine.draft_len) + 1
            context += tokens
            progress.append(self._decodes(kept, fresh))
            if kept.ended:
                worker.resize(kept, 0)
        if worker.free_blocks < 0:
            raise RuntimeError(f"{worker.facts.worker_id} holds more KV than it has")
        decode_s = machine.decode_s(decoding, context, verified)
        prefill_s = machine.prefill_token_s * prefilled
        swap_s = machine.swap_token_s * moved
        total_s = decode_s + prefill_s + swap_s
        outcome.busy_s += total_s
        worker.busy_s += total_s
        outcome.swapped_tokens += moved
        outcome.prefilled_tokens += prefilled
        for request_id in run:
            self._fates[request_id].running_s += total_s
        report = RoundReported(
            worker_id=worker.facts.worker_id,
            progress=tuple(progress),
            residency=tuple(changes),
            draft_s=0.0,
            verify_s=decode_s,
            prefill_s=prefill_s,
            swap_s=swap_s,
            idle_s=0.0,
            total_s=total_s,
            free_target_blocks=worker.free_blocks,
            free_draft_blocks=worker.free_blocks,
        )
        worker.busy = True
        self._at(now_s + total_s + machine.message_s, report)
        if machine.message_s:
            self._at(now_s + total_s, worker)

    def _waits(self, kept: _Kept, fresh: int) -> Progress:
        """Return the progress of a round in which only a part of the context was computed."""
        return Progress(kept.job.request_id, kept.lease_epoch, kept.emitted, (), 0, 0, fresh, None, 0, "")

    def _decodes(self, kept: _Kept, fresh: int) -> Progress:
        """Return the progress of a round of drafting and verification."""
        job, position = kept.job, kept.emitted
        pace = job.paces[kept.rounds]
        draft_len = job.drafted(kept.rounds, self._machine.draft_len)
        kept.emitted += pace
        kept.rounds += 1
        kept.ended = kept.rounds == len(job.paces)
        gained = job.uncut_last if kept.ended and job.uncut_last is not None else pace
        accepted = min(gained - 1, draft_len)
        own_end = End.STOP if job.output_tokens < job.max_tokens else End.LENGTH
        return Progress(
            job.request_id,
            kept.lease_epoch,
            position,
            _TOKENS[pace],
            draft_len,
            accepted,
            fresh,
            own_end if kept.ended else None,
            0,
            "",
            *_positions(accepted, draft_len),
        )


@cache
def _positions(accepted: int, drafted: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of compared and of accepted draft tokens, position by position."""
    return (1,) * min(accepted + 1, drafted), ((1,) * accepted + (0,))[:drafted]
