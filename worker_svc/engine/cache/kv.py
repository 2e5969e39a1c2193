"""Attention keys and values of one model: a pool of blocks, and the block table of each sequence.

    pool.layers[layer]                       [rows, 2 (key, value), key/value heads, head size]
    pool.keys[layer], pool.values[layer]     [rows, key/value heads, head size], views of it
    row = block * block_size + offset        rows 0 .. blocks * block_size - 1 belong to blocks

After the blocks follow rows that belong to no sequence: attention may read a sequence's slice rounded up past
its last block (the entries there are masked), and rows that pad a batch are written to the very last one. The
pool starts zeroed and is cleaned when a model computes non-finite values, because 0 * nan would leak through
a mask.

The length of a sequence alone decides which of its entries are valid: those of rejected draft tokens are left
in place and overwritten.

Blocks that are full of committed tokens get a name (`remember`), and are not written any more: another
request with the same context start reads them in place (`find`, `hold`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker_svc.engine.cache.blocks import BlockAllocator

KV_TILE = 512  # SDPA on the CPU works through keys in tiles of this many; see attention.Planner


class BlockTable:
    """The block table of one sequence in one pool, and its number of valid entries."""

    __slots__ = ("_block_size", "_rows", "base", "blocks", "found", "length", "named", "noted")

    def __init__(self, block_size: int) -> None:
        self.blocks: list[int] = []
        self.length = 0  # tokens whose entries are valid
        self.named = 0  # blocks at the start that have a name: their entries are final
        self.noted = 0  # prompt blocks at the start that are noted as cached
        self.found: list[int] = []  # blocks that hold the start of its context: from `find` to `hold`
        self.base: int | None = 0  # first row, while the blocks follow one another; None when they do not
        self._rows: torch.Tensor | None = None
        self._block_size = block_size

    def set_blocks(self, blocks: list[int]) -> None:
        """Take over a list of blocks, in the order of the context."""
        self.blocks = blocks
        self._rows = None
        together = all(b == blocks[0] + i for i, b in enumerate(blocks))
        self.base = None if not together else (blocks[0] * self._block_size if blocks else 0)

    @property
    def first_writable(self) -> int:
        """First position at which entries may be written."""
        return self.named * self._block_size

    @property
    def found_tokens(self) -> int:
        """Number of tokens whose entries `found` holds."""
        return len(self.found) * self._block_size

    def rows(self, device: torch.device) -> torch.Tensor:
        """Return the row of each token position that the blocks can hold, int64 [blocks * block_size]."""
        if self._rows is None:
            first = torch.tensor(self.blocks, dtype=torch.int64) * self._block_size
            self._rows = (first[:, None] + torch.arange(self._block_size)).flatten().to(device)
        return self._rows


class KVPool:
    """Storage and block accounting of one model."""

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        head_size: int,
        blocks: int,
        block_size: int,
        region_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.rows = blocks * block_size
        self.device = device
        # A CPU reads adjacent blocks of a sequence faster because of its caches; a device gathers them in any
        # case.
        together = device.type == "cpu"
        self.allocator = BlockAllocator(blocks, max(1, region_tokens // block_size), together=together)
        # One tile that slices may run into, and one row for padding.
        self.total_rows = self.rows + KV_TILE + 1
        self.padding_row = self.total_rows - 1
        shape = (layers, self.total_rows, 2, heads, head_size)
        self._storage = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = list(self._storage.unbind(0))
        self.keys = list(self._storage[:, :, 0].unbind(0))
        self.values = list(self._storage[:, :, 1].unbind(0))

    def new_table(self) -> BlockTable:
        """Return a block table without blocks."""
        return BlockTable(self.block_size)

    def missing(self, wanted: Sequence[tuple[BlockTable, int, int]]) -> int:
        """Return how many free blocks `hold` takes: those that it finds are free too while they have no owner."""
        found = self.allocator.unowned(block for table, _, _ in wanted for block in table.found)
        return found + sum(
            [max(0, needed - len(table.blocks) - len(table.found)) for table, needed, _ in wanted]
        )

    def find(self, table: BlockTable, names: Sequence[bytes], least_tokens: int) -> None:
        """Look up the start of a context whose blocks have these names.

        Fewer than `least_tokens` are not worth it.
        """
        found = self.allocator.find(names)
        table.found = found if len(found) * self.block_size >= least_tokens else []

    def remember(self, table: BlockTable, names: Sequence[bytes], final: int) -> None:
        """Add the blocks full of the first `final` entries, which are not written any more, to the prefix cache.

        `names` are those of the context.
        """
        for at in range(table.named, final // self.block_size):
            self.allocator.name(table.blocks[at], names[at])
            table.named = at + 1

    def hold(self, wanted: Sequence[tuple[BlockTable, int, int]]) -> None:
        """Give each table at least the blocks that it needs. Raises OutOfBlocks.

        `wanted`: (table, blocks needed, blocks that it may need later). The blocks found for a table become
        the start of its context.
        """
        # Found blocks are shared first, since otherwise the allocations below could take them.
        for table, _, _ in wanted:
            if table.found:
                self.allocator.share(table.found)
                table.set_blocks(table.found)
                table.length, table.named = table.found_tokens, len(table.found)
            table.found = []
        for table, needed, expected in wanted:
            self._grow(table, needed, expected)

    def _grow(self, table: BlockTable, needed: int, expected: int) -> None:
        missing = needed - len(table.blocks)
        if missing <= 0:
            return
        if table.blocks:
            table.set_blocks(table.blocks + self.allocator.extend(table.blocks, missing))
        else:
            table.set_blocks(self.allocator.allocate(needed, expected))

    def release(self, table: BlockTable) -> None:
        """Free the blocks of a sequence."""
        self.allocator.free(table.blocks)
        table.set_blocks([])
        table.length = table.named = table.noted = 0

    def copy_out(self, table: BlockTable) -> torch.Tensor:
        """Return an exact copy of a sequence's valid entries in host memory.

        Its shape is [layers, length, 2, heads, head size]. On a GPU it is pinned memory, of which PyTorch keeps what
        is freed for later copies: an H100 copied 48 GB/s there and back, and 1.6 and 8 GB/s with ordinary memory.
        """
        if table.base is not None:
            entries = self._storage[:, table.base : table.base + table.length]
        else:
            entries = self._storage[:, table.rows(self.device)[: table.length]]
        if self.device.type != "cuda":
            return entries.to("cpu", copy=True)
        pinned = torch.empty(self.host_bytes(table.length), dtype=torch.uint8, pin_memory=True)
        copy = pinned[: entries.nbytes].view(entries.dtype).view(entries.shape)
        copy.copy_(entries, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()  # the blocks are written again after this
        return copy

    def host_bytes(self, length: int) -> int:
        """Return the bytes of host memory that a copy of `length` entries takes.

        PyTorch allocates pinned memory in powers of two.
        """
        size = length * self.bytes_per_token()
        return 1 << (size - 1).bit_length() if self.device.type == "cuda" and size else size

    def copy_in(self, table: BlockTable, entries: torch.Tensor) -> None:
        """Put back what `copy_out` returned; `table` holds enough blocks, of which those found are not written."""
        first, length = table.first_writable, entries.shape[1]
        entries = entries.to(self.device, non_blocking=True)[:, first:]
        if table.base is not None:
            self._storage[:, table.base + first : table.base + length] = entries
        else:
            self._storage[:, table.rows(self.device)[first:length]] = entries
        table.length = length

    def is_finite(self, table: BlockTable, length: int) -> bool:
        """Return True if the first `length` entries of a sequence are finite."""
        return bool(self._storage[:, table.rows(self.device)[:length]].isfinite().all())

    def zero_nonfinite(self) -> None:
        """Zero all non-finite entries: no slice of any sequence may read them again."""
        self._storage.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self.allocator.forget_names()  # a name may belong to entries that were not finite

    def bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values, all layers."""
        layers, _, two, heads, size = self._storage.shape
        return int(layers * two * heads * size * self._storage.element_size())
