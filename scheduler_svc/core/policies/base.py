"""The interface of a policy, and shared parts of several: the estimates, and the building of a rank from
them.

A policy computes a rank. It keeps no state of its own, so the past of a request that it needs is on the
request.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, final

from laps_sd.contract.choose import HYSTERESIS, ON_DEVICE, ON_HOST
from scheduler_svc.core.estimates.basis import Basis
from scheduler_svc.core.estimates.lengths import TokensLeft
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.native import mypyc_attr, vec
from scheduler_svc.core.rank import RankKey, Remaining, pack_rank_class
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state.request import Request

STEADY_S: Final = 1e4
"""Added to an index by policies that preempt between levels only. `laps_sd.contract.choose` lets a waiting
request displace a running one of its own class when its index is smaller by a tenth; with this in both, no
difference below a thousand seconds is a tenth."""
STEP: Final = math.log(1 + HYSTERESIS)
"""Width of a step of the index, as a difference of logarithms. Our choice: steps of 5 % and 10 % make no
difference, except that more requests are alike with 10 %."""
LEAST_COST_S: Final = 1e-9
"""Costs below this are one step; a worker may report rounds that took no time. In seconds."""
ARRIVAL_S: Final = 1e-11
"""Index per arrival: the older one first among equals, too little to count otherwise."""


# A policy can be tried out without compiling it: the simulator's oracle is one.
@mypyc_attr(allow_interpreted_subclasses=True)
class Policy(ABC):
    """Deterministic: the same request and priors give the same rank."""

    name: ClassVar[str]
    """Name in the configuration."""
    has_levels: ClassVar[bool] = False
    """True if it sorts requests into levels; otherwise all are in level 0 and no level is shown."""
    looks_back: ClassVar[bool] = False
    """True if its ranks use `Request.late_acceptance`, which is kept for such policies only."""

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings

    @abstractmethod
    def rank(self, request: Request, priors: Priors) -> RankKey:
        """Return the present rank of the request; `request.rank_before` is its rank so far, if it has one."""

    def ordered_by(self, request: Request) -> str:
        """Return the reason for the place of a ranked request, for people: "a request with …". Names no other
        request.
        """
        level = f" (level {request.rank.level})" if self.has_levels else ""
        return f"about {request.rank.remaining.mean_s:.3g} s left{level}"


@mypyc_attr(acyclic=True, free_list_len=1)
@final
@dataclass(slots=True)
class Estimate:
    """Estimated remaining cost of a request."""

    decoding_s: Final[float]
    """Machine seconds of decoding that are left."""
    resume_s: Final[float]
    """Machine seconds to take it up again, as in `resume_cost_s`."""
    remaining: Final[Remaining]
    """Decoding, and the context that must be computed or moved before it."""

    def __init__(self, decoding_s: float, resume_s: float, remaining: Remaining) -> None:
        self.decoding_s = decoding_s
        self.resume_s = resume_s
        self.remaining = remaining


def estimate_by_length(request: Request, priors: Priors) -> Estimate:
    """Return the estimate by the tokens left, at the pace of its class, without its own acceptance."""
    left = tokens_left(request, priors)
    pace = priors.mean_tokens_per_round(request.facts.workload_class)
    return estimate(request, priors, left, pace, left.low / left.mean, left.high / left.mean)


def estimate_by_acceptance(request: Request, priors: Priors) -> Estimate:
    """Return the estimate by the tokens left, at its own pace, shrunk towards that of its class."""
    left = tokens_left(request, priors)
    pace = priors.tokens_per_round(request.facts.workload_class, request.rounds, request.emitted)
    low, high = _widen(left.low / left.mean, left.high / left.mean, pace.spread)
    return estimate(request, priors, left, pace.mean, low, high, request.rounds)


def estimate(
    request: Request,
    priors: Priors,
    left: TokensLeft,
    pace: float,
    low: float,
    high: float,
    own_rounds: int | None = None,
    note: str = "",
) -> Estimate:
    """Return the estimate at `pace` tokens per round, each round at the machine's cost for a context half way
    to its end; `low` and `high` are the ends of the interval as shares of the mean.
    """
    decoding_s = left.mean * (priors.cost.share_s(request.context_tokens + left.mean / 2) / pace)
    resume_s = resume_cost_s(request, priors)
    setup_s = 0.0 if request.residency is ON_DEVICE else resume_s
    remaining = Remaining(
        decoding_s + setup_s,
        decoding_s * low + setup_s,
        decoding_s * high + setup_s,
        left.basis,
        own_rounds,
        note,
    )
    return Estimate(decoding_s, resume_s, remaining)


def rank_key(
    request: Request,
    found: Estimate,
    index_s: float,
    *,
    counts_resuming: bool,
    level: int = 0,
    perceptible: bool | None = None,
    pinned: bool = False,
) -> RankKey:
    """Return the rank with this index. `counts_resuming`: the cost of taking the request up is part of its
    place.
    """
    return RankKey(
        rank_class=pack_rank_class(request.facts.priority, level),
        index_s=index_s,
        resume_cost_s=found.resume_s if counts_resuming else 0.0,
        pinned=pinned,
        level=level,
        perceptible=perceptible,
        remaining=found.remaining,
    )


def tokens_left(request: Request, priors: Priors) -> TokensLeft:
    """Return the remaining output tokens, by the best guess available."""
    facts = request.facts
    if facts.runs_to_limit:
        left = max(1.0, float(facts.max_tokens - request.emitted))
        return TokensLeft(left, left, left, Basis.LIMIT)
    return priors.tokens_left(
        facts.workload_class, request.emitted, facts.max_tokens, request.guesses, facts.tenant
    )


def resume_cost_s(request: Request, priors: Priors) -> float:
    """Return the machine seconds to take it up from where its KV lies; from the device, to compute it again
    if it were evicted.
    """
    if request.residency is ON_HOST:
        return priors.cost.swap_in_s(request.context_tokens)
    if request.residency is not ON_DEVICE:
        return priors.cost.prefill_share_s(request.context_tokens - request.cached_tokens)
    return priors.cost.prefill_share_s(request.context_tokens)


def index_in_steps_s(request: Request, found: Estimate) -> float:
    """Return the index whose cost, set-up included, is the upper end of a step of `STEP`, with the arrival
    inside the step.

    A difference that may not displace a running request is too small to overtake a waiting one. Among
    requests of one step the order of arrival is the best one: it has the shortest longest wait.
    """
    setup_s = 0.0 if request.residency is ON_DEVICE else found.resume_s
    cost_s = found.decoding_s + setup_s
    step = math.ceil(math.log(cost_s if cost_s > LEAST_COST_S else LEAST_COST_S) / STEP)
    return math.exp(step * STEP) - setup_s + arrival_s(request)


def arrival_s(request: Request) -> float:
    """Return the part of an index that puts the older one first among equals."""
    return request.facts.sequence * ARRIVAL_S


class Levels:
    """Level 0 up to the base, level k up to base · factor^k (a rounding error more), the last one without
    end."""

    def __init__(self, settings: CoreSettings) -> None:
        self._ends_s: Final = vec[float](
            [
                settings.level_base_s * settings.level_factor ** (level + 1e-12)
                for level in range(settings.level_count - 1)
            ]
        )

    def of(self, service_s: float) -> int:
        """Return the level of `service_s` seconds of service."""
        ends_s = self._ends_s
        for level in range(len(ends_s)):
            if service_s <= ends_s[level]:
                return level
        return len(ends_s)


def _widen(low: float, high: float, spread: float) -> tuple[float, float]:
    """Add the uncertainty of the pace to that of the length, as independent factors around the estimate."""
    # Not `hypot` and powers, which cost more when compiled.
    pace = 1.28 * spread * (1.28 * spread)
    below, above = math.log(low), math.log(high)
    return math.exp(-math.sqrt(below * below + pace)), math.exp(math.sqrt(above * above + pace))
