"""Our choice of tokens as scores whose argmax it is, for many requests at once and without a look at the host.

The same rule as `sampling.sampling` with the noise of `sampling.counter`: the argmax of the returned rows is
the token that `choose_tokens` chooses. Settings and seeds lie on the device by the place of a request, so that
nothing is copied in a step but what changes. Needs torch only.
"""

from __future__ import annotations

import torch

from worker_svc.engine.sampling import counter
from worker_svc.engine.sampling.noise import signed32
from worker_svc.engine.sampling.truncation import kept_of_all

__all__ = ["coupled_scores", "signed64"]


def signed64(x: int) -> int:
    """Return the int64 with the same bits as the unsigned 64-bit integer x."""
    return x - 2**64 if x >= 2**63 else x


_GOLDEN = signed64(counter.GOLDEN)
_MIX64_A, _MIX64_B = signed64(counter.MIX64_A), signed64(counter.MIX64_B)
_MIX_A, _MIX_B = signed32(counter.MIX_A), signed32(counter.MIX_B)


def coupled_scores(
    logits: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
    positions: torch.Tensor,
    weyl: torch.Tensor,
    *,
    truncates: bool,
) -> torch.Tensor:
    """Return the scores of each row, float32 [rows, vocab]; a row of temperature 0 is returned as it is.

    `logits` [rows, vocab] after bias and penalties; `floats` [rows, 3]: temperature, top_p, min_p; `ints`
    [rows, 2]: top_k (the vocabulary if off), seed; `positions` [rows] of the output tokens that are chosen;
    `truncates`: whether any row has top_k, top_p or min_p.
    """
    noisy = floats[:, :1] > 0
    scores = logits.float() * torch.where(noisy, 1.0 / floats[:, :1], 1.0)
    if truncates:
        scores = torch.where(noisy, _truncated(scores, floats, ints[:, :1]), scores)
    return torch.where(noisy, scores + _gumbel(ints[:, 1], positions, weyl), scores)


def _truncated(scores: torch.Tensor, floats: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Return the scores with -inf for the tokens that top_k, top_p and min_p leave out."""
    keep = kept_of_all(
        scores, top_k, torch.where(floats[:, 1:2] < 1, floats[:, 1:2], 2.0), floats[:, 2:3].log()
    )
    return scores.masked_fill(~keep, -torch.inf)


def _gumbel(seeds: torch.Tensor, positions: torch.Tensor, weyl: torch.Tensor) -> torch.Tensor:
    """Return the noise of every token at each (seed, position), float32 [rows, vocab]."""
    key = _mix64(_mix64(seeds) + positions * _GOLDEN)
    low, high = key.to(torch.int32)[:, None], (key >> 32).to(torch.int32)[:, None]
    x = weyl ^ low
    # >> is arithmetic on signed integers; the mask makes it logical.
    x = (x ^ ((x >> 16) & 0xFFFF)) * _MIX_A
    x = ((x ^ ((x >> 15) & 0x1FFFF)) + high) * _MIX_B
    v = (x ^ ((x >> 16) & 0xFFFF)).to(torch.float32) * 2.0**-32 + 2.0**-33
    v = (v + (v < 0)).clamp_(max=counter.V_MAX)
    return -torch.log(-torch.log1p(-v))


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """Return `counter.mix64` of int64 numbers; their arithmetic is modulo 2**64."""
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX64_A
    x = (x ^ _shifted(x, 27)) * _MIX64_B
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
