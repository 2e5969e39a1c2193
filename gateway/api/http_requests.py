"""A request of the HTTP port: its body as bytes, and its headers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from aiohttp import web
from yarl import URL

from gateway.api.http_errors import ANTHROPIC_PATH, response_of_aiohttp
from gateway.api.openai.body import Json, read_body
from gateway.fair_turns import OwnTurns
from gateway.tenants import Tenants
from laps_sd.errors import InvalidArgument, PermissionDenied
from laps_sd.service.listening import is_loopback

__all__ = [
    "JsonBodies",
    "expect_continue",
    "id_headers",
    "names_this_machine",
    "single_header",
    "tenant_of",
    "with_api_key",
]

REQUEST_ID_HEADER = "x-request-id"
ANTHROPICS_ID_HEADER = "request-id"
MAX_REQUEST_ID_CHARACTERS = 128
BODY_S = 30.0
"""Seconds after which a request is refused whose body has not arrived."""
LARGE_BODY_BYTES = 65_536
"""Size from which bodies are received a few at a time: of one that waits, aiohttp keeps about as much."""
LARGE_BODIES_AT_ONCE = 16
"""Most large bodies of one tenant that are received at the same time. Our choice: one takes up to twice
LAPS_SD_MAX_MESSAGE_BYTES."""
MAX_WAITING_BODIES = 2000
"""Most large bodies of one tenant that wait for that. Our choice: a fifth of LAPS_SD_MAX_HTTP_CONNECTIONS."""


class JsonBodies:
    """Reads the bodies of requests. Each tenant takes turns at sending large ones, since the limits of its calls come
    after their bodies."""

    def __init__(self, max_fields: int) -> None:
        """`max_fields`: see `read_body`."""
        self._max_fields = max_fields
        self._turns = OwnTurns(LARGE_BODIES_AT_ONCE, most_waiting=MAX_WAITING_BODIES, what="large bodies")

    async def read(self, request: web.Request, tenant: str) -> Json:
        """Return the body of a tenant's request; its size is checked before it is read. Raises InvalidArgument,
        ResourceExhausted."""
        # A web page may post plain text to any address; for JSON the browser first sends a preflight request,
        # which is not granted.
        if request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="the Content-Type must be application/json")
        # aiohttp decompresses by the last of several headers.
        if any(encoding != "identity" for encoding in request.headers.getall("Content-Encoding", [])):
            raise web.HTTPUnsupportedMediaType(text="the body must not be compressed")
        most, length = request.client_max_size, request.content_length
        if length is not None and length > most:
            raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=length)
        if length is not None and length < LARGE_BODY_BYTES:
            return read_body(await _received(request), self._max_fields)
        async with self._turns.of(tenant):
            raw = await _received(request)
        return read_body(raw, self._max_fields)


async def _received(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_S:g} s") from None


async def expect_continue(request: web.Request) -> web.StreamResponse | None:
    """Send 100 Continue (RFC 9110, section 10.1.1). aiohttp's own handler fails on an Expect header that is
    not text."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        error = web.HTTPExpectationFailed(text="the only expectation that is met is 100-continue")
        return response_of_aiohttp(error, 0, request.path)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # no part of the answer is sent yet
    return None


def single_header(request: web.Request, name: str) -> str:
    """Return the one value of a header, empty without one. Raises InvalidArgument."""
    given = request.headers.getall(name, [])
    if len(given) > 1:
        raise InvalidArgument(name, "must be sent once at most, got it twice")
    return given[0] if given else ""


def with_api_key(headers: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the headers of a call; the key that Anthropic's clients send has the form of other clients'
    keys."""
    given = list(headers)
    has_authorization = any(name.lower() == "authorization" for name, _ in given)
    for name, value in given:
        yield name, value
        if name.lower() == "x-api-key" and not has_authorization:
            yield "authorization", f"Bearer {value}"


def tenant_of(request: web.Request, tenants: Tenants) -> str:
    """Return the tenant of a call, by a key in either header. Raises Unauthenticated, PermissionDenied,
    InvalidArgument."""
    if tenants.for_this_machine and not names_this_machine(request):
        raise PermissionDenied(
            "a gateway without keys that listens on loopback answers calls to localhost only, by the Host header;"
            " LAPS_SD_ANONYMOUS=yes lets it answer calls to other names, as a proxy on this machine may send them"
        )
    return tenants.of(with_api_key(request.headers.items()))


def names_this_machine(request: web.Request) -> bool:
    """Return whether the Host header is a name or an address of this machine itself. That of a page of another
    site is not, also where its name was made to resolve to this machine (DNS rebinding)."""
    try:
        return is_loopback(URL(f"http://{request.headers.get('Host', '')}").host or "")
    except ValueError:
        return False


def id_headers(request: web.Request, made: str) -> dict[str, str]:
    """Return the headers of a response with the client's id for its request, or without one the id `made`. Anthropic's
    clients read it by another name."""
    request_id = _own_request_id(request) or made
    named = {REQUEST_ID_HEADER: request_id}
    return named | {ANTHROPICS_ID_HEADER: request_id} if ANTHROPIC_PATH.match(request.path) else named


def _own_request_id(request: web.Request) -> str:
    """Return the client's id for its request if it is valid in a header and a log; otherwise an
    empty text."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return (
        given if len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable() else ""
    )
