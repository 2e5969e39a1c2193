"""Same seed, same text over vLLM, with each kind of drafter and on whatever device it runs: where a GPU is, by the logits
processor of the second model runner. How many texts are equal is a property of each test in the report of pytest
(`--junitxml`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

from bench._vllm.workload import demo_workload
from laps_sd.contract.prompt_blocks import BLOCK_TOKENS
from tests.vllm.heads import METHODS
from tests.vllm.one_core import (
    COUNT,
    DRAFT_LEN,
    ENVIRONMENT,
    EQUAL_ARITHMETIC,
    LEAST_EQUAL,
    ON_CPU,
    PAIR,
    OneCore,
    Texts,
    continued,
    equal,
    mixed,
    options_for,
)
from tests.worker.cached import Replica, prompt_of
from tests.worker.drive import Between, everybody, finish_all, rotate
from worker_svc.demo import TARGET_DIR
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.engine.vllm.loading import models_in_words
from worker_svc.engine.vllm.parameters import TokenChooser

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=["draft_model", *METHODS])
def one_core(request: pytest.FixtureRequest, head_of: Callable[[str], Path]) -> Iterator[OneCore]:
    options = options_for(request.param, head_of)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield OneCore(options)


@pytest.fixture(scope="module")
def expected(one_core: OneCore) -> Texts:
    return finish_all(one_core.engine(slots=COUNT), mixed(COUNT))[0]


@pytest.fixture(autouse=True)
def about(record_property: Callable[[str, object], None], one_core: OneCore) -> None:
    record_property("dtype", PAIR.dtype)
    record_property("chooser", one_core.chooser.value)
    record_property("drafter", one_core.core.vllm_config.speculative_config.method)
    record_property("second_runner", one_core.core.vllm_config.use_v2_model_runner)
    record_property("equal_arithmetic", EQUAL_ARITHMETIC)


def test_the_device_decides_the_runner_and_what_chooses(one_core: OneCore) -> None:
    expected = TokenChooser.REPLACED if ON_CPU else TokenChooser.PROCESSOR

    assert one_core.chooser is expected
    assert one_core.core.vllm_config.use_v2_model_runner is not ON_CPU


def test_facts_name_the_drafter_and_its_model(one_core: OneCore) -> None:
    config = one_core.core.vllm_config
    speculative = config.speculative_config

    words = f"draft tokens by {speculative.method}"
    if speculative.method != "mtp":  # it has no model of its own
        words += f" {Path(speculative.model).name}"
    assert f"{words}, " in models_in_words(config, TARGET_DIR)


def test_the_same_rounds_give_the_same_text(
    one_core: OneCore, expected: Texts, record_property: Callable[[str, object], None]
) -> None:
    texts, _, reports = finish_all(one_core.engine(slots=COUNT), mixed(COUNT))
    record_property("equal", equal(texts, expected))
    record_property("drafted", sum(report.drafted for report in reports))
    record_property("accepted", sum(report.accepted for report in reports))

    assert texts == expected


def test_many_draft_tokens_are_accepted(
    one_core: OneCore, record_property: Callable[[str, object], None]
) -> None:
    prompts = demo_workload(COUNT, seed=0).ids
    specs = [Specification(f"r{at}", tuple(ids), (), Sampling(), 48) for at, ids in enumerate(prompts)]
    _, _, reports = finish_all(one_core.engine(slots=COUNT), specs)
    drafts = sum(report.drafted > 0 for report in reports)
    accepted = [sum(report.accepted > place for report in reports) for place in range(DRAFT_LEN)]
    record_property("drafts", drafts)
    record_property("accepted", accepted)

    assert accepted[0] > 0.3 * drafts
    assert accepted[1] > 0


def test_draft_tokens_do_not_change_the_text(
    one_core: OneCore, expected: Texts, record_property: Callable[[str, object], None]
) -> None:
    plain = [replace(one, max_draft_len=0) for one in mixed(COUNT)]
    texts, _, reports = finish_all(one_core.engine(slots=COUNT), plain)
    record_property("equal", equal(texts, expected))

    assert not any(report.drafted for report in reports)
    assert equal(texts, expected) >= LEAST_EQUAL


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
    texts, *_ = finish_all(one_core.engine(slots=COUNT), continued(expected))
    record_property("equal", equal(texts, expected))

    assert equal(texts, expected) >= LEAST_EQUAL


def test_a_prompt_that_is_found_again_gives_the_same_text(
    one_core: OneCore, record_property: Callable[[str, object], None]
) -> None:
    """With EAGLE vLLM computes the last KV block that it finds again: its head would read the token after it."""
    engine = one_core.engine()
    replica = Replica(engine)
    specs = [
        Specification(name, prompt_of(1, 2, tail=10), (), Sampling(0.8, seed=7), 24, ignore_eos=True)
        for name in ("first", "again")
    ]
    (first, _, begun), (again, _, found) = (finish_all(engine, [one]) for one in specs)
    record_property("equal", int(first["first"] == again["again"]))
    dropped = engine.capacity.block_size if one_core.core.vllm_config.speculative_config.use_eagle() else 0

    assert (begun[0].cached, found[0].cached) == (0, 2 * BLOCK_TOKENS - dropped)
    replica.follow()
    assert replica.leading(specs[0].prompt_ids, "") == 2, "the scheduler knows the whole blocks"
    assert first["first"] == again["again"] or not EQUAL_ARITHMETIC


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
