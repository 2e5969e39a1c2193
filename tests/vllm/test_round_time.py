"""Steps of vLLM that compute context with requests that decode are bounded by predicted time: vLLM's core and its
AsyncScheduler, a device without a model, and times of steps that are known.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the environment of `make vllm`")

from laps_sd.contract.round_time import PLAIN_ROUNDS
from tests.vllm.test_overlap import Reader, expected, spec
from tests.vllm.virtual_core import overlapped_engine
from worker_svc.engine.round.prefill_time import Chunk
from worker_svc.engine.vllm.step_time import FIRST, Decoding, StepTime

PLAIN_S, TOKEN_S = 0.010, 0.002


def engine_of(max_round_s: float | None, **options: Any) -> Any:
    """Return an engine whose times of steps are these, whatever its steps take."""
    engine = overlapped_engine(blocks=200, budget=256, max_round_s=max_round_s, **options)
    times = engine._scheduler.times
    if times is not None:
        for _ in range(FIRST):
            times.observe(Decoding(2, 2, 40), (), PLAIN_S)
            times.observe(Decoding(2, 2, 40), [Chunk(0, 10)], PLAIN_S + 10 * TOKEN_S)
        times.observe = lambda *_: None  # type: ignore[method-assign]
    return engine


def decoding(reader: Reader) -> tuple[str, str]:
    """Return two requests that decode."""
    for number in (0, 1):
        reader.add(spec(number, 120))
    for _ in range(4):
        reader.round("r0", "r1")
    return "r0", "r1"


def test_a_long_prompt_is_computed_in_parts_that_keep_the_time() -> None:
    reader = Reader(engine_of(0.0))
    names = decoding(reader)
    reader.add(spec(2, 10, prompt=90))
    parts, limits = [], []
    while not reader.output["r2"]:
        result = reader.round("r2", *names)
        parts += [one.prefilled for one in result.requests if one.prefilled]
        limits += [result.limit_s] if result.limit_s else []
        assert all(one.tokens for one in result.requests if one.request_id in names)
    assert sum(parts) in (89, 90)
    assert max(parts) <= (PLAIN_ROUNDS - 1) * PLAIN_S / TOKEN_S
    assert limits and limits == pytest.approx([PLAIN_ROUNDS * PLAIN_S] * len(limits))
    reader.finish("r0", "r1", "r2")
    assert reader.output["r2"] == expected(2, 10, 90)


def test_several_prompts_are_computed_by_rank() -> None:
    reader = Reader(engine_of(0.0))
    names = decoding(reader)
    reader.add(spec(2, 10, prompt=60))
    reader.add(spec(3, 10, prompt=60))
    while not reader.output["r3"]:
        reader.round("r3", "r2", *names)
    assert not reader.output["r2"]


def test_without_a_limit_the_tokens_of_a_step_bound_it() -> None:
    reader = Reader(engine_of(None))
    names = decoding(reader)
    reader.add(spec(2, 10, prompt=90))
    parts = []
    while not reader.output["r2"]:
        result = reader.round("r2", *names)
        parts += [one.prefilled for one in result.requests if one.prefilled]
    assert parts == [90]


def test_context_never_takes_the_tokens_of_requests_that_decode() -> None:
    """Even if it ranks first, and the budget of a step is short."""
    reader = Reader(overlapped_engine(blocks=200, budget=24))
    names = decoding(reader)
    reader.add(spec(2, 10, prompt=90))
    while not reader.output["r2"]:
        result = reader.round("r2", *names)
        assert all(one.tokens for one in result.requests if one.request_id in names)


def test_times_are_learnt_from_the_steps_of_an_engine() -> None:
    reader = Reader(overlapped_engine(blocks=200, max_round_s=0.0))
    decoding(reader)
    reader.add(spec(2, 10, prompt=90))
    reader.finish("r0", "r1", "r2")
    times = reader.engine._scheduler.times
    assert isinstance(times, StepTime)
    tokens, limit_s = times.fitting(Decoding(2, 2, 40), 0, 10**9)
    assert 0 < tokens < 10**9 and limit_s > 0
