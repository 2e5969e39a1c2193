"""The prompt blocks that an engine over vLLM reports as cached are those that vLLM's scheduler finds.

vLLM's scheduler and block pool are real. The device has no model, with and without a round in flight.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

pytest.importorskip("vllm", reason="needs the environment of `make vllm`")

from vllm import SamplingParams
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.request import Request

from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, name_blocks
from tests.vllm.virtual_core import overlapped_engine
from tests.vllm.virtual_second_runner import second_runner_engine
from tests.worker.cached import CacheMachine, Replica, prompt_of, spec, split
from worker_svc.engine.interface import CacheChanges, Specification
from worker_svc.engine.vllm.cached import follow_cache
from worker_svc.engine.vllm.engine import VllmEngine

Make = Callable[..., VllmEngine]


def manager_of(engine: VllmEngine) -> Any:
    return engine._scheduler.kv_cache_manager


def found(engine: VllmEngine, prompt: tuple[int, ...], salt: str) -> int:
    """Return how many tokens of a prompt vLLM would find, the last one included."""
    core: Any = engine._core
    hasher = core._hasher if hasattr(core, "_hasher") else core.request_block_hasher
    request = Request("q", list(prompt), SamplingParams(), None, cache_salt=salt or None, block_hasher=hasher)
    tokens: int = manager_of(engine).coordinator.find_longest_cache_hit(request.block_hashes, len(prompt))[1]
    return tokens


class VllmCaches(CacheMachine):
    """A machine over vLLM's block pool, which also loses blocks, as when a connector fails, and its whole cache."""

    make: Make
    engine: VllmEngine

    def begin(self, block_size: int, room: int, chunk: int) -> VllmEngine:
        blocks = -(-(330 + room % 100) // block_size) + 1  # little, so that it evicts often
        return type(self).make(slots=3, blocks=blocks, block_size=block_size, budget=chunk)

    def finished(self, name: str) -> bool:
        return self.engine._known[name].request is None

    def found(self, prompt: tuple[int, ...], salt: str) -> int:
        return found(self.engine, prompt, salt)

    @rule(which=st.integers(0))
    def serve(self, which: int) -> None:
        """Run one request to its end. The others lose their KV for it, and vLLM evicts what it must."""
        name = self.some(which)
        if name is None:
            return
        for other in self.engine.known() - {name}:
            self.engine.evict(other)
        while not self.finished(name):
            self.engine.round([name])
        self.engine.drop(name)

    @rule(chance=st.integers(0, 9), blocks=st.sets(st.integers(1, 100), max_size=2))
    def lose(self, chance: int, blocks: set[int]) -> None:
        pool = manager_of(self.engine).block_pool
        if chance == 0 and manager_of(self.engine).reset_prefix_cache():  # refused while requests hold blocks
            assert self.engine.cached_blocks() == b""
        elif chance == 1:
            pool.evict_blocks({block for block in blocks if block < len(pool.blocks)})


class CachesBetweenRounds(VllmCaches):
    make = staticmethod(second_runner_engine)


class CachesInFlight(VllmCaches):
    make = staticmethod(overlapped_engine)


for machine in (CachesBetweenRounds, CachesInFlight):
    machine.TestCase.settings = settings(CacheMachine.TestCase.settings, stateful_step_count=60)
TestCachesBetweenRounds = CachesBetweenRounds.TestCase
TestCachesInFlight = CachesInFlight.TestCase


def blocks_of(engine: VllmEngine, name: str) -> list[int]:
    request = engine._known[name].request
    assert request is not None
    return [block.block_id for block in manager_of(engine).get_blocks(request.request_id).blocks[0]]


def run(engine: VllmEngine, *specs: Specification) -> dict[str, int]:
    """Run requests to their ends, and return the prompt tokens that each found."""
    cached = dict.fromkeys((one.request_id for one in specs), 0)
    for one in specs:
        engine.add(one)
    live = [*cached]
    while live:
        for report in engine.round(live[: engine.capacity.slots]).requests:
            if report.request_id not in cached:
                continue  # of a round before
            cached[report.request_id] += report.cached
            if report.finish is not None:
                live.remove(report.request_id)
                engine.drop(report.request_id)
    engine.round(())  # what is in flight
    return cached


@pytest.mark.parametrize("make", [second_runner_engine, overlapped_engine], ids=["alone", "overlapped"])
class TestEngine:
    def test_what_is_reported_is_found_by_the_next_request(self, make: Make) -> None:
        engine = make()
        replica = Replica(engine)
        assert engine.cache_changes() == CacheChanges() and engine.cached_blocks() == b""

        run(engine, spec("first", prompt_of(1, 2), cache_salt="acme"))
        assert replica.follow() == {*split(name_blocks(prompt_of(1, 2), "acme"))}
        assert engine.cache_changes() == CacheChanges(), "nothing since"

        found_by = run(
            engine,
            spec("same", prompt_of(1, 2, 3), cache_salt="acme"),
            spec("other", prompt_of(1, 2, 3), cache_salt="other"),
            spec("none", prompt_of(1, 2, 3)),
        )
        assert found_by == {"same": 2 * BLOCK_TOKENS, "other": 0, "none": 0}

    def test_prompt_and_output_of_a_turn_begin_the_next_one(self, make: Make) -> None:
        engine = make()
        replica = Replica(engine)
        prompt = prompt_of(1, tail=30)
        engine.add(spec("first", prompt, max_tokens=70))
        output: list[int] = []
        while len(output) < 70:
            output += [token for one in engine.round(["first"]).requests for token in one.tokens]
        turn = (*prompt, *output, 5, 6, 7)
        replica.follow()

        assert replica.leading(turn) == 2
        assert run(engine, spec("next", turn))["next"] >= 2 * BLOCK_TOKENS

    def test_what_another_worker_generated_is_cached_with_the_prompt(self, make: Make) -> None:
        engine = make()
        replica = Replica(engine)
        whole = prompt_of(1, 2, tail=30)
        first = replace(spec("first", whole[:70], max_tokens=100), committed_ids=whole[70:])
        run(engine, first)
        replica.follow()

        assert replica.leading(whole) == 2

    def test_nothing_is_reported_where_nothing_is_shared(self, make: Make) -> None:
        engine = make(share_prefixes=False)
        run(engine, spec("first", prompt_of(1, 2)))

        assert engine.cached_blocks() == b"" and engine.cache_changes() == CacheChanges()

    def test_of_two_blocks_with_the_same_tokens_one_is_enough(self, make: Make) -> None:
        """A prompt that ends with a block is never found as a whole: its last block is computed again."""
        engine = make(budget=512)
        replica = Replica(engine)
        prompt = prompt_of(1, 2, tail=0)
        for name in "ab":
            engine.add(spec(name, prompt))
        engine.round(["a", "b"])
        of_a, of_b = (blocks_of(engine, name)[: len(prompt) // 16] for name in "ab")
        assert of_a[:-1] == of_b[:-1] and of_a[-1] != of_b[-1]
        pool = manager_of(engine).block_pool

        pool.evict_blocks({of_a[-1]})
        assert replica.follow() == {*split(name_blocks(prompt))}
        assert found(engine, prompt, "") == len(prompt)
        pool.evict_blocks({of_b[-1]})
        assert replica.follow() == {*split(name_blocks(prompt[:64]))}

    def test_after_a_reset_reports_begin_again(self, make: Make) -> None:
        engine = make()
        replica = Replica(engine)
        run(engine, spec("first", prompt_of(1, 2)))
        assert len(replica.follow()) == 2
        assert manager_of(engine).reset_prefix_cache()
        assert replica.follow() == set()
        run(engine, spec("again", prompt_of(1, 3)))

        assert replica.follow() == {*split(name_blocks(prompt_of(1, 3)))}
        manager_of(engine).block_pool.evict_blocks({*range(1, 60)})
        assert replica.follow() == set()

    def test_a_paused_request_keeps_what_is_reported(self, make: Make) -> None:
        engine = make(slots=1)
        replica = Replica(engine)
        engine.add(spec("paused", prompt_of(1, 2), max_tokens=100))
        for _ in range(4):
            engine.round(["paused"])
        run(engine, spec("other", prompt_of(3)))

        assert replica.follow() == {
            *split(name_blocks(prompt_of(1, 2))),
            *split(name_blocks(prompt_of(3))),
        }

    def test_what_is_computed_again_is_reported_again(self, make: Make) -> None:
        engine = make(budget=512)
        replica = Replica(engine)
        engine.add(spec("first", prompt_of(1, 2), max_tokens=100))
        engine.round(["first"])
        assert len(replica.follow()) == 2
        engine.evict("first")
        manager_of(engine).block_pool.evict_blocks({*range(1, 60)})
        assert replica.follow() == set()
        for _ in range(3):
            engine.round(["first"])

        assert replica.follow() == {*split(name_blocks(prompt_of(1, 2)))}

    def test_what_was_found_last_is_the_most_recently_used(self, make: Make) -> None:
        """Also by a request that adds no full block."""
        engine = make()
        run(engine, spec("a", prompt_of(1)))
        run(engine, spec("b", prompt_of(2)))
        assert engine.cached_blocks() == name_blocks(prompt_of(1)) + name_blocks(prompt_of(2))

        assert run(engine, spec("c", prompt_of(1))) == {"c": BLOCK_TOKENS}
        assert engine.cached_blocks() == name_blocks(prompt_of(2)) + name_blocks(prompt_of(1))

    def test_in_little_room_reports_stay_true(self, make: Make) -> None:
        rng = random.Random(5)
        engine = make(blocks=40)
        replica = Replica(engine)
        removed = 0
        for wave in range(20):
            prompt = prompt_of(
                *(rng.randrange(4) for _ in range(rng.randrange(1, 5))), tail=rng.randrange(1, 9)
            )
            expected = min(replica.leading(prompt) * BLOCK_TOKENS, (len(prompt) - 1) // 16 * 16)
            assert run(engine, spec(str(wave), prompt, max_tokens=12))[str(wave)] >= expected
            before = replica.names
            removed += bool(before - replica.follow())
        assert removed > 3 and len(replica.names) >= 3


@pytest.mark.parametrize(
    "managers",
    [
        (FullAttentionManager, FullAttentionManager),
        (FullAttentionManager, SlidingWindowManager),
        (SlidingWindowManager,),
        (type("Sinks", (FullAttentionManager,), {}),),
    ],
)
def test_where_more_than_full_attention_decides_nothing_is_reported(
    managers: tuple[type, ...], caplog: pytest.LogCaptureFixture
) -> None:
    kept = tuple(one.__new__(one) for one in managers)
    scheduler: Any = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=kept))
    )
    with caplog.at_level("INFO"):
        assert follow_cache(scheduler) is None
    assert f"KV is kept by {managers[0].__name__}" in caplog.text
