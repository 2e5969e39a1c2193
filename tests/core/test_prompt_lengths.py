"""Output lengths learned from the words of prompts."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import struct
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laps_sd.contract.ends import End
from laps_sd.contract.length_features import FEATURES, FeatureHash, packed
from scheduler_svc.core.estimates.basis import Basis
from scheduler_svc.core.estimates.errors import EstimateErrors
from scheduler_svc.core.estimates.full_covariance import (
    EVERYONE_VARIANCE,
    LOCATION_VARIANCE,
    START_VARIANCE,
    WEIGHT_VARIANCE,
)
from scheduler_svc.core.estimates.lengths import DEFAULT_LOG_MEAN
from scheduler_svc.core.estimates.priors import MAX_CLASSES, Priors
from scheduler_svc.core.estimates.prompt_lengths import (
    ERROR_VARIANCE,
    LEARNED_ENOUGH,
    LEARNED_EXACTLY,
    PREDICTED_UNSETTLED,
    PromptLengths,
)
from scheduler_svc.core.estimates.sources import Guesses
from scheduler_svc.core.events import RequestFacts
from scheduler_svc.core.handlers.learning import FIRST_OUTLIVED, OUTLIVED_UNTIL, Learner
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.shard import Shard
from tests.core.cluster import Cluster
from tests.core.jobs import Job, facts

SUBJECTS = [f"subject{chr(97 + n)}{chr(97 + m)}" for n in range(12) for m in range(8)]
TASKS = {"name": 8.0, "list": 60.0, "explain": 250.0, "write": 700.0}
HASHED = FeatureHash()


def prompts(count: int, seed: int = 1, spread: float = 0.3) -> list[tuple[bytes, int]]:
    """Return prompts whose task gives their length away, up to an error of this spread."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        task = rng.choice(sorted(TASKS))
        text = f"please {task} me something about {rng.choice(SUBJECTS)} and {rng.choice(SUBJECTS)}"
        made.append(
            (packed(HASHED.features_of(text)), math.ceil(rng.lognormvariate(math.log(TASKS[task]), spread)))
        )
    return made


def learned(
    observed: Sequence[tuple[bytes, int]], lengths: PromptLengths | None = None, tenant: str = ""
) -> PromptLengths:
    lengths = lengths or PromptLengths()
    for features, length in observed:
        lengths.learn(features, "", tenant, length, cut=False)
    return lengths


def log_error(lengths: PromptLengths, asked: Sequence[tuple[bytes, int]], tenant: str = "") -> float:
    """Return the root mean square of ln(length / prediction)."""
    squares = []
    for features, length in asked:
        predicted = lengths.predict(features, "", tenant)
        assert predicted is not None
        squares.append(math.log(length / predicted) ** 2)
    return math.sqrt(sum(squares) / len(squares))


def started(factor: float = 1.0) -> PromptLengths:
    """Return a predictor that starts with the weights of the task words, times a factor."""
    weights = [0.0] * FEATURES
    mean = sum(map(math.log, TASKS.values())) / len(TASKS)
    for task, length in TASKS.items():
        (feature,) = set(HASHED.features_of(f"please {task}")) & set(
            HASHED.features_of(f"{task} please")
        ) - set(HASHED.features_of("please"))
        weights[feature] = factor * 4.5 * (math.log(length) - mean)
    return PromptLengths(weights, "tasks")


class TestLearning:
    def test_it_finds_the_words_that_tell(self) -> None:
        asked = prompts(200, seed=2)
        assert log_error(learned(prompts(20)), asked) > 0.8
        assert log_error(learned(prompts(60)), asked) < 0.75
        assert log_error(learned(prompts(300)), asked) < 0.5
        assert log_error(learned(prompts(2000)), asked) < 0.38, "0.3 is in the lengths themselves"

    def test_it_predicts_nothing_before_it_knows_something(self) -> None:
        features = prompts(1)[0][0]
        lengths = learned(prompts(int(LEARNED_ENOUGH) - 1))
        assert lengths.predict(features, "", "") is None
        lengths.learn(features, "", "", 10, cut=False)
        assert lengths.predict(features, "", "") is not None

    def test_a_request_without_features_neither_teaches_nor_gets_a_prediction(self) -> None:
        lengths = learned(prompts(50))
        before = lengths.to_dict()
        lengths.learn(b"", "", "", 10, cut=False)
        assert lengths.to_dict() == before
        assert lengths.predict(b"", "", "") is None

    @pytest.mark.parametrize("begin", [PromptLengths, started])
    def test_learning_returns_what_would_have_been_predicted_before(
        self, begin: Callable[[], PromptLengths]
    ) -> None:
        lengths = begin()
        for features, length in prompts(int(LEARNED_ENOUGH) + 5):
            predicted = lengths.predict(features, "class", "tenant")
            assert lengths.outlived(features, "class", "tenant", length) == predicted
            predicted = lengths.predict(features, "class", "tenant")
            assert lengths.learn(features, "class", "tenant", length, cut=False) == predicted
        assert predicted is not None
        predicted = lengths.predict(features, "class", "tenant")
        assert lengths.learn(features, "class", "tenant", 1, cut=True) == predicted, (
            "though it teaches nothing"
        )
        assert lengths.predict(features, "class", "tenant") == predicted

    def test_it_follows_a_change(self) -> None:
        lengths = learned(prompts(3000))
        changed = [(features, 5 * length) for features, length in prompts(600, seed=3)]
        assert log_error(lengths, changed) > 1.4
        assert log_error(learned(changed, lengths), changed[-200:]) < 0.6

    def test_the_same_requests_in_the_same_order_teach_the_same(self) -> None:
        assert learned(prompts(100)).to_dict() == learned(prompts(100)).to_dict()

    def test_classes_and_tenants_have_their_own_location(self) -> None:
        lengths = PromptLengths()
        for n, (features, length) in enumerate(prompts(600)):
            tenant, factor = ("short", 0.2) if n % 2 else ("long", 5.0)
            lengths.learn(features, tenant + " class", tenant, math.ceil(factor * length), cut=False)
        features = prompts(1, seed=9)[0][0]
        of_long = lengths.predict(features, "long class", "long")
        of_short = lengths.predict(features, "short class", "short")
        assert of_long is not None and of_short is not None
        assert of_long / of_short == pytest.approx(25, rel=0.4)

    def test_a_tenant_whose_prompts_look_short_is_known_after_a_few_requests(self) -> None:
        lengths = learned(prompts(1000))
        short = [(features, 700) for features, length in prompts(2000, seed=4) if length < 15][:20]
        assert log_error(lengths, short, "honest") > 3.5
        for features, length in short:
            lengths.learn(features, "", "liar", length, cut=False)
        assert log_error(lengths, short, "liar") < 0.5 * log_error(lengths, short, "honest")

    @given(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, FEATURES - 1), unique=True, max_size=256).map(
                    lambda ids: packed(sorted(ids))
                ),
                st.sampled_from(["", "a", "b"]),
                st.integers(1, 10**7),
                st.booleans(),
            ),
            max_size=60,
        )
    )
    @settings(max_examples=60, deadline=None)
    def test_no_sequence_of_requests_makes_a_prediction_that_is_none(
        self, observed: list[tuple[bytes, str, int, bool]]
    ) -> None:
        lengths = PromptLengths([0.5] * FEATURES, "half")
        for features, name, length, cut in observed:
            lengths.learn(features, name, name, length, cut)
            predicted = lengths.predict(features, name, name)
            assert predicted is None if not features else 1 <= (predicted or 0) <= 1.01e7


def burst_ended(at_arrival: float) -> Priors:
    """Return the priors after a burst, all of which were predicted to have `at_arrival` tokens."""
    priors = Priors()
    learner = Learner(priors, EstimateErrors(), Shard(2, reserved_share=False))
    for features, length in prompts(200):
        facts = RequestFacts("r", 0, 0.0, "", 0, "", 20, 4000, None, length_features=features)
        guesses = Guesses(prompt=at_arrival, predicted_again_at=LEARNED_ENOUGH)
        learner.learn_end(End.STOP, Request(facts, guesses=guesses, emitted=length, kept_estimates={}))
    return priors


class TestJudgement:
    def test_what_counts_is_what_it_would_predict_now_and_not_what_it_said_at_arrival(self) -> None:
        """A burst arrives while nothing is known. Its predictions say nothing of those after it."""
        priors = burst_ended(at_arrival=50.0)

        for features, length in prompts(20, seed=2, spread=0.0):
            left = priors.tokens_left("", 0, 4000, Guesses(prompt=priors.prompts.predict(features, "", "")))
            assert left.basis is Basis.PROMPT
            assert 0.5 * length < left.mean < 2 * length

    def test_a_predictor_that_begins_anew_is_judged_anew(self) -> None:
        """With other start weights, or of another vocabulary."""
        saved = burst_ended(at_arrival=50.0).to_dict()
        same = Priors.from_dict(saved, PromptLengths()).to_dict()
        anew = Priors.from_dict(saved, PromptLengths(start_name="another")).to_dict()

        assert same["predictions"] == saved["predictions"]
        assert anew["predictions"] == Priors().to_dict()["predictions"]


class TestCutRequests:
    CUT = 32

    def observed(self, share: float) -> PromptLengths:
        """Return what it learns if this share of the requests is cut after `CUT` tokens."""
        rng, lengths = random.Random(8), PromptLengths()
        for features, length in prompts(2000):
            cut = rng.random() < share and length > self.CUT
            lengths.learn(features, "", "", self.CUT if cut else length, cut)
        return lengths

    @pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
    def test_they_are_longer_than_the_cut(self, share: float) -> None:
        asked = [(features, length) for features, length in prompts(300, seed=2)]
        assert log_error(self.observed(share), asked) < log_error(self.observed(0.0), asked) + 0.1

    def test_a_cut_far_below_the_prediction_teaches_nothing(self) -> None:
        lengths = learned(prompts(500))
        features = next(features for features, length in prompts(50, seed=5) if length > 500)
        before = lengths.predict(features, "", "")
        lengths.learn(features, "", "", 5, cut=True)
        assert lengths.predict(features, "", "") == before

    def test_a_cut_above_the_prediction_raises_it(self) -> None:
        lengths = learned(prompts(500))
        features = next(features for features, length in prompts(50, seed=5) if length < 15)
        before = lengths.predict(features, "", "")
        lengths.learn(features, "", "", 500, cut=True)
        after = lengths.predict(features, "", "")
        assert before is not None and after is not None and after > 1.1 * before

    @pytest.mark.parametrize("before", [40, 500], ids=["of the first requests", "of later ones"])
    def test_one_shows_less_than_an_end_where_it_is_expected_to_end(self, before: int) -> None:
        """A cut at the prediction: the expected rest is that of half of a normal distribution."""
        features = next(features for features, length in prompts(50, seed=5) if length > 500)
        at_cut, at_end = learned(prompts(before)), learned(prompts(before))
        predicted = at_cut.predict(features, "", "")
        assert predicted is not None
        at_cut.learn(features, "", "", round(predicted), cut=True)
        beyond = math.exp(math.sqrt(ERROR_VARIANCE * 2 / math.pi))
        at_end.learn(features, "", "", round(predicted * beyond), cut=False)
        after_cut, after_end = (one.predict(features, "", "") for one in (at_cut, at_end))

        assert after_cut is not None and after_end is not None
        assert 1.02 < after_cut / predicted < 0.98 * after_end / predicted


def served(count: int, at_once: int, *, outlived: bool) -> PromptLengths:
    """Return what it learns of requests that run side by side, one token each in a round; `outlived`: of those that
    still run too, as the core shows them (`Learner.learn_running`)."""
    lengths, waiting = PromptLengths(), deque(prompts(count))
    running: list[tuple[int, bytes, int]] = []
    for now in itertools.count():
        running += [(now, *waiting.popleft()) for _ in range(min(at_once - len(running), len(waiting)))]
        if not running:
            return lengths
        for began, features, length in running:
            emitted = now + 1 - began
            if emitted == length:
                lengths.learn(features, "", "", length, cut=False)
            elif outlived and emitted >= FIRST_OUTLIVED and emitted.bit_count() == 1:
                lengths.outlived(features, "", "", emitted)
        running = [each for each in running if now + 1 - each[0] < each[2]]
    raise AssertionError("unreachable")


def ridge(
    observed: Sequence[tuple[bytes, str, str, int]],
    asked: Sequence[tuple[bytes, str, str]],
    start: Sequence[float] | None,
) -> list[float]:
    """Return the ln(length) that ridge regression predicts, all at once: of every number its own weight, a
    location of all, of each class and of each tenant, and, beside start weights, their factor."""

    def kernel(one: tuple[bytes, str, str], other: tuple[bytes, str, str]) -> float:
        (words, of_class, tenant), (others, other_class, other_tenant) = one, other
        common = len(numbers(words) & numbers(others)) / math.sqrt(size(words) * size(others))
        locations = LOCATION_VARIANCE * ((of_class == other_class) + (tenant == other_tenant))
        factor = START_VARIANCE * started_sum(words) * started_sum(others)
        return WEIGHT_VARIANCE * common + EVERYONE_VARIANCE + locations + factor

    def numbers(words: bytes) -> set[int]:
        return set(struct.unpack(f"<{len(words) // 2}H", words))

    def size(words: bytes) -> int:
        return len(words) // 2 + 1

    def started_sum(words: bytes) -> float:
        return sum(start[n] for n in numbers(words)) / math.sqrt(size(words)) if start else 0.0

    known = [(words, of_class, tenant) for words, of_class, tenant, _ in observed]
    covariance = np.array([[kernel(one, other) for other in known] for one in known])
    errors = [math.log(length) - DEFAULT_LOG_MEAN - started_sum(words) for words, _, _, length in observed]
    shares = np.linalg.solve(covariance + ERROR_VARIANCE * np.eye(len(known)), errors)
    return [
        DEFAULT_LOG_MEAN
        + started_sum(one[0])
        + float(np.dot([kernel(one, other) for other in known], shares))
        for one in asked
    ]


class TestFirstRequests:
    """They are learned from exactly: as long as there are few, much is lost by a diagonal covariance."""

    @pytest.mark.parametrize("factor", [None, 0.5])
    @pytest.mark.parametrize("count", [25, LEARNED_EXACTLY])
    def test_predictions_are_those_of_ridge_regression(self, count: int, factor: float | None) -> None:
        rng = random.Random(3)
        lengths = PromptLengths() if factor is None else started(factor)
        # Beside start weights the prediction is the mean of two sums: the one with them is compared.
        start = lengths._start or None
        lengths._fresh_loss, lengths._warm_loss = 1e9, 0.0
        # Not so far apart that an error would be limited.
        observed = [
            (words, rng.choice("ab"), rng.choice(["one", "two", "three"]), min(200, max(40, length)))
            for words, length in prompts(count, spread=0.1)
        ]
        for words, of_class, tenant, length in observed:
            lengths.learn(words, of_class, tenant, length, cut=False)
        asked = [(words, "b", "two") for words, _ in prompts(40, seed=2)]
        expected = ridge(observed, asked, start)
        assert [math.log(lengths.predict(*one) or 0.0) for one in asked] == pytest.approx(expected)

    def test_one_that_runs_raises_what_is_like_it_and_not_what_is_known_to_be_short(self) -> None:
        """Words in common with short requests are not to blame."""
        common, of_short, of_long = range(100, 110), range(200, 210), range(300, 310)
        short, long = packed([*common, *of_short]), packed([*common, *of_long])
        lengths = learned([(short, 5)] * 40)
        before = [lengths.predict(words, "", "") or 0.0 for words in (short, long)]
        lengths.outlived(long, "", "", 1000)
        after = [lengths.predict(words, "", "") or 0.0 for words in (short, long)]
        assert after[0] < 1.2 * before[0]
        assert after[1] > 3 * before[1]

    def test_the_weights_of_others_change_only_when_many_predictions_read_them(self) -> None:
        """In a burst many requests that run are learned from before the next prediction, and after an end there may be one."""
        lengths = learned([(packed(range(200, 210)), 5)] * 40)
        lengths.to_dict()
        before = lengths._fresh[200]
        for tokens in (100, 200, 400):
            lengths.outlived(packed(range(300, 310)), "", "", tokens)
        for _ in range(PREDICTED_UNSETTLED):
            lengths.predict(packed([1]), "", "")
            assert lengths._fresh[200] == before
        lengths.predict(packed([1]), "", "")
        assert lengths._fresh[200] < before

    def test_it_predicts_the_same_however_often_it_has_predicted(self) -> None:
        seldom, often = PromptLengths(), PromptLengths()
        for number, (words, length) in enumerate(prompts(LEARNED_EXACTLY + 10)):
            expected = [often.predict(words, "", "") for _ in range(1 + number % (PREDICTED_UNSETTLED + 3))]
            assert expected == [pytest.approx(expected[0])] * len(expected)
            for lengths in (seldom, often):
                if number % 3 == 0:
                    lengths.outlived(words, "", "", max(1, length // 2))
                before = lengths.learn(words, "", "", length, cut=number % 5 == 0)
            assert number % 3 == 0 or before == pytest.approx(expected[0])
        for words, _ in prompts(40, seed=2):
            assert seldom.predict(words, "", "") == pytest.approx(often.predict(words, "", ""))

    def test_after_them_it_goes_on_learning(self) -> None:
        asked = prompts(200, seed=2, spread=0.01)
        lengths = learned(prompts(LEARNED_EXACTLY))
        few = log_error(lengths, asked)
        assert log_error(learned(prompts(1000, seed=4), lengths), asked) < 0.8 * few

    def test_a_new_leader_goes_on_without_them(self) -> None:
        """Only the weights are on the record."""
        before = learned(prompts(100))
        after = PromptLengths()
        assert after.restore(json.loads(json.dumps(before.to_dict())))
        asked = prompts(200, seed=2)
        assert log_error(learned(prompts(1000, seed=4), after), asked) < 0.5


class TestRequestsThatRun:
    """Of those that run side by side the short ones end first."""

    def test_the_first_ends_of_a_burst_do_not_make_everything_look_short(self) -> None:
        asked = prompts(200, seed=2)
        misled = log_error(served(400, 200, outlived=False), asked)
        assert log_error(served(400, 200, outlived=True), asked) < 0.5 * misled

    def test_little_is_lost_where_one_runs_after_the_other(self) -> None:
        asked = prompts(200, seed=2)
        alone = log_error(served(400, 1, outlived=False), asked)
        assert log_error(served(400, 1, outlived=True), asked) < alone + 0.1

    def test_a_request_that_ran_longer_than_predicted_is_predicted_longer(self) -> None:
        lengths = learned(prompts(500))
        features = next(features for features, length in prompts(50, seed=5) if length < 15)
        before = lengths.predict(features, "", "")
        lengths.outlived(features, "", "", 128)
        after = lengths.predict(features, "", "")
        assert before is not None and after is not None and after > 1.1 * before

    @pytest.mark.parametrize("before", [40, 500], ids=["of the first requests", "of later ones"])
    def test_the_first_of_a_class_or_tenant_raises_what_the_others_of_it_get(self, before: int) -> None:
        lengths = learned(prompts(before))
        lengths.outlived(prompts(1, seed=7)[0][0], "new", "too", 4000)
        other = prompts(1, seed=8)[0][0]
        for names, of_others in ((("new", ""), ("another", "")), (("", "too"), ("", "another"))):
            raised, unchanged = lengths.predict(other, *names), lengths.predict(other, *of_others)
            assert raised is not None and unchanged is not None
            assert raised > 1.02 * unchanged

    def test_one_that_has_just_begun_shows_nothing(self) -> None:
        lengths = learned(prompts(500))
        before = lengths.to_dict()
        lengths.outlived(next(features for features, length in prompts(50) if length > 500), "", "", 16)
        lengths.outlived(b"", "", "", 4000)
        assert lengths.to_dict() == before

    def test_they_are_not_counted_among_those_that_ended(self) -> None:
        lengths = learned(prompts(int(LEARNED_ENOUGH) - 1))
        lengths.outlived(prompts(1)[0][0], "", "", 1000)
        assert lengths.predict(prompts(1)[0][0], "", "") is None

    def test_what_a_request_shows_of_itself_while_it_runs_does_not_count_when_its_prediction_is_judged(
        self,
    ) -> None:
        """Otherwise words that show nothing would seem to."""
        priors, rng = Priors(), random.Random(4)
        learner = Learner(priors, EstimateErrors(), Shard(2, reserved_share=False))
        for _ in range(300):
            features, length = rng.choice(prompts(200))[0], math.ceil(rng.lognormvariate(4.5, 1.0))
            facts = RequestFacts("r", 0, 0.0, "", 0, "", 20, 4000, None, length_features=features)
            guesses = Guesses(
                prompt=priors.prompts.predict(features, "", ""), predicted_again_at=LEARNED_ENOUGH
            )
            request = Request(facts, guesses=guesses, kept_estimates={})
            for tokens in (1 << power for power in range(4, length.bit_length())):
                before, request.emitted = request.emitted, tokens
                learner.learn_running(request, before)
            request.emitted = length
            learner.learn_end(End.STOP, request)

        means = [
            priors.tokens_left("", 0, 4000, Guesses(prompt=priors.prompts.predict(features, "", ""))).mean
            for features, _ in prompts(50, seed=3)
        ]
        assert max(means) < 1.3 * min(means)

    @pytest.mark.parametrize(
        ("steps", "learns"),
        [((15,), []), ((15, 16), [16]), ((3, 17, 31), [17]), ((40, 63, 64, 65), [40, 64]), ((5, 500), [500])],
    )
    def test_the_core_learns_each_time_that_the_output_has_doubled(
        self, steps: Sequence[int], learns: Sequence[int]
    ) -> None:
        priors, features = Priors(), prompts(1)[0][0]
        learned([(features, 4)] * 50, priors.prompts)  # so that 16 tokens show something
        priors.observe_tokens("", 3)
        learner = Learner(priors, EstimateErrors(), Shard(2, reserved_share=False))
        request = Request(RequestFacts("r", 0, 0.0, "", 0, "", 20, 4000, None, length_features=features))
        found = []
        for emitted in steps:
            before, request.emitted = request.emitted, emitted
            known = priors.prompts.predict(features, "", "")
            learner.learn_running(request, before)
            if priors.prompts.predict(features, "", "") != known:
                found.append(emitted)
        assert found == learns

    def test_with_a_thousand_ended_requests_only_ends_count(self) -> None:
        priors, features = Priors(), prompts(1)[0][0]
        learned([(features, 4)] * int(OUTLIVED_UNTIL), priors.prompts)
        priors.observe_tokens("", 3)
        known = priors.prompts.to_dict()
        request = Request(RequestFacts("r", 0, 0.0, "", 0, "", 20, 4000, None, length_features=features))
        request.emitted = 500
        Learner(priors, EstimateErrors(), Shard(2, reserved_share=False)).learn_running(request, 0)
        assert priors.prompts.to_dict() == known


class TestWaitingRequests:
    def test_one_that_runs_takes_no_place_from_a_class(self) -> None:
        """As in `Priors`, which has as many classes as it may have."""
        priors, features = Priors(), prompts(1)[0][0]
        for i in range(MAX_CLASSES):
            priors.observe_tokens(f"class {i}", 3)
        request = Request(RequestFacts("r", 0, 0.0, "", 0, "new", 20, 4000, None, length_features=features))
        request.emitted = 500
        Learner(priors, EstimateErrors(), Shard(2, reserved_share=False)).learn_running(request, 0)
        assert priors.prompts.classes == {}

    def test_a_burst_is_ordered_by_what_its_first_requests_have_shown(self) -> None:
        """All arrive before anything is learned."""

        def mean_latency_s(*, words: bool) -> float:
            cluster = Cluster("laps-sd", [facts("w", slots=8, blocks=100_000)], check=False)
            cluster.submit(
                [
                    Job(
                        f"r{at}", 0.0, 20, length, max_tokens=4000, length_features=features if words else b""
                    )
                    for at, (features, length) in enumerate(prompts(400))
                ]
            )
            cluster.run()
            return statistics.fmean(cluster.finished_s.values())

        assert mean_latency_s(words=True) < 0.8 * mean_latency_s(words=False)


class TestStartWeights:
    def test_they_help_at_once_where_they_fit(self) -> None:
        asked = prompts(200, seed=2)
        assert log_error(learned(prompts(30), started()), asked) < 0.75 * log_error(
            learned(prompts(30)), asked
        )

    def test_they_are_soon_ignored_where_they_mislead(self) -> None:
        asked = prompts(200, seed=2)
        scratch, misled = learned(prompts(300)), learned(prompts(300), started(-1.0))
        assert log_error(misled, asked) < 1.05 * log_error(scratch, asked)

    def test_they_predict_before_anything_was_learned(self) -> None:
        lengths = started()
        predicted = [lengths.predict(features, "", "") for features, _ in prompts(50)]
        assert max(map(float, filter(None, predicted))) > 10 * min(map(float, filter(None, predicted)))


class TestTheRecord:
    def test_there_and_back(self) -> None:
        lengths = learned(prompts(400), started())
        again = started()
        again.restore(json.loads(json.dumps(lengths.to_dict())))
        assert again.to_dict() == lengths.to_dict()
        asked = prompts(100, seed=2)
        assert log_error(again, asked) == pytest.approx(log_error(lengths, asked), rel=0.02)

    @pytest.mark.parametrize("steps", [-300, -127, -126, -2, -1, 0, 1, 2, 126, 127, 300])
    def test_a_weight_of_either_sign_comes_back_within_its_bounds(self, steps: int) -> None:
        lengths = learned(prompts(100))
        feature = 0x1234
        lengths._fresh[feature] = steps / 48
        lengths._variances[feature] = 0.5
        again = PromptLengths()
        again.restore(lengths.to_dict())
        assert again._fresh[feature] == pytest.approx(min(max(-127, steps), 127) / 48)

    def test_no_word_is_forgotten_by_restarts(self) -> None:
        """Of long prompts each word is known little better after a request."""
        rng, lengths, again = random.Random(1), started(), started()
        for _ in range(200):
            features = packed(sorted(rng.sample(range(FEATURES), 200)))
            lengths.learn(features, "", "", rng.randint(1, 5000), cut=False)
        lengths.outlived(packed([0x1234]), "", "", 5000)
        kept = lengths.to_dict()
        again.restore(kept)
        assert again._warm[0x1234] > 0
        assert again._encoded() == kept["weights"]

    @pytest.mark.parametrize("feature", [0x00FF, 0x0100, 0x7F00, FEATURES - 1])
    def test_a_feature_is_read_of_both_of_its_bytes(self, feature: int) -> None:
        lengths = PromptLengths()
        for _ in range(int(LEARNED_ENOUGH)):
            lengths.learn(packed([feature]), "", "", 500, cut=False)
        lengths.to_dict()  # makes the weights those of all that was learned
        assert [at for at in range(FEATURES) if lengths._fresh[at]] == [feature]

    def test_with_other_start_weights_or_another_format_it_begins_anew(self) -> None:
        kept = learned(prompts(400), started()).to_dict()
        for other in (kept | {"format": 99}, kept | {"start": "others"}):
            again = started()
            again.restore(other)
            assert again.to_dict() == started().to_dict()

    def test_it_is_small_however_much_it_has_learned(self) -> None:
        rng, lengths = random.Random(1), PromptLengths()
        for n in range(2000):
            features = packed(sorted(rng.sample(range(FEATURES), 200)))
            lengths.learn(features, f"class {n % 256}", f"tenant {n}", rng.randint(1, 5000), cut=False)
        blob = lengths.to_dict()
        assert len(json.dumps(blob)) < 200_000
        assert (len(blob["classes"]), len(blob["tenants"])) == (256, 512)

    def test_weights_are_encoded_again_when_they_have_learned_more(self) -> None:
        lengths = learned(prompts(1000))
        first = lengths.to_dict()["weights"]
        learned(prompts(19, seed=2), lengths)
        assert lengths.to_dict()["weights"] == first
        learned(prompts(1, seed=3), lengths)
        assert lengths.to_dict()["weights"] != first

    @pytest.mark.parametrize("begin", [PromptLengths, started])
    def test_after_a_restart_before_weights_are_saved_it_learns_as_well_as_a_new_one(
        self, begin: Callable[[], PromptLengths]
    ) -> None:
        asked, to_come = prompts(200, seed=2), prompts(25, seed=3)
        restarted = begin()
        restarted.restore(json.loads(json.dumps(learned(prompts(19), begin()).to_dict())))

        anew = log_error(learned(to_come, begin()), asked)
        assert log_error(learned(to_come, restarted), asked) < 1.02 * anew

    def test_no_weights_are_those_of_single_requests(self) -> None:
        lengths = learned(prompts(19))
        assert lengths.to_dict()["weights"] == ""
        first = learned(prompts(1, seed=5), lengths).to_dict()["weights"]
        assert first
        assert learned(prompts(19, seed=6), lengths).to_dict()["weights"] == first

    @pytest.mark.parametrize("before", [19, 100])
    def test_nor_are_what_changes_in_them_after_a_restart(self, before: int) -> None:
        kept = learned(prompts(before)).to_dict()
        again = PromptLengths()
        again.restore(kept)
        assert learned(prompts(19, seed=6), again).to_dict()["weights"] == kept["weights"]
        assert learned(prompts(1, seed=7), again).to_dict()["weights"] != kept["weights"]
