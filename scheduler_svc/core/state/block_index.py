"""An index from blocks of prompts, by their names (`laps_sd.contract.prompt_blocks`), to the workers that have their KV.

It is what the workers reported, so it may be wrong: a placement by a wrong belief costs time and nothing else. A block
costs 12 bytes and its part of the spare room of an array, whatever the number of workers that have it.

Names lie in sorted arrays, one for each value of their lowest bits. A second array has for each name the number of a
*set* of workers. Sets are bits: bit n for the worker with number n. Equal sets have one number, so that a worker that is lost
leaves all blocks by a change of the sets alone.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final

from laps_sd.contract.prompt_blocks import numbers_of

_PARTS: Final = 8192
"""Arrays of names. With a million blocks each holds 120."""


class BlockIndex:
    """An index from block to workers. Names are in the packed form of `laps_sd.contract.prompt_blocks`."""

    def __init__(self) -> None:
        self._names: list[array[int] | None] = [None] * _PARTS
        self._set_of: list[array[int] | None] = [None] * _PARTS
        """Both by part, from its first block on."""
        self._sets: list[int] = [0]
        """The workers of each set; set 0 is the empty one."""
        self._numbers: dict[int, int] = {0: 0}
        """The number of each set."""
        self._blocks_of_set: list[int] = [0]
        self._free_sets: list[int] = []
        self._bit_of: dict[str, int] = {}
        self._worker_of: dict[int, str] = {}
        self._blocks_of: dict[str, int] = {}
        self._last: tuple[bytes, dict[str, int]] = (b"", {})
        """The last names that were looked up, and the result: a placement needs the same several times."""

    def __len__(self) -> int:
        """Return the number of blocks that it holds; those that no worker has any more may count."""
        return sum([len(names) for names in self._names if names is not None])

    @property
    def size_bytes(self) -> int:
        """Return about how much memory it takes."""
        parts = sum([names is not None for names in self._names])
        return len(self) * 12 + parts * 350 + _PARTS * 16 + len(self._sets) * 120

    def blocks_of(self, worker_id: str) -> int:
        """Return how many blocks it believes that a worker has."""
        return self._blocks_of.get(worker_id, 0)

    def add(self, worker_id: str, names: bytes) -> None:
        """Note that a worker has these blocks now."""
        bit = self._bit(worker_id)
        self._last = (b"", {})
        for name in numbers_of(names):
            part = name & (_PARTS - 1)
            ordered, set_of = self._names[part], self._set_of[part]
            if ordered is None or set_of is None:
                ordered = self._names[part] = array("Q")
                set_of = self._set_of[part] = array("I")
            at = bisect_left(ordered, name)
            if at < len(ordered) and ordered[at] == name:
                before = set_of[at]
                workers = self._sets[before]
                if workers & bit:
                    continue
                set_of[at] = self._take_set(workers | bit)
                self._drop_set(before)
            else:
                if len(ordered) & 15 == 15:
                    self._sweep(part)
                    at = bisect_left(ordered, name)
                ordered.insert(at, name)
                set_of.insert(at, self._take_set(bit))
            self._blocks_of[worker_id] += 1

    def remove(self, worker_id: str, names: bytes) -> None:
        """Note that a worker does not have these blocks any more."""
        bit = self._bit_of.get(worker_id)
        if bit is None:
            return
        self._last = (b"", {})
        for name in numbers_of(names):
            part = name & (_PARTS - 1)
            ordered, set_of = self._names[part], self._set_of[part]
            if ordered is None or set_of is None:
                continue
            at = bisect_left(ordered, name)
            if at == len(ordered) or ordered[at] != name:
                continue
            before = set_of[at]
            workers = self._sets[before]
            if not workers & bit:
                continue
            self._blocks_of[worker_id] -= 1
            if workers == bit:
                del ordered[at]
                del set_of[at]
            else:
                set_of[at] = self._take_set(workers & ~bit)
            self._drop_set(before)

    def forget(self, worker_id: str) -> None:
        """Note that a worker is gone. Blocks that only it had are removed when others come to their place."""
        bit = self._bit_of.pop(worker_id, None)
        if bit is None:
            return
        self._last = (b"", {})
        del self._worker_of[bit], self._blocks_of[worker_id]
        for number, workers in enumerate(self._sets):
            self._sets[number] = workers & ~bit
        # Two sets may be equal now. One of them keeps the number by which new blocks find it.
        self._numbers = {workers: number for number, workers in reversed(list(enumerate(self._sets)))}
        self._numbers[0] = 0

    def cached(self, names: bytes) -> Mapping[str, int]:
        """Return how many of these blocks, from the first on, each worker has; those with none are left out.

        A cache that has a block has those before it, except for moments. So blocks between two that the same workers
        have are not looked up, and a long prompt costs little more than a short one.
        """
        if names != self._last[0]:
            self._last = (names, self._search(numbers_of(names)) if names else {})
        return self._last[1]

    def _search(self, blocks: Sequence[int]) -> dict[str, int]:
        """Return where each worker ends. From left to right, the gap between two blocks with different sets is halved
        until they are neighbours. Numbers of sets are compared, and the sets only there: their bits are slow.
        """
        found: dict[str, int] = {}
        sets = self._sets
        low, set_low = 0, self._set_with(blocks[0])
        having = sets[set_low]
        """Workers that have all blocks up to `low`."""
        ends, sets_at = [len(blocks)], [0]
        """Blocks on the right that were looked up, the nearest last; none has the one after the prompt."""
        while having:
            high, set_high = ends[-1], sets_at[-1]
            if set_low != set_high:
                if high - low > 1:
                    middle = (low + high) // 2
                    ends.append(middle)
                    sets_at.append(self._set_with(blocks[middle]))
                    continue
                left = having & ~sets[set_high]
                having ^= left
                while left:
                    bit = left & -left
                    found[self._worker_of[bit]] = high
                    left ^= bit
            low, set_low = high, set_high
            ends.pop()
            sets_at.pop()
        return found

    def _set_with(self, name: int) -> int:
        """Return the number of the set of workers that have a block."""
        part = name & (_PARTS - 1)
        ordered = self._names[part]
        if ordered is None:
            return 0
        at = bisect_left(ordered, name)
        if at == len(ordered) or ordered[at] != name:
            return 0
        set_of = self._set_of[part]
        assert set_of is not None
        return set_of[at]

    def _bit(self, worker_id: str) -> int:
        bit = self._bit_of.get(worker_id)
        if bit is None:
            number = 0
            while 1 << number in self._worker_of:
                number += 1
            bit = self._bit_of[worker_id] = 1 << number
            self._worker_of[bit] = worker_id
            self._blocks_of[worker_id] = 0
        return bit

    def _take_set(self, workers: int) -> int:
        """Return the number of a set, which one more block is to have."""
        number = self._numbers.get(workers)
        if number is None:
            if self._free_sets:
                number = self._free_sets.pop()
                self._sets[number] = workers
            else:
                number = len(self._sets)
                self._sets.append(workers)
                self._blocks_of_set.append(0)
            self._numbers[workers] = number
        self._blocks_of_set[number] += 1
        return number

    def _drop_set(self, number: int) -> None:
        """Note that a block has another set now."""
        self._blocks_of_set[number] -= 1
        if not self._blocks_of_set[number] and number:
            workers = self._sets[number]
            if self._numbers.get(workers) == number:
                del self._numbers[workers]
            self._sets[number] = 0
            self._free_sets.append(number)

    def _sweep(self, part: int) -> None:
        """Remove the blocks of one array that no worker has."""
        names, set_of = self._names[part], self._set_of[part]
        assert names is not None and set_of is not None
        for at in reversed(range(len(names))):
            if not self._sets[set_of[at]]:
                self._drop_set(set_of[at])
                del names[at]
                del set_of[at]
