"""Prompt lookup: drafting without a second model, from the tokens that followed the last ones before.

    context   a b c d e f . . . a b c |            the last tokens "a b c" occurred before: propose d e f ...

Text that repeats its prompt or itself (summaries, edits of code, records) is found here for the price of a
dictionary look-up ["prompt lookup decoding", Saxena 2023]. The most recent occurrence of the longest run of
tokens wins. Integers only: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

SIZES = (4, 3, 2)  # tokens that must agree, longest first (our choice)


class Lookup:
    """An index of the context of one request, extended as the context grows."""

    def __init__(self) -> None:
        self._position_after: dict[
            tuple[int, ...], int
        ] = {}  # run of tokens -> position after its last occurrence
        self._indexed = 0  # runs that end before this position are in the index

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return at most `count` draft tokens after `tokens`; none if the last ones are new."""
        length = len(tokens)
        for end in range(max(self._indexed, SIZES[-1]), length):  # not the last run: nothing follows it yet
            for size in SIZES:
                if size <= end:
                    self._position_after[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, length)
        if count < 1:
            return []
        for size in SIZES:
            begin = self._position_after.get(tuple(tokens[length - size :])) if size < length else None
            if begin is not None:
                found = list(tokens[begin : begin + count])
                while len(found) < count:  # at the end of the context the repetition continues as it began
                    found.append(found[len(found) - (length - begin)])
                return found
        return []
