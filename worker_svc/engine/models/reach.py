"""The keys that a query may see in each layer: all before it, a sliding window of them, or those of its chunk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

MaskFunction = Callable[..., torch.Tensor]
"""transformers' form of a mask: (batch index, head, query position, key position) -> True if the key is seen."""

# Positions, evenly spaced, at which a mask is compared with its description, besides those around its limits.
TRIED = 16


@dataclass(frozen=True, slots=True)
class Reach:
    """The keys that the queries of one layer may see; at most one of the two is set."""

    # A query sees its own and the `window - 1` positions before.
    window: int | None = None
    # A query sees those positions up to its own with the same quotient by `chunk`.
    chunk: int | None = None

    @property
    def limit(self) -> int | None:
        """The first position whose query does not see all keys before it; None if all queries do."""
        return self.window or self.chunk

    @property
    def words(self) -> str:
        """The reach as a noun for messages."""
        if self.window is not None:
            return f"a sliding window of {self.window} tokens"
        return "all tokens" if self.chunk is None else f"chunks of {self.chunk} tokens"

    def first(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the first position that queries at `positions` see, in the same shape."""
        if self.window is not None:
            return (positions - (self.window - 1)).clamp_(min=0)
        if self.chunk is not None:
            return positions - positions % self.chunk
        return torch.zeros_like(positions)


FULL = Reach()


def reach_of(mask: MaskFunction, length: int, device: torch.device) -> Reach | None:
    """Return the reach that a mask gives to contexts of `length` tokens; None if it is none of these.

    A limit that no such context has is not a limit.
    """
    keys = torch.arange(length, device=device)
    sees_first = _visible(mask, keys, keys[:1])[:, 0]
    hidden = (~sees_first).nonzero()
    limit = int(hidden[0]) if len(hidden) else length
    around = {near + step for near in (limit, 2 * limit) for step in (-2, -1, 0, 1)}
    tried = around | {length - 1, *range(0, length, max(1, length // TRIED))}
    queries = torch.tensor(sorted(at for at in tried if 0 <= at < length), device=device)
    seen = _visible(mask, queries, keys)
    reaches = (FULL,) if limit == length else (Reach(window=limit), Reach(chunk=limit))
    for reach in reaches if limit else ():
        expected = (keys <= queries[:, None]) & (keys >= reach.first(queries)[:, None])
        if torch.equal(seen, expected):
            return reach
    return None


def _visible(mask: MaskFunction, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the mask as bool [queries, keys]."""
    none = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=keys.device)
    seen = mask(none, none, queries[None, None, :, None], keys[None, None, None, :])
    return seen.expand(1, 1, len(queries), len(keys))[0, 0]
