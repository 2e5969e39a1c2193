"""Rounds that overlap on a GPU, with each kind of drafter: the texts are those of rounds that do not.

Which draft tokens were rejected is known on the device alone when the next round begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make test-vllm`")

from tests.vllm.heads import METHODS
from tests.vllm.one_core import (
    COUNT,
    ENVIRONMENT,
    LEAST_EQUAL,
    ON_CPU,
    OneCore,
    Texts,
    continued,
    equal,
    mixed,
    options_for,
)
from tests.worker.drive import Between, everybody, finish_all, rotate

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(ON_CPU, reason="vLLM has no async scheduling on a CPU"),
]
BLOCKS = 128
"""KV is set aside for a second round."""


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def expected(environment: None) -> Texts:
    """Return the texts of rounds that do not overlap, with the draft model."""
    return finish_all(OneCore().engine(slots=COUNT), mixed(COUNT))[0]


@pytest.fixture(scope="module", params=["draft_model", *METHODS])
def overlapped(request: pytest.FixtureRequest, expected: Texts, head_of: Callable[[str], Path]) -> OneCore:
    options = options_for(request.param, head_of)
    return OneCore(replace(options, overlap="on"))


@pytest.mark.parametrize(
    ("slots", "between"),
    [(COUNT, everybody), (4, rotate("keep")), (4, rotate("evict"))],
    ids=["at once", "paused", "evicted"],
)
def test_overlapped_rounds_give_the_same_text(
    overlapped: OneCore,
    expected: Texts,
    record_property: Callable[[str, object], None],
    slots: int,
    between: Between,
) -> None:
    engine = overlapped.engine(slots=slots, blocks=BLOCKS)
    texts, _, reports = finish_all(engine, mixed(COUNT), between)
    same = equal(texts, expected)
    record_property("equal", same)
    record_property("drafted", sum(report.drafted for report in reports))
    record_property("accepted", sum(report.accepted for report in reports))

    assert engine.capacity.lag == 1
    assert same >= LEAST_EQUAL
    assert sum(report.accepted for report in reports) > 100


def test_a_new_worker_goes_on_with_the_same_text(overlapped: OneCore, expected: Texts) -> None:
    texts, *_ = finish_all(overlapped.engine(slots=COUNT, blocks=BLOCKS), continued(expected))

    assert equal(texts, expected) >= LEAST_EQUAL
