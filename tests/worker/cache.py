"""What the tests of the prefix cache look at."""

from __future__ import annotations

from worker_svc.engine.cache.blocks import BlockAllocator


def cached_blocks(allocator: BlockAllocator) -> int:
    """Return the number of blocks without an owner whose contents can be reused."""
    return len(allocator._cached)
