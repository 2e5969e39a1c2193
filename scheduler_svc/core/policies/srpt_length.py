"""Shortest predicted remaining length first, with preemption; acceptance is ignored."""

from __future__ import annotations

from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.policies.base import Policy, estimate_by_length, rank_key
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.state.request import Request


class SrptLength(Policy):
    """Baseline for `laps-sd`: the same estimator of length, the same cost, every request with its class's
    tokens per round.
    """

    name = "srpt-length"

    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Return the rank by the predicted remaining tokens, at the machine's cost of a token."""
        found = estimate_by_length(request, priors)
        return rank_key(request, found, found.decoding_s, counts_resuming=True)
