"""LAPS-SD: priority levels, semi-clairvoyant, with preemption across levels (arXiv 2505.17074).

From the paper: requests start non-perceptible, the non-empty queue of the highest priority runs, a request
whose acceptance has settled becomes perceptible and is ordered by its estimated execution time from length
*and* acceptance. Queue count, thresholds, demotion rule, stability test and predictors are not public; all of
those below are our choice:

  * Levels grow exponentially in machine seconds and are absolute: level 0 up to `level_base_s`, each next one
    `level_factor` times as wide. They are not derived from the learnt cost of a typical request, because then every
    change of that estimate would move the levels under requests that no event has touched. Exponential levels look
    the same at every scale: a tiny pair on a CPU uses the upper ones, a GPU the lower ones, and only the distance
    between two requests counts.
  * Perceptible: the credible interval of the remaining service is no wider than a level and its neighbours, or
    twice as wide if the length is predicted for this request and not only known of its class. A good prior
    (class history, length prediction) can make it so at arrival, otherwise its own rounds do. It is lost
    again where the interval of its service in all, what it has had included, becomes wider than that.
  * Non-perceptible: level by attained service (few machine seconds spent, so tried soon). Perceptible: level
    by *remaining* service, what must be computed again included; it falls back when its acceptance drifts.
  * Inside a level: remaining tokens / shrunken tokens per round × machine share + set-up cost, in steps of
    the hysteresis of `laps_sd.contract.choose`; inside a step the order of arrival.
"""

from __future__ import annotations

from scheduler_svc.core.estimates.basis import BY_CLASS
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.policies.base import (
    Levels,
    Policy,
    estimate_by_acceptance,
    index_in_steps_s,
    rank_key,
)
from scheduler_svc.core.rank import RankKey, Remaining
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import Request


class LapsSd(Policy):
    """The default policy."""

    name = "laps-sd"
    has_levels = True

    def __init__(self, settings: CoreSettings) -> None:
        super().__init__(settings)
        self._levels = Levels(settings)

    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Return the rank: the level by what is known of the service, the index by the estimate."""
        found = estimate_by_acceptance(request, priors)
        perceptible = self._is_perceptible(request, found.remaining)
        service_s = found.remaining.mean_s if perceptible else request.attained_s
        return rank_key(
            request,
            found,
            index_in_steps_s(request, found),
            counts_resuming=True,
            level=self._levels.of(service_s),
            perceptible=perceptible,
        )

    def _is_perceptible(self, request: Request, remaining: Remaining) -> bool:
        """Return whether its level is known. The base is added because below it all services are one level.

        For a request that was perceptible, the total service is judged: near its end the remaining service is
        always uncertain by a large factor.
        """
        known_s, before = self.settings.level_base_s, request.rank_before
        if before is not None and before.perceptible:
            known_s += request.attained_s
        of_class = remaining.basis is BY_CLASS
        spread = self.settings.perceptible_spread if of_class else self.settings.predicted_spread
        return remaining.high_s + known_s <= spread * (remaining.low_s + known_s)
