"""Moves the requests of a draining worker to others."""

from __future__ import annotations

from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.placement.ledger import Ledger
from scheduler_svc.core.placement.placement import fits_some_list
from scheduler_svc.core.policies.base import resume_cost_s
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.shard import Shard
from scheduler_svc.core.state.worker import Worker


def move_waiting(worker: Worker, ledger: Ledger) -> None:
    """Move the requests of a worker that begins to drain, but for those that run."""
    for request in list(worker.members.values()):
        if not request.running:
            _move(request, ledger)


def move_running(worker: Worker, shard: Shard, priors: Priors, ledger: Ledger) -> None:
    """Move its requests at a round boundary: those that run, when there is room elsewhere and the move costs
    less than finishing here; the others in any case.
    """
    for request in list(worker.members.values()):
        worth_it = request.rank.remaining.mean_s > resume_cost_s(request, priors)
        if not request.running or (worth_it and fits_some_list(shard, request)):
            _move(request, ledger)


def _move(request: Request, ledger: Ledger) -> None:
    worker_id = request.worker
    ledger.release(request, send_drop=True)
    request.record_event(ledger.now_s, "requeued", f"worker {worker_id} is leaving")
