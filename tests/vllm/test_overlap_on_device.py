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
from tests.vllm.one_core import ENVIRONMENT, EQUAL_ARITHMETIC, ON_CPU, PAIR, OneCore, mixed, with_head
from tests.worker.drive import Between, everybody, finish_all, rotate

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(ON_CPU, reason="vLLM has no async scheduling on a CPU"),
]
COUNT = 20
LEAST_EQUAL = COUNT if EQUAL_ARITHMETIC else int(0.8 * COUNT)
BLOCKS = 128
"""KV is set aside for a second round."""
Texts = dict[str, list[int]]


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
    method = request.param
    options = PAIR if method == "draft_model" else with_head(method, head_of(method))
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
    same = sum(texts[name] == expected[name] for name in expected)
    record_property("equal", same)
    record_property("drafted", sum(report.drafted for report in reports))
    record_property("accepted", sum(report.accepted for report in reports))

    assert engine.capacity.lag == 1
    assert all(len(texts[name]) == len(expected[name]) for name in expected)
    assert same >= LEAST_EQUAL
    assert sum(report.accepted for report in reports) > 100


def test_a_new_worker_goes_on_with_the_same_text(overlapped: OneCore, expected: Texts) -> None:
    later = [
        replace(one, committed_ids=tuple(expected[one.request_id][: 1 + 2 * at]))
        for at, one in enumerate(mixed(COUNT))
    ]
    texts, *_ = finish_all(overlapped.engine(slots=COUNT, blocks=BLOCKS), later)

    assert sum(texts[name] == expected[name] for name in expected) >= LEAST_EQUAL
