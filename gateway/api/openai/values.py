"""JSON values in error messages: the name of a value's type, a value cut to a readable length, valid text."""

from __future__ import annotations

from gateway.bounded_json import encode
from laps_sd.errors import InvalidArgument

__all__ = ["check_text", "kind_of", "shown"]

MAX_SHOWN_CHARACTERS = 40


def kind_of(value: object) -> str:
    """Return the JSON name of a value's type."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "a truth value"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "a list" if value else "an empty list"
        case _:
            return "an object"


def shown(value: object) -> str:
    """Return the beginning of a value as JSON; its type, if it nests too deeply."""
    try:
        text = encode(value)
    except ValueError:
        return kind_of(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "…"


def check_text(name: str, value: str) -> str:
    """Return a text that is valid Unicode; JSON and headers can hold lone surrogates. Raises
    InvalidArgument."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(name, "must be valid Unicode") from None
    return value
