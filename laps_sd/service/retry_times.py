"""Times after which refused calls may be retried, as the answers advise."""

from __future__ import annotations

__all__ = ["RetryTimes", "StreamRetryTimes"]

LONGEST_ADVICE_S = 60.0
"""Longest advised time until the retry of a refused call. Our choice."""
FIRST_OPEN_S = 1.0
"""Assumed duration of streams before the first has ended, in seconds."""
NEWEST_SHARE = 0.1
"""Weight of the newest stream in the mean duration."""


class RetryTimes:
    """Times at which refused calls may succeed: each gets its own, or all would retry at the same moment."""

    def __init__(self) -> None:
        self._latest_s = 0.0

    def next_s(self, now_s: float, first_s: float, each_s: float) -> float:
        """Return the seconds after which a call may be retried.

        `first_s`: until one can succeed; `each_s`: between two.
        """
        latest_s = max(now_s + first_s, self._latest_s + each_s)
        self._latest_s = min(latest_s, now_s + LONGEST_ADVICE_S)
        return self._latest_s - now_s


class StreamRetryTimes:
    """Retry times of calls that a limit on open streams refuses: the longer streams are open, the later."""

    def __init__(self) -> None:
        self.mean_open_s = FIRST_OPEN_S
        """Mean time for which streams were open, in seconds; the newest stream has the largest weight."""
        self._times = RetryTimes()

    def closed(self, open_s: float) -> None:
        """Take in a stream that was open for `open_s` seconds."""
        self.mean_open_s += NEWEST_SHARE * (open_s - self.mean_open_s)

    def next_s(self, now_s: float, count: int, most: int) -> float:
        """Return the seconds after which `count` more streams may be opened, where `most` may be open."""
        each_s = count * self.mean_open_s / most
        return self._times.next_s(now_s, each_s, each_s)
