"""The common part of the readers of tool calls: text around the calls, and one call as a JSON object.

A call is announced as soon as its name is known and its arguments begin; its arguments follow as they arrive.
What turns out not to be a call of an offered tool is text. After the announcement that is a `Broken` event.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from gateway.model.incremental import BLANKS, Incremental, Step

__all__ = ["MAX_WORD_CHARACTERS", "Arguments", "Broken", "Call", "Done", "Event", "Text", "ToolReader"]


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is not part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call began. Its index counts the calls of an output from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of the arguments of a call, as JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """A call is complete: its arguments are a JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class Broken:
    """An announced call is malformed or ended early. `text` is all of it, as the model wrote it."""

    index: int
    text: str


Event: TypeAlias = Text | Call | Arguments | Done | Broken

ARGUMENTS = ("arguments", "parameters")
OTHER_KEYS = ("id", "type")
"""Keys that some models write in addition to name and arguments; their values, texts, are not used."""
MAX_WORD_CHARACTERS = 256
"""Longest key, name or id in a call: a longer one is the text of something else."""
MAX_DEPTH = 128
"""Most levels of the arguments of a call."""
STRUCTURE = re.compile(r'["{}\[\]]')
IN_STRING = re.compile(r'["\\]')
NAME = re.compile(r"[A-Za-z0-9_.-]*")


class ToolReader(Incremental[Event]):
    """Reads the calls of one output. A subclass describes one family in `_run`."""

    def __init__(self, tools: Collection[str]) -> None:
        """Take the names of the tools that may be called."""
        super().__init__()
        self._tools = tools
        self._index = 0  # of the next call
        self._announced = False
        self._called = False
        """A call is complete."""
        self._space = ""
        """Whitespace that is text only if text follows."""

    # ---- text

    def _until(self, *markers: str) -> Step[str]:
        """Read text up to a marker, and the marker; return it, or nothing at the end of the output.

        From the whitespace before the marker on, the format may have to return.
        """
        pattern = re.compile("|".join(map(re.escape, markers)))
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                self._put(self._take(found.start() - self._at))
                self._begin()
                return self._take(len(found[0]))
            self._put(self._take(len(self._text) - self._at - self._held(markers)))
            if self._ended:
                return ""
            yield

    def _put(self, text: str) -> None:
        """Add text, but hold back the whitespace at its end."""
        visible = text.rstrip(BLANKS)
        if visible:
            self._events.append(Text(self._space + visible))
            self._space = ""
        self._space += text[len(visible) :]

    def _rest(self) -> Step[None]:
        """Read text up to the end of the output, without looking for calls."""
        while True:
            self._put(self._take(len(self._text) - self._at))
            if self._ended:
                return
            yield

    def _end(self) -> None:
        """End the output: whitespace at its end is text if the output has no calls."""
        if self._space and not self._called:
            self._events.append(Text(self._space))

    # ---- calls

    def _begin(self) -> None:
        """Remember this place: what follows is a call, or text."""
        self._taken = [self._space]
        self._space = ""

    def _accept(self) -> None:
        """Forget the place: what was read since is part of calls."""
        self._taken = None

    def _reject(self) -> None:
        """Make text of all that was read since the place."""
        assert self._taken is not None, "a place was remembered"
        text, self._taken = "".join(self._taken), None
        if self._announced:
            self._announced = False
            self._events.append(Broken(self._index, text))
            self._index += 1
        else:
            self._put(text)

    def _announce(self, name: str) -> None:
        self._announced = True
        self._events.append(Call(self._index, name))

    def _complete(self) -> None:
        self._events.append(Done(self._index))
        self._announced = False
        self._called = True
        self._index += 1

    def _closing(self, tag: str) -> Step[bool]:
        """Read the closing tag of a complete call, as far as the output has it; return whether nothing else is there."""
        if (yield from self._literal(tag)):
            return True
        rest = self._text[self._at :]
        if not (self._ended and tag.startswith(rest)):
            return False
        self._take(len(rest))
        return True

    def _object(self) -> Step[bool]:
        """Read a call as an object with a name and arguments; return whether it is one."""
        name: str | None = None
        arguments: str | None = None
        seen: set[str] = set()
        if not (yield from self._literal("{")):
            return False
        while True:
            yield from self._blanks()
            key = yield from self._string(MAX_WORD_CHARACTERS)
            if key in ARGUMENTS:
                kind = "arguments"
            elif key == "name" or key in OTHER_KEYS:
                kind = key
            else:
                return False
            if kind in seen:
                return False
            seen.add(kind)
            yield from self._blanks()
            if not (yield from self._literal(":")):
                return False
            yield from self._blanks()
            if kind == "arguments":
                arguments = yield from self._arguments(name)
                if arguments is None:
                    return False
            else:
                value = yield from self._string(MAX_WORD_CHARACTERS)
                if value is None:
                    return False
                if kind == "name":
                    if value not in self._tools:
                        return False
                    name = value
                    if arguments is not None:
                        self._announce(name)
                        self._events.append(Arguments(self._index, arguments))
            yield from self._blanks()
            if (yield from self._literal("}")):
                break
            if not (yield from self._literal(",")):
                return False
        if name is None:
            return False
        if arguments is None:  # a tool without parameters
            self._announce(name)
            self._events.append(Arguments(self._index, "{}"))
        self._complete()
        return True

    def _arguments(self, name: str | None) -> Step[str | None]:
        """Read arguments, an object or the text of one; return their JSON, None if they are neither. With a
        name the call is announced, and they become events as they arrive."""
        begin = yield from self._next()
        if begin == "{":
            if name is not None:
                self._announce(name)
            arguments = yield from self._json(shown=name is not None)
            return arguments if arguments is not None and _is_object(arguments) else None
        if begin == '"':
            arguments = yield from self._string(None)
        else:
            arguments = "{}" if (yield from self._literal("null")) else None
        if arguments is None or not _is_object(arguments):
            return None
        if name is not None:
            self._announce(name)
            self._events.append(Arguments(self._index, arguments))
        return arguments

    def _json(self, *, shown: bool) -> Step[str | None]:
        """Read an object or a list up to its last bracket; return its text, None if it has no end or is too
        deep. Only brackets and strings are looked at."""
        parts: list[str] = []
        depth = 0
        inside = False  # a string
        escaped = False  # its next character
        while True:
            at, end = self._at, len(self._text)
            closed = too_deep = False
            while at < end and not closed and not too_deep:
                if escaped:
                    escaped = False
                    at += 1
                    continue
                found = (IN_STRING if inside else STRUCTURE).search(self._text, at)
                if found is None:
                    at = end
                    break
                at = found.end()
                match found[0]:
                    case "\\":
                        escaped = True
                    case '"':
                        inside = not inside
                    case "{" | "[":
                        depth += 1
                        too_deep = depth > MAX_DEPTH
                    case _:
                        depth -= 1
                        closed = depth == 0
            piece = self._take(at - self._at)
            if piece:
                parts.append(piece)
                if shown:
                    self._events.append(Arguments(self._index, piece))
            if closed:
                return "".join(parts)
            if too_deep or self._ended:
                return None
            yield

    def _string(self, longest: int | None) -> Step[str | None]:
        """Read a string; return its value, None if there is none or it has more than `longest` characters."""
        if not (yield from self._literal('"')):
            return None
        parts: list[str] = ['"']
        length = 0
        escaped = False
        while True:
            at, end = self._at, len(self._text)
            closed = False
            while at < end and not closed:
                if escaped:
                    escaped = False
                    at += 1
                    continue
                found = IN_STRING.search(self._text, at)
                if found is None:
                    at = end
                    break
                at = found.end()
                escaped = found[0] == "\\"
                closed = not escaped
            if longest is not None:
                # Read no further than the first character too many, whatever has arrived.
                room = longest + 1 - length
                if at - self._at > room:
                    self._take(room)
                    return None
            piece = self._take(at - self._at)
            length += len(piece)
            parts.append(piece)
            if closed:
                try:
                    return str(json.loads("".join(parts), strict=False))
                except ValueError:
                    return None
            if self._ended:
                return None
            yield

    def _word(self) -> Step[str]:
        """Read the characters of a name."""
        word = ""
        while len(word) <= MAX_WORD_CHARACTERS:
            run = NAME.match(self._text[self._at : self._at + MAX_WORD_CHARACTERS + 1 - len(word)])
            assert run is not None, "an empty run matches"
            word += self._take(len(run[0]))
            if self._at < len(self._text) or self._ended:
                break
            yield
        return word

    def _up_to(self, marker: str, longest: int | None) -> Step[str | None]:
        """Read text up to a marker, and the marker; return the text, None if there is no marker or the text has
        more than `longest` characters."""
        parts: list[str] = []
        length = 0
        while True:
            found = self._text.find(marker, self._at)
            end = found if found >= 0 else len(self._text) - self._held((marker,))
            count = end - self._at
            if longest is not None and length + count > longest:
                # Read no further than the first character too many, whatever has arrived.
                self._take(longest + 1 - length)
                return None
            length += count
            parts.append(self._take(count))
            if found >= 0:
                self._take(len(marker))
                return "".join(parts)
            if self._ended:
                return None
            yield


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
