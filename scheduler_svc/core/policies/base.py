"""What a policy is, and the arithmetic that several share."""

from __future__ import annotations

from typing import Protocol

from laps_sd.choose import Residency
from scheduler_svc.core.lengths import TokensLeft
from scheduler_svc.core.priors import Priors
from scheduler_svc.core.rank import RankKey
from scheduler_svc.core.request import Request


class Policy(Protocol):
    """Deterministic: the same request and priors give the same rank."""

    @property
    def name(self) -> str:
        """As configured."""

    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Where the request stands now; `request.rank_before` is its rank so far, if it has one."""


def tokens_left(request: Request, priors: Priors) -> TokensLeft:
    """Output tokens that remain, by the best guess there is."""
    facts = request.facts
    return priors.tokens_left(
        facts.workload_class,
        request.emitted,
        facts.max_tokens,
        request.expected_total,
        request.predicted_by_worker,
    )


def resume_cost_s(request: Request, priors: Priors) -> float:
    """Machine seconds to take it up from where its KV lies; from the device, to compute it again if it were evicted."""
    if request.residency is Residency.HOST:
        return priors.cost.swap_in_s(request.context_tokens)
    return priors.cost.prefill_share_s(request.context_tokens)


def setup_s(request: Request, resume_s: float) -> float:
    """The part of its remaining service that is no decoding: what must be computed or moved before its next round."""
    return 0.0 if request.residency is Residency.DEVICE else resume_s
