"""The engine that keeps time."""

from __future__ import annotations

import pytest

from tests.worker.drive import finish_all
from tests.worker.test_fake import specs
from worker_svc.fake.engine import FakeEngine
from worker_svc.fake.paced import paced


class Clock:
    """A clock that moves by the cost of each read, and by sleeping."""

    def __init__(self, cost_s: float) -> None:
        self.now_s = 0.0
        self.cost_s = cost_s
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        self.now_s += self.cost_s
        return self.now_s

    def sleep(self, for_s: float) -> None:
        self.slept_s.append(for_s)
        self.now_s += for_s


def engine() -> FakeEngine:
    return FakeEngine(slots=2, acceptance=0.6, time_scale=0.0)


def test_a_round_takes_its_time_and_its_phases_are_as_much_longer() -> None:
    clock = Clock(cost_s=0.001)
    slow, plain = paced(engine(), 0.5, clock=clock, sleep=clock.sleep), engine()
    for each in (slow, plain):
        each.add(specs(1)[0])
    found, own = slow.round(["r0"]), plain.round(["r0"])

    assert clock.slept_s == [pytest.approx(0.5 - 0.001)]
    assert found.total_s == pytest.approx(0.5, abs=0.01)
    assert found.requests == own.requests
    assert own.prefill_s + own.verify_s + own.draft_s > 0
    for phase in ("draft_s", "verify_s", "prefill_s"):
        assert getattr(found, phase) == pytest.approx(getattr(own, phase) * found.total_s / own.total_s)


def test_a_round_that_is_slow_by_itself_is_left_alone() -> None:
    clock = Clock(cost_s=0.6)
    slow = paced(engine(), 0.5, clock=clock, sleep=clock.sleep)
    slow.add(specs(1)[0])

    slow.round(["r0"])

    assert clock.slept_s == []


def test_the_tokens_are_the_engines_own() -> None:
    clock = Clock(cost_s=0.0)
    slow = paced(engine(), 0.5, clock=clock, sleep=clock.sleep)

    assert finish_all(slow, specs(5))[0] == finish_all(engine(), specs(5))[0]


def test_context_tokens_take_their_own_time_which_is_that_of_the_prefill() -> None:
    clock = Clock(cost_s=0.0)
    slow = paced(engine(), 0.5, 0.01, clock=clock, sleep=clock.sleep)
    slow.add(specs(1)[0])
    first, second = slow.round(["r0"]), slow.round(["r0"])
    prefilled = first.requests[0].prefilled

    assert prefilled > 0
    assert first.prefill_s == pytest.approx(0.01 * prefilled)
    assert first.total_s == pytest.approx(0.5 + first.prefill_s)
    assert (second.prefill_s, second.total_s) == (0.0, pytest.approx(0.5))
