"""Fairness between tenants: the bound, what it does not change, and that tenants without requests are
forgotten.

The bound, for any policy, with the reserved share and without: two tenants that have requests of one priority
in the queue all the time differ in machine seconds by at most the service of the longest request, plus one
round on each worker.
"""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import Phase, example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from scheduler_svc.core.events import Event
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.rank import AHEAD, pack_rank_class
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import tenants
from scheduler_svc.core.state.tenants import MOST_TURNS, Account, Accounts
from tests.core.cluster import Cluster
from tests.core.jobs import Job, facts

FAIR = CoreSettings(tenant_fairness=True)
ANY_POLICY = pytest.mark.parametrize("policy", sorted(POLICIES))
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
"""A failing example of a hundred requests is shrunk for minutes and stays large."""
KIND = st.tuples(
    st.integers(1, 400),  # prompt
    st.integers(1, 120),  # output
    st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),  # pace
    st.none() | st.integers(1, 300),  # hint
)
LOAD = st.tuples(
    st.lists(KIND, min_size=1, max_size=4),
    st.integers(12, 60),  # requests
    st.sampled_from([0.0, 0.001, 0.02]),  # between arrivals
    st.lists(st.integers(0, 1), min_size=1, max_size=3),  # priorities
)
LOADS = st.lists(LOAD, min_size=2, max_size=4)
SLOTS = st.lists(st.integers(1, 4), min_size=1, max_size=3)
STALE_FRONT = [
    ([(253, 115, (2,), 256)], 51, 0.0, [1]),
    ([(253, 115, (2,), 256)], 51, 0.0, [1]),
    ([(318, 100, (2, 3, 6), None)], 26, 0.02, [0]),
    ([(213, 80, (4, 1, 2, 6), 179), (54, 38, (1,), 1)], 12, 0.0, [0]),
]
"""More requests of the tenant whose turn comes wait on older priors than one step ranks again."""


def jobs(tenant: str, load) -> list[Job]:  # type: ignore[no-untyped-def]
    kinds, count, gap_s, priorities = load
    out = []
    for i in range(count):
        prompt, output, pace, hint = kinds[i % len(kinds)]
        priority = priorities[i % len(priorities)]
        out.append(
            Job(f"{tenant}{i:03d}", i * gap_s, prompt, output, pace, priority, tenant, hint, None, tenant)
        )
    return out


class Gauge:
    """Greatest difference of any two tenants at one priority, while both have requests in the
    queue."""

    def __init__(self, cluster: Cluster) -> None:
        self.together_s = 0.0
        """Greatest difference of two tenants that began to wait at the same time."""
        self.anyhow_s = 0.0
        """Greatest difference of any two tenants."""
        self._cluster = cluster
        self._since_s: dict[tuple[int, str], float] = {}
        self._start: dict[tuple[tuple[int, str], tuple[int, str]], float] = {}
        self._over: set[tuple[tuple[int, str], tuple[int, str]]] = set()
        self._step = cluster.step
        cluster.step = self.step  # type: ignore[method-assign]

    def step(self, events: list[Event]) -> None:
        self._step(events)
        cluster = self._cluster
        waiting = (i for i, (worker, _) in cluster.lease.items() if worker is None and i not in cluster.ended)
        queued = {(cluster.jobs[i].priority, cluster.jobs[i].tenant) for i in waiting}
        for account in queued:
            self._since_s.setdefault(account, cluster.now_s)
        self._over |= {pair for pair in self._start if not queued.issuperset(pair)}
        for pair in combinations(sorted(queued), 2):
            if pair in self._over or pair[0][0] != pair[1][0]:
                continue
            difference = cluster.tenant_served_s[pair[0]] - cluster.tenant_served_s[pair[1]]
            apart = abs(difference - self._start.setdefault(pair, difference))
            self.anyhow_s = max(self.anyhow_s, apart)
            if self._since_s[pair[0]] == self._since_s[pair[1]]:
                self.together_s = max(self.together_s, apart)


def run(policy: str, loads, slots: list[int], settings: CoreSettings = FAIR) -> tuple[Cluster, Gauge]:  # type: ignore[no-untyped-def]
    cluster = Cluster(
        policy, [facts(f"w{i}", n, blocks=10_000) for i, n in enumerate(slots)], settings, False
    )
    gauge = Gauge(cluster)
    for tenant, load in zip("abcd", loads, strict=False):
        cluster.submit(jobs(tenant, load))
    cluster.run()
    assert set(cluster.ended) == set(cluster.jobs)
    return cluster, gauge


def bound_s(cluster: Cluster) -> float:
    return max(cluster.served_s.values()) + sum(cluster.longest_round_s.values()) + 1e-9


def check_bound(policy: str, loads, slots: list[int], reserved_share: bool) -> None:  # type: ignore[no-untyped-def]
    settings = CoreSettings(tenant_fairness=True, reserved_share=reserved_share)
    cluster, gauge = run(policy, loads, slots, settings)
    assert gauge.together_s <= bound_s(cluster)
    # A tenant that begins to wait later finds the others up to the bound apart.
    assert gauge.anyhow_s <= 2 * bound_s(cluster)


@ANY_POLICY
@example(loads=STALE_FRONT, slots=[1], reserved_share=False)
@given(loads=LOADS, slots=SLOTS, reserved_share=st.booleans())
@examples(max_examples=6, deadline=None, phases=NO_SHRINKING)
def test_backlogged_tenants_differ_by_the_longest_request_and_a_round(  # type: ignore[no-untyped-def]
    policy, loads, slots, reserved_share
) -> None:
    check_bound(policy, loads, slots, reserved_share)


@pytest.mark.long
@ANY_POLICY
@given(loads=LOADS, slots=SLOTS, reserved_share=st.booleans())
@examples(max_examples=40, deadline=None, phases=NO_SHRINKING)
def test_the_same_at_length(policy, loads, slots, reserved_share) -> None:  # type: ignore[no-untyped-def]
    check_bound(policy, loads, slots, reserved_share)


def hog_and_guest(policy: str, settings: CoreSettings) -> tuple[Cluster, Gauge]:
    """Run two tenants, one with many short requests: every policy but fcfs puts it first, and fcfs because it
    came first."""
    hog = ([(20, 30, (3,), 30)], 120, 0.0, [0])
    guest = ([(20, 60, (3,), 60)], 60, 0.0, [0])
    return run(policy, [hog, guest], [2], settings)


@ANY_POLICY
def test_without_it_one_tenant_can_wait_for_all_of_another(policy: str) -> None:
    """Without the setting, the property above fails."""
    cluster, gauge = hog_and_guest(policy, CoreSettings(reserved_share=False))
    assert gauge.anyhow_s > 2 * bound_s(cluster)


@ANY_POLICY
def test_the_reserved_share_takes_turns_too(policy: str) -> None:
    """One slot of two is reserved, and all of the oldest requests belong to one tenant."""
    cluster, gauge = hog_and_guest(policy, FAIR)
    assert gauge.anyhow_s <= bound_s(cluster)


@ANY_POLICY
def test_what_has_the_reserved_share_to_itself_takes_turns(policy: str) -> None:
    """The bound holds also among requests that run through the reserved share only, since better ones never
    end."""
    cluster = Cluster(policy, [facts("w", 2, 10_000)], FAIR)
    gauge = Gauge(cluster)
    low = [0.0, [-1]]
    cluster.submit(jobs("hog", ([(20, 30, (3,), 30)], 12, *low)))
    cluster.submit(jobs("guest", ([(20, 60, (3,), 60)], 6, *low)))
    cluster.submit(jobs("stream", ([(20, 30, (3,), 30)], 40, 0.0, [1])))
    cluster.run()
    better_s = max(s for i, s in cluster.finished_s.items() if cluster.jobs[i].priority == 1)
    ended = [i for i, s in cluster.finished_s.items() if s < better_s and cluster.jobs[i].priority == -1]
    assert {cluster.jobs[i].tenant for i in ended} == {"hog", "guest"}
    assert 0 < gauge.together_s <= bound_s(cluster)


@ANY_POLICY
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("output", [20, 400])
def test_a_tenant_with_few_requests_is_served_beside_one_with_many(
    policy: str, slots: int, output: int
) -> None:
    """All its requests are on the list of the worker, and none in the queue. Without turns those with 400 tokens are
    last under most policies, and under fcfs all are.
    """
    cluster = Cluster(policy, [facts("w", slots, 10_000)], FAIR)
    cluster.submit(jobs("hog", ([(20, 60, (3,), 60)], 150, 0.0, [0])))
    guests = [Job(f"guest{i}", 1.0, 20, output, (3,), hint=output, tenant="guest") for i in range(slots)]
    cluster.submit(guests)
    cluster.run(until_s=1.0)
    before_s = cluster.tenant_served_s[0, "hog"]
    while cluster.ended.keys().isdisjoint(job.request_id for job in guests):
        cluster.run(until_s=cluster.now_s + 0.1)
        hog_s = cluster.tenant_served_s[0, "hog"] - before_s
        assert hog_s - cluster.tenant_served_s[0, "guest"] <= 2 * bound_s(cluster)


@ANY_POLICY
def test_batches_that_end_together_take_turns(policy: str) -> None:
    """A tenant that has no request between two batches does not begin anew with each."""
    cluster = Cluster(policy, [facts("w", 1, 10_000)], FAIR, check=False)
    cluster.submit(jobs("hog", ([(20, 300, (3,), 300)], 40, 0.0, [0])))
    batch: list[Job] = []
    for number in range(20):
        batch = [
            Job(f"b{number}-{i}", cluster.now_s, 20, 30, (3,), hint=30, tenant="batches") for i in range(4)
        ]
        cluster.submit(batch)
        while not cluster.ended.keys() >= {job.request_id for job in batch}:
            cluster.run(until_s=cluster.now_s + 0.1)
    hog_s, batches_s = (cluster.tenant_served_s[0, tenant] for tenant in ("hog", "batches"))
    assert batches_s - hog_s <= 2 * bound_s(cluster)


@ANY_POLICY
def test_one_that_cannot_use_its_turn_does_not_end_those_of_others(policy: str) -> None:
    """Only one worker of four can hold the requests of one tenant, so it never has a third of the service."""
    small = [facts(f"small{i}", 1, max_length=400) for i in range(3)]
    cluster = Cluster(policy, [facts("large", 1), *small], FAIR, check=False)
    cluster.submit(jobs("large", ([(500, 60, (3,), 60)], 40, 0.0, [0])))
    cluster.submit(jobs("short", ([(20, 30, (3,), 30)], 300, 0.0, [0])))
    cluster.submit(jobs("long", ([(20, 300, (3,), 300)], 30, 0.0, [0])))
    cluster.run(until_s=12.0)
    short_s, long_s = (cluster.tenant_served_s[0, tenant] for tenant in ("short", "long"))
    assert abs(short_s - long_s) <= (1 + MOST_TURNS) * bound_s(cluster)


def step_cost(waiting: int, fair: bool) -> int:
    """Return the policy calls of the step in which a turn comes: ranks are counted, comparisons are not."""
    cluster = Cluster("laps-sd", [facts("w", 2, 10_000)], CoreSettings(tenant_fairness=fair), check=False)
    cluster.submit(jobs("a", ([(20, 60, (3,), 60)], waiting, 0.0, [0])))
    cluster.submit(jobs("b", ([(20, 60, (3,), 60)], waiting, 0.0, [0])))
    cluster.run(until_s=0.0)
    calls = 0
    rank = cluster.scheduler.policy.rank

    def counting(request, priors):  # type: ignore[no-untyped-def]
        nonlocal calls
        calls += 1
        return rank(request, priors)

    cluster.scheduler.policy.rank = counting  # type: ignore[method-assign]
    cluster.run(until_s=2.0)
    return calls


def test_a_turn_ranks_no_more_requests_when_more_wait() -> None:
    few, many = step_cost(20, fair=True), step_cost(400, fair=True)
    assert many <= 1.5 * few


class TestAccounts:
    """The order of turns, without requests."""

    def waiting(self, *tenants: str) -> tuple[Accounts, list[Account]]:
        accounts = Accounts()
        opened = [accounts.open(0, tenant) for tenant in tenants]
        for account in opened:
            accounts.waits(account, +1)
        assert accounts.settle() == []
        return accounts, opened

    def test_ahead_from_more_than_a_turn_until_the_mark_has_caught_up(self) -> None:
        accounts, (a, b) = self.waiting("a", "b")
        accounts.charge(a, 1.0, attained_s=1.0)
        assert accounts.settle() == [] and not a.ahead
        accounts.charge(a, 0.5, attained_s=0.5)
        assert accounts.settle() == [a] and a.ahead
        accounts.charge(a, 0.25, attained_s=0.5)
        accounts.charge(b, 1.5, attained_s=0.5)
        assert accounts.settle() == [] and a.ahead
        accounts.charge(b, 0.25, attained_s=0.5)
        assert accounts.settle() == [a] and not a.ahead
        accounts.check()

    def test_the_first_requests_set_the_turn(self) -> None:
        accounts, (a, _) = self.waiting("a", "b")
        accounts.charge(a, 0.25, attained_s=0.25)
        assert accounts.settle() == []
        accounts.charge(a, 0.125, attained_s=0.25)
        assert accounts.settle() == [a]

    def test_a_turn_is_as_long_as_the_longest_request_and_shrinks_as_requests_end(self) -> None:
        """After a thousand ends about a third of a giant request is left in it."""
        accounts, (a, _) = self.waiting("a", "b")
        accounts.charge(accounts.open(0, "giant"), 0.0, attained_s=100.0)
        accounts.charge(a, 60.0, attained_s=1.0)
        assert accounts.settle() == []
        for _ in range(1024):
            accounts.close(accounts.open(0, "giant"))
        assert accounts.settle() == []
        accounts.waits(a, +1)
        assert accounts.settle() == [a] and a.ahead

    def test_not_waiting_earns_a_turn_at_most(self) -> None:
        accounts, (a, _) = self.waiting("a", "b")
        accounts.waits(a, -1)
        accounts.charge(accounts.open(0, "b"), 5.0, attained_s=2.0)
        assert accounts.settle() == [a] and a.behind, "its other request runs"
        accounts.check()
        accounts.waits(a, +1)
        assert accounts.settle() == [a] and not a.behind
        assert a.served_s == 3.0, "a turn less"
        assert accounts.open(0, "new").served_s == 3.0
        accounts.check()

    def test_what_nobody_waits_for_is_not_counted(self) -> None:
        accounts = Accounts()
        a = accounts.open(0, "a")
        accounts.charge(a, 5.0, attained_s=1.0)
        assert accounts.settle() == [] and a.served_s == 0.0

    def test_each_priority_has_its_own_turns(self) -> None:
        accounts, (low, _) = self.waiting("a", "b")
        high = accounts.open(1, "a")
        accounts.waits(high, +1)
        accounts.settle()
        accounts.charge(high, 9.0, attained_s=1.0)
        assert accounts.settle() == [] and not low.ahead and not high.ahead

    def test_leaving_and_coming_back_pays_no_debt(self) -> None:
        accounts, (a, b) = self.waiting("a", "b")
        accounts.charge(a, 2.0, attained_s=1.0)
        accounts.waits(a, -1)
        accounts.close(a)
        assert accounts.settle() == [a]
        accounts.check()
        assert accounts.open(0, "a") is a and a.ahead
        accounts.check()
        accounts.close(a)
        accounts.settle()
        accounts.charge(b, 3.0, attained_s=1.0)
        assert accounts.settle() == [a]
        assert accounts.open(0, "a") is not a, "forgotten when it had caught up"

    def test_leaving_before_being_ahead_pays_no_debt_either(self) -> None:
        accounts, (a, b) = self.waiting("a", "b")
        accounts.charge(a, 0.75, attained_s=1.0)
        accounts.waits(a, -1)
        accounts.close(a)
        assert accounts.settle() == []
        accounts.check()
        assert accounts.open(0, "a") is a and a.served_s == 0.75
        accounts.close(a)
        accounts.settle()
        accounts.charge(b, 1.0, attained_s=1.0)
        accounts.settle()
        accounts.check()
        assert accounts.open(0, "a") is not a, "forgotten when the others had caught up"

    def test_who_runs_with_less_service_comes_first_until_it_has_caught_up(self) -> None:
        accounts, (a, b) = self.waiting("a", "b")
        accounts.waits(a, -1)
        accounts.charge(b, 2.0, attained_s=1.0)
        assert accounts.settle() == [a] and a.behind and not b.ahead
        accounts.charge(a, 1.5, attained_s=1.0)
        assert accounts.settle() == [] and a.behind
        accounts.charge(a, 0.5, attained_s=1.0)
        assert accounts.settle() == [a] and not a.behind
        accounts.check()

    def test_who_leaves_in_turn_is_forgotten(self) -> None:
        accounts, (a, b) = self.waiting("a", "b")
        for account in (a, b):
            accounts.waits(account, -1)
            accounts.close(account)
        accounts.settle()
        assert accounts.open(0, "a") is not a

    def test_when_nobody_waits_all_are_in_turn(self) -> None:
        accounts, (a, b) = self.waiting("a", "b")
        accounts.charge(a, 2.0, attained_s=1.0)
        assert accounts.settle() == [a]
        accounts.waits(a, -1)
        accounts.waits(b, -1)
        assert accounts.settle() == [a] and not a.ahead

    def test_the_number_of_debts_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tenants, "MOST_IDLE", 2)
        accounts, _ = self.waiting("guest")
        gone = []
        for i in range(5):
            account = accounts.open(0, f"t{i}")
            accounts.charge(account, 2.0 + i, attained_s=1.0)
            accounts.close(account)
            accounts.settle()
            accounts.check()
            gone.append(account)
        again = [accounts.open(0, account.tenant) is account for account in gone]
        assert again == [False, False, False, True, True]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(-1, 1), st.integers(0, 3), st.sampled_from(["add", "del", "turn"])
        ),
        max_size=60,
    )
)
@examples(max_examples=100, deadline=None)
def test_the_order_is_that_of_all_keys_with_their_turns(changes) -> None:  # type: ignore[no-untyped-def]
    accounts = {(p, t): Account(p, str(t), 0.0) for p in (-1, 0, 1) for t in range(4)}
    owner: dict[str, Account] = {}
    keys: dict[str, tuple[int, float, str]] = {}
    order = tenants.TenantOrder(lambda request_id: owner[request_id])

    def now() -> list[tuple[int, float, str]]:
        return sorted((k[0] | (AHEAD if owner[k[2]].ahead else 0), *k[1:]) for k in keys.values())

    for n, (tenant, priority, level, what) in enumerate(changes):
        account = accounts[priority, tenant]
        if what == "add":
            key = (pack_rank_class(priority, level), float(level), str(n))
            owner[str(n)], keys[str(n)] = account, key
            order.add(key)
        elif what == "del" and keys:
            order.remove(keys.pop(min(keys)))
        else:
            account.ahead = not account.ahead
            order.turned(account)
        assert list(order) == now()
        assert len(order) == len(keys)
        if keys:
            assert order.first() == now()[0]
        assert [order.position(key) for key in now()] == list(range(len(keys)))
