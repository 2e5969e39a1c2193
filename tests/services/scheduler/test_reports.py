"""For any report of a worker, the core gets numbers that it can count with."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from laps_sd.v1 import worker_link_pb2 as worker_pb
from scheduler_svc.core.estimates.acceptance import MAX_POSITIONS
from scheduler_svc.wire.reports import (
    MAX_DRAFTED_PER_ROUND,
    MAX_DURATION_S,
    MAX_PREFILLED_PER_ROUND,
    round_reported,
)

COUNT = st.integers(0, 2**32 - 1)
COUNTS = st.lists(COUNT, max_size=100)
TIME = st.floats(allow_nan=True, allow_infinity=True)


@given(tested=COUNTS, accepted=COUNTS, drafted=COUNT, prefilled=COUNT, times=st.tuples(*[TIME] * 6))
@settings(max_examples=200, deadline=None)
def test_every_number_of_a_report_is_bounded(
    tested: list[int], accepted: list[int], drafted: int, prefilled: int, times: tuple[float, ...]
) -> None:
    names = ("draft_s", "verify_s", "prefill_s", "swap_s", "idle_s", "total_s")
    progress = worker_pb.RequestProgress(
        request_id="r",
        drafted=drafted,
        accepted=drafted,
        prefilled=prefilled,
        tested_by_position=tested,
        accepted_by_position=accepted,
    )
    report = worker_pb.RoundReport(progress=[progress], **dict(zip(names, times, strict=True)))  # type: ignore[arg-type]

    heard = round_reported("w", report)

    [one] = heard.progress
    assert one.accepted <= one.drafted <= MAX_DRAFTED_PER_ROUND
    assert one.prefilled <= MAX_PREFILLED_PER_ROUND
    assert len(one.accepted_by_position) <= len(one.tested_by_position) <= MAX_POSITIONS
    assert all(count <= MAX_DRAFTED_PER_ROUND for count in one.tested_by_position)
    for kept, compared in zip(one.accepted_by_position, one.tested_by_position, strict=False):
        assert 0 <= kept <= compared
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
        tested_by_position=[1, 1],
        accepted_by_position=[1, 0],
    )

    [one] = round_reported("w", worker_pb.RoundReport(progress=[progress], swap_s=0.5)).progress

    assert (one.tokens, one.drafted, one.accepted, one.prefilled) == ((7, 8), 4, 1, 12)
    assert (one.tested_by_position, one.accepted_by_position) == ((1, 1), (1, 0))
