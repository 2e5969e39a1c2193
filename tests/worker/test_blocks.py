"""The block allocator: whatever the order of calls, every block is free or has one owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from worker_svc.engine.blocks import BlockAllocator
from worker_svc.engine.interface import OutOfBlocks, blocks_needed


class Owners(RuleBasedStateMachine):
    """Owners come, grow and go."""

    @initialize(blocks=st.integers(0, 40), region=st.integers(1, 9))
    def start(self, blocks: int, region: int) -> None:
        self.allocator = BlockAllocator(blocks, region)
        self.owners: list[list[int]] = []

    @rule(count=st.integers(0, 12), more=st.integers(0, 12))
    def arrive(self, count: int, more: int) -> None:
        free = self.allocator.free_blocks
        if count > free:
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate(count, count + more)
            assert self.allocator.free_blocks == free
        else:
            held = self.allocator.allocate(count, count + more)
            assert len(held) == count
            self.owners.append(held)

    @rule(which=st.integers(0), count=st.integers(0, 6))
    def grow(self, which: int, count: int) -> None:
        if not self.owners:
            return
        held = self.owners[which % len(self.owners)]
        if count > self.allocator.free_blocks:
            with pytest.raises(OutOfBlocks):
                self.allocator.extend(held, count)
        else:
            held += self.allocator.extend(held, count)

    @rule(which=st.integers(0))
    def leave(self, which: int) -> None:
        if self.owners:
            self.allocator.free(self.owners.pop(which % len(self.owners)))

    @invariant()
    def every_block_has_one_owner_or_none(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check([*self.owners, []])
            assert self.allocator.free_blocks + sum(map(len, self.owners)) == self.allocator.blocks


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
