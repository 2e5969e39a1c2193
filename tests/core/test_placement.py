"""Which worker gets a request, and when a request changes lists."""

from __future__ import annotations

import random
import struct
from collections import Counter
from dataclasses import replace

import pytest

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Lease
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import (
    Arrived,
    EndRequested,
    Held,
    Recovered,
    ResidencyChange,
    WorkerFacts,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.placement.placement import MOST_LISTS_REFRESHED
from scheduler_svc.core.placement.routing import MOST_COMPARED
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.queue import MOST_KEPT
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.worker import Worker
from tests.core.test_scheduler import W, did, report, request


def core(policy: str = "srpt-length", **settings: object) -> Scheduler:
    chosen = replace(CoreSettings(reserved_share=False), **settings)  # type: ignore[arg-type]
    return Scheduler(policy_named(policy, chosen), chosen, Priors())


def named(worker_id: str, slots: int, **more: int) -> WorkerFacts:
    return replace(W, worker_id=worker_id, slots=slots, **more)


def arrivals(count: int, first: int = 0, **more: object) -> list[Arrived]:
    return [Arrived(request(f"r{i:02d}", i, **more)) for i in range(first, first + count)]


def worker_of(scheduler: Scheduler, request_id: str) -> str | None:
    found = scheduler.explain(request_id, 0.0)
    assert found is not None
    return found.worker_id


def index_of(scheduler: Scheduler, request_id: str) -> float:
    rank = scheduler.rank_of(request_id)
    assert rank is not None
    return rank.index_s


def leased(commands: list[object]) -> Counter[str]:
    return Counter(command.worker_id for command in commands if isinstance(command, Lease))


class TestWhoGetsIt:
    @pytest.mark.parametrize(("count", "lists"), [(5, (1, 4)), (10, (2, 8)), (11, (2, 8))])
    def test_the_worker_with_the_fewest_requests_for_each_slot(
        self, count: int, lists: tuple[int, int]
    ) -> None:
        """Until all lists are full, at two requests for each slot; the others stay in the queue."""
        scheduler = core("fcfs")
        scheduler.step(0.0, [WorkerUp(named("a", 1), ()), WorkerUp(named("b", 4), ())])
        found = leased(scheduler.step(1.0, arrivals(count)))  # type: ignore[arg-type]
        assert (found["a"], found["b"]) == lists
        assert scheduler.totals().queued == count - sum(lists)

    @pytest.mark.parametrize("factor", [1, 2, 3])
    def test_a_list_is_as_long_as_the_setting_says(self, factor: int) -> None:
        scheduler = core("fcfs", list_factor=factor)
        found = leased(scheduler.step(1.0, [WorkerUp(named("w", 2), ()), *arrivals(9)]))  # type: ignore[arg-type]
        assert found["w"] == 2 * factor

    def test_of_equals_the_first_by_name(self) -> None:
        scheduler = core("fcfs")
        scheduler.step(0.0, [WorkerUp(named(name, 2), ()) for name in ("c", "a", "b")])
        scheduler.step(1.0, arrivals(4))
        assert [worker_of(scheduler, f"r{i:02d}") for i in range(4)] == ["a", "b", "c", "a"]

    def test_one_that_only_a_fuller_worker_holds_goes_there(self) -> None:
        scheduler = core("fcfs")
        scheduler.step(0.0, [WorkerUp(named("a", 2, max_length=64), ()), WorkerUp(named("b", 2), ())])
        scheduler.step(1.0, arrivals(2))
        assert [worker_of(scheduler, f"r{i:02d}") for i in range(2)] == ["b", "b"]

    def test_one_that_waits_for_a_larger_worker_does_not_hold_up_those_after_it(self) -> None:
        scheduler = core("fcfs")
        scheduler.step(0.0, [WorkerUp(named("a", 1), ()), WorkerUp(named("b", 1, max_length=64), ())])
        scheduler.step(1.0, arrivals(4))
        small = [Arrived(request(f"s{i}", 50 + i, prompt_tokens=10, max_tokens=20)) for i in range(3)]
        scheduler.step(2.0, small)
        assert [worker_of(scheduler, f"s{i}") for i in range(3)] == ["b", "b", None]
        assert [worker_of(scheduler, f"r{i:02d}") for i in range(4)] == ["a", "a", None, None]

    @pytest.mark.parametrize("fair", [False, True])
    @pytest.mark.parametrize("fits", [False, True])
    def test_the_many_that_wait_for_a_larger_worker_are_not_looked_at_in_each_step(
        self, fits: bool, fair: bool
    ) -> None:
        """Before those that fit the small worker come 500 others. When its list is full, one of a lower priority is after
        what the large worker has.
        """
        scheduler = core("fcfs", tenant_fairness=fair)
        looked_at = scheduler._shard.requests = CountedReads()
        scheduler.step(0.0, [WorkerUp(named("a", 1), ()), WorkerUp(named("b", 4, max_length=64), ())])
        scheduler.step(1.0, arrivals(500, priority=1))
        looked_at.reads = 0

        for number in range(20):
            small = {"prompt_tokens": 10, "max_tokens": 20} if fits else {}
            scheduler.step(2.0 + number, arrivals(1, 500 + number, **small))

        assert looked_at.reads < 500
        of = [worker_of(scheduler, f"r{500 + number}") for number in range(20)]
        assert of == (["b"] * 8 + [None] * 12 if fits else [None] * 20)
        scheduler.check()

    def test_workers_of_many_sizes_come_and_go(self) -> None:
        """Whatever their order, requests wait for the workers that can hold them, and the queue is in order."""
        scheduler, rng = core("fcfs"), random.Random(1)
        names = [f"w{number:02d}" for number in range(80)]
        scheduler.step(
            0.0, [Arrived(request(f"r{i:03d}", i, max_tokens=rng.randint(1, 900))) for i in range(300)]
        )
        up: set[str] = set()
        for number in range(400):
            name = rng.choice(names)
            if name in up:
                scheduler.step(1.0 + number, [WorkerLost(name, hung=True)])
            else:
                scheduler.step(
                    1.0 + number, [WorkerUp(named(name, 1, max_length=10 * int(name[1:]) + 100), ())]
                )
            up ^= {name}
            scheduler.check()
            queued = [entry.request_id for entry in scheduler.queue(0.0, 300) if entry.worker_id is None]
            assert queued == sorted(queued)
        assert len(scheduler._shard.queued._bounds) <= MOST_KEPT + len(up)


class CountedReads(dict[str, Request]):
    reads = 0

    def __getitem__(self, request_id: str) -> Request:
        self.reads += 1
        return super().__getitem__(request_id)


class TestOvertaking:
    def test_a_better_arrival_is_on_the_list_with_the_worst_end(self) -> None:
        scheduler = core()
        scheduler.step(0.0, [WorkerUp(named("a", 1), ()), WorkerUp(named("b", 1), ())])
        # a gets the first and the third, b the second and the fourth.
        for number, length in enumerate((100, 110, 300, 200)):
            scheduler.step(1.0, arrivals(1, number, expected_output_tokens=length))
        assert [worker_of(scheduler, f"r{i:02d}") for i in range(4)] == ["a", "b", "a", "b"]
        scheduler.step(2.0, arrivals(1, 10, expected_output_tokens=150))
        assert worker_of(scheduler, "r10") == "a", "before 300"
        scheduler.step(3.0, arrivals(1, 11, expected_output_tokens=170))
        assert worker_of(scheduler, "r11") == "b", "before 200; on a, 150 is the last of the first part"
        scheduler.step(4.0, arrivals(1, 12, expected_output_tokens=180))
        assert worker_of(scheduler, "r12") is None
        scheduler.check()

    @pytest.mark.parametrize("large", [0, 1, 3])
    def test_one_that_waits_for_a_larger_worker_does_not_hold_up_those_after_it(self, large: int) -> None:
        scheduler = core()
        urgent = arrivals(2, max_tokens=8000, priority=9)
        scheduler.step(0.0, [WorkerUp(named("large", 1, max_length=30_000, target_blocks=2000), ()), *urgent])
        scheduler.step(1.0, [WorkerUp(named("small", 1), ()), *arrivals(3, 10)])
        scheduler.step(2.0, arrivals(large, 20, max_tokens=8000, priority=8))
        assert [worker_of(scheduler, f"r{10 + i}") for i in range(3)] == ["small", "small", None]
        scheduler.step(3.0, arrivals(1, 30, expected_output_tokens=5))
        scheduler.check()
        assert [worker_of(scheduler, f"r{20 + i}") for i in range(large)] == [None] * large
        assert worker_of(scheduler, "r30") == "small"

    def test_few_lists_are_ranked_again_in_one_step(self) -> None:
        """Rounds turn out to be cheap: by its older ranks every list ends with a request that has more left than
        the arrival, and ranked again it still does.
        """
        scheduler, names = core(), "abcdefg"
        scheduler.step(0.0, [WorkerUp(named(name, 1), ()) for name in names])
        scheduler.step(0.0, arrivals(2 * len(names), expected_output_tokens=400))
        running = {name: f"r{number:02d}" for number, name in enumerate(names)}
        scheduler.step(1.0, [report(did(r, 0, 1), worker_id=name) for name, r in running.items()])
        for n in range(1, 20):
            cheap = report(did("r00", n, 1), worker_id="a", draft_s=0.001, verify_s=0.001)
            scheduler.step(50.0 * n, [cheap])
        before = {name: index_of(scheduler, r) for name, r in running.items()}
        commands = scheduler.step(1000.0, arrivals(1, 20, expected_output_tokens=380))
        again = [name for name, r in running.items() if index_of(scheduler, r) != before[name]]
        (to,) = leased(commands)  # type: ignore[arg-type]
        assert len(again) == MOST_LISTS_REFRESHED
        assert to not in again, "the next one, by its older ranks"
        scheduler.check()

    @pytest.mark.parametrize(("margin", "most"), [(0.0, 9), (0.25, 10), (0.5, 12), (1.0, 16)])
    def test_what_fell_behind_the_margin_is_taken_back(self, margin: float, most: int) -> None:
        """Eight are on the list of four slots, and at least one more may be."""
        scheduler = core(list_margin=margin)
        scheduler.step(0.0, [WorkerUp(named("w", 4), ()), *arrivals(8, expected_output_tokens=400)])
        lists = []
        for number in range(12):
            better = arrivals(1, 20 + number, expected_output_tokens=300 - 9 * number)
            scheduler.step(1.0 + number, better)
            lists.append(scheduler.workers()[0].listed)
            scheduler.check()
        assert lists == [min(9 + number, most) for number in range(12)]


class TestWorkersOfUnequalSpeed:
    """Both have run for a while, `a` with rounds of `a_s` seconds and `b` of `b_s`, and are empty."""

    def pool(self, a_s: float, b_s: float, slots: int = 4, rounds: int = 200) -> Scheduler:
        scheduler = core("fcfs")
        first = [WorkerUp(named(name, slots), ()) for name in "ab"]
        scheduler.step(0.0, [*first, *arrivals(2, 90)])
        assert [worker_of(scheduler, name) for name in ("r90", "r91")] == ["a", "b"]
        self.run(scheduler, a_s, b_s, range(rounds))
        scheduler.step(999.0, [EndRequested(name, End.CANCELLED, "") for name in ("r90", "r91")])
        return scheduler

    def run(self, scheduler: Scheduler, a_s: float, b_s: float, rounds: range) -> None:
        for n in rounds:
            for name, worker, seconds in (("r90", "a", a_s), ("r91", "b", b_s)):
                one = report(did(name, n, 1, drafted=0), worker_id=worker, draft_s=0.0, verify_s=seconds)
                scheduler.step(1.0 + n, [one])
            scheduler.check()

    def order(self, scheduler: Scheduler, count: int) -> str:
        """Return the workers of `count` arrivals, one after another."""
        for event in arrivals(count):
            scheduler.step(1000.0, [event])
            scheduler.check()
        return "".join(worker_of(scheduler, f"r{i:02d}") or "-" for i in range(count))

    def test_the_slots_of_the_faster_one_first_then_those_of_the_slower_one(self) -> None:
        """A round of b is shorter with four requests than one of a with one. A free slot comes before any
        place where a request waits.
        """
        assert self.order(self.pool(0.10, 0.04), 8) == "bbbbaaaa"

    def test_more_wait_for_the_faster_one_than_for_the_slower_one(self) -> None:
        """The first that waits does so for each, so that a worker with a free slot can find it."""
        assert self.order(self.pool(0.10, 0.04), 12)[8:] == "babb"

    def test_a_little_slower_is_as_fast(self) -> None:
        assert self.order(self.pool(0.042, 0.04), 6) == "ababab"
        assert self.order(self.pool(0.04, 0.042), 6) == "ababab"

    def test_one_that_stalls_once_is_as_fast(self) -> None:
        scheduler = core("fcfs")
        scheduler.step(0.0, [WorkerUp(named(name, 4), ()) for name in "ab"])
        scheduler.step(0.0, arrivals(2, 90))
        self.run(scheduler, 0.04, 0.04, range(100))
        self.run(scheduler, 4.0, 0.04, range(100, 101))
        assert self.order(scheduler, 4) == "abab"

    def test_one_that_becomes_as_fast_is_used_like_the_other_one(self) -> None:
        scheduler = core("fcfs")
        scheduler.step(0.0, [WorkerUp(named(name, 4), ()) for name in "ab"])
        scheduler.step(0.0, arrivals(2, 90))
        self.run(scheduler, 0.10, 0.04, range(150))
        self.run(scheduler, 0.04, 0.04, range(150, 400))
        assert sorted(self.order(scheduler, 6)) == list("aaabbb")

    def test_nothing_is_known_before_the_costs_of_a_round_are(self) -> None:
        assert self.order(self.pool(0.10, 0.04, rounds=10), 4) == "abab"

    def test_estimates_follow_when_all_workers_become_faster(self) -> None:
        """Otherwise all workers would be fast ones, in a shard whose seconds are long."""
        scheduler = core("fcfs")
        scheduler.step(0.0, [WorkerUp(named(name, 1, max_length=9000), ()) for name in "ab"])
        scheduler.step(0.0, arrivals(2, 90, max_tokens=8000))
        self.run(scheduler, 0.10, 0.04, range(300))
        before_s = scheduler.priors.cost.round_s(1, 1, 100)
        self.run(scheduler, 0.05, 0.02, range(300, 5000))
        assert before_s == pytest.approx(0.07, rel=0.1), "the mean of both"
        assert scheduler.priors.cost.round_s(1, 1, 100) == pytest.approx(0.035, rel=0.1)


class TestMovesToFasterWorkers:
    """A round of a takes 2.5 times as long as one of b. A request runs on a when the slot of b becomes free."""

    def moves(
        self,
        a_s: float = 0.10,
        tokens: int = 400,
        free_blocks: int = 900,
        b: WorkerFacts | None = None,
        c: WorkerFacts | None = None,
    ) -> str | None:
        """Return where it moves after its next round, with `tokens` tokens in all. `b`, `c`: workers that come up
        before, b again and c at the speed of a mean worker.
        """
        scheduler = TestWorkersOfUnequalSpeed().pool(a_s, 0.04, slots=1)
        scheduler.step(1000.0, arrivals(2, max_tokens=tokens, runs_to_limit=True))
        on_a, on_b = sorted(("r00", "r01"), key=lambda name: worker_of(scheduler, name) or "")
        free = {"free_target_blocks": free_blocks, "free_draft_blocks": free_blocks}
        scheduler.step(1001.0, [report(did(on_b, 0, 1, drafted=0), worker_id="b", **free)])
        scheduler.step(1001.0, [report(did(on_a, 0, 1, drafted=0), worker_id="a")])
        if b is not None:
            scheduler.step(1001.0, [WorkerUp(b, (Held(on_b, 1, Residency.DEVICE),))])
        if c is not None:
            scheduler.step(1001.0, [WorkerUp(c, ())])
        scheduler.step(1002.0, [EndRequested(on_b, End.CANCELLED, "")])
        assert worker_of(scheduler, on_a) == "a", "it is in a round"
        commands = scheduler.step(1003.0, [report(did(on_a, 1, 1, drafted=0), worker_id="a")])
        scheduler.check()
        worker = worker_of(scheduler, on_a)
        to = None if worker == "a" else worker
        assert leased(commands) == ({} if to is None else {to: 1})  # type: ignore[arg-type]
        assert scheduler.totals().running == (to is None)
        return to

    def test_after_its_round_it_goes_to_the_faster_one(self) -> None:
        assert self.moves() == "b"

    def test_to_the_next_fastest_where_that_one_cannot_hold_it(self) -> None:
        small, mean = named("b", 1, max_length=64), named("c", 1)
        assert self.moves(b=small, c=mean) == "c"
        assert self.moves(b=small, c=mean, a_s=0.04) is None, "c is slower"

    def test_not_if_little_is_left(self) -> None:
        assert not self.moves(tokens=12)

    def test_not_to_one_that_cannot_hold_it(self) -> None:
        assert not self.moves(b=named("b", 1, max_length=64))
        assert not self.moves(free_blocks=5)

    def test_not_between_equal_workers(self) -> None:
        assert not self.moves(a_s=0.04)


class TestAFreeSlot:
    def crowded(self) -> Scheduler:
        """Return a core whose worker runs r00, has paused r01, whose KV it holds, and has not run r02."""
        scheduler = core("fcfs", list_factor=3)
        scheduler.step(0.0, [WorkerUp(named("w", 1), ()), *arrivals(3)])
        scheduler.step(1.0, [report(did("r01", 0, 1))])
        scheduler.step(2.0, [report(did("r00", 0, 1))])
        return scheduler

    def test_it_takes_what_has_no_kv_first_and_nothing_that_runs(self) -> None:
        scheduler = self.crowded()
        for name, takes in (("v", "r02"), ("x", "r01"), ("y", None)):
            commands = scheduler.step(3.0, [WorkerUp(named(name, 1), ())])
            assert [c.request_id for c in commands if isinstance(c, Lease)] == ([takes] if takes else [])
            scheduler.check()
        assert [worker_of(scheduler, f"r{i:02d}") for i in range(3)] == ["w", "x", "v"]

    def test_what_was_swapped_out_comes_after_what_has_nothing_and_before_what_is_on_the_device(self) -> None:
        scheduler = self.crowded()
        scheduler.step(2.5, arrivals(1, 3))
        out = (ResidencyChange("r02", 1, Residency.HOST),)
        scheduler.step(2.6, [report(residency=out)])
        scheduler.step(2.7, [EndRequested("r03", End.CANCELLED, "")])
        commands = scheduler.step(3.0, [WorkerUp(named("v", 1), ())])
        assert [c.request_id for c in commands if isinstance(c, Lease)] == ["r02"]

    def test_as_many_as_it_has_slots_from_the_longest_list(self) -> None:
        scheduler = core("fcfs", list_factor=4)
        scheduler.step(0.0, [WorkerUp(named("a", 1), ()), WorkerUp(named("b", 1), ()), *arrivals(8)])
        for i in (0, 2):
            scheduler.step(1.0, [EndRequested(f"r{i:02d}", End.CANCELLED, "")])
        assert [view.listed for view in scheduler.workers()] == [2, 4]
        commands = scheduler.step(2.0, [WorkerUp(named("c", 3), ())])
        assert leased(commands) == {"c": 3}  # type: ignore[arg-type]
        assert [view.listed for view in scheduler.workers()] == [2, 1, 3]

    def test_not_what_it_cannot_hold(self) -> None:
        scheduler = core("fcfs")
        scheduler.step(0.0, [WorkerUp(named("w", 1), ()), *arrivals(2)])
        assert leased(scheduler.step(1.0, [WorkerUp(named("v", 1, max_length=64), ())])) == {}  # type: ignore[arg-type]

    def looks(self, workers: int, why: str, monkeypatch: pytest.MonkeyPatch) -> int:
        """Return how many requests a report has compared with a worker. Each of as many workers has four requests that
        wait, and as many others have free slots for none of them.
        """
        scheduler, sizes = (
            core("fcfs"),
            dict.fromkeys(("max_length", "target_blocks", "draft_blocks"), 100_000),
        )
        more = {"prompt_tokens": 25_610, "max_tokens": 5} if why == "cached" else {}
        for number in range(workers):
            blocks = (
                b"".join(struct.pack("<Q", 1000 * number + block) for block in range(400)) if more else b""
            )
            scheduler.step(0.0, [WorkerUp(named(f"w{number}", 4, **sizes), (), blocks)])
            scheduler.step(0.0, arrivals(8, 8 * number, **more, prompt_blocks=blocks))
        assert {view.listed for view in scheduler.workers()} == {8}
        sizes["max_length"] = 64 if why == "too_long" else 100_000
        scheduler.step(1.0, [WorkerUp(named(f"v{number}", 4, **sizes), ()) for number in range(workers)])
        counted, holds = Counter[bool](), Worker.holds

        def count(worker: Worker, request: Request) -> bool:
            counted[True] += 1
            return holds(worker, request)

        monkeypatch.setattr(Worker, "holds", count)
        scheduler.step(2.0, [report(*(did(f"r{i:02d}", 0, 1) for i in range(4)), worker_id="w0")])
        monkeypatch.undo()
        assert {view.listed for view in scheduler.workers()} == {8, 0}
        return counted[True]

    @pytest.mark.parametrize("why", ["too_long", "cached"])
    def test_a_report_does_not_compare_all_workers_with_each_other(
        self, why: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        few, many = (self.looks(workers, why, monkeypatch) for workers in (16, 32))
        assert many <= 1.5 * few + 10

    def test_one_that_comes_looks_at_the_longest_lists_and_the_others_at_the_next_report(self) -> None:
        scheduler = core("fcfs", list_factor=4)
        scheduler.step(0.0, [WorkerUp(named(f"l{number:02d}", 1), ()) for number in range(MOST_COMPARED)])
        scheduler.step(0.0, arrivals(4 * MOST_COMPARED, 10))
        scheduler.step(0.0, [WorkerUp(named("w", 1, max_length=64), ())])
        scheduler.step(0.0, arrivals(2, prompt_tokens=10, max_tokens=20))
        for number in range(2 * MOST_COMPARED):
            scheduler.step(1.0, [WorkerUp(named(f"s{number:02d}", 1, max_length=20), ())])
        assert leased(scheduler.step(1.0, [WorkerUp(named("v", 1, max_length=64), ())])) == {}  # type: ignore[arg-type]
        commands = scheduler.step(2.0, [report(did("r00", 0, 1), worker_id="w")])
        assert leased(commands) == {"v": 1}  # type: ignore[arg-type]


class TestTheReservedShare:
    """The oldest two of four requests are on the list of a; b comes, and each of both has a share for one."""

    def moved(self, slots: int, running: int, listed: int = 4, free_blocks: int = 900) -> dict[str, str]:
        """Return why requests moved from a to b. The youngest of those on the list run."""
        scheduler = core("fcfs", reserved_share=True, list_factor=2)
        scheduler.step(0.0, [WorkerUp(named("a", slots), ()), *arrivals(listed)])
        if running:
            names = [f"r{i:02d}" for i in range(listed)][-running:]
            free = {"free_target_blocks": free_blocks, "free_draft_blocks": free_blocks}
            scheduler.step(1.0, [report(*(did(name, 0, 1) for name in names), worker_id="a", **free)])
        scheduler.step(2.0, [WorkerUp(named("b", slots), ())])
        scheduler.check()
        lines = {f"r{i:02d}": scheduler.explain(f"r{i:02d}", 2.0).story[-1] for i in range(listed)}  # type: ignore[union-attr]
        return {name: line.detail.partition(", ")[2] for name, line in lines.items() if line.what == "moved"}

    def test_those_that_wait_for_each_other_are_spread(self) -> None:
        assert self.moved(slots=2, running=2) == {
            "r00": "whose reserved share was free",
            "r01": "which had a free slot",
        }

    def test_not_where_one_of_them_gets_a_free_slot_in_the_next_round(self) -> None:
        assert "whose reserved share was free" not in self.moved(slots=2, running=0).values()

    def test_but_where_kv_is_short_a_free_slot_helps_none(self) -> None:
        assert self.moved(slots=2, running=1)["r01"] == "whose reserved share was free"
        assert self.moved(slots=2, running=1, free_blocks=100)["r00"] == "whose reserved share was free"

    def test_nor_on_a_list_that_is_not_longer_than_the_slots(self) -> None:
        assert self.moved(slots=4, running=2) == {}
        assert self.moved(slots=4, running=2, free_blocks=100) == {}, "no request waits for a slot"

    def test_nor_with_one_slot(self) -> None:
        assert "whose reserved share was free" not in self.moved(slots=1, running=1, listed=2).values()

    def test_an_old_one_that_comes_back_goes_where_the_share_is_free(self) -> None:
        scheduler = core("fcfs", reserved_share=True)
        scheduler.step(0.0, [WorkerUp(named("a", 2), ()), WorkerUp(named("b", 2), ()), *arrivals(4, 5)])
        assert [worker_of(scheduler, f"r{i:02d}") for i in range(5, 9)] == ["a", "b", "a", "b"]
        scheduler.step(1.0, [Recovered(request("old", 1), 0, 0, 0, 0, 0.0, 0, None, 0)])
        assert worker_of(scheduler, "old") == "b", "r05 has the share of a"
        scheduler.check()

    @pytest.mark.parametrize(("comes", "spread"), [("b", set()), ("bd", {"r02"})])
    def test_a_worker_keeps_as_many_as_its_share(self, comes: str, spread: set[str]) -> None:
        """The two oldest run on c, on whose account nothing can move. On a, the next one or two wait."""
        scheduler = core("fcfs", reserved_share=True)
        scheduler.step(0.0, [WorkerUp(named("c", 2), ()), *arrivals(2)])
        scheduler.step(1.0, [report(did("r00", 0, 1), did("r01", 0, 1), worker_id="c")])
        scheduler.step(2.0, [WorkerUp(named("a", 2), ()), *arrivals(6, 2)])
        scheduler.step(3.0, [report(did("r04", 0, 1), did("r06", 0, 1), worker_id="a")])
        assert {worker_of(scheduler, name) for name in ("r02", "r03", "r04", "r06")} == {"a"}
        scheduler.step(4.0, [WorkerUp(named(name, 2), ()) for name in comes])
        scheduler.check()
        stories = {f"r{i:02d}": scheduler.explain(f"r{i:02d}", 4.0).story for i in range(8)}  # type: ignore[union-attr]
        assert spread == {
            name
            for name, story in stories.items()
            if any(line.what == "moved" and "share was free" in line.detail for line in story)
        }
