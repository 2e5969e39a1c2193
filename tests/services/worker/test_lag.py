"""The runner over an engine that returns the outcome of a round when the next one has begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laps_sd.contract.ends import End
from tests.services.worker.harness import Desk, entry, spec
from tests.services.worker.lagging import LaggingEngine
from worker_svc.engine.interface import OutOfBlocks, RoundResult
from worker_svc.runner.messages import Acknowledged, Dropped


def test_the_next_round_begins_before_the_report_of_the_one_before() -> None:
    desk = Desk(LaggingEngine())
    desk.give(spec("a"))
    desk.assign(entry("a"))
    desk.turns(1)
    assert (len(desk.engine.begun), len(desk.rounds)) == (1, 0)  # type: ignore[attr-defined]
    desk.turns(1)

    assert (len(desk.engine.begun), len(desk.rounds)) == (2, 1)  # type: ignore[attr-defined]


def test_the_text_is_whole_and_the_last_round_is_reported() -> None:
    desk = Desk(LaggingEngine())
    one, other = spec("a", max_tokens=33), spec("b", max_tokens=5)
    desk.give(one, other)
    desk.assign(entry("a"), entry("b"))
    desk.turn_until_idle()

    for each in (one, other):
        assert desk.tokens(each.request_id) == desk.engine.expected(each)[0]  # type: ignore[attr-defined]
    assert [report.number for report in desk.rounds] == list(range(1, len(desk.rounds) + 1))
    ends = [(name.request_id, name.finish) for one in desk.rounds for _, name in one.progress if name.finish]
    assert sorted(ends) == [("a", End.LENGTH), ("b", End.LENGTH)]
    assert all(report.result.requests for report in desk.rounds), "no report of nothing"


def test_a_request_that_is_dropped_in_flight_is_not_reported() -> None:
    desk = Desk(LaggingEngine())
    desk.give(spec("a"), spec("b"))
    desk.assign(entry("a"), entry("b"))
    desk.turns(1)
    desk.put(Dropped((("a", 1),)))
    desk.assign(entry("b"))
    desk.turns(2)

    assert desk.who() == [("b",), ("b",)]


def test_a_drop_of_the_last_request_in_flight_is_reported_as_free_blocks() -> None:
    desk = Desk(LaggingEngine(target_blocks=64))
    desk.give(spec("a", max_tokens=200))
    desk.assign(entry("a"))
    desk.turns(3)
    desk.put(Dropped((("a", 1),)))
    desk.turn_until_idle()

    assert [len(report.result.requests) for report in desk.rounds] == [1, 1, 0]
    assert desk.rounds[-1].result.free_target_blocks == 64


class Full(LaggingEngine):
    """An engine that has no blocks for one of its rounds."""

    def __init__(self, full_at: int, **options: Any) -> None:
        super().__init__(**options)
        self._left = full_at

    def round(self, run: Sequence[str]) -> RoundResult:
        self._left -= 1
        if self._left == 0:
            raise OutOfBlocks("full")
        return super().round(run)


@pytest.mark.parametrize(("max_tokens", "finish"), [(200, End.ERROR), (6, End.LENGTH)])
def test_an_end_outside_of_a_round_follows_what_was_in_flight(max_tokens: int, finish: End) -> None:
    desk = Desk(Full(full_at=3))
    desk.give(spec("a", max_tokens=max_tokens))
    desk.assign(entry("a"))
    desk.turn_until_idle()

    for report in desk.rounds:
        assert len({step.request_id for _, step in report.progress}) == len(report.progress)
    ends = [
        (step.position + len(step.tokens), step.finish) for one in desk.rounds for _, step in one.progress
    ]
    assert [end for end in ends if end[1]] == [(len(desk.tokens("a")), finish)]
    desk.put(Acknowledged(desk.rounds[-1].number))
    desk.turns(1)
    assert desk.runner.holds_nothing


def test_a_request_that_began_in_the_round_in_flight_makes_room_once_it_is_not_listed() -> None:
    desk = Desk(LaggingEngine(slots=1, target_blocks=9, draft_blocks=9))
    began, one = spec("began", prompt=80), spec("one", prompt=80)
    desk.give(began, one)
    desk.assign(entry("began"))
    desk.turns(1)
    desk.assign(entry("one"))
    desk.turn_until_idle()

    assert desk.tokens("one") == desk.engine.expected(one)[0]  # type: ignore[attr-defined]


def test_a_request_that_comes_again_under_a_newer_lease_begins_at_its_committed_tokens() -> None:
    desk = Desk(LaggingEngine())
    one = spec("a")
    desk.give(one)
    desk.assign(entry("a"))
    desk.turns(3)
    tokens = desk.tokens("a")
    desk.outcomes.clear()
    again = spec("a", committed=tokens[:2])
    desk.give(again, lease_epoch=2)
    desk.assign(entry("a", lease_epoch=2))
    desk.turn_until_idle()

    reported = [step for report in desk.rounds for epoch, step in report.progress if epoch == 2]
    assert reported[0].position == 2
    text = [*tokens[:2], *(token for step in reported for token in step.tokens)]
    assert tuple(text) == desk.engine.expected(one)[0]  # type: ignore[attr-defined]


def test_a_paused_request_keeps_what_was_in_flight() -> None:
    desk = Desk(LaggingEngine(slots=1))
    long, short = spec("long", max_tokens=60), spec("short", max_tokens=9)
    desk.give(long, short)
    desk.assign(entry("long", 10.0))
    desk.turns(3)
    desk.assign(entry("short", 1.0), entry("long", 10.0))
    desk.turn_until_idle()

    assert desk.tokens("long") == desk.engine.expected(long)[0]  # type: ignore[attr-defined]
    assert desk.tokens("short") == desk.engine.expected(short)[0]  # type: ignore[attr-defined]
    assert sum(report.preempted for report in desk.rounds) == 1


def test_without_acknowledgements_the_round_in_flight_is_reported_and_no_other_begins() -> None:
    desk = Desk(LaggingEngine(), max_unacknowledged_reports=2)
    desk.give(spec("a", max_tokens=200))
    desk.assign(entry("a"))
    desk.turns(10)
    begun = len(desk.engine.begun)  # type: ignore[attr-defined]

    assert begun == len(desk.rounds) == 3, "the one that was in flight comes after the bound"
    desk.put(Acknowledged(3))
    desk.turns(1)
    assert len(desk.engine.begun) == begun + 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("blocks", [9, 14, 40])
@settings(deadline=None)
@given(seed=st.integers(0, 2**32), lengths=st.lists(st.integers(1, 60), min_size=2, max_size=5))
def test_texts_are_whole_with_little_kv(blocks: int, seed: int, lengths: list[int]) -> None:
    desk = Desk(LaggingEngine(target_blocks=blocks, draft_blocks=blocks))
    specs = [spec(f"r{at}", max_tokens=length, seed=seed + at) for at, length in enumerate(lengths)]
    desk.give(*specs)
    for turn in range(200):
        order = specs[turn % len(specs) :] + specs[: turn % len(specs)]
        desk.assign(*(entry(one.request_id, float(at)) for at, one in enumerate(order)))
        desk.turns(1)
    desk.turn_until_idle()

    for one in specs:
        assert desk.tokens(one.request_id) == desk.engine.expected(one)[0]  # type: ignore[attr-defined]
