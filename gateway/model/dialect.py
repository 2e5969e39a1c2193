"""How a model writes tool calls and reasoning: by its chat template, or by settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from gateway.model.reasoning import REASONING, Markers, markers_of
from gateway.model.tool_calls.families import FAMILIES, ToolFamily, family_of
from gateway.settings import ReasoningParser, ToolParser

__all__ = ["NONE", "Dialect", "Parsers", "dialect_of"]

Parsers: TypeAlias = tuple[ToolParser, ReasoningParser]
"""The two settings."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The markup in the output of one model."""

    tools: ToolFamily | None
    """None: calls are not read, and no request may have tools."""
    reasoning: Markers | None
    """None: the model writes no reasoning, or it is part of the answer."""
    single_call: bool = False
    """The chat template refuses messages with more than one call."""

    def markup(self) -> Iterator[str]:
        """Yield the markup that a tokenizer may have as special tokens, which otherwise have no text."""
        if self.tools is not None:
            yield from self.tools.markers
        if self.reasoning is not None:
            yield from (self.reasoning.begin, self.reasoning.end)


NONE = Dialect(None, None)


def dialect_of(template: str, tool_parser: ToolParser, reasoning_parser: ReasoningParser) -> Dialect:
    """Return the dialect that the settings name; "auto" is the one whose markup the chat template mentions."""
    return Dialect(
        family_of(template) if tool_parser == "auto" else FAMILIES.get(tool_parser),
        markers_of(template) if reasoning_parser == "auto" else REASONING.get(reasoning_parser),
        single_call="single tool-call" in template,
    )
