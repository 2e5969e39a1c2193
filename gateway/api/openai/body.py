"""The bytes of a body as JSON, within bounds that are checked before any value is made."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn, TypeAlias

from gateway.api.openai.limits import MAX_VALUES
from gateway.api.openai.values import kind_of
from laps_sd.errors import InvalidArgument

__all__ = ["Json", "read_body"]

Json: TypeAlias = dict[str, Any]

STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
"""A string of JSON. An unterminated string matches too, so that it is scanned only once."""


def read_body(raw: bytes, max_fields: int) -> Json:
    """Return the object in a body. Raises InvalidArgument; for too many values before any value is made,
    because an empty list takes three bytes here and fifty in memory."""
    if not _few(raw, max_fields) and not _few(STRING.sub(b"", raw), max_fields):
        raise InvalidArgument(
            "",
            f"the body must be JSON of at most {max_fields} lists, objects and fields of them, and {MAX_VALUES} values",
        )
    try:
        value = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "it nests too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidArgument("", f"the body must be JSON: {reason}") from None
    if not isinstance(value, dict):
        raise InvalidArgument("", f"the body must be a JSON object, got {kind_of(value)}")
    return value


def _few(raw: bytes, max_fields: int) -> bool:
    """Return whether JSON is within the bounds even if the contents of its strings are counted as JSON."""
    fields = raw.count(b"[") + raw.count(b"{") + raw.count(b":")
    return fields <= max_fields and raw.count(b",") <= MAX_VALUES


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
