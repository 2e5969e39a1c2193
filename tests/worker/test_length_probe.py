"""The probe of remaining output lengths, without a model: hidden states are drawn, and lengths depend on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from laps_sd.contract.length_probe import MAX_BYTES, LearntProbe, problem_with
from worker_svc.engine.length_probe.errors import RECENT_ROWS, STAGES, StageErrors, stage_of
from worker_svc.engine.length_probe.features import COUNT, DIMS, SCALARS, Projection
from worker_svc.engine.length_probe.probe import (
    EVERY_TOKENS,
    FEWEST_TOGETHER,
    FIRST_STUDIED,
    LEAST_REQUESTS,
    LEAST_TOKENS,
    MOST_KEPT,
    NEVER,
    STUDIED,
    LengthProbe,
    Watched,
)
from worker_svc.engine.length_probe.regression import Regression

HIDDEN = 64
LAYER = 3


def probe_of(model: str = "a1") -> LengthProbe:
    return LengthProbe(model, LAYER, HIDDEN)


@dataclass
class World:
    """Requests whose ln(length) is linear in the hidden state after the prompt, up to noise."""

    noise: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = np.random.RandomState(self.seed)
        self._direction = np.random.RandomState(99).standard_normal(HIDDEN) / math.sqrt(HIDDEN)

    def request(self) -> tuple[np.ndarray, int]:
        """Return a hidden state and the output length that belongs to it."""
        hidden = self._random.standard_normal(HIDDEN)
        log_length = 4.0 + hidden @ self._direction + self.noise * self._random.standard_normal()
        return hidden.astype(np.float32), max(1, round(math.exp(log_length)))


def teach(probe: LengthProbe, world: World, requests: int, *, max_tokens: int = 10**6) -> None:
    for _ in range(requests):
        hidden, length = world.request()
        watched = Watched(prompt_tokens=20)
        probe.look(watched, 0, hidden)
        probe.learn(watched, min(length, max_tokens), cut=length > max_tokens)


def predictions(probe: LengthProbe, world: World, requests: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Return ln(predicted) and ln(true) of new requests."""
    pairs = []
    for _ in range(requests):
        hidden, length = world.request()
        predicted = probe.look(Watched(prompt_tokens=20), 0, hidden)
        assert predicted is not None
        pairs.append((math.log(predicted), math.log(length)))
    found, truth = np.array(pairs).T
    return found, truth


# -- what it predicts ----------------------------------------------------------------------------------------


def test_it_finds_a_planted_relation() -> None:
    probe = probe_of()
    teach(probe, World(), 600)
    found, truth = predictions(probe, World(seed=1))
    assert np.sqrt(((found - truth) ** 2).mean()) < 0.45  # of which 0.3 is noise; the spread is 1.05
    assert np.corrcoef(found, truth)[0, 1] > 0.9


def test_it_predicts_nothing_before_it_has_learnt_from_enough_requests() -> None:
    probe, world = probe_of(), World(noise=0.0)
    for _ in range(LEAST_REQUESTS):
        assert probe.look(Watched(20), 0, world.request()[0]) is None
        teach(probe, world, 1)


def test_it_predicts_nothing_while_a_constant_is_as_good() -> None:
    probe = probe_of()
    rng = np.random.RandomState(3)
    for _ in range(400):  # lengths that have nothing to do with the hidden states
        watched = Watched(20)
        assert probe.look(watched, 0, rng.standard_normal(HIDDEN).astype(np.float32)) is None
        probe.learn(watched, int(np.exp(rng.normal(4, 1))) + 1, cut=False)
    assert probe.requests == 400


def test_a_stage_without_proof_gets_no_prediction_though_another_has_one() -> None:
    probe, world = probe_of(), World()
    teach(probe, world, 400)
    hidden = world.request()[0]
    assert probe.look(Watched(20), 0, hidden) is not None
    assert probe.look(Watched(20), EVERY_TOKENS, hidden) is None


def test_the_same_requests_give_the_same_probe() -> None:
    twins = probe_of(), probe_of()
    for probe in twins:
        teach(probe, World(), 100)
    assert twins[0].learnt() == twins[1].learnt()


def test_ends_are_learnt_from_together() -> None:
    probe, world = probe_of(), World()
    nothing = probe.errors.pack().tolist()
    teach(probe, world, FEWEST_TOGETHER - 1)
    assert probe.requests == FEWEST_TOGETHER - 1
    assert probe.errors.pack().tolist() == nothing
    teach(probe, world, 1)
    assert probe.errors.pack().tolist() != nothing


# -- cut requests --------------------------------------------------------------------------------------------


def test_a_cut_request_counts_as_longer_than_its_cut() -> None:
    whole, cut, short = probe_of(), probe_of(), probe_of()
    teach(whole, World(), 1500)
    teach(cut, World(), 1500, max_tokens=60)
    world = World()
    for _ in range(1500):  # the same, with the cut taken for an end
        hidden, length = world.request()
        watched = Watched(20)
        short.look(watched, 0, hidden)
        short.learn(watched, min(60, length), cut=False)
    mean = {name: predictions(one, World(seed=1))[0].mean() for name, one in
            (("whole", whole), ("cut", cut), ("short", short))}  # fmt: skip
    assert mean["short"] < mean["whole"] - 0.3
    assert abs(mean["cut"] - mean["whole"]) < 0.1


def test_errors_are_judged_by_requests_that_ended_by_themselves() -> None:
    probe = probe_of()
    teach(probe, World(), 200)
    before = probe.errors.pack().tolist()
    hidden, _ = World(seed=2).request()
    watched = Watched(20)
    probe.look(watched, 0, hidden)
    probe.learn(watched, 1, cut=True)
    assert probe.errors.pack().tolist() == before


# -- what cannot harm it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_hidden_state_that_is_not_finite_is_passed_over(broken: float) -> None:
    probe, world = probe_of(), World()
    teach(probe, world, 100)
    before = probe.learnt()
    hidden, _ = world.request()
    hidden[5] = broken
    watched = Watched(20)
    assert probe.look(watched, 0, hidden) is None
    assert not watched.looks
    assert watched.due == EVERY_TOKENS, "it looks again later"
    probe.learn(watched, 50, cut=False)
    assert probe.learnt() == before


def test_a_hidden_number_that_is_far_larger_than_the_others_spoils_one_feature() -> None:
    projection = Projection(4 * DIMS)
    hidden = np.random.RandomState(0).standard_normal((1, 4 * DIMS)).astype(np.float32)
    larger = hidden.copy()
    larger[0, 5] = 1e4
    scalars = np.ones((1, SCALARS), np.float32)
    one, other = (projection.features(states, scalars)[0] for states in (hidden, larger))
    assert np.flatnonzero(one != other).tolist() == [SCALARS + 5]


@pytest.mark.parametrize("hidden", [HIDDEN, DIMS, 4 * DIMS, 300])
def test_a_prediction_from_a_hidden_state_is_that_from_its_features(hidden: int) -> None:
    projection = Projection(hidden)
    rng = np.random.RandomState(1)
    weights = rng.standard_normal(COUNT).astype(np.float32)
    states = rng.standard_normal((3, hidden)).astype(np.float32)
    features = projection.features(states, np.zeros((3, SCALARS), np.float32))
    assert features.shape == (3, COUNT)
    assert np.allclose(states @ projection.reader(weights), features @ weights, atol=1e-3)


def test_a_model_with_such_numbers_can_pass_on_what_it_learnt() -> None:
    probe = probe_of()
    for _ in range(40):
        hidden, length = World().request()
        hidden[5] = 1e5
        watched = Watched(20)
        probe.look(watched, 0, hidden)
        probe.learn(watched, length, cut=False)
    assert problem_with(probe.learnt()) == ""


def test_features_that_never_change_are_harmless() -> None:
    regression = Regression(COUNT)
    rows = np.ones((40, COUNT), np.float32)
    regression.learn(rows, np.full(40, 3.0), np.zeros(40, bool))
    assert regression.weights is not None
    assert math.isclose(float(rows[0] @ regression.weights), 3.0, abs_tol=1e-6)


# -- when it looks -------------------------------------------------------------------------------------------


def test_it_looks_after_the_prompt_and_every_so_many_tokens() -> None:
    probe, (hidden, _) = probe_of(), World().request()
    watched = Watched(20)
    assert watched.due == 0
    probe.look(watched, 0, hidden)
    assert watched.due == EVERY_TOKENS
    probe.look(watched, EVERY_TOKENS + 3, hidden)
    assert watched.due == 2 * EVERY_TOKENS + 3


def test_it_looks_again_once_the_predicted_total_is_passed() -> None:
    probe, world = probe_of(), World()
    teach(probe, world, 400)
    found = []
    for _ in range(50):
        watched = Watched(20)
        predicted = probe.look(watched, 0, world.request()[0])
        assert predicted is not None
        assert watched.due == int(min(EVERY_TOKENS, max(LEAST_TOKENS, predicted)))
        found.append(watched.due)
    assert min(found) < max(found) == EVERY_TOKENS


def test_where_predictions_are_no_better_only_some_requests_are_looked_at() -> None:
    probe, world = probe_of(), World()
    assert all(probe.watch(20).studied for _ in range(2 * STUDIED))
    teach(probe, world, FIRST_STUDIED)
    hidden = world.request()[0]
    due = []
    for _ in range(4 * STUDIED):
        watched = probe.watch(20)
        assert probe.look(watched, 0, hidden) is not None, "after the prompt predictions are good"
        due.append(watched.due)
    assert due.count(NEVER) == 3 * STUDIED
    assert all(at <= EVERY_TOKENS for at in due if at != NEVER)


def test_where_predictions_are_good_every_request_is_looked_at() -> None:
    probe, world = probe_of(), World()
    for _ in range(FIRST_STUDIED + LEAST_REQUESTS):
        hidden, length = world.request()
        watched = Watched(20)
        for tokens in (0, EVERY_TOKENS):
            probe.look(watched, tokens, hidden)
        probe.learn(watched, EVERY_TOKENS + length, cut=False)
    for _ in range(2 * STUDIED):
        watched = probe.watch(20)
        probe.look(watched, 0, world.request()[0])
        assert watched.due <= EVERY_TOKENS


def test_the_looks_kept_of_a_request_are_bounded_and_spread() -> None:
    probe, (hidden, _) = probe_of(), World().request()
    watched = Watched(20)
    for at in range(1000):
        probe.look(watched, at * EVERY_TOKENS, hidden)
        assert len(watched.looks) <= MOST_KEPT
    assert watched.looks[0].output_tokens == 0
    assert watched.looks[len(watched.looks) // 2].output_tokens > 200 * EVERY_TOKENS


def test_stages_go_by_powers_of_four() -> None:
    assert [stage_of(n) for n in (0, 1, 3, 4, 15, 16, 63, 64, 255, 256, 4095, 4096, 10**6)] == [
        0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 7,
    ]  # fmt: skip


# -- what it says about itself -------------------------------------------------------------------------------


def test_errors_are_those_of_predictions_made_before_the_end() -> None:
    errors = StageErrors()
    errors.observe(0, 1.0, 5.0)  # no mean yet: nothing to compare with
    errors.observe(0, 3.0, 2.0)
    assert errors.rms(0) == (1.0, 2.0)
    assert errors.rms(1) == (0.0, 0.0)


def test_old_errors_fade() -> None:
    errors = StageErrors()
    for at in range(10 * int(RECENT_ROWS)):
        errors.observe(0, float(at % 2), 9.0 if at < 300 else float(at % 2))
    assert errors.good(0)
    assert errors.rms(0)[0] < 0.1


# -- from and to other workers -------------------------------------------------------------------------------


def test_another_probe_continues_from_what_one_has_learnt() -> None:
    probe, heir = probe_of(), probe_of()
    teach(probe, World(), 300)
    learnt = probe.learnt()
    assert problem_with(learnt) == ""
    assert len(learnt.numbers) <= MAX_BYTES
    assert heir.adopt(learnt)
    assert heir.requests == 300
    ours, theirs = (predictions(one, World(seed=1))[0] for one in (probe, heir))
    assert np.abs(ours - theirs).max() < 0.05
    teach(heir, World(seed=5), 300)
    found, truth = predictions(heir, World(seed=6))
    assert np.sqrt(((found - truth) ** 2).mean()) < 0.45


def test_what_is_passed_on_twice_stays_what_it_was() -> None:
    probe, heir = probe_of(), probe_of()
    teach(probe, World(), 300)
    assert heir.adopt(probe.learnt())
    ours, theirs = (np.frombuffer(one.learnt().numbers, "<f2").astype(float) for one in (probe, heir))
    assert np.abs(ours - theirs).max() <= 0.01


def test_an_empty_probe_can_be_passed_on() -> None:
    probe, heir = probe_of(), probe_of()
    teach(probe, World(), 1)
    assert heir.adopt(probe.learnt())
    assert heir.requests == 1


def changed(numbers: bytes, place: int, value: float) -> bytes:
    values = np.frombuffer(numbers, "<f2").copy()
    values[place] = value
    return values.tobytes()


@pytest.mark.parametrize(
    "damage",
    [
        lambda learnt: replace(learnt, kind=replace(learnt.kind, dims=64)),
        lambda learnt: replace(learnt, kind=replace(learnt.kind, layer=LAYER + 1)),
        lambda learnt: replace(learnt, kind=replace(learnt.kind, seed=2)),
        lambda learnt: replace(learnt, kind=replace(learnt.kind, model="b2")),
        lambda learnt: replace(learnt, numbers=learnt.numbers[:-2]),
        lambda learnt: replace(learnt, numbers=learnt.numbers + b"\0\0"),
        lambda learnt: replace(learnt, numbers=learnt.numbers[:-1]),
        lambda learnt: replace(learnt, numbers=b""),
        lambda learnt: replace(learnt, numbers=changed(learnt.numbers, 700, math.nan)),
        lambda learnt: replace(learnt, numbers=changed(learnt.numbers, 700, math.inf)),
        lambda learnt: replace(learnt, numbers=changed(learnt.numbers, 0, -1.0)),  # rows
        lambda learnt: replace(learnt, numbers=changed(learnt.numbers, 0, 60000.0)),
        lambda learnt: replace(learnt, numbers=changed(learnt.numbers, 3, 7.0)),  # the constant
        lambda learnt: replace(learnt, requests=0),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(damage) -> None:
    probe, other = probe_of(), probe_of()
    teach(other, World(), 60)
    learnt = damage(other.learnt())
    teach(probe, World(seed=1), 20)
    before = probe.learnt()
    assert not probe.adopt(learnt)
    assert probe.learnt() == before


def test_what_was_learnt_from_fewer_requests_is_refused() -> None:
    probe, other = probe_of(), probe_of()
    teach(probe, World(), 60)
    teach(other, World(), 60)
    assert not probe.adopt(other.learnt())


def test_numbers_that_are_finite_and_senseless_give_finite_predictions_or_none() -> None:
    rng = np.random.RandomState(0)
    base = probe_of()
    teach(base, World(), 60)
    size = len(base.learnt().numbers) // 2
    hidden = World().request()[0]
    adopted = 0
    for _ in range(30):
        numbers = rng.uniform(-100, 100, size).astype("<f2")
        for at in (0, Regression.packed(COUNT)):
            numbers[at], numbers[at + 3], numbers[at + 3 + COUNT] = 6.0, 1.0, 0.0
        probe = probe_of()
        adopted += probe.adopt(LearntProbe(probe.kind, 100, numbers.tobytes()))
        for tokens in (0, 64):
            predicted = probe.look(Watched(20), tokens, hidden)
            assert predicted is None or 1.0 <= predicted <= math.exp(20)
    assert adopted


def test_a_problem_of_a_peers_probe_is_named() -> None:
    probe = probe_of()
    teach(probe, World(), 10)
    learnt = probe.learnt()
    for wrong, words in (
        (replace(learnt, kind=replace(learnt.kind, model="")), "name"),
        (replace(learnt, kind=replace(learnt.kind, model="a" * 129)), "name"),
        (replace(learnt, kind=replace(learnt.kind, model="a:b")), "name"),
        (replace(learnt, kind=replace(learnt.kind, layer=-1)), "layer"),
        (replace(learnt, requests=2**32), "requests"),
        (replace(learnt, numbers=bytes(MAX_BYTES + 2)), "bytes"),
    ):
        assert words in problem_with(wrong)


def test_every_stage_has_a_place() -> None:
    assert len(StageErrors().pack()) == StageErrors.PACKED == 5 * STAGES
