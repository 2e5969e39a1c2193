"""The time of vLLM's steps: what is learnt of them, and how much context fits into the next one."""

from __future__ import annotations

import pytest

from laps_sd.contract.round_time import ALONE_ROUNDS, PLAIN_ROUNDS
from worker_svc.engine.round.prefill_time import Chunk
from worker_svc.engine.vllm.step_time import FIRST, NONE, Decoding, StepTime

PLAIN_S, TOKEN_S = 0.010, 0.001
DECODING = Decoding(4, 4, 400)


def step_time(max_round_s: float = 0.0) -> StepTime:
    return StepTime(max_round_s, rows=16, max_length=1024)


def learnt(max_round_s: float = 0.0) -> StepTime:
    """Return times that have seen steps of both kinds."""
    times = step_time(max_round_s)
    for _ in range(FIRST):
        times.observe(DECODING, (), PLAIN_S)
    for _ in range(FIRST):
        times.observe(DECODING, [Chunk(0, 100)], PLAIN_S + 100 * TOKEN_S)
    return times


def test_until_both_kinds_of_steps_are_known_tokens_alone_bound_them() -> None:
    times = step_time()
    assert times.fitting(DECODING, 0, 512) == (512, 0.0)
    times.observe(DECODING, (), PLAIN_S)
    assert times.fitting(DECODING, 0, 512) == (512, 0.0)
    times.observe(NONE, [Chunk(0, 100)], 100 * TOKEN_S)
    assert times.fitting(DECODING, 0, 512)[0] < 30


def test_a_step_takes_a_multiple_of_one_that_only_decodes() -> None:
    tokens, limit_s = learnt().fitting(DECODING, 0, 512)
    assert limit_s == pytest.approx(PLAIN_ROUNDS * PLAIN_S)
    assert tokens == pytest.approx((PLAIN_ROUNDS - 1) * PLAIN_S / TOKEN_S, abs=1)


def test_or_the_fixed_time_if_that_is_longer() -> None:
    tokens, limit_s = learnt(0.1).fitting(DECODING, 0, 512)
    assert limit_s == pytest.approx(0.1)
    assert tokens == pytest.approx((0.1 - PLAIN_S) / TOKEN_S, abs=1)


def test_without_requests_that_decode_it_may_take_longer() -> None:
    _, limit_s = learnt().fitting(NONE, 0, 512)
    assert limit_s == pytest.approx(ALONE_ROUNDS * PLAIN_S)


def test_what_fits_whole_is_bounded_by_no_time() -> None:
    assert learnt().fitting(DECODING, 0, 5) == (5, 0.0)


def test_steps_that_compile_kernels_are_not_believed() -> None:
    times = step_time()
    for plain_s, chunk_s in ((5.0, 9.0), (PLAIN_S, PLAIN_S + 100 * TOKEN_S)):
        times.observe(DECODING, (), plain_s)
        times.observe(DECODING, [Chunk(0, 100)], chunk_s)
    tokens, _ = times.fitting(DECODING, 0, 512)
    assert tokens == pytest.approx((PLAIN_ROUNDS - 1) * PLAIN_S / TOKEN_S, abs=2)


def test_a_slower_machine_is_followed() -> None:
    times = learnt()
    for _ in range(100):
        times.observe(DECODING, (), PLAIN_S)
        times.observe(DECODING, [Chunk(0, 100)], PLAIN_S + 200 * TOKEN_S)
    tokens, _ = times.fitting(DECODING, 0, 512)
    assert tokens == pytest.approx((PLAIN_ROUNDS - 1) * PLAIN_S / (2 * TOKEN_S), abs=2)


def test_the_share_of_a_chunk_is_by_time_once_that_is_known() -> None:
    chunks = [Chunk(0, 30)]
    assert step_time().prefill_share(Decoding(4, 10, 400), chunks) == pytest.approx(30 / 40)
    assert learnt().prefill_share(DECODING, chunks) == pytest.approx(0.03 / 0.04, rel=0.01)
    assert learnt().prefill_share(NONE, chunks) == 1.0
    assert learnt().prefill_share(DECODING, ()) == 0.0
