"""Work that a leader does from time to time, at the end of a turn: nothing waits for it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.leader.outage import Outage
from scheduler_svc.leader.probes import Probes
from scheduler_svc.leader.repair import Repair
from scheduler_svc.leader.turn import Timers, Turn
from scheduler_svc.leader.working_copy import WorkingCopy
from scheduler_svc.store.batch import Batch
from scheduler_svc.store.errors import Fenced, StoreUnavailable
from scheduler_svc.store.store import Store

FOLLOW_CLOCK_S = 10.0
"""Seconds between two comparisons of the leader's clock with that of the record's server."""
MEAN_REQUEST_S = "mean_request_s"
"""Name under which the record has, with what the policy has learnt, the machine seconds that an unfinished
request still needs on average.
"""
ARRIVING_LOAD = "arriving_load"
"""The same for the number of workers that the arriving work keeps busy."""


class Chores:
    """Chores of one leader. One that cannot reach the record is done again in its next interval."""

    def __init__(
        self,
        *,
        core: Scheduler,
        store: Store,
        working_copy: WorkingCopy,
        repair: Repair,
        probes: Probes,
        timers: Timers,
        outage: Outage,
        clock: Callable[[], float],
        save_s: float,
        doubt_lead: Callable[[], None],
    ) -> None:
        """`save_s`: seconds between two savings of what was learnt. `doubt_lead` is called where the record
        answers that this process does not lead.
        """
        self._core = core
        self._store = store
        self._working_copy = working_copy
        self._repair = repair
        self._probes = probes
        self._timers = timers
        self._outage = outage
        self._clock = clock
        self._save_s = save_s
        self._doubt_lead = doubt_lead
        self._saved: tuple[int, float | None, float] | None = None
        """What the last saving depended on, so that nothing is encoded only to find it unchanged."""
        self._written_back = store.generation
        """The store's generation at the last saving. A record that was written back since then lacks what was
        saved.
        """
        self._mean_request_s: float | None = None
        """Machine seconds left per unfinished request, when there last was one."""

    def start(self, now_s: float) -> None:
        """Set the timers of the chores."""
        self._timers.at(now_s + self._save_s, self._save_soon)
        self._timers.at(now_s + FOLLOW_CLOCK_S, self._follow_clock_soon)

    def each_second(self, turn: Turn) -> None:
        """Add the chores that are done about once a second."""
        turn.chores += [self._settle_claims, self._tidy_log]

    async def _settle_claims(self) -> None:
        if not self._outage.on:
            self._working_copy.forget_old_ends(self._clock())
            with self._tried_again_later():
                await self._store.settle_claims()

    async def _tidy_log(self) -> None:
        """Fold what is due also where no report comes, so that no log holds outputs for long."""
        if self._outage.on:
            return
        batch = Batch(self._store)
        with self._tried_again_later():
            await batch.execute()
        live = self._working_copy.live
        # One of which a transition is decided is found lost once that is written.
        lost = {
            name: status
            for name, status in batch.unfoldable.items()
            if name in live and not live[name].settling
        }
        await self._repair.unfoldable(lost, self._clock())

    def _follow_clock_soon(self, turn: Turn) -> None:
        self._timers.at(turn.now_s + FOLLOW_CLOCK_S, self._follow_clock_soon)
        turn.chores.append(self._follow_clock)

    async def _follow_clock(self) -> None:
        if not self._outage.on:
            with self._tried_again_later():
                self._store.clock.follow(await self._store.measure_clock())

    def _save_soon(self, turn: Turn) -> None:
        self._timers.at(turn.now_s + self._save_s, self._save_soon)
        turn.chores += [self._save_priors, self._save_probes]

    async def _save_priors(self) -> None:
        if self._store.generation != self._written_back:
            self._written_back = self._store.generation
            self._saved, self._probes.unsaved = None, True
        if live := len(self._working_copy.live):
            self._mean_request_s = self._core.totals().backlog_s / live
        load = round(self._core.arriving_load(self._clock()), 3)
        found = (self._core.events_applied, self._mean_request_s, load)
        if found == self._saved and not self._outage.on:
            return  # in an outage it is written all the same, which shows whether the outage is over
        learnt = self._core.priors.to_dict()
        if self._mean_request_s is not None:
            learnt[MEAN_REQUEST_S] = self._mean_request_s
        if load:
            learnt[ARRIVING_LOAD] = load
        with self._tried_again_later():
            await self._store.save_priors(json.dumps(learnt, separators=(",", ":")).encode())
            self._saved = found
            self._outage.wrote()

    async def _save_probes(self) -> None:
        if not self._probes.unsaved or self._outage.on:
            return  # the priors show whether an outage is over
        with self._tried_again_later():
            await self._store.save_probes(self._probes.to_blob())
            self._probes.unsaved = False

    @contextlib.contextmanager
    def _tried_again_later(self) -> Iterator[None]:
        """Run a chore that comes again in its next interval if the record cannot be reached."""
        try:
            yield
        except Fenced:
            self._doubt_lead()
        except StoreUnavailable as error:
            self._outage.began(error)
