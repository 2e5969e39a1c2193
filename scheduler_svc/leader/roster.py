"""The workers of the shard as the shell sees them: connected, in their grace period, or removed.

The core receives the loss of a worker only after its grace period; until then a worker that reconnects keeps
its requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from laps_sd.service.log import get_logger
from scheduler_svc.core.events import WorkerAway, WorkerDraining, WorkerLost, WorkerUp
from scheduler_svc.leader.sessions import WorkerSession
from scheduler_svc.leader.turn import Timer, Timers, Turn
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.wire.reports import Hello

log = get_logger(__name__)

TOGETHER_S = 1.5
"""Grace of a silent worker. Workers that fell silent together, as with their machine, are noticed within the
interval of their heartbeats (1 s unless set): by then none of them gets the requests of the first."""

MOST_ORDERED = 1000
"""Orders to leave that are kept for workers that may come back, the newest ones; each process has another id."""


@dataclass(eq=False)
class WorkerEntry:
    """One worker process."""

    worker_id: str
    name: str = ""
    session: WorkerSession | None = None
    """Stream of the worker; None in its grace period: the stream broke, or the worker has leases on the
    record and has not sent a hello to this leader.
    """
    timer: Timer | None = None
    """Watchdog while the worker has a session; end of its grace period while it has none."""
    drained: bool = False
    """Whether it was notified that it holds nothing any more, so that it leaves."""
    last_report_s: float = 0.0
    """Time of its last report; while it has nothing to run, the time at which it received its last work."""

    def replace_timer(self, timer: Timer | None) -> None:
        """Cancel the present timer and keep this one."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = timer


class Roster:
    """Workers of the shard, by worker id."""

    def __init__(self, settings: SchedulerSettings, timers: Timers) -> None:
        self.workers: dict[str, WorkerEntry] = {}
        self.fingerprint = ""
        """Fingerprint of the pool's model pair: that of the requests on the record that workers have begun, else from the
        hello of the first worker.
        """
        self.vocabulary = b""
        """Digest of the tokens of that pair's ids; empty: unknown."""
        self._ordered_to_leave: dict[str, None] = {}
        """Ids of workers that an operator has ordered to leave, the newest one last."""
        self._settings = settings
        self._timers = timers

    def session(self, worker_id: str) -> WorkerSession | None:
        """Return the stream of a worker; None while it has none."""
        entry = self.workers.get(worker_id)
        return entry.session if entry is not None else None

    def named(self, id_or_name: str) -> WorkerEntry | None:
        """Return a worker by its id or by its name. One without a stream may have no name."""
        for entry in self.workers.values():
            if id_or_name and id_or_name in (entry.worker_id, entry.name):
                return entry
        return None

    @property
    def connected(self) -> int:
        """Return the number of workers that have a stream."""
        return sum(entry.session is not None for entry in self.workers.values())

    def agrees(self, fingerprint: str, *, begun: Callable[[], int], has_accepted: bool) -> bool:
        """Return True if a worker's model pair is the pool's. The pool takes another pair only while nothing
        depends on its own: no worker is connected, and none has begun a request that is unfinished.

        `begun` counts these requests, if that decides. `has_accepted`: whether the stream of another worker was
        accepted, which may not have been `opened` yet.
        """
        if fingerprint == self.fingerprint:
            return True
        if self.fingerprint and (has_accepted or self.connected or begun()):
            return False
        self.fingerprint = fingerprint
        return True

    def expect(self, worker_id: str, now_s: float) -> None:
        """Give a worker with leases on the record its grace period, in which it can send a hello to this leader. One that
        is known changes nothing.
        """
        if worker_id not in self.workers:
            entry = self.workers[worker_id] = WorkerEntry(worker_id)
            self._start_grace(entry, now_s, self._settings.worker_grace_s)

    def opened(self, turn: Turn, session: WorkerSession, hello: Hello) -> None:
        """Handle the hello of a worker: its first one, or one after its stream broke."""
        worker_id = hello.facts.worker_id
        for other in list(self.workers.values()):
            # The same name under another id, and no stream left: that process is dead, so its grace period
            # ends now.
            if other.name == hello.name and other.worker_id != worker_id and other.session is None:
                self._lose(turn, other)
        entry = self.workers.setdefault(worker_id, WorkerEntry(worker_id))
        if entry.session is not None:
            entry.session.close("the worker has dialled again")
        entry.session = session
        entry.name = hello.name
        self.vocabulary = hello.vocabulary
        entry.drained = False
        entry.last_report_s = turn.now_s
        session.known = {held.request_id: held.lease_epoch for held in hello.held}
        turn.events.append(WorkerUp(hello.facts, hello.held, hello.cached_blocks))
        if hello.draining:
            turn.events.append(WorkerDraining(worker_id))
        elif worker_id in self._ordered_to_leave:
            self.drain(turn, worker_id)
        self._watch(entry, turn.now_s)
        log.info("worker up", worker_id=worker_id, slots=hello.facts.slots, held=len(hello.held))

    def closed(self, turn: Turn, session: WorkerSession, *, silent: bool) -> None:
        """Handle the end of a stream. A silent worker has had its grace period already, but for TOGETHER_S."""
        entry = self.workers.get(session.worker_id)
        if entry is None or entry.session is not session:
            return
        entry.session = None
        if entry.drained:
            log.info("drained worker left", worker_id=entry.worker_id)
        else:
            log.warning("worker stream ended", worker_id=entry.worker_id, silent=silent)
        turn.events.append(WorkerAway(entry.worker_id))
        grace_s = self._settings.worker_grace_s
        self._start_grace(entry, turn.now_s, min(grace_s, TOGETHER_S) if silent else grace_s)

    def drain(self, turn: Turn, worker_id: str) -> None:
        """Drain a worker for an operator: it receives the order to leave, and gets no new work. One without a stream
        receives it when it comes back to this leader.
        """
        self._ordered_to_leave[worker_id] = None
        if len(self._ordered_to_leave) > MOST_ORDERED:
            del self._ordered_to_leave[next(iter(self._ordered_to_leave))]
        session = self.session(worker_id)
        if session is not None:
            session.drain()
            turn.events.append(WorkerDraining(worker_id))

    def drained(self, worker_id: str) -> None:
        """Notify a draining worker that it holds nothing any more."""
        entry = self.workers.get(worker_id)
        if entry is not None and entry.session is not None:
            entry.drained = True
            entry.session.drained()

    def excuse(self, now_s: float) -> None:
        """Restart the watchdogs: no worker could report while the record was unavailable."""
        for entry in self.workers.values():
            entry.last_report_s = now_s

    def _start_grace(self, entry: WorkerEntry, now_s: float, grace_s: float) -> None:
        entry.replace_timer(self._timers.at(now_s + grace_s, lambda turn: self._lose(turn, entry)))

    def _watch(self, entry: WorkerEntry, now_s: float) -> None:
        """Set the watchdog: a connected worker with assigned requests that sends no report for too long
        counts as dead. Time in which this loop did not run does not count: no report was read in it.
        """
        due_s = now_s + self._settings.watchdog_s / 2

        def look(turn: Turn) -> None:
            assert entry.session is not None, "the timer is replaced when the session ends"
            entry.last_report_s = min(turn.now_s, entry.last_report_s + turn.now_s - due_s)
            # What has ended is not known any more, while the list that was sent last may still name it.
            has_work = len(entry.session.known)
            if has_work and turn.now_s - entry.last_report_s >= self._settings.watchdog_s:
                log.error("worker makes no progress", worker_id=entry.worker_id, listed=has_work)
                entry.session.close(f"no report for {self._settings.watchdog_s:g} s")
                entry.session = None
                self._lose(turn, entry, hung=True)
            else:
                self._watch(entry, turn.now_s)

        entry.replace_timer(self._timers.at(due_s, look))

    def _lose(self, turn: Turn, entry: WorkerEntry, *, hung: bool = False) -> None:
        entry.replace_timer(None)
        del self.workers[entry.worker_id]
        if not entry.drained:
            log.warning("worker lost", worker_id=entry.worker_id)
        turn.events.append(WorkerLost(entry.worker_id, hung))
