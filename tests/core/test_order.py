"""Position of a request: its order key, its place on a list, the reserved share."""

from __future__ import annotations

import pytest

from laps_sd.contract.choose import RESERVED_CYCLE_ROUNDS, ReserveClock, Residency, reserved_slots
from scheduler_svc.core.commands import Command, Commit, Lease, Rank, Release
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import Arrived, Recovered, WorkerUp
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.rank import AHEAD, MAX_LEVELS, pack_rank_class
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from tests.core.ranks import live, make
from tests.core.test_scheduler import W, core, did, report, request


class TestTheOrderKey:
    @pytest.mark.parametrize(
        ("residency", "counts"), [(Residency.NONE, True), (Residency.HOST, True), (Residency.DEVICE, False)]
    )
    def test_the_cost_to_resume_counts_unless_it_is_on_the_device(
        self, residency: Residency, counts: bool
    ) -> None:
        waiting = make(hint=100, residency=residency)
        rank = live("laps-sd", waiting)
        assert rank.resume_cost_s > 0
        cost = rank.index_s + (rank.resume_cost_s if counts else 0.0)
        assert waiting.order_key == (rank.rank_class, cost, "r")

    def test_the_record_and_people_are_told_the_same_rank(self) -> None:
        scheduler = core()
        commands = scheduler.step(1.0, [Arrived(request("a"))])
        rank, told = scheduler.rank_of("a"), scheduler.explain("a", 1.0)
        assert rank is not None and told is not None
        assert commands == [Rank("a", rank.level, told.index_s)]
        assert told.index_s == pytest.approx(rank.index_s + rank.resume_cost_s)
        assert scheduler.rank_of("b") is None

    def test_also_with_each_commit(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        for n in range(3):
            commands = scheduler.step(2.0 + n, [report(did("a", 3 * n, 3))])
            told = scheduler.explain("a", 2.0)
            standings = [command.standing for command in commands if isinstance(command, Commit)]
            assert told is not None
            assert [(s.level, s.score, s.rounds, s.attained_s, s.accepted) for s in standings] == [
                (told.level, told.index_s, told.rounds, told.attained_s, told.accepted)
            ]

    def test_the_story_of_one_from_the_record_begins_with_its_arrival(self) -> None:
        scheduler = core()
        scheduler.step(7.0, [Recovered(request("a"), 30, 10, 50, 20, 0.3, 1, None, 2)])
        told = scheduler.explain("a", 7.0)
        assert told is not None
        assert [(line.at_s, line.what) for line in told.story] == [(1.0, "arrived"), (7.0, "recovered")]
        assert told.story[1].detail == "from the record: 30 tokens, 10 rounds, 1 preemptions before"


def test_priority_is_above_the_turn_of_the_tenant_and_that_above_the_level() -> None:
    """Each has bits of its own in the class, of any priority."""
    places = [
        (pack_rank_class(priority, level) | ahead, (-priority, ahead, level))
        for priority in (-3, -2, -1, 0, 1, 2, 3)
        for ahead in (0, AHEAD)
        for level in range(MAX_LEVELS)
    ]
    assert sorted(places) == sorted(places, key=lambda place: place[1])
    assert len({rank_class for rank_class, _ in places}) == len(places)
    assert not any(pack_rank_class(priority, MAX_LEVELS - 1) & AHEAD for priority in range(-9, 9))


def test_whoever_waits_overtakes_a_list_only_by_ranks_of_the_same_age() -> None:
    """Rounds are ten times as cheap as expected: the longer request looks shorter than the rank of the other
    on the list."""
    settings = CoreSettings(reserved_share=False)
    scheduler = Scheduler(policy_named("srpt-length", settings), settings, Priors())
    lengths = {"a": 100, "b": 200, "c": 220}
    arrivals = [
        Arrived(request(name, number, expected_output_tokens=length))
        for number, (name, length) in enumerate(lengths.items())
    ]
    scheduler.step(1.0, [WorkerUp(W, ()), *arrivals])
    before = {entry.request_id: entry.index_s for entry in scheduler.queue(1.0, 3)}
    commands = scheduler.step(2.0, [report(did("a", 0, 1), draft_s=0.0015, verify_s=0.0015)])
    after = {entry.request_id: entry.index_s for entry in scheduler.queue(2.0, 3)}
    assert after["c"] < before["b"]
    assert list(after) == ["a", "b", "c"]
    assert not [command for command in commands if isinstance(command, Lease)]


class TestBehindTheEndOfAList:
    """Two fit on the list of this worker, and one more is allowed after them; requests that fall further are
    taken back."""

    def falling(self, reserved_share: bool, runs: bool) -> tuple[Scheduler, list[Command]]:
        """Return an old long request, and then shorter and shorter ones."""
        settings = CoreSettings(reserved_share=reserved_share)
        scheduler = Scheduler(policy_named("laps-sd", settings), settings, Priors())
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("old", expected_output_tokens=500))])
        if runs:
            scheduler.step(1.5, [report(did("old", 0, 1))])
        commands: list[Command] = []
        for i in range(6):
            shorter = request(f"s{i}", 2 + i, expected_output_tokens=60 - 9 * i)
            commands += scheduler.step(2.0 + i, [Arrived(shorter)])
        return scheduler, [command for command in commands if isinstance(command, Release)]

    def test_a_request_without_anything_there_is_taken_back(self) -> None:
        scheduler, released = self.falling(reserved_share=False, runs=False)
        assert Release("old", 1) in released
        assert scheduler.explain("old", 9.0).worker_id is None  # type: ignore[union-attr]

    def test_one_that_has_run_there_stays(self) -> None:
        scheduler, released = self.falling(reserved_share=False, runs=True)
        assert released
        assert Release("old", 1) not in released
        assert scheduler.explain("old", 9.0).worker_id == "w"  # type: ignore[union-attr]

    def test_one_that_may_use_the_reserved_share_stays(self) -> None:
        scheduler, released = self.falling(reserved_share=True, runs=False)
        assert released
        assert Release("old", 1) not in released
        assert scheduler.explain("old", 9.0).worker_id == "w"  # type: ignore[union-attr]


class TestTheReservedShare:
    def test_an_older_request_from_the_record_takes_its_place(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a", 5))])
        assert scheduler.explain("a", 1.0).reserved  # type: ignore[union-attr]
        older = request("b", 2)
        scheduler.step(2.0, [Recovered(older, 0, 0, 0, 0, 0.0, 0, None, 0)])
        assert scheduler.explain("b", 2.0).reserved  # type: ignore[union-attr]
        assert not scheduler.explain("a", 2.0).reserved  # type: ignore[union-attr]
        scheduler.check()

    def test_a_one_slot_worker_gives_it_no_more_than_its_slot(self) -> None:
        assert {reserved_slots(1, ReserveClock("", number)) for number in range(RESERVED_CYCLE_ROUNDS)} == {
            0,
            1,
        }
