"""For any report of a worker, the core gets numbers that it can count with."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laps_sd.contract.ends import End
from laps_sd.v1 import worker_link_pb2 as worker_pb
from scheduler_svc.core.events import Progress
from scheduler_svc.wire.checks import MAX_TOKEN_ID
from scheduler_svc.wire.reports import (
    MAX_DRAFTED_PER_ROUND,
    MAX_DURATION_S,
    MAX_PREFILLED_PER_ROUND,
    NOWHERE,
    round_reported,
)
from worker_svc.engine.interface import RequestRound, RoundResult, TokenLogprobs
from worker_svc.link.wire import round_report, without_columns
from worker_svc.runner.messages import Round

COUNT = st.integers(0, 2**32 - 1)
TIME = st.floats(allow_nan=True, allow_infinity=True)


@given(drafted=COUNT, accepted=COUNT, prefilled=COUNT, times=st.tuples(*[TIME] * 7))
@settings(max_examples=200, deadline=None)
def test_every_number_of_a_report_is_bounded(
    drafted: int, accepted: int, prefilled: int, times: tuple[float, ...]
) -> None:
    names = ("draft_s", "verify_s", "prefill_s", "swap_s", "idle_s", "total_s", "limit_s")
    progress = worker_pb.RequestProgress(
        request_id="r", drafted=drafted, accepted=accepted, prefilled=prefilled
    )
    report = worker_pb.RoundReport(progress=[progress], **dict(zip(names, times, strict=True)))  # type: ignore[arg-type]

    heard = round_reported("w", report)

    [one] = heard.progress
    assert one.accepted <= one.drafted <= MAX_DRAFTED_PER_ROUND
    assert one.prefilled <= MAX_PREFILLED_PER_ROUND
    for name in names:
        seconds = getattr(heard, name)
        assert math.isfinite(seconds) and 0 <= seconds <= MAX_DURATION_S


def test_what_makes_sense_arrives_as_it_was_said() -> None:
    progress = worker_pb.RequestProgress(
        request_id="r",
        token_ids=[7, 8],
        drafted=4,
        accepted=1,
        prefilled=12,
    )

    [one] = round_reported("w", worker_pb.RoundReport(progress=[progress], swap_s=0.5)).progress

    assert (one.tokens, one.drafted, one.accepted, one.prefilled) == ((7, 8), 4, 1, 12)


def in_columns(**columns: Any) -> worker_pb.RoundReport:
    """Return a report of two requests, with these columns instead of the right ones."""
    right: dict[str, Any] = {
        "request_ids": ["r1", "r2"],
        "lease_epochs": [1, 2],
        "positions": [5, 6],
        "token_counts": [2, 1],
        "token_ids": [7, 8, 9],
        "drafted": [4, 0],
        "accepted": [1, 0],
    }
    return worker_pb.RoundReport(plain=worker_pb.PlainProgress(**{**right, **columns}))


def test_columns_arrive_request_by_request() -> None:
    first, second = round_reported("w", in_columns()).progress

    assert first == Progress("r1", 1, 5, (7, 8), 4, 1, 0, None, 0, "")
    assert second == Progress("r2", 2, 6, (9,), 0, 0, 0, None, 0, "")


@pytest.mark.parametrize(
    "wrong",
    [
        {"positions": [5]},
        {"token_counts": [2, 1, 0]},
        {"token_counts": [2, 2]},
        {"token_counts": [2, 0]},
        {"token_counts": [2, 2**32 - 1]},
        {"token_ids": []},
        {"drafted": []},
        {"accepted": [1, 0, 0]},
    ],
)
def test_columns_that_do_not_fit_together_are_a_wrong_state_of_their_requests(wrong: dict[str, Any]) -> None:
    for one in round_reported("w", in_columns(**wrong)).progress:
        assert (one.position, one.tokens, one.drafted, one.rounds) == (NOWHERE, (), 0, 0)
    assert [one.request_id for one in round_reported("w", in_columns(**wrong)).progress] == ["r1", "r2"]


def test_a_token_that_is_none_is_a_wrong_state_of_its_request_alone() -> None:
    first, second = round_reported("w", in_columns(token_ids=[7, MAX_TOKEN_ID + 1, 9])).progress

    assert (first.position, first.tokens) == (NOWHERE, ())
    assert (second.position, second.tokens) == (6, (9,))


@pytest.mark.parametrize(
    ("drafted", "accepted", "counted"),
    [(2, 3, (2, 2)), (2**32 - 1, 2**32 - 1, (MAX_DRAFTED_PER_ROUND, MAX_DRAFTED_PER_ROUND))],
)
def test_no_more_draft_tokens_are_accepted_than_were_drafted(
    drafted: int, accepted: int, counted: tuple[int, int]
) -> None:
    first, second = round_reported("w", in_columns(drafted=[drafted, 0], accepted=[accepted, 0])).progress

    assert (first.drafted, first.accepted) == counted
    assert (second.drafted, second.accepted) == (0, 0)


def test_a_request_that_is_named_twice_counts_once() -> None:
    report = in_columns(request_ids=["r1", "r1"], lease_epochs=[1, 1])
    report.progress.add(request_id="r1", lease_epoch=1, position=5, token_ids=[3])
    report.progress.add(request_id="r1", lease_epoch=2, position=5, token_ids=[4])

    heard = round_reported("w", report)

    assert [(one.lease_epoch, one.tokens) for one in heard.progress] == [(1, (7, 8)), (2, (4,))]


@given(
    columns=st.fixed_dictionaries(
        {
            "request_ids": st.lists(st.sampled_from(["", "r1", "r2", "r3", "x" * 10_000]), max_size=4),
            "lease_epochs": st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=3),
            "positions": st.lists(COUNT, min_size=2, max_size=3),
            "token_counts": st.lists(st.integers(0, 3) | COUNT, min_size=2, max_size=3),
            "token_ids": st.lists(COUNT, max_size=6),
            "drafted": st.lists(st.integers(0, 3) | COUNT, min_size=2, max_size=3),
            "accepted": st.lists(st.integers(0, 3) | COUNT, min_size=2, max_size=3),
        }
    )
)
@settings(max_examples=300, deadline=None)
def test_every_number_in_columns_is_bounded(columns: dict[str, Any]) -> None:
    heard = round_reported("w", in_columns(**columns)).progress

    names = [(one.request_id, one.lease_epoch) for one in heard]
    assert len(set(names)) == len(names) <= len(columns["request_ids"])
    assert sum(len(one.tokens) for one in heard) <= len(columns["token_ids"])
    for one in heard:
        assert 0 <= one.position <= NOWHERE
        assert all(token <= MAX_TOKEN_ID for token in one.tokens)
        assert one.accepted <= one.drafted <= MAX_DRAFTED_PER_ROUND


@st.composite
def steps(draw: st.DrawFn, number: int) -> tuple[int, RequestRound]:
    """Return a lease epoch and what any engine reports of a request in a round; most have nothing but tokens."""
    drafted = draw(st.integers(0, 6) | st.integers(60, 70))
    accepted = draw(st.integers(0, drafted))
    step = RequestRound(
        f"r{number}",
        draw(st.integers(0, 1000)),
        tuple(draw(st.lists(st.integers(0, MAX_TOKEN_ID), min_size=1, max_size=5))),
        drafted,
        accepted,
    )
    more: dict[str, Any] = draw(
        st.sampled_from(
            [
                {},
                {},
                {},
                {"tokens": (), "prefilled": 3},
                {"prefilled": 3, "cached": 16},
                {"finish": End.STOP_SEQUENCE, "cut_characters": 2},
                {"tokens": (), "finish": End.ERROR, "error": "it broke"},
                {"predicted_remaining_tokens": 3.5},
                {"logprobs": tuple(TokenLogprobs(-0.5, ()) for _ in step.tokens)},
            ]
        )
    )
    return draw(st.integers(0, 2**64 - 1)), step._replace(**more)


@given(st.integers(0, 6).flatmap(lambda count: st.tuples(*map(steps, range(count)))))
@settings(max_examples=200, deadline=None)
def test_any_round_is_the_same_event_with_and_without_columns(
    rows: tuple[tuple[int, RequestRound], ...],
) -> None:
    done = tuple(step for _, step in rows)
    report = round_report(Round(3, RoundResult(done, 0.1, 0.2), list(rows), [], 0.0, 0.0, 0.0, 0))
    older = without_columns(report)
    newest, oldest = round_reported("w", report), round_reported("w", older)

    assert not older.HasField("plain")
    assert sorted(newest.progress, key=lambda one: one.request_id) == sorted(
        oldest.progress, key=lambda one: one.request_id
    )
    assert (newest.draft_s, newest.verify_s) == (oldest.draft_s, oldest.verify_s) == (0.1, 0.2)
    assert len(newest.progress) == len(rows)
    heard = {one.request_id: one for one in newest.progress}
    for lease_epoch, step in rows:
        one = heard[step.request_id]
        assert (one.lease_epoch, one.position, one.tokens) == (lease_epoch, step.position, step.tokens)
        assert (one.drafted, one.accepted, one.prefilled) == (step.drafted, step.accepted, step.prefilled)
        assert (one.end, one.cut_characters, one.error) == (
            step.finish,
            step.cut_characters,
            step.error or "",
        )
        assert one.predicted_remaining_tokens == step.predicted_remaining_tokens
    logprobs = {one.request_id: len(one.logprobs) for one in report.progress}
    cached = {one.request_id: one.cached for one in report.progress}
    for _, step in rows:
        assert logprobs.get(step.request_id, 0) == len(step.logprobs)
        assert cached.get(step.request_id, 0) == step.cached


def test_the_time_limit_of_a_round_arrives_with_what_it_left_undone() -> None:
    row = (1, RequestRound("r", 0, (), 0, 0, prefilled=64))
    result = RoundResult((row[1],), total_s=0.15, limit_s=0.2)
    event = round_reported("w", round_report(Round(1, result, [row], [], 0.0, 0.0, 0.0, 0)))
    assert (event.limit_s, event.total_s, event.prefilled) == (0.2, 0.15, 64)
