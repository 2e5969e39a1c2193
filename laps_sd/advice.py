"""When a refused call should be tried again."""

from __future__ import annotations

__all__ = ["Turns"]

LONGEST_ADVICE_S = 60.0
"""Longest time after which a refused call is advised to come again. Our choice."""


class Turns:
    """Times at which refused calls may succeed: each is advised one of its own, or all would come back at the same moment."""

    def __init__(self) -> None:
        self._latest_s = 0.0

    def next_s(self, now: float, first_s: float, each_s: float) -> float:
        """Return after how many seconds a call may be tried again. `first_s`: until one can succeed; `each_s`: between two."""
        turn = max(now + first_s, self._latest_s + each_s)
        self._latest_s = min(turn, now + LONGEST_ADVICE_S)
        return self._latest_s - now
