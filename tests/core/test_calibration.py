"""Value of guesses of output lengths: in a class, and those of one tenant among others."""

from __future__ import annotations

import json
import math
import random
from typing import ClassVar

import pytest

from laps_sd.contract.length_features import packed
from scheduler_svc.core.estimates.calibration import (
    ASSUMED,
    GUESS_LOG_SPREAD,
    LEAST_LOG_SPREAD,
    MOST_TENANTS,
    TENANT_WEIGHT,
    Calibration,
    GuessHistory,
    GuessSource,
    TenantGuesses,
)
from scheduler_svc.core.estimates.priors import MAX_CLASSES, Priors
from scheduler_svc.core.estimates.sources import Guesses

MOST = 100_000


def lengths(count: int, seed: int = 1) -> list[int]:
    """Return lengths with a median of 150 tokens, like those of a chat."""
    rng = random.Random(seed)
    return [max(1, round(150 * math.exp(rng.gauss(0, 1)))) for _ in range(count)]


def history(slope: float, offset: float, spread: float, count: int = 300) -> GuessHistory:
    """Return guesses on a line, with an error of this spread."""
    rng, found = random.Random(2), GuessHistory()
    for length in lengths(count):
        found.observe(math.exp(offset + slope * math.log(length) + rng.gauss(0, spread)), length)
    return found


class TestTheLine:
    @pytest.mark.parametrize(
        ("slope", "offset", "spread"), [(1.0, 0.0, 0.3), (1.0, 1.4, 0.2), (0.5, 2.0, 0.3), (-1.0, 10.0, 0.3)]
    )
    def test_it_is_found_with_its_spread(self, slope: float, offset: float, spread: float) -> None:
        found = history(slope, offset, spread, count=1000).calibrated(ASSUMED)
        assert found.slope == pytest.approx(slope, abs=0.1)
        assert found.offset + found.slope * 5 == pytest.approx(offset + slope * 5, abs=0.1)
        assert math.sqrt(found.variance) == pytest.approx(spread, abs=0.08)
        assert found.spread == pytest.approx(spread / abs(slope), rel=0.25)

    def test_a_guess_on_it_says_the_length(self) -> None:
        found = history(-1.0, 10.0, 0.0, count=1000).calibrated(ASSUMED)
        assert found.log_length(math.exp(10 - math.log(400))) == pytest.approx(math.log(400), abs=0.2)

    def test_with_no_history_a_guess_is_right_on_average(self) -> None:
        found = GuessHistory().calibrated(ASSUMED)
        assert (found.slope, found.offset, found.spread) == (1.0, 0.0, GUESS_LOG_SPREAD)

    @pytest.mark.parametrize("spread", [0.0, 1.0])
    def test_guesses_that_do_not_follow_the_length_are_worth_nothing(self, spread: float) -> None:
        assert history(0.0, 5.0, spread).calibrated(ASSUMED).spread == math.inf

    def test_a_steep_line_makes_no_guess_exact(self) -> None:
        assert Calibration(30.0, 0.0, 1e-4).spread == LEAST_LOG_SPREAD

    def test_one_request_moves_the_line_it_is_shrunk_to_and_not_its_slope(self) -> None:
        """Seven requests on the line that is assumed and this one: an eighth of its distance, and the errors
        of all eight."""
        assumed = Calibration(0.5, 2.0, 0.3)
        one = GuessHistory()
        one.observe(90.0, 40)
        distance = math.log(90) - (2.0 + 0.5 * math.log(40))
        found = one.calibrated(assumed, 7.0)
        assert found.slope == pytest.approx(0.5)
        assert found.offset == pytest.approx(2.0 + distance / 8)
        errors = (distance * 7 / 8) ** 2 + 7 * GUESS_LOG_SPREAD**2
        assert found.variance == pytest.approx(errors / 8)

    def test_the_slope_is_that_of_the_history_and_of_as_many_as_are_assumed(self) -> None:
        """Two requests, ln(length) 1 above and below the middle, ln(guess) 2 above and below it."""
        two = GuessHistory()
        for step in (-1, 1):
            two.observe(math.exp(9 + 2 * step), round(math.exp(8 + step)))
        found = two.calibrated(Calibration(0.5, 5.0, 0.3), 6.0)
        assert found.slope == pytest.approx((2 * 2 + 6 * 0.5) / (2 + 6), rel=0.01)
        middle = (2 * 9 + 6 * (5 + 0.5 * 8)) / 8
        assert found.offset == pytest.approx(middle - found.slope * 8, rel=0.01)

    def test_equal_lengths_say_nothing_against_the_slope(self) -> None:
        found = GuessHistory()
        for i in range(300):
            found.observe(400 * math.exp(0.3 * (-1) ** i), 400)
        assert found.calibrated(ASSUMED).slope == pytest.approx(1.0)


def learned(guesses: dict[str, float | None], count: int = 100) -> Priors:
    """Return priors after `count` requests of each tenant, each of which always guesses one number, or the
    truth (None)."""
    priors, rng = Priors(), random.Random(3)
    for length in lengths(count):
        for tenant, always in guesses.items():
            guess = length * math.exp(rng.gauss(0, 0.3)) if always is None else always
            priors.observe_length("", length, Guesses(client=guess), tenant)
    return priors


class TestTenants:
    HONEST: ClassVar[dict[str, float | None]] = {f"honest {i}": None for i in range(8)}

    def test_one_whose_guesses_are_wrong_is_estimated_as_if_it_said_nothing(self) -> None:
        priors = learned({**self.HONEST, "liar": 1.0}, count=50)
        said = priors.tokens_left("", 0, MOST, Guesses(client=1.0), "liar")
        assert said == priors.tokens_left("", 0, MOST, Guesses(), "liar")

    def test_the_others_are_believed_as_if_it_were_not_there(self) -> None:
        alone = learned(self.HONEST, count=50)
        beside = learned({**self.HONEST, "liar": 1.0, "another": 1.0}, count=50)
        for guess in (30.0, 150.0, 800.0):
            expected = alone.tokens_left("", 0, MOST, Guesses(client=guess), "honest 0")
            found = beside.tokens_left("", 0, MOST, Guesses(client=guess), "honest 0")
            assert found.mean == pytest.approx(expected.mean, rel=0.15)
            assert found.high / found.low < 1.5 * expected.high / expected.low

    def test_a_history_that_is_the_whole_of_a_wider_one_counts_once(self) -> None:
        """The only tenant of a class is judged like the class; one with a single class by that class alone."""
        only, guesses = GuessHistory(), TenantGuesses()
        for length in lengths(50):
            only.observe(2.0 * length, length)
            guesses.observe("only", "chat", 2.0 * length, length)
        of_class = only.calibrated(ASSUMED)
        assert guesses.calibrated("only", "chat", only, of_class) is of_class
        wider = guesses.calibrated("only", "chat", GuessHistory(), ASSUMED)
        of_pair = only.calibrated(ASSUMED, TENANT_WEIGHT)
        assert (wider.slope, wider.offset, wider.variance) == (
            of_pair.slope,
            of_pair.offset,
            of_pair.variance,
        )

    def test_in_a_class_of_its_own_it_starts_from_its_guesses_elsewhere(self) -> None:
        guesses, of_tenant, of_pair = TenantGuesses(), GuessHistory(), GuessHistory()
        for number, length in enumerate(lengths(60)):
            workload_class = "chat" if number % 3 else "code"
            guesses.observe("t", workload_class, 3.0 * length, length)
            of_tenant.observe(3.0 * length, length)
            if workload_class == "code":
                of_pair.observe(3.0 * length, length)
        found = guesses.calibrated("t", "code", GuessHistory(), ASSUMED)
        expected = of_pair.calibrated(of_tenant.calibrated(ASSUMED, TENANT_WEIGHT), TENANT_WEIGHT)
        assert (found.slope, found.offset, found.variance) == (
            expected.slope,
            expected.offset,
            expected.variance,
        )

    def test_one_whose_guesses_are_wrong_is_not_believed_again_after_many_requests(self) -> None:
        """The weights of all histories are the same number by then."""
        source, rng = GuessSource(), random.Random(3)
        for length in lengths(10_000):
            source.observe("honest", "chat", length * math.exp(rng.gauss(0, 0.3)), length)
            source.observe("liar", "chat", 1.0, length)
        source.settle()
        for found in (source, GuessSource.from_dict(json.loads(json.dumps(source.to_dict())))):
            assert found.line("honest", "chat").spread == pytest.approx(0.3, rel=0.2)
            assert found.line("liar", "chat").precision == 0

    def test_the_guesses_of_a_tenant_elsewhere_count_after_many_requests_too(self) -> None:
        guesses = TenantGuesses()
        for length in lengths(10_000):
            guesses.observe("t", "chat", 1.0, length)
            guesses.observe("t", "code", 3.0 * length, length)
        of_tenant, of_pair = guesses.by_tenant["t"], guesses.by_class["t", "code"]
        assert of_tenant.weight == of_pair.weight
        found = guesses.calibrated("t", "code", GuessHistory(), ASSUMED)
        expected = of_pair.calibrated(of_tenant.calibrated(ASSUMED, TENANT_WEIGHT), TENANT_WEIGHT)
        assert (found.slope, found.variance) == (expected.slope, expected.variance)

    def test_one_without_a_history_is_judged_like_its_class(self) -> None:
        priors = learned(self.HONEST)
        left = priors.tokens_left("", 0, MOST, Guesses(client=800.0), "newcomer")
        assert left == priors.tokens_left("", 0, MOST, Guesses(client=800.0), "another newcomer")
        assert left.mean == pytest.approx(800, rel=0.3)

    def test_one_whose_guesses_are_wrong_is_not_believed_again_in_another_class(self) -> None:
        priors = learned({**self.HONEST, "liar": 1.0})
        for length in lengths(100):
            priors.observe_length("other", length, Guesses(client=float(length)), "honest 0")
        said = priors.tokens_left("other", 0, MOST, Guesses(client=1.0), "liar")
        assert said == priors.tokens_left("other", 0, MOST, Guesses(), "liar")

    def test_a_tenant_may_be_right_in_one_class_and_wrong_in_another(self) -> None:
        priors = learned({})
        for length in lengths(300):
            for tenant in ("t", "u"):
                priors.observe_length("good", length, Guesses(client=float(length)), tenant)
                priors.observe_length("bad", length, Guesses(client=7.0), tenant)
        assert priors.tokens_left("good", 0, MOST, Guesses(client=800.0), "t").mean == pytest.approx(
            800, rel=0.15
        )
        said = priors.tokens_left("bad", 0, MOST, Guesses(client=800.0), "t")
        assert said == priors.tokens_left("bad", 0, MOST, Guesses(), "t")

    def test_histories_are_bounded_and_the_newest_stay(self) -> None:
        tenants = TenantGuesses()
        for i in range(MOST_TENANTS + 50):
            tenants.observe("first", "", 10.0, 10)
            tenants.observe(f"t{i}", f"c{i}", 10.0, 10)
        assert len(tenants.by_tenant) == len(tenants.by_class) == MOST_TENANTS
        assert "first" in tenants.by_tenant and ("first", "") in tenants.by_class

    def test_they_survive_a_restart(self) -> None:
        priors = learned({**self.HONEST, "liar": 1.0})
        again = Priors.from_dict(json.loads(json.dumps(priors.to_dict())))
        assert again.to_dict() == priors.to_dict()
        said = again.tokens_left("", 0, MOST, Guesses(client=1.0), "liar")
        assert said == again.tokens_left("", 0, MOST, Guesses(), "liar")


WORDS = packed([1, 2, 3])


def end(priors: Priors, workload_class: str, length: int, tenant: str) -> None:
    """Let a request with a hint and a prediction end."""
    priors.prompts.learn(WORDS, workload_class, tenant, length, cut=False)
    priors.observe_length(workload_class, length, Guesses(client=1.0, prompt=10.0), tenant)


class TestClassesOfManyTenants:
    def test_one_tenants_classes_do_not_keep_another_from_learning(self) -> None:
        priors = Priors()
        for i in range(MAX_CLASSES + 50):
            priors.observe_length(f"flood {i}", 1000, Guesses(), "flood")
        for _ in range(100):
            priors.observe_length("mine", 20, Guesses(), "me")
        for i in range(MAX_CLASSES):
            priors.observe_length(f"more {i}", 1000, Guesses(), "flood")
        assert priors.tokens_left("mine", 0, MOST, Guesses(), "me").mean == pytest.approx(20, rel=0.3)
        assert len(priors.to_dict()["classes"]) == MAX_CLASSES

    def test_one_tenants_classes_do_not_take_the_place_of_what_others_guesses_are_worth(self) -> None:
        priors = Priors()
        for length in lengths(100):
            priors.observe_length("chat", length, Guesses(client=float(length)), "honest")
        before = priors.tokens_left("chat", 0, MOST, Guesses(client=800.0), "newcomer")
        for i in range(MAX_CLASSES + 50):
            priors.observe_length(f"flood {i}", 100, Guesses(client=1.0), "flood")
        left = priors.tokens_left("chat", 0, MOST, Guesses(client=800.0), "newcomer")
        assert (left.mean, left.basis) == (before.mean, before.basis)

    def test_nor_of_what_was_learned_from_words(self) -> None:
        priors = Priors()
        for _ in range(100):
            end(priors, "chat", 20, "me")
            end(priors, "other", 1000, "another")
        for i in range(MAX_CLASSES + 50):
            end(priors, f"flood {i}", 140, "flood")
        of_chat = priors.prompts.predict(WORDS, "chat", "newcomer")
        of_other = priors.prompts.predict(WORDS, "other", "newcomer")
        assert of_chat is not None and of_other is not None and of_other > 2 * of_chat

    def test_all_tables_have_the_same_classes(self) -> None:
        priors = Priors()
        for i in range(MAX_CLASSES + 50):
            priors.observe_tokens(f"class {i}", 3)
            end(priors, f"class {i}", 10, f"tenant {i}")
        learnt = json.loads(json.dumps(priors.to_dict()))
        tables = [learnt, learnt["hints"], learnt["predictions"], learnt["prompts"]]
        assert [len(table["classes"]) for table in tables] == [MAX_CLASSES] * 4
        for table in tables[1:]:
            assert table["classes"].keys() == learnt["classes"].keys()
            # An earlier build chose by itself in each of them.
            table["classes"] = {f"old {name}": found for name, found in table["classes"].items()}
        again = Priors.from_dict(learnt).to_dict()
        assert len(again["classes"]) == MAX_CLASSES
        assert [again[table]["classes"] for table in ("hints", "predictions", "prompts")] == [{}, {}, {}]

    def test_a_further_class_takes_the_place_of_the_one_that_ended_a_request_longest_ago(self) -> None:
        priors = Priors()
        for i in range(MAX_CLASSES):
            priors.observe_length(f"class {i}", 10, Guesses())
        priors.observe_length("class 0", 10, Guesses())
        priors.observe_length("new", 10, Guesses())
        names = priors.to_dict()["classes"]
        assert "class 1" not in names and {"class 0", "class 2", "new"} <= set(names)

    def test_rounds_of_requests_that_run_replace_no_class(self) -> None:
        priors = Priors()
        for i in range(MAX_CLASSES):
            priors.observe_length(f"class {i}", 10, Guesses())
        before = priors.to_dict()["classes"].keys()
        priors.observe_tokens("new", 3)
        assert priors.to_dict()["classes"].keys() == before
