"""Computes ranks with the policy, and remembers the version of the priors that each rank uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.estimates.prompt_lengths import LEARNED_ENOUGH
from scheduler_svc.core.estimates.sources import Guesses
from scheduler_svc.core.events import RequestFacts
from scheduler_svc.core.policies.base import Policy
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.state.request import Request

PREDICTED_AGAIN: Final = 1.5
"""Times as many ended requests as at the last prediction, after which a prompt is predicted again: what waits in a
burst gains from what the burst has shown, and a request is predicted few times. Our choice."""


@dataclass(frozen=True, slots=True)
class Ranker:
    """A policy over priors."""

    policy: Policy
    priors: Priors

    def rank(self, request: Request) -> RankKey:
        """Return the rank of a request by the present priors."""
        request.priors_version = self.priors.version
        if self.priors.prompts.learned >= request.guesses.predicted_again_at:
            self.predict(request.facts, request.guesses)
        return self.policy.rank(request, self.priors)

    def is_stale(self, request: Request) -> bool:
        """Return whether its rank rests on an older version of the priors."""
        return request.priors_version != self.priors.version

    def predict(self, facts: RequestFacts, guesses: Guesses) -> None:
        """Predict the length of a request from the words of its prompt, if it has any."""
        if not facts.length_features:
            return
        prompts = self.priors.prompts
        guesses.prompt = prompts.predict(facts.length_features, facts.workload_class, facts.tenant)
        guesses.predicted_again_at = max(LEARNED_ENOUGH, PREDICTED_AGAIN * prompts.learned)
