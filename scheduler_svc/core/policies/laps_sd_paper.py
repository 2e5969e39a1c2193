"""LAPS-SD as literally as its public text allows (arXiv 2505.17074, Algorithm 1), to measure `laps-sd`
against.

Stated, and followed:
  * An arrival joins the queue of the highest priority, non-perceptible; the non-empty queue of the highest
    priority runs; there is preemption across queues.
  * A request whose acceptance has become stable is marked perceptible. Its acceptance rate and length are
    predicted, and its execution time is T = L / (n·A + 1) · (n·T_SSM + T_LLM): L output tokens, n drafted
    tokens per round, A the share of them that is accepted.

Not public, and our choice:
  * Queues: the levels of `laps-sd` (`level_base_s`, `level_factor`, `level_count`), by attained service,
    which is also the rule of demotion.
  * Order in a queue: the least attained service (non-perceptible) or perceived service (perceptible) first,
    on one scale. Only the name of the algorithm states this; that an older one goes first among equals is
    stated nowhere.
  * Stable: the running acceptance (all accepted over all drafted tokens so far) moved by less than
    `STABLE_RANGE` over `STABLE_ROUNDS` rounds that drafted. A mark stays. It is not on the record: a new
    leader looks at as many rounds of its own.
  * The prediction of A is that running mean as it is, that of n the mean so far, that of L the one of
    `laps-sd`.
  * n·T_SSM + T_LLM is what a round costs as the core learns it, draft and verification in one; in a batch,
    the share of one sequence. With batch size 1, the paper's, that is the round.
  * No preemption inside a queue, and no cost of taking a request up: the text has neither.
  * With `perceived_levels` the charitable reading: a perceptible request is in the level of its *remaining*
    execution time, and ordered by that. Without, both the whole T and the level ignore how much of it is
    done.
"""

from __future__ import annotations

from scheduler_svc.core.estimates.lengths import TokensLeft
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.policies.base import (
    STEADY_S,
    Estimate,
    Levels,
    Policy,
    arrival_s,
    estimate,
    estimate_by_length,
    rank_key,
    tokens_left,
)
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import STABLE_ROUNDS, Request

STABLE_RANGE = 0.05
"""Our choice."""


class LapsSdPaper(Policy):
    """The paper's algorithm, for comparison. Known flaw: every request is run for a while before an estimate
    is trusted.
    """

    name = "laps-sd-paper"
    has_levels = True
    looks_back = True

    def __init__(self, settings: CoreSettings) -> None:
        super().__init__(settings)
        self._levels = Levels(settings)

    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Return the rank: the level by attained service, the index by attained or perceived service."""
        perceptible = _is_perceptible(request)
        in_level_s = in_queue_s = request.attained_s
        if not perceptible:
            found = estimate_by_length(request, priors)
        else:
            left = tokens_left(request, priors)
            found = _estimate(request, priors, left)
            if self.settings.perceived_levels:
                in_level_s = in_queue_s = found.decoding_s
            else:
                in_queue_s = found.decoding_s * (request.emitted + left.mean) / left.mean
        return rank_key(
            request,
            found,
            STEADY_S + in_queue_s + arrival_s(request),
            counts_resuming=False,
            level=self._levels.of(in_level_s),
            perceptible=perceptible,
        )

    def ordered_by(self, request: Request) -> str:
        """Return the attained or perceived service, as a text for people."""
        rank = request.rank
        if rank.perceptible:
            whole = "left" if self.settings.perceived_levels else "in all"
            return f"an execution time of about {rank.index_s - STEADY_S:.3g} s {whole} (level {rank.level})"
        return f"{request.attained_s:.3g} s of service so far (level {rank.level})"


def _is_perceptible(request: Request) -> bool:
    before = request.rank_before
    if before is not None and before.perceptible:
        return True
    seen = request.late_acceptance
    return len(seen) == STABLE_ROUNDS and max(seen) - min(seen) < STABLE_RANGE


def _estimate(request: Request, priors: Priors, left: TokensLeft) -> Estimate:
    """Return the estimate T = L / (n·A + 1) · (n·T_SSM + T_LLM), here for the tokens that are left."""
    n = request.drafted / request.rounds
    acceptance = request.accepted / request.drafted
    note = f"{acceptance:.0%} of its drafted tokens were accepted so far"
    low, high = left.low / left.mean, left.high / left.mean
    return estimate(request, priors, left, n * acceptance + 1, low, high, note=note)
