"""Deaths of workers, counted for the requests that they ran: one that may have killed them runs alone next.

A death counts for the members that may have run, and for requests that left the worker so recently that they
may still have been in its batch. `core/state/request.py` says how many deaths change what.
"""

from __future__ import annotations

from scheduler_svc.core.placement.ledger import Ledger
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.shard import Shard
from scheduler_svc.core.state.worker import Worker

MOST_LOST = 256
"""Lost workers whose requests are remembered, in case one dials again. Our choice."""


class Deaths:
    """Counts the deaths of workers for requests."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.died_with: dict[str, dict[str, None]] = {}
        """Requests whose counts contain the death of a lost worker, by worker; the oldest worker first."""

    def count(self, worker: Worker, hung: bool, ledger: Ledger) -> None:
        """Count the death of a lost worker for the requests that it may have run; isolate those that must run
        alone from now on. The death counts for good if the worker hung: dialing again does not clear it.
        """
        if worker.draining:
            return  # it was ordered to end, and does so when its time is over, whatever it runs
        died_with = [request for request in worker.members.values() if request.may_have_run]
        is_certain = len(worker.members) == 1
        for request_id in dict.fromkeys(worker.taken_off):  # one may have left, come back and left again
            left = self._shard.requests.get(request_id)
            if left is not None and left.worker != worker.worker_id:
                died_with.append(left)
                is_certain = False
        counted: dict[str, None] = {}
        for request in died_with:
            ran_alone = request.runs_alone
            if is_certain or not ran_alone:
                request.deaths += 1
                counted[request.request_id] = None
            request.death_round = request.rounds
            if request.runs_alone and not ran_alone and request.worker != worker.worker_id:
                self._isolate(request, worker, ledger)
        if counted and not hung:
            self.died_with[worker.worker_id] = counted
            if len(self.died_with) > MOST_LOST:
                del self.died_with[next(iter(self.died_with))]

    def take_back(self, worker_id: str, ledger: Ledger) -> None:
        """Clear the requests of a worker that was given up and dials again: it did not die. The record gets
        the lower count with the next release; if the leader changes before, such a request runs alone for a
        while.
        """
        for request_id in self.died_with.pop(worker_id, {}):
            request = self._shard.requests.get(request_id)
            if request is not None and request.deaths:
                request.record_event(ledger.now_s, "cleared", f"worker {worker_id} is alive")
                self.lower(request, request.deaths - 1)

    def lower(self, request: Request, deaths: int) -> None:
        """Set a lower number of deaths; a request that need not run alone any more shares a worker again."""
        ran_alone = request.runs_alone
        request.deaths = deaths
        if not deaths:
            self.forget(request)
        if ran_alone and not request.runs_alone:
            self._shard.shared_again(request)

    def forget(self, request: Request) -> None:
        """Remove a request from the deaths that a worker takes back when it dials again: its count has none of them."""
        for request_ids in self.died_with.values():
            request_ids.pop(request.request_id, None)

    def _isolate(self, request: Request, lost: Worker, ledger: Ledger) -> None:
        """Make a request run alone, after the death of a worker that it had just left: it waits for a worker
        of its own from now on.
        """
        if request.worker is None:
            self._shard.requeue(request)
        else:
            ledger.release(request, send_drop=True)
        why = f"worker {lost.worker_id} was lost, which it had just left; runs alone: {request.deaths} workers died with it"
        request.record_event(ledger.now_s, "requeued", why)
