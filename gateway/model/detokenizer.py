"""Conversion of token ids to text, piece by piece, for one output. Pure.

Terms:

* T(n)    the text of the first n output tokens: `decode(ids[:n])` without the replacement characters at its
          end, which are bytes that may still become a character. T(n) is a prefix of T(n + 1).
* shown   the longest prefix of T(n) that no later token can change: it ends before the first stop string in
          T(n), and before the longest end of T(n) that could still grow into one. A stop string within
          T(min_tokens) does not count.

Both are functions of the tokens alone, not of how they arrived. So a cursor (next token, characters shown)
means the same at every gateway, and text resumed at a cursor continues exactly.

The text of an output is that of its output tokens alone: the prompt does not take part in decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

__all__ = ["Decode", "Detokenizer", "TokenDecoder"]

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenDecoder:
    """T(n) as it grows. `silent_ids` (special tokens) have no text. `joins`: `decode` joins the bytes of the
    tokens and does nothing else, so that no token after a whole character needs those before it."""

    def __init__(
        self, decode: Decode, silent_ids: AbstractSet[int] = frozenset(), *, joins: bool = False
    ) -> None:
        self._decode = decode
        self._silent_ids = silent_ids
        self._joins = joins
        # Only the end of the output is decoded again:
        #   window[:chunk_start]   text known, kept because a decoder may treat the first token of a sequence
        #                          differently
        #   window[chunk_start:]   tokens since the last place where the text ended in a whole character
        self._window: list[int] = []
        self._chunk_start = 0
        self._given = 0  # characters of decode(window) returned so far

    def feed(self, ids: Sequence[int]) -> str:
        """Add the next tokens; return the text by which T grew."""
        if not self._silent_ids.isdisjoint(ids):
            ids = [token for token in ids if token not in self._silent_ids]
        if not ids:
            return ""
        self._window += ids
        text = self._decode(self._window)
        settled = text.rstrip(REPLACEMENT)
        grown = settled[self._given :]
        self._given = max(self._given, len(settled))
        if len(settled) == len(text):
            if self._joins:
                self._window, self._given = [], 0
            else:
                self._slide()
        return grown

    def _slide(self) -> None:
        """Drop all but the newest chunk, unless that chunk alone has no text to measure a
        difference against."""
        chunk = self._window[self._chunk_start :]
        text = self._decode(chunk)
        if text:
            self._window = chunk
            self._given = len(text)
        self._chunk_start = len(self._window)


class Detokenizer:
    """The displayable text of one output, as its tokens arrive.

    `start_offset` is the text offset of the cursor that a client resumes from; text before it is not returned
    again. `included`: the stop string that ends the output is part of it.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        included: bool = False,
        silent_ids: AbstractSet[int] = frozenset(),
        joins: bool = False,
        start_offset: int = 0,
    ) -> None:
        self._decoder = TokenDecoder(decode, silent_ids, joins=joins)
        self._stop = tuple(stop)
        self._held = ""  # T(n) after what is shown
        self._shown = 0  # characters
        self._start_offset = start_offset
        self._included = included
        self.stopped_by = ""
        """The stop string that ended the output, after `finish`; empty if none did."""
        self._immune_tokens = min_tokens if stop else 0  # those of the first `min_tokens` that are to come
        self._immune = 0  # characters of the held text within T(min_tokens)

    @property
    def text_offset(self) -> int:
        """Return the number of characters of the output that a client has received, given all that `feed`
        returned."""
        return max(self._shown, self._start_offset)

    def feed(self, ids: Sequence[int]) -> str:
        """Add the next tokens of the output; return the text that can be shown now and could not be shown
        before."""
        if self._immune_tokens:
            early, ids = ids[: self._immune_tokens], ids[self._immune_tokens :]
            self._immune_tokens -= len(early)
            self._held += self._decoder.feed(early)
            self._immune = len(self._held)
        grown = self._decoder.feed(ids)
        if not self._stop and self._shown >= self._start_offset:  # most outputs: nothing is held back
            self._shown += len(grown)
            return grown
        self._held += grown
        return self._show(self._first_unsettled())

    def finish(self, cut_characters: int = 0) -> str:
        """End the output. Return the text that was held back, without the last `cut_characters` characters of
        the whole text.

        A stop string never appears unless it is to be included, even if the end message did not cut it. Incomplete
        characters at the very end have no text.
        """
        end = max(0, len(self._held) - cut_characters)
        self.stopped_by = self._stop_at(end)
        self._held = self._held[:end]
        return self._show(end if self._included else min(self._first_stop(), end))

    def _show(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._immune = max(0, self._immune - count)
        known = min(count, max(0, self._start_offset - self._shown))
        self._shown += count
        return text[known:]

    def _stop_at(self, end: int) -> str:
        """Return the stop string that begins, or if it is included ends, where the held text is cut."""
        if self._included:
            found = [stop for stop in self._stop if self._held.endswith(stop, 0, end)]
            return max(found, key=len, default="")
        found = [stop for stop in self._stop if self._held.startswith(stop, end)]
        return min(found, key=len, default="")

    def _first_stop(self) -> int:
        """Return the index of the first stop string in the held text; the length of the held text if there is
        none."""
        immune = self._immune
        found = [
            position
            for stop in self._stop
            if (position := self._held.find(stop, max(0, immune - len(stop) + 1) if immune else 0)) >= 0
        ]
        return min(found, default=len(self._held))

    def _first_unsettled(self) -> int:
        """Return the index from which the held text is uncertain: at a stop string, or at an end that could
        become one."""
        held = self._held
        first = self._first_stop()
        for stop in self._stop:
            begin = held.find(stop[0], max(0, len(held) - len(stop) + 1))
            while 0 <= begin < first:
                if stop.startswith(held[begin:]):
                    first = begin
                    break
                begin = held.find(stop[0], begin + 1)
        return first
