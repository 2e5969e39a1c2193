"""The rate at which work arrives: an autoscaler derives from it the workers that the load needs, before a queue is there."""

from __future__ import annotations

import math
from typing import Final

DECAY_S: Final = 120.0
"""Time in which an arrival's share falls to 1/e: our choice (docs/decisions/0051-workers-are-scaled-by-what-arrives.md)."""
LEAST_AGE_S: Final = 30.0
"""Arrivals are spread over this long at least, so that the first ones of a leader do not count as a steady load."""


class ArrivingWork:
    """An exponentially decayed mean of the service time that arrives per second, over about two minutes."""

    def __init__(self) -> None:
        self._sum_s = 0.0
        self._at_s = 0.0
        self._since_s = math.inf

    def add(self, now_s: float, service_s: float) -> None:
        """Count a request of this service time, in seconds that it would take alone."""
        if self._since_s > now_s:
            self._since_s = self._at_s = now_s
        self._sum_s = self._sum_s * math.exp(-max(0.0, now_s - self._at_s) / DECAY_S) + service_s
        self._at_s = max(now_s, self._at_s)

    def per_s(self, now_s: float) -> float:
        """Return the service time that arrives per second; 0 before the first request.

        The mean is over the time since the first request as long as that is short.
        """
        if self._since_s > now_s:
            return 0.0
        age_s = max(LEAST_AGE_S, now_s - self._since_s)
        left_s = self._sum_s * math.exp(-max(0.0, now_s - self._at_s) / DECAY_S)
        return left_s / (DECAY_S * (1.0 - math.exp(-age_s / DECAY_S)))
