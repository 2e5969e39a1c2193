"""The bytes of a body as JSON, within bounds that are checked before any value is made."""

from __future__ import annotations

from typing import Any, TypeAlias

from gateway.api.openai.limits import MAX_VALUES
from gateway.api.openai.values import kind_of
from gateway.bounded_json import decode, is_few
from laps_sd.errors import InvalidArgument

__all__ = ["Json", "read_body"]

Json: TypeAlias = dict[str, Any]


def read_body(raw: bytes, max_fields: int) -> Json:
    """Return the object in a body. Raises InvalidArgument; for too many values before any value is made."""
    # RFC 8259, section 8.1. Python's decoder takes UTF-16 too, whose bytes hide what is counted here.
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidArgument("", "the body must be UTF-8") from None
    if not is_few([text], max_fields, MAX_VALUES):
        raise InvalidArgument(
            "",
            f"the body must be JSON of at most {max_fields} lists, objects and fields of them, and {MAX_VALUES} values",
        )
    try:
        value = decode(text)
    except ValueError as error:
        raise InvalidArgument("", f"the body must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument("", f"the body must be a JSON object, got {kind_of(value)}")
    return value
