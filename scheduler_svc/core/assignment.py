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
    if not worker.must_send and not _differs(worker, settings.resend_index_change):
        return None
    worker.must_send = False
    worker.unsent = 0
    first: list[AssignEntry] = []
    others: list[AssignEntry] = []
    for request in worker.in_order:
        entry = request.sent = _entry(request, worker)
        (first if entry.reserved else others).append(entry)
    return Assign(worker.worker_id, (*first, *others))


def _entry(request: Request, worker: Worker) -> AssignEntry:
    """Made once for each rank: who waits is sent again and again as it was."""
    entry = request.entry
    if entry is None:
        rank = request.rank
        request.entry = entry = AssignEntry(
            request.facts.request_id,
            request.lease_epoch,
            request.order_key[0],
            rank.index_s,
            rank.resume_cost_s,
            _is_preferred(request, worker),
            _is_pinned(request),
        )
    return entry


def _is_preferred(request: Request, worker: Worker) -> bool:
    return request.reserved and (request.running or not worker.reserve_debt_blocks)


def _is_pinned(request: Request) -> bool:
    # Between tenants a policy without preemption has no say: a tenant that is ahead can be paused.
    return request.rank.pinned and not request.tenant_ahead


def _differs(worker: Worker, tolerance: float) -> bool:
    """Three cases. Somebody is new, and its turn may be near: send. Everybody runs, and the list is no longer than
    the slots: ranks decide nothing. Otherwise: send if an entry moved in a way that could turn a decision. Who left is
    no reason, since the worker knows: it ended there, or a Drop goes out.
    """
    members = worker.members
    if _brings_news(worker):
        return True
    if len(members) <= worker.slots and len(worker.running) == len(members):
        return False
    for request in members.values():
        sent = request.sent
        if sent is not request.entry and sent is not None and _moved(request, worker, sent, tolerance):
            return True
    return False


def _brings_news(worker: Worker) -> bool:
    """Whether the worker must hear of members that it does not know.

    Those at the end of a long list can wait until there are more of them: a request ends in nearly every round of a full
    worker and another one is listed for it, and each list that is sent names them all. They can while the worker knows
    half as many again as it has slots, and they come after all of these (our choice). Where KV is short it may have to look
    further than that for one that fits.
    """
    if not worker.unsent:
        return False
    if worker.is_short_of_blocks:
        return any(request.sent is None for request in worker.members.values())
    near = worker.slots + (worker.slots + 1) // 2
    known = 0
    for request in worker.in_order:
        if request.sent is not None:
            known += 1
        elif known < near or request.reserved:
            return True
    return False


def _moved(request: Request, worker: Worker, sent: AssignEntry, tolerance: float) -> bool:
    # Compared before an entry is made of it: most ranks move in every round, and few so far.
    if sent.reserved != _is_preferred(request, worker) or sent.pinned != _is_pinned(request):
        return True
    rank, rank_class = request.rank, request.order_key[0]
    if request.running:
        # A running request that looks better than when it was sent keeps its place all the same.
        return rank_class > sent.rank_class or rank.index_s > sent.index_s * (1 + tolerance)
    before, after = sent.index_s + sent.resume_cost_s, rank.index_s + rank.resume_cost_s
    return rank_class != sent.rank_class or abs(after - before) > tolerance * before
