"""min_tokens, stop tokens, bad words and allowed tokens: the tokens are those of plain decoding, with any draft,
batch and preemption, by the kernels and by torch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.worker.drive import Between, everybody, finish_all, rotate
from tests.worker.pairs import VOCAB, load_pair
from tests.worker.plain import MARGIN, PlainDecoder
from worker_svc.engine.interface import Sampling, Specification
from worker_svc.engine.sampling.restricted import restricted
from worker_svc.engine.sampling.restrictions import Restrictions, restrictions_of

EOS = frozenset({1})


def some(**changes: object) -> Restrictions:
    values: dict[str, object] = {"allowed": (), "ends": (), "min_tokens": 0, "single": (), "longer": ()}
    return Restrictions(**{**values, **changes})  # type: ignore[arg-type]


def excluded(restrictions: Restrictions, position: int, tail: tuple[int, ...] = ()) -> set[int]:
    """Return the tokens that have no chance in a vocabulary of 8, of which 7 has none in any case."""
    logits = torch.arange(8.0)
    logits[7] = -torch.inf
    row = restricted(logits, restrictions, position, tail)
    return {token for token in range(7) if row[token] == -torch.inf}


def test_ends_are_excluded_before_min_tokens_only() -> None:
    one = some(ends=(1, 3), min_tokens=2)
    assert [excluded(one, position) for position in range(3)] == [{1, 3}, {1, 3}, set()]
    assert one.applies(1)
    assert not one.applies(2)


def test_the_last_token_of_a_bad_word_is_excluded_after_the_others() -> None:
    one = some(single=(5,), longer=((1, 2, 3), (2, 4)))
    assert one.reach == 2
    assert excluded(one, 0) == {5}
    assert excluded(one, 9, (1, 2)) == {5, 3, 4}
    assert excluded(one, 9, (2,)) == {5, 4}
    assert excluded(one, 9, (2, 1)) == {5}


def test_a_restriction_that_leaves_no_token_is_left_out() -> None:
    everything = tuple(range(8))
    assert excluded(some(ends=everything, min_tokens=9), 0) == set()
    assert excluded(some(allowed=(7,)), 0) == set()
    assert excluded(some(allowed=(2, 3), single=(2, 3)), 0) == {0, 1, 4, 5, 6}
    assert excluded(some(allowed=(2, 3), ends=(3,), min_tokens=1, single=(2,)), 0) == {0, 1, 3, 4, 5, 6}


def test_a_smaller_vocabulary_of_a_draft_is_no_problem() -> None:
    row = restricted(torch.zeros(4), some(allowed=(2, 9), single=(8,)), 0, ())
    assert row.tolist() == [-torch.inf, -torch.inf, 0, -torch.inf]


def test_most_requests_have_none() -> None:
    assert restrictions_of(Specification("a", (1,), (), Sampling(), 5, stop_token_ids=(3,)), EOS) is None
    early = Specification("a", (1,), (), Sampling(min_tokens=2), 5, stop_token_ids=(3,))
    found = restrictions_of(early, EOS)
    assert found is not None
    assert found.ends == (1, 3)
    ignoring = restrictions_of(replace(early, ignore_eos=True), EOS)
    assert ignoring is not None
    assert ignoring.ends == (3,)


def specifications() -> list[Specification]:
    """Requests that would end early, or repeat themselves, without their restrictions."""
    rng = random.Random(4)
    specs = []
    for number in range(18):
        temperature = (0.0, 0.8, 1.2)[number % 3]
        words = tuple(tuple(rng.randrange(VOCAB) for _ in range(length)) for length in (1,) * 40 + (2,) * 600)
        sampling = Sampling(
            temperature,
            seed=number,
            min_tokens=rng.choice((0, 6, 15)),
            bad_words_ids=words[: 0 if number % 2 else None][:384],
            allowed_token_ids=(*range(0, VOCAB, 2), 1) if number % 4 == 3 else (),
            repetition_penalty=1.2 if number % 5 == 0 else 1.0,
        )
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice((1, 5, 17))))
        stops = tuple(rng.randrange(VOCAB) for _ in range(12))
        specs.append(Specification(f"r{number}", prompt, (), sampling, 30, stop_token_ids=stops))
    return specs


CASES: dict[str, tuple[int, int, Between]] = {
    "no draft": (8, 0, everybody),
    "draft 4": (8, 4, everybody),
    "draft 2, dropped": (3, 2, rotate("evict", 4)),
    "draft 5, paused": (2, 5, rotate("keep")),
}


@pytest.mark.usefixtures("by_kernels_and_by_torch")
@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_those_of_plain_decoding(pair: tuple[Path, Path], device: str, case: str) -> None:
    slots, draft_len, between = CASES[case]
    specs = specifications()
    decoder = PlainDecoder(str(pair[0]), device)
    engine = load_pair(
        *pair,
        device=device,
        slots=slots,
        blocks=120,
        max_length=64,
        draft_len=draft_len,
        deterministic=device == "cpu",
    )
    output, *_ = finish_all(engine, specs, between)
    partings = 0
    for spec in specs:
        expected, tokens = decoder.decode(spec, EOS), output[spec.request_id]
        if tokens != expected.tokens:
            at = next(i for i, (a, b) in enumerate(zip(tokens, expected.tokens, strict=False)) if a != b)
            assert expected.margins[at] < MARGIN, f"{spec.request_id} differs at {at}"
            partings += 1
    assert partings <= 1
    assert any(len(tokens) < 30 for tokens in output.values())


@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_a_request_goes_on_from_any_committed_token(
    pair: tuple[Path, Path], device: str, drafter: str
) -> None:
    engine = load_pair(
        pair[0],
        pair[1] if drafter == "model" else None,
        device=device,
        slots=8,
        max_length=64,
        draft_len=4,
        deterministic=device == "cpu",
    )
    specs = specifications()[:6]
    whole, *_ = finish_all(engine, specs)
    for spec in specs:
        engine.drop(spec.request_id)
    for start in (1, 5, 11):
        cut = [
            replace(spec, request_id=f"{spec.request_id}+{start}", committed_ids=tuple(tokens[:start]))
            for spec in specs
            if len(tokens := whole[spec.request_id]) > start
        ]
        again, *_ = finish_all(engine, cut)
        for spec in cut:
            assert again[spec.request_id] == whole[spec.request_id.split("+")[0]]
