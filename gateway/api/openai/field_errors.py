"""Faults that pydantic finds in a body, as errors that name the field as the client wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from gateway.api.openai.values import kind_of, shown
from laps_sd.errors import InvalidArgument

__all__ = [
    "FORMAT",
    "IDS",
    "ITEM",
    "NAME",
    "OBJECT",
    "PARTS",
    "SCHEMA",
    "SEVERAL",
    "TEXT",
    "refused",
    "validated",
]

Read = TypeVar("Read", bound=BaseModel)

TEXT, IDS, SEVERAL, PARTS, FORMAT, SCHEMA = "<text>", "<ids>", "<several>", "<parts>", "<format>", "<schema>"
NAME, OBJECT, ITEM = "<name>", "<object>", "<message>"
"""Names of the alternatives of a field, which are part of pydantic's location and of no client's."""
MAX_NAME_CHARACTERS = 40

REFUSED = "refused"

EXPECTED = {
    "string_type": "a text",
    "bool_type": "true or false",
    "float_type": "a number",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
"""The kind of value that a type of error expects."""
EXPECTED_OF_FIELD = {
    "content": "a text or a list of parts",
    "function": "an object with a name",
    "json_schema": "an object with a schema",
    "messages": "a list of messages",
    "prompt": "a text, token ids, or a list of them",
    "schema": "a JSON schema",
    "stop": "a text or a list of texts",
    "tool_calls": "a list of calls",
    "tools": "a list of tools",
}
"""The kind of value that a field expects which has no simple type, or is required."""
EXPECTED_TYPES: Mapping[int | str, str] = {
    PARTS: "text, all that the engine reads",
    FORMAT: "text, json_object or json_schema",
    ITEM: "message, function_call, function_call_output or reasoning",
}
"""The values of the field `type` that an alternative expects."""


def refused(problem: str, *, item: str = "") -> PydanticCustomError:
    """Return the exception by which a validator refuses a value: `problem` follows the field's name, and `item`
    names a part of the value."""
    # Not as the template, in which braces have a meaning: it may quote the client.
    return PydanticCustomError(REFUSED, "{problem}", {"problem": problem, "item": item})


def validated(model: type[Read], body: Mapping[str, Any]) -> Read:
    """Return a body as its model. Raises InvalidArgument for its first fault."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _invalid_argument(error) from None


def _invalid_argument(error: ValidationError) -> InvalidArgument:
    fault = error.errors(include_url=False)[0]
    location, context = fault["loc"], fault.get("ctx", {})
    return InvalidArgument(
        _name(location) + context.get("item", ""),
        _sentence(fault["type"], location, None if fault["type"] == "missing" else fault["input"], context),
    )


def _name(location: Sequence[int | str]) -> str:
    """Return the name of a field: `messages[0].content`."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif not _is_tag(part):
            name += ("." if name else "") + part[:MAX_NAME_CHARACTERS]
    return name


def _is_tag(part: int | str) -> bool:
    """Return whether a part of a location names an alternative of a field. Names of fields of models have no
    brackets."""
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")


def _sentence(kind: str, location: Sequence[int | str], value: object, context: dict[str, Any]) -> str:
    if kind == REFUSED:
        return str(context["problem"])
    if IDS in location and isinstance(location[-1], int):
        return f"must be a token id, got {shown(value)}"
    match kind:
        case "extra_forbidden":
            return "is not a known field; leave it out"
        case "literal_error" | "missing" if location[-1] == "type":
            types = (EXPECTED_TYPES[tag] for tag in reversed(location) if tag in EXPECTED_TYPES)
            expected = next(types, context.get("expected", "function"))
            return f"must be {expected}, got {shown(value)}"
        case "literal_error":
            return f"must be {context['expected']}, got {shown(value)}"
        case "greater_than_equal" | "less_than_equal":
            return "must be a number of ordinary size"
        case "float_type" if isinstance(value, int) and not isinstance(value, bool):
            return "must be a number of ordinary size"
    field = next((part for part in reversed(location) if not _is_tag(part)), "")
    expected = EXPECTED_OF_FIELD.get(str(field)) or EXPECTED.get(kind, "a text")
    if kind == "missing" and expected == "a text":
        return "must be given"
    return f"must be {expected}, got {kind_of(value)}"
