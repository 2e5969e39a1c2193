"""Properties of each policy, one class each. `laps-sd` and `laps-sd-paper` have files of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from laps_sd.contract.choose import Residency
from laps_sd.service.config import field_types
from scheduler_svc.core.commands import Commit
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import Arrived
from scheduler_svc.core.policies import POLICIES, policy_named
from scheduler_svc.core.policies.base import Policy, estimate_by_length, rank_key
from scheduler_svc.core.rank import MAX_LEVELS, RankKey
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import Request
from scheduler_svc.settings import SchedulerSettings
from tests.core.cluster import Cluster
from tests.core.jobs import Job, facts
from tests.core.ranks import SETTINGS, experienced, live, make, rank
from tests.core.script import play


def order(keys: list[RankKey]) -> list[tuple[int, float]]:
    return [(key.rank_class, key.index_s) for key in keys]


def finished(policy: str, jobs: list[Job]) -> list[str]:
    """Return the ids in the order in which one worker with one slot finished them."""
    cluster = Cluster(policy, [facts("w")], CoreSettings(reserved_share=False))
    cluster.submit(jobs)
    cluster.run()
    return sorted(cluster.finished_s, key=cluster.finished_s.__getitem__)


def pauses(policy: str, jobs: list[Job]) -> int:
    cluster = Cluster(policy, [facts("w")], CoreSettings(reserved_share=False))
    cluster.submit(jobs)
    cluster.run()
    return sum(
        command.standing.preemptions
        for _, command in cluster.commands
        if isinstance(command, Commit) and command.end
    )


LONG_THEN_SHORT = [Job("long", 0.0, 50, 900, hint=900), Job("short", 1.0, 50, 12, hint=12)]

HALF_WAY = {
    "hint": 150,
    "emitted": 60,
    "rounds": 20,
    "drafted": 100,
    "accepted": 40,
    "attained_s": 0.512,
    "residency": Residency.DEVICE,
}


class TestAllOfThem:
    def test_an_unknown_one_is_named_with_those_there_are(self) -> None:
        with pytest.raises(ValueError, match=r"policy must be one of fcfs, laps-sd, .*, not 'lifo'") as error:
            policy_named("lifo", SETTINGS)
        assert all(name in str(error.value) for name in POLICIES)

    def test_the_setting_of_the_scheduler_offers_exactly_these(self) -> None:
        assert sorted(get_args(field_types(SchedulerSettings)["policy"])) == sorted(POLICIES)

    @pytest.mark.parametrize("name", POLICIES)
    def test_each_is_called_what_it_is_configured_as(self, name: str) -> None:
        assert policy_named(name, SETTINGS).name == name

    @pytest.mark.parametrize("name", POLICIES)
    def test_the_clients_priority_stands_above_everything(self, name: str) -> None:
        worst = rank(policy=name, priority=1, hint=2000, attained_s=1e6, sequence=9, emitted=900, rounds=900)
        assert worst.rank_class < rank(policy=name, hint=1).rank_class

    @pytest.mark.parametrize("name", POLICIES)
    def test_the_same_request_and_priors_give_the_same_rank(self, name: str) -> None:
        request = make(hint=200, emitted=30, rounds=10, attained_s=0.5)
        live(name, request)
        policy, priors = policy_named(name, SETTINGS), Priors()
        assert policy.rank(request, priors) == policy.rank(request, priors)

    @pytest.mark.parametrize("name", POLICIES)
    def test_no_rank_changes_because_others_come_or_time_passes(self, name: str) -> None:
        settings = CoreSettings()
        core = Scheduler(policy_named(name, settings), settings, Priors())
        core.step(0.0, [Arrived(make(hint=50).facts)])
        before = core.explain("r", 0.0)
        core.step(1e6, [])
        after = core.explain("r", 0.0)
        assert before == after

    @pytest.mark.parametrize(("name", "levels"), [(name, POLICIES[name].has_levels) for name in POLICIES])
    def test_who_has_no_levels_puts_all_into_level_0(self, name: str, levels: bool) -> None:
        request = make(hint=2000, prompt=5000)
        live(name, request)
        request.attained_s = 1e4
        assert (live(name, request).level > 0) == levels


@pytest.mark.parametrize("name", POLICIES)
def test_policies_that_order_by_what_is_left_count_what_it_costs_to_take_a_request_up(name: str) -> None:
    counts = name in ("laps-sd", "sd-index", "srpt-length", "sjf-length")
    assert (rank(policy=name, prompt=1000).resume_cost_s > 0) is counts


class TestFcfs:
    def test_arrival_order_whatever_it_costs(self) -> None:
        assert (
            rank(policy="fcfs", hint=2000, sequence=1).index_s
            < rank(policy="fcfs", hint=1, sequence=2).index_s
        )

    def test_what_runs_is_never_paused(self) -> None:
        assert rank(policy="fcfs").pinned
        assert finished("fcfs", LONG_THEN_SHORT) == ["long", "short"]

    def test_taking_it_up_does_not_disturb_the_order(self) -> None:
        assert rank(policy="fcfs", prompt=5000).resume_cost_s == 0.0


class TestSjfLength:
    def test_the_shortest_prediction_first(self) -> None:
        jobs = [Job("first", 0.0, 50, 100, hint=100)]
        jobs += [Job(f"of{n}", 0.01, 50, n, hint=n) for n in (300, 20, 80)]
        assert finished("sjf-length", jobs) == ["first", "of20", "of80", "of300"]

    def test_acceptance_is_ignored(self) -> None:
        good, bad = (rank(policy="sjf-length", hint=400, rounds=r, emitted=200) for r in (40, 100))
        assert good.index_s == bad.index_s

    def test_what_runs_is_never_paused(self) -> None:
        assert finished("sjf-length", LONG_THEN_SHORT) == ["long", "short"]
        assert pauses("sjf-length", LONG_THEN_SHORT) == 0

    def test_and_stands_before_all_that_waits(self) -> None:
        runs, waits = (
            rank(policy="sjf-length", hint=900, residency=Residency.DEVICE),
            rank(policy="sjf-length", hint=1),
        )
        assert runs.index_s < waits.index_s

    def test_one_that_lost_its_kv_waits_by_what_is_left(self) -> None:
        lost = rank(policy="sjf-length", hint=900, emitted=880, ran_here=True)
        assert lost.index_s == rank(policy="srpt-length", hint=900, emitted=880).index_s


class TestSrptLength:
    def test_a_shorter_one_displaces_what_runs(self) -> None:
        assert finished("srpt-length", LONG_THEN_SHORT) == ["short", "long"]

    def test_what_is_left_counts_and_not_the_whole(self) -> None:
        whole, nearly_done = (
            rank(policy="srpt-length", hint=100),
            rank(policy="srpt-length", hint=100, emitted=90),
        )
        assert nearly_done.index_s < whole.index_s

    def test_acceptance_is_ignored(self) -> None:
        good, bad = (rank(policy="srpt-length", hint=400, rounds=r, emitted=200) for r in (40, 100))
        assert good.index_s == bad.index_s


class TestLas:
    def test_whoever_has_had_least_comes_first_whatever_is_left(self) -> None:
        keys = [rank(policy="las", hint=h, attained_s=s) for h, s in ((2000, 0.0), (5, 0.1), (1, 0.2))]
        assert order(keys) == sorted(order(keys))

    def test_machine_seconds_count_and_not_tokens(self) -> None:
        assert (
            rank(policy="las", emitted=500, attained_s=0.1).index_s
            < rank(policy="las", attained_s=0.2).index_s
        )

    def test_of_two_that_had_nothing_the_older_one(self) -> None:
        first, second = rank(policy="las", sequence=10**8), rank(policy="las", sequence=10**8 + 1)
        assert first.index_s < second.index_s

    def test_a_fresh_one_displaces_what_runs(self) -> None:
        assert finished("las", LONG_THEN_SHORT) == ["short", "long"]

    def test_two_alike_share_the_machine_in_growing_turns(self) -> None:
        """The hysteresis of choose: each turn is a tenth of what both have had."""
        twins = [Job("a", 0.0, 50, 600), Job("b", 0.0, 50, 600)]
        assert 10 < pauses("las", twins) < 100


class TestMlfq:
    """FastServe, arXiv 2305.05920."""

    BASE_S = SETTINGS.level_base_s

    def spend(self, request: Request, seconds: float) -> int:
        request.attained_s += seconds
        return live("mlfq", request).level

    def test_a_short_prompt_joins_the_highest_level(self) -> None:
        assert rank(policy="mlfq", prompt=1).level == 0

    def test_skip_join_the_highest_level_whose_quantum_covers_the_prefill(self) -> None:
        per_token_s = Priors().cost.prefill_share_s(1)
        for level in range(1, 8):
            longest = int(self.BASE_S * 2**level / per_token_s)
            assert rank(policy="mlfq", prompt=longest).level == level
            assert rank(policy="mlfq", prompt=longest + 1).level == level + 1

    def test_demoted_when_the_quantum_is_used_up_and_not_before(self) -> None:
        request = make(prompt=1)
        live("mlfq", request)
        assert self.spend(request, self.BASE_S) == 0
        assert self.spend(request, 0.01 * self.BASE_S) == 1

    def test_the_quantum_doubles_from_level_to_level(self) -> None:
        request = make(prompt=1)
        live("mlfq", request)
        for level in range(6):
            assert self.spend(request, 0.99 * self.BASE_S * 2**level) == level
            assert self.spend(request, 0.02 * self.BASE_S * 2**level) == level + 1

    def test_one_level_at_a_time_and_then_with_nothing_spent(self) -> None:
        request = make(prompt=1)
        live("mlfq", request)
        assert self.spend(request, 1000 * self.BASE_S) == 1
        assert request.attained_at_level_s == 0.0

    def test_the_level_it_joined_stays_when_prefills_turn_out_slower(self) -> None:
        request, priors = make(prompt=1), Priors()
        live("mlfq", request, priors=priors)
        priors.cost.observe_prefill(1000, 1000.0)
        assert live("mlfq", request, priors=priors).level == 0

    @pytest.mark.parametrize("more", [{"prompt": 10**14}, {"prompt": 1, "attained_s": 1e12}])
    def test_it_joins_no_level_below_the_last_one(self, more: dict[str, float]) -> None:
        assert rank(policy="mlfq", **more).level == MAX_LEVELS - 1

    def test_the_last_level_has_no_end(self) -> None:
        assert rank(policy="mlfq", prompt=10**9, attained_s=1e12).level == MAX_LEVELS - 1
        request = make(prompt=1, rank_before=rank(policy="mlfq", prompt=10**9, attained_s=1e12))
        assert self.spend(request, 1e12) == MAX_LEVELS - 1

    def test_a_new_leader_puts_it_about_where_its_service_had_brought_it(self) -> None:
        """Levels 0, 1 and 2 take 7 quanta of the base together."""
        assert rank(policy="mlfq", prompt=1, attained_s=6.9 * self.BASE_S).level == 2
        assert rank(policy="mlfq", prompt=1, attained_s=7.1 * self.BASE_S).level == 3

    def test_a_fresh_one_displaces_what_was_demoted(self) -> None:
        assert finished("mlfq", LONG_THEN_SHORT) == ["short", "long"]

    def test_in_a_level_the_older_one_first(self) -> None:
        first, second = rank(policy="mlfq", sequence=10**8), rank(policy="mlfq", sequence=10**8 + 1)
        assert (first.level, first.index_s < second.index_s) == (second.level, True)

    def test_what_runs_is_not_displaced_by_one_of_its_own_level(self) -> None:
        """Each of two that came together is paused when a level is used up, and at no other time."""
        twins = [Job("a", 0.0, 50, 600), Job("b", 0.0, 50, 600)]
        levels = live("mlfq", make(prompt=50, attained_s=600 / 3 * 0.031)).level
        assert 0 < pauses("mlfq", twins) <= 2 * levels


class TestSdIndex:
    def test_it_is_the_index_of_laps_sd_without_its_levels(self) -> None:
        states = [
            {"hint": hint, "emitted": emitted, "rounds": 20, "residency": residency, "attained_s": 0.7}
            for hint in (None, 60, 400)
            for emitted in (0, 40)
            for residency in Residency
        ]
        for state in states:
            with_levels, without = rank(**state), rank(policy="sd-index", **state)
            assert without.index_s == with_levels.index_s
            assert without.resume_cost_s == with_levels.resume_cost_s
            assert without.remaining == with_levels.remaining
            assert (without.level, without.rank_class) == (0, 0)

    def test_rounds_that_took_no_time_are_no_error(self) -> None:
        priors = Priors()
        for _ in range(3000):
            priors.cost.observe_round(1, 6, 100, 0.0)
            priors.cost.observe_prefill(100, 5e-324)
        for policy in ("laps-sd", "sd-index"):
            found = rank(priors, policy, hint=1, residency=Residency.DEVICE)
            assert found.index_s > 0

    def test_it_preempts_from_the_first_round_on(self) -> None:
        assert finished("sd-index", LONG_THEN_SHORT) == ["short", "long"]

    def test_acceptance_decides_between_equal_lengths(self) -> None:
        priors = experienced()
        good, bad = (rank(priors, "sd-index", hint=400, rounds=r, emitted=200) for r in (40, 100))
        assert good.index_s < bad.index_s


class TestOneThatLooksThingsUp:
    """A simulator has more information than the core; its policy adds it."""

    class Oracle(Policy):
        name = "oracle"

        def __init__(self, look_up: Callable[[Request], float]) -> None:
            super().__init__(CoreSettings())
            self._look_up = look_up

        def rank(self, request: Request, priors: Priors) -> RankKey:
            found = estimate_by_length(request, priors)
            return rank_key(request, found, self._look_up(request), counts_resuming=False)

    def test_it_orders_by_what_it_looks_up(self) -> None:
        truth = {"a": 3.0, "b": 1.0, "c": 2.0}
        settings = CoreSettings()
        core = Scheduler(self.Oracle(lambda request: truth[request.request_id]), settings, Priors())
        core.step(0.0, [Arrived(Job(name, 0.0, 50, 10).facts(n)) for n, name in enumerate(truth)])
        assert [entry.request_id for entry in core.queue(0.0, 10)] == ["b", "c", "a"]


class TestTheHowTo:
    """docs/how-to/add-a-policy.md: the policy and the scenario of the page, unchanged."""

    PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "add-a-policy.md").read_text()

    def block(self, language: str, containing: str) -> str:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", self.PAGE, re.DOTALL | re.MULTILINE)
        (block,) = [text for kind, text in blocks if kind == language and containing in text]
        return str(block)

    def test_it_is_a_policy_and_does_what_the_page_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        page: dict[str, type[Policy]] = {}
        exec(self.block("python", "class ShortestPrompt"), page)
        monkeypatch.setitem(POLICIES, "shortest-prompt", page["ShortestPrompt"])
        assert policy_named("shortest-prompt", SETTINGS).name == "shortest-prompt"
        played = play(self.block("", "policy shortest-prompt"))
        assert played.splitlines()[-2:] == self.block("", "long: running on w1").splitlines()


class TestWhatPeopleAreTold:
    """`ordered_by`: the values that the place of a request depends on."""

    def told(self, policy: str, **state: object) -> str:
        request = make(**{**HALF_WAY, **state})
        live(policy, request, priors=experienced())
        return policy_named(policy, SETTINGS).ordered_by(request)

    @pytest.mark.parametrize("policy", ["srpt-length", "sjf-length", "sd-index"])
    def test_the_estimate_where_that_is_the_index(self, policy: str) -> None:
        left_s = rank(experienced(), policy, **HALF_WAY).remaining.mean_s
        assert self.told(policy) == f"about {left_s:.3g} s left"

    def test_laps_sd_adds_the_level(self) -> None:
        key = rank(experienced(), **HALF_WAY)
        assert self.told("laps-sd") == f"about {key.remaining.mean_s:.3g} s left (level {key.level})"

    def test_fcfs_speaks_of_arrival_only(self) -> None:
        assert self.told("fcfs") == "its turn in the order of arrival"

    def test_las_names_the_service(self) -> None:
        assert self.told("las") == "0.512 s of service so far"

    def test_mlfq_names_the_level_and_what_is_used_up_of_its_quantum(self) -> None:
        assert self.told("mlfq", attained_s=0.0) == "0 s of the 0.0156 s of level 1 used up"

    def test_laps_sd_paper_names_attained_service_until_it_perceives(self) -> None:
        assert self.told("laps-sd-paper") == "0.512 s of service so far (level 4)"

    @pytest.mark.parametrize(("perceived", "whole"), [(False, "in all"), (True, "left")])
    def test_and_then_the_execution_time(self, perceived: bool, whole: str) -> None:
        settings = CoreSettings(perceived_levels=perceived)
        request = make(**HALF_WAY, late_acceptance=(0.4,) * 8)
        key = live("laps-sd-paper", request, settings, experienced())
        told = policy_named("laps-sd-paper", settings).ordered_by(request)
        assert told.startswith("an execution time of about ")
        assert told.endswith(f" s {whole} (level {key.level})")
