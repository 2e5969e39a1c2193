"""The rate at which work arrives."""

from __future__ import annotations

import pytest

from scheduler_svc.core.state.arriving import DECAY_S, LEAST_AGE_S, ArrivingWork


def steady(per_s: float, until_s: float, *, every_s: float = 0.5) -> ArrivingWork:
    work = ArrivingWork()
    for step in range(int(until_s / every_s)):
        work.add(1000.0 + step * every_s, per_s * every_s)
    return work


def test_nothing_arrives_before_the_first_request() -> None:
    assert ArrivingWork().per_s(0.0) == 0.0


@pytest.mark.parametrize("until_s", [60.0, 300.0, 3000.0])
def test_a_steady_rate_is_known_after_a_short_time(until_s: float) -> None:
    assert steady(3.0, until_s).per_s(1000.0 + until_s) == pytest.approx(3.0, rel=0.02)


def test_the_first_requests_are_not_taken_for_a_steady_load() -> None:
    work = ArrivingWork()
    work.add(1000.0, 6.0)

    assert work.per_s(1000.0) <= 6.0 / LEAST_AGE_S * 1.15


def test_it_follows_a_change_and_falls_to_nothing() -> None:
    work = steady(2.0, 1000.0)

    after_one = work.per_s(2000.0 + DECAY_S)
    assert after_one == pytest.approx(2.0 / 2.71828, rel=0.03)
    assert work.per_s(2000.0 + 30 * DECAY_S) < 1e-9


def test_a_clock_that_goes_back_does_no_harm() -> None:
    work = steady(2.0, 1000.0)
    before = work.per_s(2000.0)

    work.add(1500.0, 0.0)

    assert work.per_s(2000.0) == pytest.approx(before)
