"""The tokens that top_k, top_p and min_p keep: the definition, for every device and for the kernels in C.

    scores = logits / temperature
    order  = the greater score first, of equal scores the smaller token id
    weight = 2**30 * exp(score - greatest score), rounded down to an integer, in steps of single precision that
             each round once; 0 for probabilities below 2**-30 of the greatest
    top_k keeps the first k tokens in this order
    top_p keeps a token of these if the weights before it are below top_p times the weights of all of these, or
             it is the first
    min_p keeps a token if its score is not below the greatest score + log(min_p)

Sums of integers do not depend on the order in which they are added up, so a library, a GPU and the kernels keep
the same tokens, bit for bit (`cpu/kernels_choose.h`). A sum of single precision differs with the order.
"""

from __future__ import annotations

import torch

__all__ = ["kept", "kept_of_all", "weights"]

WHOLE_LOG2 = 30
"""log2 of the weight of the most probable token. Sums of 2**23 tokens fit a double without rounding."""
_TINIEST_LOG2 = -32.0
"""log2 of a probability, as a part of the greatest, whose weight is 0; a little less than -WHOLE_LOG2."""
_LOG2_E = 1.44269504088896341
_FACTORS = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
)
"""Of a polynomial for 2**x - 1 between -1/2 and 1/2 (S. Moshier, Cephes, exp2f), the highest power first."""


def weights(scores: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """Return the weights, int32 in 0 .. 2**30, of `scores` [rows, n] float32; `most` [rows, 1]: the greatest."""
    x = (scores - most).mul_(_LOG2_E).clamp_(min=_TINIEST_LOG2)
    whole = x.round()
    x.sub_(whole)
    y = x * _FACTORS[0]
    for factor in _FACTORS[1:]:
        y.add_(factor).mul_(x)
    y.add_(1.0)
    # The exponent of a float is in the bits from 23 on.
    power = whole.to(torch.int32).add_(WHOLE_LOG2).bitwise_left_shift_(23)
    return y.view(torch.int32).add_(power).view(torch.float32).to(torch.int32)


def _limit(top_p: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the weight that the tokens before one must not reach, float64 [rows, 1]."""
    return (top_p.double() * whole).clamp_(min=1.0)


def kept(
    scores: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
    candidates: int,
    *,
    whole: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """Return the first `candidates` scores of each row in order, their ids, which of them are kept, and
    whether no other token can be kept; if it is not so, the rest means nothing.

    `scores` [rows, vocab] float32, -inf for tokens that cannot be chosen; `top_k` int64, the vocabulary or
    more where off; `top_p` float32, above 1 where off; `log_min_p` float32, -inf where off: each [rows, 1],
    or [1, 1] for all. `whole`: whether a row without top_k may have top_p.
    """
    vocab = scores.shape[-1]
    if candidates < vocab:
        # In the order of ids, so that a stable sort leaves equal scores in it.
        ids = scores.topk(candidates, dim=-1).indices.sort(dim=-1).values
        ordered, at = scores.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, at)
    else:
        ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    most = ordered[:, :1]
    in_top_k = torch.arange(candidates, device=scores.device) < top_k  # [rows, candidates]
    own = weights(ordered, most).masked_fill(~in_top_k, 0)
    reached = own.cumsum(-1, dtype=torch.int64)
    total = reached[:, -1:]
    if candidates < vocab and whole:
        total = torch.where(top_k < vocab, total, weights(scores, most).sum(-1, keepdim=True))
    limit = _limit(top_p, total)
    keep = in_top_k & (reached - own < limit) & (ordered >= most + log_min_p) & (ordered > -torch.inf)
    if candidates == vocab:
        return ordered, ids, keep, True
    # Which of equal scores are among the candidates is left to the library.
    unsure = ((top_k > candidates) & (top_k < vocab)) | (keep & (ordered == ordered[:, -1:]))
    return ordered, ids, keep, not bool(unsure.any())


def kept_of_all(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, log_min_p: torch.Tensor
) -> torch.Tensor:
    """Return which tokens are kept, bool [rows, vocab], without a look at the host; arguments as in `kept`."""
    _, ids, keep, _ = kept(scores, top_k, top_p, log_min_p, scores.shape[-1])
    return torch.zeros_like(keep).scatter(-1, ids, keep)
