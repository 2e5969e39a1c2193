"""`laps-sd` with levels as narrow as can be: one index, no levels. For reference: what the levels cost."""

from __future__ import annotations

from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.policies.base import Policy, estimate_by_acceptance, index_in_steps_s, rank_key
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.state.request import Request


class SdIndex(Policy):
    """The least machine time left first, by length and own acceptance, from arrival on and whatever was
    attained."""

    name = "sd-index"

    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Return the rank by remaining tokens / shrunken tokens per round × machine share, + set-up cost; in
        steps.
        """
        found = estimate_by_acceptance(request, priors)
        return rank_key(request, found, index_in_steps_s(request, found), counts_resuming=True)
