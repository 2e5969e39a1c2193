"""Parameters of a tool whose values a model writes as texts, and what their schemas allow. Pure.

Values that are strings stand as they are, others as JSON. So the schema decides what a text means: `7` is a number for
{"type": "integer"}, and the text "7" for {"type": "string"}.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

__all__ = ["Schema", "Unwritable", "allowed_texts", "json_of", "parameters_of", "takes_text"]

Schema: TypeAlias = Mapping[str, Any]
"""JSON schema of the arguments of a tool, or of one of them."""

ANY = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""How templates that render values with Python's `str` show them to a model, and their JSON."""
DEEPEST = 16
"""References from one to the next that are followed."""
MOST_PARTS = 48
"""Names in a reference that are followed: a schema has no more levels."""
MOST_ALTERNATIVES = 256
"""Alternatives of a parameter that are read, with those inside them. Our choice: definitions that refer to
each other have any number of them, and the gateway serves no other call while it reads them."""
WHOLE = (
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "patternProperties",
    "propertyNames",
    "minProperties",
)
"""Keywords about all arguments together, which are not written together."""
OF_TEXTS = ("pattern", "minLength", "maxLength", "format")
"""Keywords about a string that stands as it is."""


class Unwritable(ValueError):
    """Arguments with this schema cannot be required as texts. The message names the keyword."""


def parameters_of(schema: Schema) -> dict[str, tuple[Schema, bool]]:
    """Return the schema of each parameter, and whether it must be there. Raises Unwritable."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise Unwritable("properties must be an object and required a list")
    for keyword in WHOLE:
        if keyword in schema:
            raise Unwritable(
                f"{keyword} next to properties cannot be required in the form of this model's calls"
            )
    if unknown := [name for name in required if name not in properties]:
        raise Unwritable(f"required names {unknown[0]!r}, which is not among the properties")
    return {name: (one, name in required) for name, one in properties.items()}


def json_of(text: str, schema: Any, root: Schema) -> str:
    """Return the JSON of a value that a model wrote as `text`. `root`: the schema with the definitions."""
    kinds = _kinds(schema, root)
    if kinds <= {"string", "null"} and not (text == "null" and "null" in kinds):
        return json.dumps(text, ensure_ascii=False)
    value = OF_PYTHON.get(text.strip(), text.strip())
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return value


def allowed_texts(schema: Any, root: Schema) -> list[str]:
    """Return the texts of a parameter that has few values; none if it may have others."""
    schema = _resolved(schema, root)
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else _list(schema, "enum")
    return [value if isinstance(value, str) else json.dumps(value) for value in values]


def takes_text(name: str, schema: Any, root: Schema) -> bool:
    """Return whether a parameter may be any text. Raises Unwritable if its schema limits the text."""
    if _resolved(schema, root) is None:
        raise Unwritable(f"the schema of {name!r} refers to a definition that does not exist")
    if "string" not in _kinds(schema, root):
        return False
    alternatives = _alternatives(schema, root)
    if alternatives is None:
        raise Unwritable(
            f"more than {MOST_ALTERNATIVES} alternatives of {name!r} cannot be required in the form of this model's calls"
        )
    for keyword in OF_TEXTS:
        if any(isinstance(one, dict) and keyword in one for one in alternatives):
            raise Unwritable(f"{keyword} of {name!r} cannot be required in the form of this model's calls")
    return True


def _kinds(schema: Any, root: Schema) -> frozenset[str]:
    """Return the JSON types that a schema allows."""
    kinds: set[str] = set()
    for one in _alternatives(schema, root, of_typed=False) or [None]:
        stated = _stated_kinds(one) if isinstance(one, dict) else ANY
        if stated is None:
            stated = frozenset() if _inner(one) else ANY
        kinds |= stated
    return frozenset(kinds) or ANY


def _stated_kinds(schema: Schema) -> frozenset[str] | None:
    """Return the JSON types that a schema states itself; None if it states none."""
    if "const" in schema:
        return _kinds_of([schema["const"]])
    if isinstance(values := schema.get("enum"), list):
        return _kinds_of(values)
    if isinstance(kind := schema.get("type"), str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(one for one in kind if isinstance(one, str))
    return None


def _alternatives(schema: Any, root: Schema, *, of_typed: bool = True) -> list[Any] | None:
    """Return a schema, its alternatives, and those inside them, each once and without references; None for more than
    MOST_ALTERNATIVES. `of_typed`: also those of schemas that state their types."""
    found: dict[int, Any] = {}
    waiting = [schema]
    for _ in range(MOST_ALTERNATIVES):
        if not waiting:
            break
        one = _resolved(waiting.pop(), root)
        if id(one) not in found and isinstance(one, dict) and (of_typed or _stated_kinds(one) is None):
            waiting += _inner(one)
        found[id(one)] = one
    return None if waiting else list(found.values())


def _inner(schema: Schema) -> list[Any]:
    """Return the alternatives that a schema has itself."""
    return [*_list(schema, "anyOf"), *_list(schema, "oneOf")]


def _kinds_of(values: Iterable[object]) -> frozenset[str]:
    return frozenset(
        "string" if isinstance(value, str) else "null" if value is None else "number" for value in values
    )


def _resolved(schema: Any, root: Schema) -> Any:
    """Return the schema that a chain of references to the definitions of `root` leads to."""
    for _ in range(DEEPEST):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            break
        place: Any = root
        for part in reference.removeprefix("#/").split("/", MOST_PARTS):
            place = place.get(part) if isinstance(place, dict) else None
        schema = place
    return schema


def _list(schema: Schema, keyword: str) -> list[Any]:
    """Return the list of a keyword; empty if the schema has none."""
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
