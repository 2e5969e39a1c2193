"""The OpenAPI description of the HTTP port: its paths, and the bodies as the models read them."""

from __future__ import annotations

import json
from functools import cache

from pydantic.json_schema import models_json_schema

import laps_sd
from gateway.api.anthropic.body import CountBody, MessagesBody
from gateway.api.openai.body import Json
from gateway.api.openai.models import ChatBody, CompletionBody
from gateway.api.openai.responses.body import ResponsesBody
from gateway.api.openai.tokens import DetokenizeBody, TokenizeBody

__all__ = ["openapi_json"]

ERROR: Json = {
    "description": "An error.",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": {"type": ["string", "null"], "description": "The field or header at fault."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
MODEL: Json = {
    "description": "A model.",
    "type": "object",
    "required": ["id", "object", "created", "owned_by", "max_model_len"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "max_model_len": {"type": "integer", "description": "Tokens of prompt and output together."},
    },
}
STATUS: Json = {
    "description": "Whether the gateway works, and if not, why.",
    "type": "object",
    "required": ["status"],
    "properties": {
        "status": {"enum": ["live", "ready", "not ready"]},
        "workers": {"type": "integer", "description": "Connected workers of all shards."},
        "reason": {"type": "string"},
    },
}
TOKENS: Json = {
    "description": "The tokens of a prompt.",
    "type": "object",
    "required": ["count", "max_model_len", "tokens"],
    "properties": {
        "count": {"type": "integer"},
        "max_model_len": {"type": "integer", "description": "Tokens of prompt and output together."},
        "tokens": {"type": "array", "items": {"type": "integer"}},
        "token_strs": {"type": ["array", "null"], "items": {"type": ["string", "null"]}},
    },
}
BODIES = (
    ChatBody,
    CompletionBody,
    CountBody,
    DetokenizeBody,
    MessagesBody,
    ResponsesBody,
    TokenizeBody,
)
KEY: Json = {
    "type": "http",
    "scheme": "bearer",
    "description": "The key of a tenant, where keys are configured; the header x-api-key takes it too.",
}
NO_KEY: list[Json] = []


@cache
def openapi_json() -> bytes:
    """Return the description as JSON. It is the same for each gateway of a version."""
    _, bodies = models_json_schema(
        [(model, "validation") for model in BODIES],
        ref_template="#/components/schemas/{model}",
    )
    description = {
        "openapi": "3.1.0",
        "info": {
            "title": "LAPS-SD",
            "version": laps_sd.__version__,
            "description": "OpenAI's API as a gateway of LAPS-SD serves it. A field that is not here is "
            "refused, unless its value requests nothing (null, false, an empty list) or it labels the request.",
        },
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/chat/completions": {"post": _generation("A chat completion", ChatBody.__name__)},
            "/v1/completions": {
                "post": _generation("Completions of texts or token ids", CompletionBody.__name__)
            },
            "/v1/responses": {"post": _generation("A response; nothing is stored", ResponsesBody.__name__)},
            "/v1/messages": {
                "post": _generation("A message, as Anthropic's API has it", MessagesBody.__name__)
            },
            "/v1/messages/count_tokens": {
                "post": _call("Tokens of the prompt of a message", CountBody.__name__, "Count")
            },
            "/v1/models": {
                "get": _page(
                    "The list of models",
                    {"type": "object", "properties": {"data": {"type": "array", "items": _ref("Model")}}},
                    errors=("401", "403"),
                )
            },
            "/v1/models/{name}": {
                "parameters": [
                    {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
                ],
                "get": _page("One model", _ref("Model"), errors=("401", "403", "404")),
            },
            "/health": {
                "get": _page(
                    "Whether a new request would be accepted",
                    _ref("Status"),
                    other={"503": _answer("It would not, and why", _ref("Status"))},
                    security=NO_KEY,
                )
            },
            "/live": {"get": _page("Whether the process answers", _ref("Status"), security=NO_KEY)},
            "/metrics": {
                "get": _page(
                    "Metrics for Prometheus",
                    {"type": "string"},
                    media="text/plain",
                    errors=("401", "403"),
                )
            },
            "/version": {"get": _page("The version of LAPS-SD", _object(version="string"), security=NO_KEY)},
            "/ping": {
                method: _page(
                    "As /health",
                    _ref("Status"),
                    other={"503": _answer("A new request would not be accepted, and why", _ref("Status"))},
                    security=NO_KEY,
                )
                for method in ("get", "post")
            },
            "/load": {
                "get": _page(
                    "The number of open requests of this gateway",
                    _object(server_load="integer"),
                    errors=("401", "403"),
                )
            },
            "/tokenize": {"post": _call("Token ids of a prompt", TokenizeBody.__name__, "Tokens")},
            "/detokenize": {"post": _call("Text of token ids", DetokenizeBody.__name__, "Prompt")},
            "/docs": {
                "get": _page(
                    "This description as a page", {"type": "string"}, media="text/html", security=NO_KEY
                )
            },
            "/openapi.json": {"get": _page("This description", {"type": "object"}, security=NO_KEY)},
            **_console(),
        },
        "components": {
            "schemas": bodies["$defs"]
            | {
                "Count": _object(input_tokens="integer"),
                "Error": ERROR,
                "Model": MODEL,
                "Prompt": _object(prompt="string"),
                "Status": STATUS,
                "Tokens": TOKENS,
            },
            "securitySchemes": {"key": KEY},
        },
    }
    return json.dumps(description, ensure_ascii=False).encode()


def _console() -> Json:
    """Return the paths of the console; the form of its data may change between releases."""
    text: Json = {"type": "string"}
    identified: Json = {"name": "id", "in": "path", "required": True, "schema": text}
    return {
        "/console": {"get": _page("The console", text, media="text/html", security=NO_KEY)},
        "/console/demo": {
            "get": _page("A recorded burst under two policies", text, media="text/html", security=NO_KEY)
        },
        "/console/assets/{name}": {
            "parameters": [identified | {"name": "name"}],
            "get": _page("A file of the console", text, media="text/plain", security=NO_KEY),
        },
        "/console/api/events": {
            "get": _page(
                "What the console shows, once a second",
                text,
                media="text/event-stream",
                errors=("401", "403", "429"),
            )
        },
        "/console/api/requests/{id}": {
            "parameters": [identified],
            "get": _page(
                "The explanation of a request", {"type": "object"}, errors=("401", "403", "404", "429", "503")
            ),
        },
    }


def _generation(summary: str, body: str) -> Json:
    """Return the description of an endpoint that generates text."""
    whole = {"application/json": {"schema": {"type": "object"}}}
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
        "responses": {
            "200": {"description": "The output, whole or as server-sent events", "content": whole | stream},
            "default": _answer("An error", _ref("Error")),
        },
    }


def _call(summary: str, body: str, answer: str) -> Json:
    """Return the description of an endpoint that answers a body at once."""
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
        "responses": {
            "200": _answer("The answer", _ref(answer)),
            "default": _answer("An error", _ref("Error")),
        },
    }


def _object(**types: str) -> Json:
    """Return the schema of an object whose fields have these types."""
    return {
        "type": "object",
        "required": list(types),
        "properties": {name: {"type": kind} for name, kind in types.items()},
    }


def _page(
    summary: str,
    schema: Json,
    *,
    media: str = "application/json",
    errors: tuple[str, ...] = (),
    other: Json | None = None,
    security: list[Json] | None = None,
) -> Json:
    """Return the description of an endpoint without a body."""
    page: Json = {
        "summary": summary,
        "responses": {
            "200": _answer(summary, schema, media),
            **{status: _answer("An error", _ref("Error")) for status in errors},
            **(other or {}),
        },
    }
    if security is not None:
        page["security"] = security
    return page


def _answer(description: str, schema: Json, media: str = "application/json") -> Json:
    return {"description": description, "content": {media: {"schema": schema}}}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}
