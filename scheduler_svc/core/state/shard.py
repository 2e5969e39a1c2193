"""All requests and workers of a shard, and the orders kept over them.

Invariants (`check` states them in code; tests call it after every step)
  * A request is in exactly one place: queued, parked, suspect, or on the list of the one worker that it
    names.
  * `queued` holds the requests that some worker that takes work could hold, `parked` those that none could,
    `suspects` those that must run alone.
  * The reserved requests are the oldest ones whose tenant is not ahead, as many as the workers' reserved
    shares add up to. Without fairness between tenants no tenant is ahead.

Only this module changes the orders, so that they cannot drift apart.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from heapq import merge
from itertools import takewhile

from laps_sd.contract.choose import Residency
from scheduler_svc.core.events import WorkerFacts
from scheduler_svc.core.rank import AHEAD, OrderKey, RankKey, pack_rank_class
from scheduler_svc.core.state.request import Request, order_key_of
from scheduler_svc.core.state.sorted_keys import Ranked
from scheduler_svc.core.state.tenants import Account, Accounts, TenantOrder
from scheduler_svc.core.state.worker import Worker
from scheduler_svc.core.views import Ahead

_Cut = tuple[int, float, str, str]
"""The order key of the last member inside a full list, and the worker."""


class Shard:
    """The state of the shard in memory. Changes no rank and emits nothing by itself."""

    def __init__(self, list_factor: int, reserved_share: bool, tenant_fairness: bool = False) -> None:
        self.requests: dict[str, Request] = {}
        self.workers: dict[str, Worker] = {}
        self._accounts = Accounts()
        """Empty while there is no fairness between tenants."""
        self._by_tenant: list[TenantOrder] = []
        """The orders of queued and of unreserved requests, with fairness between tenants."""
        self._listed_of: dict[Account, dict[str, Request]] = {}
        """The requests on lists, by account, with fairness between tenants."""
        self.queued = self._new_order(tenant_fairness)
        self.parked: dict[str, Request] = {}
        self.suspects: dict[str, Request] = {}
        """Requests without a worker that must run alone, the longest waiting first."""
        self.touched: dict[str, Worker] = {}
        """Workers whose list may differ from what they have."""
        self.short_of_blocks: dict[str, Worker] = {}
        """Workers that left out requests for which they had slots, by their last report."""
        self.depth: Counter[int] = Counter()
        """Requests that do not run, by level."""
        self.backlog_s = 0.0
        self.running = 0
        self._list_factor = list_factor
        self._reserved_share = reserved_share
        self._reserved: Ranked[OrderKey] = Ranked()
        """The reserved requests, by age."""
        self._unreserved = self._new_order(tenant_fairness)
        """All others, by age; those whose tenant is ahead after those whose tenant is not."""
        self.reserved_queued: dict[str, Request] = {}
        """Reserved requests in the queue: they go onto a list whatever their rank."""
        self._reserved_total = 0
        self._shares_changed = False
        self._loads: Ranked[tuple[float, str]] = Ranked()
        self._load_of: dict[str, tuple[float, str]] = {}
        self._cuts: Ranked[_Cut] = Ranked()
        self._cut_of: dict[str, _Cut] = {}
        self._cut_may_differ: dict[str, Worker] = {}
        """Workers whose list or whose members' ranks changed since the last call of `full_lists_behind`."""
        self.capacity_tokens = 0
        """The longest context that any worker that takes work could hold."""

    def _new_order(self, tenant_fairness: bool) -> Ranked[OrderKey] | TenantOrder:
        if not tenant_fairness:
            return Ranked()
        self._by_tenant.append(TenantOrder(self._account_of))
        return self._by_tenant[-1]

    def _account_of(self, request_id: str) -> Account:
        account = self.requests[request_id].account
        assert account is not None, "opened when the request entered"
        return account

    # Requests.

    def enter(self, request: Request) -> None:
        """Add a ranked request: to the queue, or to the list of the worker that it names."""
        self.requests[request.request_id] = request
        if self._by_tenant:
            request.account = self._accounts.open(request.facts.priority, request.facts.tenant)
        self._unreserved.add(request.age_key)
        self._count(request, +1)
        if request.worker is None:
            self._enqueue(request)
        else:
            self._enlist(request, self.worker(request.worker))

    def leave(self, request: Request) -> None:
        """Remove a request that ended, or that the core forgets."""
        if request.worker is None:
            self._dequeue(request)
        else:
            self._delist(request)
        self._count(request, -1)
        (self._reserved if request.reserved else self._unreserved).remove(request.age_key)
        del self.requests[request.request_id]
        if request.account is not None:
            self._accounts.close(request.account)
        if not self.requests:
            self.backlog_s = 0.0  # what rounding left

    def lease(self, request: Request, worker: Worker) -> None:
        """Move a request from the queue onto a list, under the next lease epoch."""
        self._dequeue(request)
        request.lease_epoch += 1
        request.entry = None
        self._enlist(request, worker)

    def take_back(self, request: Request, rank: RankKey) -> None:
        """Move a request from a list into the queue. Its KV is lost; `rank` is for a request without KV."""
        self._delist(request)
        self._count(request, -1)
        assert request.residency is Residency.NONE
        request.worker = None
        request.running = request.ran_here = False
        request.set_rank(rank)
        self._count(request, +1)
        self._enqueue(request)

    def rerank(self, request: Request, rank: RankKey) -> None:
        """Update the orders after a change of the rank of a listed or queued request, or of where its KV
        lies.
        """
        before, rank_before = request.order_key, request.rank
        request.set_rank(rank)
        self.backlog_s += rank.remaining.mean_s - rank_before.remaining.mean_s
        if rank.level != rank_before.level and not request.running:
            self.depth[rank_before.level] -= 1
            self.depth[rank.level] += 1
        if request.worker is not None:
            worker = self.workers[request.worker]
            worker.reorder()
            self.touched[request.worker] = self._cut_may_differ[request.worker] = worker
        else:  # parked requests are not ranked again
            self.queued.remove(before)
            self.queued.add(request.order_key)

    def queued_at(self, index: int) -> Request:
        """Return the queued request with `index` better ones."""
        key = self.queued.at(index)
        request = self.requests[key[-1]]
        request.order_key = key
        return request

    def waits(self, request: Request) -> bool:
        """Return whether it waits for its turn, in the queue or on a list: neither running, nor parked, nor a
        suspect.
        """
        request_id = request.request_id
        if request.running or self.requests.get(request_id) is not request:
            return False
        return request.worker is not None or not (request_id in self.parked or request_id in self.suspects)

    def requeue(self, request: Request) -> None:
        """Put a request without a worker in its place again, after a change of whether it must run alone."""
        self._dequeue(request)
        self._enqueue(request)

    def shared_again(self, request: Request) -> None:
        """Note that a request need not run alone any more. Its worker stays cleared for the next one that
        must.
        """
        if request.worker is None:
            self.requeue(request)
        elif not self.suspects:
            self.set_alone(self.workers[request.worker], False)

    def set_alone(self, worker: Worker, alone: bool) -> None:
        """Set whether a worker is kept for a request that runs alone."""
        worker.alone = alone
        self.worker_changed(worker)

    def charge(self, account: Account, seconds: float, attained_s: float) -> None:
        """Charge a request's tenant for a round: `seconds` of service in the round, `attained_s` in all
        rounds of the request.
        """
        self._accounts.charge(account, seconds, attained_s)

    def take_turns(self) -> None:
        """Move the requests of the tenants whose turn came or went by the events of this step."""
        for account in self._accounts.settle():
            for order in self._by_tenant:
                order.turned(account)
            for request in self._listed_of.get(account, {}).values():
                self.rerank(request, request.rank)
            if account.ahead:
                for key in [key for key in self._reserved if self.requests[key[-1]].account is account]:
                    self._set_reserved(key, False)

    def start_running(self, request: Request, worker: Worker) -> None:
        """Note that a member of a worker takes part in the worker's rounds from now on."""
        self._set_running(request, True)
        worker.running[request.request_id] = request

    def stop_running(self, request: Request, worker: Worker) -> None:
        """Note that a member of a worker takes no part in the worker's rounds any more, if it did."""
        if request.running:
            self._set_running(request, False)
            del worker.running[request.request_id]
            self.touched[worker.worker_id] = worker

    def _set_running(self, request: Request, running: bool) -> None:
        assert request.running != running
        request.running = running
        request.entry = None
        self.running += 1 if running else -1
        self.depth[request.rank.level] += -1 if running else 1

    def ahead_of(self, request: Request) -> Ahead:
        """Return the numbers of unfinished requests that come before it. Costs a bisection for each list: for
        people's queries.
        """
        key = request.key_now
        of_priority = pack_rank_class(request.facts.priority, 0)
        of_turn = of_priority | (key[0] & AHEAD)
        ends = [self._position((of, -math.inf, "")) for of in (of_priority, of_turn, key[0])]
        ends.append(self._position(key))
        return Ahead(ends[0], ends[1] - ends[0], ends[2] - ends[1], ends[3] - ends[2])

    def _position(self, key: OrderKey) -> int:
        listed = sum(bisect_left(worker.in_order, key, key=order_key_of) for worker in self.workers.values())
        unqueued = (*self.parked.values(), *self.suspects.values())
        return self.queued.position(key) + listed + sum(other.key_now < key for other in unqueued)

    def in_order(self) -> Iterator[Request]:
        """Yield all unfinished requests, best first. For people's queries."""
        unqueued = sorted(request.key_now for request in (*self.parked.values(), *self.suspects.values()))
        lists = [[request.order_key for request in worker.in_order] for worker in self.workers.values()]
        for key in merge(self.queued, unqueued, *lists):
            yield self.requests[key[-1]]

    def _count(self, request: Request, sign: int) -> None:
        self.backlog_s += sign * request.rank.remaining.mean_s
        if request.running:
            self.running += sign
        else:
            self.depth[request.rank.level] += sign

    def _enqueue(self, request: Request) -> None:
        if request.runs_alone:
            self.suspects[request.request_id] = request
        elif request.longest_tokens <= self.capacity_tokens:
            self.queued.add(request.order_key)
            if request.account is not None:
                self._accounts.queued(request.account, +1)
            if request.reserved:
                self.reserved_queued[request.request_id] = request
        else:
            self.parked[request.request_id] = request

    def _dequeue(self, request: Request) -> None:
        self.reserved_queued.pop(request.request_id, None)
        if self.suspects.pop(request.request_id, None) is not None:
            return
        if self.parked.pop(request.request_id, None) is None:
            self.queued.remove(request.order_key)
            if request.account is not None:
                self._accounts.queued(request.account, -1)

    def _enlist(self, request: Request, worker: Worker) -> None:
        request.worker = worker.worker_id
        if request.account is not None:
            self._listed_of.setdefault(request.account, {})[request.request_id] = request
            request.order_key = request.key_now
        worker.add(request)
        worker.reserved += request.reserved
        if request.runs_alone and not worker.alone:
            self.set_alone(worker, True)
        else:
            self._list_changed(worker)

    def _delist(self, request: Request) -> None:
        assert request.worker is not None
        worker = self.workers[request.worker]
        worker.remove(request)
        if request.account is not None:
            listed = self._listed_of[request.account]
            del listed[request.request_id]
            if not listed:
                del self._listed_of[request.account]
        if worker.alone and request.runs_alone:
            self.set_alone(worker, False)
        else:
            self._list_changed(worker)
        if worker.facts is None and not worker.members:
            self._forget_worker(worker)

    # Workers.

    def worker(self, worker_id: str) -> Worker:
        """Return the worker with this id. One that has not come up yet is kept because of its leases."""
        return self.workers.setdefault(worker_id, Worker(worker_id))

    def worker_up(self, facts: WorkerFacts) -> Worker:
        """Note the hello of a worker, the first or a later one, and return the worker."""
        worker = self.worker(facts.worker_id)
        worker.facts = facts
        self.worker_changed(worker)
        return worker

    def worker_changed(self, worker: Worker) -> None:
        """Update the orders for a worker that came up, was lost, began to drain, or has other facts."""
        self._list_changed(worker)
        capacity = max((w.capacity_tokens for w in self.workers.values() if w.takes_work), default=0)
        if capacity != self.capacity_tokens:
            self.capacity_tokens = capacity
            waiting = [*self.parked.values(), *(self.requests[key[-1]] for key in self.queued)]
            for request in waiting:
                self._dequeue(request)
                self._enqueue(request)
        self._shares_changed = True

    def worker_lost(self, worker: Worker) -> None:
        """Mark a worker as lost: it takes no more work, and is forgotten as soon as it has no members."""
        worker.facts, worker.alone = None, False
        self.short_of_blocks.pop(worker.worker_id, None)
        self.worker_changed(worker)
        if not worker.members:
            self._forget_worker(worker)

    def _forget_worker(self, worker: Worker) -> None:
        self._refresh_cut(worker)
        for workers in (self.workers, self.touched, self._cut_may_differ):
            del workers[worker.worker_id]

    def list_length(self, worker: Worker) -> int:
        """Return the length its list should have while the queue can fill it."""
        return self._list_factor * worker.slots

    def by_load(self) -> Iterator[Worker]:
        """Yield the workers that take work, the fewest unfinished requests per slot first."""
        for key in self._loads:
            yield self.workers[key[-1]]

    def by_load_reversed(self) -> Iterator[Worker]:
        """Yield the same workers, the most unfinished requests per slot first."""
        for key in reversed(self._loads):
            yield self.workers[key[-1]]

    def full_lists_behind(self, key: OrderKey) -> Iterator[Worker]:
        """Return the workers with a full list in whose first part a request with this key would be, the worst
        list first.
        """
        for worker in self._cut_may_differ.values():
            self._refresh_cut(worker)
        self._cut_may_differ.clear()
        behind = takewhile(lambda cut: cut[:3] >= key, reversed(self._cuts))
        return map(lambda cut: self.workers[cut[3]], behind)  # noqa: C417  # lazy when compiled, too

    def _list_changed(self, worker: Worker) -> None:
        self.touched[worker.worker_id] = self._cut_may_differ[worker.worker_id] = worker
        load = worker.load if worker.takes_work else None
        before = self._load_of.get(worker.worker_id)
        if load != before:
            if before is not None:
                self._loads.remove(before)
                del self._load_of[worker.worker_id]
            if load is not None:
                self._loads.add(load)
                self._load_of[worker.worker_id] = load

    def _refresh_cut(self, worker: Worker) -> None:
        length = self.list_length(worker)
        cut: _Cut | None = None
        if worker.takes_work and len(worker.members) >= length:
            cut = (*worker.in_order[length - 1].order_key, worker.worker_id)
        before = self._cut_of.get(worker.worker_id)
        if cut != before:
            if before is not None:
                self._cuts.remove(before)
                del self._cut_of[worker.worker_id]
            if cut is not None:
                self._cuts.add(cut)
                self._cut_of[worker.worker_id] = cut

    # The reserved share.

    def update_reserved(self) -> None:
        """Bring the reserved requests up to date with the ends, arrivals, turns and workers of a step."""
        if self._shares_changed:
            self._shares_changed = False
            self._reserved_total = self._shares()
        reserved, unreserved = self._reserved, self._unreserved
        while len(reserved) > self._reserved_total:
            self._set_reserved(_youngest(reserved), False)
        while len(reserved) < self._reserved_total and unreserved and not unreserved.at(0)[0] & AHEAD:
            self._set_reserved(unreserved.at(0), True)
        # Requests that came back from the record, or whose tenant's turn came, may be older than some
        # reserved ones.
        while reserved and unreserved and unreserved.at(0) < _youngest(reserved):
            self._set_reserved(_youngest(reserved), False)
            self._set_reserved(unreserved.at(0), True)

    def _shares(self) -> int:
        takers = (worker for worker in self.workers.values() if worker.takes_work)
        return sum(worker.reserved_share for worker in takers) if self._reserved_share else 0

    def _set_reserved(self, age_key: OrderKey, reserved: bool) -> None:
        request = self.requests[age_key[-1]]
        request.reserved = reserved
        request.entry = None
        if reserved:
            self._unreserved.remove(age_key)
            self._reserved.add(age_key)
        else:
            self._reserved.remove(age_key)
            self._unreserved.add(age_key)
        if request.worker is not None:
            worker = self.workers[request.worker]
            worker.reserved += 1 if reserved else -1
            self.touched[worker.worker_id] = worker
        elif request.request_id not in self.parked and request.request_id not in self.suspects:
            if reserved:
                self.reserved_queued[request.request_id] = request
            else:
                del self.reserved_queued[request.request_id]

    # Checks of the invariants.

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. For tests: its cost grows with the shard."""
        self._accounts.check()
        queued = {key[-1] for key in self.queued}
        assert list(self.queued) == sorted(self.requests[i].key_now for i in queued)
        by_account = {i: account for account, listed in self._listed_of.items() for i in listed}
        assert by_account == {
            i: r.account for i, r in self.requests.items() if r.account is not None and r.worker is not None
        }
        listed: set[str] = set()
        for worker in self.workers.values():
            assert [r.order_key for r in worker.in_order] == sorted(
                r.key_now for r in worker.members.values()
            )
            assert all(r.worker == worker.worker_id for r in worker.members.values())
            assert worker.reserved == sum(r.reserved for r in worker.members.values())
            assert worker.unsent == sum(r.sent is None for r in worker.members.values())
            assert all(worker.priors_version <= r.priors_version for r in worker.members.values())
            assert worker.facts is not None or worker.members
            assert worker.alone or not any(r.runs_alone for r in worker.members.values())
            assert listed.isdisjoint(worker.members)
            assert list(worker.running) == [i for i in worker.running if worker.members[i].running]
            assert len(worker.running) == sum(r.running for r in worker.members.values())
            listed |= set(worker.members)
        places = (listed, queued, set(self.parked), set(self.suspects))
        assert sum(map(len, places)) == len(self.requests) and set().union(*places) == set(self.requests)
        assert set(self.suspects) == {
            i for i, r in self.requests.items() if r.worker is None and r.runs_alone
        }
        assert all((r.worker is None) == (i not in listed) for i, r in self.requests.items())
        assert all(r.sent is None or i in listed for i, r in self.requests.items())
        assert +self.depth == Counter(r.rank.level for r in self.requests.values() if not r.running)
        assert self.running == sum(r.running for r in self.requests.values())
        assert set(self._cut_may_differ) | set(self._cut_of) <= set(self.workers)
        takers = [w for w in self.workers.values() if w.takes_work]
        assert sorted(w.load for w in takers) == list(self._loads)
        assert set(self.reserved_queued) == {i for i in queued if self.requests[i].reserved}
        in_turn = sorted(r.age_key for r in self.requests.values() if not r.tenant_ahead)
        assert list(self._reserved) == in_turn[: self._shares()]
        assert list(self._reserved) == sorted(r.age_key for r in self.requests.values() if r.reserved)
        assert len(self._reserved) + len(self._unreserved) == len(self.requests)


def _youngest(by_age: Ranked[OrderKey]) -> OrderKey:
    return next(reversed(by_age))
