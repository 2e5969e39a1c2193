"""How many tokens a request will gain per round: its own rounds, shrunk towards its class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

DEFAULT_TOKENS_PER_ROUND = 2.0
"""With no history at all. Any value serves: what counts is how requests differ from each other."""
DEFAULT_SHRINKAGE = 20.0
"""n0 with no history: our choice, found by simulation."""
SHRINKAGE_LIMITS = (4.0, 200.0)
AUTOCORRELATION = 3.0
"""n0 = this × within/between variance: rounds of one request are not independent of each other. Our choice, found by
simulation."""
DEFAULT_WEIGHT_ROUNDS = 50.0
POOL_WEIGHT_ROUNDS = 200.0
"""Rounds that the mean over all classes counts for in the mean of one."""
FORGET_ROUNDS = 20_000.0
FORGET_REQUESTS = 500.0
ENOUGH_REQUESTS = 8.0
"""Ended requests before variances are believed."""


class TokensPerRound(NamedTuple):
    """`mean`, and how far it may be off: the standard deviation as a share of the mean."""

    mean: float
    spread: float


@dataclass(slots=True)
class AcceptanceStatistics:
    """Decayed sums over the rounds and the ended requests of one workload class."""

    rounds: float = 0.0
    tokens: float = 0.0
    requests: float = 0.0
    """Ended requests; below, sums over them, with n rounds and a mean of m tokens per round each."""
    sum_n: float = 0.0
    sum_n2: float = 0.0
    sum_nm: float = 0.0
    sum_nm2: float = 0.0
    sum_within: float = 0.0
    """Squared deviations of rounds from the mean of their own request."""

    def observe_round(self, tokens: int) -> None:
        """A request gained so many tokens in one round."""
        keep = 1 - 1 / FORGET_ROUNDS
        self.rounds = self.rounds * keep + 1
        self.tokens = self.tokens * keep + tokens

    def observe_end(self, rounds: int, tokens: int, squares: int) -> None:
        """A request ended after so many rounds, with the sum of their tokens and of their squared tokens."""
        mean = tokens / rounds
        keep = 1 - 1 / FORGET_REQUESTS
        self.requests = self.requests * keep + 1
        self.sum_n = self.sum_n * keep + rounds
        self.sum_n2 = self.sum_n2 * keep + rounds * rounds
        self.sum_nm = self.sum_nm * keep + tokens
        self.sum_nm2 = self.sum_nm2 * keep + tokens * mean
        self.sum_within = self.sum_within * keep + max(0.0, squares - tokens * mean)

    def mean(self, pooled: float, pool_weight: float) -> float:
        """Tokens per round, drawn towards `pooled` as if that were known from `pool_weight` rounds."""
        return (pool_weight * pooled + self.tokens) / (pool_weight + self.rounds)

    def variances(self) -> tuple[float, float] | None:
        """(within a request, between requests) by one-way analysis of variance; None while there is too little."""
        freedom_within = self.sum_n - self.requests
        if self.requests < ENOUGH_REQUESTS or freedom_within <= 0:
            return None
        within = self.sum_within / freedom_within
        between_squares = self.sum_nm2 - self.sum_nm**2 / self.sum_n
        typical_n = (self.sum_n - self.sum_n2 / self.sum_n) / (self.requests - 1)
        between = (between_squares / (self.requests - 1) - within) / typical_n
        return within, max(between, 0.0)


def shrinkage(variances: tuple[float, float] | None) -> float:
    """n0: how many rounds of a request the mean of its class is worth."""
    low, high = SHRINKAGE_LIMITS
    if variances is None:
        return DEFAULT_SHRINKAGE
    within, between = variances
    if between * high <= AUTOCORRELATION * within:
        return high
    return max(low, AUTOCORRELATION * within / between)


def tokens_per_round(mean: float, n0: float, within: float, rounds: int, emitted: int) -> TokensPerRound:
    """`(n0·m0 + emitted) / (n0 + rounds)`, and the spread that is left after so many rounds."""
    estimate = (n0 * mean + emitted) / (n0 + rounds)
    return TokensPerRound(estimate, (AUTOCORRELATION * within / (n0 + rounds)) ** 0.5 / estimate)
