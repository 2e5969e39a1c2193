"""The engine over vLLM with a round in flight: vLLM's core and its AsyncScheduler, a device without a model.

What the device computes is a function of prompt and position, so that every text is known in advance. Not shown
here: vLLM's model runner under async scheduling, which needs a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="needs the environment of `make vllm`")

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from tests.services.worker.harness import Desk, entry
from tests.vllm.virtual import DRAFTS
from tests.vllm.virtual_core import VirtualCore, overlapped_engine, token_at
from tests.worker.contract import decode
from worker_svc.engine.interface import DeviceFailed, OutOfBlocks, RoundResult, Sampling, Specification
from worker_svc.engine.vllm.engine import VllmEngine
from worker_svc.runner.messages import Dropped


def spec(
    number: int, max_tokens: int = 40, *, prompt: int = 20, committed: int = 0, stop: tuple[str, ...] = ()
) -> Specification:
    text = expected(number, max_tokens, prompt)
    return Specification(
        f"r{number}",
        prompt_of(number, prompt),
        tuple(text[:committed]),
        Sampling(),
        max_tokens,
        stop=stop,
        ignore_eos=True,
    )


def prompt_of(number: int, length: int) -> tuple[int, ...]:
    return (number + 3, *(5 + (number + at) % 800 for at in range(length - 1)))


def expected(number: int, max_tokens: int, prompt: int = 20) -> list[int]:
    return [token_at(number + 3, prompt + at) for at in range(max_tokens)]


class Reader:
    """Collects the tokens of results, and asserts that none is missing or twice."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.output: dict[str, list[int]] = {}
        self.ends: dict[str, End] = {}

    def add(self, one: Specification) -> None:
        self.engine.add(one)
        self.output[one.request_id] = list(one.committed_ids)
        self.ends.pop(one.request_id, None)

    def round(self, *run: str) -> RoundResult:
        result = self.engine.round(run)
        self.engine.check()
        assert result.free_target_blocks == self.engine._scheduler.free_blocks()
        for one in result.requests:
            assert one.position == len(self.output[one.request_id])
            self.output[one.request_id].extend(one.tokens)
            if one.finish is not None:
                self.ends[one.request_id] = one.finish
        return result

    def finish(self, *names: str) -> None:
        while live := [name for name in names if name not in self.ends]:
            self.round(*live)


def names(result: RoundResult) -> list[str]:
    return [one.request_id for one in result.requests]


def test_a_round_returns_the_outcome_of_the_one_before() -> None:
    reader = Reader(overlapped_engine())
    reader.add(spec(0))
    reader.add(spec(1))

    assert names(reader.round("r0")) == []
    assert names(reader.round("r1")) == ["r0"]
    assert names(reader.round()) == ["r1"]
    assert names(reader.round()) == []


def test_the_device_has_two_rounds_before_the_first_one_is_known() -> None:
    engine = overlapped_engine()
    core = engine._core
    assert isinstance(core, VirtualCore)
    reader = Reader(engine)
    reader.add(spec(0))
    reader.round("r0")
    assert core.device.steps == 1
    reader.round("r0")

    assert core.device.steps == 2
    assert len(reader.output["r0"]) == 1


def test_texts_are_those_of_the_device() -> None:
    reader = Reader(overlapped_engine())
    for number in range(4):
        reader.add(spec(number, 10 + 9 * number))
    reader.finish("r0", "r1", "r2", "r3")

    for number in range(4):
        assert reader.output[f"r{number}"] == expected(number, 10 + 9 * number)
    assert set(reader.ends.values()) == {End.LENGTH}


@pytest.mark.parametrize("prompt", range(20, 36))
def test_a_request_that_needs_the_whole_pool_is_refused_or_ends(prompt: int) -> None:
    """The last rounds reserve KV for drafts that go beyond `max_tokens`."""
    reader = Reader(overlapped_engine(blocks=9))
    ended = 0
    for max_tokens in range(80, 120):
        try:
            reader.add(spec(0, max_tokens, prompt=prompt))
        except ValueError:
            break
        reader.finish("r0")
        reader.engine.drop("r0")
        ended += 1

    assert 0 < ended < 40
    assert reader.output["r0"] == expected(0, 80 + ended - 1, prompt)


def test_a_request_continues_from_committed_tokens() -> None:
    reader = Reader(overlapped_engine())
    reader.add(spec(0, 30, committed=11))
    reader.finish("r0")

    assert reader.output["r0"] == expected(0, 30)


def test_a_paused_request_keeps_its_kv_and_what_was_in_flight() -> None:
    reader = Reader(overlapped_engine(slots=1))
    reader.add(spec(0))
    reader.add(spec(1, 12))
    for _ in range(3):
        reader.round("r0")
    reader.finish("r1")
    assert reader.engine.status("r0").residency is Residency.DEVICE
    reader.finish("r0")

    assert reader.output["r0"] == expected(0, 40)
    assert reader.output["r1"] == expected(1, 12)


def test_an_eviction_in_flight_loses_no_token() -> None:
    reader = Reader(overlapped_engine())
    reader.add(spec(0))
    for _ in range(4):
        reader.round("r0")
        reader.engine.evict("r0")
        assert reader.engine.status("r0").residency is Residency.NONE
    reader.finish("r0")

    assert reader.output["r0"] == expected(0, 40)


def test_a_request_that_comes_again_in_flight_gets_only_its_own_tokens() -> None:
    reader = Reader(overlapped_engine())
    reader.add(spec(0))
    for _ in range(3):
        reader.round("r0")
    reader.engine.drop("r0")
    reader.add(spec(0, committed=1))
    assert names(reader.round("r0")) == [], "what was in flight was of the dropped one"
    reader.finish("r0")

    assert reader.output["r0"] == expected(0, 40)


def test_a_stop_string_ends_a_request_whose_next_round_has_begun() -> None:
    text = decode(expected(0, 40))
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    reader = Reader(overlapped_engine())
    reader.add(spec(0, stop=(stop,)))
    reader.finish("r0")
    found = decode(reader.output["r0"])

    assert reader.ends["r0"] is End.STOP_SEQUENCE
    assert stop in found
    assert names(reader.round()) == []


def test_kv_is_counted_for_the_round_in_flight() -> None:
    engine = overlapped_engine()

    assert engine.capacity.lag == 1
    assert engine.capacity.growth >= 2 * (1 + DRAFTS)


def test_an_error_of_the_device_ends_the_engine() -> None:
    engine = overlapped_engine()
    core = engine._core
    assert isinstance(core, VirtualCore)
    core.device.fails_at = 2
    engine.add(spec(0))
    engine.round(["r0"])
    with pytest.raises(DeviceFailed, match="the device fell off"):
        for _ in range(3):
            engine.round(["r0"])
    with pytest.raises(DeviceFailed, match="the device fell off"):
        engine.round(["r0"])


@pytest.mark.parametrize("leaves", [False, True])
def test_a_request_waits_for_blocks_into_which_kv_of_another_one_is_loaded(leaves: bool) -> None:
    """`leaves`: the client of the other one leaves during the load, and vLLM frees its blocks after that."""
    engine = overlapped_engine(slots=1, blocks=10, load_steps=5)
    core = engine._core
    assert isinstance(core, VirtualCore)
    assert core.device.host is not None
    desk = Desk(engine)
    specs = [spec(0, 40, prompt=60), spec(1, 40, prompt=90)]
    desk.give(*specs)
    for name in ("r0", "r1", "r0"):
        desk.assign(entry(name))
        desk.turns(3)
    assert core.device.host.left
    if leaves:
        desk.put(Dropped((("r0", 1),)))
        del specs[0]
    desk.assign(entry("r1"))
    desk.turns(3)
    desk.assign(*(entry(one.request_id) for one in specs))
    desk.turn_until_idle()
    engine.check()

    for one in specs:
        text = expected(int(one.request_id[1:]), one.max_tokens, len(one.prompt_ids))
        assert list(desk.tokens(one.request_id)) == text


def test_a_round_that_waits_for_a_load_evicts_nothing() -> None:
    reader = Reader(overlapped_engine(slots=1, blocks=10, load_steps=5))
    engine, status = reader.engine, reader.engine.status
    for number, prompt in enumerate((60, 90, 4)):
        reader.add(spec(number, prompt=prompt))
    for _ in range(3):
        reader.round("r0")
    reader.round()
    engine.evict("r0")
    assert engine._scheduler.reset_prefix_cache()  # type: ignore[attr-defined]
    for name in ("r2", "r2", "r0"):
        reader.round(name)
    rounds = 0
    while status("r0").residency is Residency.NONE:
        rounds += 1
        reader.round("r1")

    assert rounds >= 5
    assert status("r2").residency is Residency.DEVICE
    with pytest.raises(OutOfBlocks):
        reader.round("r1")


@pytest.mark.parametrize("load_steps", [0, 1, 5])
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("blocks", [10, 16, 60])
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), lengths=st.lists(st.integers(1, 60), min_size=2, max_size=6))
def test_the_runner_serves_with_little_kv_and_changing_ranks(
    blocks: int, slots: int, load_steps: int, seed: int, lengths: Sequence[int]
) -> None:
    """`load_steps`: KV is also in host memory. Then vLLM frees blocks of a round in flight after it, and a
    request has blocks before it runs.
    """
    rng = random.Random(seed)
    desk = Desk(overlapped_engine(slots=slots, residents=4, blocks=blocks, seed=seed, load_steps=load_steps))
    specs = [spec(number, length, prompt=rng.randint(4, 60)) for number, length in enumerate(lengths)]
    desk.give(*specs)
    for _ in range(60):
        order = rng.sample(specs, len(specs))
        desk.assign(*(entry(one.request_id, float(at)) for at, one in enumerate(order)))
        desk.turns(rng.randint(1, 4))
    desk.turn_until_idle()
    engine = desk.engine
    assert isinstance(engine, VllmEngine)
    engine.check()

    for number, one in enumerate(specs):
        text = expected(number, one.max_tokens, len(one.prompt_ids))
        assert list(desk.tokens(one.request_id)) == text
