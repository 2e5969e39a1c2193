"""Expected remaining output tokens of a request, given a guess of its length: the client's hint, a worker's
prediction.

A guess is a measurement with an error that was observed (`Calibration`). The measured length is one of the
lengths that the class has (`LengthTable`): both together give which of those are likely for this request
(`GuessedLengths`, Bayes' rule). Where a class has many answers near 400 tokens, a guess of 350 means one of
those.
"""

from __future__ import annotations

import math
from typing import Final, final

from scheduler_svc.core.estimates.basis import Basis
from scheduler_svc.core.estimates.calibration import Calibration
from scheduler_svc.core.estimates.lengths import (
    ABOVE_HIGH,
    ABOVE_LOW,
    BINS,
    EDGES,
    LOG_BIN,
    LengthTable,
    TokensLeft,
    bounded,
    chance_above,
    density,
)
from scheduler_svc.core.native import append, vec

REACH: Final = 5.0
"""Distance from a guess within which lengths are considered, in spreads."""
CELLS_PER_SPREAD: Final = 8
"""Cells per spread of a guess. Guesses are rounded to cells, at least this much finer than their own error;
guesses of one cell share a computed distribution."""
MOST_CELLS: Final = 128
"""Distributions kept at a time, for one class and kind of guess: clients choose their guesses, and must not
grow the memory."""
LEAST_MASS: Final = 1e-9
"""Share of the lengths that a bin has at least: a guess can always be right."""
SPREAD_STEP: Final = math.log(1.05)
"""Spreads are rounded to steps of 5 %, so that tenants whose guesses are about as good share a computed
distribution."""
BINS_PER_SUM: Final = 8
"""Bins from one sum that is kept of a distribution to the next; a sum between them is computed when it is needed. To
keep the sum at each bin made a distribution twice as costly, and each is used twice in the mean."""


def _step_of(spread: float) -> int:
    return math.floor(math.log(spread) / SPREAD_STEP + 0.5)


def rounded_spread(spread: float) -> float:
    """Return the middle of the step that a spread lies in."""
    return math.exp(_step_of(spread) * SPREAD_STEP)


@final
class GuessedLengths:
    """The likely lengths of a class, given guesses. Valid for one state of the table: its owner makes another
    one when the table was built again.
    """

    def __init__(self, table: LengthTable) -> None:
        self._table = table
        self._likely: dict[tuple[int, int], _Likely] = {}
        """Distributions by the step of the spread, and the cell of the guess."""

    def left(
        self, calibration: Calibration, guess: float, emitted: int, most: int, basis: Basis
    ) -> TokensLeft:
        """Return the tokens left of a request that emitted `emitted` of at most `most`, whose length was
        guessed."""
        if calibration.spread == math.inf:
            return self._table.left(emitted, most)
        return self.near(calibration.log_length(guess), calibration.spread, emitted, most, basis)

    def near(self, log_guess: float, log_spread: float, emitted: int, most: int, basis: Basis) -> TokensLeft:
        """Return the tokens left of a request whose ln(length) was measured with an error of this spread."""
        step = _step_of(log_spread)
        normal = _normal(step)
        cell = min(max(0, math.floor(log_guess / normal.cell_width + 0.5)), BINS * normal.cells_per_bin)
        likely = self._likely.get((step, cell))
        if likely is None:
            if len(self._likely) >= MOST_CELLS:
                self._likely.clear()
            likely = self._likely[step, cell] = _Likely(self._table.masses, cell, normal)
        return likely.left(emitted, most, basis)


@final
class _Normal:
    """A normal distribution of this spread, at every cell in reach of its middle."""

    def __init__(self, spread: float) -> None:
        self.spread = spread
        # Edges of bins lie a whole number of cells apart, so that all guesses see the distribution at the
        # same points.
        self.cells_per_bin = cells_per_bin = max(1, math.ceil(CELLS_PER_SPREAD * LOG_BIN / spread))
        self.cell_width = cell_width = LOG_BIN / cells_per_bin
        self.reach = math.ceil(REACH * spread / cell_width) + cells_per_bin
        """The middle is there in both lists."""
        above, shifted = vec[float](), vec[float]()
        for cell in range(-self.reach, self.reach + 1):
            z = cell * cell_width / spread
            above = append(above, chance_above(z))
            shifted = append(shifted, chance_above(z - spread))
        self.above: Final = above
        """Probability of more than each cell."""
        self.shifted: Final = shifted
        """Share of the exponential's mean that lies above."""


_normals: Final[dict[int, _Normal]] = {}


def _normal(step: int) -> _Normal:
    """Return the distribution of this step of spreads; there are some 120 of them."""
    found = _normals.get(step)
    if found is None:
        found = _normals[step] = _Normal(math.exp(step * SPREAD_STEP))
    return found


@final
class _Likely:
    """ln(length) with the density of a histogram, flat in each bin, times a normal one around the guess.

    Two sums give all that is asked for: at an edge the share of all that is longer, and share × length over it, both
    but for one factor. Between the edges of a bin they are exact. Bins are counted from the longest one in reach.
    """

    def __init__(self, masses: vec[float], cell: int, normal: _Normal) -> None:
        self._normal = normal
        self._masses = masses
        self._cell = cell
        spread, step, reach = normal.spread, normal.cells_per_bin, normal.reach
        self._centre = centre = cell * normal.cell_width
        self._whole = math.exp(centre + spread * spread / 2)
        self._longest = math.exp(centre + REACH * spread)
        # Bin i ends at edge i + 1, which is i · step cells above a length of 1.
        self._last = last = min(BINS - 1, (cell + reach) // step)
        first = max(0, -((reach - cell) // step) + 1)
        self._bins = bins = last - first + 1
        # Lengths beyond the last bin are taken to be as likely as those in it.
        mass, end = self._mass(0), self._end(0)
        tail, moment = mass * normal.above[end], mass * normal.shifted[end]
        tails, moments = vec[float]([tail]), vec[float]([moment])
        for start in range(0, bins, BINS_PER_SUM):
            tail, moment = self._with_bins(start, min(BINS_PER_SUM, bins - start), tail, moment)
            tails = append(tails, tail)
            moments = append(moments, moment)
        self._tails: Final = tails
        self._moments: Final = moments

    def left(self, emitted: int, most: int, basis: Basis) -> TokensLeft:
        """Return the tokens left; see `GuessedLengths.left`."""
        if emitted > self._longest:
            # Far beyond the guess: the tail of a lognormal there falls off like an exponential of this
            # length.
            spread = self._normal.spread
            mean = emitted * spread * spread / (math.log(emitted) - self._centre)
            return bounded(mean, 0.1 * mean, 2.3 * mean, most - emitted, basis)
        tail, moment = self._beyond(emitted)
        if most > self._longest:
            mean = self._whole * moment / tail - emitted
        else:
            beyond, beyond_moment = self._beyond(most)
            mean = (self._whole * (moment - beyond_moment) + most * beyond) / tail - emitted
        low = self._length_at(tail * ABOVE_LOW) - emitted
        high = self._length_at(tail * ABOVE_HIGH) - emitted
        return bounded(mean, low, high, most - emitted, basis)

    def _mass(self, from_last: int) -> float:
        return self._masses[self._last - from_last] + LEAST_MASS

    def _end(self, from_last: int) -> int:
        """Return the index of the end of that bin in the lists of the normal distribution."""
        normal = self._normal
        return (self._last - from_last) * normal.cells_per_bin - self._cell + normal.reach

    def _with_bins(self, start: int, count: int, tail: float, moment: float) -> tuple[float, float]:
        """Return the sums at the end of bin `start` with those of `count` bins from there on."""
        normal, masses = self._normal, self._masses
        above, shifted, step = normal.above, normal.shifted, normal.cells_per_bin
        at, last = self._end(start), self._last - start
        above_end, shifted_end = above[at], shifted[at]
        for i in range(last, last - count, -1):
            at -= step
            above_start, shifted_start = above[at], shifted[at]
            mass = masses[i] + LEAST_MASS
            tail += mass * (above_start - above_end)
            moment += mass * (shifted_start - shifted_end)
            above_end, shifted_end = above_start, shifted_start
        return tail, moment

    def _beyond(self, length: int) -> tuple[float, float]:
        """Return the share that is longer, and its moment."""
        tails, moments = self._tails, self._moments
        if length == 0:
            return tails[-1], moments[-1]
        log_length = math.log(float(length))  # compiled, of a float it costs a tenth
        from_last = self._last - 1 - int(log_length / LOG_BIN)
        if from_last >= self._bins:
            return tails[-1], moments[-1]
        if from_last < 0:
            from_last = 0
        kept = from_last // BINS_PER_SUM
        tail, moment = self._with_bins(
            kept * BINS_PER_SUM, from_last % BINS_PER_SUM, tails[kept], moments[kept]
        )
        normal = self._normal
        z = (log_length - self._centre) / normal.spread
        mass, end = self._mass(from_last), self._end(from_last)
        return (
            tail + mass * (chance_above(z) - normal.above[end]),
            moment + mass * (chance_above(z - normal.spread) - normal.shifted[end]),
        )

    def _length_at(self, share: float) -> float:
        """Return the length that this share, except for the common factor, exceeds."""
        tails, normal = self._tails, self._normal
        low, high = 0, len(tails) - 1
        while low < high:  # the first that is not less
            middle = (low + high) // 2
            if tails[middle] < share:
                low = middle + 1
            else:
                high = middle
        kept = low - 1 if low > 0 else 0
        from_last, tail = kept * BINS_PER_SUM, tails[kept]
        # The bin in which the share is reached.
        for at in range(from_last, min(low * BINS_PER_SUM, self._bins) - 1):
            with_bin, _ = self._with_bins(at, 1, tail, 0.0)
            if with_bin >= share:
                break
            from_last, tail = at + 1, with_bin
        above, cell = normal.above, self._end(from_last)
        wanted = above[cell] + (share - tail) / self._mass(from_last)
        if not 0.0 < wanted < 1.0:
            return EDGES[self._last - from_last + 1]
        # The cells on either side of it, and the line between them: right to a hundredth of the spread.
        while cell < len(above) - 1 and above[cell] > wanted:
            cell += 1
        while cell > 1 and above[cell - 1] <= wanted:
            cell -= 1
        part = (wanted - above[cell]) / (above[cell - 1] - above[cell])
        cells = cell - min(max(0.0, part), 1.0) - normal.reach
        # Then one step of Newton's method on the logarithm. `NormalDist.inv_cdf` takes three times as long, compiled.
        z = cells * normal.cell_width / normal.spread
        found = chance_above(z)
        z += math.log(found / wanted) * found / density(z)
        return math.exp(self._centre + z * normal.spread)
