"""When the list of a worker is sent again: only where an entry moved in a way that could change a decision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laps_sd.contract.choose import LATCH_OFF, RESERVED_ONE_IN, Candidate, Residency, WorkerState, choose
from scheduler_svc.core.commands import Assign, AssignEntry
from scheduler_svc.core.estimates.basis import Basis
from scheduler_svc.core.events import RequestFacts, WorkerFacts
from scheduler_svc.core.placement.assignment import assignment
from scheduler_svc.core.rank import RankKey, Remaining
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.tenants import Account
from scheduler_svc.core.state.worker import STUCK_REPORTS, Worker
from tests.core.cluster import Cluster
from tests.core.jobs import Job, facts

SETTINGS = CoreSettings(resend_index_change=0.25)
"""A quarter: exact in binary, so that a test can stand on the bound."""


def key(index_s: float, resume_cost_s: float = 0.0, rank_class: int = 0, pinned: bool = False) -> RankKey:
    return RankKey(rank_class, index_s, resume_cost_s, pinned, 0, None, Remaining(1.0, 1.0, 1.0, Basis.CLASS))


def worker(slots: int = 1, blocks: int = 100, worker_id: str = "w") -> Worker:
    """Return an empty worker whose blocks are all free."""
    facts = WorkerFacts(worker_id, slots, blocks, blocks, 16, 4096, 5)
    return Worker(worker_id, facts, free_target_blocks=blocks, free_draft_blocks=blocks)


def listed(where: Worker, name: str, rank: RankKey, runs: bool = False, prompt: int = 100) -> Request:
    """Return a request on that list."""
    request = Request(RequestFacts(name, 1, 0.0, "t", 0, "", prompt, 500, None), lease_epoch=1)
    request.worker = where.worker_id
    request.residency = Residency.DEVICE if runs else Residency.NONE
    request.set_rank(rank)
    where.add(request)
    if runs:
        request.running = request.ran_here = True
        where.running[name] = request
    return request


def sent(where: Worker) -> list[str] | None:
    """Return the requests of the list that is sent now; None if none is."""
    found = assignment(where, SETTINGS)
    return None if found is None else [entry.request_id for entry in found.entries]


class TestSentAgain:
    """One slot: a request that runs, and one that waits for it."""

    def pair(self, runs: RankKey, waits: RankKey) -> tuple[Worker, Request, Request]:
        where = worker()
        first, second = listed(where, "runs", runs, runs=True), listed(where, "waits", waits)
        assert sent(where) == ["runs", "waits"]
        assert sent(where) is None
        return where, first, second

    @pytest.mark.parametrize(
        ("index_s", "again"), [(8.0, False), (10.0, False), (10.5, True), (6.0, False), (5.5, True)]
    )
    def test_where_one_that_waits_moved_by_more_than_the_share(self, index_s: float, again: bool) -> None:
        where, _, waits = self.pair(key(1.0), key(8.0))
        waits.set_rank(key(index_s))
        assert (sent(where) is not None) == again

    @pytest.mark.parametrize(
        ("after", "again"), [((3.0, 7.0), False), ((6.0, 4.5), True), ((2.0, 4.0), False), ((4.0, 1.5), True)]
    )
    def test_the_cost_to_take_it_up_is_part_of_that(self, after: tuple[float, float], again: bool) -> None:
        where, _, waits = self.pair(key(1.0), key(4.0, 4.0))
        waits.set_rank(key(*after))
        assert (sent(where) is not None) == again

    @pytest.mark.parametrize(("index_s", "again"), [(2.0, False), (10.0, False), (10.5, True)])
    def test_one_that_runs_counts_only_where_it_became_longer(self, index_s: float, again: bool) -> None:
        where, runs, _ = self.pair(key(8.0), key(9.0))
        runs.set_rank(key(index_s))
        where.reorder()
        assert (sent(where) is not None) == again

    @pytest.mark.parametrize(
        ("index_s", "rank_class", "again"),
        [(11.0, 0, False), (14.0, 0, False), (14.5, 0, True), (11.0, 1, True)],
    )
    def test_and_where_one_that_waits_now_displaces_it(
        self, index_s: float, rank_class: int, again: bool
    ) -> None:
        where, runs, _ = self.pair(key(8.0), key(12.0, 1.0))
        runs.set_rank(key(index_s, rank_class=rank_class))
        where.reorder()
        assert (sent(where) is not None) == again

    @pytest.mark.parametrize(("index_s", "again"), [(10.5, False), (10.75, True)])
    def test_which_need_not_be_the_best_of_those_that_wait(self, index_s: float, again: bool) -> None:
        """A tenth of the index counts, not of the cost to take it up: 11.0 of one that costs 10.0, 10.7 of one that
        costs 10.5."""
        where, runs, _ = self.pair(key(8.0), key(10.0))
        listed(where, "also waits", key(2.0, 8.5))
        where.unsent = 0
        runs.set_rank(key(index_s))
        where.reorder()
        assert (sent(where) is not None) == again

    def test_or_where_kv_is_short_since_the_worst_of_those_that_run_may_not_fit(self) -> None:
        where, runs, _ = self.pair(key(8.0), key(12.0))
        runs.set_rank(key(11.0))
        where.reorder()
        assert sent(where) is None
        where.free_target_blocks = 29  # of 100
        assert sent(where) is not None

    @pytest.mark.parametrize(
        ("rank_class", "runs", "again"),
        [
            (4, True, True),
            (2, True, False),
            (3, True, False),
            (4, False, True),
            (2, False, True),
            (3, False, False),
        ],
    )
    def test_or_fell_to_a_lower_class(self, rank_class: int, runs: bool, again: bool) -> None:
        where, first, second = self.pair(key(8.0, rank_class=3), key(12.0, rank_class=3))
        moved = first if runs else second
        moved.set_rank(key(8.0 if runs else 12.0, rank_class=rank_class))
        assert (sent(where) is not None) == again

    @pytest.mark.parametrize("runs", [True, False])
    def test_where_one_is_pinned_now_or_has_the_reserved_share(self, runs: bool) -> None:
        where, *both = self.pair(key(8.0), key(12.0))
        moved = both[0 if runs else 1]
        moved.set_rank(key(moved.rank.index_s, pinned=True))
        assert sent(where) is not None
        moved.reserved, moved.entry = True, None
        assert sent(where) == [moved.request_id, both[1 if runs else 0].request_id]
        assert sent(where) is None

    def test_a_tenant_that_is_ahead_has_no_request_that_is_never_paused(self) -> None:
        where, runs, _ = self.pair(key(8.0, pinned=True), key(12.0))
        runs.account = Account(0, "t", 0.0, ahead=True)
        runs.set_rank(key(8.0, pinned=True))
        found = assignment(where, SETTINGS)
        assert found is not None
        assert [entry.pinned for entry in found.entries if entry.request_id == "runs"] == [False]

    def test_not_where_all_of_them_run(self) -> None:
        where = worker(slots=2)
        both = [listed(where, name, key(8.0), runs=True) for name in "ab"]
        assert sent(where) == ["a", "b"]
        both[0].set_rank(key(80.0))
        assert sent(where) is None

    def test_but_where_one_of_them_does_not_though_it_has_a_slot(self) -> None:
        where = worker(slots=2)
        listed(where, "a", key(8.0), runs=True)
        waits = listed(where, "b", key(9.0))
        assert sent(where) == ["a", "b"]
        waits.set_rank(key(80.0))
        assert sent(where) == ["a", "b"]

    def test_and_where_there_are_more_than_slots(self) -> None:
        where = worker(slots=1)
        both = [listed(where, name, key(8.0), runs=True) for name in "ab"]
        assert sent(where) == ["a", "b"]
        both[0].set_rank(key(80.0))
        where.reorder()
        assert sent(where) == ["b", "a"]

    def test_after_a_hello_whatever_it_holds_and_once(self) -> None:
        where = worker()
        assert sent(where) is None
        where.must_send = True
        assert sent(where) == []
        assert sent(where) is None

    def test_never_to_one_that_is_not_up(self) -> None:
        where, _, waits = self.pair(key(1.0), key(8.0))
        waits.set_rank(key(80.0))
        where.facts, where.must_send = None, True
        assert sent(where) is None

    def test_an_entry_says_what_choose_compares(self) -> None:
        where = worker()
        listed(where, "a", key(8.0, 0.5, rank_class=-64, pinned=True)).lease_epoch = 7
        entry = AssignEntry("a", 7, -64, 8.0, 0.5, False, True)
        assert assignment(where, SETTINGS) == Assign("w", (entry,))


INDEXES = st.floats(1.0, 20.0)


@given(
    running=st.lists(st.tuples(INDEXES, st.floats(1.0, 2.0)), min_size=1, max_size=4),
    waiting=st.lists(st.tuples(INDEXES, st.floats(0.0, 10.0)), min_size=1, max_size=4),
)
@settings(max_examples=500, deadline=None)
def test_a_worker_that_is_sent_no_list_chooses_as_with_one(
    running: list[tuple[float, float]], waiting: list[tuple[float, float]]
) -> None:
    """Requests that run become longer, by any factor."""
    where = worker(slots=len(running), blocks=1000)
    run = [listed(where, f"runs {at}", key(index), runs=True) for at, (index, _) in enumerate(running)]
    for at, rank in enumerate(waiting):
        listed(where, f"waits {at}", key(*rank))
    assert sent(where) is not None
    for request, (index, factor) in zip(run, running, strict=True):
        longer = factor if factor > 1 + SETTINGS.resend_index_change else 1.0
        request.set_rank(key(index * longer))
    where.reorder()

    if sent(where) is None:
        assert chosen(where, lambda request: request.sent.index_s) == chosen(  # type: ignore[union-attr]
            where, lambda request: request.rank.index_s
        )


def chosen(where: Worker, index_s: Callable[[Request], float]) -> set[str]:
    """Return the requests that run next, by these indexes."""
    candidates = [
        Candidate(
            request.request_id, 0, index_s(request), request.rank.resume_cost_s, False, False, request.running,
            request.residency, 100, 0, 0,
        )
        for request in where.members.values()
    ]  # fmt: skip
    return set(choose(candidates, WorkerState(where.slots, 16, 1000, 1000, 5)).run)


class TestNewMembers:
    """Three slots: a worker that knows five members has enough for a while."""

    def known(self, count: int, free_blocks: int = 100) -> Worker:
        where = worker(slots=3)
        where.free_target_blocks = where.free_draft_blocks = free_blocks
        for number in range(count):
            listed(where, f"r{number}", key(1.0 + number), runs=number < 3)
        assert sent(where) is not None
        return where

    @pytest.mark.parametrize(("count", "again"), [(4, True), (5, False), (6, False)])
    def test_one_at_the_end_can_wait_where_it_knows_one_and_a_half_times_its_slots(
        self, count: int, again: bool
    ) -> None:
        where = self.known(count)
        listed(where, "new", key(99.0))
        assert (sent(where) is not None) == again

    @pytest.mark.parametrize(("index_s", "again"), [(4.5, True), (5.5, False)])
    def test_one_among_the_first_five_cannot(self, index_s: float, again: bool) -> None:
        where = self.known(8)
        listed(where, "new", key(index_s))
        assert (sent(where) is not None) == again

    @pytest.mark.parametrize(("known", "again"), [(2, True), (3, False)])
    def test_one_and_a_half_times_two_slots_are_three(self, known: int, again: bool) -> None:
        where = worker(slots=2)
        for number in range(known):
            listed(where, f"r{number}", key(1.0 + number), runs=number < 2)
        assert sent(where) is not None
        listed(where, "new", key(99.0))
        assert (sent(where) is not None) == again

    def test_one_with_the_reserved_share_cannot(self) -> None:
        where = self.known(8)
        listed(where, "new", key(99.0)).reserved = True
        assert sent(where) is not None

    def test_where_kv_is_short_none_can(self) -> None:
        where = self.known(8, free_blocks=29)
        listed(where, "new", key(99.0))
        assert sent(where) is not None
        assert sent(where) is None

    @pytest.mark.parametrize(("reports", "again"), [(STUCK_REPORTS - 1, False), (STUCK_REPORTS, True)])
    def test_where_a_slot_stays_free_none_can(self, reports: int, again: bool) -> None:
        """A slot that was freed by the last round does not: one that the worker has takes it."""
        where = self.known(5)
        where.reports = where.full_at = 20
        where.reports += reports
        listed(where, "new", key(99.0))
        assert (sent(where) is not None) == again

    @pytest.mark.parametrize("tokens", [800, 10])
    def test_a_request_that_fits_takes_a_slot_that_the_others_leave_free(self, tokens: int) -> None:
        """Of 1,600 tokens the first one takes 930 and more. The next two do not fit, and the worker has them."""
        cluster = Cluster("fcfs", [facts("w", 2, 100)])
        cluster.submit([Job("first", 0.001, 930, 150, max_tokens=200)])
        cluster.submit([Job(f"large{n}", 0.002, 800, 90, max_tokens=200) for n in range(2)])
        cluster.submit([Job("last", 0.5, tokens, 30, max_tokens=100)])
        cluster.run()
        assert (cluster.finished_s["last"] < cluster.finished_s["first"]) == (tokens == 10)

    def test_a_full_worker_is_not_sent_each_new_member(self) -> None:
        """Requests end one after another, and for each the queue has another one."""
        cluster = Cluster("fcfs", [facts("w", 4, 1000)], CoreSettings(reserved_share=False))
        cluster.submit([Job(f"r{n:03d}", 0.001, 10, 30 + 7 * n % 40) for n in range(200)])
        cluster.run()
        lists = [command for _, command in cluster.commands if isinstance(command, Assign)]
        assert len(lists) < 100


class TestBlocks:
    @pytest.mark.parametrize("pool", ["free_target_blocks", "free_draft_blocks"])
    def test_either_pool_can_be_the_short_one(self, pool: str) -> None:
        where = worker(blocks=100)
        used = round(100 * LATCH_OFF)
        setattr(where, pool, 100 - used)
        assert not where.is_short_of_blocks
        setattr(where, pool, 100 - used - 1)
        assert where.is_short_of_blocks

    def test_one_that_it_leaves_out_for_two_rounds_waits_for_blocks(self) -> None:
        where = worker(slots=2)
        listed(where, "a", key(1.0), runs=True)
        left_out = listed(where, "b", key(2.0))
        for number in range(STUCK_REPORTS):
            assert where.waiting_for_blocks == []
            where.reports += 1
            where.members["a"].last_report = where.reports
            assert (where.waiting_for_blocks == [left_out]) == (number == STUCK_REPORTS - 1)
        listed(where, "c", key(3.0))
        assert where.waiting_for_blocks == [], "more than it has slots for"

    @pytest.mark.parametrize(("prompt", "has"), [(107, True), (108, False)])
    def test_a_request_needs_its_context_and_the_longest_draft(self, prompt: int, has: bool) -> None:
        where = worker(slots=2, blocks=7)  # 112 tokens
        other = listed(worker(worker_id="v"), "other", key(1.0), prompt=prompt)
        assert where.has_blocks_for(other) is has

    def test_blocks_that_members_will_still_take_are_not_free(self) -> None:
        where = worker(slots=2)
        other = listed(worker(worker_id="v"), "other", key(1.0))
        listed(where, "a", key(1.0), runs=True)
        assert where.has_blocks_for(other)
        listed(where, "b", key(1.0))
        assert not where.has_blocks_for(other)


class TestTheDebtOfTheReservedShare:
    """Where KV is short: the oldest request holds 50 of 100 blocks while it runs."""

    def holder(self, slots: int, short: bool) -> tuple[Worker, Request, Request]:
        where = worker(slots)
        old = listed(where, "old", key(1.0), runs=True, prompt=800)
        young = listed(where, "young", key(1.0), runs=True, prompt=400)
        waits = listed(where, "waits", key(2.0))
        for request in (old, waits):
            request.reserved = True
        if short:
            where.free_target_blocks = 0
        assert assignment(where, SETTINGS)
        assert not young.reserved
        return where, old, waits

    @pytest.mark.parametrize(("slots", "share"), [(1, 1 / RESERVED_ONE_IN), (2, 1 / 2), (4, 1 / 4)])
    def test_it_is_what_was_used_beyond_the_share(self, slots: int, share: float) -> None:
        where, _, _ = self.holder(slots, short=True)
        for number in (1, 2, 3):
            where.charge_reserve(1)
            assert where.reserve_debt_blocks == pytest.approx(number * (50 - 100 * share))

    def test_it_is_paid_by_the_share_of_each_round_and_nothing_is_saved_up(self) -> None:
        where, old, _ = self.holder(4, short=True)
        where.charge_reserve(1)
        del where.running[old.request_id]
        where.charge_reserve(1)
        assert where.reserve_debt_blocks == 0
        where.charge_reserve(1)
        assert where.reserve_debt_blocks == 0

    def test_room_does_not_keep_it_from_being_paid(self) -> None:
        where, _, _ = self.holder(4, short=True)
        where.charge_reserve(1)
        where.free_target_blocks = 100
        where.charge_reserve(1)
        assert where.reserve_debt_blocks == 0

    def test_less_than_a_block_is_a_debt(self) -> None:
        where = worker(slots=4)
        for name, prompt, runs in (("old", 408, True), ("waits", 100, False)):
            listed(where, name, key(1.0), runs, prompt).reserved = True
        where.free_target_blocks = 0
        assert sent(where) == ["old", "waits"]
        where.charge_reserve(1)
        assert where.reserve_debt_blocks == 0.5
        found = assignment(where, SETTINGS)
        assert found is not None
        assert [entry.request_id for entry in found.entries if entry.reserved] == ["old"]
        del where.running["old"]
        where.charge_reserve(1)
        found = assignment(where, SETTINGS)
        assert found is not None
        assert [entry.request_id for entry in found.entries if entry.reserved] == ["old", "waits"]

    @pytest.mark.parametrize(("slots", "share"), [(1, 1), (2, 1), (64, 2)])
    def test_the_share_of_a_worker_is_at_least_one_request(self, slots: int, share: int) -> None:
        assert worker(slots).reserved_share == share

    def test_where_there_is_room_there_is_none(self) -> None:
        where, _, _ = self.holder(4, short=False)
        where.charge_reserve(1)
        assert where.reserve_debt_blocks == 0

    def test_until_it_is_paid_only_what_runs_is_preferred(self) -> None:
        where, old, _ = self.holder(4, short=True)
        where.charge_reserve(1)
        found = assignment(where, SETTINGS)
        assert found is not None
        assert {entry.request_id: entry.reserved for entry in found.entries} == {
            "old": True,
            "young": False,
            "waits": False,
        }
        old.running = False
        del where.running[old.request_id]
        where.charge_reserve(1)
        found = assignment(where, SETTINGS)
        assert found is not None
        assert [entry.request_id for entry in found.entries if entry.reserved] == ["old", "waits"]

    def test_a_worker_that_is_not_up_owes_nothing(self) -> None:
        where, _, _ = self.holder(4, short=True)
        where.facts = None
        where.charge_reserve(1)
        assert where.reserve_debt_blocks == 0
