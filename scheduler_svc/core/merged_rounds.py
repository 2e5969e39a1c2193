"""Reports of workers that the core has not received: merged by worker, until they are due.

A report costs the core about as much for one round as for several, and estimates that see the newest rounds a
little later order requests as well. So a caller with many workers, which has the tokens on the record already
(`Progress.recorded`), lets reports wait and passes them on together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import final

from scheduler_svc.core.events import (
    CacheChanged,
    EndRequested,
    Event,
    Merged,
    Progress,
    Refused,
    RoundReported,
    WorkerAway,
    WorkerDraining,
    WorkerLost,
    WorkerUp,
)

REPORTS_PER_S = 200
"""Reports that the core receives in a second, about: with more workers each of them waits longer between two.
Our choice: with ten workers whose rounds take 50 ms the core receives each round.
"""
MOST_ROUNDS = 4
"""Rounds that wait at most."""


@final
class _Worker:
    """Waiting reports of one worker."""

    def __init__(self) -> None:
        self.received_s = -math.inf
        """When the core received a report of it last."""
        self.waiting: list[RoundReported] = []
        self.changes: list[CacheChanged] = []
        """Changes of its cache in these rounds."""
        self.draining = False


@final
class MergedRounds:
    """Reports that wait, by worker."""

    def __init__(self, reports_per_s: float = REPORTS_PER_S) -> None:
        self._reports_per_s = reports_per_s
        self._workers: dict[str, _Worker] = {}
        self._hurried: set[str] = set()

    def due(
        self, events: Iterable[Event], now_s: float, worker_of: Callable[[str], str | None]
    ) -> list[Event]:
        """Return what the core receives now: the events in their order, where reports may wait. They come before
        anything else that is about their worker or its requests. `worker_of`: the worker that a request is
        leased to on the record, by its id.
        """
        due: list[Event] = []
        for worker_id in sorted(self._hurried):
            due += self._take(worker_id)
        self._hurried.clear()
        lost = False
        for event in events:
            if isinstance(event, RoundReported):
                due += self._add(event, now_s, apart=lost)
                continue
            if isinstance(event, CacheChanged):
                self._worker(event.worker_id).changes.append(event)  # its report follows
                continue
            about: str | None = None
            if isinstance(event, WorkerUp):
                about = event.facts.worker_id
            elif isinstance(event, WorkerAway | WorkerLost | WorkerDraining):
                about = event.worker_id
            elif isinstance(event, EndRequested | Refused):
                about = worker_of(event.request_id)
            if about is not None:
                due += self._take(about)
            if isinstance(event, WorkerDraining):
                self._worker(event.worker_id).draining = True
            if isinstance(event, WorkerLost):
                self._workers.pop(event.worker_id, None)
                lost = True
            due.append(event)
        return due

    def hurry(self, worker_id: str) -> None:
        """Let nothing of a worker wait any longer: it is due with the next events, whatever they are. Call this
        when a request was taken from the worker, since another may continue it soon.
        """
        self._hurried.add(worker_id)

    def hurry_late(self, now_s: float, after_s: float) -> None:
        """Do so for all workers whose reports have waited for that long, since no other came."""
        for worker_id, worker in self._workers.items():
            if worker.waiting and now_s - worker.received_s >= after_s:
                self._hurried.add(worker_id)

    def _worker(self, worker_id: str) -> _Worker:
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = _Worker()
        return worker

    def _add(self, report: RoundReported, now_s: float, *, apart: bool) -> list[Event]:
        """Add a report. Return what is due of its worker: everything if the core has to decide about the report,
        or if its interval is over; otherwise nothing.

        `apart`: requests may leave their worker by an event before this one, as they do at each report of a
        draining worker. Then nothing is merged: of a request that has left, the core counts what is on the
        record, and not its end.
        """
        worker = self._worker(report.worker_id)
        if apart or worker.draining:
            return [*_taken(worker), report]
        worker.waiting.append(report)
        interval_s = len(self._workers) / self._reports_per_s
        if now_s - worker.received_s < interval_s and len(worker.waiting) < MOST_ROUNDS and _can_wait(report):
            return []
        worker.received_s = now_s
        return _taken(worker)

    def _take(self, worker_id: str) -> list[Event]:
        worker = self._workers.get(worker_id)
        return [] if worker is None else _taken(worker)


def _taken(worker: _Worker) -> list[Event]:
    waiting, worker.waiting = worker.waiting, []
    taken: list[Event] = [*worker.changes]
    worker.changes = []
    first = 0
    for at in range(1, len(waiting) + 1):
        if at == len(waiting) or not _continues(waiting[at - 1], waiting[at]):
            taken.append(waiting[first] if at - first == 1 else merged(waiting[first:at]))
            first = at
    return taken


def _can_wait(report: RoundReported) -> bool:
    """Return whether the core need not decide about a report."""
    if report.residency or not report.progress:
        return False
    return all(progress.recorded and not progress.prefilled for progress in report.progress)


def _continues(before: RoundReported, report: RoundReported) -> bool:
    """Return whether a report can be merged with the one before, which could wait, by the rule of
    `RoundReported`: all that took part take part again, under the same lease and from where they were.
    """
    reached = {progress.request_id: progress for progress in before.progress}
    again = 0
    for progress in report.progress:
        if not progress.tokens:
            return False
        earlier = reached.get(progress.request_id)
        if earlier is None:
            continue
        again += 1
        if progress.lease_epoch != earlier.lease_epoch or progress.position != earlier.position + len(
            earlier.tokens
        ):
            return False
    return again == len(reached)


@final
class _Sums:
    """Progress of one request in several reports."""

    def __init__(self, first: Progress) -> None:
        self.first = self.last = first
        self.tokens: list[int] = []
        self.drafted = self.accepted = self.prefilled = self.cached = 0
        self.rounds = self.drafts = self.squares = 0
        self.predicted: float | None = None

    def add(self, progress: Progress) -> None:
        """Add one report's part."""
        tokens = len(progress.tokens)
        self.last = progress
        self.tokens += progress.tokens
        self.drafted += progress.drafted
        self.accepted += progress.accepted
        self.prefilled += progress.prefilled
        self.cached += progress.cached
        self.rounds += progress.rounds
        self.drafts += progress.drafts
        self.squares += progress.squares(tokens)
        if progress.predicted_remaining_tokens is not None:
            self.predicted = progress.predicted_remaining_tokens
        elif self.predicted is not None:
            self.predicted = max(0.0, self.predicted - tokens)

    def progress(self) -> Progress:
        """Return the progress in all of them."""
        first, last = self.first, self.last
        return Progress(
            first.request_id,
            first.lease_epoch,
            first.position,
            tuple(self.tokens),
            self.drafted,
            self.accepted,
            self.prefilled,
            last.end,
            last.cut_characters,
            last.error,
            self.predicted,
            Merged(self.rounds, self.drafts, self.squares),
            last.recorded,
            self.cached,
        )


def merged(reports: list[RoundReported]) -> RoundReported:
    """Return reports that continue each other as one."""
    sums: dict[str, _Sums] = {}
    draft_s = verify_s = prefill_s = swap_s = idle_s = total_s = 0.0
    rounds = 0
    for report in reports:
        rounds += report.rounds
        draft_s += report.draft_s
        verify_s += report.verify_s
        prefill_s += report.prefill_s
        swap_s += report.swap_s
        idle_s += report.idle_s
        total_s += report.total_s
        for progress in report.progress:
            one = sums.get(progress.request_id)
            if one is None:
                one = sums[progress.request_id] = _Sums(progress)
            one.add(progress)
    last = reports[-1]
    return RoundReported(
        worker_id=last.worker_id,
        progress=tuple([one.progress() for one in sums.values()]),
        residency=last.residency,
        draft_s=draft_s,
        verify_s=verify_s,
        prefill_s=prefill_s,
        swap_s=swap_s,
        idle_s=idle_s,
        total_s=total_s,
        free_target_blocks=last.free_target_blocks,
        free_draft_blocks=last.free_draft_blocks,
        rounds=rounds,
    )
