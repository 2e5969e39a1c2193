"""Calls as plain JSON: the output begins with an object, objects, or a list of them.

[{"name": "weather", "arguments": {"city": "Oslo"}}]
"""

from __future__ import annotations

from gateway.model.incremental import Step
from gateway.model.tool_calls.reader import ToolReader

__all__ = ["PlainReader"]


class PlainReader(ToolReader):
    """Reads calls at the beginning of an output."""

    def _run(self) -> Step[None]:
        yield from self._leading()
        yield from self._rest()
        self._end()

    def _leading(self) -> Step[None]:
        """Read the calls at the beginning, if there are any."""
        self._space += yield from self._blanks()
        begin = yield from self._next()
        if begin in ("{", "["):
            self._begin()
            yield from self._several()

    def _several(self) -> Step[None]:
        """Read a list of calls, or calls with nothing but semicolons and whitespace between them, since the
        remembered place."""
        yield from self._blanks()
        if (yield from self._next()) == "[":
            yield from self._list()
            return
        while (yield from self._object()):
            self._accept()
            self._space = yield from self._blanks()
            self._begin()
            if (yield from self._literal(";")):
                yield from self._blanks()
            if (yield from self._next()) != "{":
                break
        self._reject()

    def _list(self) -> Step[None]:
        """Read a list of calls. What follows the last whole call of a list without end is text."""
        yield from self._literal("[")
        yield from self._blanks()
        while (yield from self._object()):
            self._accept()
            self._begin()
            yield from self._blanks()
            if (yield from self._literal("]")):
                self._accept()
                return
            if not (yield from self._literal(",")):
                break
            yield from self._blanks()
        self._reject()
