"""The planner for attention by SDPA: pieces of equal length form segments, one call each.

Deterministic recipe (single precision, CPU): a row's result depends on the number of rows of its product
(classes 1, 2-3, 4 and more) and on the padded number of keys. SDPA works through query rows in blocks of a
multiple of 32. So: at least 4 folded query rows in each such block, and as many keys as the sequence's own
length rounded up to whole tiles of 512. Then a row's bits depend neither on its neighbours, nor on how many
rows of its own sequence are computed along with it. In the first tile fewer keys do where the machine gives
the same bits for them, which `exact_spans` tries out: multiples of 16 up to 256 on one kind of CPU, up to 192
and from 384 on another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from worker_svc.engine.cache.kv import KV_TILE, BlockTable, KVPool
from worker_svc.engine.models.plan import UNFOLDED_FROM, Piece, Plan, Segment
from worker_svc.engine.models.reach import Reach

MIN_ROWS = 4  # rows from which products on the CPU are independent of the number of rows
GRANULE = 16  # the number of keys read is a multiple of it
# Pieces may share a segment if their numbers of keys round up to the same multiple of this, or a power of two
# times as much.
KV_GRANULE = 64
# `exact_spans` tries every TRIED_EVERY-th token of a tile: a prime, so that all distances to a multiple of 16
# occur.
TRIED_EVERY = 29
QUERY_BLOCK = 32  # SDPA on the CPU takes query rows in blocks of a multiple of this


class Planner:
    """A builder of plans for one pool whose attention is SDPA's."""

    def __init__(
        self,
        pool: KVPool,
        *,
        group: int,
        dtype: torch.dtype,
        spans: Sequence[int] | None,
        min_rows: int,
        reaches: Sequence[Reach],
    ) -> None:
        """`reaches`: of each layer; the other arguments are below."""
        self._pool = pool
        self._group = group
        self._dtype = dtype
        # Numbers of keys up to KV_TILE that the deterministic recipe may read, ascending. None: as many as
        # there are.
        self._spans = spans
        self._min_rows = min_rows  # packed rows at least; the rest is padding
        self._reaches = list(dict.fromkeys(reaches))
        self._reach_of_layer = [self._reaches.index(reach) for reach in reaches]
        self._limited = any(reach.limit is not None for reach in self._reaches)
        self._device = pool.device
        self._keys = torch.arange(pool.total_rows, device=pool.device)
        self._zero = torch.zeros((), dtype=dtype, device=pool.device)
        self._never = torch.full((), -torch.inf, dtype=dtype, device=pool.device)

    def plan(self, pieces: Sequence[Piece], reserve: int = 0) -> Plan:
        """Return a plan for one forward, with room for `reserve` calls of `advance` after it."""
        alone = len(pieces) == 1
        ends = [piece.start + piece.tokens + (0 if alone else reserve) for piece in pieces]
        order, runs = self._arrange(pieces, ends)
        positions: list[int] = []
        write: list[int] = []
        gathered: list[tuple[int, torch.Tensor]] = []
        first_row = [0] * len(pieces)
        for i in order:
            table, start, count = pieces[i]
            assert start >= table.first_writable, "a block with a name would be written"
            first_row[i] = len(positions)
            positions.extend(range(start, start + count))
            if table.base is not None:
                write.extend(range(table.base + start, table.base + start + count))
            else:
                gathered.append((len(write), table.rows(self._device)[start : start + count]))
                write.extend([0] * count)
        padding = max(0, self._min_rows - len(positions))
        positions.extend([0] * padding)
        write.extend([self._pool.padding_row] * padding)
        index = torch.tensor((positions, write), dtype=torch.int64, device=self._device)
        for at, rows in gathered:
            index[1, at : at + rows.numel()] = rows
        write_first = write[0] if len(pieces) == 1 and not gathered else None
        plan = Plan(len(positions), order, first_row, index[0], index[1], [], padding, write_first)
        plan.reach_of_layer = self._reach_of_layer
        for begin, end in runs:
            members = order[begin:end]
            span = self._span(max(ends[i] for i in members), alone and pieces[0].tokens == 1)
            plan.segments.append(self._segment(pieces, members, span, first_row, index[0]))
        return plan

    def advance(self, plan: Plan) -> bool:
        """Turn the plan of single tokens into that of the next token of each piece.

        Returns False if a new plan has to be built.
        """
        if self._limited or plan.padding:
            return False
        if any(segment.count > 1 or segment.index is not None for segment in plan.segments):
            return False
        plan.positions.add_(1)
        plan.write_rows.add_(1)
        if plan.write_first is not None:
            plan.write_first += 1
        for segment in plan.segments:
            if segment.masks[0] is None:
                segment.kv += 1
            else:
                segment.masks = [self._mask(plan.positions, segment, self._reaches[0])]
        return True

    def _mask(self, positions: torch.Tensor, segment: Segment, reach: Reach) -> torch.Tensor:
        """Return the additive mask [pieces, 1, folded rows, kv] of rows at the plan's positions."""
        own = positions[segment.first : segment.first + segment.pieces * segment.count]
        own, keys = own.view(segment.pieces, 1, segment.count, 1), self._keys[: segment.kv]
        seen = keys <= own
        if reach.limit is not None:
            seen &= keys >= reach.first(own)
        mask = torch.where(seen, self._zero, self._never)  # [pieces, 1, count, kv]
        if segment.count == 1:  # a single row serves all heads of the group by broadcasting
            return mask.expand(-1, -1, self._group + segment.spare, -1)
        if segment.count < UNFOLDED_FROM and self._group > 1:
            mask = mask.repeat(1, 1, self._group, 1)
        return pad(mask, (0, 0, 0, segment.spare)) if segment.spare else mask

    def _arrange(
        self, pieces: Sequence[Piece], ends: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the packed order of the pieces, and the begin and end of each segment in it.

        The pieces of a segment have equal lengths and about the same number of keys.
        """
        keys = [(piece.tokens, self._class(end)) for piece, end in zip(pieces, ends, strict=True)]
        order = sorted(range(len(pieces)), key=keys.__getitem__)
        runs: list[tuple[int, int]] = []
        for at, i in enumerate(order):
            if at and keys[i] == keys[order[at - 1]] and pieces[i].tokens < UNFOLDED_FROM:
                runs[-1] = (runs[-1][0], at + 1)
            else:
                runs.append((at, at + 1))
        return order, runs

    def _class(self, end: int) -> int:
        """Return the most keys that contexts up to `end` read.

        Contexts with the same value may share a segment.
        """
        granule = KV_GRANULE
        while granule * 2 < end and granule < KV_TILE:
            granule *= 2
        granule = min(granule, 2 * KV_GRANULE) if end <= KV_TILE else granule
        return self._span(-(-end // granule) * granule)

    def _span(self, end: int, single_row: bool = False) -> int:
        """Return the number of keys to read for contexts of up to `end` tokens."""
        if self._spans is not None:
            if end > KV_TILE:
                return -(-end // KV_TILE) * KV_TILE
            return self._spans[bisect_left(self._spans, end)]
        if single_row:
            return end  # a row that may see every key needs no mask
        return -(-end // KV_GRANULE) * KV_GRANULE

    def _segment(
        self,
        pieces: Sequence[Piece],
        members: Sequence[int],
        span: int,
        first_row: Sequence[int],
        positions: torch.Tensor,
    ) -> Segment:
        count, base = pieces[members[0]].tokens, pieces[members[0]].table.base
        index = None
        if len(members) > 1 or base is None:
            index = torch.cat([self._rows(pieces[i].table, span) for i in members])
        folded = count if count >= UNFOLDED_FROM else count * self._group
        spare = _spare_rows(folded) if self._spans is not None else 0
        segment = Segment(first_row[members[0]], len(members), count, spare, span, base or 0, index, [])
        masked = count > 1 or any(pieces[i].start + 1 != span for i in members)
        last = max(pieces[i].start + count - 1 for i in members)
        for reach in self._reaches:
            hides = reach.limit is not None and last >= reach.limit
            segment.masks.append(self._mask(positions, segment, reach) if masked or hides else None)
        return segment

    def _rows(self, table: BlockTable, span: int) -> torch.Tensor:
        rows = table.rows(self._device)
        # Entries after the sequence's last block are masked; any row that holds finite numbers will do.
        return rows[:span] if rows.numel() >= span else pad(rows, (0, span - rows.numel()))


def _spare_rows(rows: int) -> int:
    """Return the query rows to add so that no block of them has fewer than MIN_ROWS."""
    return max(0, MIN_ROWS - (rows % QUERY_BLOCK or QUERY_BLOCK))


@torch.inference_mode()
def exact_spans(
    *, group: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, ...]:
    """Return the numbers of keys up to KV_TILE that give the same bits as whole tiles, tested at the call.

    They are ascending, KV_TILE the last.
    """
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn((2 * KV_TILE, 2, kv_heads, size), generator=generator).to(device, dtype)
    k, v = (pool[:, at].transpose(0, 1)[None] for at in range(2))
    positions = torch.arange(2 * KV_TILE, device=device)
    tokens = (1, 2, 5, 9, UNFOLDED_FROM // 2)
    counts = sorted({count * group + _spare_rows(count * group) for count in tokens})
    queries = torch.randn((1, kv_heads, counts[-1], size), generator=generator).to(device, dtype)

    def last_row(last: int, span: int, rows: int) -> torch.Tensor:
        # The last row is compared; those before it see fewer keys, as in a piece of several tokens.
        sees = torch.arange(last - rows + 1, last + 1, device=device).clamp(min=0)[:, None]
        mask = torch.where(positions[:span] <= sees, 0.0, -torch.inf).to(dtype)[None, None]
        query = queries[:, :, -rows:].contiguous()
        return scaled_dot_product_attention(query, k[:, :, :span], v[:, :, :span], attn_mask=mask)[:, :, -1]

    right = list(range(GRANULE, KV_TILE, GRANULE))
    for last in range(3, KV_TILE, TRIED_EVERY):
        expected = last_row(last, KV_TILE, counts[0])
        if not all(torch.equal(last_row(last, 2 * KV_TILE, rows), expected) for rows in counts):
            return (KV_TILE,)
        right = [
            span
            for span in right
            if span <= last or all(torch.equal(last_row(last, span, rows), expected) for rows in counts)
        ]
    return (*right, KV_TILE)
