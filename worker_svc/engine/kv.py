"""Attention keys and values of one model: a pool of blocks, and where each sequence's entries lie in it.

    pool.layers[layer]                       [rows, 2 (key, value), key/value heads, head size]
    pool.keys[layer], pool.values[layer]     [rows, key/value heads, head size], views of it
    row = block * block_size + offset        rows 0 .. blocks * block_size - 1 belong to blocks

Behind the blocks follow rows that belong to nobody: attention may read a sequence's slice rounded up past its last block (what it
reads there is masked), and rows that pad a batch are written to the very last one. The pool starts zeroed and is cleaned when
a model computes something that is not finite, because 0 * nan would leak through a mask.

The length of a sequence is the only truth about which of its entries count: rejected proposals are left behind and overwritten.

Blocks that are full of committed tokens get a name (`remember`), and are not written any more: whoever comes with the same context start
reads them where they are (`find`, `hold`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker_svc.engine.blocks import BlockAllocator

KV_TILE = 512  # SDPA on the CPU works through keys in tiles of this many; see attention.Planner


class Place:
    """The blocks of one sequence in one pool, and how many of its entries are valid."""

    __slots__ = ("_block_size", "_rows", "base", "blocks", "found", "length", "named")

    def __init__(self, block_size: int) -> None:
        self.blocks: list[int] = []
        self.length = 0  # tokens whose entries are valid
        self.named = 0  # of the blocks, so many at the start have a name: their entries are final
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
        """Position from which on entries may be written."""
        return self.named * self._block_size

    @property
    def found_tokens(self) -> int:
        """Tokens whose entries `found` holds."""
        return len(self.found) * self._block_size

    def rows(self, device: torch.device) -> torch.Tensor:
        """Row of each token position that the blocks can hold, int64 [blocks * block_size]."""
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
        # Blocks of a sequence that follow one another are read faster where memory is a cache's; a device gathers them anyway.
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

    def new_place(self) -> Place:
        """A place without blocks."""
        return Place(self.block_size)

    def missing(self, place: Place, needed: int) -> int:
        """Blocks to take so that `place` holds `needed`. What was found for it counts as if it were nobody else's."""
        return max(0, needed - len(place.blocks))

    def find(self, place: Place, names: Sequence[bytes], least_tokens: int) -> None:
        """Look for the start of a context, whose blocks have these names; less than `least_tokens` is not worth it."""
        found = self.allocator.find(names)
        place.found = found if len(found) * self.block_size >= least_tokens else []

    def remember(self, place: Place, names: Sequence[bytes]) -> None:
        """Let others find the blocks that are full of valid entries; `names` are those of its context."""
        for at in range(place.named, place.length // self.block_size):
            self.allocator.name(place.blocks[at], names[at])
            place.named = at + 1

    def hold(self, wanted: Sequence[tuple[Place, int, int]]) -> None:
        """Give each place at least as many blocks as it needs: (place, blocks needed, blocks it may come to need). Raises OutOfBlocks.

        What was found for it is the start of its context then.
        """
        # All of it first: the blocks may be among those that are handed out below.
        for place, _, _ in wanted:
            if place.found:
                self.allocator.share(place.found)
                place.set_blocks(place.found)
                place.length, place.named = place.found_tokens, len(place.found)
            place.found = []
        for place, needed, expected in wanted:
            self._grow(place, needed, expected)

    def _grow(self, place: Place, needed: int, expected: int) -> None:
        missing = self.missing(place, needed)
        if missing == 0:
            return
        if place.blocks:
            place.set_blocks(place.blocks + self.allocator.extend(place.blocks, missing))
        else:
            place.set_blocks(self.allocator.allocate(needed, expected))

    def release(self, place: Place) -> None:
        """Take its blocks back."""
        self.allocator.free(place.blocks)
        place.set_blocks([])
        place.length = place.named = 0

    def copy_out(self, place: Place) -> torch.Tensor:
        """The valid entries of a sequence, exactly, in host memory: [layers, length, 2, heads, head size]."""
        if place.base is not None:
            entries = self._storage[:, place.base : place.base + place.length]
        else:
            entries = self._storage[:, place.rows(self.device)[: place.length]]
        return entries.to("cpu", copy=True)

    def copy_in(self, place: Place, entries: torch.Tensor) -> None:
        """Put back what `copy_out` returned; `place` holds enough blocks."""
        length = entries.shape[1]
        if place.base is not None:
            self._storage[:, place.base : place.base + length] = entries.to(self.device)
        else:
            self._storage[:, place.rows(self.device)[:length]] = entries.to(self.device)
        place.length = length

    def is_finite(self, place: Place) -> bool:
        """Whether all valid entries of a sequence are numbers."""
        return bool(self._storage[:, place.rows(self.device)[: place.length]].isfinite().all())

    def zero_what_is_not_finite(self) -> None:
        """After a model computed something that is no number: no slice of any sequence may come across it again."""
        self._storage.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self.allocator.forget_names()  # one of them may stand for what was no number

    def bytes_per_token(self) -> int:
        """Keys and values of one token, all layers."""
        layers, _, two, heads, size = self._storage.shape
        return int(layers * two * heads * size * self._storage.element_size())
