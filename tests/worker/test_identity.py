"""Same seed, same text: with any draft, draft length, batch and preemption, the engine generates the same
text as plain decoding.

The reference is transformers with its ordinary cache, one token per forward, float32. The engine and the
reference compute in different shapes, so their logits differ by about 1e-6; where a choice was closer than
MARGIN they may part, and from there on the texts have nothing to do with each other. Such partings are
counted and bounded. Between two runs of the engine nothing may differ at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.worker.drive import Between, everybody, finish_all, rotate
from tests.worker.pairs import MAX_LENGTH, VOCAB, bfloat16_by_kernels, load_pair
from tests.worker.plain import MARGIN, PlainDecoder, PlainText
from worker_svc.engine.cpu import kernels
from worker_svc.engine.draft_lengths.acceptance import Acceptance
from worker_svc.engine.draft_lengths.chooser import DraftLengths
from worker_svc.engine.draft_lengths.outlook import Outlook
from worker_svc.engine.engine import SpeculativeEngine
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.engine.models.model import PackedModel
from worker_svc.engine.proposers.lookup import Found
from worker_svc.engine.round.choices import Choices

pytestmark = pytest.mark.usefixtures("by_kernels_and_by_torch")

PROMPTS = 24  # four of each kind
TOKENS = 40
PARTINGS_ALLOWED = 1  # of PROMPTS: a choice closer than MARGIN comes about once in 10^4 tokens

KINDS = (
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=0.8, top_p=0.9, seed=2**64 - 1),
    Sampling(temperature=0.8, top_k=20, seed=2**63),
    Sampling(temperature=0.8, top_p=0.95, top_k=40, seed=7),
    Sampling(temperature=1.0, min_p=0.1, seed=8),
)


def specifications() -> list[Specification]:
    rng = random.Random(0)
    specs = []
    for number in range(PROMPTS):
        kind = KINDS[number % len(KINDS)]
        sampling = replace(kind, seed=(kind.seed + number) % 2**64)
        length = rng.choice((1, 2, 3, 5, 8, 17, 33, 70))
        prompt = tuple(rng.randrange(VOCAB) for _ in range(length))
        specs.append(
            Specification(
                f"r{number}", prompt, (), sampling, rng.randrange(TOKENS // 2, TOKENS + 1), ignore_eos=True
            )
        )
    return specs


@pytest.fixture(scope="session")
def plain(pair: tuple[Path, Path], device: str) -> dict[str, PlainText]:
    decoder = PlainDecoder(str(pair[0]), device)
    return {spec.request_id: decoder.decode(spec) for spec in specifications()}


def assert_same(output: dict[str, list[int]], plain: dict[str, PlainText]) -> int:
    """Apply the margin rule; return how many texts parted from the reference."""
    partings = 0
    for name, tokens in output.items():
        expected = plain[name].tokens
        assert len(tokens) == len(expected)
        if tokens != expected:
            at = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b)
            assert plain[name].margins[at] < MARGIN, (
                f"{name} differs at {at}, margin {plain[name].margins[at]}"
            )
            partings += 1
    assert partings <= PARTINGS_ALLOWED
    return partings


def engine_for(
    pair: tuple[Path, Path],
    device: str,
    slots: int,
    draft_len: int | None,
    *,
    chunk: int = 64,
    dtype: str = "float32",
) -> SpeculativeEngine:
    engine = load_pair(
        pair[0],
        pair[1],
        device=device,
        slots=slots,
        # Few enough blocks that sequences cannot all lie in one piece.
        blocks=PROMPTS * (MAX_LENGTH // 32),
        block_size=8,
        max_length=MAX_LENGTH,
        max_draft_len=5,
        draft_len=4 if draft_len is None else draft_len,
        prefill_chunk=chunk,
        dtype=dtype,
        deterministic=device == "cpu",
    )
    if draft_len is None:
        engine.lengths = AnyLengths(5, seed=slots)
    return engine


class AnyLengths(DraftLengths):
    """Another length for every request and every round, 0 among them, and another source."""

    def __init__(self, max_draft_len: int, seed: int) -> None:
        super().__init__(max_draft_len)
        self._rng = random.Random(seed)

    def lengths(
        self,
        requests: Sequence[Acceptance],
        caps: Sequence[int],
        other_rows: int = 0,
        outlooks: Callable[[int], Outlook] | None = None,
        keys: int = 0,
    ) -> list[int]:
        return [self._rng.randrange(cap + 1) for cap in caps]

    def row_price(self, count: int, keys: int = 0) -> float:
        return 0.0

    def found_length(
        self, evidence: Acceptance, found: Found, row_price: float, model: Acceptance, drafted: int
    ) -> int:
        return self._rng.randrange(len(found.tokens) + 1)


CHANGING = None
CASES: dict[str, tuple[int, int | None, Between]] = {
    "batch 1, no draft": (1, 0, everybody),
    "batch 1, draft 4": (1, 4, everybody),
    "batch 8, no draft": (8, 0, everybody),
    "batch 8, draft 2": (8, 2, everybody),
    "batch 8, draft 4": (8, 4, everybody),
    "batch 8, changing": (8, CHANGING, everybody),
    "batch 1, changing, paused": (1, CHANGING, rotate("keep")),
    "batch 1, draft 2, swapped": (1, 2, rotate("swap", 5)),
    "batch 1, draft 4, dropped": (1, 4, rotate("evict", 7)),
    "batch 8, changing, paused": (8, CHANGING, rotate("keep")),
    "batch 8, changing, swapped": (8, CHANGING, rotate("swap")),
    "batch 8, changing, dropped": (8, CHANGING, rotate("evict")),
}


@pytest.mark.parametrize("case", CASES)
def test_the_engine_says_what_plain_decoding_says(
    case: str, pair: tuple[Path, Path], plain: dict[str, PlainText], device: str
) -> None:
    slots, draft_len, between = CASES[case]
    output, _, reports = finish_all(engine_for(pair, device, slots, draft_len), specifications(), between)
    assert_same(output, plain)
    drafted = sum(report.drafted for report in reports)
    accepted = sum(report.accepted for report in reports)
    assert (drafted == 0) == (draft_len == 0)
    if drafted:  # acceptance is ragged, or this test would show little
        assert 0.1 < accepted / drafted < 0.9
        assert len({report.accepted for report in reports if report.drafted >= 2}) >= 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_runs_of_the_engine_never_differ(pair: tuple[Path, Path], device: str, dtype: str) -> None:
    """Deterministic mode: no margin rule between schedules."""
    if device != "cpu":
        pytest.skip("elsewhere there is no deterministic mode")
    if dtype == "bfloat16" and not bfloat16_by_kernels():
        pytest.skip("bfloat16 is deterministic by kernels only")
    first, *_ = finish_all(engine_for(pair, device, 8, 4, dtype=dtype), specifications())
    for slots, draft_len, between, chunk in (
        (1, 0, everybody, 512),
        (5, CHANGING, rotate("evict", 30), 29),
        (8, 3, rotate("swap"), 7),
    ):
        other, *_ = finish_all(
            engine_for(pair, device, slots, draft_len, chunk=chunk, dtype=dtype), specifications(), between
        )
        assert other == first


def test_proposals_may_stay_on_the_device_until_the_round_is_over(
    pair: tuple[Path, Path], plain: dict[str, PlainText], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proposals stay on the device where reading them takes longer than it saves."""
    monkeypatch.setattr(PackedModel, "proposes", False)
    engine = engine_for(pair, device, 8, CHANGING)
    engine.rounds.drafting.reads_tokens = False
    output, _, reports = finish_all(engine, specifications(), rotate("keep"))
    assert_same(output, plain)
    assert sum(report.accepted for report in reports) > 0


def test_a_request_that_the_kernels_cannot_choose_for_leaves_the_others_to_them(
    pair: tuple[Path, Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with a penalty, a bias or a bad word, and one of a top_k that is too great, among others with all
    kinds of sampling: the others draft in one call, and are chosen for by the kernels."""
    if device != "cpu" or not kernels.USABLE:
        pytest.skip("by kernels only")
    monkeypatch.setattr(kernels, "MOST_TOP_K", 100)
    changes: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.3},
        {"logit_bias": ((3, 2.0), (5, -4.0))},
        {"bad_words_ids": ((7,), (9, 11))},
        {"top_k": 101},
    )
    others = specifications()[:12]
    apart = [
        replace(spec, request_id=f"apart-{number}", sampling=replace(Sampling(0.8, seed=number), **change))
        for number, change in enumerate(changes)
        for spec in others[number : number + 1]
    ]
    alone, *_ = finish_all(engine_for(pair, device, 1, 3), [*others, *apart])

    proposing: list[int] = []
    at_once = PackedModel.propose
    by_torch: list[int] = []
    choose = Choices.choose

    def propose(self: PackedModel, ids: Any, plan: Any, drafts: Sequence[kernels.Draft], *more: Any) -> Any:
        proposing.append(len(drafts))
        return at_once(self, ids, plan, drafts, *more)

    def chosen(self: Choices, logits: Any, choice_rows: Sequence[int]) -> Any:
        assert set(choice_rows) <= self.apart
        by_torch.append(len(choice_rows))
        return choose(self, logits, choice_rows)

    engine = engine_for(pair, device, 16, 3)
    monkeypatch.setattr(PackedModel, "propose", propose)
    monkeypatch.setattr(Choices, "choose", chosen)
    together, *_ = finish_all(engine, [*others, *apart])

    assert together == alone
    assert max(proposing) == len(others)
    assert by_torch


def test_the_draft_does_not_matter(pair: tuple[Path, Path], device: str) -> None:
    """The text is the same without a draft, and with the target itself as draft; the second accepts
    everything it drafts.
    """
    texts = []
    for draft in (None, pair[0]):
        engine = load_pair(
            pair[0], draft, device=device, slots=8, max_length=MAX_LENGTH, draft_len=0 if draft is None else 4
        )
        output, _, reports = finish_all(engine, specifications())
        texts.append(output)
    assert texts[0] == texts[1]
    drafted, accepted = (sum(getattr(report, name) for report in reports) for name in ("drafted", "accepted"))
    assert accepted >= 0.99 * drafted > 0


def test_committed_tokens_continue_the_same_text(pair: tuple[Path, Path], device: str) -> None:
    """Migration: another engine that gets the first tokens continues with the rest."""
    specs = specifications()
    whole, *_ = finish_all(engine_for(pair, device, 8, 4), specs)
    moved = [
        Specification(
            s.request_id,
            s.prompt_ids,
            tuple(whole[s.request_id][: 3 + i % 11]),
            s.sampling,
            s.max_tokens,
            ignore_eos=True,
        )
        for i, s in enumerate(specs)
    ]
    continued, *_ = finish_all(engine_for(pair, device, 8, 2), moved)
    assert continued == whole


def test_contexts_beyond_one_tile_of_keys(pair: tuple[Path, Path], device: str) -> None:
    """Contexts that cross 512 tokens while they are prefilled in chunks and while they grow."""
    rng = random.Random(5)
    specs = [
        Specification(
            f"l{n}",
            tuple(rng.randrange(VOCAB) for _ in range(length)),
            (),
            Sampling(0.8, seed=n),
            24,
            ignore_eos=True,
        )
        for n, length in enumerate((500, 505, 510, 40, 530))
    ]
    decoder = PlainDecoder(str(pair[0]), device)
    expected = {spec.request_id: decoder.decode(spec) for spec in specs}
    outputs = []
    for slots, chunk, draft_len in ((5, 200, 4), (2, 512, 1), (1, 90, 0)):
        engine = load_pair(
            pair[0],
            pair[1],
            device=device,
            slots=slots,
            max_length=640,
            blocks=220,
            draft_len=draft_len,
            prefill_chunk=chunk,
        )
        output, *_ = finish_all(engine, specs, rotate("keep") if slots == 2 else everybody)
        assert_same(output, expected)
        outputs.append(output)
    assert outputs[0] == outputs[1] == outputs[2]
