"""Requests that their limit cut: they say that a length is longer than the limit, and nothing else."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laps_sd.contract.ends import End
from scheduler_svc.core.estimates.calibration import ASSUMED, Calibration
from scheduler_svc.core.estimates.errors import Moment
from scheduler_svc.core.estimates.lengths import BINS, EDGES, SHAPE_WEIGHT, LengthTable, chance_above
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.estimates.sources import Guesses
from scheduler_svc.core.events import Arrived, WorkerUp
from tests.core.test_scheduler import W, core, did, report, request

MOST = 100_000
SIGMA = 0.5
"""True error of the guesses here: standard deviation of ln(guess/length)."""


def drawn(count: int, median: float, sigma: float, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [max(1, round(rng.lognormvariate(math.log(median), sigma))) for _ in range(count)]


def limited(lengths: list[int], limit: int, share: float = 1.0) -> LengthTable:
    """Return the table of these lengths where this share of the requests has a limit."""
    rng, table = random.Random(2), LengthTable()
    for length in lengths:
        cut = rng.random() < share and length > limit
        table.observe(limit if cut else length, cut=cut)
    table.rebuild(None)
    return table


def beyond(table: LengthTable, edge: int) -> float:
    """Return the share of the lengths beyond an edge of the bins."""
    return sum(table.masses[edge:])


def above(table: LengthTable, length: float) -> float:
    """Return the share of the table's lognormal that is longer."""
    return chance_above((math.log(length) - table._log_mean) / math.sqrt(table._log_variance))


class TestOneTable:
    def test_a_cut_request_counts_as_at_risk_up_to_its_cut_and_as_no_end(self) -> None:
        """The estimate of Kaplan and Meier: the product of those that lived through each bin, among those that
        were in it. With so many requests the shape that fills the histogram up does not count."""
        ends = {20: 4e6, 30: 3e6, 40: 2e6, 50: 1e6}
        cuts = {25: 5e6, 30: 2e6, 45: 1e6}
        table = LengthTable()
        table.restore([ends.get(i, 0.0) for i in range(BINS)], [cuts.get(i, 0.0) for i in range(BINS)])
        table.rebuild(None)
        left = 1.0
        for bin_ in sorted(ends):
            at_risk = sum(n for i, n in ends.items() if i >= bin_) + sum(
                n for i, n in cuts.items() if i > bin_
            )
            assert beyond(table, bin_) == pytest.approx(left, rel=1e-4)
            left *= 1 - ends[bin_] / at_risk
            assert beyond(table, bin_ + 1) == pytest.approx(left, abs=1e-4)

    def test_beyond_the_longest_cut_lengths_follow_the_shape(self) -> None:
        table = limited(drawn(2000, 150, 1.0), limit=100)
        edge = next(i for i, length in enumerate(EDGES) if length > 110)
        for further in (150, 300, 600):
            i = next(i for i, length in enumerate(EDGES) if length > further)
            expected = above(table, EDGES[i]) / above(table, EDGES[edge])
            assert beyond(table, i) / beyond(table, edge) == pytest.approx(expected)
            assert expected == pytest.approx(
                chance_above(math.log(EDGES[i] / 150)) / chance_above(math.log(EDGES[edge] / 150)), rel=0.25
            )

    @pytest.mark.parametrize("part", [0.0, 0.25, 1.0])
    def test_a_cut_inside_a_bin_is_shared_between_its_edges(self, part: float) -> None:
        bin_ = 80
        table = LengthTable()
        length = EDGES[bin_] + part * (EDGES[bin_ + 1] - EDGES[bin_])
        table.observe(round(length), cut=True)
        cuts = table.cuts
        assert sum(i * count for i, count in enumerate(cuts)) == pytest.approx(bin_ + part, abs=0.01)
        assert sum(cuts[bin_ - 1 : bin_ + 2]) == pytest.approx(sum(cuts)) == pytest.approx(1.0)
        assert sum(table.counts) == 0

    @pytest.mark.parametrize("limit", [33, 34, 35, 36, 37])
    def test_limits_between_two_edges_are_where_they_are(self, limit: int) -> None:
        """Lengths are exponential, so that the hazard is the same in all bins: 1 of 50 per token."""
        rng, table = random.Random(4), LengthTable()
        for _ in range(4000):
            length = math.ceil(rng.expovariate(1 / 50))
            table.observe(min(length, limit), cut=length > limit)
        table.rebuild(None)
        # The true one, of lengths spread evenly in their bins.
        assert table.left(0, limit).mean == pytest.approx(50 * (1 - math.exp(-limit / 50)), rel=0.03)

    @pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
    def test_the_mean_is_that_of_uncut_requests(self, share: float) -> None:
        lengths = drawn(3000, 150, 1.0)
        cut, uncut = limited(lengths, 32, share), limited(lengths, MOST)
        for emitted, most in ((0, MOST), (0, 256), (20, MOST), (60, MOST), (300, 2000)):
            expected = uncut.left(emitted, most).mean
            assert cut.left(emitted, most).mean == pytest.approx(expected, rel=0.1)

    @pytest.mark.parametrize(("median", "sigma"), [(150, 1.0), (600, 0.5), (30, 0.7)])
    @pytest.mark.parametrize(("limit", "error"), [(2, 0.1), (1, 0.25)])
    def test_where_all_requests_have_the_same_limit_the_shape_says_what_they_would_have_been(
        self, median: int, sigma: float, limit: int, error: float
    ) -> None:
        """With the median as their limit half of them are cut."""
        table = limited(drawn(3000, median, sigma), limit * median)
        assert table.left(0, MOST).mean == pytest.approx(median * math.exp(sigma**2 / 2), rel=error)

    @pytest.mark.parametrize("count", [3, 50, 5000])
    def test_a_class_of_which_all_are_cut(self, count: int) -> None:
        """A request with the same limit takes all of it, and one with a higher limit more."""
        table = LengthTable()
        for _ in range(count):
            table.observe(200, cut=True)
        table.rebuild(None)
        assert table.left(0, 200).mean == pytest.approx(200, rel=0.15 if count == 3 else 0.05)
        assert 250 < table.left(0, 2000).mean < 900
        assert table.left(190, 200).mean == pytest.approx(10, rel=0.05)
        assert 30 < table.left(200, 2000).mean < 900

    def test_ends_beyond_the_cuts_say_where_cut_requests_would_have_ended(self) -> None:
        """Half end at 10, half at 1000, and those are cut at 100 in one of two cases."""
        table = LengthTable()
        for i in range(2000):
            if i % 2:
                table.observe(10)
            else:
                table.observe(100 if i % 4 else 1000, cut=i % 4 > 0)
        table.rebuild(None)
        assert table.left(0, MOST).mean == pytest.approx(505, rel=0.15)
        assert table.left(50, MOST).mean == pytest.approx(950, rel=0.1)

    def test_a_cut_where_the_shape_has_nothing_beyond_counts_as_an_end(self) -> None:
        table = LengthTable()
        table.restore([0.0] * 30 + [1e9] + [0.0] * (BINS - 31), [0.0] * (BINS - 1) + [1e3])
        table.rebuild(None)
        assert table.masses[BINS - 1] == pytest.approx(1e3 / (1e9 + 1e3 + SHAPE_WEIGHT))
        assert sum(table.masses) == pytest.approx(1.0)

    def test_cuts_beyond_the_last_bin_are_in_it(self) -> None:
        table = LengthTable()
        table.observe(10**9, cut=True)
        assert table.cuts == [0.0] * (BINS - 1) + [1.0]

    def test_tables_on_the_way_change_nothing(self) -> None:
        often, once = LengthTable(), LengthTable()
        for length in drawn(200, 150, 1.0):
            for table in (often, once):
                table.observe(min(length, 100), cut=length > 100)
            often.rebuild(None)
        once.rebuild(None)
        assert list(often.masses) == list(once.masses)

    def test_the_order_changes_nothing_but_what_is_forgotten(self) -> None:
        lengths = sorted(drawn(50, 150, 1.0))
        up, down = limited(lengths, 100), limited(lengths[::-1], 100)
        assert up.left(0, MOST).mean == pytest.approx(down.left(0, MOST).mean, rel=0.05)
        assert list(up.masses) == pytest.approx(list(down.masses), abs=2e-3)

    def test_cuts_are_forgotten_like_ends(self) -> None:
        table = LengthTable()
        for _ in range(2000):
            table.observe(1000, cut=True)
        for _ in range(8000):
            table.observe(10)
        table.rebuild(None)
        assert table.left(0, MOST).mean < 12

    def test_sums_stay_small_however_long_it_runs(self) -> None:
        table = LengthTable()
        for i in range(25_000):
            table.observe(100, cut=i % 2 > 0)
        assert sum(table.cuts) == pytest.approx(500, rel=1e-3)
        assert sum(table.cuts) + sum(table.counts) == pytest.approx(table.weight)
        assert max(table._cuts) < 1e12

    @given(
        st.lists(st.tuples(st.integers(1, 2**24), st.booleans()), max_size=30),
        st.integers(0, 5000),
        st.integers(1, 5000),
    )
    @settings(max_examples=60, deadline=None)
    def test_the_masses_are_shares_and_the_interval_holds_the_mean(
        self, seen: list[tuple[int, bool]], emitted: int, more: int
    ) -> None:
        table = LengthTable()
        for length, cut in seen:
            table.observe(length, cut=cut)
        table.rebuild(None)
        of_shape = SHAPE_WEIGHT / (table.weight + SHAPE_WEIGHT)  # a part of it is beyond the last bin
        assert 1 - of_shape - 1e-9 <= sum(table.masses) <= 1 + 1e-9 and min(table.masses) >= 0
        left = table.left(emitted, emitted + more)
        assert 1 <= left.low <= left.mean <= left.high <= more


def guessed(priors: Priors, source: str, guess: float) -> Guesses:
    """Return this guess of a request that has no token yet, by this source."""
    guesses = Guesses()
    if source == "worker":
        guesses.predicted(priors.prediction("chat", guess, 0, MOST, guesses, "t"))
    else:
        setattr(guesses, source, guess)
    return guesses


def learnt(share: float, limit: int = 32, count: int = 3000, source: str = "client") -> Priors:
    """Return priors after requests of one class with guesses, this share of which has a limit."""
    rng, priors = random.Random(3), Priors()
    for length in drawn(count, 150, 1.0):
        cut = rng.random() < share and length > limit
        guesses = guessed(priors, source, max(1.0, length * math.exp(SIGMA * rng.gauss(0, 1))))
        priors.observe_length("chat", limit if cut else length, guesses, "t", cut=cut)
    return priors


@pytest.mark.parametrize("source", ["client", "prompt", "worker"])
class TestGuesses:
    @pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5])
    def test_their_error_is_learnt_from_requests_that_ended_by_themselves(
        self, share: float, source: str
    ) -> None:
        priors = learnt(share, source=source)
        found: Calibration = {
            "client": priors._hints.classes,
            "prompt": priors._predictions.classes,
            "worker": {"chat": priors._classes["chat"].stages[0].guesses},
        }[source]["chat"].calibrated(ASSUMED)
        assert found.spread == pytest.approx(SIGMA, abs=0.05)
        assert found.log_length(150.0) == pytest.approx(math.log(150), abs=0.1)

    @pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
    def test_they_are_read_as_without_cuts(self, share: float, source: str) -> None:
        cut, uncut = learnt(share, source=source), learnt(0.0, source=source)
        for guess in (30.0, 150.0, 600.0):
            means = [
                priors.tokens_left("chat", 0, MOST, guessed(priors, source, guess), "t").mean
                for priors in (cut, uncut)
            ]
            assert means[0] == pytest.approx(means[1], rel=0.1)


def test_where_all_requests_are_cut_guesses_are_trusted_as_without_history() -> None:
    priors = Priors()
    for _ in range(200):
        priors.observe_length("chat", 100, Guesses(5000.0), "t", cut=True)
    said = priors.tokens_left("chat", 0, MOST, Guesses(800.0), "t")
    assert said == priors.tokens_left("chat", 0, MOST, Guesses(800.0), "another")
    assert said.mean > 300


class TestWhatAnEndTeaches:
    def learnt(self, end: End) -> Priors:
        scheduler = core()
        hinted = request("a", max_tokens=6, expected_output_tokens=60)
        scheduler.step(0.0, [WorkerUp(W, ()), Arrived(hinted)])
        scheduler.step(1.0, [report(did("a", 0, 3, predicted_remaining_tokens=50.0))])
        scheduler.step(2.0, [report(did("a", 3, 3, end=end))])
        assert scheduler.estimate_errors.of(Moment.ARRIVAL).count == 1, "of the service up to the limit"
        return scheduler.priors

    def test_the_limit_cut_it(self) -> None:
        learned = self.learnt(End.LENGTH)
        found = learned.to_dict()["classes"]["chat"]
        assert sum(found["length_cuts"].values()) == pytest.approx(1.0)
        assert found["length_counts"] == {}
        assert self.guesses_seen(learned) == (0, 0)

    @pytest.mark.parametrize("end", [End.STOP, End.STOP_SEQUENCE])
    def test_it_ended_by_itself(self, end: End) -> None:
        learned = self.learnt(end)
        found = learned.to_dict()["classes"]["chat"]
        assert found["length_cuts"] == {}
        assert sum(found["length_counts"].values()) == pytest.approx(1.0)
        assert self.guesses_seen(learned) == (1, 1)

    def guesses_seen(self, priors: Priors) -> tuple[float, float]:
        """Return how many guesses of clients and workers were learned from."""
        stages = priors._classes["chat"].stages
        return priors._hints.everyone.weight, sum(stage.guesses.weight for stage in stages)


class TestTheRecord:
    def test_cuts_are_on_it(self) -> None:
        priors = learnt(0.5, count=300)
        again = Priors.from_dict(json.loads(json.dumps(priors.to_dict())))
        assert again.to_dict() == priors.to_dict()
        for name in ("chat", "another"):
            mine, theirs = (each.tokens_left(name, 0, MOST, Guesses()) for each in (priors, again))
            assert theirs.mean == pytest.approx(mine.mean, rel=0.05)  # built a few requests later
            assert theirs.basis == mine.basis
