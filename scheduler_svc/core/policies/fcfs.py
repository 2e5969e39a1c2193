"""Run to completion in arrival order."""

from __future__ import annotations

from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.policies.base import Policy, estimate_by_length, rank_key
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.state.request import Request


class Fcfs(Policy):
    """Index = arrival number; pinned, so that what runs is never paused. The estimate is for people only."""

    name = "fcfs"

    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Return the rank in arrival order, whatever the request costs."""
        found = estimate_by_length(request, priors)
        return rank_key(request, found, float(request.facts.sequence), counts_resuming=False, pinned=True)

    def ordered_by(self, request: Request) -> str:
        """Return a text without the arrival number, because that would reveal how many other requests there
        were.
        """
        return "its turn in the order of arrival"
