"""Tokens that a request gains per round, estimated from its own rounds and shrunk to its class."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, final

from scheduler_svc.core.native import mypyc_attr

DEFAULT_TOKENS_PER_ROUND: Final = 2.0
"""Without any history. Any value serves, because only differences between requests change an order."""
DEFAULT_SHRINKAGE: Final = 20.0
"""n0 with no history: our choice, found by simulation."""
LEAST_SHRINKAGE: Final = 4.0
MOST_SHRINKAGE: Final = 200.0
AUTOCORRELATION: Final = 3.0
"""n0 = this × within/between variance: rounds of one request are not independent of each other. Our choice,
found by simulation."""
DEFAULT_WEIGHT_ROUNDS: Final = 50.0
POOL_WEIGHT_ROUNDS: Final = 200.0
"""Weight of the mean over all classes in the mean of one class, in rounds."""
FORGET_ROUNDS: Final = 20_000.0
FORGET_REQUESTS: Final = 500.0
ENOUGH_REQUESTS: Final = 8.0
"""Ended requests before variances are used."""


@mypyc_attr(acyclic=True, free_list_len=1)
@final
@dataclass(slots=True)
class TokensPerRound:
    """Mean, and its standard deviation (`spread`) as a share of the mean."""

    mean: Final[float]
    spread: Final[float]

    def __init__(self, mean: float, spread: float) -> None:
        self.mean = mean
        self.spread = spread


@dataclass(slots=True)
class AcceptanceStatistics:
    """Decayed sums over the rounds and the ended requests of one workload class."""

    rounds: float = 0.0
    tokens: float = 0.0
    requests: float = 0.0
    """Ended requests. The fields below are sums over them; each has n rounds and a mean of m tokens per
    round."""
    sum_n: float = 0.0
    sum_n2: float = 0.0
    """Squares of the weighted n: each decays twice, so that the sum is at most `sum_n` squared."""
    sum_nm: float = 0.0
    sum_nm2: float = 0.0
    sum_within: float = 0.0
    """Squared deviations of rounds from the mean of their own request."""

    def observe_round(self, tokens: int, rounds: int = 1) -> None:
        """Learn from rounds in which a request gained `tokens` tokens in all."""
        keep = 1 - rounds / FORGET_ROUNDS
        self.rounds = self.rounds * keep + rounds
        self.tokens = self.tokens * keep + tokens

    def observe_end(self, rounds: int, tokens: float, squares: float) -> None:
        """Learn from an ended request: its rounds, the sum of their tokens and of their squared tokens."""
        mean = tokens / rounds
        keep = 1 - 1 / FORGET_REQUESTS
        self.requests = self.requests * keep + 1
        self.sum_n = self.sum_n * keep + rounds
        self.sum_n2 = self.sum_n2 * keep * keep + rounds * rounds
        self.sum_nm = self.sum_nm * keep + tokens
        self.sum_nm2 = self.sum_nm2 * keep + tokens * mean
        self.sum_within = self.sum_within * keep + max(0.0, squares - tokens * mean)

    def mean(self, pooled: float, pool_weight: float) -> float:
        """Return the tokens per round, shrunk to `pooled` with the weight of `pool_weight` rounds."""
        return (pool_weight * pooled + self.tokens) / (pool_weight + self.rounds)

    def variances(self) -> tuple[float, float] | None:
        """Return (variance within requests, between requests) by one-way analysis of variance; None with too
        little history."""
        freedom_within = self.sum_n - self.requests
        if self.requests < ENOUGH_REQUESTS or freedom_within <= 0:
            return None
        within = self.sum_within / freedom_within
        between_squares = self.sum_nm2 - self.sum_nm**2 / self.sum_n
        typical_n = (self.sum_n - self.sum_n2 / self.sum_n) / (self.requests - 1)
        between = (between_squares / (self.requests - 1) - within) / typical_n
        return within, max(between, 0.0)


def shrinkage(variances: tuple[float, float] | None) -> float:
    """Return n0: the weight of the class mean, in rounds of a request."""
    if variances is None:
        return DEFAULT_SHRINKAGE
    within, between = variances
    if between * MOST_SHRINKAGE <= AUTOCORRELATION * within:
        return MOST_SHRINKAGE
    return max(LEAST_SHRINKAGE, AUTOCORRELATION * within / between)


def tokens_per_round(mean: float, n0: float, within: float, rounds: int, emitted: int) -> TokensPerRound:
    """Return `(n0·m0 + emitted) / (n0 + rounds)`, with the spread that remains after `rounds` rounds."""
    estimate = (n0 * mean + emitted) / (n0 + rounds)
    return TokensPerRound(estimate, math.sqrt(AUTOCORRELATION * within / (n0 + rounds)) / estimate)
