"""The decision whether a worker's list is sent again: only when its choices could change, never because time
passes.
"""

from __future__ import annotations

from typing import Final

from laps_sd.contract.choose import HYSTERESIS
from scheduler_svc.core.commands import Assign, AssignEntry
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.worker import Worker

NO_RIVAL: Final = (-(2**62), 0.0)
"""Class and index before those of every member."""
NO_ONE_WAITS: Final = (2**62, 0.0)
"""Class and index after those of every member."""


def assignment(worker: Worker, settings: CoreSettings) -> Assign | None:
    """Return the list to send, best first after the reserved ones, or None when the worker's own is good
    enough.
    """
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
    """Return the entry of a request, made once per rank: a waiting request is sent many times unchanged."""
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
    # A policy without preemption does not apply between tenants: a tenant that is ahead can be paused.
    return request.rank.pinned and not request.tenant_ahead


def _differs(worker: Worker, tolerance: float) -> bool:
    """Return whether the list must be sent, by three cases. A member is new, and its turn may be near: send.
    All members run, and the list is no longer than the slots: ranks decide nothing. Otherwise: send if an
    entry moved in a way that could change a decision. A member that left is no reason, since the worker
    knows: it ended there, or a Drop is sent.
    """
    members = worker.members
    if _brings_news(worker):
        return True
    if len(members) <= worker.slots and len(worker.running) == len(members):
        return False
    rival = _rival(worker)
    for request in members.values():
        sent = request.sent
        if sent is not request.entry and sent is not None and _moved(request, worker, sent, rival, tolerance):
            return True
    return False


def _rival(worker: Worker) -> tuple[int, float]:
    """Return the class and index after which a running member can lose its slot to one that waits, as `choose`
    displaces: by class, or by cost and the hysteresis. Where KV or slots are too few for those that run, their
    own order decides too.
    """
    if worker.is_short_of_blocks or len(worker.running) > worker.slots:
        return NO_RIVAL
    rival = NO_ONE_WAITS
    for request in worker.in_order:
        if not request.running:
            rank_class, cost = request.order_key[0], request.order_key[1]
            if (rank_class, cost) >= rival:
                break  # so do all that follow
            rival = min(rival, (rank_class, cost + HYSTERESIS * request.rank.index_s))
    return rival


def _brings_news(worker: Worker) -> bool:
    """Return whether the worker must receive members that it does not have.

    New members at the end of a long list can wait until there are more of them: a request ends in nearly
    every round of a full worker and another one is listed for it, and each list that is sent names them all.
    They can wait while the worker knows 1.5 times as many members as it has slots, and they come after all of
    these (our choice). Where KV is short, or a slot stays free, it may have to look further than that for one that
    fits.
    """
    if not worker.unsent:
        return False
    if worker.is_short_of_blocks or worker.has_idle_slot:
        return any(request.sent is None for request in worker.members.values())
    near = worker.slots + (worker.slots + 1) // 2
    known = 0
    for request in worker.in_order:
        if request.sent is not None:
            known += 1
        elif known < near or request.reserved:
            return True
    return False


def _moved(
    request: Request, worker: Worker, sent: AssignEntry, rival: tuple[int, float], tolerance: float
) -> bool:
    # Compared before the entry is built: most ranks move in every round, and few move so far.
    if sent.reserved != _is_preferred(request, worker) or sent.pinned != _is_pinned(request):
        return True
    rank, rank_class = request.rank, request.order_key[0]
    if request.running:
        # A running request whose rank got better since it was sent keeps its place all the same, and so does one
        # that none of those that wait can displace.
        worse = rank_class > sent.rank_class or rank.index_s > sent.index_s * (1 + tolerance)
        return worse and (rank_class, rank.index_s) > rival
    before, after = sent.index_s + sent.resume_cost_s, rank.index_s + rank.resume_cost_s
    return rank_class != sent.rank_class or abs(after - before) > tolerance * before
