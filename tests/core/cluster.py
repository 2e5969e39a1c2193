"""A small simulated cluster: the core, and virtual workers.

Zero-latency messages; the time of a round grows with its sequences and their context. Everything is
deterministic.
"""

from __future__ import annotations

import heapq
from collections import Counter

from laps_sd.contract.ends import End
from scheduler_svc.core.commands import (
    Assign,
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
    RoundReported,
    WorkerAway,
    WorkerDraining,
    WorkerFacts,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from simulator import jobs as simulator
from simulator.worker import Specification, VirtualWorker
from tests.core.jobs import MACHINE, Job, Worker


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
        self.workers: dict[str, VirtualWorker] = {}
        self.jobs: dict[str, Job] = {}
        self._futures: dict[str, simulator.Job] = {}
        self._rounds: Counter[str] = Counter()
        """Rounds whose tokens are committed."""
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
            self._futures[job.request_id] = job.future()
            self.at(job.arrival_s, "job", job)

    def run(self, until_s: float = float("inf")) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, ticket, what, subject = heapq.heappop(self._heap)
            self._happen(what, subject, ticket)

    def _happen(self, what: str, subject: object, ticket: int) -> None:
        match what, subject:
            case "up", WorkerFacts() as found:
                self.workers[found.worker_id] = Worker(found, MACHINE)
                self.step([WorkerUp(found, ())])
            case "job", Job() as job:
                self.committed[job.request_id] = []
                self.lease[job.request_id] = (None, 0)
                self.step([Arrived(job.facts(ticket))])
            case "report", (str() as worker_id, VirtualWorker() as worker, RoundReported() as report):
                if self.workers.get(worker_id) is worker:  # else it died with its report
                    worker.busy = False
                    self._count_service(report)
                    self.step([report])
                    worker.acknowledge(report)
            case "lost", str() as worker_id:
                if self.workers.pop(worker_id, None) is not None:
                    self.step([WorkerAway(worker_id)])
                    self.step([WorkerLost(worker_id)])
            case "drain", str() as worker_id:
                self.step([WorkerDraining(worker_id)])
            case "reconnect", str() as worker_id:
                if worker_id not in self.workers:
                    return
                worker = self.workers[worker_id]
                self.step([WorkerAway(worker_id)])
                self.step([WorkerUp(worker.facts, worker.held_now())])
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
                self._rounds[command.request_id] += bool(command.tokens)
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
                    for request_id, lease_epoch in requests:
                        self.workers[worker_id].drop(request_id, lease_epoch)
            case Assign(worker_id, entries):
                for entry in entries:
                    assert self.lease[entry.request_id] == (worker_id, entry.lease_epoch), (
                        "leased before listed"
                    )
                if worker_id in self.workers:
                    self.workers[worker_id].assign(entries, self._specification)
            case Drained(worker_id):
                self.drained.append(worker_id)

    def _end(self, request_id: str, end: End) -> None:
        self.ended[request_id] = end
        self.finished_s[request_id] = self.now_s

    def _round(self, worker: VirtualWorker) -> None:
        done = worker.run_round()
        if done is not None:
            worker.busy = True
            report = (worker.facts.worker_id, worker, done.report)
            self.at(self.now_s + done.report.total_s, "report", report)

    def _specification(self, request_id: str) -> Specification:
        return Specification(
            self._futures[request_id], self._rounds[request_id], len(self.committed[request_id])
        )

    def latencies(self) -> list[float]:
        return [self.finished_s[i] - job.arrival_s for i, job in self.jobs.items()]

    def mean_latency_s(self) -> float:
        return sum(self.latencies()) / len(self.jobs)
