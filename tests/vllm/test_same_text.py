"""Same seed, same text over vLLM, on whatever device it runs: where a GPU is, by the logits processor of the second
model runner. How many texts are equal is a property of each test in the report of pytest (`--junitxml`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

from tests.vllm.one_core import ENVIRONMENT, EQUAL_ARITHMETIC, ON_CPU, PAIR, OneCore, mixed
from tests.worker.drive import Between, everybody, finish_all, rotate
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.engine.vllm.parameters import Chooser

pytestmark = pytest.mark.timeout(900)
Texts = dict[str, list[int]]
COUNT = 20
LEAST_EQUAL = COUNT if EQUAL_ARITHMETIC else int(0.8 * COUNT)
"""Without batch invariance a text may turn at a token whose two best scores are nearly equal."""


@pytest.fixture(scope="module")
def one_core() -> Iterator[OneCore]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield OneCore()


@pytest.fixture(scope="module")
def expected(one_core: OneCore) -> Texts:
    return finish_all(one_core.engine(slots=COUNT), mixed(COUNT))[0]


@pytest.fixture(autouse=True)
def about(record_property: Callable[[str, object], None], one_core: OneCore) -> None:
    record_property("dtype", PAIR.dtype)
    record_property("chooser", one_core.chooser.value)
    record_property("second_runner", one_core.core.vllm_config.use_v2_model_runner)
    record_property("equal_arithmetic", EQUAL_ARITHMETIC)


def equal(found: Texts, expected: Texts) -> int:
    assert found.keys() == expected.keys()
    assert all(len(found[name]) == len(expected[name]) for name in expected)
    return sum(found[name] == expected[name] for name in expected)


def test_the_device_decides_the_runner_and_what_chooses(one_core: OneCore) -> None:
    expected = Chooser.REPLACED if ON_CPU else Chooser.PROCESSOR

    assert one_core.chooser is expected
    assert one_core.core.vllm_config.use_v2_model_runner is not ON_CPU


def test_the_same_rounds_give_the_same_text(
    one_core: OneCore, expected: Texts, record_property: Callable[[str, object], None]
) -> None:
    texts, _, reports = finish_all(one_core.engine(slots=COUNT), mixed(COUNT))
    record_property("equal", equal(texts, expected))
    record_property("drafted", sum(report.drafted for report in reports))
    record_property("accepted", sum(report.accepted for report in reports))

    assert texts == expected
    assert sum(report.accepted for report in reports) > 100


@pytest.mark.parametrize(
    ("slots", "between"),
    [(4, everybody), (4, rotate("keep")), (4, rotate("evict"))],
    ids=["small batches", "paused", "evicted"],
)
def test_the_order_of_requests_does_not_change_the_text(
    one_core: OneCore,
    expected: Texts,
    record_property: Callable[[str, object], None],
    slots: int,
    between: Between,
) -> None:
    texts, *_ = finish_all(one_core.engine(slots=slots), mixed(COUNT), between)
    record_property("equal", equal(texts, expected))

    assert equal(texts, expected) >= LEAST_EQUAL


def test_a_new_worker_goes_on_with_the_same_text(
    one_core: OneCore, expected: Texts, record_property: Callable[[str, object], None]
) -> None:
    later = [
        replace(one, committed_ids=tuple(expected[one.request_id][: 1 + 2 * at]))
        for at, one in enumerate(mixed(COUNT))
    ]
    texts, *_ = finish_all(one_core.engine(slots=COUNT), later)
    record_property("equal", equal(texts, expected))

    assert equal(texts, expected) >= LEAST_EQUAL


def test_another_seed_gives_another_text(one_core: OneCore, expected: Texts) -> None:
    others = [
        replace(one, sampling=replace(one.sampling, seed=one.sampling.seed ^ 1)) for one in mixed(COUNT)
    ]
    texts, *_ = finish_all(one_core.engine(slots=COUNT), others)
    sampled = [one.request_id for one in mixed(COUNT) if one.sampling.temperature]

    assert sum(texts[name] != expected[name] for name in sampled) > 0.9 * len(sampled)


# -- the distribution ----------------------------------------------------------------------------------------

SEEDS = 1200
FEWEST = 5
"""Least expected count of a class in a chi-square test."""
TOP = 64
PROMPT = (225, 226, 227)  # after it many tokens are likely, twice


def probabilities(one_core: OneCore, committed: tuple[int, ...]) -> dict[int, float]:
    """Return the target's most likely next tokens after the prompt and these."""
    asked = Specification(
        "p", PROMPT, committed, Sampling(), len(committed) + 1, logprobs=TOP, ignore_eos=True
    )
    _, _, reports = finish_all(one_core.engine(), [asked])
    ((_, top),) = [(one.logprob, one.top) for report in reports for one in report.logprobs]
    return {token: math.exp(logprob) for token, logprob in top}


def surprise(found: Counter[int], likely: dict[int, float]) -> float:
    """Return how many standard deviations the chi-square statistic is above its mean, nearly normal (Wilson
    and Hilferty 1931). Tokens that are too rare are one class.
    """
    total = found.total()
    classes = {token: share for token, share in likely.items() if share * total >= FEWEST}
    rest = 1 - sum(classes.values())
    counts = [(found[token], share * total) for token, share in classes.items()]
    if rest * total >= FEWEST:
        counts.append((sum(count for token, count in found.items() if token not in classes), rest * total))
    freedom = len(counts) - 1
    assert freedom > 2
    statistic = sum((count - mean) ** 2 / mean for count, mean in counts)
    return (math.cbrt(statistic / freedom) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def test_tokens_have_the_distribution_of_the_target_with_and_without_drafts(
    one_core: OneCore, record_property: Callable[[str, object], None]
) -> None:
    """The first token of an output comes with its prompt, the second one from a round with draft tokens."""
    specs = [
        Specification(f"r{seed}", PROMPT, (), Sampling(1.0, seed=seed), 6, ignore_eos=True)
        for seed in range(SEEDS)
    ]
    texts, _, reports = finish_all(one_core.engine(slots=COUNT), specs)
    first = Counter(text[0] for text in texts.values())
    likely = probabilities(one_core, ())
    usual = max(likely, key=lambda token: likely[token])
    second = Counter(text[1] for text in texts.values() if text[0] == usual)
    found = {
        "first": surprise(first, likely),
        "second": surprise(second, probabilities(one_core, (usual,))),
    }
    record_property("surprise", {name: round(value, 2) for name, value in found.items()})
    record_property("counts", {"first": first.total(), "second": second.total()})

    assert sum(report.drafted for report in reports) > SEEDS
    assert all(value < 4 for value in found.values()), found
    assert surprise(first, probabilities(one_core, (usual,))) > 10, "another distribution would be seen"
