"""The spans that a scheduler records for a request; `tests/system/test_traces.py` shows whole traces."""

from __future__ import annotations

from scheduler_svc.core.commands import StoryLine
from scheduler_svc.leader.tracing import pauses


def story(*lines: tuple[float, str, str]) -> list[StoryLine]:
    return [StoryLine(*line) for line in lines]


def test_a_pause_ends_when_the_request_goes_on_or_its_lease_ends() -> None:
    told = story((1, "started", ""), (2, "paused", "a"), (3, "resumed", ""), (4, "paused", "b"))

    assert list(pauses(told, 0, 9)) == [(2, 3, "a"), (4, 9, "b")]


def test_a_pause_whose_end_was_left_out_is_not_drawn_over_what_is_missing() -> None:
    told = story((1, "paused", "a"), (2, "left_out", "90 lines"), (8, "paused", "b"), (9, "resumed", ""))

    assert list(pauses(told, 0, 9)) == [(8, 9, "b")]
