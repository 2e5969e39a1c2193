"""KV that was computed once serves every request with the same beginning, and the text does not
depend on it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from laps_sd.contract.ends import End
from tests.worker.cache import cached_blocks
from tests.worker.drive import Between, everybody, finish_all, rotate
from tests.worker.pairs import VOCAB, load_pair
from worker_svc.engine.engine import SpeculativeEngine
from worker_svc.engine.interface import (
    Engine,
    OutOfBlocks,
    RequestRound,
    Residency,
    Sampling,
    Specification,
    blocks_needed,
)

SIZE = 4  # tokens of a block
PROMPT = tuple(2 + (7 * n) % (VOCAB - 3) for n in range(41))
FOUND = 40  # of these: whole blocks, but never the last token


def build(pair: tuple[Path, Path], device: str, **options: Any) -> SpeculativeEngine:
    options = {
        "slots": 4,
        "blocks": 160,
        "block_size": SIZE,
        "max_length": 128,
        "max_draft_len": 4,
        "draft_len": 3,
        "prefix_reuse_tokens": SIZE,
        **options,
    }
    return load_pair(*pair, device=device, **options)


def spec(name: str, prompt: Sequence[int] = PROMPT, **changes: Any) -> Specification:
    values: dict[str, Any] = {"sampling": Sampling(0.8, seed=3), "max_tokens": 6, "ignore_eos": True}
    return Specification(name, tuple(prompt), (), **{**values, **changes})


def first_round(engine: Engine, name: str) -> RequestRound:
    return engine.round([name]).requests[0]


@pytest.mark.parametrize("ended", ["finished", "cancelled", "evicted", "running"])
def test_a_known_start_is_not_computed_again(pair: tuple[Path, Path], device: str, ended: str) -> None:
    engine = build(pair, device)
    engine.add(spec("a"))
    report = first_round(engine, "a")
    assert (report.prefilled, report.cached) == (41, 0)
    while ended == "finished" and report.finish is None:
        report = first_round(engine, "a")
    if ended == "cancelled":
        engine.drop("a")
    elif ended == "evicted":
        engine.evict("a")
    engine.add(spec("b"))
    engine.add(spec("other", [99, *PROMPT[1:]]))
    engine.add(spec("longer", [*PROMPT[:20], *PROMPT]))
    for name, found, length in (("b", FOUND, 41), ("other", 0, 41), ("longer", 20, 61)):
        report = first_round(engine, name)
        assert report.cached == found
        # One token left: that is what a decoding round computes.
        assert report.prefilled == (length - found if length - found > 1 else 0)
        assert report.tokens
        assert first_round(engine, name).cached == 0, "it is told once"
        engine.check()


def test_nothing_is_reused_unless_it_is_asked_for_and_long_enough(
    pair: tuple[Path, Path], device: str
) -> None:
    for least, cached in ((0, 0), (FOUND, FOUND), (FOUND + 1, 0)):
        engine = build(pair, device, prefix_reuse_tokens=least)
        _, _, reports = finish_all(engine, [spec("a")])
        assert cached_blocks(engine._pair.pools[0].allocator) == (0 if least == 0 else 11)
        _, _, reports = finish_all(engine, [spec("b")])
        assert reports[0].cached == cached


def test_what_was_said_is_a_known_start_too(pair: tuple[Path, Path], device: str) -> None:
    """The next turn of a conversation: prompt and answer of the one before, and then something new."""
    engine = build(pair, device)
    output, *_ = finish_all(engine, [spec("a", max_tokens=20)])
    _, _, reports = finish_all(engine, [spec("b", [*PROMPT, *output["a"], 5, 6, 7])])
    assert (reports[0].cached, reports[0].prefilled) == (60, 4)


def families() -> list[Specification]:
    """Return prompts with common starts of many lengths, two of them beyond one tile of keys."""
    rng = random.Random(1)
    starts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (3, 4, 17, 64, 90, 515)]
    specs = []
    for number in range(24):
        start = starts[number % len(starts)]
        prompt = start[: len(start) // 2 if number % 7 == 5 else len(start)]
        prompt = [*prompt, *(rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 1, 5, 9))))]
        sampling = Sampling(0.8, seed=number) if number % 3 else Sampling()
        specs.append(spec(f"r{number}", prompt, sampling=sampling, max_tokens=rng.randrange(5, 30)))
    return specs


@pytest.fixture(scope="module")
def without_reuse(pair: tuple[Path, Path], device: str) -> dict[str, list[int]]:
    engine = build(pair, device, slots=8, max_length=560, blocks=1200, prefix_reuse_tokens=0)
    return finish_all(engine, families())[0]


@pytest.mark.parametrize(
    ("slots", "draft_len", "chunk", "blocks", "between"),
    [
        (1, 0, 512, 900, everybody),
        (6, 3, 512, 900, everybody),
        (6, 2, 29, 900, rotate("evict")),
        (6, 4, 64, 440, rotate("swap")),
    ],
    ids=["one by one", "together", "evicted", "swapped, little room"],
)
def test_the_text_is_the_same_with_and_without_reuse(
    pair: tuple[Path, Path], device: str, slots: int, draft_len: int, chunk: int, blocks: int, between: Between,
    without_reuse: dict[str, list[int]],
) -> None:  # fmt: skip
    options = {
        "max_length": 560,
        "slots": slots,
        "blocks": blocks,
        "draft_len": draft_len,
        "prefill_chunk": chunk,
    }
    output, _, reports = finish_all(build(pair, device, **options), families(), fitting(between))
    assert output == without_reuse
    assert sum(report.cached for report in reports) > 900
    assert max(report.cached for report in reports) >= 512


def taken(engine: Engine, names: Sequence[str]) -> tuple[int, int]:
    """Return the blocks that requests take of both pools, by their own reports."""
    found = [one for one in map(engine.status, names) if one.residency is Residency.DEVICE]
    holders = Counter(run for one in found for run in one.shared if one.draft_blocks or not run.draft_blocks)
    target = sum(one.target_blocks for one in found)
    draft = sum(one.draft_blocks for one in found)
    for run, count in holders.items():
        assert count > 1
        target -= (count - 1) * run.target_blocks
        draft -= (count - 1) * run.draft_blocks
    return target, draft


def in_use(engine: Engine) -> tuple[int, int]:
    free_target, free_draft = engine.free_blocks
    return engine.capacity.target_blocks - free_target, engine.capacity.draft_blocks - free_draft


def fitting(between: Between) -> Between:
    """Limit `between` to the contract: the round's blocks suffice by the count of blocks that each request
    holds or needs.
    """

    def chosen(engine: Engine, number: int, live: list[str]) -> Sequence[str]:
        run = []
        assert taken(engine, live) == in_use(engine)
        room = engine.capacity.target_blocks - sum(engine.status(name).target_blocks for name in live)
        wanted = between(engine, number, live)
        for name in live:
            if name not in wanted and engine.status(name).residency is Residency.DEVICE and room < 300:
                room += engine.status(name).target_blocks
                engine.evict(name)
        for name in wanted:
            status = engine.status(name)
            growth = engine.capacity.max_draft_len + 1
            missing = blocks_needed(status.tokens, growth, engine.capacity.block_size) - status.target_blocks
            if missing <= room:
                room -= max(0, missing)
                run.append(name)
        return run

    return chosen


def test_the_kv_is_bit_for_bit_that_of_another_way_to_compute_it(
    pair: tuple[Path, Path], device: str
) -> None:
    """KV that one request computed in chunks of 7, in company, is the KV that the next would have computed in
    one call.
    """
    engine = build(pair, device, prefill_chunk=7)
    finish_all(engine, [spec("company", PROMPT[::-1], max_tokens=12), spec("a", max_tokens=12)])
    engine.add(spec("b", max_tokens=12))
    alone = build(pair, device, prefix_reuse_tokens=0)
    alone.add(spec("b", max_tokens=12))
    assert first_round(engine, "b").cached == FOUND
    first_round(alone, "b")
    found, computed = (
        e._pair.pools[0].copy_out(e._sequences["b"].target)[:, :FOUND] for e in (engine, alone)
    )
    if device == "cpu":
        assert torch.equal(found, computed)
    else:  # the bits of a product depend on the batch
        torch.testing.assert_close(found, computed, rtol=1e-4, atol=1e-5)


def test_equal_prompts_at_the_same_time_are_computed_once(pair: tuple[Path, Path], device: str) -> None:
    """`n` outputs of one prompt: the first computes it, chunk by chunk, and the others wait for it."""
    engine = build(pair, device, prefill_chunk=16)
    names = ["a", "b", "c", "d"]
    for number, name in enumerate(names):
        engine.add(spec(name, sampling=Sampling(0.8, seed=number)))
    engine.add(spec("else", PROMPT[20:]))
    rounds = [engine.round(names) for _ in range(4)]
    assert [[report.prefilled for report in result.requests] for result in rounds] == [
        [16, 0, 0, 0],
        [16, 0, 0, 0],
        [9, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert [report.cached for report in rounds[3].requests] == [0, FOUND, FOUND, FOUND]
    assert all(report.tokens for report in rounds[3].requests)
    engine.check()


def test_whoever_waits_for_another_goes_on_when_that_one_leaves(pair: tuple[Path, Path], device: str) -> None:
    engine = build(pair, device, prefill_chunk=16)
    for name in "ab":
        engine.add(spec(name))
    assert [report.prefilled for report in engine.round(["a", "b"]).requests] == [16, 0]
    engine.drop("a")
    report = first_round(engine, "b")
    assert (report.cached, report.prefilled) == (16, 16)


def test_a_cache_never_costs_an_admission_or_a_return_from_the_host(
    pair: tuple[Path, Path], device: str
) -> None:
    """A pool fits two contexts: with any amount of old KV, it takes two, and one that comes back."""
    blocks = 2 * blocks_needed(41 + 6, 1, SIZE)
    engine = build(pair, device, blocks=blocks)
    for number in range(5):
        first, second = (spec(f"{number}{n}", [number + 9 * n, *PROMPT[1:]]) for n in range(2))
        finish_all(engine, [first, second])
        result = engine.round([])
        assert result.free_target_blocks == result.free_draft_blocks == blocks
        assert cached_blocks(engine._pair.pools[0].allocator) > 10
    kept, other = spec("kept"), spec("other", PROMPT[::-1])
    engine.add(kept)
    first_round(engine, "kept")
    assert engine.swap_out("kept")
    finish_all_of(engine, [other, spec("third", PROMPT[3:] + PROMPT[:3])])
    assert engine.status("kept").residency is Residency.HOST
    report = first_round(engine, "kept")
    assert (report.prefilled, report.cached) == (0, 0)
    assert report.tokens


def finish_all_of(engine: SpeculativeEngine, specs: Sequence[Specification]) -> None:
    """Run as `finish_all` does, together with requests that are known already."""
    for one in specs:
        engine.add(one)
    live = [one.request_id for one in specs]
    while live:
        for report in engine.round(live).requests:
            if report.finish is not None:
                live.remove(report.request_id)
        engine.check()
    for one in specs:
        engine.drop(one.request_id)


def test_who_shares_a_start_holds_the_same_blocks(pair: tuple[Path, Path], device: str) -> None:
    engine = build(pair, device, draft_len=0)
    for name in "abc":
        engine.add(spec(name))
        result = engine.round([name])
    held = [engine._sequences[name].target.blocks for name in "abc"]
    assert len(held[0]) == blocks_needed(41, 1, SIZE)
    assert all(held[0][:10] == blocks[:10] for blocks in held[1:])
    used = len({block for blocks in held for block in blocks})
    assert used == 13
    assert engine.capacity.target_blocks - result.free_target_blocks == used
    for name in "abc":
        engine.drop(name)
        engine.check()
    assert cached_blocks(engine._pair.pools[0].allocator) == 10


def test_the_draft_shares_a_start_too(pair: tuple[Path, Path], device: str) -> None:
    """Nine of its blocks: the last tokens of a context are fed to it again. It reads the others once."""
    engine = build(pair, device, draft_len=3, slots=5)
    names = "abcde"
    for number, name in enumerate(names):
        engine.add(spec(name, sampling=Sampling(0.8, seed=number), max_tokens=30))
        while not first_round(engine, name).drafted:
            pass
    for _ in range(3):
        engine.round(names)
    tables = [engine._sequences[name].draft for name in names]
    assert len({tuple(table.blocks[:9]) for table in tables if table is not None}) == 1
    assert taken(engine, names) == in_use(engine)
    of_draft = {run for name in names for run in engine.status(name).shared if run.draft_blocks}
    assert [(run.target_blocks, run.draft_blocks) for run in of_draft] == [(0, 9)]
    engine.check()
    expected, *_ = finish_all(
        build(pair, device, prefix_reuse_tokens=0, slots=5),
        [spec(name, sampling=Sampling(0.8, seed=number), max_tokens=30) for number, name in enumerate(names)],
    )
    assert all(
        engine._sequences[name].output == expected[name][: len(engine._sequences[name].output)]
        for name in names
    )


@pytest.mark.parametrize("how", ["waits", "evicted", "swapped out"])
def test_one_without_kv_needs_what_others_do_not_hold(pair: tuple[Path, Path], device: str, how: str) -> None:
    """`a` and `b` have ten blocks of the target in common, and nine of the draft. `c`, which has one block less in
    common, waits for the rest of its context."""
    engine = build(pair, device, draft_len=3, blocks=60)
    seeds = {name: Sampling(0.8, seed=number) for number, name in enumerate("abc")}
    long = [spec(name, sampling=seeds[name], max_tokens=30) for name in "ab"]
    long.append(spec("c", [*PROMPT[:36], 3, 3, 3], sampling=seeds["c"], max_tokens=30))
    expected, *_ = finish_all(build(pair, device, prefix_reuse_tokens=0), long)
    for one in long:
        engine.add(one)
        while (one.request_id != "c" or how != "waits") and not first_round(engine, one.request_id).drafted:
            pass
    output = list(engine._sequences["c"].output)
    if how == "evicted":
        engine.evict("c")
    elif how == "swapped out":
        assert engine.swap_out("c")
    engine.expect(["c"])
    before, (a, b, c) = in_use(engine), map(engine.status, "abc")
    assert (c.target_blocks, c.draft_blocks) == (0, 0)
    assert set(c.shared) <= set(a.shared) & set(b.shared)
    found = [sum(run.target_blocks for run in c.shared), sum(run.draft_blocks for run in c.shared)]
    assert found == [9, 9]
    report = first_round(engine, "c")
    engine.check()
    output += report.tokens
    while not report.drafted:
        report = first_round(engine, "c")
        output += report.tokens
    c = engine.status("c")
    grown = [now - then for now, then in zip(in_use(engine), before, strict=True)]
    assert grown == [c.target_blocks - 9, c.draft_blocks - 9]
    assert output == expected["c"][: len(output)]
    engine.check()


def test_a_round_fits_where_what_it_finds_leaves_room(pair: tuple[Path, Path], device: str) -> None:
    """20 blocks: a context of 41 tokens takes 11 or 12, of which two requests have 10 in common. What no one holds
    takes free blocks, once.
    """
    engine = build(pair, device, draft_len=0, blocks=20, drafter="lookup")
    for name in "abcde":
        engine.add(spec(name, max_tokens=4))
    first_round(engine, "a")
    engine.evict("a")
    for name in "abcd":
        assert first_round(engine, name).cached == FOUND
    engine.check()
    for name in "abcd":
        engine.evict(name)
    assert [report.cached for report in engine.round(list("abcd")).requests] == [FOUND] * 4
    other = spec("other", PROMPT[::-1])
    engine.add(other)
    with pytest.raises(OutOfBlocks):
        engine.round(["other"])
    engine.check()


def test_a_block_with_a_name_is_never_written(pair: tuple[Path, Path], device: str) -> None:
    """An attempt is stopped before anything is computed."""
    engine = build(pair, device)
    engine.add(spec("a"))
    first_round(engine, "a")
    place = engine._sequences["a"].target
    assert place.first_writable == FOUND
    place.length = FOUND - 1
    engine._sequences["a"].tokens = list(PROMPT[:FOUND])
    with pytest.raises(AssertionError, match="a block with a name would be written"):
        engine.round(["a"])


@pytest.mark.parametrize("together", [True, False], ids=["beside others", "between others"])
def test_a_start_that_broke_is_not_found(pair: tuple[Path, Path], device: str, together: bool) -> None:
    """NaN ends its request in the round that computes it, for any place of its prefill, and is never used as
    KV.
    """
    poisoned = VOCAB - 1
    bad = [poisoned, *PROMPT[1:]]
    expected, *_ = finish_all(build(pair, device, prefix_reuse_tokens=0), [spec("good")])
    assert poisoned not in expected["good"]
    engine = build(pair, device, prefill_chunk=20)
    with torch.no_grad():
        engine._pair.target.model.get_input_embeddings().weight[poisoned] = float("nan")
    for _ in range(2):
        engine.add(spec("bad", bad))
        engine.add(spec("good"))
        output: list[int] = []
        ended = None
        turn = 0
        while ended is None or len(output) < 6:
            live = [name for name, left in (("bad", ended is None), ("good", len(output) < 6)) if left]
            for report in engine.round(live if together else [live[turn % len(live)]]).requests:
                if report.request_id == "good":
                    output += report.tokens
                else:
                    ended = report.finish
                    assert report.cached == 0 and not report.tokens
            turn += 1
            assert all(pool._storage.isfinite().all() for pool in engine._pair.pools)
            engine.check()
        assert (ended, output) == (End.ERROR, expected["good"])
        engine.drop("bad")
        engine.drop("good")


def test_what_was_found_is_told_by_the_round_that_succeeds(pair: tuple[Path, Path], device: str) -> None:
    engine = build(pair, device)
    finish_all(engine, [spec("a")])
    forward = engine._pair.target.forward

    def fails(*_: Any) -> torch.Tensor:
        raise RuntimeError("not now")

    engine.add(spec("b", [*PROMPT, 4, 4, 4]))
    engine._pair.target.forward = fails  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="not now"):
        first_round(engine, "b")
    engine.check()
    engine._pair.target.forward = forward  # type: ignore[method-assign]
    report = first_round(engine, "b")
    assert (report.cached, report.prefilled) == (FOUND, 4)


def test_the_drafts_kv_is_dropped_where_the_host_has_no_room_for_it(
    pair: tuple[Path, Path], device: str
) -> None:
    """It is computed again, within the budget of prefill, and the text is the same."""
    expected, *_ = finish_all(build(pair, device), [spec("a", max_tokens=30)])
    token_bytes = 2 * 4 * 2 * 16 * 2  # two layers, two heads of 16, float32; the same in both models
    engine = build(pair, device, host_bytes=60 * token_bytes, prefill_chunk=20, prefix_reuse_tokens=0)
    engine.add(spec("a", max_tokens=30))
    output: list[int] = []
    drafted = []
    swapped = False
    while len(output) < 30:
        if len(output) >= 5 and not swapped:
            swapped = engine.swap_out("a")
            assert engine._sequences["a"].swapped[0] is not None
            assert engine._sequences["a"].swapped[1] is None
            drafted = []
        report = first_round(engine, "a")
        output += report.tokens
        drafted.append(report.drafted)
        assert not swapped or report.prefilled == 0
    assert swapped and drafted[:2] == [0, 0] and max(drafted) == 3
    assert output == expected["a"]
