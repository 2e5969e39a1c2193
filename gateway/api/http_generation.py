"""The endpoints over HTTP that generate text, and the one that counts the tokens of a prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeAlias

from aiohttp import web

from gateway.api.anthropic.body import read_count, read_messages
from gateway.api.anthropic.reply import MessagesReply
from gateway.api.http_calls import OpenCalls
from gateway.api.http_requests import JsonBodies, expect_continue, id_headers, single_header, tenant_of
from gateway.api.http_stream import Turn, send_stream
from gateway.api.openai.answer import MakeReply, StreamedReply
from gateway.api.openai.body import Json
from gateway.api.openai.errors import with_format_field
from gateway.api.openai.fields_of_chats import renamed
from gateway.api.openai.headers import read_ttl_s
from gateway.api.openai.long_json import json_in_parts
from gateway.api.openai.reply import Reply
from gateway.api.openai.request import ParsedRequest, read_chat, read_completion
from gateway.api.openai.responses.body import read_responses
from gateway.api.openai.responses.reply import ResponsesReply
from gateway.api.openai.unknown_fields import OnUnknown
from gateway.api.openai.values import check_text
from gateway.calls.calls import Caller, Calls
from gateway.calls.generation import Generation
from gateway.calls.output import Piece
from gateway.tenants import Tenants
from laps_sd.errors import InvalidArgument, Unavailable
from laps_sd.service.tracing import valid_traceparent

__all__ = ["GenerationRoutes"]

TTL_HEADER = "x-llm-d-inference-ttl"
KEY_HEADER = "Idempotency-Key"

ReadBody: TypeAlias = Callable[[Json, OnUnknown], tuple[ParsedRequest, MakeReply]]
"""Returns what a body requests, and what makes the reply to it."""


class GenerationRoutes:
    """The handlers of these endpoints."""

    def __init__(self, calls: Calls, tenants: Tenants, on_unknown: OnUnknown, bodies: JsonBodies) -> None:
        self._calls = calls
        self._tenants = tenants
        self._on_unknown = on_unknown
        self._bodies = bodies
        self._turn = Turn()
        self._open = OpenCalls()

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add the endpoints to a router."""
        for path, read in READERS.items():
            router.add_post(path, partial(self._generate, read=read), expect_handler=expect_continue)
        router.add_post("/v1/messages/count_tokens", self._count, expect_handler=expect_continue)

    def cut_off(self) -> None:
        """End the calls that are served now, with an error."""
        self._open.cut_off()

    async def _count(self, request: web.Request) -> web.StreamResponse:
        caller = Caller(tenant=tenant_of(request, self._tenants))
        with self._calls.refusals(caller):
            body = await self._bodies.read(request, caller.tenant)
            parsed = read_count(body, self._on_unknown)
        try:
            ids = await self._calls.tokenize(parsed.requests[0], caller)
        except InvalidArgument as error:
            raise _named_as_sent(error, parsed) from None
        return web.json_response({"input_tokens": len(ids)})

    async def _generate(self, request: web.Request, read: ReadBody) -> web.StreamResponse:
        caller = Caller(
            tenant=tenant_of(request, self._tenants),
            traceparent=valid_traceparent(request.headers.get("traceparent", "")),
        )
        with self._calls.refusals(caller):
            ttl_s = read_ttl_s(
                TTL_HEADER, single_header(request, TTL_HEADER), self._calls.settings.max_time_limit_s
            )
            parsed, make_reply = read(await self._bodies.read(request, caller.tenant), self._on_unknown)
            key = check_text(KEY_HEADER, single_header(request, KEY_HEADER))
            for one in parsed.requests:
                one.idempotency_key = key
        async with AsyncExitStack() as stack:
            generation, first = await self._accepted(stack, parsed, caller, ttl_s)
            reply = make_reply(generation, created_unix_s=int(time.time()), model=self._calls.model)
            headers = id_headers(request, reply.id)
            if parsed.stream:
                return await send_stream(request, generation, reply, first, headers, self._turn, self._open)
            for choice, piece in first:
                reply.add(choice, piece)
            async with self._open.served():
                while not generation.over:
                    for choice, piece in await generation.read():
                        reply.add(choice, piece)
            return await self._whole(reply, parsed, caller, headers)

    async def _accepted(
        self, stack: AsyncExitStack, parsed: ParsedRequest, caller: Caller, ttl_s: float | None
    ) -> tuple[Generation, Sequence[tuple[int, Piece]]]:
        """Return the output of a request that is accepted, and what of it has arrived. Raises the refusal of the
        request, and Unavailable if it has not started within its time to live.

        With a time to live the status is sent only with the first tokens: before them the request can still be
        refused.
        """
        try:
            async with self._open.served(), asyncio.timeout(ttl_s):
                generation = await stack.enter_async_context(
                    self._calls.generate(
                        parsed.requests,
                        caller,
                        reads_markup=parsed.kind == "chat",
                        in_one_message=parsed.has_scores and not parsed.stream,
                    )
                )
                return generation, await generation.read() if ttl_s is not None else []
        except InvalidArgument as error:
            raise _named_as_sent(error, parsed) from None
        except TimeoutError:
            raise Unavailable(
                f"the request had not started within its {TTL_HEADER} of {ttl_s:g} s", retry_after_s=1.0
            ) from None

    async def _whole(
        self, reply: StreamedReply, parsed: ParsedRequest, caller: Caller, headers: Mapping[str, str]
    ) -> web.Response:
        """Return the answer of a call without stream."""
        if not parsed.has_scores:
            return web.json_response(reply.whole(), headers=headers)
        # The answer may be a thousand times as long as others: other calls go on while it is written. It is
        # computed already, so that it waits however many others of the tenant wait.
        text = await self._calls.conversions.run(caller.tenant, lambda: json_in_parts(reply.whole()), 0)
        return web.json_response(text=text, headers=headers)


def _named_as_sent(error: InvalidArgument, parsed: ParsedRequest) -> InvalidArgument:
    """Return an error about a request with the names that the fields have in its body."""
    return renamed(with_format_field(error, parsed.format_field), parsed.names)


def _answered_by(
    make: Callable[..., StreamedReply], read: Callable[[Json, OnUnknown], ParsedRequest]
) -> ReadBody:
    """Return how a body is read whose reply needs nothing of it but what it requests."""

    def read_body(body: Json, on_unknown: OnUnknown) -> tuple[ParsedRequest, MakeReply]:
        parsed = read(body, on_unknown)
        return parsed, partial(make, parsed)

    return read_body


def _read_response(body: Json, on_unknown: OnUnknown) -> tuple[ParsedRequest, MakeReply]:
    parsed, tools, repeated = read_responses(body, on_unknown)
    return parsed, partial(ResponsesReply, parsed, tools, repeated)


READERS: Mapping[str, ReadBody] = {
    "/v1/chat/completions": _answered_by(Reply, read_chat),
    "/v1/completions": _answered_by(Reply, read_completion),
    "/v1/responses": _read_response,
    "/v1/messages": _answered_by(MessagesReply, read_messages),
}
"""How the body of each endpoint that generates text is read."""
