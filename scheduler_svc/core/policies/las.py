"""Least attained service first, with preemption: the least machine time so far runs first."""

from __future__ import annotations

from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.policies.base import Policy, arrival_s, estimate_by_length, rank_key
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.state.request import Request


class Las(Policy):
    """Index = machine seconds charged so far, prefills included. The estimate is for people only.

    Two requests with about as much take turns; the hysteresis of `laps_sd.contract.choose` makes each turn a
    tenth of what both have had.
    """

    name = "las"

    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Return the rank by attained service, whatever remains; the older one of two requests without any
        service is first.
        """
        found = estimate_by_length(request, priors)
        return rank_key(request, found, request.attained_s + arrival_s(request), counts_resuming=False)

    def ordered_by(self, request: Request) -> str:
        """Return the service so far, as a text for people."""
        return f"{request.attained_s:.3g} s of service so far"
