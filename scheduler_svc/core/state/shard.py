"""All requests and workers of a shard, and the orders kept over them.

Invariants (`check` states them in code; tests call it after every step)
  * A request is in exactly one place: queued, parked, suspect, or on the list of the one worker that it
    names.
  * `queued` holds the requests that some worker that takes work could hold, `parked` those that none could,
    `suspects` those that must run alone.
  * The reserved requests are the oldest ones, queued or on a list, whose tenant is not ahead, as many as the
    workers' reserved shares add up to. Without fairness between tenants no tenant is ahead.

Only this module changes the orders, those in `reserve.py` and `worker_orders.py` too, so that they cannot
drift apart. One thing comes from outside: `Scheduler` sets the cost of a round, by which workers are ordered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from laps_sd.contract.choose import Residency
from scheduler_svc.core.events import WorkerFacts
from scheduler_svc.core.rank import OrderKey, RankKey
from scheduler_svc.core.state.arriving import ArrivingWork
from scheduler_svc.core.state.caches import Caches
from scheduler_svc.core.state.queue import Queue
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.reserve import Reserve
from scheduler_svc.core.state.sorted_keys import SortedKeys
from scheduler_svc.core.state.tenants import Account, Accounts, TenantOrder
from scheduler_svc.core.state.worker import Worker
from scheduler_svc.core.state.worker_orders import WorkerOrders


class Shard:
    """The state of the shard in memory. Changes no rank and emits nothing by itself."""

    def __init__(self, list_factor: int, reserved_share: bool, tenant_fairness: bool = False) -> None:
        self.requests: dict[str, Request] = {}
        self.workers: dict[str, Worker] = {}
        self.worker_orders = WorkerOrders(self.workers, list_factor)
        self.caches = Caches(self.workers)
        self._accounts = Accounts()
        """Empty while there is no fairness between tenants."""
        self._listed_of: dict[Account, dict[str, Request]] = {}
        """The requests on lists, by account, with fairness between tenants."""
        self._tenant_fairness = tenant_fairness
        self.queued = Queue(self._new_order, lambda request_id: self.requests[request_id].longest_tokens)
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
        self.arriving = ArrivingWork()
        self.running = 0
        self.preemptions = 0
        self._reserved_share = reserved_share
        self._reserve = Reserve(self._new_order())
        self.reserved_queued: dict[str, Request] = {}
        """Reserved requests in the queue: they go onto a list whatever their rank."""
        self._shares_changed = False
        self.capacity_tokens = 0
        """The longest context that any worker that takes work could hold."""
        self.longest_tokens = 0
        """The longest context that any worker could hold for which requests can wait."""

    def _new_order(self) -> SortedKeys[OrderKey] | TenantOrder:
        return TenantOrder(self._account_of) if self._tenant_fairness else SortedKeys()

    def _account_of(self, request_id: str) -> Account:
        account = self.requests[request_id].account
        assert account is not None, "opened when the request entered"
        return account

    # Requests.

    def enter(self, request: Request) -> None:
        """Add a ranked request: to the queue, or to the list of the worker that it names."""
        self.requests[request.request_id] = request
        if self._tenant_fairness:
            request.account = self._accounts.open(request.facts.priority, request.facts.tenant)
        self._reserve.add(request)
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
        self._reserve.remove(request)
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
        request.shared_prefill = None
        self._enlist(request, worker)
        self.look_up(request)

    def look_up(self, request: Request) -> None:
        """Note how much of the context of a request without KV need not be computed: on its worker, or in the queue on the
        best one.
        """
        if request.worker is None:
            request.cached_tokens = self.caches.most_tokens(request)
        else:
            request.cached_tokens = self.caches.tokens_on(request, request.worker)
            worker = self.workers[request.worker]
            worker.set_missing(request, request.context_tokens - request.cached_tokens)

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
            self.touched[request.worker] = self.worker_orders.cut_may_differ[request.worker] = worker
        elif request.request_id not in self.parked and request.request_id not in self.suspects:
            self.queued.remove(before)
            self.queued.add(request.order_key)

    def first_queued(self, passed: Collection[int]) -> Request | None:
        """Return the best queued request that is not in one of the parts `passed` of the queue; its order key becomes
        that of its tenant's present turn.
        """
        key = self.queued.first(passed)
        if key is None:
            return None
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
        """Note that a request need not run alone any more. Its worker stays cleared until the next placement,
        which gives it to the next one that must, or shares it again.
        """
        if request.worker is None:
            self.requeue(request)

    def set_alone(self, worker: Worker, alone: bool) -> None:
        """Set whether a worker is kept for a request that runs alone."""
        worker.alone = alone
        self.worker_changed(worker)

    def set_slowness(self, worker: Worker, slowness: float) -> None:
        """Set how many times as long as expected a worker's rounds take."""
        worker.slowness = slowness
        self._list_changed(worker)

    def charge(self, account: Account, seconds: float, attained_s: float) -> None:
        """Charge a request's tenant for a round: `seconds` of service in the round, `attained_s` in all
        rounds of the request.
        """
        self._accounts.charge(account, seconds, attained_s)

    def take_turns(self) -> None:
        """Move the requests of the tenants whose turn came or went by the events of this step."""
        for account in self._accounts.settle():
            self.queued.turned(account)
            self._reserve.turned(account)
            for request in self._listed_of.get(account, {}).values():
                self.rerank(request, request.rank)
            if account.ahead:
                for key in [key for key in self._reserve if self.requests[key[-1]].account is account]:
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
        self._count_waiting(request, -1 if running else 1)
        self.running += 1 if running else -1
        self.depth[request.rank.level] += -1 if running else 1

    def _count(self, request: Request, sign: int) -> None:
        self.backlog_s += sign * request.rank.remaining.mean_s
        if request.running:
            self.running += sign
        else:
            self.depth[request.rank.level] += sign

    def _enqueue(self, request: Request) -> None:
        if request.runs_alone:
            self.suspects[request.request_id] = request
            self._leave_reserve(request)
        elif request.longest_tokens <= self.capacity_tokens:
            self.queued.add(request.order_key)
            self._count_waiting(request, +1)
            if request.reserved:
                self.reserved_queued[request.request_id] = request
        else:
            self.parked[request.request_id] = request
            self._leave_reserve(request)

    def _dequeue(self, request: Request) -> None:
        request_id = request.request_id
        self.reserved_queued.pop(request_id, None)
        if self.suspects.pop(request_id, None) is not None or self.parked.pop(request_id, None) is not None:
            self._reserve.add(request)
            return
        self.queued.remove(request.order_key)
        self._count_waiting(request, -1)

    def _count_waiting(self, request: Request, more: int) -> None:
        if request.account is not None:
            self._accounts.waits(request.account, more)

    def _enlist(self, request: Request, worker: Worker) -> None:
        request.worker = worker.worker_id
        if request.account is not None:
            self._listed_of.setdefault(request.account, {})[request.request_id] = request
            request.order_key = request.key_now
        worker.add(request)
        self._count_waiting(request, +1)
        worker.reserved += request.reserved
        if request.runs_alone and not worker.alone:
            self.set_alone(worker, True)
        else:
            self._list_changed(worker)

    def _delist(self, request: Request) -> None:
        assert request.worker is not None
        worker = self.workers[request.worker]
        worker.remove(request)
        if not request.running:
            self._count_waiting(request, -1)
        if request.account is not None:
            listed = self._listed_of[request.account]
            del listed[request.request_id]
            if not listed:
                del self._listed_of[request.account]
        # A record that lost its newest rounds may name one worker for two requests that must run alone.
        if (
            worker.alone
            and request.runs_alone
            and not any(other.runs_alone for other in worker.members.values())
        ):
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
        worker.away = False
        self.worker_changed(worker)
        return worker

    def worker_changed(self, worker: Worker) -> None:
        """Update the orders for a worker that came up, was lost, began to drain, or has other facts."""
        self._list_changed(worker)
        self.longest_tokens = max((w.capacity_tokens for w in self.workers.values() if w.stays), default=0)
        capacities = sorted({w.capacity_tokens for w in self.workers.values() if w.takes_work})
        before, self.capacity_tokens = self.capacity_tokens, capacities[-1] if capacities else 0
        too_long = self.queued.set_capacities(capacities)
        if self.capacity_tokens > before:
            self._unpark()
        elif too_long:
            self._park([self.requests[key[-1]] for key in too_long])
        self._shares_changed = True

    def _unpark(self) -> None:
        """Queue the requests that some worker can hold now. All together: with 100,000 waiting requests the first
        worker would hold up the shard for a second.
        """
        requests = [r for r in self.parked.values() if r.longest_tokens <= self.capacity_tokens]
        self._reserve.add_all(requests)
        self.queued.add_all([request.order_key for request in requests])
        for request in requests:
            del self.parked[request.request_id]
            self._count_waiting(request, +1)

    def _park(self, requests: Sequence[Request]) -> None:
        """Park requests that were queued, and that no worker can hold any more."""
        self._reserve.remove_all(requests)
        for request in requests:
            self.reserved_queued.pop(request.request_id, None)
            request.reserved, request.entry = False, None
            self.parked[request.request_id] = request
            self._count_waiting(request, -1)

    def worker_lost(self, worker: Worker) -> None:
        """Mark a worker as lost: it takes no more work, and is forgotten as soon as it has no members."""
        worker.facts, worker.alone = None, False
        self.caches.blocks.forget(worker.worker_id)
        self.short_of_blocks.pop(worker.worker_id, None)
        self.worker_changed(worker)
        if not worker.members:
            self._forget_worker(worker)

    def _forget_worker(self, worker: Worker) -> None:
        self.worker_orders.forget(worker)
        del self.workers[worker.worker_id]
        del self.touched[worker.worker_id]

    def _list_changed(self, worker: Worker) -> None:
        self.touched[worker.worker_id] = worker
        self.worker_orders.list_changed(worker)

    # The reserved share.

    def update_reserved(self) -> None:
        """Bring the reserved requests up to date with the ends, arrivals, turns and workers of a step."""
        if self._shares_changed:
            self._shares_changed = False
            self._reserve.total = self._shares()
        while (move := self._reserve.next_move()) is not None:
            self._set_reserved(*move)

    def _shares(self) -> int:
        takers = (worker for worker in self.workers.values() if worker.takes_work)
        return sum(worker.reserved_share for worker in takers) if self._reserved_share else 0

    def _leave_reserve(self, request: Request) -> None:
        """Remove a request that cannot be leased now: a mark would not help it, and another request would lack it."""
        self._reserve.remove(request)
        request.reserved = False
        request.entry = None

    def _set_reserved(self, age_key: OrderKey, reserved: bool) -> None:
        request = self.requests[age_key[-1]]
        request.reserved = reserved
        request.entry = None
        self._reserve.move(age_key, reserved)
        if request.worker is not None:
            worker = self.workers[request.worker]
            worker.reserved += 1 if reserved else -1
            self.touched[worker.worker_id] = worker
        elif reserved:
            self.reserved_queued[request.request_id] = request
        else:
            del self.reserved_queued[request.request_id]

    # Checks of the invariants.

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. For tests: its cost grows with the shard."""
        self._accounts.check()
        queued = {key[-1] for key in self.queued}
        assert list(self.queued) == sorted(self.requests[i].key_now for i in queued)
        self.queued.check()
        by_account = {i: account for account, listed in self._listed_of.items() for i in listed}
        assert by_account == {
            i: r.account for i, r in self.requests.items() if r.account is not None and r.worker is not None
        }
        assert all(self._listed_of.values())
        waiting = Counter(
            r.account for i, r in self.requests.items() if r.account is not None and self.waits(r)
        )
        unfinished = Counter(r.account for r in self.requests.values() if r.account is not None)
        assert all(a.waiting == waiting[a] and a.unfinished == unfinished[a] for a in self._accounts)
        for worker_id, worker in self.short_of_blocks.items():
            assert self.workers.get(worker_id) is worker and worker.facts is not None
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
        self.worker_orders.check()
        assert set(self.reserved_queued) == {i for i in queued if self.requests[i].reserved}
        able = [r for i, r in self.requests.items() if i not in self.parked and i not in self.suspects]
        in_turn = sorted(r.age_key for r in able if not r.tenant_ahead)
        assert list(self._reserve) == in_turn[: self._shares()]
        assert list(self._reserve) == sorted(r.age_key for r in self.requests.values() if r.reserved)
        assert len(self._reserve) == len(able)
