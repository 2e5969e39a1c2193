"""Shortest predicted length first, run to completion; acceptance is ignored."""

from __future__ import annotations

from laps_sd.contract.choose import ON_DEVICE
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.policies.base import Policy, estimate_by_length, rank_key
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.state.request import Request


class SjfLength(Policy):
    """`srpt-length` without preemption: pinned, so that what runs is never paused, and before all that waits."""

    name = "sjf-length"

    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Return the rank by predicted tokens at the machine's cost of a token; for a request that lost its
        KV, by the remaining ones.
        """
        found = estimate_by_length(request, priors)
        begun = request.residency is ON_DEVICE
        return rank_key(request, found, 0.0 if begun else found.decoding_s, counts_resuming=True, pinned=True)
