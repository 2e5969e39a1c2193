"""Log probabilities of a prompt: the target's logits at its rows, which no other request needs.

Row p predicts token p + 1, so that a prompt of n tokens has n - 1 rows. They are computed with the chunks of the
prompt, and added to the request when the round counts. After an eviction rows that are there are not computed again.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from worker_svc.engine.interface import PromptLogprobs
from worker_svc.engine.round.request import RoundRequest
from worker_svc.engine.sequence import Sequence

LOGITS_BYTES = 2**26
"""Logits of prompt rows in one round, at most, in single precision. Our choice: with a vocabulary of 152,000
tokens 110 rows, for which a round takes little longer than for one.
"""
SLICE_BYTES = 2**23
"""Logits that are turned into log probabilities together, at most."""


def rows_in_round(vocab_size: int) -> int:
    """Return the number of prompt rows whose logits a round computes, at most."""
    return max(1, LOGITS_BYTES // (4 * vocab_size))


def rows_wanted(sequence: Sequence, start: int, count: int) -> range:
    """Return the rows whose log probabilities a request lacks, of `count` rows of its context from `start` on."""
    found = sequence.prompt_logprobs
    if found is None:
        return range(0)
    first = max(start, len(found.logprobs))
    return range(first, max(first, min(start + count, len(sequence.spec.prompt_ids) - 1)))


def add_prompt_logprobs(logits: torch.Tensor, requests: SequenceOf[RoundRequest]) -> list[RoundRequest]:
    """Add log probabilities to requests that have prompt rows in this round.

    `logits` [rows, vocab]: those of the first request, then those of the second. Returns the requests of which one
    is not a number.
    """
    following: list[int] = []
    most = 0
    for request in requests:
        rows = request.prompt_rows
        following += request.sequence.tokens[rows.start + 1 : rows.stop + 1]
        most = max(most, _alternatives(request, logits.shape[-1]))
    parts: list[tuple[torch.Tensor, ...]] = []
    size = max(1, SLICE_BYTES // (4 * logits.shape[-1]))
    for first in range(0, len(following), size):
        some = logits[first : first + size].float().log_softmax(-1)
        ids = torch.tensor(following[first : first + size], device=logits.device)[:, None]
        own = some.gather(-1, ids)
        best = some.topk(most, dim=-1)
        parts.append((own[:, 0], (some >= own).sum(-1), best.indices, best.values))
    logprobs, ranks, best_ids, best_logprobs = (torch.cat(each).cpu() for each in zip(*parts, strict=True))
    failed = []
    at = 0
    for request in requests:
        after, count = at + len(request.prompt_rows), _alternatives(request, logits.shape[-1])
        found = request.prompt_logprobs = PromptLogprobs(count)
        found.logprobs.extend(logprobs[at:after].tolist())
        found.ranks.extend(ranks[at:after].tolist())
        found.alternative_ids.extend(best_ids[at:after, :count].flatten().tolist())
        found.alternative_logprobs.extend(best_logprobs[at:after, :count].flatten().tolist())
        if logprobs[at:after].isnan().any():
            failed.append(request)
        at = after
    return failed


def _alternatives(request: RoundRequest, vocab_size: int) -> int:
    return min(request.sequence.spec.prompt_logprobs or 0, vocab_size)
