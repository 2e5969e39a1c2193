"""The margin of a choice: where it is small, two arithmetics may choose different tokens (see
`test_identity`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from worker_svc.engine.interface import Sampling
from worker_svc.engine.sampling.sampling import rows_for
from worker_svc.engine.sampling.truncation import kept


@dataclass(frozen=True, slots=True)
class Margin:
    """Distance of a choice from another one."""

    # Between the two best perturbed scores among the kept tokens; inf if only one is kept.
    gap: float
    # Distance, in probability or score, to a different set of kept tokens; inf where nothing truncates.
    boundary: float


def margin(logits: torch.Tensor, sampling: Sampling, noise: torch.Tensor | None) -> Margin:
    """Return the margin of one row: `logits` [vocab], `noise` [vocab]."""
    vocab = logits.shape[-1]
    if sampling.temperature == 0:
        best = logits.float().topk(2).values
        return Margin(float(best[0] - best[1]), torch.inf)
    assert noise is not None
    scores = logits.float() / sampling.temperature
    rows = rows_for([sampling], vocab, logits.device)
    no_min_p = torch.full_like(rows.top_p, -torch.inf)
    ordered, ids, keep, _ = kept(scores[None], rows.top_k, rows.top_p, no_min_p, vocab)
    boundary = torch.inf
    if 0 < sampling.top_k < vocab:
        boundary = min(boundary, float(ordered[0, sampling.top_k - 1] - ordered[0, sampling.top_k]))
    if sampling.top_p < 1:
        in_top_k = torch.arange(vocab, device=logits.device) < rows.top_k[0]
        reached = ordered[0].masked_fill(~in_top_k, -torch.inf).softmax(-1).cumsum(-1)
        boundary = min(boundary, float((reached - sampling.top_p).abs().min()))
        count = int(keep[0].sum())
        if count < vocab:  # two equal scores at the edge of the nucleus may change places
            boundary = min(boundary, float(ordered[0, count - 1] - ordered[0, count]))
    if sampling.min_p > 0:
        least = ordered[0, 0] + math.log(sampling.min_p)
        boundary = min(boundary, float((ordered[0] - least).abs().min()))
        keep = keep & (ordered >= least)
    best = (ordered[0] + noise[ids[0]]).masked_fill(~keep[0], -torch.inf).topk(2).values
    return Margin(float(best[0] - best[1]), boundary)
