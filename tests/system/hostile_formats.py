"""Output formats that would cost a library seconds, gigabytes or a crash, and the words with which each is
refused.
"""

from __future__ import annotations

import json
from typing import Any


def _lines(definition: str, last: str, count: int, *, first: str) -> str:
    """Return a chain of definitions, each with the next in it: `{0}` is a number, `{1}` the next."""
    lines = [definition.format(number, number + 1) for number in range(count)]
    return "\n".join([first, *lines, last.format(count)])


def _schema(schema: Any) -> tuple[str, str]:
    return "json_schema", json.dumps(schema)


def _nested(levels: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, tuple[tuple[str, str], str]] = {
    "many optional parts": (("regex", "a?" * 32_000), "too big"),
    "many classes": (("regex", r"[\w\p{L}\p{Greek}]{1,300}" * 1000), "too big"),
    "many words": (("regex", "|".join(f"word{n}" for n in range(5000))), "too big"),
    "groups in groups": (("regex", "(" * 30_000 + "a" + ")" * 30_000), "cannot be used"),
    "stars of stars": (("regex", "a" + "*" * 60_000), "cannot be used"),
    "terminals that double": (
        ("grammar", _lines("T{0}: T{1} T{1}", 'T{0}: "a"?', 60, first="start: T0")),
        "too big",
    ),
    "terminals that double 16 times": (
        ("grammar", _lines("T{0}: T{1} T{1}", 'T{0}: "a"?', 16, first='start: "x" T0')),
        "too big",
    ),
    "a chain of terminals": (
        ("grammar", _lines('T{0}: "a" T{1}', 'T{0}: "a"', 3500, first="start: T0")),
        "at most 1000 rules, terminals, groups and negations",
    ),
    "a chain of rules": (
        ("grammar", _lines('r{0}: "a" r{1}', 'r{0}: "a"', 3500, first="start: r0")),
        "at most 1000 rules, terminals, groups and negations",
    ),
    "groups in a grammar": (
        ("grammar", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
        "at most 1000 rules, terminals, groups and negations",
    ),
    "negations": (("grammar", "start: A\nA: " + "~" * 60_000 + '"a"'), "at most 1000"),
    "the library's own notation": (
        ("grammar", json.dumps({"grammars": [{"json_schema": {"type": "object"}}]})),
        "in the form of Lark",
    ),
    "a deep schema": (_schema(_nested(70)), "at most 64 levels"),
    "a deeper schema": (("json_schema", "[" * 60_000), "must be JSON"),
    "a long pattern": (_schema({"type": "string", "pattern": "a?" * 1000}), "at most 1024 characters"),
    "a long name": (_schema({"patternProperties": {"a?" * 1000: {}}}), "at most 1024 characters"),
    "many names": (_schema({"properties": {f"property_{n}": {} for n in range(2500)}}), "too big"),
    "many values": (_schema({"enum": [f"Number {n}" for n in range(3000)]}), "too big"),
    "alternatives of alternatives": (
        _schema({"allOf": [{"anyOf": [{"properties": {f"{i}.{j}": {}}} for j in range(10)]} for i in range(20)]}),
        "too large",
    ),
    "references in a ring": (
        _schema({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}}),
        "circular references",
    ),
    "a large divisor": (_schema({"type": "integer", "multipleOf": 2**31 - 1}), "fuel exhausted"),
    "a large number": (_schema({"type": "number", "minimum": 10**400}), "cannot be used"),
    "no number": (_schema({"type": "number", "minimum": float("nan")}), "cannot be used"),
    "half a character": (_schema({"const": "\ud800"}), "cannot be used"),
    "a panic": (_schema({"type": "string", "minLength": "é" * 100}), "the library for formats fails over it"),
    "a blank of its own": (_schema({"x-guidance": {"whitespace_pattern": "((a{9}){9}){9}"}}), "x-guidance"),
}  # fmt: skip
"""Name → kind and text, and a part of the refusal."""
