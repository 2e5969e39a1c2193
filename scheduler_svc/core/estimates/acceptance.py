"""Tokens that a request gains per round, estimated from its own rounds and shrunk to its class.

A class has two statistics. `AcceptanceStatistics` counts tokens per round at any draft length: the mean that
requests are shrunk to. `PositionStatistics` counts by draft position, which does not depend on the draft
length, and so gives the tokens per round at any draft length. `Priors` uses it to convert the mean from the
draft lengths that it was observed with to the present ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
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
RECENT_ROUNDS: Final = 100.0
"""Rounds over which the present draft length is averaged."""
MAX_POSITIONS: Final = 64
"""Draft positions that have statistics of their own; no worker drafts more."""
DEFAULT_ACCEPTANCE: Final = 0.5
"""Acceptance of a draft position without history. With long drafts it gives `DEFAULT_TOKENS_PER_ROUND`."""
POSITION_WEIGHT: Final = 20.0
"""Weight of the guess for a position (the position before it, or all classes), in tests. Our choice."""
ACCEPTANCE_LIMITS = (0.001, 0.999)
REBUILD_ROUNDS: Final = 64.0
"""Rounds between two builds of the table of tokens by draft length; fewer while there is little history."""
_LARGEST_UNIT: Final = 1e6


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
    drafted: float = 0.0
    drafted_of_late: float = 0.0
    """Tokens drafted per round, over recent rounds."""
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

    def observe_round(self, tokens: int, drafted: int, rounds: int = 1) -> None:
        """Learn from rounds in which a request gained `tokens` tokens and `drafted` were drafted, in all."""
        keep = 1 - rounds / FORGET_ROUNDS
        self.rounds = self.rounds * keep + rounds
        self.tokens = self.tokens * keep + tokens
        self.drafted = self.drafted * keep + drafted
        recent = min(self.rounds, RECENT_ROUNDS)
        self.drafted_of_late += (drafted - rounds * self.drafted_of_late) / max(recent, float(rounds))

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

    def mean(self, pooled: float, pool_weight: float, factor: float = 1.0) -> float:
        """Return the tokens per round, shrunk to `pooled` with the weight of `pool_weight` rounds. `factor`
        converts the observed tokens to the present draft length.
        """
        return (pool_weight * pooled + factor * self.tokens) / (pool_weight + self.rounds)

    def variances(self) -> tuple[float, float] | None:
        """Return (variance within requests, between requests) by one-way analysis of variance; None with too
        little history."""
        freedom_within = self.sum_n - self.requests
        if self.requests < ENOUGH_REQUESTS or freedom_within <= 0:
            return None
        within = self.sum_within / freedom_within
        between_squares = self.sum_nm2 - self.sum_nm**2 / self.sum_n
        typical_n = (self.sum_n - self.sum_n2 / self.sum_n) / (self.requests - 1)
        if typical_n <= 0:  # only of sums from the record of an earlier release, whose `sum_n2` decayed once
            return within, 0.0
        between = (between_squares / (self.requests - 1) - within) / typical_n
        return within, max(between, 0.0)


@dataclass(slots=True)
class PositionStatistics:
    """Acceptance of draft tokens by position in one workload class, given that they were compared.

    A draft token is compared only if all before it were accepted. So with an acceptance of p_i at position i
    a round that drafts n tokens gains `1 + p_1 + p_1·p_2 + … + p_1·…·p_n` on average (Leviathan et al. 2023,
    section 3.1, there with equal p).
    """

    tested: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    """Decayed sums by position."""
    unit: float = 1.0
    """Weight of the newest round in these sums. It grows, which is cheaper than to decay all sums."""
    rounds: float = 0.0
    since_built: float = 0.0
    rates: list[float] = field(default_factory=lambda: [DEFAULT_ACCEPTANCE])
    """p_1, p_2, …, as of the last build; positions beyond are like the last."""
    by_length: list[float] = field(default_factory=lambda: [1.0, 1.0 + DEFAULT_ACCEPTANCE])
    """Tokens per round that drafts 0, 1, 2 … tokens, as of the last build."""

    def observe(self, tested: tuple[int, ...], accepted: tuple[int, ...], rounds: int = 1) -> None:
        """Learn from rounds: draft tokens compared and accepted, by position. Positions beyond
        `MAX_POSITIONS` are ignored."""
        positions = min(len(tested), MAX_POSITIONS)
        unit, sums_tested, sums_accepted = self.unit, self.tested, self.accepted
        if positions > len(sums_tested):
            more = positions - len(sums_tested)
            sums_tested += [0.0] * more
            sums_accepted += [0.0] * more
        for i in range(min(positions, len(accepted))):
            # Not in place: compiled, that would be an addition of two objects.
            sums_tested[i] = sums_tested[i] + unit * tested[i]
            if count := accepted[i]:
                sums_accepted[i] = sums_accepted[i] + unit * count
        keep = 1 - rounds / FORGET_ROUNDS
        self.rounds = self.rounds * keep + rounds
        self.since_built += rounds
        self.unit = unit / keep
        if self.unit > _LARGEST_UNIT:
            self.tested = [value / self.unit for value in self.tested]
            self.accepted = [value / self.unit for value in self.accepted]
            self.unit = 1.0

    @property
    def stale(self) -> bool:
        """Return whether enough was observed since the last build for another one."""
        return self.since_built >= min(REBUILD_ROUNDS, 1 + 0.1 * self.rounds)

    def rebuild(self, pool: list[float] | None) -> None:
        """Build the table from what was observed. With few tests the rate of a position is guessed from the
        one before it; in a class it changes from there as the rates over all classes do (`pool`).
        """
        self.since_built = 0.0
        low, high = ACCEPTANCE_LIMITS
        weight = POSITION_WEIGHT * self.unit
        drift = [0.0, *(after - before for before, after in pairwise(pool))] if pool else []
        rate = pool[0] if pool else DEFAULT_ACCEPTANCE
        reached = tokens = 1.0
        rates, by_length = [], [1.0]
        for compared, kept, step in zip_longest(self.tested, self.accepted, drift, fillvalue=0.0):
            guess = rate + step
            rate = min(max((weight * guess + kept) / (weight + compared), low), high)
            reached *= rate
            tokens += reached
            rates.append(rate)
            by_length.append(tokens)
        if rates:
            self.rates, self.by_length = rates, by_length

    def tokens(self, draft_length: float) -> float:
        """Return the tokens per round at this draft length; between whole lengths by interpolation."""
        known = len(self.rates)
        if draft_length >= known:
            reached, rate = self.by_length[-1] - self.by_length[-2], self.rates[-1]
            return self.by_length[-1] + reached * rate * (1 - math.pow(rate, draft_length - known)) / (
                1 - rate
            )
        whole = int(draft_length)
        low, high = self.by_length[whole], self.by_length[whole + 1]
        return low + (draft_length - whole) * (high - low)


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
