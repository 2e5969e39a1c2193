"""Least attained service first, with preemption: whoever has had the least of the machine."""

from __future__ import annotations

from scheduler_svc.core.policies.base import Policy, arrival_s, estimate_by_length, rank_key
from scheduler_svc.core.priors import Priors
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.request import Request


class Las(Policy):
    """Index = machine seconds charged so far, prefills included. The estimate is for people only.

    Two requests with about as much take turns; the hysteresis of `laps_sd.choose` makes each turn a tenth of what
    both have had.
    """

    name = "las"

    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Whoever had least, whatever is left of it; the older one of two that had nothing."""
        found = estimate_by_length(request, priors)
        return rank_key(request, found, request.attained_s + arrival_s(request), counts_resuming=False)

    def ordered_by(self, request: Request) -> str:
        """The service so far."""
        return f"{request.attained_s:.3g} s of service so far"
