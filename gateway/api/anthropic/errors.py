"""Errors in Anthropic's shape."""

from __future__ import annotations

from gateway.api.openai.body import Json
from gateway.api.openai.errors import error_json, http_status
from laps_sd.errors import LapsSdError

__all__ = ["anthropic_body", "anthropic_error"]

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types by HTTP status; every other one is api_error."""


def anthropic_error(error: LapsSdError) -> Json:
    """Return an error in Anthropic's shape."""
    fields = error_json(error)["error"]
    return anthropic_body(TYPES.get(http_status(error), "api_error"), fields["message"], fields["param"])


def anthropic_body(kind: str, message: str, param: str | None) -> Json:
    """Return Anthropic's error object; `param` is an addition, the field at fault."""
    return {"type": "error", "error": {"type": kind, "message": message, "param": param}}
