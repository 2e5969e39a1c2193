"""Calls as Hermes, Qwen 2.5 and Qwen 3 write them, one after another, with text before:

<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from __future__ import annotations

from gateway.model.incremental import Step
from gateway.model.tool_calls.reader import ToolReader

__all__ = ["BEGIN", "END", "HermesReader"]

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesReader(ToolReader):
    """Reads calls between tags. The last closing tag may be missing or cut."""

    def _run(self) -> Step[None]:
        while (yield from self._until(BEGIN)):
            yield from self._blanks()
            if (yield from self._object()):
                yield from self._blanks()
                yield from self._closing(END)
                self._accept()
            else:
                self._reject()
        self._end()
