"""The scheduler: a function of events and time that returns which request runs where.

Invariants
  * No I/O, no clock, no randomness: the same events at the same times give the same commands.
  * Every accepted request ends in exactly one way, and leaves the core in the step that returns its end.
  * A lease is on the record before a request enters any worker's list, and no request is in two lists.
  * Only the lease epoch decides whether a report counts: with another one it changes nothing.
  * Ranks change by events only, so a step costs O(log n) in queued requests for each event.

The caller's part is the contract at the top of `core/commands.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from scheduler_svc.core import queries
from scheduler_svc.core.commands import Command
from scheduler_svc.core.estimates.errors import EstimateErrors
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import (
    Arrived,
    CacheChanged,
    EndRequested,
    Event,
    Recovered,
    Refused,
    RoundReported,
    WorkerAway,
    WorkerDraining,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.handlers.deaths import Deaths
from scheduler_svc.core.handlers.learning import OWN_ENDS, Learner
from scheduler_svc.core.handlers.requests import Requests
from scheduler_svc.core.handlers.rounds import Rounds
from scheduler_svc.core.handlers.workers import Workers
from scheduler_svc.core.placement.ledger import Ledger
from scheduler_svc.core.placement.placement import place
from scheduler_svc.core.placement.routing import Router, SoonestDone
from scheduler_svc.core.policies.base import Policy
from scheduler_svc.core.policies.ranker import Ranker
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.found_tokens import FoundTokens
from scheduler_svc.core.state.shard import Shard
from scheduler_svc.core.views import Explanation, QueueEntry, Totals, WorkerView

FIRST_GAP_S = 0.25
GAP_GROWTH = 1.25
"""Seconds between two versions of the priors: at first, and how they grow up to `priors_interval_s`."""


class Scheduler:
    """The whole core. Not thread-safe; one task owns it."""

    def __init__(
        self, policy: Policy, settings: CoreSettings, priors: Priors, router: Router | None = None
    ) -> None:
        """`router`: chooses the worker of a request; None: the one of production."""
        self.policy = policy
        self.settings = settings
        self.priors = priors
        self.estimate_errors = EstimateErrors()
        self.events_applied = 0
        """Number of events so far. The priors change with them only."""
        self._router = router or SoonestDone()
        self._publish_at_s = 0.0
        self._publish_gap_s = FIRST_GAP_S
        self._shard = Shard(settings.list_factor, settings.reserved_share, settings.tenant_fairness)
        self._shard.worker_orders.cost_changed(*priors.cost.by_batch_s)
        self._ranker = Ranker(policy, priors)
        self._deaths = Deaths(self._shard)
        self._requests = Requests(self._shard, self._ranker, self._deaths)
        self._workers = Workers(self._shard, self._requests, self._deaths)
        self._learner = Learner(priors, self.estimate_errors, self._shard)
        self._rounds = Rounds(self._shard, self._ranker, self._requests, self._learner, self._deaths)

    def step(self, now_s: float, events: Iterable[Event]) -> list[Command]:
        """Apply the events since the last step; return the commands that follow, in the order of the
        contract.
        """
        ledger = Ledger(self._shard, self._ranker, now_s)
        self.estimate_errors.begin_step()
        for event in events:
            self._apply(event, ledger)
            self.events_applied += 1
        self._publish(now_s)
        self._shard.take_turns()
        place(self._shard, ledger, self.settings, self.priors, self._router)
        return ledger.commands(self.settings)

    def recover(self, now_s: float, requests: Iterable[Recovered]) -> None:
        """Enter requests, none of which the core has, and place nothing yet. A new leader that reads many calls this for
        some at a time, so that it does other things in between, and `step` once after the last.
        """
        ledger = Ledger(self._shard, self._ranker, now_s)
        for request in requests:
            self._requests.recovered(request, ledger)

    def _publish(self, now_s: float) -> None:
        """Start a new version of the priors, by which waiting requests are ranked again when they come into play: at
        intervals, which are short at first, when every round changes the priors much.
        """
        if now_s >= self._publish_at_s:
            if self.priors.publish():
                self._shard.worker_orders.cost_changed(*self.priors.cost.by_batch_s)
            self._publish_at_s = now_s + self._publish_gap_s
            self._publish_gap_s = min(self._publish_gap_s * GAP_GROWTH, self.settings.priors_interval_s)

    def _apply(self, event: Event, ledger: Ledger) -> None:
        match event:
            case Arrived(facts):
                self._requests.arrived(facts, ledger)
            case Recovered():
                self._requests.recovered(event, ledger)
            case RoundReported():
                self._rounds.reported(event, ledger)
            case EndRequested(request_id, end, detail):
                request = self._shard.requests.get(request_id)
                if request is not None and end in OWN_ENDS:
                    self._learner.learn_end(end, request)
                self._requests.end(request_id, end, detail, ledger)
            case WorkerUp():
                self._workers.up(event, ledger)
            case WorkerAway(worker_id):
                self._workers.away(worker_id)
            case WorkerLost():
                self._workers.lost(event, ledger)
            case WorkerDraining(worker_id):
                self._workers.draining(worker_id, ledger)
            case CacheChanged(worker_id, added, removed):
                self._shard.caches.changed(worker_id, added, removed)
            case Refused(request_id):
                # The caller reads the record again, and sends the request that it finds as `Recovered`.
                self._requests.forget(request_id, ledger)
            case _:  # pragma: no cover  # mypy proves that nothing is left
                assert_never(event)

    # Queries. They change nothing.

    def explain(self, request_id: str, now_s: float) -> Explanation | None:
        """Return everything about one request; None when it is not here (any more)."""
        return queries.explain(self._shard, self.policy, self.priors, self.estimate_errors, request_id, now_s)

    def rank_of(self, request_id: str) -> RankKey | None:
        """Return its present rank; None when it is not here (any more)."""
        request = self._shard.requests.get(request_id)
        return None if request is None else request.rank

    def queue(self, now_s: float, limit: int) -> list[QueueEntry]:
        """Return unfinished requests, best first, at most `limit`."""
        return queries.queue(self._shard, self.policy, now_s, limit)

    def workers(self) -> list[WorkerView]:
        """Return all workers, including those that only the record's leases name."""
        return queries.workers(self._shard, self.priors)

    def depth_by_level(self) -> list[int]:
        """Return the number of waiting requests (queued, or listed and not running), by level, up to the
        highest level ever used.
        """
        return queries.depth_by_level(self._shard)

    @property
    def has_suspects(self) -> bool:
        """Return whether requests wait to run alone. If so, time alone may bring one of them forward, and a
        step is due every second.
        """
        return bool(self._shard.suspects)

    @property
    def capacity_tokens(self) -> int:
        """Return the largest sum of prompt and output tokens that some worker could hold; 0 without any.

        A worker counts that takes no work for the time being: its stream has ended, or a request runs alone
        there.
        """
        return self._shard.longest_tokens

    @property
    def found_tokens(self) -> FoundTokens:
        """Return what the workers have found in their prefix caches."""
        return self._shard.caches.found

    @property
    def block_index_bytes(self) -> int:
        """Return the size of the index of what the workers have in their prefix caches."""
        return self._shard.caches.blocks.size_bytes

    def totals(self) -> Totals:
        """Return the shard in numbers."""
        return queries.totals(self._shard, self.priors)

    def arriving_load(self, now_s: float) -> float:
        """Return the number of workers that the arriving work keeps busy, by the estimates, over about two minutes."""
        return queries.arriving_load(self._shard, self.priors, now_s)

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken; for tests."""
        self._shard.check()
