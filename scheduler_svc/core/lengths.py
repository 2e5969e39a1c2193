"""How many output tokens a request still has, given how many it has emitted.

Two sources: the lengths that its class had before (`LengthTable`, a residual-life table), and a guess for this very
request (the client's hint or a worker's prediction), of which only the observed error is believed (`GuessError`).

Two summaries of what is left. The mean (`left`) says how long it will take. `gittins_tokens_left` says how soon it
should run when nothing but its class is known: it looks only as far ahead as it pays, so a request that may well end
soon runs soon, however long the few that do not end then go on.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import NormalDist
from typing import Final, final

DEFAULT_LOG_MEAN = math.log(150)
DEFAULT_LOG_SPREAD = 1.0
"""Output lengths with no history: chat-like, lognormal(ln 150, 1.0). Our choice."""
DEFAULT_WEIGHT = 8.0
"""Requests that the default counts for in the table of all classes, and that table in the one of a class."""
LOG_LENGTHS_WEIGHT = 2.0
"""Requests that the default counts for in the mean and spread of ln(length). Less than in the table: a few requests tell
two numbers, not 150 bins. Our choice; at 8, requests of equal lengths were taken for unequal ones for hundreds of ends."""
FORGET_REQUESTS = 1000.0
GUESS_LOG_SPREAD = 0.7
"""Error of a guess (standard deviation of ln(true/guess)) with no history: between an optimistic 0.3 and the 1.0
and more of real predictors."""
GUESS_WEIGHT = 8.0
"""Requests that the assumption about guesses counts for."""
GUESS_FORGET = 300.0
LEAST_LOG_SPREAD = 0.01
CREDIBLE = (0.1, 0.9)
"""The interval that estimates report."""
BIN_RATIO = 1.1
BINS = 150
_EDGES = [0.0, *(BIN_RATIO**i for i in range(BINS))]
"""Bin i holds the lengths in (edge i, edge i+1]."""
_MIDDLES = [(low + high) / 2 for low, high in pairwise(_EDGES)]
_STANDARD = NormalDist()
_below = _STANDARD.inv_cdf
_ROOT_HALF = math.sqrt(0.5)
# Parts of what every rank of a guessed request computes.
_LEAST_VARIANCE = LEAST_LOG_SPREAD**2
_GUESS_PRIOR = GUESS_WEIGHT * GUESS_LOG_SPREAD**2
_LENGTH_PRIOR = LOG_LENGTHS_WEIGHT * (DEFAULT_LOG_MEAN**2 + DEFAULT_LOG_SPREAD**2)
_NOTHING = 1e-9
"""A tail thinner than this says nothing about what follows."""


@final
@dataclass(slots=True)
class TokensLeft:
    """Expected output tokens that remain, with a credible interval."""

    mean: Final[float]
    low: Final[float]
    high: Final[float]
    basis: Final[str]

    def __init__(self, mean: float, low: float, high: float, basis: str) -> None:
        self.mean = mean
        self.low = low
        self.high = high
        self.basis = basis


def _lognormal_masses(log_mean: float, log_spread: float) -> list[float]:
    below = [0.0, *(_STANDARD.cdf((math.log(edge) - log_mean) / log_spread) for edge in _EDGES[1:])]
    return [high - low for low, high in pairwise(below)]


def _sums_from(values: list[float]) -> list[float]:
    """At i the sum of the values from i on; one more than values, ending in 0."""
    return [*accumulate(reversed(values), initial=0.0)][::-1]


DEFAULT_MASSES = _lognormal_masses(DEFAULT_LOG_MEAN, DEFAULT_LOG_SPREAD)


class LengthTable:
    """Output lengths of one class as a histogram with logarithmic bins, forgetting slowly, and its residual life.

    The residual life is built from the histogram at intervals (`stale` says when), so that a rank is a look-up.
    """

    def __init__(self) -> None:
        self.counts = [0.0] * BINS
        self.weight = 0.0
        self._since_built = 0
        self._basis = ""
        self._basis_weight = -1.0
        self._masses = DEFAULT_MASSES
        self._build()

    @property
    def masses(self) -> list[float]:
        """Share of the lengths in each bin, as of the last build."""
        return self._masses

    @property
    def basis(self) -> str:
        """What an estimate by this table rests on, for people; written once for each weight, since every rank has it."""
        if self._basis_weight != self.weight:
            self._basis_weight = self.weight
            self._basis = f"lengths of {self.weight:.0f} requests of its class"
        return self._basis

    @property
    def stale(self) -> bool:
        """Whether enough was observed since the last build to make another worth it."""
        return self._since_built > 0.05 * self.weight

    def observe(self, length: int) -> None:
        """A request ended by itself after so many tokens."""
        keep = 1 - 1 / FORGET_REQUESTS
        self.counts = [count * keep for count in self.counts]
        self.counts[min(bisect_left(_EDGES, length) - 1, BINS - 1)] += 1
        self.weight = self.weight * keep + 1
        self._since_built += 1

    def rebuild(self, prior_masses: list[float]) -> None:
        """Take up what was observed; the prior counts for `DEFAULT_WEIGHT` requests."""
        total = self.weight + DEFAULT_WEIGHT
        self._masses = [
            (count + DEFAULT_WEIGHT * prior) / total
            for count, prior in zip(self.counts, prior_masses, strict=True)
        ]
        self._build()

    def _build(self) -> None:
        self._since_built = 0
        # Sums over the bins from i on: the share of lengths there, and share × length.
        self._tail = _sums_from(self._masses)
        self._moment = _sums_from(
            [mass * middle for mass, middle in zip(self._masses, _MIDDLES, strict=True)]
        )
        self._negative_tail = [-share for share in self._tail]

        self._build_hull()

    def _build_hull(self) -> None:
        """For `gittins_tokens_left`: from each edge, the edge at which it is best to stop and look again.

        Each edge is a point (share that has ended, tokens served per request so far). The cheapest way on from a point
        is the slope to a later one that is least: the next corner of the lower convex hull of all later points.
        """
        tail, moment, edges = self._tail, self._moment, _EDGES
        ended = [1.0 - share for share in tail]
        # The integral of the tail from 0: the expected length, cut off at the edge.
        served = [moment[0] - moment[i] + edges[i] * tail[i] for i in range(BINS + 1)]
        following = [BINS] * (BINS + 1)
        for i in range(BINS - 1, -1, -1):
            stop = i + 1
            x, y = ended[i], served[i]
            while stop < BINS:
                beyond = following[stop]
                if (served[stop] - y) * (ended[beyond] - x) < (served[beyond] - y) * (ended[stop] - x):
                    break
                stop = beyond
            following[i] = stop
        self._following = following

    def _beyond(self, length: float) -> tuple[float, float]:
        """Share of the lengths beyond `length`, and share × length over them; flat inside a bin."""
        i = bisect_right(_EDGES, length) - 1
        if i >= BINS:
            return 0.0, 0.0
        inside = self._masses[i] * (_EDGES[i + 1] - length) / (_EDGES[i + 1] - _EDGES[i])
        return self._tail[i + 1] + inside, self._moment[i + 1] + inside * (_EDGES[i + 1] + length) / 2

    def _length_at(self, share: float) -> float:
        """The length that this share (less than all) of the lengths exceeds."""
        i = bisect_left(self._negative_tail, -share)
        in_bin = (share - self._tail[i]) / (self._tail[i - 1] - self._tail[i])
        return _EDGES[i] - in_bin * (_EDGES[i] - _EDGES[i - 1])

    def left(self, emitted: int, most: int, basis: str) -> TokensLeft:
        """Given `emitted` so far, and never more than `most` in all."""
        survivors, moment = self._beyond(emitted)
        if survivors < _NOTHING:
            return _lindy(emitted, most)
        cut, cut_moment = self._beyond(most)
        mean = (moment - cut_moment + cut * most) / survivors - emitted
        low = self._length_at(survivors * (1 - CREDIBLE[0]))
        high = self._length_at(survivors * (1 - CREDIBLE[1]))
        return _bounded(mean, low - emitted, high - emitted, most - emitted, basis)

    def gittins_tokens_left(self, emitted: int, most: int) -> float:
        """Tokens left as the Gittins index counts them, given `emitted` so far and never more than `most` in all:

            min over stops s > emitted of  E[min(L, s) − emitted | L > emitted] / P(L ≤ s | L > emitted)

        the fewest expected tokens per expected end (Gittins 1979; Aalto, Ayesta and Righter 2009). Serving the least
        first minimises the mean latency on one server when only the distribution of lengths is known. At most the mean
        of what is left, at least 1 for an unfinished request.
        """
        survivors, moment = self._beyond(emitted)
        if survivors < _NOTHING:
            return _lindy(emitted, most).mean
        cut, cut_moment = self._beyond(most)
        to_the_limit = (moment - cut_moment + cut * most) / survivors - emitted
        # Along the corners the price falls, then rises. A stop beyond `most` costs more than to go on to the limit.
        best, stop = math.inf, bisect_right(_EDGES, emitted)
        while True:
            ending = survivors - self._tail[stop]
            served = moment - self._moment[stop] + _EDGES[stop] * self._tail[stop] - emitted * survivors
            price = served / ending if ending > 0 else math.inf
            if price > best or stop == BINS:
                break
            best = price
            stop = self._following[stop]
        best = min(best, price, to_the_limit)
        return min(max(best, 1.0), max(1.0, most - emitted))


@dataclass(slots=True)
class GuessError:
    """What guesses of one kind were worth in one class: ln(true length / guess), decayed."""

    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def observe(self, guess: float, length: int) -> None:
        """A request that somebody guessed had this length."""
        keep = 1 - 1 / GUESS_FORGET
        error = math.log(length / guess)
        self.weight = self.weight * keep + 1
        self.total = self.total * keep + error
        self.squares = self.squares * keep + error * error

    @property
    def bias(self) -> float:
        """Mean of the error; 0 with no history."""
        return self.total / (self.weight + GUESS_WEIGHT)

    @property
    def variance(self) -> float:
        """Mean square around the bias."""
        weight = self.weight + GUESS_WEIGHT
        bias = self.total / weight
        return max(_LEAST_VARIANCE, (self.squares + _GUESS_PRIOR) / weight - bias * bias)


@dataclass(slots=True)
class LogLengths:
    """Mean and spread of ln(length) in one class, decayed: what a guess is shrunk towards."""

    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def observe(self, length: int) -> None:
        """A request ended by itself after so many tokens."""
        keep = 1 - 1 / FORGET_REQUESTS
        log = math.log(length)
        self.weight = self.weight * keep + 1
        self.total = self.total * keep + log
        self.squares = self.squares * keep + log * log

    @property
    def mean(self) -> float:
        """Mean of ln(length)."""
        return (self.total + LOG_LENGTHS_WEIGHT * DEFAULT_LOG_MEAN) / (self.weight + LOG_LENGTHS_WEIGHT)

    @property
    def variance(self) -> float:
        """Of ln(length)."""
        weight = self.weight + LOG_LENGTHS_WEIGHT
        mean = (self.total + LOG_LENGTHS_WEIGHT * DEFAULT_LOG_MEAN) / weight
        return max(_LEAST_VARIANCE, (self.squares + _LENGTH_PRIOR) / weight - mean * mean)


def left_by_guess(
    guess: float, error: GuessError, lengths: LogLengths, emitted: int, most: int, basis: str
) -> TokensLeft:
    """Tokens left when somebody guessed the length of this very request.

    The guess, less its usual bias, and the lengths of the class are two measurements of ln(length), weighted by
    their precision; the result is cut off below at what was emitted and above at `most`.
    """
    variance_guess, variance_class = error.variance, lengths.variance
    both = variance_guess + variance_class
    spread = math.sqrt(variance_guess * variance_class / both)
    centre = (variance_class * (math.log(guess) + error.bias) + variance_guess * lengths.mean) / both
    z = (math.log(emitted) - centre) / spread if emitted else -math.inf
    if z > 5:
        # Far beyond the guess: the tail of a lognormal there falls off like an exponential of this length.
        mean = emitted * spread / z
        return _bounded(mean, 0.1 * mean, 2.3 * mean, most - emitted, basis)
    survivors = _above(z)
    z_most = (math.log(most) - centre) / spread
    whole = math.exp(centre + spread * spread / 2)
    inside = whole * (_above(z - spread) - _above(z_most - spread))
    mean = (inside + most * _above(z_most)) / survivors - emitted
    low = math.exp(centre - spread * _below(survivors * (1 - CREDIBLE[0]))) - emitted
    high = math.exp(centre - spread * _below(survivors * (1 - CREDIBLE[1]))) - emitted
    return _bounded(mean, low, high, most - emitted, basis)


def _above(z: float) -> float:
    """The chance of more than z standard deviations above the mean of a normal distribution."""
    return 0.5 * math.erfc(z * _ROOT_HALF)


def _lindy(emitted: int, most: int) -> TokensLeft:
    """Longer than anything seen: it may go on for about as long as half of what it has."""
    guess = max(1.0, emitted / 2)
    return _bounded(guess, guess / 10, guess * 10, most - emitted, "longer than any request before")


def _bounded(mean: float, low: float, high: float, most: int, basis: str) -> TokensLeft:
    """At least one token is left of an unfinished request, at most what its limit allows."""
    # Without min and max: this is part of every rank.
    bound = most if most > 1.0 else 1.0
    mean = bound if mean > bound else mean if mean > 1.0 else 1.0
    low = mean if low > mean else low if low > 1.0 else 1.0
    high = bound if high > bound else high
    return TokensLeft(mean, mean if low > mean else low, high if high > mean else mean, basis)
