"""The workers of the shard as the shell sees them: connected, in their grace, or gone.

The core is told of a loss only when the grace is over; until then a worker that dials again keeps its requests.
"""

from __future__ import annotations

from dataclasses import dataclass

from laps_sd.log import get_logger
from laps_sd.v1 import worker_link_pb2 as worker_pb
from scheduler_svc import translate
from scheduler_svc.core.events import WorkerDraining, WorkerLost, WorkerUp
from scheduler_svc.links import WorkerSession
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.turn import Timer, Timers, Turn

log = get_logger(__name__)


@dataclass(eq=False)
class WorkerEntry:
    """One worker process."""

    worker_id: str
    name: str = ""
    session: WorkerSession | None = None
    """None in its grace: the stream broke, or it has leases on the record and has not said hello to this leader."""
    timer: Timer | None = None
    """The watchdog while it has a session, the end of its grace while it has none."""
    listed: int = 0
    last_report_s: float = 0.0

    def replace_timer(self, timer: Timer | None) -> None:
        """Cancel the timer it has, and keep this one."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = timer


class Roster:
    """Who is there, by worker id and by the name that survives a restart."""

    def __init__(self, settings: SchedulerSettings, timers: Timers) -> None:
        self.workers: dict[str, WorkerEntry] = {}
        self.fingerprint = ""
        """Of the pool's model pair, as the first worker said it."""
        self._settings = settings
        self._timers = timers

    def session(self, worker_id: str) -> WorkerSession | None:
        """The stream of a worker; None while it has none."""
        entry = self.workers.get(worker_id)
        return entry.session if entry is not None else None

    def named(self, id_or_name: str) -> WorkerEntry | None:
        """A worker by its id, or by its name."""
        for entry in self.workers.values():
            if id_or_name in (entry.worker_id, entry.name):
                return entry
        return None

    def agrees(self, fingerprint: str, *, has_outputs: bool) -> bool:
        """Whether a worker's model pair is the pool's. The pool may change its pair only while nothing depends on it:
        no worker is connected and no unfinished request has outputs."""
        bound = has_outputs or any(entry.session is not None for entry in self.workers.values())
        if not self.fingerprint or not bound:
            self.fingerprint = fingerprint
        return self.fingerprint == fingerprint

    def expect(self, worker_id: str, now_s: float) -> None:
        """The record has leases of this worker: give it its grace to say hello to a new leader."""
        if worker_id not in self.workers:
            entry = self.workers[worker_id] = WorkerEntry(worker_id)
            self._start_grace(entry, now_s)

    def opened(self, turn: Turn, session: WorkerSession, hello: worker_pb.WorkerHello) -> None:
        """A worker said hello: for the first time, or again after its stream broke."""
        for other in list(self.workers.values()):
            # The same name under another id, and no stream left: that process is dead, nothing to wait for.
            if (
                other.name == hello.worker_name
                and other.worker_id != hello.worker_id
                and other.session is None
            ):
                self._lose(turn, other)
        entry = self.workers.setdefault(hello.worker_id, WorkerEntry(hello.worker_id))
        if entry.session is not None:
            entry.session.close("the worker has dialled again")
        entry.session = session
        entry.name = hello.worker_name
        entry.last_report_s = turn.now_s
        session.known = {held.request_id: held.lease_epoch for held in hello.held}
        turn.events.append(WorkerUp(translate.worker_facts(hello), translate.held_requests(hello)))
        if hello.draining:
            turn.events.append(WorkerDraining(hello.worker_id))
        self._watch(entry, turn.now_s)
        log.info("worker up", worker_id=hello.worker_id, slots=hello.slots, held=len(hello.held))

    def closed(self, turn: Turn, session: WorkerSession, *, silent: bool) -> None:
        """A stream ended. A silent worker has had its grace already."""
        entry = self.workers.get(session.worker_id)
        if entry is None or entry.session is not session:
            return
        entry.session = None
        log.warning("worker stream ended", worker_id=entry.worker_id, silent=silent)
        if silent:
            self._lose(turn, entry)
        else:
            self._start_grace(entry, turn.now_s)

    def drain(self, turn: Turn, worker_id: str) -> None:
        """An operator wants it to leave: it is told, and gets no new work."""
        session = self.session(worker_id)
        if session is not None:
            session.drain()
            turn.events.append(WorkerDraining(worker_id))

    def excuse(self, now_s: float) -> None:
        """Nobody could report for a while, as the record was away: the watchdogs begin anew."""
        for entry in self.workers.values():
            entry.last_report_s = now_s

    def _start_grace(self, entry: WorkerEntry, now_s: float) -> None:
        entry.replace_timer(
            self._timers.at(now_s + self._settings.worker_grace_s, lambda turn: self._lose(turn, entry))
        )

    def _watch(self, entry: WorkerEntry, now_s: float) -> None:
        """The watchdog: connected, listed work, and no report for too long is as good as dead."""

        def look(turn: Turn) -> None:
            assert entry.session is not None, "the timer is replaced when the session ends"
            if entry.listed and turn.now_s - entry.last_report_s >= self._settings.watchdog_s:
                log.error("worker makes no progress", worker_id=entry.worker_id, listed=entry.listed)
                entry.session.close(f"no report for {self._settings.watchdog_s:g} s")
                entry.session = None
                self._lose(turn, entry, hung=True)
            else:
                self._watch(entry, turn.now_s)

        entry.replace_timer(self._timers.at(now_s + self._settings.watchdog_s / 2, look))

    def _lose(self, turn: Turn, entry: WorkerEntry, *, hung: bool = False) -> None:
        entry.replace_timer(None)
        del self.workers[entry.worker_id]
        log.warning("worker lost", worker_id=entry.worker_id)
        turn.events.append(WorkerLost(entry.worker_id, hung))
