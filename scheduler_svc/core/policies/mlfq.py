"""Skip-join multi-level feedback queue, by the rules of FastServe (arXiv 2305.05920 and its published code).

Kept:
  * Level k has a quantum of `level_base_s` · 2^k machine seconds; the highest priority has the smallest.
  * Skip-join: a request joins the highest level whose quantum covers its prefill, not the topmost one.
  * A request that has spent more than the quantum of its level there goes one level down, and begins its time
    there with nothing spent.
  * Preemption between levels, at every round; a request that runs is not displaced by one of its own level.

Not kept:
  * Promotion of requests that have waited too long. It changes a rank because time passes; here ranks change
    by events only. The reserved share, which every policy has, prevents starvation.
  * Swapping the next requests in before their turn, and others out. `laps_sd.contract.choose` manages the
    memory.

Our choice: the first quantum is a setting and not the shortest iteration measured, since levels that move
with a measurement would move requests that no event has touched; and inside a level the order is that of
arrival.
"""

from __future__ import annotations

from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.policies.base import (
    STEADY_S,
    Policy,
    arrival_s,
    estimate_by_length,
    rank_key,
)
from scheduler_svc.core.rank import MAX_LEVELS, RankKey
from scheduler_svc.core.state.request import Request


class Mlfq(Policy):
    """Level by what was spent at the level so far, never by what is left. The estimate is for people only."""

    name = "mlfq"
    has_levels = True

    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Return the rank; a request is demoted once its quantum is used up."""
        found = estimate_by_length(request, priors)
        before = request.rank_before
        if before is None:
            level = self._joins(request, priors)
        else:
            level = self._demoted(before.level, request.attained_at_level_s)
        index_s = STEADY_S + arrival_s(request)
        return rank_key(request, found, index_s, counts_resuming=False, level=level)

    def ordered_by(self, request: Request) -> str:
        """Return the level, and how much of its quantum is used up, as a text for people."""
        level = request.rank.level
        spent_s, quantum_s = request.attained_at_level_s, self._quantum_s(level)
        return f"{spent_s:.3g} s of the {quantum_s:.3g} s of level {level} used up"

    def _quantum_s(self, level: int) -> float:
        return self.settings.level_base_s * float(2**level)

    def _demoted(self, level: int, spent_s: float) -> int:
        return min(level + 1, MAX_LEVELS - 1) if spent_s > self._quantum_s(level) else level

    def _joins(self, request: Request, priors: Priors) -> int:
        """Return the level at which a request joins, by its prefill. A request that a new leader finds on the
        record has attained service: it joins as many levels further down as that service would have cost it,
        and begins there with nothing spent, which gives away less than a quantum.
        """
        prefill_s = priors.cost.prefill_share_s(request.facts.prompt_tokens)
        level = 0
        while level < MAX_LEVELS - 1 and self._quantum_s(level) < prefill_s:
            level += 1
        spent_s = request.attained_s
        while level < MAX_LEVELS - 1 and spent_s > self._quantum_s(level):
            spent_s -= self._quantum_s(level)
            level += 1
        return level
