"""Rounds that compute context with requests that decode keep the time that is predicted for them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from laps_sd.contract.round_time import ALONE_ROUNDS, PLAIN_ROUNDS, prefill_time_s
from tests.worker.contract import spec
from tests.worker.drive import finish_all
from tests.worker.pairs import load_pair
from worker_svc.engine.cpu import kernels
from worker_svc.engine.draft_lengths.cost_table import CostTable
from worker_svc.engine.engine import SpeculativeEngine
from worker_svc.engine.interface import RoundResult
from worker_svc.engine.round.prefill_time import Chunk, PrefillTime, token_costs
from worker_svc.fake.engine import FakeCosts, FakeEngine

PLAIN_S = 0.010
"""Seconds of a round without context, whatever its rows, in these tests."""
TOKEN_S, KEY_S = 0.001, 0.00001
"""Seconds of a context token, and of each token before it."""


def truth(chunks: list[Chunk]) -> float:
    """Return the seconds that chunks take."""
    return sum(tokens * (TOKEN_S + KEY_S * (start + tokens / 2)) for start, tokens in chunks)


def load(
    pair: tuple[Path, Path], device: str, max_round_s: float | None = 0.0, **options: Any
) -> SpeculativeEngine:
    """Return an engine without draft tokens whose clock stands still, so that it learns nothing, with known costs."""
    engine = load_pair(
        pair[0], None, device=device,
        **{"slots": 4, "max_length": 1024, "blocks": 256, "drafter": "none", "max_round_s": max_round_s, **options},
    )  # fmt: skip
    engine.lengths.set_plain(CostTable([1, 64], [PLAIN_S, PLAIN_S]))
    engine.rounds.prefill.time.token = CostTable([1, 1024], [TOKEN_S + KEY_S, TOKEN_S + 1024 * KEY_S])
    engine._pair.clock = lambda: 0.0  # type: ignore[method-assign]
    return engine


def decoding(engine: Any, count: int = 2) -> list[str]:
    """Add requests and return their names once they decode."""
    names = [f"d{n}" for n in range(count)]
    for name in names:
        engine.add(spec(name, max_tokens=900))
    while not all(report.tokens for report in engine.round(names).requests):
        pass
    return names


def chunks_of(rounds: list[RoundResult], name: str) -> list[Chunk]:
    """Return what each round computed of a context."""
    chunks, start = [], 0
    for result in rounds:
        for report in result.requests:
            if report.request_id == name and report.prefilled:
                chunks.append(Chunk(start, report.prefilled))
                start += report.prefilled
    return chunks


def until_first_tokens(engine: Any, names: list[str], prompts: list[str]) -> list[RoundResult]:
    """Run rounds of all until each of the prompts has a token; the others get one in each round."""
    rounds, waiting = [], list(prompts)
    while waiting:
        rounds.append(engine.round([*waiting, *names]))
        assert all(report.tokens for report in rounds[-1].requests if report.request_id in names)
        waiting = [
            report.request_id
            for report in rounds[-1].requests
            if report.request_id in waiting and not report.tokens
        ]
    return rounds


def test_a_round_takes_the_longer_of_a_fixed_time_and_a_multiple_of_the_round_without() -> None:
    assert prefill_time_s(0.0, 0.01, 8) == pytest.approx((PLAIN_ROUNDS - 1) * 0.01)
    assert prefill_time_s(0.05, 0.01, 8) == pytest.approx(0.04)
    assert prefill_time_s(0.05, 1.0, 8) == pytest.approx(2.0)


def test_where_no_request_decodes_the_multiple_is_larger() -> None:
    assert prefill_time_s(0.0, 0.01, 0) == pytest.approx((ALONE_ROUNDS - 1) * 0.01)


@pytest.mark.parametrize("max_round_s", [0.0, 0.05])
def test_rounds_with_requests_that_decode_keep_the_predicted_time(
    pair: tuple[Path, Path], device: str, max_round_s: float
) -> None:
    """And use it: each but the last has no room for two more tokens."""
    engine = load(pair, device, max_round_s)
    names = decoding(engine)
    engine.add(spec("long", prompt_ids=tuple(2 + n % 100 for n in range(600)), max_tokens=5))
    rounds = until_first_tokens(engine, names, ["long"])
    chunks = chunks_of(rounds, "long")
    assert sum(chunk.tokens for chunk in chunks) in (599, 600), "a last token alone is a decoding row"
    limit_s = max(max_round_s, PLAIN_ROUNDS * PLAIN_S)
    for start, tokens in chunks:
        assert PLAIN_S + truth([Chunk(start, tokens)]) <= limit_s * 1.001
    for start, tokens in chunks[:-1]:
        assert PLAIN_S + truth([Chunk(start, tokens + 2)]) > limit_s
    assert chunks[0].tokens > 1.5 * chunks[-2].tokens, "deep in a context a token costs more"


def test_the_limit_is_reported_where_it_makes_context_wait(pair: tuple[Path, Path], device: str) -> None:
    engine = load(pair, device)
    names = decoding(engine)
    assert engine.round(names).limit_s == 0.0
    engine.add(spec("long", prompt_ids=(7,) * 60, max_tokens=5))
    rounds = until_first_tokens(engine, names, ["long"])
    assert [one.limit_s for one in rounds[:-1]] == pytest.approx([PLAIN_ROUNDS * PLAIN_S] * (len(rounds) - 1))
    assert rounds[-1].limit_s == 0.0


def test_a_limit_in_tokens_is_kept_too_and_is_no_limit_in_time(pair: tuple[Path, Path], device: str) -> None:
    engine = load(pair, device, 10.0, prefill_chunk=32)
    names = decoding(engine)
    engine.add(spec("long", prompt_ids=(7,) * 100, max_tokens=5))
    rounds = until_first_tokens(engine, names, ["long"])
    assert [chunk.tokens for chunk in chunks_of(rounds, "long")] == [32, 32, 32, 4]
    assert not any(one.limit_s for one in rounds)


def test_several_prompts_share_the_time_by_rank(pair: tuple[Path, Path], device: str) -> None:
    """The second gets what the first leaves, which is nothing until the end of the first."""
    engine = load(pair, device)
    names = decoding(engine)
    for name in ("first", "second"):
        engine.add(spec(name, prompt_ids=tuple(2 + (n * len(name)) % 100 for n in range(90)), max_tokens=5))
    rounds = until_first_tokens(engine, names, ["first", "second"])
    first, second = chunks_of(rounds, "first"), chunks_of(rounds, "second")
    of_round = [{r.request_id: r.prefilled for r in one.requests} for one in rounds]
    assert all(not one["second"] for one in of_round[: len(first) - 1])
    shared = of_round[len(first) - 1]
    assert shared["first"] and shared["second"], "the rest of the time of the last round of the first"
    assert PLAIN_S + truth([first[-1], second[0]]) <= PLAIN_ROUNDS * PLAIN_S * 1.001


def test_alone_a_prompt_gets_longer_rounds(pair: tuple[Path, Path], device: str) -> None:
    engine = load(pair, device)
    engine.add(spec("long", prompt_ids=(7,) * 300, max_tokens=5))
    rounds = until_first_tokens(engine, [], ["long"])
    chunks = chunks_of(rounds, "long")
    assert all(PLAIN_S + truth([chunk]) <= ALONE_ROUNDS * PLAIN_S * 1.001 for chunk in chunks)
    assert PLAIN_S + truth(chunks[:1]) > PLAIN_ROUNDS * PLAIN_S


def test_a_round_computes_a_token_at_least(pair: tuple[Path, Path], device: str) -> None:
    engine = load(pair, device)
    engine.rounds.prefill.time.token = CostTable([1, 1024], [60.0, 60.0])
    names = decoding(engine)
    engine.add(spec("long", prompt_ids=(7,) * 5, max_tokens=5))
    assert [one.tokens for one in chunks_of(until_first_tokens(engine, names, ["long"]), "long")] == [1] * 4


def test_without_a_limit_tokens_alone_bound_a_round(pair: tuple[Path, Path], device: str) -> None:
    engine = load(pair, device, None)
    names = decoding(engine)
    engine.add(spec("long", prompt_ids=(7,) * 600, max_tokens=5))
    rounds = until_first_tokens(engine, names, ["long"])
    assert [chunk.tokens for chunk in chunks_of(rounds, "long")] == [512, 88]


def test_draft_tokens_and_the_reading_of_the_draft_model_count(pair: tuple[Path, Path], device: str) -> None:
    """A draft model that reads a long context does so in parts that fit."""
    engine = load_pair(
        *pair, device=device, slots=4, max_length=1024, blocks=256, draft_len=2, max_round_s=0.0
    )
    engine.lengths.set_plain(CostTable([1, 64], [PLAIN_S, PLAIN_S]))
    engine.lengths.step = CostTable([1, 8], [TOKEN_S, 8 * TOKEN_S])
    engine.rounds.prefill.time.token = CostTable([1, 1024], [1e-6, 1e-6])
    engine._pair.clock = lambda: 0.0  # type: ignore[method-assign]
    names = decoding(engine)
    engine.round(names)
    engine.add(spec("long", prompt_ids=(7,) * 200, max_tokens=100))
    read, last = [], 0
    for _ in range(20):
        engine.round([*names, "long"])
        draft = engine._sequences["long"].draft
        assert draft is not None
        read.append(draft.length - last)
        last = draft.length
    plain_s = PLAIN_S + engine.lengths.steps_s([2, 2, 2], 0)
    assert 20 < max(read) <= (PLAIN_ROUNDS - 1) * plain_s / TOKEN_S + 1
    assert last > 200, "it has caught up and proposes"


def test_the_text_is_the_same_with_and_without_the_limit(pair: tuple[Path, Path], device: str) -> None:
    specs = [
        spec(f"r{n}", prompt_ids=tuple(2 + (n + k) % 100 for k in range(40 + 60 * n)), max_tokens=12)
        for n in range(4)
    ]
    expected, *_ = finish_all(load(pair, device, None), specs)
    assert finish_all(load(pair, device), specs)[0] == expected


@pytest.mark.skipif(not kernels.USABLE, reason="torch's threads do not depend on the option")
@pytest.mark.parametrize("threads", [1, 2])
def test_time_in_which_the_thread_sleeps_counts_where_others_compute(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """A single thread sleeps because other processes have its core; one of several waits for the parts of the others."""
    engine = load_pair(pair[0], None, drafter="none", max_length=64, blocks=16, threads=threads)
    kernels.use_threads(1)
    monkeypatch.setattr(time, "thread_time", lambda: 1.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 2.0)
    assert engine._pair.clock() == threads


@pytest.mark.parametrize("wrong", [0.3, 3.0])
def test_the_cost_of_context_is_learnt_from_rounds(
    pair: tuple[Path, Path], device: str, wrong: float
) -> None:
    """The machine differs from its measurement at the start: rounds come to take the time that they may take."""
    engine = load(pair, device, slots=3)
    engine.rounds.prefill.time.token = CostTable(
        [1, 1024], [wrong * TOKEN_S, wrong * (TOKEN_S + 1024 * KEY_S)]
    )
    now = 0.0
    engine._pair.clock = lambda: now  # type: ignore[method-assign]
    forward, planned = engine._pair.target.forward, engine.rounds.planner.plan
    seconds: list[float] = []

    def plan(*args: Any) -> Any:
        made = planned(*args)
        seconds.append(PLAIN_S + truth([Chunk(one.known, one.chunk) for one in made.requests if one.chunk]))
        return made

    def counted(*args: Any) -> torch.Tensor:
        nonlocal now
        now += seconds[-1]
        return forward(*args)

    engine.rounds.planner.plan = plan  # type: ignore[method-assign]
    engine._pair.target.forward = counted  # type: ignore[method-assign]
    names = decoding(engine)
    for turn in range(5):
        name = f"long{turn}"
        engine.add(spec(name, prompt_ids=tuple(2 + (n * 7 + turn) % 100 for n in range(600)), max_tokens=9))
        del seconds[:]
        until_first_tokens(engine, names, [name])
        engine.drop(name)
    limit_s = PLAIN_ROUNDS * PLAIN_S
    assert max(seconds) <= 1.25 * limit_s
    assert min(seconds[:-1]) >= 0.75 * limit_s


def test_costs_at_two_places_of_a_context_give_those_in_between_and_beyond() -> None:
    costs = token_costs(64, 0.010, 0.074, 1000, 0.138, 4001)
    assert costs(1) == pytest.approx(0.001)
    assert costs(1001) == pytest.approx(0.002, rel=0.01)
    assert costs(4001) == pytest.approx(0.005, rel=0.01)


def test_a_token_that_costs_nothing_measurable_still_has_a_cost() -> None:
    assert 0 < token_costs(64, 0.010, 0.009, 1000, 0.009, 4000)(2000) < 0.010 / 64


def test_a_clock_that_stands_still_ends_no_request(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a thread advances in steps of 10 ms in some sandboxes, and a small model measures 0 s."""
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    engine = load_pair(*pair, slots=4, max_length=256, max_round_s=0.05)
    prompt = tuple(2 + n % 100 for n in range(100))
    output, *_ = finish_all(engine, [spec(f"r{n}", prompt_ids=prompt, max_tokens=9) for n in range(3)])
    assert [len(tokens) for tokens in output.values()] == [9, 9, 9]


def test_what_fits_is_found_within_a_token_of_the_most_that_fits() -> None:
    time = PrefillTime(CostTable([1, 1024], [TOKEN_S + KEY_S, TOKEN_S + 1024 * KEY_S]))
    for start in (0, 100, 900):
        for seconds in (0.0, 0.0005, 0.02, 0.1):
            fits = time.fitting(seconds, start, 10_000)
            assert truth([Chunk(start, fits)]) <= seconds * 1.001
            assert truth([Chunk(start, math.ceil(fits * 1.1) + 1)]) > seconds
    assert time.fitting(100.0, 0, 7) == 7


def test_the_fake_engine_keeps_the_same_rule() -> None:
    costs = FakeCosts(round_s=0.010, verified_token_s=0.0, context_token_s=0.0, prefill_token_s=0.0011)
    engine = FakeEngine(slots=4, draft_blocks=0, costs=costs, max_round_s=0.0, target_blocks=200)
    names = decoding(engine)
    engine.add(spec("long", prompt_ids=(7,) * 50, max_tokens=5))
    rounds = until_first_tokens(engine, names, ["long"])
    assert [chunk.tokens for chunk in chunks_of(rounds, "long")] == [18, 18, 14]
    assert [one.limit_s for one in rounds] == pytest.approx([0.03, 0.03, 0.0])
    assert max(one.total_s for one in rounds) <= 0.03
