"""Output formats as llguidance takes them, so that gateway and worker judge one alike. The library is imported when it is needed."""

from __future__ import annotations

from typing import Any

__all__ = ["first_line", "grammar_of"]

WHITESPACE = {"whitespace_pattern": r"[ \n\r\t]{1,40}"}
"""Between the parts of JSON: enough to indent, and no way to go on with blanks to the end of max_tokens (our choice)."""
MAX_SAID = 200
"""Characters of what is wrong with a format: it may quote all of it, and a status travels in headers."""


def grammar_of(kind: str, wanted: Any) -> str:
    """`wanted` is a parsed schema where `kind` is json_schema, else the text of a `regex` or a `grammar`. Raises ImportError."""
    from llguidance import LLMatcher

    match kind:
        case "json_schema":
            return str(LLMatcher.grammar_from_json_schema(wanted, defaults=WHITESPACE))
        case "regex":
            return str(LLMatcher.grammar_from_regex(wanted))
        case _:
            return str(LLMatcher.grammar_from_lark(wanted))


def first_line(said: str) -> str:
    """Of what llguidance says is wrong, as part of a sentence."""
    lines = said.strip().splitlines()
    return lines[0][:MAX_SAID].rstrip(".") if lines else "it is not valid"
