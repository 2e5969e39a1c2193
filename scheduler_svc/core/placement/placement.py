"""Placement of requests on the lists of workers (our choice).

A queued request goes, where lists have room, to the worker that the router chooses (`routing.py`), and stays there
with its KV. A worker with a free slot takes it from another one if nothing is queued; a faster one takes it also
while it runs.
Every decision here ends in a call of the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial
from itertools import islice, takewhile
from typing import Final

from laps_sd.contract.choose import Residency
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.placement.ledger import Ledger
from scheduler_svc.core.placement.routing import MOST_COMPARED, Eligible, Router
from scheduler_svc.core.policies.base import resume_cost_s
from scheduler_svc.core.rank import last_of_class
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.shard import Shard
from scheduler_svc.core.state.worker import Worker
from scheduler_svc.core.state.worker_orders import Stage, WorkerOrders

MOST_REFRESHED = 8
"""Ranks at the front of the queue that are computed again in one step, however many wait there on older
priors."""

SUSPECTS_PER_WORKER = 4
"""Requests that wait to run alone for each worker that is cleared for them. Our choice: a trial takes eight
rounds, a cleared worker costs up to `QUIET_S` and the KV of the requests that ran there."""

MOST_LISTS_REFRESHED = 4
"""Lists whose ranks are computed again in one step, because a queued request was about to overtake them."""

MOST_TOKENS: Final = 2**62
"""More than any request has."""

MOVE_SAVES = 10.0
"""A move of a running request must save this many times what it costs: both are estimates, and a request that
costs nothing to place may soon come for the free slot. Our choice; 3 and 10 do as well, 1 moves too many."""


def place(shard: Shard, ledger: Ledger, settings: CoreSettings, priors: Priors, router: Router) -> None:
    """Bring leases in line with ranks, after the events of a step."""
    _run_alone(shard, ledger)
    _lease_reserved(shard, ledger, priors, router)
    head = _QueueHead(shard, ledger)
    _fill(shard, ledger, head, priors, router)
    _overtake(shard, ledger, head)
    _release_overflow(shard, ledger, settings)
    _steal(shard, ledger, priors)
    _move_to_faster(shard, ledger, priors)


def _run_alone(shard: Shard, ledger: Ledger) -> None:
    """Give workers of their own to the requests that workers may have died of, those with the most deaths
    first, then the longest waiting. Other requests of such a worker continue elsewhere, at the cost of their
    KV, which is less than a further death would cost. One worker serves several suspects in turn; if many
    wait, as after a power loss, up to half of the workers do.
    """
    trials = [worker for worker in shard.workers.values() if worker.alone]
    if not trials and not shard.suspects:
        return
    up = [worker for worker in shard.workers.values() if worker.stays and not worker.away]
    room = max([worker.capacity_tokens for worker in up], default=0)
    suspects = [request for request in shard.suspects.values() if request.longest_tokens <= room]
    suspects.sort(key=lambda request: -request.deaths)
    most = max(1, len(up) // 2)
    wanted = min(most, (len(suspects) + SUSPECTS_PER_WORKER - 1) // SUSPECTS_PER_WORKER)
    for request in suspects:
        if len(trials) >= wanted:
            break
        worker = next((w for w in shard.worker_orders.by_load() if w.holds(request)), None)
        if worker is not None:
            _clear(worker, shard, ledger)
            trials.append(worker)
    for worker in trials:
        if not any(member.runs_alone for member in worker.members.values()):
            _try_next(worker, suspects, shard, ledger)


def _try_next(worker: Worker, suspects: list[Request], shard: Shard, ledger: Ledger) -> None:
    """Lease the next suspect to a worker that has none. Other requests there are cleared, and make room."""
    if not worker.stays or worker.away:
        shard.set_alone(worker, False)
        return
    able = (suspect for suspect in suspects if suspect.worker is None and worker.holds(suspect))
    request = next(able, None)
    if request is None:
        shard.set_alone(worker, False)  # its suspect is cleared or has ended
        return
    _clear(worker, shard, ledger)
    if ledger.now_s >= worker.quiet_at_s:
        worker.taken_off.clear()
        ledger.lease(request, worker)


def _clear(worker: Worker, shard: Shard, ledger: Ledger) -> None:
    for member in list(worker.members.values()):
        ledger.release(member, send_drop=True)
        why = f"worker {worker.worker_id} is cleared for a request that runs alone"
        member.record_event(ledger.now_s, "requeued", why)
    shard.set_alone(worker, True)


def _lease_reserved(shard: Shard, ledger: Ledger, priors: Priors, router: Router) -> None:
    """Lease the reserved requests to some worker whatever their rank, spread as the workers' reserved shares
    allow.
    """
    shard.update_reserved()
    for request in list(shard.reserved_queued.values()):
        # Some worker holds it, or it would be parked; only unequal workers make this look further than the
        # first few.
        by_load = shard.worker_orders.by_load
        able = partial(_has_reserve_for, request)
        free = router.best(request, Eligible(by_load(), able, shard, priors))
        ledger.lease(request, free or next(worker for worker in by_load() if worker.holds(request)))
    for worker in list(shard.touched.values()):
        # With one slot the share is a slice of time, too rare to be worth the KV that a move costs. On a list
        # that is not longer than the slots no request waits for one.
        waits_for_slots = worker.takes_work and len(worker.members) > worker.slots > 1
        if waits_for_slots and worker.reserved > worker.reserved_share:
            _spread_reserved(worker, shard, ledger)


def _spread_reserved(crowded: Worker, shard: Shard, ledger: Ledger) -> None:
    """Move reserved requests that do not run on this worker to workers whose reserved share is not used:
    requests that became the oldest on one list would wait for each other. They do not move to a worker where
    KV is short: there they could wait as well. A request that gets a free slot in the next round stays: where
    nothing is preempted, the other worker may have none for long.
    """
    free_slots = 0 if crowded.is_short_of_blocks else max(0, crowded.slots - len(crowded.running))
    waiting = [request for request in crowded.in_order if not request.running][free_slots:]
    waiting = [request for request in waiting if request.reserved]
    for request in sorted(waiting, key=lambda request: request.residency):  # without KV: moves at no cost
        by_load = shard.worker_orders.by_load()
        free = next(
            (w for w in by_load if _has_reserve_for(request, w) and not w.is_short_of_blocks),
            None,
        )
        if free is not None:
            ledger.move(request, free, "whose reserved share was free")
        if crowded.reserved <= crowded.reserved_share:
            return


def _has_reserve_for(request: Request, worker: Worker) -> bool:
    """Return whether it could run the request to its end, and its reserved share is not used up."""
    return worker.holds(request) and worker.reserved < worker.reserved_share


class _QueueHead:
    """The best queued requests. New priors are applied lazily: to the requests at the front, and since that
    may move them back, to those after them; but to a bounded number in one step, so that its cost does not
    grow with the queue.
    """

    def __init__(self, shard: Shard, ledger: Ledger) -> None:
        self._shard = shard
        self._ledger = ledger
        self._left = MOST_REFRESHED

    def best(self, passed: Collection[int]) -> tuple[Request, bool] | None:
        """Return the best request that is not in one of the parts `passed` of the queue, and whether its rank uses the
        newest priors; None if there is none.
        """
        while True:
            request = self._shard.first_queued(passed)
            if request is None:
                return None
            if self._left == 0:
                return request, not self._ledger.is_stale(request)
            if not self._ledger.refresh(request):
                return request, True
            self._left -= 1


def _fill(shard: Shard, ledger: Ledger, head: _QueueHead, priors: Priors, router: Router) -> None:
    """Lease queued requests, best rank first, to the worker that the router chooses, until the lists are full."""
    passed: set[int] = set()
    while next(_with_room(shard), None) is not None:
        found = head.best(passed)
        if found is None:
            return
        request, _ = found  # an older rank is better than a free place
        able = partial(_has_room_for, shard, request)
        room = router.best(request, Eligible(_with_room(shard), able, shard, priors))
        if room is None:
            passed.add(shard.queued.part_of(request.order_key))  # these wait for a larger worker
        else:
            ledger.lease(request, room)


def _with_room(shard: Shard) -> Iterator[Worker]:
    """Yield the workers whose list is not full, least loaded first."""
    for worker in shard.worker_orders.by_load():
        if shard.worker_orders.stage(worker) == Stage.FULL:
            return  # the others are full, too
        yield worker


def _has_room_for(shard: Shard, request: Request, worker: Worker) -> bool:
    """Return whether its list has room, and it could run the request to its end."""
    return shard.worker_orders.stage(worker) < Stage.FULL and worker.holds(request)


def fits_some_list(shard: Shard, request: Request) -> bool:
    """Return whether some list with room could take it."""
    return any(worker.holds(request) for worker in _with_room(shard))


def _overtake(shard: Shard, ledger: Ledger, head: _QueueHead) -> None:
    """Lease a queued request that belongs into the first part of a full list: onto the list with the worst
    end.

    So a better arrival is on a list in the step in which it arrives, and may displace a running request. By an
    older rank a request would come and go again, so with such a rank it overtakes only requests of a lower
    priority, or of tenants that are ahead: that does not depend on estimates, and the bound between tenants
    does not allow for a step that waits.
    """
    refreshed = 0
    passed: set[int] = set()
    while (found := head.best(passed)) is not None:
        request, fresh = found
        key = request.key_now if fresh else last_of_class(request.key_now)
        full_lists = shard.worker_orders.full_lists_after(key)
        worker = next((worker for worker in full_lists if worker.holds(request)), None)
        if worker is not None:
            if refreshed < MOST_LISTS_REFRESHED and _refresh_list(worker, ledger):
                refreshed += 1  # compare like with like: look again
            else:
                ledger.lease(request, worker)
        elif not shard.worker_orders.some_full_list_after(key):
            return
        else:
            passed.add(shard.queued.part_of(request.order_key))  # these wait for a larger worker


def _refresh_list(worker: Worker, ledger: Ledger) -> bool:
    """Rank members again whose ranks use older priors; return whether there were any."""
    stale = [request for request in worker.members.values() if ledger.refresh(request)]
    return bool(stale)


def _release_overflow(shard: Shard, ledger: Ledger, settings: CoreSettings) -> None:
    """Return requests to the queue that fell too far below the end of their list and have nothing on the
    worker.
    """
    for worker in list(shard.touched.values()):
        length = shard.worker_orders.list_length(worker)
        keep = length + max(1, int(settings.list_margin * length))
        if worker.takes_work and len(worker.members) > keep:
            for request in worker.in_order[keep:]:
                if not request.ran_here and not request.reserved and request.residency is Residency.NONE:
                    ledger.release(request, send_drop=True)


def _steal(shard: Shard, ledger: Ledger, priors: Priors) -> None:
    """Move requests to workers with a free slot from workers that have them listed and do not run them.
    The queue has nothing for the workers with a free slot.

    Between two workers that no event of this step was about there is nothing new. So only those it was about look at
    the longest lists, and the others at theirs: the cost of a step does not grow with the pairs of workers.
    """
    thieves = list(_with_free_slots(shard))
    if not thieves or not _has_victims(shard):
        return
    orders = shard.worker_orders
    crowded = [worker for worker in shard.touched.values() if worker.takes_work and _is_crowded(worker)]
    crowded.sort(key=orders.turn_s, reverse=True)
    shortest = {worker.worker_id: _shortest_waiting(worker) for worker in crowded}
    short = [worker for worker in shard.touched.values() if worker.worker_id in shard.short_of_blocks]
    looked = 0
    for thief in thieves:
        if thief.worker_id in shard.touched:
            longest = takewhile(_is_crowded, orders.by_load_reversed())
            victims = list(islice(longest, MOST_COMPARED))
            lacking = list(islice(shard.short_of_blocks.values(), MOST_COMPARED))
        else:
            victims = [worker for worker in crowded if shortest[worker.worker_id] <= thief.capacity_tokens]
            lacking = short
            if not (victims or lacking) or looked == MOST_COMPARED:
                continue
            looked += 1
        while len(thief.members) < thief.slots:
            request = _best_to_steal(victims, lacking, thief, shard, priors)
            if request is None:
                break
            ledger.move(request, thief, "which had a free slot")


def _move_to_faster(shard: Shard, ledger: Ledger, priors: Priors) -> None:
    """Move running requests of the workers that have reported to faster workers with a free slot, best rank
    first.
    """
    for worker in list(shard.touched.values()):
        while worker.takes_work:
            move = _move_worth_it(worker, shard, priors)
            if move is None:
                break
            request, faster = move
            ledger.move(request, faster, "which is faster")


def _move_worth_it(worker: Worker, shard: Shard, priors: Priors) -> tuple[Request, Worker] | None:
    """Return a running request and the faster worker that it should move to; None if no move saves enough."""
    for faster in islice(_with_free_slots(shard), MOST_COMPARED):
        if faster.slowness >= worker.slowness:
            return None
        request = _worth_moving(worker, faster, shard.worker_orders, priors)
        if request is not None:
            return request, faster
        if all(faster.holds(running) for running in worker.running.values()):
            return None  # the next ones save less
    return None


def _worth_moving(worker: Worker, faster: Worker, orders: WorkerOrders, priors: Priors) -> Request | None:
    """Return the best running request whose rounds would be so much shorter there that a move saves enough.

    A move costs the round that runs here, and the time in which its context is computed there, for each request
    of that worker.
    """
    batch = len(faster.members) + 1
    here_s = orders.round_s(worker, len(worker.running))
    saved_s = here_s - orders.round_s(faster, batch)
    share_s = priors.cost.typical_share_s
    for request in worker.in_order:
        if request.running and faster.holds(request) and faster.has_blocks_for(request):
            rounds = request.rank.remaining.mean_s / share_s
            cost_s = here_s + batch * faster.slowness * resume_cost_s(request, priors)
            if rounds * saved_s > MOVE_SAVES * cost_s:
                return request
    return None


def _has_victims(shard: Shard) -> bool:
    fullest = next(shard.worker_orders.by_load_reversed(), None)
    return fullest is not None and (len(fullest.members) > fullest.slots or bool(shard.short_of_blocks))


def _with_free_slots(shard: Shard) -> Iterator[Worker]:
    for worker in shard.worker_orders.by_load():
        if len(worker.members) >= worker.slots:
            return
        yield worker


def _is_crowded(worker: Worker) -> bool:
    """Return whether requests wait for a slot there."""
    return len(worker.members) > worker.slots


def _shortest_waiting(worker: Worker) -> int:
    """Return the most tokens that the shortest of its requests that do not run may have; `MOST_TOKENS` without any."""
    waiting = [request.longest_tokens for request in worker.members.values() if not request.running]
    return min(waiting, default=MOST_TOKENS)


def _best_to_steal(
    victims: list[Worker], lacking: list[Worker], thief: Worker, shard: Shard, priors: Priors
) -> Request | None:
    """Return a request of the first of the victims, which have long lists, or the next ones; if there is none, one
    of a list that is short enough but lacks KV blocks.
    """
    for victim in victims:
        if not _is_crowded(victim):
            continue  # others were taken before
        able = [request for request in victim.in_order if not request.running and thief.holds(request)]
        if any(request.cached_tokens for request in able):
            able = _gaining(able, victim, thief, shard, priors)
        if able:
            # Requests without KV move at no cost; best rank first among equals.
            return min(able, key=lambda request: request.residency)
    for victim in lacking:
        for request in victim.waiting_for_blocks:
            if thief.holds(request) and thief.has_blocks_for(request):
                return request
    return None


def _gaining(
    waiting: list[Request], victim: Worker, thief: Worker, shard: Shard, priors: Priors
) -> list[Request]:
    """Return the requests, given best first, that wait longer on their worker than the thief needs to compute what of
    their prompts only that worker has.
    """
    running = victim.running.values()
    left_s = sum([request.rank.remaining.mean_s for request in running]) / max(1, len(running))
    rounds = left_s / priors.cost.typical_share_s
    next_slot_s = shard.worker_orders.round_s(victim, victim.slots) * rounds / victim.slots
    found = []
    for place, request in enumerate(waiting, start=1):
        lost = request.cached_tokens - shard.caches.tokens_on(request, thief.worker_id)
        if lost <= 0 or thief.slowness * priors.cost.prefill_share_s(lost) < place * next_slot_s:
            found.append(request)
    return found
