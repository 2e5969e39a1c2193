"""Owners and contents of KV blocks (block accounting, prefix cache).

Integers and names only: no torch, no models.

A block is `block_size` tokens of one pool. At any time it is

    owned    by one owner, or by several that read the same context start
    cached   without an owner, but its contents have a name and can be reused until the space is needed
    free     without an owner and without known contents

Cached blocks count as free in every count of space. A block gets its name when it is full of committed
tokens, and is never written again while it has an owner: so only a block with a name has several owners, and
every other one has a single writer.

`BlockAllocator` prefers adjacent blocks, because a context in one run of memory is read faster, and by SDPA
as a view instead of being gathered.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import islice

from laps_sd.contract.choose import shared_runs
from worker_svc.engine.interface import OutOfBlocks

_FREE, _CACHED, _OWNED = 0, 1, 2


def root_of(salt: str) -> bytes:
    """Return what the names of contexts with this salt begin with; empty without a salt."""
    return blake2b(salt.encode(), digest_size=32, person=b"laps-sd cache").digest() if salt else b""


def name_blocks(names: list[bytes], tokens: Sequence[int], block_size: int, root: bytes = b"") -> list[bytes]:
    """Extend `names` to all full blocks of `tokens`, and return it. `root`: of their salt.

    Name i identifies the tokens of block i, all before them, and the salt. A name is a digest of 256 bits,
    because clients choose tokens: finding two contexts with one name is infeasible.
    """
    for at in range(len(names), len(tokens) // block_size):
        ids = array("I", tokens[at * block_size : (at + 1) * block_size]).tobytes()
        names.append(blake2b((names[-1] if names else root) + ids, digest_size=32).digest())
    return names


class BlockAllocator:
    """An allocator of block ids 0 .. blocks - 1, each for one writer at a time.

    `region` is a hint in blocks: a new owner starts at a multiple of it where a whole region without owners
    is left, so that it can grow in place. With `together`, cached contents are evicted for that, the region with
    the oldest contents first. In all other cases cached blocks are used only when no others are left, and strictly
    oldest first.
    """

    def __init__(self, blocks: int, region: int = 1, together: bool = True) -> None:
        if blocks < 0 or region < 1:
            raise ValueError("blocks must be 0 or more and region at least 1")
        self.blocks = blocks
        self.region = region
        self.free_blocks = blocks  # cached ones included
        self._together = together
        self._state = bytearray(blocks)
        self._owners = [0] * blocks
        self._names: dict[int, bytes | None] = {}  # names of read-only blocks; None: `find` skips it
        self._by_name: dict[bytes, list[int]] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # those without an owner, oldest first
        self._cached_at = [0] * blocks  # clock when it lost its last owner; 0: not cached
        self._clock = 0
        self._starts: dict[int, int] = {}  # see `expect`: numbers of blocks, by the last of them
        self.on_forgotten: Callable[[bytes], None] | None = None
        """Called with each name that `find` finds no more."""

    # -- space --------------------------------------------------------------------------------------------------------------

    def allocate(self, count: int, expected: int = 0) -> list[int]:
        """Return `count` blocks for a new owner that may grow to `expected`.

        Raises OutOfBlocks, changing nothing.
        """
        self._require(count)
        start = self._find_start(count, max(count, expected))
        ids = list(range(start, start + count)) if start >= 0 else self._scattered(count)
        return self._take(ids)

    def extend(self, held: Sequence[int], count: int) -> list[int]:
        """Return `count` more blocks for the owner of `held`, next to its last one while those are free.

        Raises OutOfBlocks, changing nothing.
        """
        self._require(count)
        first = held[-1] + 1 if held else self.blocks
        # Cached neighbours are spared: after a start that several contexts share lies the rest of one of them.
        run = 0
        while run < count and first + run < self.blocks and self._state[first + run] == _FREE:
            run += 1
        ids = self._take(list(range(first, first + run)))
        return ids + self._take(self._scattered(count - run))

    def free(self, ids: Sequence[int]) -> None:
        """Remove one owner from each block. Raises ValueError for a block without an owner.

        `ids` are in the order of the context; the blocks at its end are reused first.
        """
        for block in reversed(ids):
            if not (0 <= block < self.blocks and self._owners[block]):
                raise ValueError(f"block {block} is not allocated")
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            self.free_blocks += 1
            self._state[block] = _FREE
            name = self._names.get(block)
            if name is not None and len(self._by_name[name]) == 1:
                self._state[block] = _CACHED
                self._clock += 1
                self._cached_at[block] = self._clock
                self._cached[block] = None
            elif block in self._names:  # its contents are in another block too, or must not be found
                self._forget(block)

    # -- contents -----------------------------------------------------------------------------------------------------------

    def name(self, block: int, name: bytes) -> None:
        """Make `block` read-only, so that `find` returns it.

        Raises ValueError unless it has one owner and no name.
        """
        if self._owners[block] != 1 or block in self._names:
            raise ValueError(f"block {block} has a name already, or not one owner")
        self._names[block] = name
        same = self._by_name.setdefault(name, [])
        same.append(block)
        if self._state[same[0]] == _CACHED:  # an owned block stays in any case
            self._forget(same[0])

    def is_named(self, block: int) -> bool:
        """Return True if the block must not be written."""
        return block in self._names

    def holds(self, name: bytes) -> bool:
        """Return True if a block has these contents."""
        return name in self._by_name

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Return blocks with these contents, up to the first name that no block has."""
        found: list[int] = []
        for name in names:
            same = self._by_name.get(name)
            if same is None:
                break
            found.append(same[0])
        return found

    def share(self, ids: Sequence[int]) -> None:
        """Add one owner to each block. Raises ValueError for a block without a name."""
        if any(block not in self._names for block in ids):
            raise ValueError("only blocks with a name are shared")
        for block in ids:
            if self._state[block] == _CACHED:
                self._uncache(block)
                self._state[block] = _OWNED
                self.free_blocks -= 1
            self._owners[block] += 1

    def unowned(self, ids: Iterable[int]) -> int:
        """Return how many of these blocks have no owner, each counted once."""
        return sum(not self._owners[block] for block in set(ids))

    def owned(self, names: Sequence[bytes], most: int) -> int:
        """Return how many of the first `most` blocks with these names, from the first on, have an owner. `names` are
        those of a context, so who owns a block owns all before it.
        """

        def has_none(name: bytes) -> bool:
            same = self._by_name.get(name)
            return same is None or not self._owners[same[0]]

        return 0 if not most or has_none(names[0]) else bisect_left(names, True, 1, most, key=has_none)

    def expect(self, starts: Iterable[tuple[Sequence[bytes], int]]) -> None:
        """Count as shared what requests will find: this number of the blocks with these names, all of which have owners.
        It holds for `shared` and `will_share` until the next call.
        """
        self._starts = {self._by_name[names[count - 1]][0]: count for names, count in starts}

    def shared(self, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return first block and length of each run of `ids`, the blocks of an owner in the order of its context,
        that have the same owners, two or more with those that will find them.
        """
        return self._runs(len(ids), ids.__getitem__)

    def will_share(self, names: Sequence[bytes], count: int) -> list[tuple[int, int]]:
        """Return the same of the first `count` blocks with these names, all of which have owners."""
        return self._runs(count, lambda at: self._by_name[names[at]][0])

    def _runs(self, blocks: int, block_at: Callable[[int], int]) -> list[tuple[int, int]]:
        owners = self._owners
        ends = [end for block, end in self._starts.items() if end <= blocks and block_at(end - 1) == block]
        runs = shared_runs(blocks, lambda at: owners[block_at(at)], sorted(ends))
        return [(block_at(begin), end - begin) for begin, end in runs]

    def forget_names(self) -> None:
        """Forget all names: `find` returns no block that exists now."""
        for block in list(self._cached):
            self._forget(block)
        self._names = dict.fromkeys(self._names)
        forgotten, self._by_name = self._by_name, {}
        if self.on_forgotten is not None:
            for name in forgotten:
                self.on_forgotten(name)

    def check(self, owners: Iterable[Iterable[int]] | None = None) -> None:
        """Assert the invariant: every block is free, cached or owned, and the counts agree with `owners`, if
        these are all."""
        assert self.free_blocks == self._owners.count(0), "the free count is wrong"
        for block, count in enumerate(self._owners):
            name = self._names.get(block)
            state = _OWNED if count else _CACHED if name is not None else _FREE
            assert self._state[block] == state, "a block is not what it is counted as"
            assert count or block not in self._names or name is not None, "a free block has a past"
            assert count < 2 or block in self._names, "a block has two writers"
            assert (block in self._cached) == (self._cached_at[block] > 0) == (state == _CACHED)
            assert name is None or block in self._by_name[name], "a name does not lead to its block"
            assert state != _CACHED or self._by_name[name or b""] == [block], "contents are cached twice"
        assert sum(map(len, self._by_name.values())) == sum(name is not None for name in self._names.values())
        if owners is not None:
            held = Counter(block for owner in owners for block in owner)
            assert [held[block] for block in range(self.blocks)] == self._owners, (
                "a block has another number of owners"
            )

    def _require(self, count: int) -> None:
        if count > self.free_blocks:
            raise OutOfBlocks(
                f"{count} KV blocks are needed and {self.free_blocks} of {self.blocks} are free"
            )

    def _take(self, ids: list[int]) -> list[int]:
        for block in ids:
            if self._state[block] == _CACHED:
                self._forget(block)
            self._state[block] = _OWNED
            self._owners[block] = 1
        self.free_blocks -= len(ids)
        return ids

    def _forget(self, block: int) -> None:
        """Forget the contents of a block: `find` skips it, and it may be written."""
        name = self._names.pop(block)
        if name is not None:
            same = self._by_name[name]
            same.remove(block)
            if not same:
                del self._by_name[name]
                if self.on_forgotten is not None:
                    self.on_forgotten(name)
        if self._state[block] == _CACHED:
            self._uncache(block)
            self._state[block] = _FREE

    def _uncache(self, block: int) -> None:
        del self._cached[block]
        self._cached_at[block] = 0

    def _find_start(self, count: int, expected: int) -> int:
        """Return the start of a run of blocks without owners, or -1 if there is none.

        The order is: whole regions for `expected`, whole regions for `count`, any run. With `together`,
        cached contents only decide between equally good runs, so that they make no request slower.
        """
        if count == 0:
            return 0
        for wanted, step in (
            (-(-expected // self.region) * self.region, self.region),
            (expected, self.region),
            (count, self.region),
            (count, 1),
        ):
            start = self._stalest(wanted, step)
            if start >= 0:
                return start
        return -1

    def _stalest(self, length: int, step: int) -> int:
        """Return the start of a run at a multiple of `step`, or -1.

        It is the first run that is all free, else the one whose newest contents are the oldest.
        """
        best, oldest = -1, self._clock + 1
        start = 0
        while start + length <= self.blocks:
            owned = self._state.rfind(_OWNED, start, start + length)
            if owned >= 0:
                start += -(-(owned + 1 - start) // step) * step
                continue
            newest = max(self._cached_at[start : start + length])
            if newest == 0:
                return start
            if newest < oldest and self._together:
                best, oldest = start, newest
            start += step
        return best

    def _scattered(self, count: int) -> list[int]:
        """Return free blocks, and then the oldest cached ones, each in ascending order: as many as possible
        are adjacent."""
        ids: list[int] = []
        start = 0
        while len(ids) < count and (start := self._state.find(_FREE, start)) >= 0:
            ids.append(start)
            start += 1
        return ids + sorted(islice(self._cached, count - len(ids)))
