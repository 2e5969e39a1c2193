"""Restrictions applied to a row of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker_svc.engine.sampling.restrictions import Restrictions

__all__ = ["restricted"]


def restricted(
    logits: torch.Tensor, restrictions: Restrictions, position: int, tail: Sequence[int]
) -> torch.Tensor:
    """Return `logits` of one row, float [width], at most the vocabulary, with -inf at excluded tokens.

    A restriction that would leave no token is left out: a complete output format allows only the tokens that
    end it, and ends before `min_tokens`. `position` is that of the row's output token, `tail` the tokens
    before it as `Restrictions.completing` takes them. Nothing is read back from the device.
    """
    if restrictions.allowed:
        others = torch.full_like(logits, -torch.inf)
        ids = _ids(restrictions.allowed, logits)
        others[ids] = logits[ids]
        logits = _unless_empty(others, logits)
    for excluded in (restrictions.early_ends(position), restrictions.completing(tail)):
        if excluded:
            logits = _unless_empty(logits.index_fill(0, _ids(excluded, logits), -torch.inf), logits)
    return logits


def _ids(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Return token ids as an index of `logits`, which may be those of a smaller vocabulary."""
    width = logits.shape[-1]
    return torch.tensor([token for token in tokens if token < width], dtype=torch.int64, device=logits.device)


def _unless_empty(fewer: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return torch.where(fewer.amax() > -torch.inf, fewer, before)
