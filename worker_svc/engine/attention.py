"""Attention of packed, ragged rows over a KV pool: what is built once per forward, and what runs in every layer.

A forward takes *pieces*: consecutive tokens of one sequence, each with the position it starts at. Their tokens lie one after
another in one row of shape [total]. Attention groups pieces into *segments* and runs SDPA once per segment:

    query    [slots, key/value heads, group * tokens, head size]       the query heads of a group are folded into the rows
    key      [slots, key/value heads, kv, head size]                   a view of the pool where slots lie at equal distances, else gathered
    mask     [slots, 1, group * tokens, kv]                            additive, 0 or -inf; shared by all layers

A call costs more than the few rows that it computes. So a segment of a view may have slots that no piece fills, between neighbours that are further
apart than others, and pieces of fewer tokens than its longest: what is computed there is read by nobody.

Deterministic recipe (single precision, CPU): a row's result depends on the number of rows of its product (classes 1, 2-3, 4 and more)
and on the padded number of keys. SDPA works through query rows in blocks of a multiple of 32. So: at least 4 folded query rows in each such
block, and as many keys as the sequence's own length rounded up to whole tiles of 512. Then a row's bits depend neither on its neighbours,
nor on how many rows of its own sequence are computed along with it. In the first tile fewer keys do where the machine gives the same bits
for them, which `exact_spans` tries out: multiples of 16 up to 256 on one kind of CPU, up to 192 and from 384 on another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from worker_svc.engine import kernels
from worker_svc.engine.kv import KV_TILE, KVPool, Place

MIN_ROWS = 4  # rows from which products on the CPU are independent of the number of rows
UNFOLDED_FROM = 64  # tokens from which a piece is not folded: its mask would hold the same rows once per head of the group
GRANULE = 16  # keys that are read are a multiple of it
KV_GRANULE = 64  # pieces whose keys come to the same multiple of this, or a power of two times as much, may share a segment
# Keys of one piece that take as long to read as one segment more takes to call (measured: 14 us).
SEGMENT_KEYS = 256
UNEVEN_KEYS = 128  # the same for putting queries into their slots, and back
UNEVEN_UP_TO = 16  # tokens up to which a piece may share a segment with longer and shorter ones
TRIED_EVERY = 29  # `exact_spans` tries what every so many-th token of a tile finds: a prime, so that all distances to a multiple of 16 occur
QUERY_BLOCK = 32  # SDPA on the CPU takes a multiple of so many query rows at a time


class Piece(NamedTuple):
    """Consecutive tokens of one sequence."""

    place: Place
    start: int  # position of the first token in the context
    tokens: int


@dataclass(slots=True)
class Segment:
    """Pieces at consecutive rows of the packed forward whose attention is one call."""

    first: int  # packed row of the first token
    total: int  # packed rows
    slots: int  # of the call; as many as pieces, or more
    count: int  # tokens of each slot
    spare: int  # query rows that are added and mean nothing, for the deterministic recipe
    kv: int  # keys that attention reads for each slot
    base: int  # first pool row, and
    stride: int  # distance in pool rows from slot to slot, for a view
    index: torch.Tensor | None  # pool rows [slots * kv] to gather, otherwise
    mask: torch.Tensor | None  # [slots, 1, rows, kv]; None where every key counts for every row
    uneven: Uneven | None  # None: slots and pieces are the same, and all have `count` tokens


@dataclass(slots=True)
class Uneven:
    """Which query goes where in a segment with empty slots, or with pieces of different lengths."""

    rows: torch.Tensor  # [slots * count]: packed row of each; of one that means nothing, any
    back: torch.Tensor  # [total * heads]: where the output of each query head of each packed row lies
    heads: torch.Tensor | None = None  # [slots * rows]: which query head each row is; made in the first layer


@dataclass(slots=True)
class Plan:
    """Everything a forward needs besides the token ids."""

    total: int  # packed rows, padding included
    order: list[int]  # the pieces in packed order, as indices into what the caller passed
    first_row: list[int]  # packed row of the first token of each piece, by the caller's index
    positions: torch.Tensor  # [total] int64
    write_rows: torch.Tensor  # [total] int64: pool row that each packed row's key and value go to
    segments: list[Segment]
    padding: int  # rows at the end that belong to nobody
    write_first: int | None  # where all other rows are written one after another: the pool row of the first
    pieces: torch.Tensor | None = (
        None  # [pieces, 5]: in place of segments, where attention is that of `kernels`
    )
    scattered: list[torch.Tensor] = field(
        default_factory=list
    )  # pool rows that `pieces` has the addresses of


class Planner:
    """Builds plans for one pool."""

    def __init__(
        self,
        pool: KVPool,
        *,
        group: int,
        dtype: torch.dtype,
        spans: Sequence[int] | None,
        min_rows: int,
    ) -> None:
        self._pool = pool
        self._group = group
        self._dtype = dtype
        # Numbers of keys up to KV_TILE that the deterministic recipe may read, ascending. None: as many as there are.
        self._spans = spans
        self._min_rows = min_rows  # packed rows at least; the rest is padding
        self._device = pool.device
        # A view with a batch dimension spares a copy, which is what matters on the CPU; elsewhere few calls matter more.
        self._views = pool.slices
        self._keys = torch.arange(pool.total_rows, device=pool.device)
        self._kv_heads = torch.arange(pool.keys[0].shape[1], device=pool.device)
        self._in_group = torch.arange(group, device=pool.device)
        self._zero = torch.zeros((), dtype=dtype, device=pool.device)
        self._never = torch.full((), -torch.inf, dtype=dtype, device=pool.device)

    def plan(self, pieces: Sequence[Piece], reserve: int = 0) -> Plan:
        """A plan for one forward, with room for `reserve` calls of `advance` after it."""
        alone = len(pieces) == 1
        ends = [piece.start + piece.tokens + (0 if alone else reserve) for piece in pieces]
        order, runs = self._arrange(pieces, ends)
        positions: list[int] = []
        write: list[int] = []
        gathered: list[tuple[int, torch.Tensor]] = []
        first_row = [0] * len(pieces)
        for i in order:
            place, start, count = pieces[i]
            assert start >= place.first_writable, "a block with a name would be written"
            first_row[i] = len(positions)
            positions.extend(range(start, start + count))
            if place.base is not None:
                write.extend(range(place.base + start, place.base + start + count))
            else:
                gathered.append((len(write), place.rows(self._device)[start : start + count]))
                write.extend([0] * count)
        padding = max(0, self._min_rows - len(positions))
        positions.extend([0] * padding)
        write.extend([self._pool.padding_row] * padding)
        index = torch.tensor((positions, write), dtype=torch.int64, device=self._device)
        for at, rows in gathered:
            index[1, at : at + rows.numel()] = rows
        write_first = write[0] if len(pieces) == 1 and not gathered else None
        plan = Plan(len(positions), order, first_row, index[0], index[1], [], padding, write_first)
        for begin, end in runs:
            members = order[begin:end]
            span = self._span(max(ends[i] for i in members), alone and pieces[0].tokens == 1)
            plan.segments.append(self._segment(pieces, members, span, first_row, index[0]))
        return plan

    def advance(self, plan: Plan) -> bool:
        """Turn the plan of single tokens into that of the next token of each piece. False if it has to be built anew."""
        if plan.padding or any(segment.count > 1 or segment.index is not None for segment in plan.segments):
            return False
        plan.positions.add_(1)
        plan.write_rows.add_(1)
        if plan.write_first is not None:
            plan.write_first += 1
        for segment in plan.segments:
            if segment.mask is None:
                if segment.slots > 1:
                    return False
                segment.kv += 1
            else:
                segment.mask = self._mask(plan.positions, segment)
        return True

    def _mask(self, positions: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Additive mask [slots, 1, folded rows, kv] of rows at the plan's positions."""
        if segment.uneven is None:
            own = positions[segment.first : segment.first + segment.total]
        else:
            own = positions.index_select(0, segment.uneven.rows)
        mask = torch.where(
            self._keys[: segment.kv] <= own.view(segment.slots, 1, segment.count, 1), self._zero, self._never
        )  # [slots, 1, count, kv]
        if segment.count == 1:  # a single row serves all heads of the group by broadcasting
            return mask.expand(-1, -1, self._group + segment.spare, -1)
        if segment.count < UNFOLDED_FROM and self._group > 1:
            mask = mask.repeat(1, 1, self._group, 1)
        return pad(mask, (0, 0, 0, segment.spare)) if segment.spare else mask

    def _arrange(
        self, pieces: Sequence[Piece], ends: Sequence[int]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Packed order of the pieces, and where its segments begin and end in it.

        A view needs slots at equal distances. So of pieces with different lengths either those of one class of lengths are put together, and
        read few keys, or neighbours in the pool are, and there are few segments: whatever costs less.
        """
        if len(pieces) == 1:
            return [0], [(0, 1)]
        best: tuple[int, list[int], list[tuple[int, int]]] | None = None
        tried: list[list[int]] = []
        for least in (KV_GRANULE, 2 * KV_GRANULE, 4 * KV_GRANULE) if self._views else (KV_GRANULE,):
            classes = [self._class(end, least) for end in ends]
            if classes in tried:
                continue
            tried.append(classes)
            # Neighbours in the pool become neighbours in the batch.
            keys = [
                (self._shared(piece), at, piece.place.base is None, piece.place.base or 0)
                for piece, at in zip(pieces, classes, strict=True)
            ]
            order = sorted(range(len(pieces)), key=keys.__getitem__)
            cost, runs = self._runs([pieces[i] for i in order], [keys[i] for i in order])
            if best is None or cost < best[0]:
                best = cost, order, runs
        assert best is not None
        return best[1], best[2]

    def _shared(self, piece: Piece) -> int:
        """Pieces for which this is the same may share a segment: those of as many tokens, and all that have few."""
        return 0 if self._views and piece.tokens <= UNEVEN_UP_TO else piece.tokens

    def _class(self, end: int, least: int) -> int:
        """Contexts of this many tokens may share a segment if this is the same: the keys that they read at most."""
        granule = least
        while granule * 2 < end and granule < KV_TILE:
            granule *= 2
        granule = min(granule, max(least, 2 * KV_GRANULE)) if end <= KV_TILE else granule
        return self._span(-(-end // granule) * granule)

    def _span(self, end: int, single_row: bool = False) -> int:
        """Keys to read for contexts of up to `end` tokens."""
        if self._spans is not None:
            if end > KV_TILE:
                return -(-end // KV_TILE) * KV_TILE
            return self._spans[bisect_left(self._spans, end)]
        if single_row:
            return end  # one that may see every key needs no mask
        granule = GRANULE if self._views else KV_GRANULE
        return -(-end // granule) * granule

    def _runs(
        self, pieces: Sequence[Piece], keys: Sequence[tuple[int, int, bool, int]]
    ) -> tuple[int, list[tuple[int, int]]]:
        """What the segments of a packed order cost, in keys, and where they begin and end. `keys` are those of `_arrange`."""
        cost, runs, begin = 0, [], 0
        while begin < len(pieces):
            _, span, scattered, base = keys[begin]
            end, slots, stride = begin + 1, 1, 0
            even = True
            while (
                end < len(pieces) and keys[end][:3] == keys[begin][:3] and pieces[end].tokens < UNFOLDED_FROM
            ):
                if self._views and not scattered:
                    closer = gcd(stride, keys[end][3] - keys[end - 1][3])
                    wider = (keys[end][3] - base) // closer + 1
                    if (wider - slots - 1) * span > SEGMENT_KEYS:
                        break
                    slots, stride = wider, closer
                else:
                    slots += 1
                even = even and pieces[end].tokens == pieces[begin].tokens
                end += 1
            even = even and slots == end - begin
            cost += slots * span + SEGMENT_KEYS + (0 if even else UNEVEN_KEYS)
            runs.append((begin, end))
            begin = end
        return cost, runs

    def _segment(
        self,
        pieces: Sequence[Piece],
        members: Sequence[int],
        span: int,
        first_row: Sequence[int],
        positions: torch.Tensor,
    ) -> Segment:
        counts = [pieces[i].tokens for i in members]
        count, slots = max(counts), len(members)
        bases = [pieces[i].place.base for i in members]
        view = all(base is not None for base in bases) and (self._views or len(members) == 1)
        base = bases[0] or 0
        stride, index = 0, None
        if view:
            ahead = [(other or 0) - base for other in bases]
            stride = gcd(*ahead)
            slots = ahead[-1] // stride + 1 if stride else 1
        else:
            index = torch.cat([self._rows(pieces[i].place, span) for i in members])
        folded = count if count >= UNFOLDED_FROM else count * self._group
        spare = _spare_rows(folded) if self._spans is not None else 0
        uneven = None
        if slots > len(members) or min(counts) < count:
            at = [step // stride for step in ahead] if view else range(len(members))
            uneven = self._uneven(slots, count, folded + spare, at, counts, [first_row[i] for i in members])
        segment = Segment(
            first_row[members[0]], sum(counts), slots, count, spare, span, base, stride, index, None, uneven
        )
        if count > 1 or uneven is not None or any(pieces[i].start + 1 != span for i in members):
            segment.mask = self._mask(positions, segment)
        return segment

    def _uneven(
        self,
        slots: int,
        count: int,
        rows: int,
        at: Sequence[int],
        counts: Sequence[int],
        first_row: Sequence[int],
    ) -> Uneven:
        """Piece i, of `counts[i]` tokens from packed row `first_row[i]` on, fills slot `at[i]`; a slot has `rows` query rows."""
        source = [first_row[0]] * (slots * count)
        back: list[int] = []
        for slot, tokens, row in zip(at, counts, first_row, strict=True):
            begin = slot * count
            source[begin : begin + count] = [row + min(token, tokens - 1) for token in range(count)]
            back.extend(range(slot * rows, slot * rows + tokens))
        # Of query head g of a group: g * count rows further; outputs of one row lie by key/value head.
        own = torch.tensor(back, device=self._device)[:, None, None] + self._in_group * count
        heads = own * self._kv_heads.numel() + self._kv_heads[:, None]  # [total, kv_heads, group]
        return Uneven(torch.tensor(source, device=self._device), heads.flatten())

    def _rows(self, place: Place, span: int) -> torch.Tensor:
        rows = place.rows(self._device)
        # What lies behind the sequence's last block is masked; any row that holds finite numbers will do.
        return rows[:span] if rows.numel() >= span else pad(rows, (0, span - rows.numel()))


class KernelPlanner:
    """Builds plans for one pool whose attention is that of `kernels`: any pieces, in any order, wherever their blocks lie.

    `flat`: a forward that is not all `kernels`' needs the position and the pool row of each packed row too.
    """

    def __init__(self, pool: KVPool, *, min_rows: int, flat: bool) -> None:
        self._pool = pool
        self._min_rows = min_rows
        self._flat = flat

    def plan(self, pieces: Sequence[Piece], reserve: int = 0) -> Plan:
        """A plan for one forward."""
        table: list[int] = []
        first_row: list[int] = []
        scattered: list[torch.Tensor] = []
        total = 0
        for place, start, count in pieces:
            assert start >= place.first_writable, "a block with a name would be written"
            first_row.append(total)
            if place.base is not None:
                table += (total, count, start, place.base, 0)
            else:
                rows = place.rows(self._pool.device)
                scattered.append(rows)
                table += (total, count, start, -1, rows.data_ptr())
            total += count
        padding = max(0, self._min_rows - total)
        positions, write = self._flat_rows(pieces, padding) if self._flat else (_NO_ROWS, _NO_ROWS)
        return Plan(
            total + padding,
            list(range(len(pieces))),
            first_row,
            positions,
            write,
            [],
            padding,
            None,
            torch.tensor(table, dtype=torch.int64).view(-1, kernels.PIECE_NUMBERS),
            scattered,
        )

    def _flat_rows(self, pieces: Sequence[Piece], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._pool.device
        positions = [torch.arange(start, start + count) for _, start, count in pieces]
        write = [place.rows(device)[start : start + count] for place, start, count in pieces]
        positions.append(torch.zeros(padding, dtype=torch.int64))
        write.append(torch.full((padding,), self._pool.padding_row))
        return torch.cat(positions), torch.cat(write)

    def advance(self, plan: Plan) -> bool:
        """Turn the plan of single tokens into that of the next token of each piece. False if it has to be built anew."""
        assert plan.pieces is not None
        if self._flat or plan.total > plan.pieces.shape[0]:
            return False
        plan.pieces[:, 2].add_(1)
        return True


_NO_ROWS = torch.empty(0, dtype=torch.int64)


def _spare_rows(rows: int) -> int:
    """What a number of query rows lacks so that no block of them has fewer than MIN_ROWS."""
    return max(0, MIN_ROWS - (rows % QUERY_BLOCK or QUERY_BLOCK))


@torch.inference_mode()
def exact_spans(
    *, group: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, ...]:
    """Numbers of keys up to KV_TILE that give the same bits as whole tiles, tried out here and now: ascending, KV_TILE the last."""
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


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: KVPool,
    layer: int,
    plan: Plan,
    scale: float,
) -> torch.Tensor:
    """Write the new keys and values of one layer to the pool and return the attention of all rows.

    `query` [total, heads, size]; `key`, `value` [total, key/value heads, size]; returns [total, heads, size].
    """
    pool.keys[layer].index_copy_(0, plan.write_rows, key)
    pool.values[layer].index_copy_(0, plan.write_rows, value)
    return attend_rows(query, pool, layer, plan, scale, 0)


def attend_rows(
    query: torch.Tensor, pool: KVPool, layer: int, plan: Plan, scale: float, behind: int
) -> torch.Tensor:
    """Attention of all rows to what the pool holds: `query` [total, heads, size] to [total, heads, size].

    `behind`: so many times `size` numbers lie behind each row's query heads in memory, and may be read as spare query rows.
    """
    if plan.pieces is not None:
        return kernels.attend(query, pool.layers[layer], plan.pieces, scale)
    keys, values = pool.keys[layer], pool.values[layer]  # [pool rows, key/value heads, size]
    parts = [_attend_segment(query, keys, values, segment, scale, behind) for segment in plan.segments]
    if plan.padding:
        parts.append(query.new_zeros((plan.padding, *query.shape[1:])))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_segment(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segment: Segment,
    scale: float,
    behind: int,
) -> torch.Tensor:
    """Attention of one segment: [pieces * count, heads, size]."""
    heads, size = query.shape[1:]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    slots, count, spare = segment.slots, segment.count, segment.spare
    k = _entries(keys, segment)  # [slots, kv_heads, kv, size]
    v = _entries(values, segment)
    if segment.uneven is not None:
        q = _into_slots(query, segment, segment.uneven, kv_heads)
        out = scaled_dot_product_attention(q, k, v, attn_mask=segment.mask, scale=scale)
        out = out.transpose(1, 2).reshape(-1, size).index_select(0, segment.uneven.back)
        return out.view(segment.total, heads, size)
    q = query[segment.first : segment.first + segment.total]
    if count >= UNFOLDED_FROM:
        # One piece. The query heads of a group become the batch; keys are shared along it without a copy.
        q = q.view(count, kv_heads, group, size).permute(2, 1, 0, 3)  # [group, kv_heads, count, size]
        q = pad(q, (0, 0, 0, spare)) if spare else q
        out = scaled_dot_product_attention(
            q, k.expand(group, -1, -1, -1), v.expand(group, -1, -1, -1), attn_mask=segment.mask, scale=scale
        )
        return out[:, :, :count].permute(2, 1, 0, 3).reshape(count, heads, size)
    if count == 1 and 0 < spare <= behind:
        # What lies behind a group's heads, the next group's or whatever else, serves as spare rows without a copy.
        q = q.as_strided(
            (slots, kv_heads, group + spare, size), (q.stride(0), group * size, size, 1), q.storage_offset()
        )
    else:
        q = q.view(slots, count, kv_heads, group, size)
        q = q.permute(0, 2, 3, 1, 4).reshape(slots, kv_heads, group * count, size)
        q = pad(q, (0, 0, 0, spare)) if spare else q
    out = scaled_dot_product_attention(q, k, v, attn_mask=segment.mask, scale=scale)
    if spare:
        out = out[:, :, : group * count]
    out = out.reshape(slots, kv_heads, group, count, size)
    return out.permute(0, 3, 1, 2, 4).reshape(slots * count, heads, size)


def _into_slots(query: torch.Tensor, segment: Segment, uneven: Uneven, kv_heads: int) -> torch.Tensor:
    """Queries of an uneven segment: `query` [total, heads, size] to [slots, kv_heads, folded rows and spare ones, size]."""
    heads, size = query.shape[1:]
    if query.stride(1) != size or query.stride(2) != 1 or query.stride(0) % size:
        query = query.contiguous()
    row = query.stride(0) // size  # heads from row to row: keys and values may lie between them
    if uneven.heads is None:
        of_rows = (uneven.rows * row).view(segment.slots, 1, 1, segment.count)
        of_heads = torch.arange(heads, device=query.device).view(kv_heads, heads // kv_heads, 1)
        uneven.heads = pad((of_rows + of_heads).flatten(2), (0, segment.spare)).flatten()
    every = query.as_strided(((query.shape[0] - 1) * row + heads, size), (size, 1), query.storage_offset())
    return every.index_select(0, uneven.heads).view(segment.slots, kv_heads, -1, size)


def _entries(pool: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Keys or values of a segment, [slots, heads, kv, size]: a view where possible."""
    heads, size = pool.shape[1:]
    if segment.index is not None:
        return (
            pool.index_select(0, segment.index).view(segment.slots, segment.kv, heads, size).transpose(1, 2)
        )
    row = pool.stride(0)
    return pool.as_strided(
        (segment.slots, heads, segment.kv, size),
        (segment.stride * row, size, row, 1),
        pool.storage_offset() + segment.base * row,
    )
