"""The prompt blocks that an engine reports as cached are those that it finds, under their salt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, name_blocks
from tests.worker.cached import CacheMachine, Replica, prompt_of, spec, split
from tests.worker.drive import finish_all, rotate
from tests.worker.pairs import load_pair
from worker_svc.engine.cache.blocks import BlockAllocator
from worker_svc.engine.cache.prompts import CachedPrompts, ContextNames
from worker_svc.engine.interface import CacheChanges, Engine
from worker_svc.fake.engine import FakeEngine


class FakeCaches(CacheMachine):
    """A machine over the fake engine, whose cache of KV blocks is the torch engine's."""

    engine: FakeEngine

    def begin(self, block_size: int, room: int, chunk: int) -> FakeEngine:
        return FakeEngine(
            slots=3,
            target_blocks=-(-room // block_size) + 2,
            block_size=block_size,
            prefill_chunk=chunk,
            prefix_reuse_tokens=1,
            max_draft_len=4,
        )

    def finished(self, name: str) -> bool:
        return self.engine._requests[name].finished

    def found(self, prompt: tuple[int, ...], salt: str) -> int:
        kv = ContextNames(salt).kv_blocks(prompt, self.size)
        return len(self.engine._target.find(kv)) * self.size


TestCaches = FakeCaches.TestCase


def make_fake(pair: tuple[Path, Path], device: str, **options: Any) -> Engine:
    values = {"blocks": 160, "block_size": 4, "prefix_reuse_tokens": 4, **options}
    return FakeEngine(target_blocks=values.pop("blocks"), **values)


def make_torch(pair: tuple[Path, Path], device: str, **options: Any) -> Engine:
    values = {"blocks": 160, "block_size": 4, "max_length": 512, "prefix_reuse_tokens": 4, "max_draft_len": 4}
    return load_pair(*pair, device=device, **{**values, **options})


@pytest.mark.parametrize("make", [make_fake, make_torch], ids=["fake", "torch"])
class TestEngines:
    def test_what_is_reported_is_found_by_the_next_request(
        self, make: Any, pair: tuple[Path, Path], device: str
    ) -> None:
        engine = make(pair, device)
        replica = Replica(engine)
        assert engine.cache_changes() == CacheChanges() and engine.cached_blocks() == b""

        finish_all(engine, [spec("first", prompt_of(1, 2), cache_salt="acme")])
        assert replica.follow() == {*split(name_blocks(prompt_of(1, 2), "acme"))}
        assert engine.cache_changes() == CacheChanges(), "nothing since"

        _, _, reports = finish_all(engine, [spec("next", prompt_of(1, 2, 3), cache_salt="acme")])
        assert reports[0].cached >= 2 * BLOCK_TOKENS

    @pytest.mark.parametrize("salt", ["", "acme"])
    def test_nothing_is_found_under_another_salt(
        self, make: Any, pair: tuple[Path, Path], device: str, salt: str
    ) -> None:
        engine = make(pair, device, blocks=600)
        found = []
        for number, other in enumerate(["other", "acme" if salt == "" else "", salt, salt]):
            _, _, reports = finish_all(engine, [spec(f"r{number}", prompt_of(1, 2), cache_salt=other)])
            found.append(sum(report.cached for report in reports))

        assert found == [0, 0, 0, 2 * BLOCK_TOKENS]

    def test_prompt_and_output_of_a_turn_begin_the_next_one(
        self, make: Any, pair: tuple[Path, Path], device: str
    ) -> None:
        engine = make(pair, device)
        replica = Replica(engine)
        prompt = prompt_of(1, tail=30)
        output, *_ = finish_all(engine, [spec("first", prompt, max_tokens=50)])
        turn = (*prompt, *output["first"], 5, 6, 7)
        replica.follow()

        assert replica.leading(turn) == 2
        _, _, reports = finish_all(engine, [spec("next", turn)])
        assert reports[0].cached >= 2 * BLOCK_TOKENS

    def test_nothing_is_reported_where_nothing_is_reused(
        self, make: Any, pair: tuple[Path, Path], device: str
    ) -> None:
        engine = make(pair, device, prefix_reuse_tokens=0)
        finish_all(engine, [spec("first", prompt_of(1, 2))])

        assert engine.cached_blocks() == b"" and engine.cache_changes() == CacheChanges()

    @pytest.mark.parametrize("how", ["evict", "swap"])
    def test_in_little_room_reports_stay_true(
        self, make: Any, pair: tuple[Path, Path], device: str, how: str
    ) -> None:
        rng = random.Random(5)
        engine = make(pair, device)
        replica = Replica(engine)
        most, removed = 0, 0
        for wave in range(8):
            prompts = [
                prompt_of(*(rng.randrange(2) for _ in range(rng.randrange(1, 4))), tail=rng.randrange(1, 9))
                for _ in range(2)
            ]
            for number, prompt in enumerate(prompts):
                expected = min(replica.leading(prompt) * BLOCK_TOKENS, (len(prompt) - 1) // 4 * 4)
                one = spec(f"{wave}-{number}", prompt, max_tokens=12)
                _, _, reports = finish_all(engine, [one], rotate(how, 2))
                assert reports[0].cached >= expected
                before = len(replica.names)
                most = max(most, len(replica.follow()))
                removed += len(replica.names) < before
            finish_all(engine, [spec(f"{wave}-alone", prompt_of(20 + wave, 40 + wave, 60 + wave, tail=250))])
            replica.follow()
        assert most >= 3 and len(replica.names) > 0


def test_a_start_that_broke_is_reported_as_lost(pair: tuple[Path, Path], device: str) -> None:
    engine = make_torch(pair, device)
    replica = Replica(engine)
    finish_all(engine, [spec("first", prompt_of(1, 2))])
    assert len(replica.follow()) == 2
    engine._pair.pools[0].zero_nonfinite()  # type: ignore[attr-defined]

    assert replica.follow() == set()


def test_a_block_of_which_a_part_broke_is_not_reported(pair: tuple[Path, Path], device: str) -> None:
    engine = make_torch(pair, device)
    replica = Replica(engine)
    engine.add(spec("first", prompt_of(tail=40), max_tokens=60))
    engine.round(["first"])
    engine._pair.pools[0].zero_nonfinite()  # type: ignore[attr-defined]
    while engine.round(["first"]).requests[0].finish is None:
        pass

    assert replica.follow() == set()


@given(order=st.permutations(range(6)))
def test_of_more_than_can_be_reported_the_most_recently_used_are(order: list[int]) -> None:
    allocator = BlockAllocator(8)
    prompts = CachedPrompts(allocator, BLOCK_TOKENS)
    prompts._most = 3
    named = {}
    for number in range(6):
        names, tokens = ContextNames(""), prompt_of(number, tail=0)
        [block] = allocator.allocate(1)
        allocator.name(block, names.kv_blocks(tokens, BLOCK_TOKENS)[0])
        assert prompts.note(names, tokens, 0, 1) == 1
        named[number] = names.prompt
    for number in order:
        prompts.note(
            ContextNames("", [*ContextNames("").kv_blocks(prompt_of(number), 64)]), prompt_of(number), 0, 1
        )

    assert split(prompts.held()) == [named[number] for number in order[-3:]]
    changes = prompts.changes()
    assert {*split(changes.added)} == {*split(prompts.held())} and changes.removed == b""
