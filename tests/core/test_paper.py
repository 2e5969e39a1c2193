"""laps-sd against the paper (arXiv 2505.17074, as far as it is public), one test per sentence.

Where the public text is silent the test says "our choice".
"""

from __future__ import annotations

import itertools
import math

import pytest

from laps_sd.contract.choose import HYSTERESIS, Residency
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.estimates.sources import Guesses
from scheduler_svc.core.policies import POLICIES, policy_named
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.settings import CoreSettings
from tests.core.cluster import Cluster
from tests.core.jobs import Job, facts
from tests.core.ranks import SETTINGS, experienced, make, rank


class TestThePaper:
    def test_execution_time_depends_on_output_length(self) -> None:
        """Problem statement."""
        assert rank(hint=100).index_s < rank(hint=400).index_s

    def test_and_on_the_acceptance_rate(self) -> None:
        """Problem statement: of two requests with the same remaining length, the one with better acceptance
        is shorter."""
        good = rank(hint=400, rounds=40, emitted=200)
        bad = rank(hint=400, rounds=100, emitted=200)
        assert good.index_s < bad.index_s

    def test_a_request_starts_non_perceptible(self) -> None:
        """Section on the semi-clairvoyant setting: nothing is known of the request yet."""
        assert not rank().perceptible

    def test_an_arrival_joins_the_queue_of_the_highest_priority(self) -> None:
        """Algorithm 1."""
        assert rank().level == 0

    def test_the_queue_of_the_highest_priority_runs(self) -> None:
        """Algorithm 1: a class comes before any index."""
        fresh, tried = rank(), rank(emitted=30, rounds=10, attained_s=5.0)
        assert fresh.rank_class < tried.rank_class

    def test_a_request_that_has_become_stable_is_perceptible(self) -> None:
        """Algorithm 1: its rounds and its limit leave one level only."""
        assert rank(most=300, emitted=270, rounds=90, attained_s=3.0).perceptible

    def test_then_its_execution_time_is_estimated_from_length_and_acceptance(self) -> None:
        """T = L / (tokens per round) × time of a round."""
        priors = experienced(guesses=1.0)
        request = make(hint=400, rounds=50, emitted=150, residency=Residency.DEVICE)
        key = policy_named("laps-sd", SETTINGS).rank(request, priors)
        left = priors.tokens_left("", 150, 2000, Guesses(client=400.0)).mean
        pace = priors.tokens_per_round("", 50, 150).mean
        share = priors.cost.share_s(250 + left / 2)
        assert key.remaining.mean_s == pytest.approx(left / pace * share)
        assert key.remaining.mean_s <= key.index_s < (1 + HYSTERESIS) * key.remaining.mean_s + 1e-6

    def test_preemption_across_queues(self) -> None:
        """Abstract: the shorter one takes the slot of the one that runs."""
        cluster = Cluster("laps-sd", [facts("w")])
        cluster.submit([Job("long", 0.0, 50, 900, hint=900), Job("short", 1.0, 50, 12, hint=12)])
        cluster.run()
        assert cluster.finished_s["short"] < cluster.finished_s["long"]

    def test_the_mean_latency_falls_against_fcfs(self) -> None:
        """Headline; on our own small trace, not with a number of the paper."""
        jobs = [Job(f"r{i:02d}", 0.2 * i, 50, 30 + 370 * (i % 4 == 0), (1 + i % 5,)) for i in range(60)]
        means = {}
        for policy in ("fcfs", "laps-sd"):
            cluster = Cluster(policy, [facts("w")], check=False)
            cluster.submit(jobs)
            cluster.run()
            means[policy] = cluster.mean_latency_s()
        assert means["laps-sd"] < 0.8 * means["fcfs"]


class TestOurChoice:
    """The public text leaves these open."""

    def test_levels_grow_exponentially_in_machine_seconds(self) -> None:
        levels = [rank(attained_s=s / 128).level for s in (0, 1, 1.01, 4, 4.01, 16, 16.01, 64, 65)]
        assert levels == [0, 0, 1, 1, 2, 2, 3, 3, 4]

    def test_the_last_level_has_no_end(self) -> None:
        assert rank(attained_s=1e12).level == SETTINGS.level_count - 1

    def test_non_perceptible_level_by_attained_service(self) -> None:
        key = rank(attained_s=1.0)
        assert (key.perceptible, key.level) == (False, 4)

    def test_perceptible_level_by_remaining_service(self) -> None:
        key = rank(
            experienced(), hint=150, attained_s=1000.0, residency=Residency.DEVICE, emitted=50, rounds=25
        )
        assert key.perceptible
        assert key.level < SETTINGS.level_count - 1

    def test_a_good_prior_makes_it_perceptible_at_arrival(self) -> None:
        assert rank(experienced(), hint=150).perceptible

    def test_a_guess_with_a_history_of_large_errors_does_not(self) -> None:
        lengths = [3, 3000] * 40
        priors = Priors()
        for length in lengths:
            priors.observe_length("", length, Guesses(client=100.0))
        assert not rank(priors, hint=100, most=100_000).perceptible

    def test_an_estimate_for_the_request_itself_may_be_wider_than_that_of_a_class(self) -> None:
        same = CoreSettings(predicted_spread=SETTINGS.perceptible_spread)
        vague = Priors()
        for length in [33, 100, 300] * 20:
            vague.observe_length("", length, Guesses(client=100.0))
        request = make(hint=100)
        assert policy_named("laps-sd", SETTINGS).rank(request, vague).perceptible
        assert not policy_named("laps-sd", same).rank(request, vague).perceptible

    def test_perceptible_is_not_lost_at_once(self) -> None:
        was = rank(experienced(), hint=150)
        fields = {"hint": 150, "emitted": 149, "rounds": 60}
        assert rank(experienced(), **fields, rank_before=was).perceptible

    @pytest.mark.parametrize(("attained_s", "kept"), [(1.0, True), (0.0, False)])
    def test_perceptible_is_lost_only_where_what_it_needs_in_all_is_uncertain(
        self, attained_s: float, kept: bool
    ) -> None:
        """Near its end the remaining service is uncertain by a large factor; compared with the attained
        service, that is little."""
        tight = policy_named("laps-sd", CoreSettings(predicted_spread=2.0))
        request = make(hint=150, emitted=149, rounds=60, attained_s=attained_s)
        assert not tight.rank(request, experienced()).perceptible
        request.rank_before = rank(experienced(), hint=150)
        assert tight.rank(request, experienced()).perceptible is kept

    def test_it_falls_back_when_its_acceptance_drifts(self) -> None:
        priors = experienced(guesses=1.0)
        before = rank(priors, hint=1000, most=1000, emitted=100, rounds=20, residency=Residency.DEVICE)
        drifted = rank(
            priors,
            hint=1000,
            most=1000,
            emitted=110,
            rounds=400,
            residency=Residency.DEVICE,
            rank_before=before,
        )
        assert drifted.level > before.level

    @pytest.mark.parametrize("started", [False, True])
    def test_its_level_is_that_of_an_arrival(self, started: bool) -> None:
        """Otherwise requests that came before an edge moved would wait for all that come after."""
        before = rank(hint=96)
        assert before.level == rank(hint=90).level + 1
        assert rank(hint=90, started=started, rank_before=before).level == before.level - 1

    def test_waiting_requests_that_differ_by_less_than_the_hysteresis_go_in_the_order_of_arrival(
        self,
    ) -> None:
        keys = [rank(hint=hint, sequence=1000 - hint) for hint in range(100, 200)]
        costs = [key.index_s + key.resume_cost_s for key in keys]
        steps = [list(group) for _, group in itertools.groupby(range(100), lambda i: round(costs[i], 6))]
        assert len(steps) > 5
        for step in steps:
            assert [costs[i] for i in step] == sorted((costs[i] for i in step), reverse=True)
            shortest, longest = keys[step[0]].remaining.mean_s, keys[step[-1]].remaining.mean_s
            assert shortest <= longest <= (1 + HYSTERESIS) * shortest

    def test_set_up_cost_counts_until_the_kv_is_there(self) -> None:
        gone, here = rank(hint=50), rank(hint=50, residency=Residency.DEVICE)
        assert gone.index_s + gone.resume_cost_s >= here.index_s
        assert gone.remaining.mean_s == pytest.approx(here.remaining.mean_s + gone.resume_cost_s)
        swapped = rank(hint=50, residency=Residency.HOST)
        assert 0 < swapped.resume_cost_s < gone.resume_cost_s

    def test_priority_stands_above_level(self) -> None:
        low, high = rank(attained_s=1e9, priority=1), rank(priority=0)
        assert low.rank_class < high.rank_class

    def test_never_pinned(self) -> None:
        assert not rank().pinned


class TestTheEstimate:
    """Estimates shown to users: the remaining decoding, and what must be computed before it."""

    @pytest.mark.parametrize("policy", sorted(POLICIES))
    @pytest.mark.parametrize("residency", [Residency.NONE, Residency.HOST, Residency.DEVICE])
    def test_it_is_the_length_that_is_left_at_its_pace_and_the_set_up(
        self, policy: str, residency: Residency
    ) -> None:
        priors = experienced()
        by_acceptance = policy in ("laps-sd", "sd-index")
        left = priors.tokens_left("", 40, 2000, Guesses(client=200.0))
        prefill_s = priors.cost.prefill_share_s(140)
        setup_s = {Residency.NONE: prefill_s, Residency.HOST: prefill_s / 4, Residency.DEVICE: 0.0}[residency]
        pace = priors.tokens_per_round("", 20, 40) if by_acceptance else priors.tokens_per_round("", 0, 0)
        seconds = priors.cost.share_s(140 + left.mean / 2) / pace.mean
        found = rank(priors, policy, hint=200, emitted=40, rounds=20, residency=residency).remaining
        assert found.mean_s == pytest.approx(left.mean * seconds + setup_s)
        if by_acceptance:
            assert found.low_s < left.low * seconds + setup_s
            assert found.high_s > left.high * seconds + setup_s
        else:
            assert found.low_s == pytest.approx(left.low * seconds + setup_s)
            assert found.high_s == pytest.approx(left.high * seconds + setup_s)

    def test_the_pace_widens_it_as_an_independent_factor(self) -> None:
        priors = experienced()
        left = priors.tokens_left("", 40, 2000, Guesses(client=200.0))
        spread = 1.28 * priors.tokens_per_round("", 20, 40).spread
        found = rank(priors, hint=200, emitted=40, rounds=20, residency=Residency.DEVICE).remaining
        assert math.log(found.mean_s / found.low_s) == pytest.approx(
            math.hypot(math.log(left.mean / left.low), spread)
        )
        assert math.log(found.high_s / found.mean_s) == pytest.approx(
            math.hypot(math.log(left.high / left.mean), spread)
        )

    @pytest.mark.parametrize(("share", "perceptible"), [(0.9999, False), (1.0001, True)])
    def test_perceptible_is_an_interval_within_the_factor_counted_from_the_base(
        self, share: float, perceptible: bool
    ) -> None:
        around, base = rank(hint=200).remaining, SETTINGS.level_base_s
        factor = (around.high_s + base) / (around.low_s + base)
        policy = policy_named("laps-sd", CoreSettings(predicted_spread=share * factor))
        assert policy.rank(make(hint=200), Priors()).perceptible is perceptible


class TestAgainstTheOthers:
    def test_with_equal_acceptance_the_order_is_that_of_srpt_length(self) -> None:
        """The lengths are true, and every request has its class's pace."""
        priors = experienced([20 * i for i in range(1, 80)] * 4, guesses=1.0)
        for _ in range(5000):
            priors.observe_tokens("", 3)
        states = [
            {
                "hint": hint,
                "emitted": 3 * rounds,
                "rounds": rounds,
                "residency": Residency.DEVICE,
                "attained_s": 0.03 * rounds,
            }
            for hint in (60, 90, 140, 200, 420, 800, 1500)
            for rounds in (0, 5, 15)
        ]
        laps = [rank(priors, **state) for state in states]
        length = [rank(priors, policy="srpt-length", **state) for state in states]
        assert all(key.perceptible for key in laps)

        def order(keys: list[RankKey]) -> list[int]:
            return sorted(range(len(keys)), key=lambda i: (keys[i].rank_class, keys[i].index_s))

        by_length = [round(length[i].index_s, 6) for i in order(laps)]
        assert by_length == pytest.approx(sorted(by_length), rel=HYSTERESIS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"list_factor": 0},
        {"list_margin": -1},
        {"resend_index_change": -0.1},
        {"priors_interval_s": -1},
        {"level_base_s": 0},
        {"level_factor": 1},
        {"level_count": 33},
        {"level_count": 0},
        {"perceptible_spread": 0.5},
        {"predicted_spread": 0.5},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CoreSettings(**wrong)  # type: ignore[arg-type]


def test_settings_at_their_bounds_are_taken() -> None:
    lowest = CoreSettings(
        list_factor=1,
        list_margin=0,
        resend_index_change=0,
        priors_interval_s=0,
        level_base_s=1e-9,
        level_factor=1.01,
        level_count=1,
        perceptible_spread=1,
    )
    assert policy_named("laps-sd", lowest).rank(make(attained_s=9.0), Priors()).level == 0
    assert CoreSettings(level_count=32).level_count == 32
