"""laps-sd-paper against what is public of Algorithm 1 (arXiv 2505.17074), one test per sentence.

Where the public text is silent the test is under "our choice".
"""

from __future__ import annotations

import math

import pytest

from laps_sd.contract.choose import Residency
from scheduler_svc.core.commands import Commit
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.estimates.sources import Guesses
from scheduler_svc.core.events import Arrived, WorkerUp
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.policies.base import STEADY_S
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import STABLE_ROUNDS
from tests.core.cluster import Cluster
from tests.core.jobs import Job, facts
from tests.core.ranks import experienced, live, make
from tests.core.test_scheduler import W, did, report, request

LITERAL = CoreSettings(reserved_share=False)
PERCEIVED = CoreSettings(reserved_share=False, perceived_levels=True)
STABLE = (0.4,) * STABLE_ROUNDS

HALF_WAY = {
    "hint": 200,
    "emitted": 60,
    "rounds": 20,
    "drafted": 100,
    "accepted": 40,
    "attained_s": 50.0,
    "residency": Residency.DEVICE,
}


def rank(settings: CoreSettings = LITERAL, priors: Priors | None = None, **fields: object) -> RankKey:
    return policy_named("laps-sd-paper", settings).rank(make(**fields), priors or Priors())


def seconds(key: RankKey) -> float:
    """Return the index alone, without hysteresis of the queue and tie-breaking."""
    return key.index_s - STEADY_S


class TestStated:
    def test_every_arrival_joins_the_queue_of_the_highest_priority(self) -> None:
        assert rank(hint=2000, prompt=10_000).level == 0

    def test_as_non_perceptible_whatever_is_known_of_it(self) -> None:
        assert rank(priors=experienced(), hint=150).perceptible is False

    def test_the_non_empty_queue_of_the_highest_priority_runs(self) -> None:
        """A queue stands above any order inside one."""
        fresh, tried = rank(hint=2000), rank(hint=20, attained_s=5.0)
        assert fresh.rank_class < tried.rank_class

    def test_a_request_that_has_become_stable_is_marked_perceptible(self) -> None:
        cluster = Cluster("laps-sd-paper", [facts("w")], LITERAL)
        cluster.submit([Job("steady", 0.0, 50, 400)])
        cluster.run(until_s=1.0)
        told = cluster.scheduler.explain("steady", 1.0)
        assert told is not None
        assert told.perceptible
        assert "perceptible" in [line.what for line in told.story]

    def test_one_whose_acceptance_still_moves_is_not(self) -> None:
        cluster = Cluster("laps-sd-paper", [facts("w")], LITERAL)
        cluster.submit([Job("moody", 0.0, 50, 400, (6, 6, 6, 6, 6, 6, 6, 1, 1, 1, 1, 1, 1, 1))])
        cluster.run(until_s=0.6)
        told = cluster.scheduler.explain("moody", 0.6)
        assert told is not None
        assert told.rounds > STABLE_ROUNDS
        assert told.perceptible is False

    def test_its_execution_time_is_estimated_from_length_and_acceptance_by_the_formula(self) -> None:
        """T = L / (n·A + 1) · (n·T_SSM + T_LLM)."""
        priors = experienced()
        tokens = priors.tokens_left("", 40, 2000, Guesses(client=200.0))
        left = tokens.mean
        key = rank(
            priors=priors,
            hint=200,
            emitted=40,
            rounds=20,
            drafted=100,
            accepted=30,
            late_acceptance=STABLE,
            residency=Residency.DEVICE,
        )
        whole, n, acceptance = 40 + left, 100 / 20, 30 / 100
        round_s = priors.cost.share_s(140 + left / 2)  # n·T_SSM + T_LLM
        assert seconds(key) == pytest.approx(whole / (n * acceptance + 1) * round_s, abs=1e-9)
        assert key.remaining.mean_s == pytest.approx(left / (n * acceptance + 1) * round_s)
        assert key.remaining.low_s == pytest.approx(tokens.low / left * key.remaining.mean_s)
        assert key.remaining.high_s == pytest.approx(tokens.high / left * key.remaining.mean_s)
        assert "30% of its drafted tokens" in key.remaining.note

    def test_preemption_across_queues(self) -> None:
        """Abstract."""
        cluster = Cluster("laps-sd-paper", [facts("w")], LITERAL)
        cluster.submit([Job("long", 0.0, 50, 900), Job("short", 1.0, 50, 12)])
        cluster.run()
        assert cluster.finished_s["short"] < cluster.finished_s["long"]


class TestOurChoice:
    def test_the_queues_are_the_levels_of_laps_sd_by_attained_service(self) -> None:
        levels = [rank(attained_s=s / 128).level for s in (0, 1, 1.01, 4, 4.01, 16, 16.01)]
        assert levels == [0, 0, 1, 1, 2, 2, 3]

    def test_in_a_queue_the_least_attained_service_first(self) -> None:
        less, more = rank(attained_s=0.04, hint=2000), rank(attained_s=0.1, hint=5)
        assert less.level == more.level
        assert less.index_s < more.index_s

    def test_or_perceived_service(self) -> None:
        state = {"rounds": 20, "drafted": 100, "accepted": 40, "late_acceptance": STABLE, "attained_s": 0.7}
        short, long = rank(hint=100, emitted=60, **state), rank(hint=900, emitted=60, **state)
        assert short.perceptible
        assert short.rank_class == long.rank_class
        assert short.index_s < long.index_s

    def test_a_perceptible_one_too_is_demoted_by_what_it_has_attained(self) -> None:
        state = {"hint": 200, "emitted": 190, "rounds": 90, "drafted": 450, "accepted": 100}
        assert rank(**state, late_acceptance=STABLE, attained_s=100.0).level == rank(attained_s=100.0).level

    @pytest.mark.parametrize(("spread", "stable"), [(0.0499, True), (0.0501, False)])
    def test_stable_is_a_range_of_the_running_acceptance_below_a_twentieth(
        self, spread: float, stable: bool
    ) -> None:
        seen = (0.5, *(0.5 + spread / 2,) * (STABLE_ROUNDS - 2), 0.5 + spread)
        assert rank(late_acceptance=seen, rounds=9, drafted=45, accepted=20).perceptible is stable

    def test_over_eight_rounds_and_no_fewer(self) -> None:
        assert STABLE_ROUNDS == 8
        assert not rank(late_acceptance=(0.5,) * 7, rounds=9, drafted=45, accepted=20).perceptible

    def test_the_running_acceptance_is_all_accepted_over_all_drafted_tokens(self) -> None:
        request = make()
        for accepted in (5, 0, 5, 5, 0, 1, 2, 3, 4, 5):
            request.speculated(1, 5, accepted, remember=True)
        sums = (5, 5, 10, 15, 15, 16, 18, 21, 25, 30)
        expected = [total / (5 * n) for n, total in enumerate(sums, start=1)]
        assert request.late_acceptance == pytest.approx(expected[-STABLE_ROUNDS:])

    def test_a_round_without_a_draft_says_nothing_of_acceptance(self) -> None:
        request = make()
        for _ in range(20):
            request.speculated(0, 0, 0, remember=True)
        assert request.late_acceptance == ()
        assert rank(rounds=20, emitted=20, attained_s=0.6).perceptible is False

    def test_a_mark_stays_when_the_acceptance_moves_again(self) -> None:
        request = make(hint=200, rounds=20, drafted=100, accepted=40, late_acceptance=STABLE)
        live("laps-sd-paper", request)
        request.late_acceptance = (0.4, 0.9) * 4
        assert live("laps-sd-paper", request).perceptible

    def test_a_new_leader_perceives_it_after_as_many_rounds_of_its_own(self) -> None:
        assert rank(emitted=300, rounds=100, drafted=500, accepted=200, attained_s=3.0).perceptible is False

    def test_no_preemption_inside_a_queue(self) -> None:
        """Twins are paused when they fall into the next queue, and at no other time."""
        cluster = Cluster("laps-sd-paper", [facts("w")], LITERAL)
        cluster.submit([Job("a", 0.0, 50, 300), Job("b", 0.0, 50, 300)])
        cluster.run()
        ends = [c.standing for _, c in cluster.commands if isinstance(c, Commit) and c.end]
        assert [0 < standing.preemptions <= standing.level for standing in ends] == [True, True]

    def test_of_two_that_had_nothing_the_older_one(self) -> None:
        first, second = rank(sequence=10**8), rank(sequence=10**8 + 1)
        assert first.index_s < second.index_s

    def test_until_it_is_perceptible_people_are_told_the_class_pace(self) -> None:
        good, bad = (rank(hint=400, rounds=rounds, emitted=200) for rounds in (40, 100))
        assert good.remaining == bad.remaining

    def test_the_priors_of_laps_sd_predict_the_length_and_never_the_acceptance(self) -> None:
        """The raw running mean, however few tokens it rests on and whatever the class is like."""
        priors = experienced()
        for _ in range(5000):
            priors.observe_tokens("", 6)
        state = {"hint": 200, "late_acceptance": STABLE, "rounds": 8, "drafted": 8, "emitted": 8}
        none, all_of_them = (rank(priors=priors, accepted=a, **state) for a in (0, 8))
        assert seconds(none) == pytest.approx(2 * seconds(all_of_them), rel=1e-6)


class TestTheCharitableReading:
    """`perceived_levels`: a perceptible request is where its remaining time belongs."""

    def test_it_moves_to_the_level_of_its_remaining_estimate(self) -> None:
        key = rank(PERCEIVED, experienced(), **HALF_WAY, late_acceptance=STABLE)
        base, factor = PERCEIVED.level_base_s, PERCEIVED.level_factor
        assert key.level == math.ceil(math.log(key.remaining.mean_s / base, factor))
        assert key.level < rank(LITERAL, experienced(), **HALF_WAY, late_acceptance=STABLE).level

    def test_and_is_ordered_by_it(self) -> None:
        key = rank(PERCEIVED, experienced(), **HALF_WAY, late_acceptance=STABLE)
        assert seconds(key) == pytest.approx(key.remaining.mean_s, abs=1e-9)

    def test_until_then_nothing_differs(self) -> None:
        assert rank(PERCEIVED, **HALF_WAY) == rank(LITERAL, **HALF_WAY)

    def test_a_long_one_falls_far_at_once_and_rises_as_it_ends(self) -> None:
        core = Scheduler(policy_named("laps-sd-paper", PERCEIVED), PERCEIVED, Priors())
        core.step(0.0, [WorkerUp(W, ()), Arrived(request("a", expected_output_tokens=480))])
        levels = []
        for n in range(119):
            core.step(0.1 * n, [report(did("a", 4 * n, 4, drafted=5, accepted=3))])
            told = core.explain("a", 0.0)
            assert told is not None
            levels.append(told.level)
        by_attained, perceived = levels[: STABLE_ROUNDS - 1], levels[STABLE_ROUNDS - 1 :]
        assert by_attained == sorted(by_attained)
        assert perceived[0] is not None and perceived[0] > by_attained[-1]  # type: ignore[operator]
        assert perceived == sorted(perceived, reverse=True)  # type: ignore[type-var]
