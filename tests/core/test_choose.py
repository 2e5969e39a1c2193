"""`laps_sd.contract.choose`: each rule one test, then what must hold for anything."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from laps_sd.contract.choose import (
    RESERVED_CYCLE_ROUNDS,
    RESERVED_ONE_IN,
    RESERVED_SLICE_ROUNDS,
    Candidate,
    Choice,
    ReserveClock,
    Residency,
    SharedBlocks,
    WorkerState,
    choose,
    reserved_slots,
    shared_runs,
)

BLOCK = 16
GROWTH = 6
CYCLE = RESERVED_CYCLE_ROUNDS
LAST = CYCLE - RESERVED_SLICE_ROUNDS
"""Round at which the slice of a one-slot worker begins, if its oldest request had nothing of the cycle."""


def place(
    slots: int = 2, blocks: int = 1000, draft_blocks: int | None = None, **more: int | bool
) -> WorkerState:
    values: dict[str, int | bool] = {
        "slots": slots,
        "block_size": BLOCK,
        "target_blocks": blocks,
        "draft_blocks": blocks if draft_blocks is None else draft_blocks,
        "max_growth_tokens": GROWTH,
    }
    return WorkerState(**(values | more))  # type: ignore[arg-type]


def candidate(request_id: str, index_s: float = 1.0, **more: object) -> Candidate:
    values: dict[str, object] = {
        "request_id": request_id,
        "rank_class": 0,
        "index_s": index_s,
        "resume_cost_s": 0.0,
        "reserved": False,
        "pinned": False,
        "running": False,
        "residency": Residency.NONE,
        "tokens": 100,
        "target_blocks": 0,
        "draft_blocks": 0,
    }
    return Candidate(**(values | more))  # type: ignore[arg-type]


def resident(request_id: str, index_s: float = 1.0, blocks: int = 7, **more: object) -> Candidate:
    """Return a candidate on the device with the blocks that 100 tokens and their growth take (7 of 16)."""
    values = {"residency": Residency.DEVICE, "target_blocks": blocks, "draft_blocks": blocks}
    return candidate(request_id, index_s, **(values | more))


def running(request_id: str, index_s: float = 1.0, blocks: int = 7, **more: object) -> Candidate:
    return resident(request_id, index_s, blocks, running=True, **more)


def one_slot(own: list[bool]) -> list[str]:
    """Return the requests that run round by round, of an old and a new one. `own` is True for rounds in which
    the old one is first by rank."""
    ran, clock = [""], ReserveClock()
    for old_is_first in own:
        who = [
            resident("old", 1.0 if old_is_first else 9.0, reserved=True, running=ran[-1] == "old"),
            resident("new", 3.0, running=ran[-1] == "new"),
        ]
        choice = choose(who, place(1, reserve_clock=clock))
        clock = choice.reserve_clock
        ran += choice.run
    return ran[1:]


class TestOrder:
    def test_nobody_waits_nobody_runs(self) -> None:
        assert choose([], place()) == Choice((), ())

    def test_the_best_run_best_first(self) -> None:
        assert choose([candidate("a", 3), candidate("b", 1), candidate("c", 2)], place(2)).run == ("b", "c")

    def test_class_stands_above_index(self) -> None:
        assert choose([candidate("a", 1, rank_class=1), candidate("b", 9)], place(1)).run == ("b",)

    def test_a_negative_class_is_a_higher_priority(self) -> None:
        assert choose([candidate("a", 1), candidate("b", 9, rank_class=-64)], place(1)).run == ("b",)

    def test_ties_break_by_request_id(self) -> None:
        assert choose([candidate("b"), candidate("a")], place(1)).run == ("a",)

    def test_the_cost_to_resume_counts_unless_it_is_on_the_device(self) -> None:
        lost = candidate("a", 1.0, resume_cost_s=0.5)
        assert choose([lost, candidate("b", 1.2)], place(1)).run == ("b",)
        assert choose([resident("a", 1.0, resume_cost_s=0.5), candidate("b", 1.2)], place(1)).run == ("a",)
        swapped = candidate("a", 1.0, resume_cost_s=0.5, residency=Residency.HOST)
        assert choose([swapped, candidate("b", 1.2)], place(1)).run == ("b",)


class TestHysteresis:
    def test_a_little_shorter_does_not_displace(self) -> None:
        assert choose([running("a", 1.0), candidate("b", 0.95)], place(1)).run == ("a",)

    def test_ten_per_cent_shorter_displaces(self) -> None:
        assert choose([running("a", 1.0), candidate("b", 0.90)], place(1)).run == ("b",)

    def test_exactly_at_the_bound_does_not(self) -> None:
        assert choose([running("a", 1.1), candidate("b", 1.0)], place(1)).run == ("a",)

    def test_what_the_newcomer_pays_to_begin_counts(self) -> None:
        assert choose([running("a", 1.0), candidate("b", 0.5, resume_cost_s=0.5)], place(1)).run == ("a",)
        assert choose([running("a", 1.0), candidate("b", 0.5, resume_cost_s=0.4)], place(1)).run == ("b",)

    def test_a_smaller_class_displaces_whatever_the_index(self) -> None:
        assert choose([running("a", 0.1, rank_class=1), candidate("b", 9.0)], place(1)).run == ("b",)

    def test_a_larger_class_never_does(self) -> None:
        assert choose([running("a", 9.0), candidate("b", 0.1, rank_class=1)], place(1)).run == ("a",)

    def test_twenty_five_per_cent_where_the_paused_one_would_lose_its_kv(self) -> None:
        # 12 blocks cannot hold both (7 each). Half the pool is in use: no latch.
        tight = place(1, blocks=12)
        assert choose([running("a", 1.0), candidate("b", 0.85)], tight).run == ("a",)
        assert choose([running("a", 1.0), candidate("b", 0.75)], tight) == Choice(("b",), ("a",))

    def test_exactly_at_that_bound_it_does_not(self) -> None:
        tight = place(1, blocks=12)
        assert choose([running("a", 1.0), candidate("b", 0.8)], tight).run == ("a",)
        assert choose([running("a", 1.5, resume_cost_s=0.5), candidate("b", 0.8)], tight).run == ("a",)

    def test_and_the_cost_of_computing_it_again(self) -> None:
        tight = place(1, blocks=12)
        assert choose([running("a", 1.0, resume_cost_s=0.3), candidate("b", 0.75)], tight).run == ("a",)
        # With room for both nothing has to be computed again.
        assert choose([running("a", 1.0, resume_cost_s=0.3), candidate("b", 0.75)], place(1)).run == ("b",)

    def test_ten_per_cent_where_a_worse_one_would_lose_its_kv_instead(self) -> None:
        # 24 blocks: running a (7), paused c (7), newcomer b (7); c is worse than a and goes first.
        who = [running("a", 1.0), candidate("b", 0.85), resident("c", 5.0, blocks=12)]
        assert choose(who, place(1, blocks=24)) == Choice(("b",), ("c",))
        # A better paused one stays, so a itself would have to go.
        who = [running("a", 1.0), candidate("b", 0.85), resident("c", 0.99, blocks=12)]
        assert choose(who, place(1, blocks=24)).run == ("a",)

    def test_the_draft_pool_decides_likewise(self) -> None:
        tight = place(1, blocks=1000, draft_blocks=24)
        who = [running("a", 1.0), candidate("b", 0.85), resident("c", 5.0, draft_blocks=12)]
        assert choose(who, tight) == Choice(("b",), ("c",))
        who = [running("a", 1.0), candidate("b", 0.85), resident("c", 0.99, draft_blocks=12)]
        assert choose(who, tight).run == ("a",)

    def test_what_the_newcomer_itself_holds_counts_once(self) -> None:
        who = [running("a", 1.0), resident("b", 0.85)]  # 14 of 18 blocks
        assert choose(who, place(1, blocks=18)) == Choice(("b",), ())

    def test_what_runs_beside_them_counts_once(self) -> None:
        who = [running("a", 1.0), running("d", 0.1), candidate("b", 0.85)]  # all three fit into 22 blocks
        assert choose(who, place(2, blocks=22)) == Choice(("d", "b"), ())

    def test_the_worst_one_is_displaced(self) -> None:
        who = [running("a", 5.0), running("b", 9.0), candidate("c", 1.0)]
        assert choose(who, place(2)).run == ("c", "a")

    def test_several_go_when_one_needs_the_blocks_of_several(self) -> None:
        big = candidate("big", 1.0, tokens=400)  # 26 blocks
        small = [running(name, 9.0) for name in "abcd"]  # 28 blocks of 36: no latch
        assert choose([big, *small], place(4, blocks=36)) == Choice(("big", "a"), ("d", "c", "b"))

    def test_of_two_that_go_for_one_a_single_slot_is_left(self) -> None:
        large = candidate("c", 1.0, tokens=16 * 14)
        small = [candidate(name, 20.0, tokens=8) for name in "def"]
        two = [running("a", 5.0), running("b", 6.0)]
        assert choose([*two, large, *small], place(2, blocks=20)).run == ("c", "d")

    def test_none_goes_when_not_all_that_must_go_are_beaten(self) -> None:
        big = candidate("big", 1.0, tokens=400)
        small = [running("a", 9.0), running("b", 1.05), running("c", 1.05), running("d", 9.0)]
        assert choose([big, *small], place(4, blocks=36)).run == ("b", "c", "a", "d")

    def test_what_a_displaced_one_leaves_is_filled(self) -> None:
        # a makes room for b in a pool of 40; c, passed over because slots were full, then fits too.
        who = [
            running("a", 9.0, blocks=30),
            running("d", 0.1, blocks=2, tokens=20),
            candidate("b", 1.0),
            candidate("c", 8.9),
        ]
        assert choose(who, place(2, blocks=60)).run == ("d", "b")
        big = candidate("b", 1.0, tokens=300)  # 20 blocks
        who = [running("a", 9.0, blocks=16), running("d", 9.1, blocks=8), candidate("c", 8.95), big]
        assert choose(who, place(2, blocks=30)).run == ("b", "c")

    def test_also_by_a_better_one_that_could_displace_none(self) -> None:
        """c is less than ten per cent shorter than both that run. b is, without its set-up; it needs the
        blocks of both, and leaves one slot."""
        who = [running("v", 1.05), running("w", 1.05), candidate("c", 0.96, tokens=60)]
        assert choose(who, place(2, blocks=20)).run == ("v", "w")
        who.append(candidate("b", 0.1, resume_cost_s=0.87, tokens=219))  # 14 of 20 blocks
        assert choose(who, place(2, blocks=20)) == Choice(("c", "b"), ("w", "v"))

    def test_none_more_goes_where_what_one_leaves_is_just_enough(self) -> None:
        who = [running("a", 9.0), running("d", 8.0), candidate("b", 1.0, tokens=155)]  # 10 blocks, 3 are free
        who.append(candidate("c", 7.9))  # too little better than d to take its place
        assert choose(who, place(2, blocks=17)) == Choice(("b", "d"), ("a",))


class TestWithoutADraftModel:
    """Only the target pool has blocks, and all rules hold for it."""

    def test_what_runs_together_fits(self) -> None:
        assert choose([candidate("a"), candidate("b", 2.0)], place(2, blocks=13, draft_blocks=0)).run == (
            "a",
        )

    def test_a_displaced_one_leaves_its_blocks(self) -> None:
        who = [running("a", 9.0, draft_blocks=0), candidate("b", 1.0)]
        assert choose(who, place(2, blocks=13, draft_blocks=0)) == Choice(("b",), ("a",))

    def test_twenty_five_per_cent_where_the_paused_one_would_lose_its_kv(self) -> None:
        tight = place(1, blocks=12, draft_blocks=0)
        a = running("a", 1.0, draft_blocks=0)
        assert choose([a, candidate("b", 0.85)], tight).run == ("a",)
        assert choose([a, candidate("b", 0.75)], tight) == Choice(("b",), ("a",))


class TestPinned:
    def test_never_paused(self) -> None:
        who = [running("a", 9.0, rank_class=5, pinned=True), candidate("b", 0.1, reserved=True)]
        assert choose(who, place(1, reserve_clock=ReserveClock("b", LAST))).run == ("a",)

    def test_waiting_ones_run_in_order(self) -> None:
        who = [candidate("a", 2.0, pinned=True), candidate("b", 1.0, pinned=True)]
        assert choose(who, place(1)).run == ("b",)

    def test_one_that_grew_out_of_the_blocks_gives_way_all_the_same(self) -> None:
        who = [running("a", 1.0, tokens=123, pinned=True), running("b", 2.0, tokens=123, pinned=True)]
        assert choose(who, place(2, blocks=15)) == Choice(("a",), (), kv_latched=True)
        assert choose(who, place(2, blocks=14)).evict == ("b",)


class TestReservedShare:
    def test_one_slot_in_thirty_two_and_at_least_one(self) -> None:
        assert [reserved_slots(slots) for slots in (1, 2, 31, 32, 63, 64, 256)] == [0, 1, 1, 1, 1, 2, 8]

    def test_one_slot_one_slice_of_thirty_two_for_who_goes_without(self) -> None:
        reserved = [number for number, who in enumerate(one_slot([False] * 2 * CYCLE)) if who == "old"]
        assert reserved == [*range(31 * 32, 32 * 32), *range(63 * 32, 64 * 32)]

    def test_one_slot_what_the_oldest_runs_by_its_own_rank_is_part_of_the_share(self) -> None:
        own = [*[False] * 500, *[True] * 20, *[False] * 600]
        ran = one_slot(own)
        assert [number for number, who in enumerate(ran) if who == "old"] == [
            *range(500, 520),
            *range(CYCLE - 12, CYCLE),
        ]

    def test_one_slot_it_saves_nothing_up_by_running(self) -> None:
        own = [*[True] * 512, *[False] * CYCLE]
        assert one_slot(own)[512:].index("old") == LAST

    def test_one_slot_the_next_oldest_waits_no_longer_for_what_the_one_before_had(self) -> None:
        who = [running("a", 1.0), candidate("next", 99.0, reserved=True)]

        def at(rounds: int, had: int) -> Choice:
            return choose(who, place(1, reserve_clock=ReserveClock("ended", rounds, had)))

        assert at(LAST, 0).run == ("next",)
        assert at(CYCLE - 1, 2).run == ("a",)
        assert at(CYCLE - 1, 2).reserve_clock == ReserveClock("next", CYCLE - 64, 0)
        assert at(500, 31).reserve_clock == ReserveClock("next", 1, 0)

    def test_one_slot_time_without_an_old_request_does_not_count(self) -> None:
        clock = ReserveClock("old", 7, 3)
        assert choose([running("a", 1.0)], place(1, reserve_clock=clock)).reserve_clock == clock

    def test_one_slot_the_cycle_begins_again_though_a_pinned_one_kept_the_slot(self) -> None:
        who = [running("a", 9.0, pinned=True), candidate("old", 1.0, reserved=True)]
        clock = ReserveClock("old", CYCLE - 2, 0)
        clock = choose(who, place(1, reserve_clock=clock)).reserve_clock
        assert clock == ReserveClock("old", CYCLE - 1, 0)
        assert choose(who, place(1, reserve_clock=clock)).reserve_clock == ReserveClock("old", 0, 0)

    def test_one_slot_and_when_the_share_is_had(self) -> None:
        who = [running("old", 1.0, reserved=True)]
        for had, after in ((29, (71, 30)), (30, (71, 31)), (31, (0, 0))):
            clock = ReserveClock("old", 70, had)
            assert choose(who, place(1, reserve_clock=clock)).reserve_clock == ReserveClock("old", *after)

    @settings(deadline=None, max_examples=30)
    @given(
        lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
        first=st.sets(st.integers(0, 2 * CYCLE), max_size=200),
    )
    def test_one_slot_rounds_of_the_oldest_come_in_time_whichever_request_that_is(
        self, lengths: list[int], first: set[int]
    ) -> None:
        """The bound of docs/policies.md: n of them within 32 n rounds and two cycles. `first`: rounds in which
        the oldest is first by rank."""
        clock, ran, number, had = ReserveClock(), "new", 0, 0
        for oldest, ends_after in enumerate(itertools.accumulate(lengths)):
            name = f"old-{oldest}"
            while had < ends_after:
                old = resident(name, 1.0 if number in first else 9.0, reserved=True, running=ran == name)
                new = resident("new", 3.0, running=ran == "new")
                choice = choose([old, new], place(1, reserve_clock=clock))
                clock, [ran] = choice.reserve_clock, choice.run
                number, had = number + 1, had + (ran == name)
                assert number <= RESERVED_ONE_IN * (had + (ran != name)) + 2 * CYCLE

    def test_with_more_slots_there_is_no_clock(self) -> None:
        clock = ReserveClock("ended", 7, 3)
        who = [running("old", 1.0, reserved=True)]
        assert choose(who, place(2, reserve_clock=clock)).reserve_clock == clock

    def test_an_old_request_runs_whatever_its_rank(self) -> None:
        who = [running("a", 1.0), running("b", 2.0), candidate("old", 99.0, rank_class=9, reserved=True)]
        assert choose(who, place(2)).run == ("a", "old")

    def test_no_more_than_the_share(self) -> None:
        who = [
            running("a", 1.0),
            running("b", 2.0),
            *(candidate(f"old{i}", 90.0 + i, reserved=True) for i in range(3)),
        ]
        assert choose(who, place(2)).run == ("a", "old0")

    def test_it_stays_with_the_one_that_has_it(self) -> None:
        who = [
            running("old", 99.0, reserved=True),
            candidate("older", 98.0, reserved=True),
            candidate("a", 1.0),
        ]
        assert choose(who, place(2)).run == ("a", "old")

    def test_a_reserved_one_that_does_not_fit_leaves_the_share_to_the_next(self) -> None:
        who = [
            candidate("huge", 1.0, reserved=True, tokens=9999),
            candidate("old", 9.0, reserved=True),
            candidate("a", 2.0),
        ]
        assert choose(who, place(2, blocks=60)).run == ("a", "old")

    def test_one_slot_outside_its_slice(self) -> None:
        who = [running("a", 1.0), candidate("old", 99.0, reserved=True)]
        assert choose(who, place(1, reserve_clock=ReserveClock("old", LAST - 1))).run == ("a",)
        assert choose(who, place(1, reserve_clock=ReserveClock("old", LAST))).run == ("old",)

    def test_nobody_displaces_it_inside_its_share(self) -> None:
        who = [
            running("old", 99.0, reserved=True),
            running("a", 2.0),
            candidate("b", 1.0),
            candidate("c", 1.0),
        ]
        assert choose(who, place(2)).run == ("b", "old")


class TestMemory:
    def test_blocks_cover_all_tokens_but_the_last_and_the_growth(self) -> None:
        # 100 − 1 + 6 = 105 tokens: 7 blocks of 16.
        assert choose([candidate("a")], place(blocks=7)).run == ("a",)
        assert choose([candidate("a")], place(blocks=6)).run == ()
        assert choose([candidate("a", tokens=107)], place(blocks=7)).run == ("a",)
        assert choose([candidate("a", tokens=108)], place(blocks=7)).run == ()

    def test_both_pools_count(self) -> None:
        assert choose([candidate("a")], place(blocks=100, draft_blocks=6)).run == ()

    def test_without_a_draft_model_only_one(self) -> None:
        assert choose([candidate("a")], place(blocks=100, draft_blocks=0)).run == ("a",)

    def test_one_that_does_not_fit_is_passed_over(self) -> None:
        assert choose([candidate("big", 1.0, tokens=900), candidate("b", 2.0)], place(blocks=20)).run == (
            "b",
        )

    def test_a_resident_one_needs_no_more_than_it_will_hold(self) -> None:
        who = [resident("a", blocks=7), resident("b", blocks=7)]
        assert choose(who, place(blocks=14)).run == ("a", "b")

    def test_the_worst_running_one_goes_when_growth_needs_its_blocks(self) -> None:
        who = [running("a", 1.0, tokens=123), running("b", 2.0, tokens=123)]  # both want an eighth block
        assert choose(who, place(2, blocks=15)) == Choice(("a",), (), kv_latched=True)
        assert choose(who, place(2, blocks=14)).evict == ("b",)

    def test_eviction_is_lazy(self) -> None:
        assert choose([running("a", 9.0), candidate("b", 1.0)], place(1, blocks=14)).evict == ()

    def test_worst_rank_first_and_no_more_than_needed(self) -> None:
        who = [
            candidate("a", 0.1),
            *(resident(name, index) for name, index in (("b", 2.0), ("c", 4.0), ("d", 3.0))),
        ]
        assert choose(who, place(1, blocks=28)).evict == ()
        assert choose(who, place(1, blocks=27)).evict == ("c",)
        who[0] = candidate("a", 0.1, tokens=220)  # 15 blocks, and 21 are held
        assert choose(who, place(1, blocks=29)).evict == ("c",)
        assert choose(who, place(1, blocks=28)).evict == ("c", "d")

    def test_one_that_holds_blocks_in_the_short_pool_only_is_evicted(self) -> None:
        who = [candidate("a", 0.1), candidate("b", 2.0, residency=Residency.DEVICE, target_blocks=7)]
        assert choose(who, place(1, blocks=13, draft_blocks=0)).evict == ("b",)
        who = [candidate("a", 0.1), candidate("b", 2.0, residency=Residency.DEVICE, draft_blocks=7)]
        assert choose(who, place(1, blocks=99, draft_blocks=13)).evict == ("b",)

    def test_one_without_blocks_in_the_short_pool_is_left_alone(self) -> None:
        who = [
            candidate("a", 0.1),
            resident("b", 2.0),
            candidate("c", 9.0, residency=Residency.DEVICE, target_blocks=7, tokens=100),
        ]
        assert choose(who, place(1, blocks=21, draft_blocks=13)).evict == ("b",)
        who[2] = candidate("c", 9.0, residency=Residency.DEVICE, draft_blocks=7, tokens=100)
        assert choose(who, place(1, blocks=13, draft_blocks=21)).evict == ("b",)


class TestSharedBlocks:
    """Requests of 7 blocks each, of which the first 5 are the same."""

    START = (SharedBlocks(3, 5, 5),)

    def test_they_count_once(self) -> None:
        three = [running(name, shared=self.START) for name in "abc"]
        assert choose(three, place(3, blocks=11)).run == ("a", "b", "c")
        assert choose(three, place(3, blocks=10)).run == ("a", "b")

    def test_in_each_pool(self) -> None:
        of_target = (SharedBlocks(3, 5, 0),)
        two = [running(name, shared=of_target) for name in "ab"]
        assert choose(two, place(2, blocks=9, draft_blocks=14)).run == ("a", "b")
        assert choose(two, place(2, blocks=9, draft_blocks=13)).run == ("a",)

    def test_parts_of_parts(self) -> None:
        longer = (SharedBlocks(3, 3, 3), SharedBlocks(8, 2, 2))
        who = [running("a", shared=longer), running("b", shared=longer), running("c", shared=longer[:1])]
        assert len(choose(who, place(3, blocks=3 + 2 + 2 + 2 + 4)).run) == 3
        assert len(choose(who, place(3, blocks=3 + 2 + 2 + 2 + 3)).run) == 2

    def test_one_without_kv_counts_as_a_whole(self) -> None:
        two = [running(name, shared=self.START) for name in "ab"]
        assert choose([*two, candidate("c")], place(3, blocks=16)).run == ("a", "b", "c")
        assert choose([*two, candidate("c")], place(3, blocks=15)).run == ("a", "b")

    def test_one_without_kv_takes_what_others_leave_it_to_find(self) -> None:
        """Two requests take 9 blocks, and each that finds 5 of these 2 more. It takes 7 where no one holds them."""
        two = [running(name, shared=self.START) for name in "ab"]
        finds = [candidate(name, shared=self.START) for name in "cd"]
        assert choose([*two, *finds], place(4, blocks=13)).run == ("a", "b", "c", "d")
        assert choose([*two, *finds], place(4, blocks=12)).run == ("a", "b", "c")
        assert choose(finds, place(2, blocks=9)).run == ("c", "d")
        assert choose(finds, place(2, blocks=8)).run == ("c",)

    def test_what_only_those_that_wait_will_find_is_not_kept(self) -> None:
        """`b` waits, holds nothing and keeps none of the 5 blocks that `c` will find with it. `a` is evicted for its
        own blocks."""
        finds = [candidate(name, index_s, shared=self.START) for name, index_s in (("b", 8.0), ("c", 1.0))]
        kept = resident("a", 5.0, blocks=7)
        assert choose([kept, *finds], place(1, blocks=13)).evict == ("a",)
        assert choose([kept, *finds], place(1, blocks=14)).evict == ()

    def test_one_that_runs_without_kv_of_the_draft_will_find_it_there(self) -> None:
        parts = (SharedBlocks(3, 5, 0), SharedBlocks(-4, 0, 5))
        two = [running("a", shared=parts), running("b", draft_blocks=0, shared=parts)]
        assert choose(two, place(2, blocks=9, draft_blocks=9)).run == ("a", "b")
        assert choose(two, place(2, blocks=9, draft_blocks=8)).run == ("a",)

    def test_and_keeps_none_of_it_while_it_is_paused(self) -> None:
        parts = (SharedBlocks(3, 5, 0), SharedBlocks(-4, 0, 5))
        who = [
            running("a", shared=parts),
            resident("b", 2.0, draft_blocks=0, shared=parts),
            resident("c", 9.0),
        ]
        assert choose(who, place(1, blocks=100, draft_blocks=14)).evict == ()
        assert choose(who, place(1, blocks=100, draft_blocks=13)).evict == ("c",)

    def test_a_displaced_one_keeps_its_kv_where_the_other_finds_most_of_its_own(self) -> None:
        """With 9 blocks, `c` displaces `a`, which it would not if `a` lost its KV. `b`, which waits, holds none."""
        runs = running("a", 1.2, shared=self.START, resume_cost_s=5.0)
        better = candidate("c", 1.0, shared=self.START)
        also = candidate("b", 1.1, shared=self.START)
        assert choose([runs, better, also], place(1, blocks=9)).run == ("c",)
        assert choose([runs, better, also], place(1, blocks=8)).run == ("a",)

    def test_the_last_that_holds_them_counts_them(self) -> None:
        """9 of 9 blocks are held. The first eviction frees 2, the second one 7."""
        two = [resident(name, index_s, shared=self.START) for name, index_s in (("a", 5.0), ("b", 6.0))]
        for needed, gone in ((1, ("b",)), (2, ("b",)), (3, ("b", "a"))):
            one = running("c", blocks=0, tokens=16 * needed - GROWTH + 1)
            assert choose([*two, one], place(1, blocks=9)).evict == gone

    def test_a_displaced_one_leaves_its_own(self) -> None:
        """3 of 12 blocks are free. The worse of two leaves 2 of its own."""
        two = [running(name, index_s, shared=self.START) for name, index_s in (("a", 5.0), ("b", 6.0))]
        for needed, run in ((3, ("c", "a", "b")), (5, ("c", "a")), (6, ("c",))):
            one = candidate("c", tokens=16 * needed - GROWTH + 1)
            assert choose([*two, one], place(3, blocks=12)).run == run

    def test_one_that_displaces_none_leaves_them_as_they_were(self) -> None:
        """The large one beats one of two, which leaves too little. Then 7 blocks are free for the small one."""
        two = [running("a", 0.5, shared=self.START), running("b", 6.0, shared=self.START)]
        large, small = candidate("c", 1.0, tokens=300), candidate("d", 7.0)
        assert choose([*two, large, small], place(3, blocks=16)).run == ("a", "b", "d")

    def test_they_press_once(self) -> None:
        """28 of 30 blocks are above the latch, 13 are not."""
        four = [running(name, shared=self.START) for name in "abcd"]
        assert not choose(four, place(4, blocks=30)).kv_latched
        assert choose([replace(one, shared=()) for one in four], place(4, blocks=30)).kv_latched

    def test_runs_end_where_a_holder_ends(self) -> None:
        holders = [4, 4, 4, 2, 2, 1, 1]
        assert shared_runs(7, holders.__getitem__) == [(0, 3), (3, 5)]
        assert shared_runs(4, holders.__getitem__) == [(0, 3), (3, 4)]
        assert shared_runs(2, [1, 1].__getitem__) == shared_runs(0, holders.__getitem__) == []

    def test_runs_end_where_those_that_are_found_end(self) -> None:
        holders = [3, 3, 3, 3, 1, 1, 1, 1]
        assert shared_runs(8, holders.__getitem__, [2]) == [(0, 2), (2, 4)]
        assert shared_runs(8, holders.__getitem__, [2, 4]) == [(0, 2), (2, 4)]
        assert shared_runs(8, holders.__getitem__, [3, 5, 7]) == [(0, 3), (3, 4), (4, 5), (5, 7)]
        assert shared_runs(5, holders.__getitem__, [5]) == [(0, 4), (4, 5)]


class TestLatch:
    """Preemption is suspended above 85 % and until KV use is below 70 % (our choice)."""

    WHO = (running("a", 9.0, blocks=44, tokens=698), running("b", 9.0, blocks=44, tokens=698))

    def test_set_above(self) -> None:
        assert choose(self.WHO, place(blocks=103)).kv_latched
        assert not choose(self.WHO, place(blocks=105)).kv_latched

    def test_kept_between(self) -> None:
        assert choose(self.WHO, place(blocks=125, kv_latched=True)).kv_latched
        assert not choose(self.WHO, place(blocks=127, kv_latched=True)).kv_latched

    def test_exactly_at_the_bounds_it_stays_as_it_is(self) -> None:
        """Blocks of 34 and 51 of 100 are 85 %, of 28 and 42 are 70 %."""
        for blocks, before, after in (
            ((34, 51), False, False),
            ((28, 42), True, False),
            ((29, 42), True, True),
        ):
            who = [running(name, 9.0, blocks=n, tokens=10) for name, n in zip("ab", blocks, strict=True)]
            assert choose(who, place(blocks=100, kv_latched=before)).kv_latched is after

    def test_what_runs_counts_with_its_growth_and_what_is_paused_as_it_is_in_each_pool(self) -> None:
        """90 of 100 blocks in one pool: a runs on 40 and is about to hold 50, or b is paused and holds 50."""
        grows = {"tokens": 50 * BLOCK - GROWTH + 1}
        for who in (
            [running("a", blocks=40, **grows), running("c", blocks=40, tokens=10)],
            [resident("b", blocks=50, **grows), running("c", blocks=40, tokens=10)],
        ):
            in_target = [replace(c, draft_blocks=0) for c in who]
            assert choose(in_target, place(blocks=100, draft_blocks=1000)).kv_latched
            assert not choose(in_target, place(blocks=110, draft_blocks=1000)).kv_latched
            in_draft = [replace(c, target_blocks=0) for c in who]
            assert choose(in_draft, place(blocks=1000, draft_blocks=100)).kv_latched
            assert not choose(in_draft, place(blocks=1000, draft_blocks=110)).kv_latched

    def test_never_for_a_draft_pool_that_is_not_there(self) -> None:
        assert not choose([running("a", 1.0, draft_blocks=0)], place(blocks=100, draft_blocks=0)).kv_latched
        assert not choose([candidate("a")], place(blocks=100, draft_blocks=0)).kv_latched

    def test_either_pool_sets_it(self) -> None:
        assert choose(self.WHO, place(blocks=1000, draft_blocks=100)).kv_latched

    def test_what_is_paused_on_the_device_counts(self) -> None:
        who = [*self.WHO, resident("c", blocks=20)]
        assert choose(who, place(blocks=125)).kv_latched

    def test_running_requests_are_not_paused(self) -> None:
        who = [*self.WHO, candidate("c", 0.1, rank_class=-9, tokens=10)]
        assert choose(who, place(2, blocks=103)).run == ("a", "b")

    def test_the_reserved_share_stands(self) -> None:
        """Without it, an old request would wait without end where KV is always short. The scheduler decides
        which request has its turn."""
        who = [*self.WHO, candidate("old", 99.0, reserved=True, tokens=10)]
        assert choose(who, place(2, blocks=103)).run == ("a", "old")

    def test_paused_resident_ones_come_before_those_without_kv(self) -> None:
        swapped = candidate("c", 0.2, residency=Residency.HOST, tokens=10)
        who = [
            self.WHO[0],
            resident("b", 9.0, blocks=44, tokens=698),
            candidate("d", 0.1, tokens=10),
            swapped,
        ]
        assert choose(who, place(2, blocks=103)).run == ("a", "b")
        assert set(choose(who, place(3, blocks=103)).run) == {"a", "b", "c"}
        assert choose(who, place(2, blocks=1000)).run == ("d", "c")


# Anything.

CANDIDATES = st.lists(
    st.builds(
        candidate,
        request_id=st.uuids().map(str),
        index_s=st.floats(0, 10),
        rank_class=st.integers(-2, 2),
        resume_cost_s=st.floats(0, 2),
        reserved=st.booleans(),
        pinned=st.booleans(),
        tokens=st.integers(1, 400),
        residency=st.sampled_from(Residency),
        running=st.booleans(),
    ),
    max_size=14,
    unique_by=lambda c: c.request_id,
)
BEGINNINGS = (3, 1, 2)
"""Blocks of each level of what requests share."""


@st.composite
def beginnings(draw: st.DrawFn, held: int) -> tuple[SharedBlocks, ...]:
    """Return what a request that holds this many blocks shares with others: of a tree of three levels, a part of
    one path."""
    path, blocks = [], 0
    for level, size in enumerate(BEGINNINGS):
        if blocks + size > held or not draw(st.booleans()):
            break
        branch = draw(st.integers(0, level)) + 10 * (path[-1].name if path else 1)
        path.append(SharedBlocks(branch, size, size))
        blocks += size
    return tuple(path)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Candidate], WorkerState]:
    """Return candidates with possible holdings, on a place that has room for them."""
    candidates = []
    slots = draw(st.integers(1, 5))
    ran = 0
    for item in draw(CANDIDATES):
        on_device = item.residency is Residency.DEVICE
        runs = item.running and on_device and ran < slots
        ran += runs
        held = -(-item.tokens // BLOCK) if on_device else 0
        shared = draw(beginnings(held if on_device else needed(item)))
        candidates.append(replace(item, running=runs, target_blocks=held, draft_blocks=held, shared=shared))
    held = together([], candidates)
    blocks = draw(st.integers(max(held, 1), max(held, 1) + 60))
    return candidates, place(
        slots,
        blocks,
        reserve_clock=ReserveClock("", draw(st.sampled_from([0, LAST]))),
        kv_latched=draw(st.booleans()),
    )


def needed(c: Candidate) -> int:
    return max(c.target_blocks, -(-(c.tokens - 1 + GROWTH) // BLOCK))


def together(chosen: Sequence[Candidate], kept: Sequence[Candidate]) -> int:
    """Return the blocks that these requests take, with the growth of the chosen ones."""
    kept = [c for c in kept if c.residency is Residency.DEVICE]
    blocks = sum(map(needed, chosen)) + sum(c.target_blocks for c in kept)
    holders = Counter(run for c in (*chosen, *kept) for run in c.shared)
    return blocks - sum((count - 1) * run.target_blocks for run, count in holders.items())


@given(situations())
@settings(max_examples=150, deadline=None)
def test_what_is_chosen_fits(situation: tuple[list[Candidate], WorkerState]) -> None:
    candidates, where = situation
    choice = choose(candidates, where)
    assert len(set(choice.run)) == len(choice.run) <= where.slots
    kept = [c for c in candidates if c.request_id not in (*choice.run, *choice.evict)]
    chosen = [c for c in candidates if c.request_id in choice.run]
    assert together(chosen, kept) <= where.target_blocks


@given(situations())
@settings(max_examples=150, deadline=None)
def test_no_slot_stays_free_while_something_that_fits_waits(
    situation: tuple[list[Candidate], WorkerState],
) -> None:
    candidates, where = situation
    choice = choose(candidates, where)
    chosen = [c for c in candidates if c.request_id in choice.run]
    waiting = [c for c in candidates if c.request_id not in choice.run]
    assert len(choice.run) == where.slots or all(
        together([*chosen, c], []) > where.target_blocks for c in waiting
    )


@given(situations())
@settings(max_examples=150, deadline=None)
def test_nothing_is_evicted_without_need(situation: tuple[list[Candidate], WorkerState]) -> None:
    candidates, where = situation
    choice = choose(candidates, where)
    assert not set(choice.evict) & set(choice.run)
    chosen = [c for c in candidates if c.request_id in choice.run]
    if choice.evict:
        kept = [c for c in candidates if c.request_id not in (*choice.run, *choice.evict)]
        last = next(c for c in candidates if c.request_id == choice.evict[-1])
        assert together(chosen, [*kept, last]) > where.target_blocks, (
            "without the last eviction it would not have fitted"
        )
    held = [c for c in candidates if c.request_id not in choice.run]
    if together(chosen, held) <= where.target_blocks:
        assert choice.evict == ()


@given(situations(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_equal_situations_give_equal_choices_in_any_order(situation, random) -> None:  # type: ignore[no-untyped-def]
    candidates, where = situation
    shuffled = list(candidates)
    random.shuffle(shuffled)
    assert choose(candidates, where) == choose(candidates, where) == choose(shuffled, where)


@given(situations())
@settings(max_examples=100, deadline=None)
def test_a_choice_is_stable(situation: tuple[list[Candidate], WorkerState]) -> None:
    """Nothing happens between two rounds: the second choice is the first, so hysteresis never oscillates."""
    candidates, where = situation

    def after(choice: Choice, before: list[Candidate]) -> list[Candidate]:
        out = []
        for c in before:
            if c.request_id in choice.run:
                held = needed(c)
                c = replace(
                    c, running=True, residency=Residency.DEVICE, target_blocks=held, draft_blocks=held
                )
            elif c.request_id in choice.evict:
                c = replace(
                    c, running=False, residency=Residency.NONE, target_blocks=0, draft_blocks=0, shared=()
                )
            else:
                c = replace(c, running=False)
            out.append(c)
        return out

    seen: list[tuple[str, ...]] = []
    for _ in range(6):
        choice = choose(candidates, where)
        candidates = after(choice, candidates)
        where = replace(where, kv_latched=choice.kv_latched)
        seen.append(choice.run)
    assert seen[-1] == seen[-2]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 400)), max_size=30))
@settings(max_examples=20, deadline=None)
def test_with_one_slot_the_oldest_has_its_share_and_takes_no_more(turns: list[tuple[bool, int]]) -> None:
    """32 rounds within 1024 from the beginning, n rounds within 32 n and two cycles from anywhere."""
    own = [old_is_first for old_is_first, rounds in turns for _ in range(rounds)] + [False] * CYCLE
    had = [who == "old" for who in one_slot(own)]
    assert sum(had[:CYCLE]) >= RESERVED_SLICE_ROUNDS
    behind = 0
    for ran in had:
        behind = max(0, behind + 1 - RESERVED_ONE_IN * ran)
        assert behind <= 2 * CYCLE
    taken = sum(ran and not first for ran, first in zip(had, own, strict=True))
    assert taken <= len(own) / RESERVED_ONE_IN
