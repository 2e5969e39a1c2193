"""Small endpoints of vLLM's server, so that programs made for it find them: version, ping, load, tokenizing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

import laps_sd
from gateway.api.http_requests import JsonBodies, expect_continue, tenant_of
from gateway.api.openai.body import Json
from gateway.api.openai.long_json import json_in_parts
from gateway.api.openai.tokens import read_detokenize, read_tokenize, tokens_json
from gateway.api.openai.unknown_fields import OnUnknown
from gateway.calls.calls import Caller, Calls
from gateway.tenants import Tenants

__all__ = ["VllmRoutes"]


class VllmRoutes:
    """The handlers of these endpoints."""

    def __init__(self, calls: Calls, tenants: Tenants, on_unknown: OnUnknown, bodies: JsonBodies) -> None:
        self._calls = calls
        self._bodies = bodies
        self._tenants = tenants
        self._on_unknown = on_unknown

    def add_to(
        self, router: web.UrlDispatcher, health: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> None:
        """Add the endpoints to a router; `/ping` is answered as `health` is."""
        router.add_get("/version", self._version)
        router.add_get("/ping", health)
        router.add_post("/ping", health)
        router.add_get("/load", self._load)
        router.add_post("/tokenize", self._tokenize, expect_handler=expect_continue)
        router.add_post("/detokenize", self._detokenize, expect_handler=expect_continue)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": laps_sd.__version__})

    async def _load(self, request: web.Request) -> web.Response:
        tenant_of(request, self._tenants)
        return web.json_response({"server_load": self._calls.streams})

    async def _tokenize(self, request: web.Request) -> web.Response:
        caller, body = await self._read(request)
        with self._calls.refusals(caller):
            prompt, with_texts = read_tokenize(body, self._on_unknown)
        ids = await self._calls.tokenize(prompt, caller)
        text = await self._calls.converted(
            lambda: json_in_parts(tokens_json(ids, self._calls.model, with_texts=with_texts)),
            len(ids),
            caller,
        )
        return web.json_response(text=text)

    async def _detokenize(self, request: web.Request) -> web.Response:
        caller, body = await self._read(request)
        with self._calls.refusals(caller):
            read = read_detokenize(body, self._on_unknown)
        text = await self._calls.detokenize(
            read.model or "", read.tokens, caller, field="tokens", special=True
        )
        return web.json_response({"prompt": text})

    async def _read(self, request: web.Request) -> tuple[Caller, Json]:
        """Return the caller of a call and its body. Raises Unauthenticated, InvalidArgument."""
        caller = Caller(tenant=tenant_of(request, self._tenants))
        with self._calls.refusals(caller):
            body = await self._bodies.read(request, caller.tenant)
        return caller, body
