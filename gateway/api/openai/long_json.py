"""JSON of large answers, for a thread beside the event loop."""

from __future__ import annotations

import json
from collections.abc import Iterator

__all__ = ["json_in_parts"]

TOGETHER = 64
"""Items of a list that are encoded at once: 64 tokens with 20 alternatives each take 2 ms."""


def json_in_parts(value: object) -> str:
    """Return what `json.dumps` returns. That lets no other thread run until it is done, which takes a second for
    each million log probabilities."""
    return "".join(_parts(value))


def _parts(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        separator = "{"
        for key, item in value.items():
            yield f"{separator}{json.dumps(key)}: "
            yield from _parts(item)
            separator = ", "
        yield "}" if value else "{}"
    elif isinstance(value, list) and len(value) > TOGETHER:
        separator = "["
        for start in range(0, len(value), TOGETHER):
            yield separator + json.dumps(value[start : start + TOGETHER])[1:-1]
            separator = ", "
        yield "]"
    elif isinstance(value, list):
        separator = "["
        for item in value:
            yield separator
            yield from _parts(item)
            separator = ", "
        yield "]" if value else "[]"
    else:
        yield json.dumps(value)
