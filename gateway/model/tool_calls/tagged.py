"""Calls whose arguments are texts between tags, one after another, with text before. As Qwen 3 Coder writes them:

<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>

and as GLM 4.5 does:

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.model.incremental import Step
from gateway.model.tool_calls.parameters import Schema, json_of
from gateway.model.tool_calls.reader import MAX_WORD_CHARACTERS, Arguments, ToolReader

__all__ = ["BEGIN", "END", "GLM", "QWEN_CODER", "TaggedReader", "Tags"]

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Tags:
    """The markup inside a call, as a model is trained to write it: before and after each of its parts."""

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    """After the last value. Empty: END."""

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a call."""
        parts = [self.name[0], name, self.name[1]]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            parts += [self.key[0], key, self.key[1], self.value[0], text, self.value[1]]
        return "".join([*parts, self.end])

    def markers(self) -> tuple[str, ...]:
        """Return the markup without line breaks."""
        parts = (*self.name, *self.key, *self.value, self.end)
        return tuple(marker for part in parts if (marker := part.strip("\n")))


QWEN_CODER = Tags(
    name=("<function=", ">\n"),
    key=("<parameter=", ">\n"),
    value=("", "\n</parameter>\n"),
    end="</function>",
)
GLM = Tags(
    name=("", "\n"),
    key=("<arg_key>", "</arg_key>\n"),
    value=("<arg_value>", "</arg_value>\n"),
    end="",
)


class TaggedReader(ToolReader):
    """Reads calls between tags. Arguments are passed on one by one, since the end of a text decides what it is."""

    def __init__(self, tools: Mapping[str, Schema], tags: Tags) -> None:
        """Take the tools that may be called, with the schemas of their arguments."""
        super().__init__(tools)
        self._schemas = tools
        self._tags = tags

    def _run(self) -> Step[None]:
        begin = self._tags.name[0]
        # Qwen 3 Coder sometimes leaves out the outer tags.
        while marker := (yield from self._until(*filter(None, (BEGIN, begin)))):
            if marker == BEGIN:
                yield from self._blanks()
                there = yield from self._literal(begin)
            else:
                there = True
            if there and (yield from self._call()):
                if self._tags.end:
                    space = yield from self._blanks()
                    if not (yield from self._closing(END)):
                        self._space = space
                self._accept()
            else:
                self._reject()
        self._end()

    def _call(self) -> Step[bool]:
        """Read the name and the arguments; return whether they are a call."""
        tags = self._tags
        name = yield from self._word()
        if name not in self._schemas or not (yield from self._literal(tags.name[1].strip("\n"))):
            return False
        seen: set[str] = set()
        while True:
            yield from self._blanks()
            if (yield from self._literal(tags.end or END)):
                if not seen:
                    self._announce(name)
                self._events.append(Arguments(self._index, "}" if seen else "{}"))
                self._complete()
                return True
            if not (yield from self._literal(tags.key[0])):
                return False
            if not seen:
                self._announce(name)
            key = yield from self._up_to(tags.key[1].strip("\n"), MAX_WORD_CHARACTERS)
            if key is None or key in seen:
                return False
            if tags.value[0]:
                yield from self._blanks()
                if not (yield from self._literal(tags.value[0])):
                    return False
            text = yield from self._up_to(tags.value[1].strip("\n"), None)
            if text is None:
                return False
            if not tags.value[0]:  # it has lines of its own
                text = text.removeprefix("\n").removesuffix("\n")
            value = json_of(text, *self._schema_of(name, key))
            self._events.append(
                Arguments(
                    self._index, f"{', ' if seen else '{'}{json.dumps(key, ensure_ascii=False)}: {value}"
                )
            )
            seen.add(key)

    def _schema_of(self, name: str, key: str) -> tuple[Any, Schema]:
        root = self._schemas[name]
        properties = root.get("properties")
        return (properties.get(key) if isinstance(properties, dict) else None), root
