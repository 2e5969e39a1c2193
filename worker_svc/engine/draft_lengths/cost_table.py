"""Seconds by number of rows, measured at the start and corrected by every round."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

LEARNING_STEP = 0.05
"""Weight of one measurement for the neighbouring points of a cost table, and again for all its points: a
machine has slower and faster minutes, which affect all points alike, and a table that followed them only at
the measured points would take every size that was not tried recently for slow. Tried 0.02 to 0.1."""
DEVIATION_LIMIT = 0.25
"""Bound of a measurement's deviation, as a fraction of its prediction: a larger one, most often upwards, is
an accident. Tried 0.1 to 1."""


@dataclass(slots=True)
class CostTable:
    """Seconds as a function of a count, linear between points that follow the measurements.

    Each key of attention adds `key_s`.
    """

    counts: list[int]
    seconds: list[float]  # at each point; like `key_s`, without the common drift since then
    key_s: float = 0.0
    _slopes: list[float] = field(init=False, repr=False)  # from each point to the next
    _drifted: float = field(default=1.0, init=False, repr=False)  # factor of all points and of `key_s`

    def __post_init__(self) -> None:
        if (
            not self.counts
            or len(self.counts) != len(self.seconds)
            or self.counts != sorted(set(self.counts))
        ):
            raise ValueError("a cost table needs ascending counts with one time each")
        self._slopes = [0.0] * max(1, len(self.counts) - 1)
        for at in range(len(self.counts) - 1):
            self._slope(at)

    def copy(self) -> CostTable:
        """Return an independent copy."""
        return CostTable(
            [*self.counts], [second * self._drifted for second in self.seconds], self.key_s * self._drifted
        )

    def __call__(self, count: int, keys: float = 0.0) -> float:
        """Return the expected seconds for `count`, in contexts of `keys` tokens together."""
        counts = self.counts
        at = min(bisect.bisect_left(counts, count), len(counts) - 1)
        at -= at > 0
        beyond = count - counts[at]
        return self._drifted * (
            self.seconds[at] + keys * self.key_s + (self._slopes[at] * beyond if beyond > 0 else 0.0)
        )

    def _slope(self, at: int) -> None:
        """Set a slope: more rows never cost less, and one more never costs more than the mean before it."""
        counts, seconds = self.counts, self.seconds
        slope = (seconds[at + 1] - seconds[at]) / (counts[at + 1] - counts[at])
        self._slopes[at] = min(max(0.0, slope), seconds[at] / counts[at])

    def drift(self, factor: float) -> None:
        """Move all points by a fraction of the slowdown (1: twice as slow) that another table observed."""
        self._drifted *= 1.0 + factor * LEARNING_STEP

    def observe(self, count: int, seconds: float, keys: float = 0.0) -> float:
        """Move the points towards one measurement: those next to it by much, all of them by a little.

        Returns its deviation as a fraction of the expectation (1: twice as much), clamped to DEVIATION_LIMIT.
        """
        expected = self(count, keys)
        if seconds <= 0:
            return 0.0
        factor = min(max(seconds / expected - 1.0, -DEVIATION_LIMIT), DEVIATION_LIMIT)
        self.drift(factor)
        counts, points = self.counts, self.seconds
        above = min(bisect.bisect_left(counts, count), len(counts) - 1)
        below = max(above - 1, 0)
        for at in {below, above}:
            near = 1.0 - min(1.0, abs(counts[at] - count) / max(1, counts[above] - counts[below]))
            points[at] *= 1.0 + factor * LEARNING_STEP * near
        # Where more rows were measured to cost less, both points get their mean: otherwise one of them would
        # drift away unnoticed.
        for at in range(below, min(above + 2, len(points))):
            if at and points[at] < points[at - 1]:
                points[at - 1 : at + 1] = [(points[at] + points[at - 1]) / 2] * 2
        for at in range(max(0, below - 2), min(above + 2, len(points) - 1)):
            self._slope(at)
        return factor


def default_costs() -> tuple[CostTable, CostTable]:
    """Return (round by rows, draft step by rows) before any measurement.

    A draft step costs a fifth of a round, rows are nearly free.
    """
    return CostTable([1, 65], [1e-2, 2e-2]), CostTable([1, 65], [2e-3, 4e-3])
