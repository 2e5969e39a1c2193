"""Weight of observations over time: each kind fades at its own pace, and none distorts a mean."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from scheduler_svc.core.estimates import acceptance, calibration, cost, lengths
from scheduler_svc.core.estimates.acceptance import AcceptanceStatistics, shrinkage
from scheduler_svc.core.estimates.calibration import GuessHistory
from scheduler_svc.core.estimates.cost import CostModel
from scheduler_svc.core.estimates.lengths import LengthTable


def rounds() -> tuple[Callable[[], None], Callable[[], float]]:
    learner = AcceptanceStatistics()
    return lambda: learner.observe_round(3), lambda: learner.rounds


def ended_requests() -> tuple[Callable[[], None], Callable[[], float]]:
    learner = AcceptanceStatistics()
    return lambda: learner.observe_end(20, 60, 200), lambda: learner.requests


def output_lengths() -> tuple[Callable[[], None], Callable[[], float]]:
    learner = LengthTable()
    return lambda: learner.observe(100), lambda: learner.weight


def lengths_in_bins() -> tuple[Callable[[], None], Callable[[], float]]:
    learner = LengthTable()
    return lambda: learner.observe(100), lambda: sum(learner.counts)


def cut_lengths() -> tuple[Callable[[], None], Callable[[], float]]:
    learner = LengthTable()
    return lambda: learner.observe(100, cut=True), lambda: sum(learner.cuts)


def guessed_lengths() -> tuple[Callable[[], None], Callable[[], float]]:
    learner = GuessHistory()
    return lambda: learner.observe(100, 110), lambda: learner.weight


def round_costs() -> tuple[Callable[[], None], Callable[[], float]]:
    learner = CostModel()
    return lambda: learner.observe_round(4, 20, 800, 0.03), lambda: learner.rounds


def swaps() -> tuple[Callable[[], None], Callable[[], float]]:
    learner = CostModel()
    return lambda: learner.observe_swap(1, 1e-4), lambda: learner.swap_tokens


LEARNERS = [
    (rounds, acceptance.FORGET_ROUNDS),
    (ended_requests, acceptance.FORGET_REQUESTS),
    (output_lengths, lengths.FORGET_REQUESTS),
    (lengths_in_bins, lengths.FORGET_REQUESTS),
    (cut_lengths, lengths.FORGET_REQUESTS),
    (guessed_lengths, calibration.GUESS_FORGET),
    (round_costs, cost.ROUND_FORGET),
    (swaps, cost.SWAP_FORGET),
]


@pytest.mark.parametrize(("learner", "memory"), LEARNERS, ids=[learner.__name__ for learner, _ in LEARNERS])
def test_after_as_many_as_are_remembered_the_first_counts_for_a_third(
    learner: Callable[[], tuple[Callable[[], None], Callable[[], float]]], memory: float
) -> None:
    """The weights are then a geometric series, which has reached 1 - 1/e of its limit."""
    observe, weight = learner()
    for _ in range(int(memory)):
        observe()
    assert weight() == pytest.approx(memory * (1 - 1 / math.e), rel=3e-3)


def test_the_prefills_that_are_assumed_fade_like_those_that_were_seen() -> None:
    model = CostModel()
    for _ in range(int(cost.PREFILL_FORGET)):
        model.observe_prefill(3, 6e-4)
    left, learnt = 1 / math.e, cost.PREFILL_FORGET * (1 - 1 / math.e)
    assert model.prefill_tokens == pytest.approx(left * cost.PREFILL_PRIOR_TOKENS + learnt * 3, rel=3e-3)
    assert model.prefill_s == pytest.approx(
        left * cost.PREFILL_PRIOR_TOKENS * cost.PREFILL_PRIOR_S + learnt * 6e-4, rel=3e-3
    )


class TestWhatDoesNotChangeHasItsMean:
    """Every sum fades like the weight that it is divided by."""

    def test_rounds(self) -> None:
        statistics = AcceptanceStatistics()
        for _ in range(20_000):
            statistics.observe_round(3)
        assert statistics.tokens / statistics.rounds == pytest.approx(3)

    def test_ended_requests(self) -> None:
        statistics = AcceptanceStatistics()
        for _ in range(500):
            statistics.observe_end(20, 60, 200)
        sums = (
            statistics.sum_n,
            statistics.sum_nm,
            statistics.sum_nm2,
            statistics.sum_within,
        )
        assert [each / statistics.requests for each in sums] == pytest.approx([20, 60, 60 * 3, 200 - 180])
        weights = [(1 - 1 / acceptance.FORGET_REQUESTS) ** age for age in range(500)]
        assert statistics.sum_n2 == pytest.approx(sum([(weight * 20) ** 2 for weight in weights]))

    def test_swaps(self) -> None:
        model = CostModel()
        for _ in range(200):
            model.observe_swap(50, 0.001)
        assert model.swap_s / model.swap_tokens == pytest.approx(0.001 / 50)

    def test_sums_of_rounds(self) -> None:
        """x·xᵀ and x·seconds, with x = (1, batch, tokens, context) in their units."""
        model = CostModel()
        for _ in range(2000):
            model.observe_round(4, 48, 8192, 0.01)
        x = (1.0, 4 / cost.BATCH_UNIT, 48 / cost.TOKEN_UNIT, 8192 / cost.CONTEXT_UNIT)
        squares = [x[i] * x[j] for i in range(4) for j in range(i, 4)]
        assert [each / model.rounds for each in model.squares] == pytest.approx(squares)
        assert [each / model.rounds for each in model.products] == pytest.approx([each * 0.01 for each in x])
        assert (model.batch, model.tokens) == pytest.approx((4, 48))


def test_the_first_rounds_count_in_full_for_the_usual_batch() -> None:
    model = CostModel()
    model.observe_round(6, 30, 0, 0.03)
    assert (model.batch, model.tokens) == (6, 30)
    model.observe_round(2, 10, 0, 0.03)
    assert (model.batch, model.tokens) == pytest.approx((4, 20), rel=1e-3)


class TestVariances:
    def test_requests_whose_rounds_are_all_alike_have_none_within(self) -> None:
        statistics = AcceptanceStatistics()
        for tokens in (2, 3, 4) * 4:
            statistics.observe_end(20, 20 * tokens, 20 * tokens * tokens)
        found = statistics.variances()
        assert found is not None
        assert found[0] == 0
        assert found[1] == pytest.approx(8 / 11, rel=0.05)

    def test_without_any_variance_the_class_says_it_all(self) -> None:
        assert shrinkage((0.0, 0.0)) == acceptance.MOST_SHRINKAGE
