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
UNCUT_TOKENS = 16
"""Tokens without a whole character at their end that are decoded again for each new one; of more, the older ones
are dropped. Our choice."""
CHARACTER_BYTES = 4
"""Largest number of bytes of a character."""


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
        self._earlier_start = 0  # where the chunk before begins
        self._given = 0  # characters of decode(window) returned so far
        self._fed_together = False  # whether the window may hold tokens that came together
        self._replaced = 0  # replacement characters before the window that were not returned
        self._cut_at = UNCUT_TOKENS  # a larger window is cut

    def feed(self, ids: Sequence[int]) -> str:
        """Add the next tokens; return the text by which T grew."""
        if not self._silent_ids.isdisjoint(ids):
            ids = [token for token in ids if token not in self._silent_ids]
        if not ids:
            return ""
        text = self._decode([*self._window, *ids])
        if not self._joins and REPLACEMENT in text[self._given :]:
            # A decoder in the manner of SentencePiece makes text of a run of byte tokens only if all of it is text: token
            # by token, characters before bytes that are none come out.
            if self._fed_together:
                self._feed_window_again()
                text = self._decode([*self._window, *ids])
            if len(ids) > 1:
                return "".join([self.feed([token]) for token in ids])
        self._fed_together = self._fed_together or len(ids) > 1
        self._window += ids
        settled = text.rstrip(REPLACEMENT)
        grown = settled[self._given :]
        self._given = max(self._given, len(settled))
        if grown and self._replaced:
            grown, self._replaced = REPLACEMENT * self._replaced + grown, 0
        if len(settled) == len(text):
            self._cut_at = UNCUT_TOKENS
            if self._joins:
                self._window, self._given = [], 0
            else:
                self._slide()
        elif len(self._window) > self._cut_at:
            self._cut(text)
        return grown

    def _feed_window_again(self) -> None:
        """Feed the tokens of the window one by one. Their text is known, and no bytes are left over from it."""
        window, self._window = self._window, []
        self._given = self._chunk_start = self._earlier_start = 0
        self._fed_together = False
        for token in window:
            self.feed([token])

    def _slide(self) -> None:
        """Drop all but the newest chunk. If that chunk alone has no text to measure a difference against, since a
        decoder may strip a blank at the beginning, drop all but the newest two once the window is large."""
        start, chunk = self._chunk_start, self._window[self._chunk_start :]
        text = self._decode(chunk)
        if not text and self._have_no_text(chunk):
            del self._window[start:]
            return
        if not text and len(self._window) > UNCUT_TOKENS:
            start = self._earlier_start
            text = self._decode(self._window[start:])
        if text:
            del self._window[:start]
            self._given = len(text)
            self._chunk_start -= start
            self._fed_together = self._fed_together and len(self._window) > 1
        self._earlier_start, self._chunk_start = self._chunk_start, len(self._window)

    def _cut(self, text: str) -> None:
        """Drop what no later token can change from the window, whose text this is. A run of bytes that are no
        text has no whole character, so all of it would be decoded again for each of its tokens."""
        kept = self._end_of_joined(text) if self._joins else self._short_run(text)
        if kept is None:
            uncut = self._window[self._chunk_start :]
            self._window[self._chunk_start :] = [token for token in uncut if not self._have_no_text([token])]
            self._cut_at = max(UNCUT_TOKENS, 2 * len(self._window))
            return
        dropped = len(text) - len(self._decode(kept))  # characters
        self._replaced += max(0, dropped - self._given)
        self._given = max(0, self._given - dropped)
        self._window, self._earlier_start, self._chunk_start = kept, 0, 0
        self._cut_at = UNCUT_TOKENS

    def _end_of_joined(self, text: str) -> list[int] | None:
        """Return tokens at the end that continue no character of those before them."""
        for left in range(CHARACTER_BYTES, 2 * CHARACTER_BYTES):
            end = self._decode(self._window[-left:])
            if end and self._decode(self._window[:-left]) + end == text:
                return self._window[-left:]
        return None

    def _short_run(self, text: str) -> list[int] | None:
        """Return a shorter run of bytes that are as little text as those at the end of the window. Decoders in the
        manner of SentencePiece make text of a run of byte tokens only if all of it is text."""
        if not self._is_no_text(self._window, text):
            return None
        begin = len(self._window) - (len(text) - len(text.rstrip(REPLACEMENT)))
        for start in range(max(0, begin), len(self._window) - CHARACTER_BYTES)[:UNCUT_TOKENS]:
            first = self._window[start : start + CHARACTER_BYTES]
            run = first + self._window[1 - CHARACTER_BYTES :]
            if self._is_no_text(first, REPLACEMENT * len(first)) and len(self._decode(run)) == len(run):
                return run
        return None

    def _is_no_text(self, tokens: list[int], text: str) -> bool:
        """Return whether these tokens, whose text this should be, end in bytes that no later ones complete. If they
        could, they would be text without the last character, of which there are 3 bytes at most."""
        return text.endswith(REPLACEMENT * CHARACTER_BYTES) and all(
            self._decode(tokens[: len(tokens) - cut]) == text[: len(text) - cut]
            for cut in range(CHARACTER_BYTES)
        )

    def _have_no_text(self, tokens: list[int]) -> bool:
        """Return whether these tokens have no text, also after others."""
        return not self._decode(tokens * 2)


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
        held = self._held
        end = max(0, len(held) - cut_characters)
        self._held = held[:end]
        if not self._included:
            end = min(self._first_stop(), end)
        self.stopped_by = self._stop_at(held, end)
        return self._show(end)

    def _show(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._immune = max(0, self._immune - count)
        known = min(count, max(0, self._start_offset - self._shown))
        self._shown += count
        return text[known:]

    def _stop_at(self, held: str, end: int) -> str:
        """Return the stop string that begins, or if it is included ends, where the held text is cut."""
        if self._included:
            if end <= self._immune:
                return ""
            found = [stop for stop in self._stop if held.endswith(stop, 0, end)]
            return max(found, key=len, default="")
        found = [stop for stop in self._stop if held.startswith(stop, end)]
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
