"""The end of a generation: end-of-sequence token, number of tokens, stop string.

A round yields a block of tokens (accepted draft tokens and one more). `cut` returns the number of them that
count and the reason of an end, if there is one. The earliest token that ends it wins; at the same token: stop
string, then EOS, then length.

Stop strings are found in text, so the tail of the output is decoded again each round. Only the tail: a stop
string that is completed by new tokens reaches back at most its own length in characters, and a token is at
least one byte of text or none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from laps_sd.contract.ends import End
from worker_svc.engine.interface import Specification

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # a tokenizer's output for the bytes of an unfinished character


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a block that counts: its first `tokens` tokens."""

    tokens: int
    finish: End | None
    cut_characters: int = 0  # characters to take off the end of the decoded output


class StopText:
    """The decoded tail of one request's output, as far back as its stop strings can reach."""

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self.stop = tuple(stop)
        self._decode = decode
        self._longest = max((len(text) for text in stop), default=0)

    def find(self, output: Sequence[int], block: Sequence[int]) -> tuple[int, int] | None:
        """Find the first token of `block` that completes a stop string in the text of output + block.

        Returns (tokens of the block that count, characters to cut), or None. The cut runs from where the stop
        string begins to the end of the text of the tokens that count.
        """
        start = self._tail_start(output)
        tail = list(output[start:])
        before = self._text(tail)
        # Text that was complete before this block can hold no stop string, or the request would have ended
        # then.
        after = self._text([*tail, *block])
        if self._begin(after, 0) is None:
            return None
        for count in range(1, len(block) + 1):
            text = self._text([*tail, *block[:count]])
            begin = self._begin(text, max(0, len(before) - self._longest))
            if begin is not None:
                return count, len(text) - begin
        return None

    def _begin(self, text: str, start: int) -> int | None:
        """Return the begin of the first stop string in `text`; which of several begins there makes no
        difference.
        """
        found = [position for position in (text.find(stop, start) for stop in self.stop) if position >= 0]
        return min(found, default=None)

    def _text(self, ids: Sequence[int]) -> str:
        return self._decode(ids).rstrip(REPLACEMENT) if ids else ""

    def _tail_start(self, output: Sequence[int]) -> int:
        """Return the first output token of the tail: enough text for the longest stop string, plus a margin
        for partial characters.
        """
        count = self._longest + 8
        while count < len(output) and len(self._decode(output[-count:])) < self._longest + 8:
            count *= 2
        return max(0, len(output) - count)


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
    if not spec.ignore_eos:
        for index in range(count):
            if block[index] in eos_ids:
                count, finish = index + 1, End.STOP
                break
    if stop_text is not None:
        found = stop_text.find(output, block[:count])
        if found is not None:
            return Cut(found[0], End.STOP_SEQUENCE, found[1])
    return Cut(count, finish)
