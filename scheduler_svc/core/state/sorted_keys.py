"""A sorted set with positions, in the standard library: blocks of sorted lists.

Insert, remove and position cost one bisection over the blocks and one move inside a block of bounded size,
which for the sizes that occur (up to 10^6) is a few microseconds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound="tuple[float | int | str, ...]")

_BLOCK = 512
_MANY = 8
"""Keys are added or removed together if the order has at most this number of times as many."""


class SortedKeys(Generic[Key]):
    """Distinct keys in order. Invariants: no block is empty, none is longer than twice `_BLOCK`."""

    def __init__(self) -> None:
        self._blocks: list[list[Key]] = []
        self._last: list[Key] = []
        """The greatest key of each block."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __bool__(self) -> bool:
        return self._size > 0

    def __iter__(self) -> Iterator[Key]:
        for block in self._blocks:
            yield from block

    def __reversed__(self) -> Iterator[Key]:
        for block in reversed(self._blocks):
            yield from reversed(block)

    def add(self, key: Key) -> None:
        """Add a key that is not there yet."""
        self._size += 1
        if not self._blocks:
            self._blocks.append([key])
            self._last.append(key)
            return
        at = min(bisect_left(self._last, key), len(self._blocks) - 1)
        block = self._blocks[at]
        insort(block, key)
        self._last[at] = block[-1]
        if len(block) > 2 * _BLOCK:
            self._blocks.insert(at + 1, block[_BLOCK:])
            del block[_BLOCK:]
            self._last.insert(at, block[-1])

    def remove(self, key: Key) -> None:
        """Remove a key; raise KeyError if it is not there."""
        at = inside = 0
        if not self._blocks or self._blocks[0][0] != key:  # the first is removed more often than any other
            at = bisect_left(self._last, key)
            inside = bisect_left(self._blocks[at], key) if at < len(self._blocks) else 0
            if at == len(self._blocks) or self._blocks[at][inside] != key:
                raise KeyError(key)
        block = self._blocks[at]
        del block[inside]
        self._size -= 1
        if block:
            self._last[at] = block[-1]
        else:
            del self._blocks[at], self._last[at]

    def add_all(self, keys: Sequence[Key]) -> None:
        """Add keys that are not there yet. Many cost much less together than one after another."""
        if len(keys) * _MANY < self._size:
            for key in keys:
                self.add(key)
        elif keys:
            self._fill(sorted([*self, *keys]))

    def remove_all(self, keys: Sequence[Key]) -> None:
        """Remove keys that are there. Many cost much less together than one after another."""
        if len(keys) * _MANY < self._size:
            for key in keys:
                self.remove(key)
        elif keys:
            gone = set(keys)
            self._fill([key for key in self if key not in gone])

    def _fill(self, keys: list[Key]) -> None:
        self._blocks = [keys[first : first + _BLOCK] for first in range(0, len(keys), _BLOCK)]
        self._last = [block[-1] for block in self._blocks]
        self._size = len(keys)

    def position(self, key: Key) -> int:
        """Return the number of smaller keys."""
        at = bisect_left(self._last, key)
        before = sum(len(block) for block in self._blocks[:at])
        return before + (bisect_left(self._blocks[at], key) if at < len(self._blocks) else 0)

    def first(self) -> Key:
        """Return the smallest key; raise IndexError if there is none."""
        return self._blocks[0][0]

    def last(self) -> Key:
        """Return the greatest key; raise IndexError if there is none."""
        return self._last[-1]
