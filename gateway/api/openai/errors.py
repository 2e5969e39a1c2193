"""Errors as HTTP statuses, headers and OpenAI's error object."""

from __future__ import annotations

import math
import re

import grpc

from gateway.api.openai.body import Json
from laps_sd.errors import InvalidArgument, LapsSdError, ResourceExhausted, Unavailable

__all__ = ["error_json", "http_status", "openai_body", "retry_headers", "with_format_field"]

FIELD_NAMES = (
    ("sampling.", ""),
    ("messages.messages", "messages"),
    ("messages.tools", "tools"),
    ("messages.tool_choice", "tool_choice"),
    ("messages.template_arguments", "chat_template_kwargs"),
    ("messages.", ""),
    ("token_ids.ids", "prompt"),
    ("output_format.", "response_format."),
)
"""Beginnings of our names of fields, with those of OpenAI."""

FUNCTION_FIELD = re.compile(
    r"^(messages\.(?:.*\.)?tool(?:_call)?s\[\d+\]\.)(name|description|parameters|arguments)"
)
"""Fields of a tool or of a call of a chat, which OpenAI has in an object `function`."""

STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""HTTP statuses of codes, as in google.rpc.Code; every other code is 500."""

CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


def http_status(error: LapsSdError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, InvalidArgument) and error.violations[0][0] == "model":
        return 404
    return STATUSES.get(error.code, 500)


def error_json(error: LapsSdError) -> Json:
    """Return an error in OpenAI's shape; fields have the client's names."""
    status = http_status(error)
    message, param = error.message, None
    if isinstance(error, InvalidArgument):
        named = [(_field_name(name), text) for name, text in error.violations]
        message = "; ".join(f"{name} {text}" if name else text for name, text in named)
        param = named[0][0] or None
    code = "model_not_found" if param == "model" else CODES.get(status)
    kind = "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 499:
        kind = "server_error"
    return openai_body(kind, message, param, code)


def openai_body(kind: str, message: str, param: str | None, code: str | None = None) -> Json:
    """Return OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def with_format_field(error: InvalidArgument, field: str) -> InvalidArgument:
    """Return an error about the output format with the name of the field that the client sent it in."""
    if not field:
        return error
    first, *others = (
        (field if name.startswith("output_format.") else name, text) for name, text in error.violations
    )
    return InvalidArgument(*first, *others)


def _field_name(name: str) -> str:
    """Return OpenAI's name of one of our fields."""
    if name in ("text", "token_ids"):
        return "prompt"
    name = FUNCTION_FIELD.sub(r"\1function.\2", name)
    for ours, theirs in FIELD_NAMES:
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    return name


def retry_headers(error: LapsSdError) -> dict[str, str]:
    """Return the headers with the time to retry after: in whole seconds for HTTP, and in milliseconds, which
    OpenAI's clients read first."""
    if not isinstance(error, ResourceExhausted | Unavailable) or error.retry_after_s is None:
        return {}
    return {
        "Retry-After": str(max(1, math.ceil(round(error.retry_after_s, 3)))),
        "Retry-After-Ms": str(max(1, round(error.retry_after_s * 1000))),
    }
