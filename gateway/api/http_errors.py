"""Errors as responses of the HTTP port, and which of them are logged."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Collection
from http import HTTPStatus

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.api.anthropic.errors import anthropic_body, anthropic_error
from gateway.api.openai.errors import error_json, http_status, openai_body, retry_headers
from gateway.api.openai.values import shown
from laps_sd.errors import LapsSdError, Unauthenticated
from laps_sd.service.log import get_logger

__all__ = [
    "ANTHROPIC_PATH",
    "HTTP_LOGGER",
    "incident",
    "is_news",
    "not_found",
    "refusal_response",
    "response_of_aiohttp",
]

log = get_logger(__name__)

ANTHROPIC_PATH = re.compile("/v1/messages(/|$)")
"""Paths whose errors have Anthropic's shape; all others have OpenAI's."""
HTTP_LOGGER = "aiohttp.server"
"""Logger in which aiohttp reports bytes that are not HTTP and clients that have left, each with its
traceback."""


def is_news(record: logging.LogRecord) -> bool:
    """Return False for client input that is not HTTP, which is answered with an error, and for a client that
    has left: the log stays free of both."""
    error = record.exc_info[1] if record.exc_info else None
    # UnicodeEncodeError: aiohttp tried to repeat bytes that are not text. Our own errors never get here, see
    # `HttpServer._guarded`.
    return not isinstance(
        error, HttpProcessingError | web.RequestPayloadError | UnicodeEncodeError | ConnectionError
    )


def refusal_response(error: LapsSdError, path: str) -> web.Response:
    """Return one of our errors as a response, in the shape of the API of the path."""
    headers = retry_headers(error)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"  # RFC 9110, section 15.5.2
    body = anthropic_error(error) if ANTHROPIC_PATH.match(path) else error_json(error)
    return web.json_response(body, status=http_status(error), headers=headers)


def response_of_aiohttp(error: web.HTTPException, max_bytes: int, path: str) -> web.Response:
    """Return an error of aiohttp (unknown path, wrong method, body too large …) in the shape of the API of
    the path."""
    message = error.text or HTTPStatus(error.status).phrase
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = " or ".join(sorted(error.allowed_methods - {"HEAD"}))
        message = f"this path takes {allowed}, and the request is {shown(error.method)}"
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        message = f"the body must be at most {max_bytes} bytes"
    if ANTHROPIC_PATH.match(path):
        body = anthropic_body(error.status, message, None)
    else:
        body = openai_body("invalid_request_error", message, None)
    response = web.json_response(body, status=error.status)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    if error.status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT):
        response.force_close()  # the rest of the body is not worth reading
    return response


def not_found(request: web.Request, paths: Collection[str]) -> web.Response:
    """Return the answer to a path that does not exist, with those that do. A path with a slash at the end leads to
    the one without.
    """
    path = request.path.removesuffix("/")
    if f"{request.method} {path}" in paths:
        location = str(request.rel_url.with_path(path, keep_query=True))
        return web.Response(status=HTTPStatus.PERMANENT_REDIRECT, headers={"Location": location})
    error = web.HTTPNotFound(
        text=f"{shown(request.path)} is not a path of this server, which has {', '.join(paths)}"
    )
    return response_of_aiohttp(error, 0, request.path)


def incident(error: Exception, path: str) -> LapsSdError:
    """Return the error for a bug in the gateway: the traceback is logged here, the client gets an id to find
    it by."""
    name = secrets.token_hex(4)
    log.error("call failed", path=path, incident=name, exc_info=error)
    return LapsSdError(f"internal error, incident {name}")
