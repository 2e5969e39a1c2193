"""The end of a generation: end-of-sequence token, stop token, number of tokens, stop string.

A round yields a block of tokens (accepted draft tokens and one more). `cut` returns the number of them that
count and the reason of an end, if there is one. The earliest token that ends it wins; at the same token: stop
string, then EOS or a stop token, then length. The text of a token that ends the output does not count for stop
strings, unless it stays in the text. Stop strings that the first `min_tokens` tokens complete do not count.

Stop strings are found in text, so the tail of the output is decoded again each round. Only the tail: a stop
string that is completed by new tokens reaches back at most its own length in characters, and a token is at
least one byte of text or none. Decoders in the manner of SentencePiece make text of a run of byte tokens only if all of
it is text. So the tail begins with a whole character, and an unfinished one at its end does not hide those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from laps_sd.contract.ends import End
from worker_svc.engine.interface import Specification

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # a tokenizer's output for the bytes of an unfinished character
CHARACTER_BYTES = 4  # of a character, at most


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a block that counts: its first `tokens` tokens."""

    tokens: int
    finish: End | None
    cut_characters: int = 0  # characters to take off the end of the decoded output


class StopText:
    """The decoded tail of one request's output, as far back as its stop strings can reach."""

    def __init__(
        self, stop: Sequence[str], decode: Decode, *, min_tokens: int = 0, included: bool = False
    ) -> None:
        """`included`: the stop string stays in the text."""
        self.stop = tuple(stop)
        self._decode = decode
        self._min_tokens = min_tokens
        self._included = included
        self._longest = max((len(text) for text in stop), default=0)

    def find(self, output: Sequence[int], block: Sequence[int]) -> tuple[int, int] | None:
        """Find the first token of `block` that completes a stop string in the text of output + block.

        Returns (tokens of the block that count, characters to cut), or None. The cut runs from where the stop
        string begins (if it is included: ends) to the end of the text of the tokens that count.
        """
        free = max(0, self._min_tokens - len(output))
        if free >= len(block):
            return None
        start = self._tail_start(output)
        tail = list(output[start:])
        # Text that was complete before this block can hold no stop string, or the request would have ended
        # then. That of the first `min_tokens` tokens does not count.
        before = len(self._text([*tail, *block[:free]]))
        after = self._decode([*tail, *block])
        if REPLACEMENT not in after[before:] and self._place(after, before) is None:
            return None
        for count in range(free + 1, len(block) + 1):
            text = self._text([*tail, *block[:count]])
            place = self._place(text, before)
            if place is not None:
                return count, len(text) - place[self._included]
        return None

    def _place(self, text: str, before: int) -> tuple[int, int] | None:
        """Return begin and end of the first stop string in `text` that ends after `before` characters; of
        several that begin there the shortest.
        """
        found = [
            (begin, begin + len(stop))
            for stop in self.stop
            if (begin := text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        return min(found, default=None)

    def _text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens up to their last whole character."""
        if not ids:
            return ""
        text = self._decode(ids)
        if not text.endswith(REPLACEMENT):
            return text
        shorter = (self._decode(ids[: len(ids) - cut]) for cut in range(1, CHARACTER_BYTES))
        return max((one.rstrip(REPLACEMENT) for one in (text, *shorter)), key=len)

    def _tail_start(self, output: Sequence[int]) -> int:
        """Return the first output token of the tail: enough text for the longest stop string, plus a margin
        for partial characters.
        """
        count = needed = self._longest + 8
        while count < len(output):
            start = self._whole_from(output, len(output) - count)
            tail = output[start:]
            if len(self._text(tail)) >= needed or len(self._decode(tail)) >= CHARACTER_BYTES * needed:
                return start
            count *= 2
        return 0

    def _whole_from(self, output: Sequence[int], start: int) -> int:
        """Return the last token up to `start` from which on, for all that is known, characters are whole."""
        for first in range(start, max(-1, start - CHARACTER_BYTES), -1):
            ends = range(first + 1, first + 1 + CHARACTER_BYTES)
            if any(REPLACEMENT not in self._decode(output[first:end]) for end in ends):
                return first
        return start


def stop_text_of(spec: Specification, decode: Decode) -> StopText | None:
    """Return what finds the stop strings of a request; None: it has none. `decode` is that for its
    `skip_special_tokens`."""
    if not spec.stop:
        return None
    return StopText(
        spec.stop, decode, min_tokens=spec.sampling.min_tokens, included=spec.include_stop_str_in_output
    )


def ends_of(spec: Specification, eos_ids: Collection[int]) -> Collection[int]:
    """Return the tokens that end the output of a request."""
    if not spec.stop_token_ids:
        return () if spec.ignore_eos else eos_ids
    return {*spec.stop_token_ids, *(() if spec.ignore_eos else eos_ids)}


def cut(
    spec: Specification,
    position: int,
    block: Sequence[int],
    eos_ids: Collection[int],
    stop_text: StopText | None,
    output: Sequence[int],
) -> Cut:
    """Return the part of `block`, which starts at output position `position`, that counts.

    `stop_text` is None if the request has no stop strings; `output`, the tokens before the block, is only
    used with it.
    """
    count = min(len(block), spec.max_tokens - position)
    finish = End.LENGTH if position + count >= spec.max_tokens else None
    ends = ends_of(spec, eos_ids)
    if ends:
        for index in range(count):
            if block[index] in ends:
                count, finish = index + 1, End.STOP
                break
    if stop_text is not None:
        hidden = finish is End.STOP and not spec.include_stop_str_in_output
        found = stop_text.find(output, block[: count - hidden])
        if found is not None:
            return Cut(found[0], End.STOP_SEQUENCE, found[1])
    return Cut(count, finish)
