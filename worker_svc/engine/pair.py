"""The model pair of an engine on its device: target and draft, and the KV pool of each."""

from __future__ import annotations

import time

import torch

from worker_svc.engine.cache.kv import KV_TILE, BlockTable, KVPool
from worker_svc.engine.models.model import PackedModel
from worker_svc.engine.options import EngineOptions
from worker_svc.engine.sequence import Sequence


class ModelPair:
    """Target and draft model, which may be missing, and their KV pools, the target's first."""

    def __init__(
        self,
        target: PackedModel,
        draft: PackedModel | None,
        options: EngineOptions,
        eos_ids: frozenset[int],
    ) -> None:
        self.target, self.draft = target, draft
        self.device = target.device
        self._alone = target.device.type == "cpu" and options.threads == 1
        self.eos_ids = eos_ids
        self.vocab_size = target.shape.vocab_size
        # Number of tokens that both models have.
        self.draft_vocab = 0 if draft is None else min(draft.shape.vocab_size, target.shape.vocab_size)
        # A region holds a whole context where the pool is large enough for one per slot; then sequences stay
        # in one piece.
        regions = options.target_blocks * options.block_size // KV_TILE
        region_tokens = KV_TILE if regions >= options.slots else options.block_size
        self.pools: list[KVPool] = []
        for model, blocks in ((target, options.target_blocks), (draft, options.draft_blocks)):
            if model is not None:
                pool = model.new_pool(
                    blocks=blocks, block_size=options.block_size, region_tokens=region_tokens
                )
                model.attach(pool)
                self.pools.append(pool)

    # -- the KV of a request ---------------------------------------------------------------------------------

    def tables(self, sequence: Sequence) -> list[BlockTable]:
        """Return the block tables of a request, in the order of the pools."""
        return [sequence.target] if sequence.draft is None else [sequence.target, sequence.draft]

    @property
    def free_blocks(self) -> tuple[int, int]:
        """The free blocks of the target's pool and of the draft's; 0 without a draft."""
        free = [pool.allocator.free_blocks for pool in self.pools]
        return free[0], free[1] if self.draft is not None else 0

    def release(self, sequence: Sequence) -> None:
        """Discard the KV of a request, on the device and in host memory, and what is derived from it."""
        for pool, table in zip(self.pools, self.tables(sequence), strict=True):
            pool.release(table)
        sequence.swapped = []
        sequence.tally = None
        sequence.reused = 0

    def swap_out(self, sequence: Sequence, room: int) -> bool:
        """Move the KV of a request to host memory, the draft's only if `room` bytes hold that too.

        Returns False, and changes nothing, if they do not hold the target's.
        """
        tables = self.tables(sequence)
        if not any(table.blocks for table in tables):
            return True
        copies: list[torch.Tensor | None] = []
        for table, pool in zip(tables, self.pools, strict=True):
            size = pool.host_bytes(table.length)
            if size > room and not copies:
                return False
            copies.append(pool.copy_out(table) if 0 < size <= room else None)
            room -= size
        self.release(sequence)
        # The draft's KV without the target's is useless, and the target's without the draft's is still HOST.
        sequence.swapped = [*copies, None][:2] if copies[0] is not None else []
        return True

    def swap_in(self, sequence: Sequence) -> None:
        """Bring the KV of a request back from host memory; its tables hold enough blocks."""
        for pool, table, copy in zip(self.pools, self.tables(sequence), sequence.swapped, strict=False):
            if copy is not None:
                pool.copy_in(table, copy)
        sequence.swapped = []

    def check(self, sequences: list[Sequence]) -> None:
        """Assert that each block is free, cached or held by `sequences`, and has one holder if writable."""
        for at, pool in enumerate(self.pools):
            tables = [self.tables(sequence)[at] for sequence in sequences]
            pool.allocator.check(table.blocks for table in tables)
            for table in tables:
                assert table.first_writable <= table.length
                assert [pool.allocator.is_named(block) for block in table.blocks] == [
                    number < table.named for number in range(len(table.blocks))
                ]

    # -- time ------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        """Return seconds of computing, for decisions.

        On the CPU with one thread they are its own, so that other processes do not count. With several they pass while
        this thread sleeps until another has done its part. What learns from them bounds each deviation.
        """
        return time.thread_time() if self._alone else time.perf_counter()

    def synchronize(self) -> None:
        """Wait for the device, so that the draft's time is not counted as verification.

        The CPU needs no waiting.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
