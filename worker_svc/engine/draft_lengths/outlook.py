"""Expected remaining output of a request, which decides whether a draft pays for the context it must read."""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

RECENT = 64
"""Recently ended requests whose lengths are kept. Our choice; tried 16 to 256."""


class OutputLengths:
    """Expected remaining output length of a request, from the lengths of recently ended requests."""

    def __init__(self) -> None:
        self._ended: deque[int] = deque(maxlen=RECENT)
        self._ascending: list[int] = []
        self._sums: list[int] = [0]  # [i]: of `_ascending` from i on

    def observe(self, tokens: int) -> None:
        """Take in the output length of a request that ended, in tokens."""
        self._ended.append(tokens)
        self._ascending = sorted(self._ended)
        self._sums = [*accumulate(reversed(self._ascending), initial=0)][::-1]

    def to_come(self, generated: int) -> float:
        """Return the expected remaining output after `generated` tokens.

        It is the mean residual life of the recent lengths; `generated` again if none was longer, and infinite
        before any request has ended.
        """
        if not self._ascending:
            return math.inf
        longer = bisect.bisect_right(self._ascending, generated)
        if longer == len(self._ascending):
            return float(generated)
        return self._sums[longer] / (len(self._ascending) - longer) - generated


class Outlook(NamedTuple):
    """Expected remaining output of a request, and the context that its draft lacks."""

    to_come: float = math.inf
    """Tokens that the request is expected to generate."""
    lacks: int = 0
    """Tokens of its context that the draft must read before it can propose."""

    @property
    def lag(self) -> float:
        """Tokens that the draft must read first, for each token that is to come."""
        return self.lacks / max(1.0, self.to_come)


Outlooks = Callable[[int], Outlook]
"""Outlook by index of the request; called only where it matters."""
