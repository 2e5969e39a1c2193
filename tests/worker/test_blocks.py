"""The block allocator: after any order of calls, every block is free, cached or owned, and a block is written
only by its only owner.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.worker.cache import cached_blocks
from worker_svc.engine.cache.blocks import BlockAllocator, name_blocks, root_of
from worker_svc.engine.interface import OutOfBlocks, blocks_needed


@dataclass
class Owner:
    """An owner with a context of one token per block, written block after block."""

    names: list[bytes]
    blocks: list[int]
    written: int  # number of written blocks, from the start


class Owners(RuleBasedStateMachine):
    """Owners with contexts, some of them known already, that are created, write, grow and leave. `contents`
    is the last content written to each block.
    """

    @initialize(blocks=st.integers(0, 40), region=st.integers(1, 9), together=st.booleans())
    def start(self, blocks: int, region: int, together: bool) -> None:
        self.allocator = BlockAllocator(blocks, region, together)
        self.owners: list[Owner] = []
        self.contents: list[bytes] = [b"nothing"] * blocks
        self.named: set[bytes] = set()
        self.allocator.on_forgotten = self.named.remove

    @rule(
        context=st.lists(st.integers(0, 1), max_size=12),
        more=st.integers(0, 12),
        shares=st.booleans(),
        copies=st.booleans(),
    )
    def arrive(self, context: list[int], more: int, shares: bool, copies: bool) -> None:
        names = name_blocks([], context, 1)
        found = self.allocator.find(names) if shares else []
        assert [self.contents[block] for block in found] == names[: len(found)]
        cached = cached_blocks(self.allocator)
        before = self.allocator.free_blocks
        self.allocator.share(found)
        count = len(context) - (0 if copies else len(found))
        if count > self.allocator.free_blocks:
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate(count, count + more)
            self.allocator.free(found)
            assert (self.allocator.free_blocks, cached_blocks(self.allocator)) == (before, cached)
            return
        own = self.allocator.allocate(count, count + more)
        assert len(own) == count
        assert not set(own) & set(found), "what was found is given to somebody else"
        if copies:
            for block, source in zip(own, found, strict=False):
                self.contents[block] = self.contents[source]
            self.allocator.free(found)
            found, written = own, len(found)
        else:
            found, written = found + own, len(found)
        self.owners.append(Owner(names, found, written))
        for block in found[written:]:
            self.contents[block] = b"somebody writes here"

    @rule(which=st.integers(0))
    def write(self, which: int) -> None:
        """Fill the next block, and give it its name, if it has none yet."""
        if not self.owners:
            return
        owner = self.owners[which % len(self.owners)]
        for at in range(owner.written + 1):
            if at < len(owner.names) and not self.allocator.is_named(owner.blocks[at]):
                self.contents[owner.blocks[at]] = owner.names[at]
                self.allocator.name(owner.blocks[at], owner.names[at])
                self.named.add(owner.names[at])
                owner.written = max(owner.written, at + 1)
                return

    @rule(which=st.integers(0), count=st.integers(0, 6))
    def grow(self, which: int, count: int) -> None:
        if not self.owners:
            return
        held = self.owners[which % len(self.owners)].blocks
        if count > self.allocator.free_blocks:
            with pytest.raises(OutOfBlocks):
                self.allocator.extend(held, count)
        else:
            more = self.allocator.extend(held, count)
            held += more
            for block in more:
                self.contents[block] = b"somebody writes here"

    @rule(which=st.integers(0))
    def leave(self, which: int) -> None:
        if self.owners:
            self.allocator.free(self.owners.pop(which % len(self.owners)).blocks)

    @rule()
    def forget(self) -> None:
        self.allocator.forget_names()
        assert not self.named
        assert cached_blocks(self.allocator) == 0

    @invariant()
    def every_block_is_free_cached_or_owned(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check(owner.blocks for owner in self.owners)
            owned = Counter(block for owner in self.owners for block in owner.blocks)
            assert self.allocator.free_blocks + len(owned) == self.allocator.blocks
            assert cached_blocks(self.allocator) <= self.allocator.free_blocks

    @invariant()
    def what_is_found_was_named_and_not_forgotten(self) -> None:
        if hasattr(self, "allocator"):
            known = [name for owner in self.owners for name in owner.names] + list(self.named)
            for name in known:
                assert self.allocator.holds(name) == bool(self.allocator.find([name])) == (name in self.named)

    @invariant()
    def whoever_writes_a_block_is_alone(self) -> None:
        if hasattr(self, "allocator"):
            holders = Counter(block for owner in self.owners for block in owner.blocks)
            for owner in self.owners:
                for block in owner.blocks:
                    assert holders[block] == 1 or self.allocator.is_named(block)


TestOwners = Owners.TestCase


def test_an_owner_grows_in_place_while_there_is_room() -> None:
    allocator = BlockAllocator(64, region=8)
    first, second = allocator.allocate(2, 8), allocator.allocate(2, 8)
    assert (first, second) == ([0, 1], [8, 9])
    assert allocator.extend(first, 3) == [2, 3, 4]


def test_growth_goes_elsewhere_when_the_neighbour_is_taken() -> None:
    allocator = BlockAllocator(6)
    first, second = allocator.allocate(2), allocator.allocate(2)
    assert allocator.extend(first, 2) == [4, 5]
    allocator.free(second)
    assert allocator.allocate(2) == [2, 3]


def test_a_block_is_not_taken_back_twice() -> None:
    allocator = BlockAllocator(4)
    held = allocator.allocate(2)
    allocator.free(held)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(held)


@pytest.mark.parametrize(("blocks", "region"), [(-1, 1), (4, 0)])
def test_a_pool_that_makes_no_sense_is_refused(blocks: int, region: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockAllocator(blocks, region)


@given(tokens=st.integers(1, 1000), growth=st.integers(1, 20), size=st.integers(1, 64))
def test_blocks_hold_all_tokens_but_the_last_and_the_growth(tokens: int, growth: int, size: int) -> None:
    blocks = blocks_needed(tokens, growth, size)
    assert (blocks - 1) * size < tokens - 1 + growth <= blocks * size


@pytest.fixture
def cache() -> BlockAllocator:
    """Return eight blocks in regions of two. Blocks 0 and 1, and later 4 and 5, held contexts that ended."""
    allocator = BlockAllocator(8, region=2)
    first, between, second = allocator.allocate(2), allocator.allocate(2), allocator.allocate(2)
    for held, context in ((first, [1, 2]), (second, [3, 4])):
        for block, name in zip(held, name_blocks([], context, 1), strict=True):
            allocator.name(block, name)
        allocator.free(held)
    allocator.free(between)
    return allocator


def test_what_is_cached_counts_as_free_and_goes_last_and_oldest_first(cache: BlockAllocator) -> None:
    assert (cache.free_blocks, cached_blocks(cache)) == (8, 4)
    assert cache.allocate(2) == [2, 3]
    assert cache.allocate(2) == [6, 7]
    assert cached_blocks(cache) == 4
    assert cache.allocate(2) == [0, 1], "the context that ended first"
    assert cache.find(name_blocks([], [1, 2], 1)) == []
    assert cache.find(name_blocks([], [3, 4], 1)) == [4, 5]


def test_the_end_of_a_context_goes_before_its_start(cache: BlockAllocator) -> None:
    held = cache.allocate(2) + cache.allocate(2)
    assert held == [2, 3, 6, 7]
    assert cache.extend(held, 1) == [1]
    assert cache.find(name_blocks([], [1, 2], 1)) == [0]


def test_growth_spares_what_is_cached_while_blocks_are_free(cache: BlockAllocator) -> None:
    held = cache.allocate(2)
    assert held == [2, 3]
    assert cache.extend(held, 2) == [6, 7], "block 4 is next, but has contents"
    assert cached_blocks(cache) == 4
    assert cache.extend([*held, 6, 7], 2) == [0, 1], "none is free any more: the oldest contents go"
    assert cache.find(name_blocks([], [3, 4], 1)) == [4, 5]


def test_contexts_that_share_a_start_are_all_cached_while_there_is_room() -> None:
    """The rest of the first one lies after the shared start, where each of the others grows."""
    cache = BlockAllocator(32, region=4)
    contexts = [[1, 2, 3, 10 * number, 10 * number + 1] for number in range(1, 8)]
    for context in contexts:
        names = name_blocks([], context, 1)
        found = cache.find(names)
        cache.share(found)
        rest = len(names) - len(found)
        held = found + (cache.extend(found, rest) if found else cache.allocate(rest))
        for block, name in zip(held, names, strict=True):
            if not cache.is_named(block):
                cache.name(block, name)
        cache.free(held)
    for context in contexts:
        assert len(cache.find(name_blocks([], context, 1))) == len(context)


def test_evicted_blocks_are_handed_out_in_ascending_order() -> None:
    """So a context that takes the place of another one lies in one piece, as that one did."""
    cache = BlockAllocator(6, together=False)
    held = cache.allocate(6)
    for block, name in zip(held, name_blocks([], list(range(6)), 1), strict=True):
        cache.name(block, name)
    cache.free(held)
    assert cache.allocate(4) == [2, 3, 4, 5]


def test_contents_that_somebody_has_are_not_cached_as_well(cache: BlockAllocator) -> None:
    names = name_blocks([], [1, 2], 1)
    held = cache.allocate(2)
    for block, name in zip(held, names, strict=True):
        cache.name(block, name)
    assert cache.find(names) == held
    assert cached_blocks(cache) == 2
    more = cache.allocate(2)
    for block, name in zip(more, names, strict=True):
        cache.name(block, name)
    cache.free(held)
    assert cached_blocks(cache) == 2, "the other one still has them"
    cache.free(more)
    assert cache.find(names) == more
    assert cached_blocks(cache) == 4


def test_several_read_what_nobody_writes(cache: BlockAllocator) -> None:
    names = name_blocks([], [3, 4, 5], 1)
    found = cache.find(names)
    assert found == [4, 5]
    cache.share(found)
    cache.share(found)
    assert cache.free_blocks == 6
    cache.check([found, found])
    with pytest.raises(ValueError, match="block 4 has a name already"):
        cache.name(4, b"another")
    cache.free(found)
    assert (cache.free_blocks, cached_blocks(cache)) == (6, 2)
    with pytest.raises(ValueError, match="only blocks with a name are shared"):
        cache.share([2])


def test_runs_end_where_those_that_wait_will_find_an_end() -> None:
    """`long` has five blocks, and `short` reads the first two. One waits that has four in common with `long`."""
    names = name_blocks([], range(5), 1)
    cache = BlockAllocator(8)
    long = cache.allocate(5)
    for block, name in zip(long, names, strict=True):
        cache.name(block, name)
    short = long[:2]
    cache.share(short)
    assert cache.shared(long) == cache.shared(short) == [(long[0], 2)]
    waits = [*names[:4], b"other"]
    assert cache.owned(waits, 5) == 4
    cache.expect([(waits, 4)])
    assert cache.shared(long) == cache.will_share(waits, 4) == [(long[0], 2), (long[2], 2)]
    assert cache.shared(short) == [(long[0], 2)]
    cache.expect([])
    assert cache.shared(long) == [(long[0], 2)]
    cache.free(long)
    assert cache.owned(waits, 5) == 2
    assert cache.owned(waits, 1) == 1
    assert cache.owned([b"other"], 1) == 0 == cache.owned([], 0)
    assert cache.unowned([*long, *long[1:]]) == 3


def test_names_stand_for_all_tokens_before() -> None:
    whole = name_blocks([], [1, 2, 3, 4, 5, 6, 7], 2)
    assert len(whole) == 3
    assert name_blocks(name_blocks([], [1, 2, 3], 2), [1, 2, 3, 4, 5, 6], 2) == whole
    assert name_blocks([], [9, 2, 3, 4, 5, 6], 2)[1:] != whole[1:]
    assert len({*whole, *name_blocks([], [3, 4, 3, 4], 2)}) == 5


def test_names_stand_for_a_salt_too() -> None:
    named = [name_blocks([], [1, 2, 3, 4], 2, root_of(salt)) for salt in ("", "acme", "other")]
    assert root_of("") == b""
    assert named[0] == name_blocks([], [1, 2, 3, 4], 2)
    assert len({name for names in named for name in names}) == 6
    started = name_blocks([], [1, 2], 2, root_of("acme"))
    assert name_blocks(started, [1, 2, 3, 4], 2, root_of("acme")) == named[1]


def test_what_is_forgotten_is_not_found_and_may_be_written_once_it_is_free(cache: BlockAllocator) -> None:
    cache.share(found := cache.find(name_blocks([], [3, 4], 1)))
    cache.forget_names()
    cache.check([found])
    assert cached_blocks(cache) == 0
    assert cache.find(name_blocks([], [3, 4], 1)) == []
    assert cache.is_named(found[0]), "whoever has it reads on"
    cache.free(found)
    cache.check()
    assert (cache.free_blocks, cached_blocks(cache)) == (8, 0)
    assert cache.allocate(8) == list(range(8))


def test_where_neighbours_do_not_matter_the_oldest_goes_first() -> None:
    allocator = BlockAllocator(4, together=False)
    held = allocator.allocate(4)
    for block, name in zip(held, name_blocks([], [1, 2, 3, 4], 1), strict=True):
        allocator.name(block, name)
    for block in (2, 0, 3, 1):
        allocator.free([block])
    assert allocator.allocate(3) == [0, 2, 3], "all but block 1, the latest"
    allocator.free([0])
    assert allocator.extend([2, 3], 2) == [0, 1]
    with pytest.raises(OutOfBlocks, match="1 KV blocks are needed and 0 of 4 are free"):
        allocator.extend([2, 3], 1)
