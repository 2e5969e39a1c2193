"""Log probabilities of a prompt are those of an ordinary forward of the target over the whole prompt, however its
context is computed: in chunks, beside other requests, over a warm prefix cache, after an eviction or a swap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from laps_sd.contract.ends import End
from tests.worker.drive import Between, everybody, finish_all, rotate
from tests.worker.pairs import VOCAB, load_pair
from worker_svc.demo import DRAFT_DIR, TARGET_DIR
from worker_svc.engine.engine import SpeculativeEngine
from worker_svc.engine.interface import (
    Capacity,
    PromptLogprobs,
    RequestRound,
    Sampling,
    Specification,
    check_specification,
)
from worker_svc.engine.round import prompt_logprobs

pytestmark = pytest.mark.usefixtures("by_kernels_and_by_torch")

PROMPT = tuple(2 + (7 * n) % (VOCAB - 3) for n in range(41))
OPTIONS = {
    "slots": 4, "blocks": 160, "block_size": 4, "max_length": 128, "max_draft_len": 4, "prefix_reuse_tokens": 4,
}  # fmt: skip


def build(pair: tuple[Path, Path], device: str, **options: Any) -> SpeculativeEngine:
    return load_pair(*pair, device=device, **{**OPTIONS, **options})


def spec(name: str, prompt: Sequence[int] = PROMPT, top: int | None = 3, **changes: Any) -> Specification:
    values: dict[str, Any] = {"sampling": Sampling(0.8, seed=3), "max_tokens": 6, "ignore_eos": True}
    return Specification(name, tuple(prompt), (), prompt_logprobs=top, **{**values, **changes})


def found_in(reports: Sequence[RequestRound], name: str = "a") -> PromptLogprobs:
    """Return what a request reported, which it does once, with its first token."""
    with_any = [
        report for report in reports if report.prompt_logprobs is not None and report.request_id == name
    ]
    (report,) = with_any
    assert report.position == 0 and report.tokens
    assert report.prompt_logprobs is not None
    return report.prompt_logprobs


@torch.inference_mode()
def assert_of_plain_forward(found: PromptLogprobs, target: Path, spec: Specification, device: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval().to(device)
    logits = model(torch.tensor([spec.prompt_ids], device=device)).logits[0, :-1]
    expected = logits.double().log_softmax(-1).cpu()
    own = expected.gather(-1, torch.tensor(spec.prompt_ids[1:])[:, None])
    assert list(found.logprobs) == pytest.approx(own[:, 0].tolist(), abs=1e-3)
    margins = (expected - own).abs() < 1e-4  # these may have changed places
    ranks = (expected >= own).sum(-1)
    for rank, exact, near in zip(found.ranks, ranks.tolist(), margins.sum(-1).tolist(), strict=True):
        assert abs(rank - exact) < near
    count = found.alternatives
    assert count == spec.prompt_logprobs
    best = expected.topk(count, dim=-1).values.flatten().tolist()
    assert list(found.alternative_logprobs) == pytest.approx(best, abs=1e-3)
    ids = torch.tensor(list(found.alternative_ids), dtype=torch.int64).view(len(found.logprobs), count)
    assert expected.gather(-1, ids).flatten().tolist() == pytest.approx(best, abs=1e-3)


def test_they_are_those_of_a_plain_forward_of_the_shipped_target(device: str) -> None:
    wanted = spec("a", range(5, 605), top=5)
    engine = load_pair(TARGET_DIR, DRAFT_DIR, device=device, slots=2, max_length=1024)
    _, _, reports = finish_all(engine, [wanted])
    assert_of_plain_forward(found_in(reports), TARGET_DIR, wanted, device)


@pytest.mark.parametrize("chunk", [1, 7, 16, 40, 41, 64])
def test_they_cross_the_borders_of_chunks(pair: tuple[Path, Path], device: str, chunk: int) -> None:
    wanted = spec("a")
    _, _, reports = finish_all(build(pair, device, prefill_chunk=chunk), [wanted])
    assert_of_plain_forward(found_in(reports), pair[0], wanted, device)


@pytest.mark.parametrize("rows", [1, 5, 30])
def test_a_round_computes_a_bounded_number_of_logits(
    pair: tuple[Path, Path], device: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests share the bound, and the one without log probabilities is not held up by it."""
    monkeypatch.setattr(prompt_logprobs, "LOGITS_BYTES", 4 * VOCAB * rows)
    monkeypatch.setattr(prompt_logprobs, "SLICE_BYTES", 4 * VOCAB * 2)
    specs = [spec("a"), spec("b", PROMPT[::-1]), spec("c", PROMPT[5:], top=None)]
    engine = build(pair, device)
    _, _, reports = finish_all(engine, specs)
    for one in specs[:2]:
        assert_of_plain_forward(found_in(reports, one.request_id), pair[0], one, device)
        assert max(report.prefilled for report in reports if report.request_id == one.request_id) <= rows + 1
    assert next(report for report in reports if report.request_id == "c").tokens


def test_a_warm_prefix_cache_is_not_used_for_them(pair: tuple[Path, Path], device: str) -> None:
    """Cached KV has no logits. What the request computes is cached as ever."""
    engine = build(pair, device)
    finish_all(engine, [spec("warm", top=None)])
    _, _, reports = finish_all(engine, [spec("a")])
    assert_of_plain_forward(found_in(reports), pair[0], spec("a"), device)
    assert sum(report.prefilled for report in reports) == len(PROMPT)
    assert not any(report.cached for report in reports)
    _, _, reports = finish_all(engine, [spec("after", top=None)])
    assert sum(report.cached for report in reports) == 40


def test_two_equal_prompts_are_both_computed(pair: tuple[Path, Path], device: str) -> None:
    specs = [spec("a"), spec("b", top=1), spec("c", top=None)]
    _, _, reports = finish_all(build(pair, device, prefill_chunk=16), specs)
    for one in specs[:2]:
        assert_of_plain_forward(found_in(reports, one.request_id), pair[0], one, device)


@pytest.mark.parametrize(
    "between",
    [everybody, rotate("pause", 1), rotate("swap", 1), rotate("evict")],
    ids=["all", "pause", "swap", "evict"],
)
def test_preemption_changes_nothing(pair: tuple[Path, Path], device: str, between: Between) -> None:
    """Requests are paused, swapped out or evicted in the middle of their prompts."""
    specs = [spec(f"r{n}", PROMPT[n:], top=n % 3, sampling=Sampling(0.8, seed=n)) for n in range(6)]
    output, _, reports = finish_all(build(pair, device, prefill_chunk=24, slots=3), specs, between)
    for one in specs:
        assert_of_plain_forward(found_in(reports, one.request_id), pair[0], one, device)
    alone, *_ = finish_all(build(pair, device), [replace(one, prompt_logprobs=None) for one in specs])
    assert output == alone, "the text is the same"


def test_rows_before_an_eviction_are_not_computed_again(pair: tuple[Path, Path], device: str) -> None:
    engine = build(pair, device, prefill_chunk=16)
    engine.add(spec("a"))
    engine.round(["a"])
    engine.round(["a"])
    engine.evict("a")
    reports = [engine.round(["a"]).requests[0] for _ in range(3)]
    assert [report.prefilled for report in reports] == [16, 16, 9]
    assert_of_plain_forward(found_in(reports), pair[0], spec("a"), device)


def test_the_context_after_an_eviction_comes_from_the_cache_once_they_are_known(
    pair: tuple[Path, Path], device: str
) -> None:
    engine = build(pair, device)
    engine.add(spec("a"))
    engine.round(["a"])
    engine.evict("a")
    (report,) = engine.round(["a"]).requests
    assert report.cached == 40
    assert report.prompt_logprobs is None


def test_a_request_that_continues_behind_committed_tokens_has_none(
    pair: tuple[Path, Path], device: str
) -> None:
    """The record has them: they were reported together with the first token."""
    whole, *_ = finish_all(build(pair, device), [spec("a")])
    output, _, reports = finish_all(
        build(pair, device), [replace(spec("a"), committed_ids=tuple(whole["a"][:2]))]
    )
    assert output == whole
    assert all(report.prompt_logprobs is None for report in reports)


def test_a_prompt_of_one_token_has_an_empty_answer(pair: tuple[Path, Path], device: str) -> None:
    _, _, reports = finish_all(build(pair, device), [spec("a", PROMPT[:1])])
    assert found_in(reports) == PromptLogprobs(3)


def test_a_request_that_ends_with_its_first_token_reports_them_with_it(
    pair: tuple[Path, Path], device: str
) -> None:
    _, last, reports = finish_all(build(pair, device), [spec("a", max_tokens=1)])
    assert last["a"].finish is End.LENGTH
    assert_of_plain_forward(found_in(reports), pair[0], spec("a"), device)


def test_weights_that_are_not_finite_fail_the_request(pair: tuple[Path, Path], device: str) -> None:
    engine = build(pair, device, prefill_chunk=16)
    engine.add(spec("a"))
    engine.add(spec("b", PROMPT[::-1], top=None))
    engine.round(["a"])
    pool = engine._pair.pools[0]
    pool.layers[0][engine._sequences["a"].target.blocks[0] * 4] = float("nan")
    a_failed = None
    for _ in range(4):
        run = [name for name in "ab" if not engine._sequences[name].finished]
        for report in engine.round(run).requests:
            if report.request_id == "a" and report.finish is not None:
                a_failed = report
    assert a_failed is not None and a_failed.finish is End.ERROR
    assert a_failed.prompt_logprobs is None


def test_a_request_whose_numbers_break_fails_none_beside_it(pair: tuple[Path, Path], device: str) -> None:
    """Its values reach the prompt rows of the request before it in the pool, which torch reads in slices of 8 rows.
    That request runs again without them.
    """
    healthy = [spec("a", PROMPT[:3]), spec("b")]
    expected, *_ = finish_all(build(pair, device), healthy)
    engine, poisoned = build(pair, device), VOCAB - 1
    with torch.no_grad():
        engine._pair.target.model.get_input_embeddings().weight[poisoned] = float("nan")
    bad = spec("bad", (4, poisoned, 3, 2), top=None)
    output, last, reports = finish_all(engine, [healthy[0], bad, healthy[1]])
    assert (last["bad"].finish, last["bad"].error) == (End.ERROR, "the target's logits are not finite")
    assert output == {"bad": [], **expected}
    for one in healthy:
        assert_of_plain_forward(found_in(reports, one.request_id), pair[0], one, device)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"prompt_logprobs": 65}, "prompt_logprobs must be from 0 to 64"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be from 0 to 64"),
        (
            {"prompt_logprobs": 64, "prompt_ids": (5,) * 4100},
            "prompt_logprobs: 266500 log probabilities of 4100 tokens, at most 262144 are allowed",
        ),
    ],
)
def test_more_than_the_limits_are_refused(changes: dict[str, Any], problem: str) -> None:
    capacity = Capacity(
        slots=1, target_blocks=1024, draft_blocks=0, block_size=16, max_length=8192, max_draft_len=0,
        vocab_size=VOCAB, device="cpu",
    )  # fmt: skip
    with pytest.raises(ValueError, match=problem):
        check_specification(replace(spec("a"), **changes), capacity)
