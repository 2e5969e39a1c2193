"""Which KV block belongs to whom. Integers only: no torch, no tokens, no models.

A block is `block_size` tokens of one pool. `BlockAllocator` hands out ids and takes them back; it prefers neighbours, because a
request whose blocks follow one another can be read as a slice instead of being gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from worker_svc.engine.interface import OutOfBlocks


class BlockAllocator:
    """Hands out block ids 0 .. blocks - 1, each to one owner at a time.

    `region` is a hint in blocks: a new owner starts at a multiple of it where a whole free region is left, so that it can grow in
    place and so that several owners lie at equal distances.
    """

    def __init__(self, blocks: int, region: int = 1) -> None:
        if blocks < 0 or region < 1:
            raise ValueError("blocks must be 0 or more and region at least 1")
        self.blocks = blocks
        self.region = region
        self._taken = bytearray(blocks)  # [id] = 1 while somebody owns it
        self.free_blocks = blocks

    def allocate(self, count: int, expected: int = 0) -> list[int]:
        """`count` blocks for a new owner that may grow to `expected`. Raises OutOfBlocks, changing nothing."""
        self._require(count)
        start = self._find_start(count, max(count, expected))
        ids = list(range(start, start + count)) if start >= 0 else self._scattered(count)
        return self._take(ids)

    def extend(self, held: Sequence[int], count: int) -> list[int]:
        """`count` more blocks for the owner of `held`, next to its last one where possible. Raises OutOfBlocks, changing nothing."""
        self._require(count)
        first = held[-1] + 1 if held else self.blocks
        run = 0
        while run < count and first + run < self.blocks and not self._taken[first + run]:
            run += 1
        ids = self._take(list(range(first, first + run)))
        return ids + self._take(self._scattered(count - run))

    def free(self, ids: Iterable[int]) -> None:
        """Take blocks back. Raises ValueError for a block that nobody owns."""
        for block in ids:
            if not (0 <= block < self.blocks and self._taken[block]):
                raise ValueError(f"block {block} is not allocated")
            self._taken[block] = 0
            self.free_blocks += 1

    def check(self, owners: Iterable[Iterable[int]] = ()) -> None:
        """Assert the invariant: free + taken = all, and, when all owners are given, every taken block has exactly one."""
        assert self.free_blocks == self.blocks - sum(self._taken), "the free count is wrong"
        held = [block for owner in owners for block in owner]
        if held:
            assert len(set(held)) == len(held), "a block has two owners"
            assert sorted(held) == [block for block in range(self.blocks) if self._taken[block]], (
                "a taken block has no owner"
            )

    def _require(self, count: int) -> None:
        if count > self.free_blocks:
            raise OutOfBlocks(
                f"{count} KV blocks are needed and {self.free_blocks} of {self.blocks} are free"
            )

    def _take(self, ids: list[int]) -> list[int]:
        for block in ids:
            self._taken[block] = 1
        self.free_blocks -= len(ids)
        return ids

    def _find_start(self, count: int, expected: int) -> int:
        """Start of a free run: whole regions for `expected` first, then whole regions for `count`, then any run; -1 if there is none."""
        if count == 0:
            return 0
        for wanted, step in (
            (-(-expected // self.region) * self.region, self.region),
            (expected, self.region),
            (count, self.region),
        ):
            for start in range(0, self.blocks - wanted + 1, step):
                if not any(self._taken[start : start + wanted]):
                    return start
        return self._taken.find(bytes(count))

    def _scattered(self, count: int) -> list[int]:
        ids: list[int] = []
        start = 0
        while len(ids) < count:
            start = self._taken.index(0, start)
            ids.append(start)
            start += 1
        return ids
