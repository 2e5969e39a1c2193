"""The prompt blocks that a prefix cache holds, by the names that the scheduler knows, and their changes.

A prompt block is 64 tokens of a context, prompt and output alike (`laps_sd.contract.prompt_blocks`); a KV block
has `block_size` tokens. Of a prompt block the KV blocks that hold its tokens are its *parts*. It counts as held
from the time when all of them have a name until the first of these is forgotten. So a request finds all blocks
from the first on that count as held. If `block_size` does not divide 64, its last part may hold tokens of another
context after those of the block; then a request finds up to a KV block less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from laps_sd.contract import prompt_blocks
from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, MOST_BLOCKS, NAME_BYTES
from worker_svc.engine.cache.blocks import name_blocks, root_of
from worker_svc.engine.interface import NO_CHANGES, CacheChanges


@dataclass(slots=True)
class ContextNames:
    """Names of the blocks of one context under its salt, as far as they were needed."""

    salt: str
    kv: list[bytes] = field(default_factory=list)
    """Names of its full KV blocks."""
    prompt: bytes = b""
    """Names of its full prompt blocks."""

    def kv_blocks(self, tokens: Sequence[int], block_size: int) -> list[bytes]:
        """Return the names of all full KV blocks of the context, which only ever grows."""
        if len(self.kv) < len(tokens) // block_size:
            name_blocks(self.kv, tokens, block_size, b"" if self.kv else root_of(self.salt))
        return self.kv

    def prompt_blocks(self, tokens: Sequence[int]) -> bytes:
        """Return the names of all full prompt blocks of the context."""
        self.prompt = prompt_blocks.name_blocks(tokens, self.salt, self.prompt)
        return self.prompt


class NamedBlocks(Protocol):
    """KV blocks that are found by names of their contents."""

    # Blocks in all.
    blocks: int
    # Called with each name that no block has any more.
    on_forgotten: Callable[[bytes], None] | None

    def holds(self, name: bytes) -> bool:
        """Return whether a block has this name."""
        ...


class CachedPrompts:
    """The prompt blocks that KV blocks with names hold."""

    def __init__(self, blocks: NamedBlocks, block_size: int) -> None:
        """Follow the names of these blocks of `block_size` tokens."""
        self._blocks = blocks
        self._block_size = block_size
        self._most = prompt_blocks.most_cached(blocks.blocks, block_size)
        self._parts: dict[bytes, tuple[bytes, ...]] = {}
        """Parts of each prompt block, the most recently used last."""
        self._with: dict[bytes, list[bytes]] = {}
        """Prompt blocks of which a KV block is a part."""
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        blocks.on_forgotten = self._forgotten

    def note(self, names: ContextNames, tokens: Sequence[int], noted: int, named: int) -> int:
        """Note the prompt blocks of a context after the first `noted`, as far as its first `named` KV blocks,
        which have names, hold them. Return how many are noted then.
        """
        size = self._block_size
        whole = min(named * size // BLOCK_TOKENS, MOST_BLOCKS)
        if whole <= noted:
            return noted
        of_prompt = names.prompt_blocks(tokens)
        for at in range(noted, whole):
            first, end = at * BLOCK_TOKENS, (at + 1) * BLOCK_TOKENS
            parts = tuple(names.kv[first // size : -(-end // size)])
            if all(map(self._blocks.holds, parts)):
                self._add(of_prompt[at * NAME_BYTES : (at + 1) * NAME_BYTES], parts)
        return whole

    def held(self) -> bytes:
        """Return the names of all that are held, the most recently used last."""
        return b"".join(self._parts)

    def changes(self) -> CacheChanges:
        """Return the changes since the last call."""
        if not self._added and not self._removed:
            return NO_CHANGES
        changes = CacheChanges(b"".join(self._added), b"".join(self._removed))
        self._added.clear()
        self._removed.clear()
        return changes

    def clear(self) -> None:
        """Take in that no block has a name any more."""
        for name in tuple(self._parts):
            self._remove(name)

    def _add(self, name: bytes, parts: tuple[bytes, ...]) -> None:
        known = self._parts.pop(name, None)
        self._parts[name] = known or parts
        if known is not None:
            return
        for part in parts:
            self._with.setdefault(part, []).append(name)
        if name in self._removed:
            del self._removed[name]
        else:
            self._added[name] = None
        if len(self._parts) > self._most:
            self._remove(next(iter(self._parts)))

    def _remove(self, name: bytes) -> None:
        for part in self._parts.pop(name):
            of_part = self._with[part]
            of_part.remove(name)
            if not of_part:
                del self._with[part]
        if name in self._added:
            del self._added[name]
        else:
            self._removed[name] = None

    def _forgotten(self, part: bytes) -> None:
        for name in tuple(self._with.get(part, ())):
            self._remove(name)
