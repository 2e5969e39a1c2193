"""Errors of the estimates of remaining service: the estimate at some moments, against the service charged
afterwards.

A moment must be known when it comes, from what the request has done so far. "Half-way" is not: which round
was half-way is known only afterwards, and estimates that are selected by the outcome look better or worse
than they were. Only requests that this core knew from their arrival and that ended by themselves are judged:
a new leader does not have the estimates of the one before, and a cancelled request was cut short.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, final

from scheduler_svc.core.estimates.basis import Basis
from scheduler_svc.core.native import mypyc_attr

MOST_RATIO: Final = 1024.0
"""Ratios of actual to predicted service are limited to 1/MOST_RATIO … MOST_RATIO."""
BINS_PER_OCTAVE: Final = 8
SETTLED_ROUNDS: Final = 32


class Moment(enum.StrEnum):
    """When an estimate was made."""

    # Looked up for each request of each round; the hash of an enum's member is a function in Python.
    __hash__ = str.__hash__

    ARRIVAL = "arrival"
    FIRST_ROUND = "first_round"
    """After the first round that verified something."""
    PERCEPTIBLE = "perceptible"
    """The first time that its policy called the request perceptible, as of its arrival or of a round."""
    SETTLED = "round_32"
    """After `SETTLED_ROUNDS` rounds: the estimate depends on its own acceptance."""


ALL_MOMENTS: Final = len(Moment)


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class KeptEstimate:
    """Estimate for a request at one moment, and the service charged until then."""

    remaining_s: Final[float]
    low_s: Final[float]
    high_s: Final[float]
    """The remaining service, and the reported interval that it should lie in with a probability of 80 %."""
    attained_s: Final[float]
    basis: Final[Basis]

    def __init__(
        self,
        remaining_s: float,
        low_s: float,
        high_s: float,
        attained_s: float,
        basis: Basis,
    ) -> None:
        self.remaining_s = remaining_s
        self.low_s = low_s
        self.high_s = high_s
        self.attained_s = attained_s
        self.basis = basis


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class Judged:
    """One estimate of a request that has ended."""

    moment: Final[Moment]
    basis: Final[Basis]
    ratio: Final[float]
    """Machine seconds charged after the moment, over those that were predicted."""
    covered: Final[bool]
    """Whether they lay in the interval that was reported with the estimate."""

    def __init__(self, moment: Moment, basis: Basis, ratio: float, covered: bool) -> None:
        self.moment = moment
        self.basis = basis
        self.ratio = ratio
        self.covered = covered


_OCTAVES: Final = int(math.log2(MOST_RATIO))


@dataclass(slots=True)
class ErrorSummary:
    """The log ratios, ln(actual/predicted), of one moment and basis: 0 is right, ln 2 is twice as long as
    estimated.

    Estimates are means, so their log ratios are below 0 on average even when they are right (a mean lies
    above the median of what is skewed to the right); `actual_s` over `predicted_s` is then 1.
    """

    count: int = 0
    predicted_s: float = 0.0
    actual_s: float = 0.0
    """Sums over the requests."""
    covered: int = 0
    """Requests whose service lay in the reported interval."""
    total: float = 0.0
    squares: float = 0.0
    bins: list[int] = field(default_factory=lambda: [0] * (2 * _OCTAVES * BINS_PER_OCTAVE))

    def add(self, predicted_s: float, actual_s: float) -> float:
        """Add an estimate; return its ratio of actual to predicted service, limited by `MOST_RATIO`."""
        ratio = min(max(actual_s / predicted_s, 1 / MOST_RATIO), MOST_RATIO)
        log = math.log(ratio)
        self.count += 1
        self.predicted_s += predicted_s
        self.actual_s += actual_s
        self.total += log
        self.squares += log * log
        at = int((log / math.log(2) + _OCTAVES) * BINS_PER_OCTAVE)
        self.bins[min(at, len(self.bins) - 1)] += 1
        return ratio

    @property
    def coverage(self) -> float:
        """Share of the requests whose service lay in the reported interval: 0.8 if the intervals are right."""
        return self.covered / self.count

    @property
    def mean(self) -> float:
        """Mean of the log ratios."""
        return self.total / self.count

    @property
    def rms(self) -> float:
        """Root mean square of the log ratios: bias and spread together."""
        return math.sqrt(self.squares / self.count)

    def quantile(self, share: float) -> float:
        """The log ratio that this share (0 to 1) does not exceed, to the middle of one of `BINS_PER_OCTAVE`
        bins."""
        below = accumulate(self.bins)
        at = next(at for at, count in enumerate(below) if count and count >= share * self.count)
        return ((at + 0.5) / BINS_PER_OCTAVE - _OCTAVES) * math.log(2)


class EstimateErrors:
    """All estimates judged since this core began. They are not learned from, and are not on the record."""

    def __init__(self) -> None:
        self.by: dict[tuple[Moment, Basis], ErrorSummary] = {}
        self.latest: list[Judged] = []
        """Estimates judged in the last step, for metrics."""

    def begin_step(self) -> None:
        """Forget the estimates judged in the step before."""
        self.latest = []

    def judge(self, kept: dict[Moment, KeptEstimate], attained_s: float) -> None:
        """Judge the estimates of a request that ended by itself after `attained_s` machine seconds."""
        for moment, estimate in kept.items():
            summary = self.by.get((moment, estimate.basis))
            if summary is None:
                summary = self.by[moment, estimate.basis] = ErrorSummary()
            actual_s = attained_s - estimate.attained_s
            ratio = summary.add(estimate.remaining_s, actual_s)
            covered = estimate.low_s <= actual_s <= estimate.high_s
            summary.covered += covered
            self.latest.append(Judged(moment, estimate.basis, ratio, covered))

    def of(self, moment: Moment) -> ErrorSummary:
        """Return the summary of a moment over all sources."""
        whole = ErrorSummary()
        for (when, _), part in self.by.items():
            if when is moment:
                whole.count += part.count
                whole.predicted_s += part.predicted_s
                whole.actual_s += part.actual_s
                whole.covered += part.covered
                whole.total += part.total
                whole.squares += part.squares
                whole.bins = [a + b for a, b in zip(whole.bins, part.bins, strict=True)]
        return whole
