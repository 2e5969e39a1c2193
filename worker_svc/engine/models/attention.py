"""Attention of packed, ragged rows over a KV pool.

A forward takes *pieces*: consecutive tokens of one sequence, each with the position it starts at. Their
tokens lie one after another in one row of shape [total]. On the CPU attention is usually that of `kernels`,
which takes pieces as they are. Elsewhere pieces of equal length are grouped into *segments*, and SDPA runs
once per segment:

    query    [pieces, key/value heads, group * tokens, head size]      the query heads of a group are folded into the rows
    key      [pieces, key/value heads, kv, head size]                  gathered from the pool; of a single piece a view
    mask     [pieces, 1, group * tokens, kv]                           additive, 0 or -inf; shared by all layers of one reach
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from worker_svc.engine.cache.kv import KVPool
from worker_svc.engine.cpu import kernels
from worker_svc.engine.models.plan import UNFOLDED_FROM, Plan, Segment


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
    query: torch.Tensor, pool: KVPool, layer: int, plan: Plan, scale: float, extra: int
) -> torch.Tensor:
    """Return the attention of all rows to the pool's entries, [total, heads, size] like `query`.

    `extra`: heads that follow each row's query heads in memory (its keys and values), and may be read as
    spare query rows.
    """
    if plan.pieces is not None:
        return kernels.attend(query, pool.layers[layer], plan.pieces, scale)
    keys, values = pool.keys[layer], pool.values[layer]  # [pool rows, key/value heads, size]
    reach = plan.reach_of_layer[layer]
    parts = [_attend_segment(query, keys, values, segment, reach, scale, extra) for segment in plan.segments]
    if plan.padding:
        parts.append(query.new_zeros((plan.padding, *query.shape[1:])))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_segment(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segment: Segment,
    reach: int,
    scale: float,
    extra: int,
) -> torch.Tensor:
    """Return the attention of one segment: [pieces * count, heads, size]."""
    heads, size = query.shape[1:]
    kv_heads = keys.shape[1]
    group, mask = heads // kv_heads, segment.masks[reach]
    pieces, count, spare = segment.pieces, segment.count, segment.spare
    k = _entries(keys, segment)  # [pieces, kv_heads, kv, size]
    v = _entries(values, segment)
    q = query[segment.first : segment.first + pieces * count]
    if count >= UNFOLDED_FROM:
        # One piece. The query heads of a group become the batch; keys are shared along it without a copy.
        q = q.view(count, kv_heads, group, size).permute(2, 1, 0, 3)  # [group, kv_heads, count, size]
        q = pad(q, (0, 0, 0, spare)) if spare else q
        out = scaled_dot_product_attention(
            q, k.expand(group, -1, -1, -1), v.expand(group, -1, -1, -1), attn_mask=mask, scale=scale
        )
        return out[:, :, :count].permute(2, 1, 0, 3).reshape(count, heads, size)
    if count == 1 and 0 < spare <= extra:
        # The numbers after a group's heads, those of the next group or any other, serve as spare rows without
        # a copy.
        q = q.as_strided(
            (pieces, kv_heads, group + spare, size), (q.stride(0), group * size, size, 1), q.storage_offset()
        )
    else:
        q = q.view(pieces, count, kv_heads, group, size)
        q = q.permute(0, 2, 3, 1, 4).reshape(pieces, kv_heads, group * count, size)
        q = pad(q, (0, 0, 0, spare)) if spare else q
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if spare:
        out = out[:, :, : group * count]
    out = out.reshape(pieces, kv_heads, group, count, size)
    return out.permute(0, 3, 1, 2, 4).reshape(pieces * count, heads, size)


def _entries(pool: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Return the keys or values of a segment, [pieces, heads, kv, size]."""
    heads, size = pool.shape[1:]
    if segment.index is None:
        return pool[segment.base : segment.base + segment.kv].transpose(0, 1)[None]
    return pool.index_select(0, segment.index).view(segment.pieces, segment.kv, heads, size).transpose(1, 2)
