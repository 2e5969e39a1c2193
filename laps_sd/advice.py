"""Advice on when to retry a refused call."""

from __future__ import annotations

__all__ = ["Turns"]

LONGEST_ADVICE_S = 60.0
"""Longest advised time until the retry of a refused call. Our choice."""


class Turns:
    """Times at which refused calls may succeed: each gets its own, or all would retry at the same moment."""

    def __init__(self) -> None:
        self._latest_s = 0.0

    def next_s(self, now: float, first_s: float, each_s: float) -> float:
        """Return the seconds after which a call may be retried.

        `first_s`: until one can succeed; `each_s`: between two.
        """
        turn = max(now + first_s, self._latest_s + each_s)
        self._latest_s = min(turn, now + LONGEST_ADVICE_S)
        return self._latest_s - now
