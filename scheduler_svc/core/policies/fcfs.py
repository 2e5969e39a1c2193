"""Run to completion in arrival order."""

from __future__ import annotations

from scheduler_svc.core.policies.base import resume_cost_s, tokens_left
from scheduler_svc.core.priors import Priors
from scheduler_svc.core.rank import RankKey, Remaining, pack_rank_class
from scheduler_svc.core.request import Request
from scheduler_svc.core.settings import CoreSettings


class Fcfs:
    """Index = arrival number; pinned, so that what runs is never paused. The estimate is for people only."""

    name = "fcfs"

    def __init__(self, settings: CoreSettings) -> None:
        del settings  # nothing to set

    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Arrival order, whatever it costs."""
        facts = request.facts
        left = tokens_left(request, priors)
        tokens_per_round = priors.mean_tokens_per_round(facts.workload_class)
        seconds = priors.cost.share_s(request.context_tokens) / tokens_per_round
        setup = resume_cost_s(request, priors) if not request.ran_here else 0.0
        return RankKey(
            rank_class=pack_rank_class(facts.priority, 0),
            index_s=float(facts.sequence),
            resume_cost_s=0.0,  # it would disturb the order
            pinned=True,
            level=0,
            perceptible=False,
            remaining=Remaining(
                left.mean * seconds + setup,
                left.low * seconds + setup,
                left.high * seconds + setup,
                left.basis,
            ),
        )
