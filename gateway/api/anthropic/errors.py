"""Errors in Anthropic's shape."""

from __future__ import annotations

from gateway.api.openai.body import Json
from gateway.api.openai.errors import error_json, http_status
from laps_sd.errors import LapsSdError

__all__ = ["anthropic_body", "anthropic_error"]

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types by HTTP status; every other one is invalid_request_error below 500, and api_error from there on."""


UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details by which Anthropic's clients send the whole conversation again, without `thread`."""


def anthropic_error(error: LapsSdError) -> Json:
    """Return an error in Anthropic's shape."""
    fields = error_json(error)["error"]
    body = anthropic_body(http_status(error), fields["message"], fields["param"])
    if fields["param"] == "thread":
        body["error"]["details"] = UNTHREADED
    return body


def anthropic_body(status: int, message: str, param: str | None) -> Json:
    """Return Anthropic's error object; `param` is an addition, the field at fault."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "param": param}}
