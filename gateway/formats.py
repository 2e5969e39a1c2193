"""Whether an output format can be used at all. Pure; needs no tokenizer and no model.

A worker compiles the format against its vocabulary; what is wrong with it by itself is told to the client before the request is
accepted. The library is the worker's, so that both judge alike; a gateway without it leaves the judgement to the worker, whose
refusal then is the request's end.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from laps_sd.formats import first_line, grammar_of

__all__ = ["problem_of"]

MAX_DEPTH = 64
"""Of a schema's JSON: deeper ones overflow somebody's stack, and none is meant."""


@functools.lru_cache(maxsize=256)
def problem_of(kind: str, text: str) -> str:
    """What is wrong with a `json_schema`, `regex` or `grammar`, in words that go behind the field's name; empty: nothing."""
    schema: Any = None
    if kind == "json_schema":
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"must be JSON: {error}"
        if not isinstance(schema, dict | bool):
            return "must be a JSON schema: an object, or true"
        if _depth(schema) > MAX_DEPTH:
            return f"must nest at most {MAX_DEPTH} levels"
    try:
        from llguidance import LLMatcher
    except ImportError:
        return ""
    found = LLMatcher.validate_grammar(grammar_of(kind, schema if kind == "json_schema" else text))
    return f"cannot be used: {first_line(found)}" if found.strip() else ""


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
    return depth
