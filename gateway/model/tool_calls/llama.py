"""Calls as Llama 3 writes them: the whole output is

{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": …}

or such calls follow the token <|python_tag|>.
"""

from __future__ import annotations

from gateway.model.incremental import Step
from gateway.model.tool_calls.plain import PlainReader

__all__ = ["TAG", "LlamaReader"]

TAG = "<|python_tag|>"


class LlamaReader(PlainReader):
    """Reads calls at the beginning of an output, and after a tag."""

    def _run(self) -> Step[None]:
        yield from self._leading()
        while (yield from self._until(TAG)):
            yield from self._several()
        self._end()
