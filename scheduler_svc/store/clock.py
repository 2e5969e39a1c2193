"""The time of the record's server, so that deadlines hold when a scheduler takes over whose own clock is
wrong.

Deadlines, arrivals and ends are on the record as Unix times. Each leader measures the difference between its
own clock and the server's when it takes over, and follows slowly from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable

MOST_FOLLOWED_S = 0.1
"""Most seconds by which one measurement moves a leader's clock. One measurement in ten seconds makes 1 %, a
hundred times the drift of usual clocks; where the server's clock steps, or another server takes its place, no
deadline moves at once. Our choice.
"""


class RecordClock:
    """Unix seconds. Within one leadership they never go back."""

    def __init__(self, local: Callable[[], float]) -> None:
        self._local = local
        """Seconds that never step."""
        self._offset_s = 0.0
        self._latest_s = -math.inf

    def __call__(self) -> float:
        """Return the time now."""
        self._latest_s = max(self._latest_s, self._local() + self._offset_s)
        return self._latest_s

    def off_by_s(self, server_s: float, since_s: float) -> float:
        """Return how many seconds the server's clock is ahead of this one. It was read between `since_s`, on
        the local clock, and now.
        """
        return server_s - ((since_s + self._local()) / 2 + self._offset_s)

    def local_s(self) -> float:
        """Return the local time, for the beginning of a measurement."""
        return self._local()

    def set(self, off_by_s: float) -> None:
        """Adopt the server's time at once. Only before a leadership begins: this can move the time back."""
        self._offset_s += off_by_s
        self._latest_s = -math.inf

    def follow(self, off_by_s: float) -> None:
        """Move towards the server's time. Where that is behind, the clock stands still for a moment."""
        self._offset_s += max(-MOST_FOLLOWED_S, min(MOST_FOLLOWED_S, off_by_s))
