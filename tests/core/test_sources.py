"""Several guesses of one length: each counts by what its source was worth."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict

import pytest

from scheduler_svc.core.estimates.basis import Basis
from scheduler_svc.core.estimates.calibration import GuessHistory
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.estimates.sources import (
    ENOUGH_PREDICTIONS,
    STAGES,
    Guesses,
    Prediction,
    StageHistory,
    stage_of,
)

MOST = 100_000
Guess = Callable[[int, random.Random], Guesses]


def off(length: int, spread: float, rng: random.Random) -> float:
    return max(1.0, length * math.exp(rng.gauss(0, spread)))


def lengths(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [math.ceil(rng.lognormvariate(math.log(150), 1.0)) for _ in range(count)]


def learned(guess: Guess, count: int = 600) -> Priors:
    priors, rng = Priors(), random.Random(1)
    for length in lengths(count, seed=2):
        priors.observe_length("", length, guess(length, rng))
    return priors


def log_error(priors: Priors, guess: Guess) -> float:
    """Return the root mean square of ln(length / middle of the interval) over new requests."""
    rng, squares = random.Random(3), []
    for length in lengths(500, seed=4):
        left = priors.tokens_left("", 0, MOST, guess(length, rng))
        squares.append(math.log(length / math.sqrt(left.low * left.high)) ** 2)
    return math.sqrt(statistics.fmean(squares))


class TestAtArrival:
    @pytest.mark.parametrize(("client", "prompt"), [(0.5, 0.5), (0.3, 1.0), (1.0, 0.6)])
    def test_two_sources_are_better_than_either(self, client: float, prompt: float) -> None:
        def both(length: int, rng: random.Random) -> Guesses:
            return Guesses(off(length, client, rng), off(length, prompt, rng))

        priors = learned(both)
        together = log_error(priors, both)
        assert together < log_error(priors, lambda length, rng: Guesses(client=off(length, client, rng)))
        assert together < log_error(priors, lambda length, rng: Guesses(prompt=off(length, prompt, rng)))
        precision = client**-2 + prompt**-2 + 1
        assert together == pytest.approx(precision**-0.5, rel=0.15)

    @pytest.mark.parametrize("worthless", ["client", "prompt"])
    def test_a_source_that_says_nothing_is_not_used(self, worthless: str) -> None:
        other = "prompt" if worthless == "client" else "client"

        def guess(length: int, rng: random.Random) -> Guesses:
            return Guesses(**{worthless: rng.uniform(50, 500), other: off(length, 0.5, rng)})

        priors = learned(guess)
        alone = Guesses(**{other: 400.0})
        assert priors.tokens_left("", 0, MOST, Guesses(**{worthless: 400.0})) == priors.tokens_left(
            "", 0, MOST, Guesses()
        )
        assert priors.tokens_left(
            "", 0, MOST, Guesses(**{worthless: 7.0, other: 400.0})
        ) == priors.tokens_left("", 0, MOST, alone)

    @pytest.mark.parametrize(
        ("guesses", "basis"),
        [
            (Guesses(), Basis.CLASS),
            (Guesses(client=50.0), Basis.CLIENT),
            (Guesses(prompt=50.0), Basis.PROMPT),
            (Guesses(client=50.0, prompt=50.0), Basis.CLIENT_AND_PROMPT),
        ],
    )
    def test_the_basis_names_what_was_used(self, guesses: Guesses, basis: Basis) -> None:
        assert Priors().tokens_left("", 0, MOST, guesses).basis is basis

    def test_predictions_of_a_tenant_are_judged_by_its_own(self) -> None:
        priors, rng = Priors(), random.Random(6)
        for number, length in enumerate(lengths(600, seed=2)):
            tenant = "crafty" if number % 10 == 0 else "honest"
            guesses = Guesses(prompt=5.0 if tenant == "crafty" else off(length, 0.5, rng))
            priors.observe_length("", length, guesses, tenant)
        short = Guesses(prompt=5.0)
        of_class = priors.tokens_left("", 0, MOST, Guesses(), "crafty").mean
        assert priors.tokens_left("", 0, MOST, short, "crafty").mean > 0.8 * of_class
        assert priors.tokens_left("", 0, MOST, short, "honest").mean < 0.2 * of_class


class TestStages:
    def test_they_grow_by_fours(self) -> None:
        first = [next(n for n in range(5000) if stage_of(n) == stage) for stage in range(STAGES)]
        assert first == [0, 1, 4, 16, 64, 256, 1024]
        assert stage_of(10**7) == STAGES - 1

    def test_the_first_prediction_of_each_is_judged_and_the_newest_is_used(self) -> None:
        guesses = Guesses()
        kept = [guesses.predicted(Prediction(float(n), n)) for n in (0, 1, 3, 4, 15, 16)]
        assert kept == [True, True, False, True, False, True]
        assert [prediction.emitted for prediction in guesses.by_stage] == [0, 1, 4, 16]
        assert guesses.worker is not None and guesses.worker.emitted == 16


def predicting(spreads: dict[int, float], count: int = 400) -> Priors:
    """Return priors after requests whose worker predicted what remained after so many tokens, with an error of
    this spread."""
    priors, rng = Priors(), random.Random(1)
    for length in lengths(count, seed=2):
        guesses = Guesses()
        for emitted, spread in spreads.items():
            if emitted < length:
                remaining = off(length - emitted, spread, rng)
                guesses.predicted(priors.prediction("", remaining, emitted, MOST, guesses, ""))
        priors.observe_length("", length, guesses)
    return priors


class TestWorkers:
    def left(
        self, priors: Priors, remaining: float, at: int, emitted: int | None = None
    ) -> tuple[float, Basis]:
        guesses = Guesses()
        guesses.predicted(priors.prediction("", remaining, at, MOST, guesses, ""))
        found = priors.tokens_left("", at if emitted is None else emitted, MOST, guesses)
        return found.mean, found.basis

    def test_a_prediction_is_used_where_such_ones_were_better_than_none(self) -> None:
        priors = predicting({0: 3.0, 64: 0.3})
        assert self.left(priors, 20.0, 0)[1] is Basis.CLASS
        mean, basis = self.left(priors, 20.0, 64)
        assert basis is Basis.WORKER
        assert mean == pytest.approx(20, rel=0.2)

    def test_errors_to_both_sides_do_not_cancel(self) -> None:
        """With the predictions estimates are off by a factor of 4, up or down; without them by 2, always down."""
        history = StageHistory()
        for number in range(int(2 * ENOUGH_PREDICTIONS)):
            prediction = Prediction(100.0, 0)
            prediction.with_it = 25.0 if number % 2 else 400.0
            prediction.without_it = 50.0
            history.observe(prediction, 100)
        assert not history.is_used

    def test_all_of_it_is_kept(self) -> None:
        """Its fields are named one by one, since `dataclasses.asdict` is slow."""
        history = StageHistory(GuessHistory(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), 7.0, 8.0)
        assert history.to_dict() == asdict(history)

    def test_it_is_not_used_before_some_were_judged(self) -> None:
        for count in (int(ENOUGH_PREDICTIONS) - 1, 60):
            assert (self.left(predicting({0: 0.3}, count), 20.0, 0)[1] is Basis.WORKER) == (count == 60)

    @pytest.mark.parametrize("at", [20, 300, 1000])
    @pytest.mark.parametrize("remaining", [5.0, 60.0])
    def test_what_remains_is_read_as_what_remains(self, at: int, remaining: float) -> None:
        priors = predicting({0: 0.3, 16: 0.3, 64: 0.3, 256: 0.3, 1024: 0.3}, 3000)
        mean, _ = self.left(priors, remaining, at)
        assert mean == pytest.approx(remaining, rel=0.25)

    def test_as_it_runs_less_remains_of_the_prediction(self) -> None:
        priors = predicting({16: 0.3})
        means = [self.left(priors, 200.0, 16, emitted)[0] for emitted in (16, 66, 116, 166)]
        assert means == sorted(means, reverse=True)
        assert means[0] - means[2] == pytest.approx(100, rel=0.3)

    @pytest.mark.parametrize("remaining", [1.0, 1e300])
    @pytest.mark.parametrize(("at", "emitted"), [(50, 50), (10**9, 10), (49, 50), (0, 60)])
    def test_a_worker_may_claim_anything(self, remaining: float, at: int, emitted: int) -> None:
        priors = predicting({0: 0.3, 16: 0.3, 1024: 0.3}, 3000)
        guesses = Guesses()
        guesses.predicted(priors.prediction("", remaining, at, 50, guesses, ""))
        left = priors.tokens_left("", emitted, 50, guesses)
        assert 1 <= left.low <= left.mean <= left.high <= 50

    def test_a_bias_is_learned(self) -> None:
        priors, rng = Priors(), random.Random(1)
        for length in lengths(400, seed=2):
            guesses = Guesses()
            guesses.predicted(priors.prediction("", 3 * off(length, 0.2, rng), 0, MOST, guesses, ""))
            priors.observe_length("", length, guesses)
        assert self.left(priors, 300.0, 0)[0] == pytest.approx(100, rel=0.15)

    def test_it_survives_a_restart(self) -> None:
        priors = predicting({16: 0.3})
        again = Priors.from_dict(json.loads(json.dumps(priors.to_dict())))
        assert again.to_dict() == priors.to_dict()
        mine, theirs = self.left(priors, 200.0, 16), self.left(again, 200.0, 16)
        assert theirs == (pytest.approx(mine[0], rel=0.05), mine[1])
