"""LAPS-SD: priority levels, semi-clairvoyant, with preemption across levels (arXiv 2505.17074).

From the paper: requests start non-perceptible, the non-empty queue of the highest priority runs, a request whose
acceptance has settled becomes perceptible and is ordered by its estimated execution time from length *and* acceptance.
Queue count, thresholds, demotion rule, stability test and predictors are not public; all of those below are our choice:

  * Levels grow exponentially in machine seconds and are absolute: level 0 up to `level_base_s`, each next one
    `level_factor` times as wide. They are not derived from the learnt cost of a typical request, because then every
    change of that estimate would move the levels under requests that no event has touched. Exponential levels look
    the same at every scale: a tiny pair on a CPU uses the upper ones, a GPU the lower ones, and only the distance
    between two requests counts.
  * Perceptible: the credible interval of the remaining service is no wider than a level. A good prior (class
    history, length prediction) can make it so at arrival, otherwise its own rounds do; it can be lost again.
  * Non-perceptible: level by attained service (few machine seconds spent, so tried soon). Perceptible: level by
    *remaining* service, what must be computed anew included; it falls back when its acceptance drifts.
  * Inside a level: remaining tokens / shrunken tokens per round × machine share + set-up cost.
"""

from __future__ import annotations

from bisect import bisect_left
from math import exp, log, sqrt

from scheduler_svc.core.policies.base import resume_cost_s, setup_s, tokens_left
from scheduler_svc.core.priors import Priors
from scheduler_svc.core.rank import RankKey, Remaining, pack_rank_class
from scheduler_svc.core.request import Request
from scheduler_svc.core.settings import CoreSettings


class LapsSd:
    """The default policy."""

    name = "laps-sd"

    def __init__(self, settings: CoreSettings) -> None:
        self._settings = settings
        # Level 0 up to the base, level k up to base · factor^k (a rounding error more), the last one without end.
        self._ends_s = [
            settings.level_base_s * settings.level_factor ** (level + 1e-12)
            for level in range(settings.level_count - 1)
        ]

    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Level by what is known of its service, index by the estimate."""
        facts = request.facts
        left = tokens_left(request, priors)
        pace = priors.tokens_per_round(facts.workload_class, request.rounds, request.emitted)
        mean = left.mean
        seconds = priors.cost.share_s(request.context_tokens + mean / 2) / pace.mean
        resume_s = resume_cost_s(request, priors)
        setup = setup_s(request, resume_s)
        decoding = mean * seconds
        low, high = _widen(left.low / mean, left.high / mean, pace.spread)
        remaining = Remaining(
            decoding + setup,
            decoding * low + setup,
            decoding * high + setup,
            f"{left.basis}; {request.rounds} rounds of its own",
        )
        before = request.rank_before
        perceptible = self._is_perceptible(remaining, before)
        level = self._level(remaining.mean_s if perceptible else request.attained_s, perceptible, before)
        return RankKey(
            pack_rank_class(facts.priority, level),
            decoding,
            resume_s,
            False,  # pinned
            level,
            perceptible,
            remaining,
        )

    def _is_perceptible(self, remaining: Remaining, before: RankKey | None) -> bool:
        """Whether its level is known. The base is added because below it all services are one level."""
        base = self._settings.level_base_s
        spread = self._settings.perceptible_spread
        if before is not None and before.perceptible:
            spread *= self._settings.perceptible_hysteresis
        return remaining.high_s + base <= spread * (remaining.low_s + base)

    def _level(self, service_s: float, perceptible: bool, before: RankKey | None) -> int:
        if before is not None and before.perceptible == perceptible:
            slack = self._settings.level_hysteresis
            lowest = bisect_left(self._ends_s, service_s / slack)
            if lowest <= before.level <= bisect_left(self._ends_s, service_s * slack):
                return before.level
        return bisect_left(self._ends_s, service_s)


def _widen(low: float, high: float, spread: float) -> tuple[float, float]:
    """Add the uncertainty of the pace to that of the length, as independent factors around the estimate."""
    pace2 = (1.28 * spread) ** 2
    return exp(-sqrt(log(low) ** 2 + pace2)), exp(sqrt(log(high) ** 2 + pace2))
