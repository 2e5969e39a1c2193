"""Shortest predicted remaining length first, with preemption; acceptance is ignored."""

from __future__ import annotations

from scheduler_svc.core.policies.base import resume_cost_s, setup_s, tokens_left
from scheduler_svc.core.priors import Priors
from scheduler_svc.core.rank import RankKey, Remaining, pack_rank_class
from scheduler_svc.core.request import Request
from scheduler_svc.core.settings import CoreSettings


class SrptLength:
    """What `laps-sd` is compared with: the same estimator of length, the same cost, every request with its class's
    tokens per round.
    """

    name = "srpt-length"

    def __init__(self, settings: CoreSettings) -> None:
        del settings  # nothing to set

    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Predicted tokens that remain, at the machine's cost of a token."""
        facts = request.facts
        left = tokens_left(request, priors)
        tokens_per_round = priors.mean_tokens_per_round(facts.workload_class)
        seconds = priors.cost.share_s(request.context_tokens + left.mean / 2) / tokens_per_round
        resume_s = resume_cost_s(request, priors)
        setup = setup_s(request, resume_s)
        return RankKey(
            rank_class=pack_rank_class(facts.priority, 0),
            index_s=left.mean * seconds,
            resume_cost_s=resume_s,
            pinned=False,
            level=0,
            perceptible=False,
            remaining=Remaining(
                left.mean * seconds + setup,
                left.low * seconds + setup,
                left.high * seconds + setup,
                left.basis,
            ),
        )
