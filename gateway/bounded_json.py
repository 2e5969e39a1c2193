"""JSON of clients within bounds that are checked before any value is made: an empty list takes three bytes here and
fifty in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

__all__ = ["decode", "decode_text", "encode", "is_few", "is_flat"]

STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
"""A string of JSON. An unterminated string matches too, so that it is scanned only once."""


def is_few(texts: Sequence[str], max_fields: int, max_values: int) -> bool:
    """Return whether texts of JSON have at most `max_fields` lists, objects and fields of them, and
    `max_values` values, all together. A string that does not end hides what follows in its own text only."""
    return _few("".join(texts), max_fields, max_values) or _few(
        "".join(STRING.sub("", text) for text in texts), max_fields, max_values
    )


def decode(text: str) -> Any:
    """Return the value of JSON. Raises ValueError with the reason."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def encode(value: object, *, ascii_only: bool = True) -> str:
    """Return a value as JSON. Raises ValueError with the reason: what could be decoded may nest too deeply for a
    caller that is deeper in the stack."""
    try:
        return json.dumps(value, ensure_ascii=ascii_only)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def decode_text(text: str) -> Any:
    """Return the value of JSON whose strings are valid Unicode. Raises ValueError with the reason."""
    value = decode(text)
    if "\\u" in text:
        try:
            encode(value, ascii_only=False).encode()
        except UnicodeEncodeError:
            raise ValueError("it must be valid Unicode") from None
    return value


def is_flat(value: Any, max_levels: int) -> bool:
    """Return whether a value nests at most `max_levels` lists and objects in each other."""
    level = [value]
    for _ in range(max_levels + 1):
        level = [inner for each in level for inner in _inner(each)]
        if not level:
            return True
    return False


def _inner(value: Any) -> Iterable[Any]:
    match value:
        case dict():
            return value.values()
        case list():
            return value
        case _:
            return ()


def _few(text: str, max_fields: int, max_values: int) -> bool:
    """Return whether JSON is within the bounds even if the contents of its strings are counted as JSON."""
    return text.count("[") + text.count("{") + text.count(":") <= max_fields and text.count(",") <= max_values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
