"""Changes of leases, and the commands that carry them out.

The commands of a step are collected here; `commands` returns them in the order of the contract
(`core/commands.py`): the record first.
"""

from __future__ import annotations

from laps_sd.contract.choose import Residency
from scheduler_svc.core.commands import Command, Commit, Drained, Drop, Finish, Lease, Rank, Release
from scheduler_svc.core.placement.assignment import assignment
from scheduler_svc.core.policies.ranker import Ranker
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import QUIET_S, Request
from scheduler_svc.core.state.shard import Shard
from scheduler_svc.core.state.worker import Worker


class Ledger:
    """Commands of one step, and their effects on the shard."""

    def __init__(self, shard: Shard, ranker: Ranker, now_s: float) -> None:
        self.now_s = now_s
        self._shard = shard
        self._ranker = ranker
        self._record: list[Command] = []
        self._drops: dict[str, dict[tuple[str, int], None]] = {}
        """What each worker must forget, in order, each once."""

    def write(self, command: Commit | Finish) -> None:
        """Add a transition of the record that changes no lease."""
        self._record.append(command)

    def rank(self, request: Request) -> None:
        """Note that the place of a request in the queue changed without a commit."""
        self._record.append(
            Rank(request.request_id, request.rank.level, request.order_key[1], request.preemptions)
        )

    def drop(self, worker_id: str, request_id: str, lease_epoch: int) -> None:
        """Make a worker forget a request, whatever the core knows of either."""
        self._drops.setdefault(worker_id, {})[request_id, lease_epoch] = None

    def take_off(self, request: Request) -> None:
        """Make its worker forget a listed request, which the shard then moves or forgets."""
        assert request.worker is not None
        self.drop(request.worker, request.request_id, request.lease_epoch)
        if not request.is_harmless:
            worker = self._shard.workers[request.worker]
            worker.taken_off.append(request.request_id)
            worker.quiet_at_s = self.now_s + QUIET_S

    def is_stale(self, request: Request) -> bool:
        """Return whether its rank uses an older version of the priors."""
        return self._ranker.is_stale(request)

    def refresh(self, request: Request) -> bool:
        """Rank it again if the priors have a newer version; return whether they had."""
        if not self._ranker.is_stale(request):
            return False
        self.rerank(request)
        return True

    def rerank(self, request: Request) -> None:
        """Rank a queued or listed request by the present priors."""
        self._shard.rerank(request, self._ranker.rank(request))

    def lease(self, request: Request, worker: Worker) -> None:
        """Put a queued request on a worker's list."""
        self._put(request, worker)
        alone = f", alone: {request.deaths} workers died with it" if request.runs_alone else ""
        request.record_event(self.now_s, "leased", f"to worker {worker.worker_id}{_cached(request)}{alone}")

    def release(self, request: Request, *, send_drop: bool) -> None:
        """Take a request off its list into the queue."""
        self._record.append(
            Release(request.request_id, request.lease_epoch, request.deaths, request.death_round)
        )
        self._take_back(request, send_drop=send_drop)
        self.rank(request)

    def move(self, request: Request, worker: Worker, why: str) -> None:
        """Move a request from one list to another in one transition of the record. `why` describes that
        worker in its story.
        """
        self._take_back(request, send_drop=True)
        self._put(request, worker)
        request.record_event(self.now_s, "moved", f"to worker {worker.worker_id}, {why}{_cached(request)}")

    def _put(self, request: Request, worker: Worker) -> None:
        before = request.cached_tokens
        self._shard.lease(request, worker)
        if request.cached_tokens != before:
            self.rerank(request)  # less or more is left to be computed
        self._record.append(Lease(request.request_id, worker.worker_id, request.lease_epoch))

    def _take_back(self, request: Request, *, send_drop: bool) -> None:
        if send_drop:
            self.take_off(request)
        request.residency = Residency.NONE
        request.cached_tokens = self._shard.caches.most_tokens(request)
        self._shard.take_back(request, self._ranker.rank(request))

    def commands(self, settings: CoreSettings) -> list[Command]:
        """Return all commands of the step: for the record, then for workers that must forget requests, then
        new lists, then for workers that may leave.
        """
        commands = self._record
        commands.extend(Drop(worker_id, tuple(drops)) for worker_id, drops in self._drops.items())
        touched = list(self._shard.touched.values())
        self._shard.touched.clear()
        for worker in touched:
            assign = assignment(worker, settings)
            if assign is not None:
                commands.append(assign)
        for worker in touched:
            if worker.draining and not worker.members and not worker.drained_sent:
                worker.drained_sent = True
                commands.append(Drained(worker.worker_id))
        return commands


def _cached(request: Request) -> str:
    """Return what its worker has of its prompt, for its story; empty: nothing."""
    if not request.cached_tokens:
        return ""
    tokens = min(request.cached_tokens, request.facts.prompt_tokens)
    return f", which has {tokens} of {request.facts.prompt_tokens} prompt tokens"
