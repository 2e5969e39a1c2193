"""The scheduler reports the error of its estimates of remaining service."""

from __future__ import annotations

import math
import random

import pytest

from laps_sd.contract.ends import End
from scheduler_svc.core.estimates.errors import (
    MOST_RATIO,
    SETTLED_ROUNDS,
    Basis,
    ErrorSummary,
    EstimateErrors,
    KeptEstimate,
    Moment,
)
from scheduler_svc.core.events import Arrived, EndRequested, Recovered, WorkerUp
from scheduler_svc.core.scheduler import Scheduler
from tests.core.cluster import Cluster
from tests.core.jobs import Job, facts
from tests.core.test_scheduler import W, core, did, report, request


def judged(scheduler: Scheduler) -> dict[str, float]:
    return {one.moment.value: one.ratio for one in scheduler.estimate_errors.latest}


def kept(
    remaining_s: float,
    low_s: float = 1.0,
    high_s: float = 2.0,
    attained_s: float = 0.0,
    basis: Basis = Basis.CLASS,
) -> KeptEstimate:
    return KeptEstimate(remaining_s, low_s, high_s, attained_s, basis)


class TestWhatIsJudged:
    def test_what_was_said_against_what_was_charged_afterwards(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a", expected_output_tokens=20))])
        said = scheduler.explain("a", 1.0)
        scheduler.step(2.0, [report(did("a", 0, 3, prefilled=100), prefill_s=0.2)])
        said_later = scheduler.explain("a", 2.0)
        assert said is not None and said_later is not None
        for n in range(1, 4):
            scheduler.step(2.0 + n, [report(did("a", 3 * n, 3))])
        assert scheduler.estimate_errors.latest == []
        scheduler.step(9.0, [report(did("a", 12, 2, end=End.STOP))])

        ratios = judged(scheduler)
        assert ratios["arrival"] == pytest.approx((0.2 + 5 * 0.03) / said.remaining_s)
        assert ratios["first_round"] == pytest.approx(4 * 0.03 / said_later.remaining_s)
        assert "round_32" not in ratios
        assert {one.basis for one in scheduler.estimate_errors.latest} == {Basis.CLIENT}
        covered = {one.moment.value: one.covered for one in scheduler.estimate_errors.latest}
        assert covered["arrival"] == (said.remaining_low_s <= 0.2 + 5 * 0.03 <= said.remaining_high_s)
        assert covered["first_round"] == (
            said_later.remaining_low_s <= 4 * 0.03 <= said_later.remaining_high_s
        )
        scheduler.step(10.0, [])
        assert scheduler.estimate_errors.latest == [], "each step tells its own"
        assert scheduler.estimate_errors.of(Moment.ARRIVAL).count == 1, "and the sums stay"

    def test_a_round_that_only_computes_context_is_no_first_round(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        before = scheduler.explain("a", 1.0)
        scheduler.step(2.0, [report(did("a", 0, 0, prefilled=50, drafted=0), prefill_s=0.2)])
        e = scheduler.explain("a", 2.0)
        assert before is not None and e is not None
        assert (e.rounds, e.attained_s) == (0, pytest.approx(0.2 + 0.03))
        for n in range(SETTLED_ROUNDS):
            scheduler.step(3.0 + n, [report(did("a", n, 1))])
        scheduler.step(99.0, [report(did("a", SETTLED_ROUNDS, 1, end=End.STOP))])
        assert {"arrival", "first_round", "round_32"} <= set(judged(scheduler))

    def test_one_that_ends_in_its_first_round_has_no_estimate_after_one(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(2.0, [report(did("a", 0, 0, prefilled=50, drafted=0), prefill_s=0.2)])
        scheduler.step(3.0, [report(did("a", 0, 3, end=End.STOP))])
        assert {one.moment for one in scheduler.estimate_errors.latest} <= {
            Moment.ARRIVAL,
            Moment.PERCEPTIBLE,
        }

    def test_the_first_estimate_of_each_moment_counts(self) -> None:
        """It is perceptible from its arrival on: both moments are one."""
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        first = scheduler.explain("a", 1.0)
        assert first is not None and first.perceptible
        for n in range(5):
            scheduler.step(2.0 + n, [report(did("a", n, 1))])
        scheduler.step(9.0, [report(did("a", 5, 1, end=End.STOP))])
        ratios = {one.moment: one.ratio for one in scheduler.estimate_errors.latest}
        assert ratios[Moment.PERCEPTIBLE] == ratios[Moment.ARRIVAL]
        assert ratios[Moment.FIRST_ROUND] != ratios[Moment.ARRIVAL]

    def test_when_it_became_perceptible(self) -> None:
        scheduler = core()
        sure = request("a", expected_output_tokens=10, max_tokens=12)
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(sure)])
        e = scheduler.explain("a", 1.0)
        assert e is not None and e.perceptible
        scheduler.step(2.0, [report(did("a", 0, 3, end=End.STOP))])
        ratios = judged(scheduler)
        assert ratios["perceptible"] == ratios["arrival"], "it was at its arrival"

    def test_what_the_estimate_rested_on(self) -> None:
        for fact, basis in ((None, Basis.CLASS), (60, Basis.CLIENT)):
            scheduler = core()
            scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a", expected_output_tokens=fact))])
            scheduler.step(2.0, [report(did("a", 0, 3))])
            scheduler.step(3.0, [report(did("a", 3, 3, end=End.STOP))])
            bases = {one.moment: one.basis for one in scheduler.estimate_errors.latest}
            assert bases[Moment.FIRST_ROUND] is basis

    @pytest.mark.parametrize("end", [End.ERROR, End.TIME_LIMIT])
    def test_a_request_that_was_cut_short_judges_nothing(self, end: End) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(2.0, [report(did("a", 0, 3))])
        scheduler.step(3.0, [report(did("a", 3, 3, end=end))])
        assert scheduler.estimate_errors.by == {}

    def test_a_cancelled_one_neither(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [WorkerUp(W, ()), Arrived(request("a"))])
        scheduler.step(2.0, [EndRequested("a", End.CANCELLED, "")])
        assert scheduler.estimate_errors.by == {}

    def test_nor_one_that_another_leader_had_estimated(self) -> None:
        scheduler = core()
        scheduler.step(1.0, [Recovered(request("a"), 30, 10, 50, 20, 0.3, 0, "w", 1), WorkerUp(W, ())])
        scheduler.step(2.0, [report(did("a", 30, 3))])
        scheduler.step(3.0, [report(did("a", 33, 3, end=End.STOP))])
        assert scheduler.estimate_errors.by == {}


class TestSummaries:
    def test_mean_root_mean_square_and_quantiles_of_the_log_ratio(self) -> None:
        source = random.Random(4)
        logs = sorted(source.gauss(0.3, 0.8) for _ in range(2000))
        summary = ErrorSummary()
        for log in logs:
            assert summary.add(2.0, 2 * math.exp(log)) == pytest.approx(math.exp(log))
        assert summary.count == 2000
        assert summary.mean == pytest.approx(sum(logs) / 2000)
        assert summary.rms == pytest.approx(math.sqrt(sum(log * log for log in logs) / 2000))
        for share in (0.1, 0.5, 0.9):
            assert summary.quantile(share) == pytest.approx(logs[int(share * 2000)], abs=0.06)
        assert summary.quantile(0.0) == pytest.approx(logs[0], abs=0.06)
        assert summary.quantile(1.0) == pytest.approx(logs[-1], abs=0.06)

    def test_ratios_are_told_within_limits(self) -> None:
        errors = EstimateErrors()
        for remaining_s, attained_s in ((1.0, 0.0), (1e-9, 1e6)):
            errors.judge({Moment.ARRIVAL: kept(remaining_s)}, attained_s)
        assert [one.ratio for one in errors.latest] == [1 / MOST_RATIO, MOST_RATIO]
        summary = errors.by[Moment.ARRIVAL, Basis.CLASS]
        assert (summary.mean, summary.rms) == (0, pytest.approx(math.log(MOST_RATIO)))
        assert summary.quantile(0.5) < 0 < summary.quantile(1.0)

    def test_over_all_bases(self) -> None:
        errors = EstimateErrors()
        for basis, attained_s in ((Basis.CLASS, 2.0), (Basis.CLIENT, 0.5), (Basis.CLIENT, 0.5)):
            errors.judge({Moment.ARRIVAL: kept(1.0, basis=basis)}, attained_s)
        errors.judge({Moment.SETTLED: kept(1.0)}, 3.0)
        whole = errors.of(Moment.ARRIVAL)
        assert (whole.count, sum(whole.bins)) == (3, 3)
        assert (whole.predicted_s, whole.actual_s) == (3.0, 3.0)
        assert whole.mean == pytest.approx(-math.log(2) / 3)
        assert whole.rms == pytest.approx(math.log(2))
        assert (whole.covered, whole.coverage) == (1, pytest.approx(1 / 3))
        assert errors.of(Moment.PERCEPTIBLE).count == 0

    def test_an_estimate_covers_what_lies_in_its_interval_both_ends_included(self) -> None:
        errors = EstimateErrors()
        for attained_s in (7.4, 7.5, 9.0, 10.0, 10.1):  # 5 of them before the estimate
            errors.judge({Moment.SETTLED: kept(3.0, 2.5, 5.0, attained_s=5.0)}, attained_s)
        assert [one.covered for one in errors.latest] == [False, True, True, True, False]
        assert errors.by[Moment.SETTLED, Basis.CLASS].coverage == pytest.approx(0.6)


def test_estimates_are_right_on_average_and_get_better_as_a_request_runs() -> None:
    """The clients know the lengths; paces are known only from a request's own rounds."""
    source = random.Random(8)
    cluster = Cluster("laps-sd", [facts("w", slots=4)], check=False)
    jobs, now_s = [], 0.0
    for i in range(160):
        now_s += source.expovariate(1.0)
        output = source.randint(150, 400)
        pace = source.choice([(1, 2), (2, 3), (3, 4), (5, 6)])
        jobs.append(Job(f"r{i}", now_s, 100, output, pace, 0, "chat", output, 1000))
    cluster.submit(jobs[:80])
    cluster.run()
    cluster.scheduler.estimate_errors.by.clear()
    cluster.submit(jobs[80:])
    cluster.run()
    arrival, settled = (cluster.scheduler.estimate_errors.of(m) for m in (Moment.ARRIVAL, Moment.SETTLED))

    assert arrival.count == 80
    for summary in (arrival, settled):
        assert summary.actual_s / summary.predicted_s == pytest.approx(1, abs=0.2)
    assert settled.rms < 0.8 * arrival.rms
