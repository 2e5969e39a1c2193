"""Workers that come up, are lost, or drain."""

from __future__ import annotations

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from scheduler_svc.core.events import WorkerLost, WorkerUp
from scheduler_svc.core.handlers.deaths import Deaths
from scheduler_svc.core.handlers.draining import move_waiting
from scheduler_svc.core.handlers.requests import Requests
from scheduler_svc.core.placement.ledger import Ledger
from scheduler_svc.core.state.request import ALONE_AFTER, MOST_DEATHS
from scheduler_svc.core.state.shard import Shard

GIVEN_UP = "{} workers died in a row while they ran this request, {} of them while they ran nothing else: it is not tried again"


class Workers:
    """Applies to the shard what happens to workers."""

    def __init__(self, shard: Shard, requests: Requests, deaths: Deaths) -> None:
        self._shard = shard
        self._requests = requests
        self._deaths = deaths

    def up(self, event: WorkerUp, ledger: Ledger) -> None:
        """Take in the hello of a worker: requests that it holds under another lease epoch are dropped, and
        none of its members runs.
        """
        worker = self._shard.worker_up(event.facts)
        worker.must_send = True  # the list that it still has is replaced by ours
        worker.drained_sent = False
        worker.free_target_blocks = event.facts.target_blocks
        worker.free_draft_blocks = event.facts.draft_blocks
        self._shard.caches.replaced(worker.worker_id, event.cached_blocks)
        self._deaths.take_back(worker.worker_id, ledger)
        held: dict[str, Residency] = {}
        for item in event.held:
            request = worker.members.get(item.request_id)
            if request is not None and request.lease_epoch == item.lease_epoch:
                held[item.request_id] = item.residency
                if item.predicted_remaining_tokens is not None:
                    self._requests.predicted(request, item.predicted_remaining_tokens, item.emitted)
            else:
                ledger.drop(worker.worker_id, item.request_id, item.lease_epoch)
        for request in list(worker.members.values()):
            self._shard.stop_running(request, worker)
            if request.request_id not in held:
                request.ran_here = False
            request.residency = held.get(request.request_id, Residency.NONE)
            if request.residency is Residency.NONE:
                self._shard.look_up(request)
            ledger.rerank(request)

    def away(self, worker_id: str) -> None:
        """Give no request to a worker whose stream has ended. It may be dead: the request would wait, and the death
        would count for it although it never ran there.
        """
        worker = self._shard.workers.get(worker_id)
        if worker is not None:
            worker.away = True
            self._shard.worker_changed(worker)

    def lost(self, event: WorkerLost, ledger: Ledger) -> None:
        """Put the members of a lost worker back into the queue; end those that too many workers died with."""
        worker_id = event.worker_id
        worker = self._shard.workers.get(worker_id)
        if worker is None:
            return
        members = list(worker.members.values())
        self._deaths.count(worker, event.hung, ledger)
        self._shard.worker_lost(worker)
        for request in members:
            ledger.release(request, send_drop=False)
            if request.deaths >= MOST_DEATHS:
                detail = GIVEN_UP.format(request.deaths, request.deaths - ALONE_AFTER)
                request.record_event(ledger.now_s, "given up", f"worker {worker_id} was lost: {detail}")
                self._requests.end(request.request_id, End.ERROR, detail, ledger)
            else:
                alone = f", alone: {request.deaths} workers died with it" if request.runs_alone else ""
                why = f"worker {worker_id} was lost; continues from its committed tokens{alone}"
                request.record_event(ledger.now_s, "requeued", why)

    def draining(self, worker_id: str, ledger: Ledger) -> None:
        """Give a worker no more work, and move the requests that it does not run."""
        worker = self._shard.workers.get(worker_id)
        if worker is None or worker.draining:
            return
        worker.draining = True
        self._shard.worker_changed(worker)
        move_waiting(worker, ledger)
