"""Text that arrives in pieces, read as if it were there as a whole.

A subclass describes a format in `_run`, a generator that yields where it needs more text. What it finds are
events; their concatenation depends on the text alone, not on how it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Generic, TypeAlias, TypeVar

__all__ = ["BLANKS", "Incremental", "Step"]

T = TypeVar("T")
Event = TypeVar("Event")

Step: TypeAlias = Generator[None, None, T]
"""A part of a format. It yields where it needs more text, and returns what it has read."""

BLANKS = " \t\r\n"
BLANK_RUN = re.compile(f"[{BLANKS}]*")


class Incremental(Generic[Event]):
    """The state of one text. Feed it every piece, then `finish`."""

    def __init__(self) -> None:
        self._text = ""  # not read yet, from `_at` on
        self._at = 0
        self._ended = False
        self._events: list[Event] = []
        self._taken: list[str] | None = None
        """The text read since a place to which the format may have to return; None: there is no such place."""
        self._running = self._run()

    def feed(self, text: str) -> list[Event]:
        """Add the next piece; return what is certain now and was not before."""
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._advance()

    def finish(self) -> list[Event]:
        """End the text; return the events that were held back."""
        self._ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._running, None)
        events, self._events = self._events, []
        return events

    def _run(self) -> Step[None]:
        raise NotImplementedError

    # ---- parts of formats

    def _take(self, count: int) -> str:
        """Read characters that are there."""
        text = self._text[self._at : self._at + count]
        self._at += count
        if self._taken is not None:
            self._taken.append(text)
        return text

    def _next(self) -> Step[str]:
        """Return the next character without reading it; empty at the end of the text."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def _literal(self, literal: str) -> Step[bool]:
        """Read a literal; False, and nothing is read, if the text continues otherwise."""
        while True:
            there = self._text[self._at : self._at + len(literal)]
            if there == literal:
                self._take(len(literal))
                return True
            if self._ended or not literal.startswith(there):
                return False
            yield

    def _blanks(self) -> Step[str]:
        """Read whitespace, and return it."""
        blanks = ""
        while True:
            run = BLANK_RUN.match(self._text, self._at)
            assert run is not None, "an empty run matches"
            blanks += self._take(len(run[0]))
            if self._at < len(self._text) or self._ended:
                return blanks
            yield

    def _held(self, markers: tuple[str, ...]) -> int:
        """Return the length of the longest end of the text that could still become a marker."""
        if self._ended:
            return 0
        left = len(self._text) - self._at
        longest = min(left, max(map(len, markers)) - 1)
        for length in range(longest, 0, -1):
            if self._text.endswith(tuple(marker[:length] for marker in markers if length < len(marker))):
                return length
        return 0
