"""Computes ranks with the policy, and remembers the version of the priors that each rank uses."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.policies.base import Policy
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.state.request import Request


@dataclass(frozen=True, slots=True)
class Ranker:
    """A policy over priors."""

    policy: Policy
    priors: Priors

    def rank(self, request: Request) -> RankKey:
        """Return the rank of a request by the present priors."""
        request.priors_version = self.priors.version
        return self.policy.rank(request, self.priors)

    def is_stale(self, request: Request) -> bool:
        """Return whether its rank rests on an older version of the priors."""
        return request.priors_version != self.priors.version
