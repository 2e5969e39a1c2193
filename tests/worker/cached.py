"""Prompts of known blocks, a copy of what an engine reports as cached, and a machine that looks for wrong reports."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from laps_sd.contract import prompt_blocks
from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, NAME_BYTES, name_blocks
from worker_svc.engine.interface import Engine, OutOfBlocks, Sampling, Specification

__all__ = ["CacheMachine", "Replica", "prompt_of", "spec", "split"]


def split(names: bytes) -> list[bytes]:
    assert len(names) % NAME_BYTES == 0
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def prompt_of(*blocks: int, tail: int = 1) -> tuple[int, ...]:
    """Return a prompt of blocks with different contents, and `tail` more tokens."""
    return (*(2 + block for block in blocks for _ in range(BLOCK_TOKENS)), *([1] * tail))


def spec(name: str, prompt: tuple[int, ...], **changes: Any) -> Specification:
    values: dict[str, Any] = {"sampling": Sampling(0.8, seed=3), "max_tokens": 5, "ignore_eos": True}
    return Specification(name, prompt, (), **{**values, **changes})


class Replica:
    """A copy of what a cache holds that follows the changes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.names: set[bytes] = set()

    def follow(self) -> set[bytes]:
        """Take in the newest changes, which add only what is new and remove only what is known."""
        changes = self.engine.cache_changes()
        added, removed = split(changes.added), split(changes.removed)
        assert len({*added, *removed}) == len(added) + len(removed), "a name that is changed twice"
        assert not self.names & {*added}
        assert self.names >= {*removed}
        self.names = (self.names | {*added}) - {*removed}
        cached = split(self.engine.cached_blocks())
        assert len(cached) == len({*cached})
        assert self.names == {*cached}
        return self.names

    def leading(self, prompt: tuple[int, ...], salt: str = "") -> int:
        """Return how many blocks a prompt begins with that are known, as a scheduler counts them."""
        count = 0
        for name in split(name_blocks(prompt, salt)):
            if name not in self.names:
                break
            count += 1
        return count


class CacheMachine(RuleBasedStateMachine):
    """Requests with common beginnings that come, run, pause, lose their KV and leave, in little room."""

    engine: Engine

    def begin(self, block_size: int, room: int, chunk: int) -> Engine:
        """Return an engine of 3 slots with KV for about `room` tokens that computes `chunk` tokens in a round."""
        raise NotImplementedError

    def finished(self, name: str) -> bool:
        """Return whether a known request has an end."""
        raise NotImplementedError

    def found(self, prompt: tuple[int, ...], salt: str) -> int:
        """Return how many tokens of a prompt the engine would find, the last one included."""
        raise NotImplementedError

    @initialize(
        block_size=st.sampled_from([8, 16, 48, 64, 100, 128]),
        room=st.integers(330, 900),
        chunk=st.sampled_from([50, 512]),
    )
    def start(self, block_size: int, room: int, chunk: int) -> None:
        self.size = block_size
        self.engine = self.begin(block_size, room, chunk)
        self.replica = Replica(self.engine)
        self.prompts: list[tuple[tuple[int, ...], str]] = []
        self.added = 0

    @rule(
        blocks=st.lists(st.integers(0, 1), max_size=4),
        tail=st.integers(1, 40),
        salt=st.sampled_from(["", "acme"]),
        max_tokens=st.sampled_from([1, 30, 80]),
    )
    def arrive(self, blocks: list[int], tail: int, salt: str, max_tokens: int) -> None:
        if len(self.engine.known()) < 6:
            prompt = prompt_of(*blocks, tail=tail)
            try:
                self.engine.add(spec(f"r{self.added}", prompt, cache_salt=salt, max_tokens=max_tokens))
            except ValueError:
                return  # more than the pool holds
            self.added += 1
            self.prompts.append((prompt, salt))

    def some(self, which: int) -> str | None:
        live = sorted(name for name in self.engine.known() if not self.finished(name))
        return live[which % len(live)] if live else None

    @rule(first=st.integers(0), count=st.integers(1, 3), rounds=st.integers(1, 4))
    def run(self, first: int, count: int, rounds: int) -> None:
        for _ in range(rounds):
            names = {self.some(first + at) for at in range(count)} - {None}
            try:
                result = self.engine.round(sorted(name for name in names if name))
            except OutOfBlocks:
                return
            for report in result.requests:
                if report.finish is not None:
                    self.engine.drop(report.request_id)

    @rule(which=st.integers(0), how=st.sampled_from(["swap_out", "evict", "drop"]))
    def leave(self, which: int, how: str) -> None:
        if (name := self.some(which)) is not None:
            getattr(self.engine, how)(name)

    @invariant()
    def changes_give_what_is_cached_and_what_is_cached_is_found(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check()  # type: ignore[attr-defined]
        known = self.replica.follow()
        assert len(known) <= prompt_blocks.most_cached(self.engine.capacity.target_blocks, self.size)
        for prompt, salt in self.prompts[-8:]:
            reported = self.replica.leading(prompt, salt) * BLOCK_TOKENS
            assert self.found(prompt, salt) // self.size >= reported // self.size


CacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
