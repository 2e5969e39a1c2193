"""The bar that `laps-sd explain` draws."""

from __future__ import annotations

from laps_sd.cli.timeline import spans, timeline
from laps_sd.v1.inference_pb2 import StoryLine


def story(*lines: tuple[float, str]) -> list[StoryLine]:
    return [StoryLine(at_s=at_s, what=what) for at_s, what in lines]


PREEMPTED = story(
    (0, "arrived"),
    (0.1, "leased"),
    (1, "started"),
    (1.5, "level"),
    (2, "paused"),
    (4, "resumed"),
    (5, "ended"),
)


def test_each_line_of_a_story_begins_a_state_or_changes_nothing() -> None:
    assert spans(PREEMPTED) == [(0, 1, "waiting"), (1, 2, "running"), (2, 4, "paused"), (4, 5, "running")]


def test_a_request_whose_worker_was_lost_waits_again() -> None:
    lost = story((0, "arrived"), (1, "started"), (2, "requeued"), (3, "leased"), (4, "started"), (6, "ended"))

    assert spans(lost) == [(0, 1, "waiting"), (1, 2, "running"), (2, 4, "waiting"), (4, 6, "running")]


def test_the_bar_has_a_cell_for_each_share_of_the_time() -> None:
    bar, sums = timeline(PREEMPTED, ended=True, width=10)

    assert bar == "0.000 s ░░██▒▒▒▒██| 5.000 s"
    assert sums == "░ waiting 1.000 s   █ running 2.000 s   ▒ paused 2.000 s"


def test_what_goes_on_is_open_at_the_end() -> None:
    (bar, _) = timeline(story((0, "arrived"), (1, "started"), (2, "level")), ended=False, width=4)

    assert bar == "0.000 s ░░██… 2.000 s"


def test_what_a_long_story_left_out_is_not_drawn_as_anything_else() -> None:
    long = story(
        (0, "arrived"), (1, "started"), (2, "left_out"), (6, "paused"), (8, "resumed"), (10, "ended")
    )

    assert timeline(long, ended=True, width=10) == [
        "0.000 s ░█····▒▒██| 10.000 s",
        "░ waiting 1.000 s   █ running 3.000 s   ▒ paused 2.000 s   · not recorded 4.000 s",
    ]


def test_what_goes_on_goes_on_until_now() -> None:
    waiting, told = timeline(story((0, "arrived")), ended=False, width=4, until_s=60)
    running = timeline(story((0, "arrived"), (1, "started")), ended=False, width=4, until_s=4)

    assert (waiting, told) == ("0.000 s ░░░░… 60.000 s", "░ waiting 60.000 s")
    assert running[0] == "0.000 s ░███… 4.000 s"


def test_what_has_ended_goes_on_no_longer() -> None:
    assert timeline(PREEMPTED, ended=True, width=10, until_s=9) == timeline(PREEMPTED, ended=True, width=10)


def test_where_no_time_has_passed_there_is_nothing_to_draw() -> None:
    assert timeline(story((0, "arrived")), ended=False, width=10) == []
    assert timeline([], ended=False, width=10) == []
    assert timeline(story((0, "arrived"), (0, "leased")), ended=False, width=10) == []
