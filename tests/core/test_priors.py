"""Online learning: it starts at sensible values, converges to the observations, forgets, and survives a
restart."""

from __future__ import annotations

import functools
import json
import math
import random
import re
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scheduler_svc.core.estimates import calibration as calibration_module
from scheduler_svc.core.estimates.acceptance import (
    DEFAULT_SHRINKAGE,
    DEFAULT_TOKENS_PER_ROUND,
    LEAST_SHRINKAGE,
    MOST_SHRINKAGE,
    AcceptanceStatistics,
    shrinkage,
    tokens_per_round,
)
from scheduler_svc.core.estimates.basis import Basis
from scheduler_svc.core.estimates.calibration import ASSUMED, Calibration, GuessHistory, GuessSource
from scheduler_svc.core.estimates.cost import ROUND_PRIOR, ROUND_PRIOR_WEIGHT, CostModel
from scheduler_svc.core.estimates.guesses import LEAST_MASS, MOST_CELLS, REACH, GuessedLengths, rounded_spread
from scheduler_svc.core.estimates.lengths import EDGES, SHAPE_PRIOR, SHAPE_WEIGHT, LengthTable, bounded
from scheduler_svc.core.estimates.priors import MAX_CLASSES, Priors
from scheduler_svc.core.estimates.sources import Guesses

MOST = 100_000


class TestTokensPerRound:
    def test_with_no_history(self) -> None:
        pace = Priors().tokens_per_round("", 0, 0)
        assert pace.mean == DEFAULT_TOKENS_PER_ROUND
        assert 0.1 < pace.spread < 0.5

    def test_shrinks_to_the_class_as_the_formula_says(self) -> None:
        assert tokens_per_round(3.0, 20, 1.0, 10, 50).mean == pytest.approx((20 * 3 + 50) / (20 + 10))

    def test_its_own_rounds_take_over(self) -> None:
        priors = Priors()
        assert priors.tokens_per_round("", 5, 25).mean < 3
        assert priors.tokens_per_round("", 500, 2500).mean > 4.8

    def test_uncertainty_falls_with_rounds(self) -> None:
        priors = Priors()
        spreads = [priors.tokens_per_round("", n, 2 * n).spread for n in (0, 10, 100, 1000)]
        assert spreads == sorted(spreads, reverse=True)
        assert spreads[-1] < 0.1

    def test_a_class_learns_its_mean_and_leaves_others_alone(self) -> None:
        priors = Priors()
        for _ in range(2000):
            priors.observe_tokens("code", 5)
            priors.observe_tokens("chat", 2)
        assert priors.mean_tokens_per_round("code") == pytest.approx(5, rel=0.1)
        assert priors.mean_tokens_per_round("chat") == pytest.approx(2, rel=0.1)
        assert 2 < priors.mean_tokens_per_round("unheard of") < 5

    def test_it_follows_a_change(self) -> None:
        statistics = AcceptanceStatistics()
        for tokens in [2] * 60_000 + [4] * 60_000:
            statistics.observe_round(tokens)
        assert statistics.mean(2.0, 200.0) > 3.85


class TestShrinkage:
    def test_with_no_history(self) -> None:
        assert shrinkage(None) == DEFAULT_SHRINKAGE

    def test_variances_need_some_requests_with_some_rounds(self) -> None:
        statistics = AcceptanceStatistics()
        for _ in range(50):
            statistics.observe_end(1, 3, 9)
        assert statistics.variances() is None
        statistics = AcceptanceStatistics()
        for _ in range(7):
            statistics.observe_end(20, 60, 200)
        assert statistics.variances() is None
        for _ in range(3):
            statistics.observe_end(20, 60, 200)
        assert statistics.variances() is not None

    @pytest.mark.parametrize(("within", "between"), [(1.0, 0.25), (2.0, 0.1), (0.5, 1.0)])
    def test_analysis_of_variance_finds_both(self, within: float, between: float) -> None:
        source = random.Random(7)
        statistics = AcceptanceStatistics()
        for _ in range(3000):
            centre = source.gauss(5, between**0.5)
            rounds = [source.gauss(centre, within**0.5) for _ in range(source.randint(5, 60))]
            statistics.observe_end(len(rounds), sum(rounds), sum(x * x for x in rounds))
        found = statistics.variances()
        assert found is not None
        assert found[0] == pytest.approx(within, rel=0.1)
        assert found[1] == pytest.approx(between, rel=0.3)

    def test_requests_of_very_different_length_are_weighed_as_the_textbook_says(self) -> None:
        groups = [[2 + i % 3 + j % 2 for j in range(5)] for i in range(11)]
        groups.append([3 + j % 2 for j in range(400)])
        statistics = AcceptanceStatistics()
        for group in groups:
            statistics.observe_end(len(group), sum(group), sum(x * x for x in group))
        n = sum(map(len, groups))
        grand = sum(map(sum, groups)) / n
        means = [sum(group) / len(group) for group in groups]
        within = sum((x - mean) ** 2 for group, mean in zip(groups, means, strict=True) for x in group)
        within /= n - len(groups)
        between = sum(len(group) * (mean - grand) ** 2 for group, mean in zip(groups, means, strict=True))
        typical = (n - sum(len(group) ** 2 for group in groups) / n) / (len(groups) - 1)
        between = (between / (len(groups) - 1) - within) / typical
        assert statistics.variances() == pytest.approx((within, between), rel=0.05)

    @pytest.mark.parametrize("longest", [0, 16_000])
    def test_one_very_long_request_changes_n0_little(self, longest: int) -> None:
        """It is like the others but for its length. It counts for less with each later one."""
        source = random.Random(7)
        statistics = AcceptanceStatistics()
        found = []
        for number in range(1200):
            centre = source.gauss(3, 0.5)
            count = longest if longest and number == 600 else source.randint(2, 20)
            rounds = [source.gauss(centre if count < 100 else 3, 1.0) for _ in range(count)]
            statistics.observe_end(len(rounds), sum(rounds), sum(x * x for x in rounds))
            if number in (599, 610, 650, 800, 1199):
                found.append(statistics.variances())
        for variances in found:
            assert 6 < shrinkage(variances) < 24, "12 by the variances of 1 and 0.25"

    def test_the_spread_that_is_left_counts_rounds_as_a_third(self) -> None:
        pace = tokens_per_round(3.0, 20, 1.5, 10, 50)
        assert pace.spread * pace.mean == pytest.approx(math.sqrt(3 * 1.5 / (20 + 10)))

    def test_n0_is_three_times_within_over_between(self) -> None:
        assert shrinkage((1.0, 0.15)) == pytest.approx(20)

    @pytest.mark.parametrize("within", [0.01, 0.5, 1.0, 9.0, 100.0])
    @pytest.mark.parametrize("between", [0.0, 1e-6, 0.01, 0.05, 0.5, 2.0, 100.0])
    def test_n0_is_that_ratio_within_its_limits(self, within: float, between: float) -> None:
        ratio = 3 * within / between if between else math.inf
        bounded = min(max(ratio, LEAST_SHRINKAGE), MOST_SHRINKAGE)
        assert shrinkage((within, between)) == pytest.approx(bounded)

    def test_the_mean_of_a_class_is_that_of_its_rounds_and_of_those_it_is_shrunk_to(self) -> None:
        statistics = AcceptanceStatistics()
        assert statistics.mean(4.0, 10.0) == 4.0
        statistics.observe_round(2)
        assert statistics.mean(4.0, 10.0) == pytest.approx((40 + 2) / 11)

    def test_a_class_has_its_own_variances_as_soon_as_it_has_enough_ends(self) -> None:
        """Until then those of all classes count; the spread of the pace shows both."""
        priors, of_all, of_own = Priors(), AcceptanceStatistics(), AcceptanceStatistics()

        def end(name: str, rounds: int, tokens: int, squares: int) -> None:
            priors.observe_acceptance(name, rounds, tokens, squares)
            of_all.observe_end(rounds, tokens, squares)

        def spread(name: str, statistics: AcceptanceStatistics) -> float:
            found = statistics.variances()
            assert found is not None
            mean = priors.mean_tokens_per_round(name)
            return math.sqrt(3 * found[0] / (shrinkage(found) + 10)) / mean

        for number in range(20):
            end("many", 20, 40 + number, 120 + 5 * number)
        for number in range(9):
            if number < 7:
                assert priors.tokens_per_round("few", 10, 20).spread == pytest.approx(
                    spread("few", of_all), rel=0.05
                )
            end("few", 30, 90 + 20 * number, 900 + 150 * number)
            of_own.observe_end(30, 90 + 20 * number, 900 + 150 * number)
        pace = priors.tokens_per_round("few", 10, round(10 * priors.mean_tokens_per_round("few")))
        assert pace.spread == pytest.approx(spread("few", of_own), rel=0.05)
        assert abs(spread("few", of_own) - spread("few", of_all)) > 0.1 * spread("few", of_all)

    def test_requests_that_are_all_alike_are_judged_by_their_class(self) -> None:
        assert shrinkage((1.0, 0.0)) == MOST_SHRINKAGE

    def test_requests_that_differ_widely_are_judged_by_themselves(self) -> None:
        assert shrinkage((0.1, 10.0)) == LEAST_SHRINKAGE


class TestLengths:
    def test_with_no_history_it_is_chat_like(self) -> None:
        left = LengthTable().left(0, MOST)
        assert left.mean == pytest.approx(150 * math.exp(0.5), rel=0.03)
        assert left.low == pytest.approx(150 * math.exp(-1.28), rel=0.1)
        assert left.high == pytest.approx(150 * math.exp(1.28), rel=0.1)

    def test_it_learns(self) -> None:
        priors = Priors()
        for i in range(400):
            priors.observe_length("short", 20 + i % 5, Guesses())
        left = priors.tokens_left("short", 0, MOST, Guesses())
        assert left.mean == pytest.approx(22, rel=0.25)
        assert priors.tokens_left("other", 0, MOST, Guesses()).mean == pytest.approx(22, rel=0.5)

    def test_given_what_was_emitted(self) -> None:
        """Half end at 10, half at 1000: a request past 50 has some 950 left, not the mean of 500."""
        table = LengthTable()
        for i in range(2000):
            table.observe(10 if i % 2 else 1000)
        table.rebuild(None)
        assert table.left(0, MOST).mean == pytest.approx(505, rel=0.1)
        assert table.left(50, MOST).mean == pytest.approx(950, rel=0.1)

    def test_the_limit_bounds_it(self) -> None:
        left = LengthTable().left(0, 40)
        assert left.high <= 40
        assert left.mean < 40
        assert LengthTable().left(39, 40).mean == 1
        at_its_limit = LengthTable().left(40, 40)
        assert (at_its_limit.low, at_its_limit.mean, at_its_limit.high) == (1, 1, 1)

    def test_an_unfinished_request_has_one_token_left_at_least(self) -> None:
        table = LengthTable()
        for _ in range(3000):
            table.observe(10)
        table.rebuild(None)
        assert table.left(9, MOST).low == 1

    @pytest.mark.parametrize("of_all", [[], [2000] * 60])
    def test_the_histogram_is_filled_up_by_a_lognormal_of_the_same_shape(self, of_all: list[int]) -> None:
        """Thirty requests of a lognormal whose mean and variance are those of the lengths seen and of two
        that are like all (without any: like those that are assumed)."""
        pool = LengthTable()
        for length in of_all:
            pool.observe(length)
        pool.rebuild(None)
        table = LengthTable()
        for length in [100] * 30 + [300] * 10:
            table.observe(length)
        table.rebuild(pool if of_all else None)

        def shape(counts: list[float], mean: float, variance: float) -> tuple[float, float]:
            middles = [math.log(max(1.0, (low + high) / 2)) for low, high in pairwise(EDGES)]
            weight = sum(counts) + SHAPE_PRIOR
            total = SHAPE_PRIOR * mean + sum(n * x for n, x in zip(counts, middles, strict=True))
            squares = sum(n * (x - total / weight) ** 2 for n, x in zip(counts, middles, strict=True))
            return total / weight, (
                squares + SHAPE_PRIOR * (variance + (mean - total / weight) ** 2)
            ) / weight

        like_all = (math.log(150), 1.0)
        if of_all:
            like_all = shape(pool.counts, *like_all)
        mean, variance = shape(table.counts, *like_all)
        normal = NormalDist(mean, math.sqrt(variance))
        below = [0.0, *(normal.cdf(math.log(edge)) for edge in EDGES[1:])]
        expected = [
            (n + SHAPE_WEIGHT * (after - before)) / (table.weight + SHAPE_WEIGHT)
            for n, (before, after) in zip(table.counts, pairwise(below), strict=True)
        ]
        assert list(table.masses) == pytest.approx(expected, abs=1e-9)

    @pytest.mark.parametrize(
        ("given", "most", "found"),
        [
            ((5.0, 2.0, 9.0), 20, (5.0, 2.0, 9.0)),
            ((0.2, 0.1, 0.3), 20, (1.0, 1.0, 1.0)),
            ((30.0, 25.0, 40.0), 20, (20.0, 20.0, 20.0)),
            ((5.0, 6.0, 4.0), 20, (5.0, 5.0, 5.0)),
            ((5.0, 0.5, 30.0), 20, (5.0, 1.0, 20.0)),
            ((5.0, 2.0, 9.0), 0, (1.0, 1.0, 1.0)),
        ],
    )
    def test_an_interval_holds_its_mean_between_one_token_and_the_limit(
        self, given: tuple[float, float, float], most: int, found: tuple[float, float, float]
    ) -> None:
        left = bounded(*given, most, Basis.CLASS)
        assert (left.mean, left.low, left.high, left.basis) == (*found, Basis.CLASS)

    @pytest.mark.parametrize(
        ("length", "emitted"), [(20_000, 4096), (20_000, 4097), (20_000, 15_000), (1_440_000, 1_380_000)]
    )
    def test_very_long_answers_too(self, length: int, emitted: int) -> None:
        """To the width of a bin, and up to the last one."""
        table = LengthTable()
        for _ in range(200):
            table.observe(length)
        table.rebuild(None)
        left = table.left(emitted, 10**9)
        assert left.mean == pytest.approx(length - emitted, abs=0.06 * length)
        assert emitted + left.low <= 1.1 * length and emitted + left.high >= length / 1.1
        assert left.low < left.mean < left.high

    def test_longer_than_any_histogram_half_of_its_length_so_far_is_left(self) -> None:
        """And the interval is a factor of ten either way: of such a length nothing is known."""
        left = LengthTable().left(4_000_000, 10**9)
        assert (left.mean, left.low, left.high) == (2e6, 2e5, 2e7)
        assert LengthTable().left(4_000_000, 4_000_100).mean == 100

    def test_longer_than_anything_seen(self) -> None:
        left = LengthTable().left(3_000_000, 9_000_000)
        assert left.mean == pytest.approx(1_500_000)
        assert (left.low, left.high) == (pytest.approx(150_000), 6_000_000)
        assert LengthTable().left(3_000_000, 90_000_000).high == pytest.approx(15_000_000)
        assert LengthTable().left(3_000_000, 3_000_010).mean == 10

    @pytest.mark.parametrize(("emitted", "most"), [(0, 100_000), (20, 300), (150, 100_000), (400, 900)])
    def test_it_is_what_remains_of_the_distribution(self, emitted: int, most: int) -> None:
        left = LengthTable().left(emitted, most)
        assert (left.mean, left.low, left.high) == pytest.approx(
            remaining_of_lognormal(math.log(150), 1.0, emitted, most), rel=0.04
        )

    def test_it_forgets(self) -> None:
        table = LengthTable()
        for length in [1000] * 2000 + [10] * 5000:
            table.observe(length)
        table.rebuild(None)
        assert table.left(0, MOST).mean < 40

    def test_sums_stay_small_however_long_it_runs(self) -> None:
        table = LengthTable()
        for i in range(25_000):
            table.observe(100 if i % 2 else 200)
        assert sum(table.counts) == pytest.approx(table.weight) == pytest.approx(1000)
        assert max(table._counts) < 1e12

    def test_built_anew_at_intervals_that_grow(self) -> None:
        table, built = LengthTable(), []
        for i in range(1000):
            table.observe(100)
            if table.stale:
                table.rebuild(None)
                built.append(i)
        assert built[:3] == [0, 1, 2]
        assert built[-1] - built[-2] > 20

    @given(st.lists(st.integers(1, 50_000), max_size=30), st.integers(0, 5000), st.integers(1, 5000))
    @settings(max_examples=60, deadline=None)
    def test_the_interval_holds_the_mean_inside_the_limit(
        self, seen: list[int], emitted: int, more: int
    ) -> None:
        table = LengthTable()
        for length in seen:
            table.observe(length)
        table.rebuild(None)
        left = table.left(emitted, emitted + more)
        assert 1 <= left.low <= left.mean <= left.high <= more


def remaining_of_lognormal(
    centre: float, spread: float, emitted: int, most: int
) -> tuple[float, float, float]:
    """Return mean, 10 % and 90 % of the rest of a length beyond `emitted`, cut off at `most`: added up in
    small steps."""
    z_from = (math.log(emitted) - centre) / spread if emitted else -9.0
    steps = 20_000
    width = (9.0 - z_from) / steps
    total = mean = 0.0
    shares: list[tuple[float, float]] = []
    for i in range(steps):
        z = z_from + (i + 0.5) * width
        share = math.exp(-z * z / 2) * width
        total += share
        mean += share * min(math.exp(centre + spread * z), most)
        shares.append((total, math.exp(centre + spread * z)))
    low, high = (next(length for sum_, length in shares if sum_ >= q * total) for q in (0.1, 0.9))
    return mean / total - emitted, low - emitted, min(high, most) - emitted


class TestGuesses:
    @pytest.mark.parametrize(
        ("guess", "emitted", "most"),
        [(500.0, 0, 100_000), (500.0, 200, 100_000), (500.0, 200, 600), (50.0, 300, 100_000)],
    )
    def test_with_lognormal_lengths_guess_and_class_are_weighed_by_their_precision(
        self, guess: float, emitted: int, most: int
    ) -> None:
        history = GuessHistory()
        for i in range(40):
            length = round(math.exp(5 + 0.8 * (-1) ** i))
            history.observe(length * math.exp(0.3 + 0.4 * (-1) ** (i // 2)), length)
        found = history.calibrated(ASSUMED)
        assert (found.slope, found.offset, math.sqrt(found.variance)) == (
            pytest.approx(1.0, abs=0.02),
            pytest.approx(0.3 * 40 / 48, rel=0.1),
            pytest.approx(math.sqrt((40 * 0.16 + 8 * 0.49) / 48), rel=0.05),
        )
        spread = rounded_spread(found.spread)
        trust, class_trust = spread**-2, 1.0
        # Guesses are distinguished to about an eighth of their error.
        cell = math.log(1.1) / math.ceil(8 * math.log(1.1) / spread)
        log_guess = round(found.log_length(guess) / cell) * cell
        centre = (trust * log_guess + class_trust * math.log(150)) / (trust + class_trust)
        left = GuessedLengths(LengthTable()).left(found, guess, emitted, most, Basis.CLIENT)
        mean, low, high = remaining_of_lognormal(centre, (trust + class_trust) ** -0.5, emitted, most)
        assert (left.mean, left.low, left.high) == pytest.approx((mean, low, high), rel=0.04)

    @pytest.mark.parametrize("error", [0.02, 0.3, 1.0])
    @given(
        lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=20),
        guess=st.integers(1, 4000),
        emitted=st.integers(0, 3000),
        more=st.integers(1, 3000),
    )
    @settings(max_examples=40, deadline=None)
    def test_it_is_what_remains_of_the_lengths_of_the_class_as_the_guess_makes_them_likely(
        self, error: float, lengths: list[int], guess: int, emitted: int, more: int
    ) -> None:
        """Compute Bayes' rule on a fine grid of ln(length), the histogram flat inside each of its bins.

        Lengths beyond `REACH` spreads are taken to be as likely as those at that distance. So the estimate is
        defined by Bayes' rule only where these lengths hardly count.
        """
        table, most = LengthTable(), emitted + more
        for length in lengths * 5:
            table.observe(length)
        table.rebuild(None)
        calibration = Calibration(1.0, 0.0, error**2)
        spread = rounded_spread(error)
        # Guesses are distinguished to about an eighth of their error.
        cell = math.log(1.1) / math.ceil(8 * math.log(1.1) / spread)
        centre = round(math.log(guess) / cell) * cell
        assume((math.log(emitted) if emitted else 0.0) < centre + 4 * spread)

        total = mean = beyond_reach = 0.0
        begin = max(math.log(emitted) if emitted else -math.log(1.1), centre - 8 * spread)
        edge = centre + REACH * spread
        heaviest = max((mass for i, mass in enumerate(table.masses) if i * math.log(1.1) > edge), default=0.0)
        for bin_, mass in enumerate(table.masses):
            low = max(begin, (bin_ - 1) * math.log(1.1))
            high = min(centre + 8 * spread, bin_ * math.log(1.1))
            for i in range(100 if high > low else 0):
                x = low + (i + 0.5) * (high - low) / 100
                share = (high - low) * (mass + LEAST_MASS) * math.exp(-(((x - centre) / spread) ** 2) / 2)
                total += share
                mean += share * min(most, math.exp(x))
                if x > edge:
                    beyond_reach += share * max(1.0, heaviest / (mass + LEAST_MASS)) * min(most, math.exp(x))
        expected = max(1.0, mean / total - emitted)
        assume(beyond_reach < 0.01 * expected * total)

        left = GuessedLengths(table).left(calibration, float(guess), emitted, most, Basis.CLIENT)
        assert left.mean == pytest.approx(expected, rel=0.03, abs=0.002 * emitted + 0.1)

    def test_far_beyond_the_guess_lengths_fall_off_like_an_exponential(self) -> None:
        """Its mean is that of the tail of a lognormal there, and the interval holds four fifths of it."""
        spread = rounded_spread(0.3)
        emitted = round(50 * math.exp(6 * spread))
        left = GuessedLengths(LengthTable()).left(
            Calibration(1.0, 0.0, 0.09), 50.0, emitted, 10**6, Basis.CLIENT
        )
        total = mean = 0.0
        for i in range(20_000):
            x = math.log(emitted) + (i + 0.5) * 1e-4
            share = math.exp(-(((x - math.log(50)) / spread) ** 2) / 2)
            total, mean = total + share, mean + share * (math.exp(x) - emitted)
        assert left.mean == pytest.approx(mean / total, rel=0.1)
        assert left.low == pytest.approx(-math.log(0.9) * left.mean, rel=0.1)
        assert left.high == pytest.approx(-math.log(0.1) * left.mean, rel=0.1)

    @pytest.mark.parametrize(("guess", "like"), [(1e-3, 1.0), (1e12, 1.1**150)])
    def test_a_guess_beyond_all_lengths_is_like_the_outermost_one(self, guess: float, like: float) -> None:
        guesses, line = GuessedLengths(LengthTable()), Calibration(1.0, 0.0, 0.09)
        assert guesses.left(line, guess, 0, 10**6, Basis.CLIENT) == guesses.left(
            line, like, 0, 10**6, Basis.CLIENT
        )

    def test_a_class_of_equal_lengths_is_known_after_some_dozens_whatever_is_guessed(self) -> None:
        priors = Priors()
        for i in range(60):
            priors.observe_length("", 400, Guesses(client=400 * math.exp(0.3 * (-1) ** i)))
        for guess in (400 * math.exp(-0.6), 400 * math.exp(0.6)):
            assert priors.tokens_left("", 0, MOST, Guesses(client=guess)).mean == pytest.approx(400, rel=0.1)

    def test_where_answers_of_a_class_are_short_or_long_a_guess_says_which(self) -> None:
        """A lognormal of these lengths has most of its mass between them, where there are no answers."""
        priors = Priors()
        for i in range(600):
            length = 400 if i % 2 else 80
            priors.observe_length("", length, Guesses(client=length * math.exp(0.3 * (-1) ** (i // 2))))
        for guess, length in ((100.0, 80), (300.0, 400), (600.0, 400)):
            assert priors.tokens_left("", 0, MOST, Guesses(client=guess)).mean == pytest.approx(
                length, rel=0.1
            )
        assert priors.tokens_left("", 300, MOST, Guesses(client=300.0)).mean == pytest.approx(100, rel=0.2)

    def test_a_few_requests_do_not_make_their_lengths_the_only_ones(self) -> None:
        priors = Priors()
        for length in (100, 200, 400):
            priors.observe_length("", length, Guesses(client=float(length)))
        assert priors.tokens_left("", 0, MOST, Guesses(client=1000.0)).mean > 500

    def test_what_clients_guess_does_not_grow_the_memory(self) -> None:
        guessed = GuessedLengths(LengthTable())
        means = [guessed.left(ASSUMED, 1.05**n, 0, MOST, Basis.CLIENT).mean for n in range(1000)]
        assert means == sorted(means)
        assert len(guessed._likely) <= MOST_CELLS

    def left(
        self, guess: float, emitted: int = 0, most: int = MOST, error: float | None = None, n: int = 300
    ) -> float:
        history = GuessHistory()
        if error is not None:
            for i in range(n):
                history.observe(100 * math.exp(error if i % 2 else -error), 100)
        return (
            GuessedLengths(LengthTable())
            .left(history.calibrated(ASSUMED), guess, emitted, most, Basis.CLIENT)
            .mean
        )

    def test_with_no_history_a_guess_is_half_believed(self) -> None:
        assert 150 < self.left(1000.0) < 1000

    def test_with_good_history_it_is_believed(self) -> None:
        assert self.left(1000.0, error=0.02, n=3000) == pytest.approx(1000, rel=0.1)

    def test_with_bad_history_hardly(self) -> None:
        assert self.left(1000.0, error=3.0) < 400

    def test_a_constant_bias_is_taken_out(self) -> None:
        history = GuessHistory()
        for _ in range(3000):
            history.observe(1000.0, 100)
        left = GuessedLengths(LengthTable()).left(history.calibrated(ASSUMED), 1000.0, 0, MOST, Basis.CLIENT)
        assert left.mean == pytest.approx(105, rel=0.15)

    def test_what_is_left_falls_as_tokens_come(self) -> None:
        means = [self.left(400.0, emitted, error=0.02, n=3000) for emitted in (0, 100, 200, 300)]
        assert means == sorted(means, reverse=True)
        assert means[2] == pytest.approx(200, rel=0.15)

    def test_beyond_the_guess_a_little_is_left(self) -> None:
        assert 1 <= self.left(100.0, 150, error=0.02, n=3000) < 40
        assert 1 <= self.left(100.0, 5000, error=0.02, n=3000) < 5000

    def test_the_limit_bounds_it(self) -> None:
        assert self.left(1000.0, 0, most=50) <= 50
        assert self.left(1000.0, 49, most=50) == 1

    def test_the_worker_and_the_client_are_believed_by_their_own_record(self) -> None:
        priors = Priors()
        for i in range(500):
            length = 50 + 10 * (i % 90)
            guesses = Guesses(client=50.0 if i % 2 else 5000.0)
            guesses.predicted(priors.prediction("", float(length), 0, MOST, guesses, ""))
            priors.observe_length("", length, guesses)
        asked = Guesses(client=700.0)
        by_client = priors.tokens_left("", 0, MOST, asked)
        asked.predicted(priors.prediction("", 700.0, 0, MOST, asked, ""))
        by_worker = priors.tokens_left("", 0, MOST, asked)
        assert abs(by_worker.mean - 700) < abs(by_client.mean - 700)
        assert by_worker.high / by_worker.low < by_client.high / by_client.low
        assert by_worker.basis is Basis.WORKER
        # Its guesses do not follow the lengths.
        assert by_client == priors.tokens_left("", 0, MOST, Guesses())

    @given(st.floats(1, 1e6), st.integers(0, 10_000), st.integers(1, 10_000), st.floats(0, 3))
    @settings(max_examples=200, deadline=None)
    def test_the_interval_holds_the_mean(self, guess: float, emitted: int, more: int, error: float) -> None:
        history = GuessHistory()
        for i in range(30):
            history.observe(100 * math.exp(error if i % 2 else -error), 100)
        found = history.calibrated(ASSUMED)
        left = GuessedLengths(LengthTable()).left(found, guess, emitted, emitted + more, Basis.CLIENT)
        assert 1 <= left.low <= left.mean <= left.high <= more


class TestCost:
    @staticmethod
    def true_s(batch: float, tokens: float, context: float) -> float:
        return 0.05 + 0.001 * batch + 0.0002 * tokens + 1e-6 * context

    def learnt(self, rounds: int = 3000) -> CostModel:
        source = random.Random(3)
        model = CostModel()
        for _ in range(rounds):
            batch = source.randint(1, 32)
            tokens = batch * source.randint(1, 9)
            context = batch * source.randint(100, 2000)
            seconds = self.true_s(batch, tokens, context) * source.uniform(0.9, 1.1)
            model.observe_round(batch, tokens, context, seconds)
        return model

    def test_it_starts_like_a_gpu_of_today(self) -> None:
        assert 0.01 < CostModel().round_s(1, 5, 500) < 0.1
        assert CostModel().prefill_share_s(1000) == pytest.approx(0.1)

    def test_it_learns_all_four_terms(self) -> None:
        model = self.learnt()
        for size in ((1, 1, 500), (1, 9, 500), (8, 40, 8000), (32, 32, 20_000), (32, 288, 20_000)):
            assert model.round_s(*size) == pytest.approx(self.true_s(*size), rel=0.05)

    def test_a_longer_draft_costs_more(self) -> None:
        """Priors are learnt with one draft length in each batch size, and separated where they differ."""
        model = CostModel()
        for i in range(2000):
            batch, draft = (4, 2) if i % 2 else (4, 8)
            tokens = batch * (draft + 1)
            model.observe_round(batch, tokens, 4000, self.true_s(batch, tokens, 4000))
        assert model.round_s(4, 36, 4000) - model.round_s(4, 12, 4000) == pytest.approx(24 * 0.0002, rel=0.05)

    def test_one_batch_size_is_enough_for_that_size(self) -> None:
        model = CostModel()
        for _ in range(200):
            model.observe_round(1, 5, 300, 0.004)
        assert model.share_s(300) == pytest.approx(0.004, rel=0.05)

    def test_a_sequence_is_charged_its_share_of_the_machine(self) -> None:
        """T(B)/B, not T(1)."""
        model = self.learnt()
        assert model.share_s(500) == pytest.approx(
            self.true_s(model.batch, model.tokens, 500 * model.batch) / model.batch, rel=0.06
        )
        assert model.share_s(500) < self.true_s(1, 5, 500) / 4

    def test_no_term_is_negative(self) -> None:
        model = CostModel()
        for batch in range(1, 33):
            model.observe_round(batch, 5 * batch, 100 * (33 - batch), 0.2 - 0.005 * batch)
        assert min(model.fit) >= 0
        assert model.share_s(10**6) > 0

    def test_without_rounds_the_fit_is_what_is_assumed(self) -> None:
        model = CostModel()
        model.refit()
        assert model.fit == pytest.approx(ROUND_PRIOR)

    @pytest.mark.parametrize("seconds", [0.05, 0.2])
    def test_one_round_is_shared_among_the_terms_by_the_weights_of_what_is_assumed(
        self, seconds: float
    ) -> None:
        """Least squares shrunk to a prior: what each term moves, times its weight, is its part of what is
        missing."""
        model = CostModel()
        model.observe_round(16, 96, 2048, seconds)
        parts = (1.0, 2.0, 3.0, 0.5)
        missing = seconds - sum(part * found for part, found in zip(parts, model.fit, strict=True))
        moved = [found - assumed for found, assumed in zip(model.fit, ROUND_PRIOR, strict=True)]
        assert [
            weight * move for weight, move in zip(ROUND_PRIOR_WEIGHT, moved, strict=True)
        ] == pytest.approx([part * missing for part in parts])

    @pytest.mark.parametrize("term", range(4))
    def test_one_that_would_be_negative_is_left_out_and_the_others_are_fitted(self, term: int) -> None:
        """A term that is left out counts nothing, and what remains still says what rounds cost."""
        model, source = CostModel(), random.Random(7)
        true = [0.2, 0.02, 0.02, 0.02]
        true[term] = -0.1 if term == 0 else -0.01
        for _ in range(600):
            b, t, c = (source.uniform(2, 5) for _ in range(3))
            seconds = true[0] + true[1] * b + true[2] * t + true[3] * c
            model.observe_round(round(8 * b), round(32 * t), round(4096 * c), seconds)
        model.refit()
        assert model.fit[term] == 0.0
        assert all(value > 0 for i, value in enumerate(model.fit) if i != term)
        middle = true[0] + 3.5 * sum(true[1:])
        assert model.round_s(28, 112, 14_336) == pytest.approx(middle, rel=0.05)

    def test_a_stall_counts_for_little(self) -> None:
        model = self.learnt(200)
        before = model.round_s(8, 40, 8000)
        model.observe_round(8, 40, 8000, 60.0)
        model.refit()
        assert model.round_s(8, 40, 8000) < 1.2 * before

    @pytest.mark.parametrize(("rounds", "bounded"), [(15, False), (30, True)])
    def test_once_rounds_are_known_it_counts_as_four_times_the_expected(
        self, rounds: int, bounded: bool
    ) -> None:
        stall, four_times = self.learnt(rounds), self.learnt(rounds)
        four_times.observe_round(8, 40, 8000, 4 * four_times.round_s(8, 40, 8000))
        stall.observe_round(8, 40, 8000, 60.0)
        assert (stall.products == pytest.approx(four_times.products)) is bounded

    def test_each_of_the_first_rounds_is_taken_up_at_once_and_then_every_sixteenth(self) -> None:
        model, fitted = CostModel(), []
        for number in range(1, 81):
            before = model.fit
            model.observe_round(4, 20, 800, 0.02 + 0.001 * number)
            if model.fit != before:
                fitted.append(number)
        assert fitted == [*range(1, 17), 32, 48, 64, 80]

    def test_a_time_that_is_none_teaches_nothing(self) -> None:
        model, before = self.learnt(50), self.learnt(50)
        model.observe_round(8, 40, 8000, 0.0)
        model.observe_prefill(100, 0.0)
        model.observe_swap(100, 0.0)
        assert model == before

    def test_it_recovers_from_a_machine_that_told_lies(self) -> None:
        model = self.learnt(200)
        for _ in range(20_000):
            model.observe_round(8, 40, 8000, 1e-300)
        for _ in range(20_000):
            model.observe_round(8, 40, 8000, 0.1)
        assert model.round_s(8, 40, 8000) == pytest.approx(0.1, rel=0.1)

    def test_terms_that_move_together_and_are_huge_break_nothing(self) -> None:
        """Rounding makes such a matrix singular or worse; the ridge bounds every pivot from below."""
        model = CostModel()
        for batch in (1, 65_536):
            for _ in range(1000):
                model.observe_round(batch, 4097 * batch, 2**24 * batch, 86_400.0)
        assert math.isfinite(model.share_s(10_000)) and model.share_s(10_000) > 0

    def test_prefill_and_swap(self) -> None:
        model = CostModel()
        for _ in range(100):
            model.observe_prefill(1000, 0.5)
        assert model.prefill_share_s(100) == pytest.approx(0.05, rel=0.02)
        assert model.swap_in_s(100) < model.prefill_share_s(100)

    def test_the_cost_of_swapping_is_learnt(self) -> None:
        model = CostModel()
        before = model.swap_in_s(100)
        for _ in range(100):
            model.observe_swap(1000, 0.5)
        assert before < model.prefill_share_s(100)
        assert model.swap_in_s(100) == pytest.approx(0.05, rel=0.02)
        for _ in range(2000):
            model.observe_swap(1000, 0.01)
        assert model.swap_in_s(100) == pytest.approx(0.001, rel=0.02)


class TestVersions:
    """A new version makes waiting requests rank again, so the version changes only with a reason."""

    def test_nothing_learnt_no_version(self) -> None:
        priors = Priors()
        priors.publish()
        assert priors.version == 0

    def test_another_length_table(self) -> None:
        priors = Priors()
        priors.observe_length("", 100, Guesses())
        priors.publish()
        priors.publish()
        assert priors.version == 1

    @pytest.mark.parametrize(("grows", "versions"), [(1.02, 0), (1.08, 1)])
    def test_a_cost_that_moved_by_one_twentieth(self, grows: float, versions: int) -> None:
        priors = Priors()
        for _ in range(500):
            priors.cost.observe_round(1, 5, 0, 0.1)
        priors.publish()
        before, version = priors.cost.share_s(0), priors.version
        while priors.cost.share_s(0) < grows * before:
            priors.cost.observe_round(1, 5, 0, 0.15)
        priors.publish()
        assert priors.version - version == versions

    def test_another_cost(self) -> None:
        priors = Priors()
        for _ in range(100):
            priors.cost.observe_round(1, 5, 100, 0.5)
        priors.publish()
        priors.cost.observe_round(1, 5, 100, 0.5)
        priors.publish()
        assert priors.version == 1


class TestTheRecord:
    def learnt(self) -> Priors:
        priors = Priors()
        source = random.Random(5)
        for _ in range(300):
            name = source.choice(["chat", "code"])
            length = source.randint(1, 500)
            rounds = max(1, length // 3)
            for _ in range(3):
                priors.observe_tokens(name, source.randint(1, 6))
            priors.observe_acceptance(name, rounds, length, 4 * length)
            priors.observe_length(name, length, Guesses(client=length * source.uniform(0.5, 2)))
            batch = source.randint(1, 8)
            priors.cost.observe_round(batch, 6 * batch, 500, source.uniform(0.02, 0.04))
            priors.cost.observe_prefill(100, 0.02)
            priors.cost.observe_swap(100, 0.01)
        return priors

    @functools.cached_property
    def kept(self) -> str:
        """What was learnt, in the form of the record."""
        return json.dumps(self.learnt().to_dict())

    def test_there_and_back(self) -> None:
        priors = self.learnt()
        again = Priors.from_dict(json.loads(json.dumps(priors.to_dict())))
        assert again.to_dict() == priors.to_dict()
        again.publish()
        assert again.version == priors.version
        for name in ("chat", "code", "other"):
            assert again.tokens_per_round(name, 10, 25).mean == pytest.approx(
                priors.tokens_per_round(name, 10, 25).mean, rel=0.01
            )
            mine, theirs = (
                priors.tokens_left(name, 20, 900, Guesses(client=80.0)),
                again.tokens_left(name, 20, 900, Guesses(client=80.0)),
            )
            assert theirs.basis == mine.basis
            assert theirs.mean == pytest.approx(mine.mean, rel=0.1)  # the tables are built again
            mine, theirs = (
                priors.tokens_left(name, 20, 900, Guesses()),
                again.tokens_left(name, 20, 900, Guesses()),
            )
            assert theirs.basis == mine.basis
            assert theirs.mean == pytest.approx(mine.mean, rel=0.1)
        assert again.cost == priors.cost

    @pytest.mark.parametrize("data", [{"format": 99, "version": 7}, {}])
    def test_another_format_is_refused(self, data: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="another version of LAPS-SD"):
            Priors.from_dict(data)

    @pytest.mark.parametrize(
        ("place", "value", "problem"),
        [
            (
                ("all", "acceptance", "tokens"),
                math.nan,
                "all must be a number from -1e+30 to 1e+30, got nan",
            ),
            (
                ("all", "length_counts", "40"),
                -3.0,
                "all.length_counts must be a number from -1e-06 to 2000, got -3",
            ),
            (
                ("all", "length_counts", "40"),
                1e9,
                "all.length_counts must be a number from -1e-06 to 2000, got 1000000000",
            ),
            (("cost", "batch"), 0.0, "cost.batch must be a number from 1e-09"),
            (("cost", "fit"), [0.1], "cost.fit must have 4 to 4 entries, got 1"),
            (("classes",), {str(n): {} for n in range(257)}, "classes must have 0 to 256 entries, got 257"),
            (
                ("hints", "everyone"),
                [-1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
                "hints must be a number from 0 to 600, got -1",
            ),
            (
                ("prompts", "everyone"),
                [1e9, 0.0, 0.5],
                "prompts.everyone.fresh must be a number from -1000 to 1000, got 1",
            ),
            (
                ("prompts", "classes"),
                {"chat": [0.0, 1e9, 0.5]},
                "prompts.classes['chat'].warm must be a number from -1000 to 1000, got 1",
            ),
            (
                ("prompts", "tenants"),
                {"acme": [0.0, 0.0, 2.0]},
                "prompts.tenants['acme'].variance must be a number from 0 to 1, got 2",
            ),
            (("cost",), {}, "what was learnt is damaged: KeyError"),
        ],
    )
    def test_what_no_scheduler_can_have_learnt_is_refused(
        self, place: tuple[str, ...], value: Any, problem: str
    ) -> None:
        data = json.loads(self.kept)
        inner = data
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value

        with pytest.raises(ValueError, match=re.escape(problem)):
            Priors.from_dict(data)

    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def test_whatever_number_is_damaged_they_are_refused_or_serve(self, data: st.DataObject) -> None:
        kept = json.loads(self.kept)
        inner: Any = kept
        while True:
            keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(inner[key], dict | list) or not inner[key]:
                break
            inner = inner[key]
        wrong = [math.nan, math.inf, -math.inf, -1, -1e300, 1e300, 1e18, 0, 2**70, None, True, "x", [], {}]
        inner[key] = data.draw(st.sampled_from(wrong) | st.floats(-1e3, 1e6))
        try:
            priors = Priors.from_dict(kept)
        except ValueError:
            return
        guesses = Guesses(client=80.0, prompt=90.0)
        guesses.predicted(priors.prediction("chat", 50.0, 10, 900, guesses, "t"))
        for name in ("chat", "other"):
            priors.observe_tokens(name, 3, "t")
            priors.observe_acceptance(name, 3, 9, 27, "t")
            priors.observe_length(name, 90, guesses, "t")
            pace = priors.tokens_per_round(name, 10, 25)
            left = priors.tokens_left(name, 20, 900, guesses, "t")
            numbers = [pace.mean, pace.spread, left.mean, left.low, left.high, priors.cost.share_s(100)]
            assert all(math.isfinite(one) for one in numbers), numbers
            assert 1 <= left.low <= left.mean <= left.high <= 880
        priors.cost.observe_round(3, 12, 500, 0.02)
        priors.publish()
        json.dumps(priors.to_dict(), allow_nan=False)

    def test_a_shard_with_every_class_stays_small(self) -> None:
        priors = Priors()
        for i in range(MAX_CLASSES):
            priors.observe_tokens(f"class {i}", 6)
        assert len(json.dumps(priors.to_dict())) < 2_000_000

    def test_the_number_of_calibrations_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calibration_module, "MOST_LINES", 3)
        source, kept = GuessSource(), []
        for i in range(5):
            source.line(f"tenant {i}", f"class {i}")
            source.line(f"tenant {i}", f"class {i}")
            kept.append(len(source._of_pair))
        assert kept == [1, 2, 3, 1, 2]

    def test_the_number_of_classes_is_bounded(self) -> None:
        priors = Priors()
        for i in range(MAX_CLASSES + 50):
            priors.observe_length(f"class {i}", 10, Guesses())
            priors.observe_tokens(f"class {i}", 3)
        assert len(priors.to_dict()["classes"]) == MAX_CLASSES
        assert priors.tokens_per_round(f"class {MAX_CLASSES + 1}", 0, 0).mean > 2


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_no_sequence_of_observations_makes_an_estimate_that_is_no_estimate(data: st.DataObject) -> None:
    """Anything that passes `scheduler_svc.wire.reports`: counts and times at their limits, in any order."""
    priors = Priors()
    seconds = st.sampled_from([0.0, 1e-300, 5e-324, 1e-6, 0.03, 86_400.0]) | st.floats(0, 86_400.0)
    counts = st.sampled_from([1, 2, 4096]) | st.integers(1, 4096)
    contexts = st.sampled_from([1, 1000, 2**24]) | st.integers(1, 2**24)
    for _ in range(data.draw(st.integers(0, 12))):
        times = data.draw(st.sampled_from([1, 3, 40]))
        match data.draw(st.integers(0, 5)):
            case 0:
                batch, drafted, context = data.draw(counts), data.draw(counts), data.draw(contexts)
                size, lasted = (batch, batch * drafted, context), data.draw(seconds)
                for _ in range(times):
                    priors.cost.observe_round(*size, lasted)
            case 1:
                tokens, lasted = data.draw(contexts), data.draw(seconds)
                for _ in range(times):
                    priors.cost.observe_prefill(tokens, lasted)
            case 2:
                tokens, lasted = data.draw(contexts), data.draw(seconds)
                for _ in range(times):
                    priors.cost.observe_swap(tokens, lasted)
            case 3:
                tokens = data.draw(counts)
                for _ in range(times):
                    priors.observe_tokens("a", tokens)
            case 4:
                rounds, gained = data.draw(counts), data.draw(counts)
                for _ in range(times):
                    priors.observe_acceptance("a", rounds, rounds * gained, rounds * gained * gained)
            case _:
                length = data.draw(contexts)
                guess = data.draw(st.none() | st.floats(1, 3.5e38))
                cut = data.draw(st.booleans())
                for _ in range(min(times, 5)):
                    guesses = Guesses(client=guess, prompt=guess)
                    if guess is not None:
                        at = data.draw(contexts)
                        guesses.predicted(priors.prediction("a", guess, at, 2**20, guesses, ""))
                    priors.observe_length("a", length, guesses, cut=cut)
    priors = data.draw(st.sampled_from([priors, Priors.from_dict(json.loads(json.dumps(priors.to_dict())))]))
    emitted, more = data.draw(st.integers(0, 2**24)), data.draw(st.integers(1, 2**24))
    guess = data.draw(st.none() | st.floats(1, 3.5e38))
    for name in ("a", "b"):
        pace = priors.tokens_per_round(name, data.draw(counts), emitted)
        left = priors.tokens_left(name, emitted, emitted + more, Guesses(client=guess))
        estimates = [
            *(pace.mean, left.mean, left.low, left.high),
            priors.cost.round_s(1, 5, 100),
            priors.cost.share_s(emitted),
            priors.cost.prefill_share_s(1),
            priors.cost.swap_in_s(1),
        ]
        assert all(math.isfinite(value) and value > 0 for value in estimates), estimates
        assert math.isfinite(pace.spread) and pace.spread >= 0  # 0: all requests so far were alike


class TestWorkAtFullBatches:
    def half_empty(self) -> CostModel:
        """Return batches of 2 to 4, of workers with 16 slots; a round is 24 ms and 2 ms for each sequence."""
        model = CostModel()
        rng = random.Random(1)
        for _ in range(2000):
            batch = rng.choice((2, 3, 4))
            model.observe_round(batch, 6 * batch, 500 * batch, 0.024 + 0.002 * batch)
        return model

    def test_the_fixed_part_of_a_round_is_shared_by_all_slots(self) -> None:
        model = self.half_empty()

        typical_s = model.share_s(500)
        assert typical_s == pytest.approx(0.024 / 3 + 0.002, rel=0.1)
        assert typical_s * model.full_share(16) == pytest.approx(0.024 / 16 + 0.002, rel=0.1)

    def test_what_contexts_cost_is_not_shared(self) -> None:
        model, rng = CostModel(), random.Random(1)
        for _ in range(2000):
            batch, context = rng.choice((2, 3, 4)), rng.choice((1000, 3000))
            model.observe_round(batch, 6 * batch, context * batch, 0.024 + (0.002 + 1e-5 * context) * batch)
        share = (0.024 / 16 + 0.002 + 0.02) / (0.024 / 3 + 0.002 + 0.02)
        assert model.full_share(16) == pytest.approx(share, rel=0.03)

    def test_where_batches_are_full_nothing_changes(self) -> None:
        model = self.half_empty()

        assert model.full_share(model.batch) == 1.0
        assert model.full_share(1) == 1.0

    def test_nothing_seen_yet_is_no_division_by_nothing(self) -> None:
        assert 0.0 < CostModel().full_share(64) <= 1.0
