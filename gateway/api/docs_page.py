"""The OpenAPI description as one page for readers: no script, and nothing from another server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from html import escape

from gateway.api.description import openapi_json
from gateway.api.openai.body import Json

__all__ = ["POLICY", "docs_page"]

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content-Security-Policy of the page."""
STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem }
code { font-size: .9em } .method { font-weight: 700; text-transform: uppercase }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; vertical-align: top; padding: .25rem .5rem;
border-bottom: 1px solid #8886 } .wide { overflow-x: auto }
""".strip()


@cache
def docs_page() -> bytes:
    """Return the page, HTML in UTF-8."""
    return "\n".join(_page(json.loads(openapi_json()))).encode()


def _page(description: Json) -> Iterator[str]:
    info = description["info"]
    title = f"{info['title']} {info['version']}"
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}: HTTP API</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{STYLE}</style></head><body><main><h1>{escape(title)}: HTTP API</h1>"
    yield f'<p>{escape(info["description"])} As data: <a href="openapi.json">openapi.json</a>.</p>'
    yield "<h2>Endpoints</h2>"
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            if method != "parameters":
                yield from _operation(path, method, operation)
    yield "<h2>Objects</h2>"
    for name, schema in sorted(description["components"]["schemas"].items()):
        yield from _schema(name, schema)
    yield "</main></body></html>"


def _operation(path: str, method: str, operation: Json) -> Iterator[str]:
    yield f'<h3><span class="method">{method}</span> <code>{escape(path)}</code></h3>'
    yield f"<p>{escape(operation['summary'])}."
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        yield f"Body: {_type(body['schema'])}."
    for status, answer in operation["responses"].items():
        types = {_type(content["schema"]) for content in answer["content"].values()}
        yield f"{escape(status.capitalize())}: {' or '.join(sorted(types))}."
    yield "</p>"


def _schema(name: str, schema: Json) -> Iterator[str]:
    yield f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema.get("description", ""))}</p>'
    required = set(schema.get("required", ()))
    yield '<div class="wide"><table><tr><th>Field</th><th>Type</th><th>Meaning</th></tr>'
    for field, of_field in schema.get("properties", {}).items():
        needed = " (required)" if field in required else ""
        meaning = escape(of_field.get("description", ""))
        yield f"<tr><td><code>{escape(field)}</code>{needed}</td><td>{_type(of_field)}</td><td>{meaning}</td></tr>"
    yield "</table></div>"


def _type(schema: Json) -> str:
    """Return the type of a value as HTML, with links to objects."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for several in ("anyOf", "oneOf"):
        if several in schema:
            kinds = dict.fromkeys(_type(one) for one in schema[several] if one.get("type") != "null")
            return " or ".join(kinds)
    if "const" in schema or "enum" in schema:
        return " or ".join(escape(json.dumps(one)) for one in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any value")
    if isinstance(kind, list):
        kind = next(one for one in kind if one != "null")
    if kind == "array" and "items" in schema:
        return f"list of {_type(schema['items'])}"
    bounds = [
        f"{word} {schema[name]}" for name, word in (("minimum", "from"), ("maximum", "to")) if name in schema
    ]
    return escape(" ".join([str(kind), *bounds]))
