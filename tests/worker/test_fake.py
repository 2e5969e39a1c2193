"""The engine without a model: its guarantees to all other tests."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.drive import everybody, finish_all, rotate
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.fake.engine import FakeCosts, FakeEngine
from worker_svc.fake.script import lognormal_lengths


def specs(count: int, max_tokens: int = 60) -> list[Specification]:
    return [
        Specification(f"r{n}", tuple(range(3, 6 + n % 30)), (), Sampling(0.8, seed=n), max_tokens)
        for n in range(count)
    ]


@given(
    slots=st.integers(1, 6),
    chunk=st.integers(40, 200),
    how=st.sampled_from(["keep", "swap", "evict"]),
    draft_len=st.integers(0, 6),
)
@settings(max_examples=25, deadline=None)
def test_the_text_is_known_in_advance(slots: int, chunk: int, how: str, draft_len: int) -> None:
    engine = FakeEngine(
        slots=slots,
        draft_len=draft_len,
        prefill_chunk=chunk,
        lengths=lognormal_lengths(20),
        acceptance=0.6,
        target_blocks=400,
    )
    output, last, _ = finish_all(engine, specs(12), rotate(how, 5))
    for spec in specs(12):
        assert (tuple(output[spec.request_id]), last[spec.request_id].finish) == engine.expected(spec)


def test_acceptance_has_the_asked_mean_and_differs_between_requests() -> None:
    """400 requests; the mean of Beta(0.68, 8) means within 0.03."""
    engine = FakeEngine(slots=50, acceptance=0.68, concentration=8.0, target_blocks=4000)
    _, _, reports = finish_all(engine, specs(400))
    by_request: dict[str, list[int]] = {}
    for report in reports:
        accepted, tested = by_request.setdefault(report.request_id, [0, 0])
        by_request[report.request_id] = [accepted + report.accepted, tested + report.tested]
    rates = [a / t for a, t in by_request.values()]
    assert statistics.mean(rates) == pytest.approx(0.68, abs=0.03)
    assert statistics.stdev(rates) > 0.12


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_acceptance_at_the_ends(mean: float) -> None:
    _, _, reports = finish_all(FakeEngine(acceptance=mean), specs(3))
    assert all(report.accepted == report.drafted * mean for report in reports)


def test_times_are_those_of_the_cost_model() -> None:
    slept: list[float] = []
    costs = FakeCosts(
        round_s=1.0,
        draft_step_s=0.5,
        verified_token_s=0.0,
        context_token_s=0.0,
        prefill_token_s=0.25,
        swap_token_s=0.0,
    )
    engine = FakeEngine(costs=costs, time_scale=0.5, sleep=slept.append, draft_len=2)
    engine.add(Specification("a", (1, 2, 3, 4), (), Sampling(), 20))
    first, second = engine.round(["a"]), engine.round(["a"])
    assert (first.prefill_s, first.verify_s, first.draft_s, first.total_s) == (1.0, 1.0, 0.0, 2.0)
    assert (second.prefill_s, second.draft_s, second.total_s) == (0.0, 1.0, 2.0)
    assert slept == [1.0, 1.0]


def test_no_draft_pool_no_drafts() -> None:
    engine = FakeEngine(draft_blocks=0)
    output, _, reports = finish_all(engine, specs(4), everybody)
    assert not any(report.drafted for report in reports)
    assert all(tuple(output[s.request_id]) == engine.expected(s)[0] for s in specs(4))
