"""Whether a worker's list must be sent again: only when what it chooses could change, never because time passes."""

from __future__ import annotations

from scheduler_svc.core.commands import Assign, AssignEntry
from scheduler_svc.core.request import Request
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.worker import Worker


def assignment(worker: Worker, settings: CoreSettings) -> Assign | None:
    """The list to send, best first with the reserved ones in front, or None when the worker's own serves."""
    if worker.facts is None:
        return None
    entries = {key[-1]: _entry(worker.members[key[-1]]) for key in worker.ordered}
    if not worker.must_send and not _differs(worker, entries, settings.resend_index_change):
        return None
    worker.must_send = False
    worker.sent = entries
    in_order = sorted(entries.values(), key=lambda entry: not entry.reserved)
    return Assign(worker.worker_id, tuple(in_order))


def _entry(request: Request) -> AssignEntry:
    rank = request.rank
    return AssignEntry(
        request_id=request.request_id,
        lease_epoch=request.lease_epoch,
        rank_class=request.order_key[0],
        index_s=rank.index_s,
        resume_cost_s=rank.resume_cost_s,
        reserved=request.reserved,
        # Between tenants a policy without preemption has no say: a tenant that is ahead can be paused.
        pinned=rank.pinned and not request.tenant_ahead,
    )


def _differs(worker: Worker, entries: dict[str, AssignEntry], tolerance: float) -> bool:
    """Three cases. Somebody is new: send. Everybody runs, and the list is no longer than the slots: ranks decide
    nothing. Otherwise: send if an entry moved in a way that could turn a decision. Who left is no reason, since
    the worker knows: it ended there, or a Drop goes out.
    """
    for request_id, entry in entries.items():
        sent = worker.sent.get(request_id)
        if sent is None or sent.lease_epoch != entry.lease_epoch:
            return True
    if len(entries) <= worker.slots and len(worker.running) == len(entries):
        return False
    return any(
        _moved(worker.sent[request_id], entry, request_id in worker.running, tolerance)
        for request_id, entry in entries.items()
    )


def _moved(sent: AssignEntry, now: AssignEntry, running: bool, tolerance: float) -> bool:
    if (sent.reserved, sent.pinned) != (now.reserved, now.pinned):
        return True
    if running:
        # A running request that looks better than when it was sent keeps its place all the same.
        return now.rank_class > sent.rank_class or now.index_s > sent.index_s * (1 + tolerance)
    before, after = sent.index_s + sent.resume_cost_s, now.index_s + now.resume_cost_s
    return now.rank_class != sent.rank_class or abs(after - before) > tolerance * before
