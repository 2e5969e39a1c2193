"""Prompt lookup: drafting without a second model, from the tokens that followed the last ones before.

    context   a b c d e f . . . a b c |            the last tokens "a b c" occurred before: propose d e f ...

Text that repeats its prompt or itself (summaries, edits of code, records) is found here for the price of a
dictionary look-up ["prompt lookup decoding", Saxena 2023]. Of the latest occurrences of the last two tokens,
the one with the most equal tokens before them is continued, the most recent if several have as many. Integers
only: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TRIED = 8
"""Occurrences that are compared, the latest first: more of them only cost time where two tokens are as common
as the end of a sentence. Our choice."""
MOST_EQUAL = 16
"""Equal tokens that are counted, at most: what follows more of them is hardly more certain. Our choice."""
RESTS_AFTER = 4
"""Looks in vain, one after the other, for which another round passes without one. Tried 8, and none."""


class Found(NamedTuple):
    """A continuation of the context that occurred in it before."""

    tokens: list[int]
    # Last tokens of the context that are equal there, at most `MOST_EQUAL`.
    equal: int


class Lookup:
    """An index of the context of one request, extended as the context grows."""

    def __init__(self) -> None:
        # Position after the latest occurrence of two tokens, but the one at the end of the context.
        self._after: dict[tuple[int, int], int] = {}
        # By such a position, the one before it; 0: there is none.
        self._earlier: list[int] = [0, 0]
        self._in_vain = 0
        self._rests = 0

    def look(self, tokens: Sequence[int], count: int) -> Found | None:
        """Return what `propose` returns, or None without looking if the last looks were in vain.

        Text that repeats nothing would spend a per cent of its time on looking, and a repetition that is seen
        some tokens later loses less.
        """
        if self._rests:
            self._rests -= 1
            return None
        found = self.propose(tokens, count)
        self._in_vain = 0 if found else self._in_vain + 1
        self._rests = self._in_vain // RESTS_AFTER
        return found

    def propose(self, tokens: Sequence[int], count: int) -> Found | None:
        """Return at most `count` draft tokens after `tokens`; None if their last two did not occur before."""
        length, after, earlier = len(tokens), self._after, self._earlier
        for end in range(len(earlier), length):  # not the last two: nothing follows them yet
            pair = (tokens[end - 2], tokens[end - 1])
            earlier.append(after.get(pair, 0))
            after[pair] = end
        if count < 1 or length < 3:
            return None
        at = after.get((tokens[length - 2], tokens[length - 1]), 0)
        if not at:
            return None
        begin = most = 0
        for _ in range(TRIED):
            equal, limit = 2, min(at, MOST_EQUAL)
            while equal < limit and tokens[at - 1 - equal] == tokens[length - 1 - equal]:
                equal += 1
            if equal > most:
                begin, most = at, equal
            at = earlier[at]
            if not at or most == MOST_EQUAL:
                break
        found = list(tokens[begin : begin + count])
        while len(found) < count:  # at the end of the context the repetition continues as it began
            found.append(found[len(found) - (length - begin)])
        return Found(found, most)
