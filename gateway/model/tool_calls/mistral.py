"""Calls as Mistral's models write them, with text before:

[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]
[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}           since tokenizer version 11; once for each call
"""

from __future__ import annotations

from gateway.model.incremental import Step
from gateway.model.tool_calls.plain import PlainReader

__all__ = ["ARGS", "BEGIN", "CALL_ID", "MistralReader"]

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralReader(PlainReader):
    """Reads calls after a token: a list of them, or one name and its arguments."""

    def _run(self) -> Step[None]:
        while (yield from self._until(BEGIN)):
            yield from self._blanks()
            begin = yield from self._next()
            if begin in ("[", "{"):
                yield from self._several()
            elif (yield from self._named()):
                self._accept()
            else:
                self._reject()
        self._end()

    def _named(self) -> Step[bool]:
        """Read a name and its arguments; return whether they are a call."""
        name = yield from self._word()
        if name not in self._tools:
            return False
        if (yield from self._literal(CALL_ID)):
            yield from self._word()
        yield from self._literal(ARGS)
        yield from self._blanks()
        if (yield from self._arguments(name)) is None:
            return False
        self._complete()
        return True
