"""Simulation of jobs on the production core and virtual workers, which choose as real ones do
(`laps_sd.contract.choose`).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Mapping, Sequence

from scheduler_svc.core.commands import Assign, Command, Commit, Drained, Drop, Lease, Release
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import (
    Arrived,
    Event,
    RoundReported,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.merged_rounds import MergedRounds
from scheduler_svc.core.placement.routing import Router
from scheduler_svc.core.policies.base import Policy
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from simulator.jobs import Job
from simulator.machine import Machine
from simulator.outcome import Fate, Outcome
from simulator.worker import Specification, VirtualWorker

Outside = Callable[[float], Sequence[Event]]
"""Callback from outside: it observes the cluster at a time on the simulation's clock, and returns the events
of that time."""

_Happening = Event | tuple[Command, ...] | VirtualWorker | Outside
"""One entry of the simulation: an event for the core, commands for the workers, the end of a worker's round,
or a callback from outside."""


class Cluster:
    """One run of jobs over workers that are equal, or differ in speed only. Deterministic: equal arguments give equal outcomes.

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
        reports_per_s: float | None = None,
        digest: bool = False,
        check: bool = False,
        slowness: Sequence[float] = (),
        router: Router | None = None,
    ) -> None:
        """`workers`: equal ones that are up from the beginning. `make_policy` gets the jobs by their ids, for a policy
        that knows the future. `router`: chooses workers; None: the one of production.

        `slowness`: how many times as long as on `machine` everything takes on each of the first workers.

        `digest`: compute `Outcome.digest`. `check`: check the core's invariants after each step, which is slow.

        `reports_per_s`: reports that the core receives in a second. The others wait, as those of a large shard do,
        while their tokens count at once. None: the core receives each report when it is there.
        """
        settings = settings or CoreSettings()
        self._by_id = {job.request_id: job for job in jobs}
        if len(self._by_id) != len(jobs):
            raise ValueError("two jobs have the same request id")
        self.scheduler = Scheduler(make_policy(self._by_id, settings), settings, priors or Priors(), router)
        self._rounds = None if reports_per_s is None else MergedRounds(reports_per_s)
        self._leases: dict[str, Lease] = {}
        self._machine = machine
        self._workers: dict[str, VirtualWorker] = {}
        self._fates = {job.request_id: Fate(job) for job in jobs}
        self._emitted = dict.fromkeys(self._by_id, 0)
        self._rounds_of = dict.fromkeys(self._by_id, 0)
        self._ended = 0
        self._outcome = Outcome(
            list(self._fates.values()),
            priors=self.scheduler.priors,
            estimate_errors=self.scheduler.estimate_errors,
        )
        self._hash = hashlib.sha256() if digest else None
        self._check = check
        self._heap: list[tuple[float, int, _Happening]] = []
        self._tickets = 0
        self._slower: dict[str, Machine] = {}
        """The machines of workers that are not `machine`."""
        for number in range(workers):
            self._at(0.0, WorkerUp(machine.facts(f"w{number}"), ()))
        for number, times in enumerate(slowness):
            self._slower[f"w{number}"] = machine.slower(times)
        self._arrived = 0
        self._next_turns: dict[str, Job] = {job.after: job for job in jobs if job.after}
        for job in sorted(jobs, key=lambda job: job.arrival_s):
            if not job.after:
                self._arrives(job.arrival_s, job)

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
                elif isinstance(what, VirtualWorker):
                    self._round(now_s, what)
                elif callable(what):
                    events += what(now_s)
                else:
                    events.append(what)
            if events:
                self._step(now_s, events)
        if self._ended < len(self._fates):
            raise RuntimeError(f"{len(self._fates) - self._ended} jobs did not end: they fit no worker")
        outcome.found_tokens = sum(worker.found_tokens for worker in self._workers.values())
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

    def _arrives(self, when_s: float, job: Job) -> None:
        def arrive(now_s: float) -> Sequence[Event]:
            self._arrived += 1
            self._fates[job.request_id].arrival_s = now_s
            return (Arrived(job.facts(self._arrived, now_s)),)

        self._at(when_s, arrive)

    def _step(self, now_s: float, events: list[Event]) -> None:
        outcome, scheduler = self._outcome, self.scheduler
        for event in events:
            if isinstance(event, RoundReported):
                self._charge_levels(event)
            elif isinstance(event, WorkerUp):
                worker_id = event.facts.worker_id
                machine = self._slower.get(worker_id, self._machine)
                self._workers[worker_id] = VirtualWorker(event.facts, machine)
        received = events
        if self._rounds is not None:
            for event in events:
                if isinstance(event, RoundReported):
                    self._take(now_s, event)
            received = self._rounds.due(events, now_s, self._worker_of)
        commands: list[Command] = []
        if received or scheduler.has_suspects:
            commands = scheduler.step(now_s, received)
            outcome.steps += 1
        if self._check:
            scheduler.check()
        if self._hash is not None:
            self._hash.update(repr((now_s, commands)).encode())
        reporters = []
        for event in events:
            if isinstance(event, RoundReported):
                self._note_perceptible(event)
                worker = self._workers[event.worker_id]
                worker.acknowledge(event)
                reporters.append(worker)
            elif isinstance(event, Arrived):
                rank = scheduler.rank_of(event.facts.request_id)
                if rank is not None and rank.perceptible:
                    self._fates[event.facts.request_id].perceptible_after = 0
        for command in commands:
            if isinstance(command, Commit):
                self._committed(now_s, command)
            elif isinstance(command, Lease | Release):
                self._leased(command)
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
        for progress in report.progress:
            rank = self.scheduler.rank_of(progress.request_id)
            if rank is not None:
                outcome.level_s[rank.level] += report.total_s / len(report.progress)
                outcome.level_requests[rank.level].add(progress.request_id)

    def _note_perceptible(self, report: RoundReported) -> None:
        """Record the rounds after which requests become perceptible."""
        for progress in report.progress:
            rank = self.scheduler.rank_of(progress.request_id)
            if rank is None:
                continue
            fate = self._fates[progress.request_id]
            if rank.perceptible and fate.perceptible_after is None:
                fate.perceptible_after = self._rounds_of[progress.request_id] + 1

    def _worker_of(self, request_id: str) -> str | None:
        lease = self._leases.get(request_id)
        return None if lease is None else lease.worker_id

    def _leased(self, command: Lease | Release) -> None:
        before = self._worker_of(command.request_id)
        if before is not None and self._rounds is not None:
            self._rounds.hurry(before)
        if isinstance(command, Lease):
            self._leases[command.request_id] = command
        else:
            self._leases.pop(command.request_id, None)

    def _take(self, now_s: float, report: RoundReported) -> None:
        """Count the tokens of a report that need no decision, as a leader writes them before the core has them."""
        for progress in report.progress:
            lease = self._leases.get(progress.request_id)
            if (
                progress.end is None
                and progress.tokens
                and progress.position == self._emitted[progress.request_id]
                and lease is not None
                and (lease.worker_id, lease.lease_epoch) == (report.worker_id, progress.lease_epoch)
            ):
                self._gained(now_s, progress.request_id, len(progress.tokens))
                progress.recorded = True

    def _gained(self, now_s: float, request_id: str, tokens: int) -> None:
        """Count the tokens of one round."""
        if not self._emitted[request_id]:
            self._fates[request_id].first_token_s = now_s
        self._emitted[request_id] += tokens
        self._rounds_of[request_id] += 1

    def _committed(self, now_s: float, command: Commit) -> None:
        request_id = command.request_id
        fate, known = self._fates[request_id], self._emitted[request_id] - command.position
        if (known and self._rounds is None) or known < 0 or fate.finished_s:
            raise RuntimeError(f"{request_id}: tokens lost or committed twice")
        if len(command.tokens) > known:
            self._gained(now_s, request_id, len(command.tokens) - known)
        if command.end is not None:
            fate.finished_s = now_s
            fate.preemptions = command.standing.preemptions
            self._ended += 1
            self._outcome.end_s = now_s
            following = self._next_turns.get(request_id)
            if following is not None:
                self._arrives(now_s + following.arrival_s, following)

    def _carry_out(self, now_s: float, commands: Sequence[Command], idle: Sequence[VirtualWorker]) -> None:
        """Deliver commands to workers; workers without a current round start one."""
        to_start = dict.fromkeys(idle)
        for command in commands:
            if isinstance(command, Drop):
                worker = self._workers[command.worker_id]
                for request_id, lease_epoch in command.requests:
                    worker.drop(request_id, lease_epoch)
            elif isinstance(command, Assign):
                worker = self._workers[command.worker_id]
                worker.assign(command.entries, self._specification)
                to_start[worker] = None
        for worker in to_start:
            if not worker.busy:
                self._round(now_s, worker)

    def _specification(self, request_id: str) -> Specification | None:
        """Return the committed state of a request, or None after its end."""
        if self._fates[request_id].finished_s:
            return None
        return Specification(self._by_id[request_id], self._rounds_of[request_id], self._emitted[request_id])

    def _round(self, now_s: float, worker: VirtualWorker) -> None:
        """Run the next round of a worker, and schedule its end and its report."""
        worker.busy = False
        done = worker.run_round()
        if done is None:
            return
        worker.busy = True
        report, outcome = done.report, self._outcome
        total_s = report.total_s
        outcome.busy_s += total_s
        outcome.swapped_tokens += done.swapped_tokens
        outcome.prefilled_tokens += done.prefilled_tokens
        for change in report.residency:
            self._fates[change.request_id].evictions += 1
        for progress in report.progress:
            self._fates[progress.request_id].running_s += total_s
        message_s = self._machine.message_s
        if done.cache is not None:
            self._at(now_s + total_s + message_s, done.cache)
        self._at(now_s + total_s + message_s, report)
        if message_s:
            self._at(now_s + total_s, worker)
