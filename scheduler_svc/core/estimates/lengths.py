"""Expected remaining output tokens of a request, given how many it has emitted.

The estimate uses the earlier lengths of its class (`LengthTable`, a residual-life table). `guesses.py` adds
guesses of the length of this very request.

A request that its limit (`max_tokens`) cut says only that its output would have been longer. It counts as one of
those that came that far, and as no end: the estimate of Susarla and Van Ryzin (1976), which is that of Kaplan
and Meier with a prior. Where no request ended beyond the longest cut, lengths follow the prior.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, final

from scheduler_svc.core.estimates.basis import BY_CLASS, Basis
from scheduler_svc.core.native import append, mypyc_attr, vec

DEFAULT_LOG_MEAN: Final = math.log(150)
DEFAULT_LOG_SPREAD: Final = 1.0
"""Output lengths with no history: chat-like, lognormal(ln 150, 1.0). Our choice."""
SHAPE_PRIOR: Final = 2.0
"""Weight, in requests, of the lengths of all classes (for those: of the default) in the mean and spread of
ln(length) of one class."""
SHAPE_WEIGHT: Final = 30.0
"""Weight, in requests, of a lognormal of that mean and spread in the histogram: a few requests are enough to
learn two numbers, 150 bins take hundreds. Our choice."""
FIT_STEPS: Final = 4
"""Steps of expectation and maximization for the mean and spread of a class with cut requests. Our choice: where
half of 3,000 requests were cut at one limit, the mean of ln(length) was right to 0.15 after four."""
LEAST_LOG_SPREAD: Final = 0.03
"""Least spread of that lognormal: a third of a bin."""
FORGET_REQUESTS: Final = 1000.0
CREDIBLE = (0.1, 0.9)
"""The interval that estimates report."""
ABOVE_LOW: Final = 1 - CREDIBLE[0]
ABOVE_HIGH: Final = 1 - CREDIBLE[1]
"""Shares of the lengths that lie above its ends."""
BIN_RATIO: Final = 1.1
LOG_BIN: Final = math.log(BIN_RATIO)
BINS: Final = 150
EDGES: Final = [0.0, *(BIN_RATIO**i for i in range(BINS))]
"""Bin i holds the lengths in (edge i, edge i+1]."""
_EDGES: Final = vec[float](EDGES)
"""The same for arithmetic; bisection takes no array."""
_MIDDLES: Final = vec[float]([(low + high) / 2 for low, high in pairwise(EDGES)])
_LOG_MIDDLES: Final = vec[float]([math.log(max(1.0, middle)) for middle in _MIDDLES])
_KEEP: Final = 1 - 1 / FORGET_REQUESTS
_LARGEST_UNIT: Final = 1e9
_ROOT_HALF: Final = math.sqrt(0.5)
_ROOT_TWO_PI: Final = math.sqrt(2 * math.pi)
_NOTHING: Final = 1e-9
"""A tail thinner than this has no information about the lengths beyond."""


@mypyc_attr(acyclic=True, free_list_len=1)
@final
@dataclass(slots=True)
class TokensLeft:
    """Expected output tokens that remain, with a credible interval."""

    mean: Final[float]
    low: Final[float]
    high: Final[float]
    basis: Final[Basis]

    def __init__(self, mean: float, low: float, high: float, basis: Basis) -> None:
        self.mean = mean
        self.low = low
        self.high = high
        self.basis = basis


_erfc: Final = math.erfc  # compiled, such a name costs no look-up


def chance_above(z: float) -> float:
    """Return the probability of more than z standard deviations above the mean of a normal distribution."""
    return 0.5 * _erfc(z * _ROOT_HALF)


def density(z: float) -> float:
    """Return the density of a normal distribution z standard deviations above its mean, per standard deviation."""
    return math.exp(-z * z / 2) / _ROOT_TWO_PI


def _zeros() -> vec[float]:
    return vec[float]([0.0] * BINS)


def _shape(log_mean: float, log_variance: float) -> vec[float]:
    """Return the masses of a lognormal in each bin."""
    log_spread = math.sqrt(max(LEAST_LOG_SPREAD**2, log_variance))
    masses, before = _zeros(), 1.0
    for i in range(BINS):
        above = chance_above((i * LOG_BIN - log_mean) / log_spread)
        masses[i] = before - above
        before = above
    return masses


def _completed(ends: vec[float], cuts: vec[float], shape: vec[float]) -> vec[float]:
    """Return the requests in each bin, the cut ones included. They are spread over the lengths beyond their
    cut like the requests that came that far: `ends`, and `SHAPE_WEIGHT` requests of the masses `shape`.

    `cuts` are the requests cut at the start of each bin. This gives the same as a product of hazards, and
    exactly `ends` without cuts.
    """
    beyond = 0.0
    beyond_cut = _zeros()
    for i in range(BINS - 1, -1, -1):
        beyond += ends[i] + SHAPE_WEIGHT * shape[i]
        beyond_cut[i] = beyond
        beyond += cuts[i]
    completed = _zeros()
    factor = 1.0
    for i in range(BINS):
        own = ends[i]
        if cuts[i]:
            if beyond_cut[i] > _NOTHING:
                factor *= 1 + cuts[i] / beyond_cut[i]
            else:
                own += cuts[i]
        completed[i] = factor * own + (factor - 1) * SHAPE_WEIGHT * shape[i]
    return completed


def _scaled(values: vec[float], factor: float) -> vec[float]:
    scaled = _zeros()
    for i in range(BINS):
        scaled[i] = values[i] * factor
    return scaled


DEFAULT_MASSES: Final = _shape(DEFAULT_LOG_MEAN, DEFAULT_LOG_SPREAD**2)


class LengthTable:
    """Output lengths of one class as a histogram with logarithmic bins and slow forgetting, and its residual
    life.

    The residual life is built from the histogram at intervals (see `stale`), so that a rank is a look-up.
    """

    def __init__(self) -> None:
        self._counts = _zeros()
        self._cuts = _zeros()
        self._unit = 1.0
        """Weight of the newest observation in `_counts` and `_cuts`. It grows, which is cheaper than to decay
        all of them."""
        self.weight = 0.0
        self._since_built = 0
        self._log_mean = DEFAULT_LOG_MEAN
        self._log_variance = DEFAULT_LOG_SPREAD**2
        self._masses = DEFAULT_MASSES
        self._build()

    @property
    def counts(self) -> list[float]:
        """Return the requests that ended by themselves in each bin; older ones have less weight."""
        return [count / self._unit for count in self._counts]

    @property
    def cuts(self) -> list[float]:
        """Return the requests that were cut at the start of each bin; older ones have less weight."""
        return [count / self._unit for count in self._cuts]

    def restore(self, counts: list[float], cuts: list[float]) -> None:
        """Take up the `counts` and `cuts` of a table, and forget the present ones."""
        self._counts = vec[float](counts)
        self._cuts = vec[float](cuts)
        self._unit = 1.0
        self.weight = math.fsum(counts) + math.fsum(cuts)

    @property
    def masses(self) -> vec[float]:
        """Return the share of the lengths in each bin, as of the last build."""
        return self._masses

    @property
    def stale(self) -> bool:
        """Return whether enough was observed since the last build to make another worth its cost."""
        return self._since_built > 0.05 * self.weight

    def observe(self, length: int, *, cut: bool = False) -> None:
        """Learn from a request that ended by itself after `length` tokens, or was `cut` after them."""
        self._unit /= _KEEP
        i = min(bisect_left(EDGES, length) - 1, BINS - 1)
        counts, cuts = self._counts, self._cuts
        if not cut:
            counts[i] += self._unit
        elif i == BINS - 1:
            cuts[i] += self._unit
        else:
            # A limit between two edges is shared between them: at the lower one alone the bin would have too
            # few requests that came through it, at the upper one too many.
            part = (length - _EDGES[i]) / (_EDGES[i + 1] - _EDGES[i])
            cuts[i] += (1 - part) * self._unit
            cuts[i + 1] += part * self._unit
        self.weight = self.weight * _KEEP + 1
        self._since_built += 1
        if self._unit > _LARGEST_UNIT:
            self._counts = _scaled(counts, 1 / self._unit)
            self._cuts = _scaled(cuts, 1 / self._unit)
            self._unit = 1.0

    def rebuild(self, pool: LengthTable | None) -> None:
        """Rebuild the table from the observed lengths. `pool`, the table of all classes, is the prior of a
        class with no history.
        """
        mean = DEFAULT_LOG_MEAN if pool is None else pool._log_mean
        variance = DEFAULT_LOG_SPREAD**2 if pool is None else pool._log_variance
        ends = _scaled(self._counts, 1 / self._unit)
        cuts = _scaled(self._cuts, 1 / self._unit)
        if any(cuts):
            # Where cut requests would have ended depends on mean and variance, and these depend on that. Each
            # build begins with the prior, so that equal observations give equal tables.
            shape = _shape(mean, variance)
            for _ in range(FIT_STEPS):
                lengths = _completed(ends, cuts, shape)
                self._fit(lengths, mean, variance)
                shape = _shape(self._log_mean, self._log_variance)
            lengths = _completed(ends, cuts, shape)
        else:
            lengths = ends
            self._fit(lengths, mean, variance)
            shape = _shape(self._log_mean, self._log_variance)
        share = 1 / (self.weight + SHAPE_WEIGHT)
        masses = _zeros()
        for i in range(BINS):
            masses[i] = (lengths[i] + SHAPE_WEIGHT * shape[i]) * share
        self._masses = masses
        self._build()

    def _fit(self, lengths: vec[float], mean: float, variance: float) -> None:
        """Compute mean and variance of ln(length) from the requests in each bin, and `SHAPE_PRIOR` requests
        with a prior `mean` and `variance`.
        """
        total, squares = SHAPE_PRIOR * mean, SHAPE_PRIOR * (variance + mean * mean)
        for i in range(BINS):
            if count := lengths[i]:
                part = count * _LOG_MIDDLES[i]
                total += part
                squares += part * _LOG_MIDDLES[i]
        weight = self.weight + SHAPE_PRIOR
        self._log_mean = total / weight
        self._log_variance = squares / weight - self._log_mean**2

    def _build(self) -> None:
        self._since_built = 0
        # Sums over the bins from i on: the share of lengths there, and share × length.
        tail, moment = vec[float]([0.0] * (BINS + 1)), vec[float]([0.0] * (BINS + 1))
        for i in range(BINS - 1, -1, -1):
            mass = self._masses[i]
            tail[i] = tail[i + 1] + mass
            moment[i] = moment[i + 1] + mass * _MIDDLES[i]
        self._tail, self._moment = tail, moment
        self._low = vec[float]()
        """Ends of the credible interval at each edge, once they were needed."""
        self._high = vec[float]()

    def _build_intervals(self) -> None:
        """Compute the ends of the credible interval at each edge, for requests that have emitted that many
        tokens.
        """
        self._low = _exceeded_by(ABOVE_LOW, self._tail)
        self._high = _exceeded_by(ABOVE_HIGH, self._tail)

    def _beyond(self, length: int, i: int) -> tuple[float, float]:
        """Return the share of the lengths beyond `length`, which is in bin i, and share × length over them;
        flat inside a bin.
        """
        end = _EDGES[i + 1]
        inside = self._masses[i] * (end - length) / (end - _EDGES[i])
        return self._tail[i + 1] + inside, self._moment[i + 1] + inside * (end + length) / 2

    def after(self, emitted: int) -> LengthTable:
        """Return the table of what remains of the requests that are longer than `emitted`, as of the last build."""
        residual = LengthTable()
        i = _bin_above(emitted)
        survivors = self._beyond(emitted, i)[0] if i < BINS else 0.0
        if survivors >= _NOTHING:
            masses, above = _zeros(), survivors
            for residual_bin in range(BINS):
                end = emitted + int(_EDGES[residual_bin + 1])
                i = _bin_above(end)
                beyond = self._beyond(end, i)[0] if i < BINS else 0.0
                masses[residual_bin] = max(0.0, above - beyond) / survivors
                above = beyond
            residual._masses = masses
            residual._build()
        return residual

    def left(self, emitted: int, most: int) -> TokensLeft:
        """Return the tokens left after `emitted`, with never more than `most` in all."""
        i = _bin_above(emitted)
        if i >= BINS:
            return _lindy(emitted, most)
        survivors, moment = self._beyond(emitted, i)
        if survivors < _NOTHING:
            return _lindy(emitted, most)
        last = _bin_above(most)
        cut, cut_moment = self._beyond(most, last) if last < BINS else (0.0, 0.0)
        mean = (moment - cut_moment + cut * most) / survivors - emitted
        if len(self._low) == 0:
            self._build_intervals()
        start = _EDGES[i]
        part = (emitted - start) / (_EDGES[i + 1] - start)
        low, high = self._low[i], self._high[i]
        low += part * (self._low[i + 1] - low)
        high += part * (self._high[i + 1] - high)
        return bounded(mean, low - emitted, high - emitted, most - emitted, BY_CLASS)


_BIN_ABOVE: Final = [bisect_right(EDGES, length) - 1 for length in range(4097)]


def _bin_above(length: int) -> int:
    """Return the bin of lengths a little above `length`; `BINS` or more if there is none."""
    return _BIN_ABOVE[length] if length <= 4096 else bisect_right(EDGES, length) - 1


def _exceeded_by(share: float, tail: vec[float]) -> vec[float]:
    """Return at each edge the length that this share of the lengths beyond the edge exceeds."""
    lengths = vec[float]()
    end = 1
    for i in range(BINS):
        wanted = tail[i] * share
        end = end if end > i else i + 1
        while end < BINS and tail[end] > wanted:
            end += 1
        mass = tail[end - 1] - tail[end]
        in_bin = (wanted - tail[end]) / mass if mass > 0 else 0.0
        lengths = append(lengths, _EDGES[end] - in_bin * (_EDGES[end] - _EDGES[end - 1]))
    return append(lengths, _EDGES[BINS])


def _lindy(emitted: int, most: int) -> TokensLeft:
    """Return an estimate for a request longer than all observed ones: half of its length so far."""
    guess = max(1.0, emitted / 2)
    return bounded(guess, guess / 10, guess * 10, most - emitted, BY_CLASS)


def bounded(mean: float, low: float, high: float, most: int, basis: Basis) -> TokensLeft:
    """Return the estimate within bounds: an unfinished request has at least one token left, at most what its
    limit allows.
    """
    bound = float(most) if most > 1 else 1.0
    mean = bound if mean > bound else mean if mean > 1.0 else 1.0
    low = mean if low > mean else low if low > 1.0 else 1.0
    high = bound if high > bound else high
    return TokensLeft(mean, mean if low > mean else low, high if high > mean else mean, basis)
