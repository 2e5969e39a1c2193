"""The OpenAPI description: valid by the rules of OpenAPI 3.1, and true of what the reader accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.api.description import openapi_json
from gateway.api.openai.limits import MAX_PROMPTS, UINT64
from gateway.api.openai.models import ChatBody, CompletionBody

DESCRIPTION: Any = json.loads(openapi_json())
SCHEMAS: Any = DESCRIPTION["components"]["schemas"]
METHODS = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}
OPERATIONS = [
    (path, method, operation)
    for path, item in DESCRIPTION["paths"].items()
    for method, operation in item.items()
    if method != "parameters"
]
TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}
KEYWORDS = {
    "$ref", "additionalProperties", "anyOf", "const", "default", "description", "enum", "items", "maxItems", "maximum", "minItems",
    "minimum", "oneOf", "properties", "required", "title", "type",
}  # fmt: skip
"""Keywords of JSON Schema 2020-12 that the description uses."""


def schemas_of(schema: Any) -> Iterator[Any]:
    """Yield a schema and all schemas in it."""
    yield schema
    below = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("properties", {}).values()]
    below += [
        schema[name] for name in ("items", "additionalProperties") if isinstance(schema.get(name), dict)
    ]
    for each in below:
        yield from schemas_of(each)


def media_types() -> Iterator[tuple[str, Any]]:
    """Yield every media type of a request or an answer with its object."""
    for _, _, operation in OPERATIONS:
        for holder in (operation.get("requestBody", {"content": {}}), *operation["responses"].values()):
            yield from holder["content"].items()


def all_schemas() -> Iterator[Any]:
    for _, media in media_types():
        yield from schemas_of(media["schema"])
    for schema in SCHEMAS.values():
        yield from schemas_of(schema)


def test_the_document_has_what_openapi_requires() -> None:
    assert re.fullmatch(r"3\.1\.\d+", DESCRIPTION["openapi"])
    assert DESCRIPTION["info"].keys() >= {"title", "version"}
    assert DESCRIPTION.keys() <= {"openapi", "info", "security", "paths", "components"}
    for name in (*SCHEMAS, *DESCRIPTION["components"]["securitySchemes"]):
        assert re.fullmatch(r"[a-zA-Z0-9._-]+", name)


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS, ids=lambda value: str(value)[:24])
def test_an_operation_has_what_openapi_requires(path: str, method: str, operation: Any) -> None:
    assert path.startswith("/")
    assert method in METHODS
    assert operation["summary"]
    assert operation["responses"]
    for status, response in operation["responses"].items():
        assert re.fullmatch(r"[1-5]\d\d|default", status)
        assert response["description"]
    declared = {
        one["name"] for one in DESCRIPTION["paths"][path].get("parameters", ()) if one["in"] == "path"
    }
    assert declared == set(re.findall(r"\{(\w+)\}", path))
    schemes = {name for one in operation.get("security", DESCRIPTION["security"]) for name in one}
    assert schemes <= DESCRIPTION["components"]["securitySchemes"].keys()


def test_every_schema_is_one_of_json_schema_and_every_reference_leads_somewhere() -> None:
    for schema in all_schemas():
        assert schema.keys() <= KEYWORDS
        kinds = schema.get("type", [])
        assert set([kinds] if isinstance(kinds, str) else kinds) <= TYPES
        assert set(schema.get("required", ())) <= schema.get("properties", {}).keys()
        if "$ref" in schema:
            assert schema["$ref"].removeprefix("#/components/schemas/") in SCHEMAS


def test_media_types_are_those_of_the_answers() -> None:
    assert {name for name, _ in media_types()} == {
        "application/json",
        "text/event-stream",
        "text/html",
        "text/plain",
    }


@pytest.mark.parametrize("model", [ChatBody, CompletionBody])
def test_a_body_has_the_fields_of_its_model_and_no_tag_of_ours(
    model: type[ChatBody | CompletionBody],
) -> None:
    schema = SCHEMAS[model.__name__]

    assert schema["properties"].keys() == model.model_fields.keys()
    assert "<" not in json.dumps(SCHEMAS)


def test_bounds_and_the_forms_of_a_field_are_described() -> None:
    fields = SCHEMAS["CompletionBody"]["properties"]

    assert {"type": "integer", "minimum": 0, "maximum": UINT64} in fields["deadline_unix_ms"]["anyOf"]
    text, ids, several = fields["prompt"]["oneOf"]
    assert text == {"type": "string"}
    assert ids["items"]["type"] == "integer"
    assert several["maxItems"] == MAX_PROMPTS
    stop = fields["stop"]["anyOf"]
    assert {"type": "string"} in [inner for one in stop for inner in one.get("anyOf", [one])]
    assert SCHEMAS["ChatBody"]["required"] == ["messages"]
    assert SCHEMAS["NamedSchema"]["required"] == ["schema"]


def test_the_forms_of_a_format_exclude_each_other() -> None:
    """`oneOf` holds for a value that fits exactly one of them."""
    plain, of_schema = (SCHEMAS[name]["properties"]["type"] for name in ("PlainFormat", "SchemaFormat"))

    assert plain["enum"] == ["text", "json_object"]
    assert of_schema["const"] == "json_schema"
