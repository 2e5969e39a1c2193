"""The plan of a forward over packed pieces, and the planner for attention by `kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from worker_svc.engine.cache.kv import BlockTable, KVPool
from worker_svc.engine.cpu import kernels

UNFOLDED_FROM = 64  # tokens from which a piece is not folded: its mask would hold the same rows once per head of the group
_NO_ROWS = torch.empty(0, dtype=torch.int64)


class Piece(NamedTuple):
    """Consecutive tokens of one sequence."""

    table: BlockTable
    start: int  # position of the first token in the context
    tokens: int


@dataclass(slots=True)
class Segment:
    """Pieces of equal length at consecutive rows of the packed forward, whose attention is one call."""

    first: int  # packed row of the first token
    pieces: int
    count: int  # tokens of each piece
    spare: int  # query rows that are added without a meaning, for the deterministic recipe
    kv: int  # keys that attention reads for each piece
    base: int  # pool row of the first key of a single piece in one run of blocks
    index: torch.Tensor | None  # pool rows [pieces * kv] to gather, otherwise
    # For each reach of the plan [pieces, 1, rows, kv]; None where every key counts for every row.
    masks: list[torch.Tensor | None]


@dataclass(slots=True)
class Plan:
    """Everything a forward needs besides the token ids."""

    total: int  # packed rows, padding included
    order: list[int]  # the pieces in packed order, as indices into what the caller passed
    first_row: list[int]  # packed row of the first token of each piece, by the caller's index
    # `positions` and `write_rows` of each packed row, int64 [total]; both empty where they are not needed.
    positions: torch.Tensor
    write_rows: torch.Tensor  # pool row for its key and value
    segments: list[Segment]
    padding: int  # rows at the end that belong to no sequence
    write_first: int | None  # where all other rows are written one after another: the pool row of the first
    # In place of segments where attention is that of `kernels`: [pieces, PIECE_NUMBERS] int64, and the pool
    # rows whose addresses it holds.
    pieces: torch.Tensor | None = None
    scattered: list[torch.Tensor] = field(default_factory=list)
    reach_of_layer: Sequence[int] = ()  # the index in `Segment.masks` by layer


class KernelPlanner:
    """A builder of plans for one pool whose attention is that of `kernels`.

    It takes any pieces, in any order, with blocks at any place.

    `flat`: a forward that is not all `kernels`' needs the position and the pool row of each packed row too.
    """

    def __init__(self, pool: KVPool, *, min_rows: int, flat: bool) -> None:
        self._pool = pool
        self._min_rows = min_rows
        self._flat = flat

    def plan(self, pieces: Sequence[Piece], reserve: int = 0) -> Plan:
        """Return a plan for one forward."""
        numbers: list[int] = []
        first_row: list[int] = []
        scattered: list[torch.Tensor] = []
        total = 0
        for table, start, count in pieces:
            assert start >= table.first_writable, "a block with a name would be written"
            first_row.append(total)
            if table.base is not None:
                numbers += (total, count, start, table.base, 0)
            else:
                rows = table.rows(self._pool.device)
                scattered.append(rows)
                numbers += (total, count, start, -1, rows.data_ptr())
            total += count
        padding = max(0, self._min_rows - total)
        positions, write = self._flat_rows(pieces, padding) if self._flat else (_NO_ROWS, _NO_ROWS)
        return Plan(
            total=total + padding,
            order=list(range(len(pieces))),
            first_row=first_row,
            positions=positions,
            write_rows=write,
            segments=[],
            padding=padding,
            write_first=None,
            pieces=kernels.int64s(numbers).view(-1, kernels.PIECE_NUMBERS),
            scattered=scattered,
        )

    def _flat_rows(self, pieces: Sequence[Piece], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._pool.device
        positions = [torch.arange(start, start + count) for _, start, count in pieces]
        write = [table.rows(device)[start : start + count] for table, start, count in pieces]
        positions.append(torch.zeros(padding, dtype=torch.int64))
        write.append(torch.full((padding,), self._pool.padding_row))
        return torch.cat(positions), torch.cat(write)

    def advance(self, plan: Plan) -> bool:
        """Turn the plan of single tokens into that of the next token of each piece.

        Returns False if a new plan has to be built.
        """
        assert plan.pieces is not None
        if self._flat or plan.total > plan.pieces.shape[0]:
            return False
        plan.pieces[:, 2].add_(1)
        return True
