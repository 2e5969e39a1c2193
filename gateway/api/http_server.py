"""OpenAI's API over HTTP, in the gateway's process: the same calls as over gRPC, in another format.

    POST /v1/chat/completions, /v1/completions      whole, or as server-sent events that end in [DONE]
    POST /v1/responses                              OpenAI's newer API; nothing is stored
    POST /v1/messages, /v1/messages/count_tokens    Anthropic's API
    GET  /v1/models, /v1/models/NAME
    GET  /health                                    200 while a new request would be accepted, else 503 and why
    GET  /live                                      200 while the process answers at all
    GET  /metrics                                   Prometheus, the same as at the metrics port
    GET  /openapi.json                              all of this as an OpenAPI description
    GET  /docs                                      the same as a page for readers
    GET  /version, /ping, /load                     as a server of vLLM has them
    POST /tokenize, /detokenize                     the same
    GET  /console                                   a page that shows queues, workers and requests (`console/`)

aiohttp cancels the handler of a client that disconnects; the handler's attachments are then closed, without
code here. Until a request is accepted an error is a status with OpenAI's error object; after the first chunk
it is an event, because the status was already sent.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

import prometheus_client
from aiohttp import web

from gateway.api.anthropic.body import read_count, read_messages
from gateway.api.anthropic.reply import MessagesReply
from gateway.api.console.routes import ConsoleRoutes
from gateway.api.description import openapi_json
from gateway.api.docs_page import POLICY, docs_page
from gateway.api.http_calls import OpenCalls, stopping
from gateway.api.http_connections import HttpConnections
from gateway.api.http_cors import Cors
from gateway.api.http_errors import (
    HTTP_LOGGER,
    incident,
    is_news,
    not_found,
    refusal_response,
    response_of_aiohttp,
)
from gateway.api.http_requests import (
    JsonBodies,
    expect_continue,
    id_headers,
    single_header,
    tenant_of,
)
from gateway.api.http_stream import Turn, send_stream
from gateway.api.http_vllm import VllmRoutes
from gateway.api.openai.answer import MakeReply
from gateway.api.openai.body import Json
from gateway.api.openai.errors import with_format_field
from gateway.api.openai.fields_of_chats import renamed
from gateway.api.openai.headers import read_ttl_s
from gateway.api.openai.long_json import json_in_parts
from gateway.api.openai.reply import Reply, model_json, models_json
from gateway.api.openai.request import ParsedRequest, read_chat, read_completion
from gateway.api.openai.responses.body import read_responses
from gateway.api.openai.responses.reply import ResponsesReply
from gateway.api.openai.unknown_fields import OnUnknown, UnknownFields
from gateway.api.openai.values import check_text
from gateway.calls.calls import Caller, Calls
from gateway.calls.validation import check_model
from gateway.links.shards import Shards
from gateway.tenants import Tenants
from laps_sd.errors import InvalidArgument, LapsSdError, StartupError, Unavailable
from laps_sd.service.certificates import ServedCertificate
from laps_sd.service.listening import EVERY_ADDRESS
from laps_sd.service.log import get_logger
from laps_sd.service.metrics import REGISTRY
from laps_sd.service.serving import ServiceApp
from laps_sd.service.tracing import valid_traceparent

__all__ = ["TTL_HEADER", "HttpServer"]

log = get_logger(__name__)

TTL_HEADER = "x-llm-d-inference-ttl"
KEY_HEADER = "Idempotency-Key"
LAST_WORDS_S = 0.2

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """The HTTP server: `start`, then `stop_listening` and `close`."""

    def __init__(self, calls: Calls, tenants: Tenants, app: ServiceApp, shards: Shards) -> None:
        logging.getLogger(HTTP_LOGGER).addFilter(is_news)
        self._calls = calls
        self._tenants = tenants
        self._app = app
        self._created = int(time.time())
        self._turn = Turn()
        self._open = OpenCalls()
        self._bodies = JsonBodies(calls.settings.max_message_fields)
        self._unknown = UnknownFields(calls.settings.unknown_fields)
        self._cors = Cors(calls.settings.cors_origins)
        self.port = 0
        """The bound port, after `start`."""
        routes = web.Application(
            middlewares=[self._guarded], client_max_size=calls.settings.max_message_bytes
        )
        routes.router.add_post("/v1/chat/completions", self._chat, expect_handler=expect_continue)
        routes.router.add_post("/v1/completions", self._completion, expect_handler=expect_continue)
        routes.router.add_post("/v1/responses", self._response, expect_handler=expect_continue)
        routes.router.add_post("/v1/messages", self._message, expect_handler=expect_continue)
        routes.router.add_post("/v1/messages/count_tokens", self._count, expect_handler=expect_continue)
        routes.router.add_get("/v1/models", self._models)
        routes.router.add_get("/v1/models/{name:.+}", self._model)
        routes.router.add_get("/health", self._health)
        routes.router.add_get("/live", self._live)
        routes.router.add_get("/metrics", self._metrics)
        routes.router.add_get("/openapi.json", self._openapi)
        routes.router.add_get("/docs", self._docs)
        VllmRoutes(calls, tenants, self._unknown, self._bodies).add_to(routes.router, self._health)
        if calls.settings.console:
            ConsoleRoutes(calls, tenants, shards, app.stopping).add_to(routes.router)
        routes.on_response_prepare.append(self._cors.grant)
        routes.on_response_prepare.append(self._end_old_connection)
        self.routes = routes.router
        """The handler of each path."""
        self._runner = web.AppRunner(
            routes, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WORDS_S
        )
        self._connections: HttpConnections | None = None

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
        return 0 if self._connections is None else len(self._connections)

    async def start(self) -> None:
        """Bind the port and start to answer. Raises StartupError."""
        settings = self._calls.settings
        assert settings.http_port is not None, "without a port there is no HTTP server"
        bound = _bind(settings.listen_host, settings.http_port)
        self.port = int(bound.getsockname()[1])
        await self._runner.setup()
        assert self._runner.server is not None, "it was set up"
        self._connections = HttpConnections(
            self._runner.server, settings.max_http_connections, settings.max_connection_age_s
        )
        self._connections.listen(bound, self._tls())
        log.info(
            "listening for HTTP", host=settings.listen_host, port=self.port, tls=settings.tls is not None
        )

    async def stop_listening(self) -> None:
        """Accept no new connections, and end those without a call; calls in progress continue."""
        if self._connections is not None:
            self._connections.stop_listening()

    async def close(self) -> None:
        """End all connections and calls. What has not ended is answered with an error."""
        await self.stop_listening()
        self._open.cut_off()
        await self._runner.cleanup()

    def _tls(self) -> ssl.SSLContext | None:
        """Return the TLS context with the certificates of the gRPC port; None without TLS."""
        tls = self._calls.settings.tls
        return None if tls is None else ServedCertificate(tls).ssl_context()

    # ---- middleware

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer every call in the shape of its API and with a request id; count it as work in progress until it is
        over."""
        assert self._connections is not None, "it was started"
        with self._connections.request(request.transport):
            if self._app.stopping.is_set() and request.path != "/live":
                response: web.StreamResponse = refusal_response(stopping(), request.path)
            else:
                with self._app.guard.counted():
                    response = await self._answered(request, handler)
            if self._app.stopping.is_set():
                response.force_close()
        if not response.prepared:
            for name, value in id_headers(request, f"req-{secrets.token_hex(12)}").items():
                response.headers.setdefault(name, value)
        return response

    async def _end_old_connection(self, request: web.Request, response: web.StreamResponse) -> None:
        """Have the client of an old connection send its next request over a new one, perhaps to another gateway."""
        assert self._connections is not None, "it was started"
        if self._connections.is_old(request.transport):
            response.force_close()
            response.headers["Connection"] = "close"

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if (preflight := self._cors.preflight(request)) is not None:
            return preflight
        try:
            return await handler(request)
        except LapsSdError as error:
            return refusal_response(error, request.path)
        except web.HTTPNotFound:
            return not_found(request, self._paths())
        except web.HTTPException as error:
            return response_of_aiohttp(error, self._calls.settings.max_message_bytes, request.path)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            return refusal_response(incident(error, request.path), request.path)

    def _paths(self) -> list[str]:
        """Return the method and path of each endpoint, in the order of the paths."""
        routes = sorted(
            (route.resource.canonical, route.method)
            for route in self.routes.routes()
            if route.resource is not None and route.method != "HEAD"
        )
        return [f"{method} {path}" for path, method in routes]

    # ---- endpoints

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, _by_itself(read_chat))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, _by_itself(read_completion))

    async def _response(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, _response)

    async def _message(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, _message)

    async def _count(self, request: web.Request) -> web.StreamResponse:
        caller = Caller(tenant=tenant_of(request, self._tenants))
        with self._calls.refusals(caller):
            body = await self._bodies.read(request, caller.tenant)
            (prompt,) = read_count(body, self._unknown).requests
        ids = await self._calls.tokenize(prompt, caller)
        return web.json_response({"input_tokens": len(ids)})

    async def _models(self, request: web.Request) -> web.Response:
        tenant_of(request, self._tenants)
        return web.json_response(models_json(self._calls.model, self._created))

    async def _model(self, request: web.Request) -> web.Response:
        tenant_of(request, self._tenants)
        name = request.match_info["name"]
        check_model(name, self._calls.model)
        return web.json_response(model_json(self._calls.model, self._created, name))

    async def _health(self, request: web.Request) -> web.Response:
        if reason := self._calls.refusal:
            return web.json_response({"status": "not ready", "reason": reason}, status=503)
        return web.json_response({"status": "ready", "workers": self._calls.workers})

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    async def _metrics(self, request: web.Request) -> web.Response:
        tenant_of(request, self._tenants)
        body = prometheus_client.generate_latest(REGISTRY)
        return web.Response(body=body, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.Response(body=openapi_json(), content_type="application/json")

    async def _docs(self, request: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": POLICY}
        return web.Response(body=docs_page(), content_type="text/html", charset="utf-8", headers=headers)

    # ---- generation

    async def _generate(
        self, request: web.Request, read: Callable[[Json, OnUnknown], tuple[ParsedRequest, MakeReply]]
    ) -> web.StreamResponse:
        caller = Caller(
            tenant=tenant_of(request, self._tenants),
            traceparent=valid_traceparent(request.headers.get("traceparent", "")),
        )
        with self._calls.refusals(caller):
            ttl_s = read_ttl_s(
                TTL_HEADER, single_header(request, TTL_HEADER), self._calls.settings.max_time_limit_s
            )
            parsed, make_reply = read(await self._bodies.read(request, caller.tenant), self._unknown)
            _put_key(parsed, check_text(KEY_HEADER, single_header(request, KEY_HEADER)))
        scores = any(one.HasField("logprobs") or one.HasField("prompt_logprobs") for one in parsed.requests)
        async with AsyncExitStack() as stack:
            # With a time to live the status is sent only with the first tokens: before them the request can
            # still be refused.
            try:
                async with self._open.served(), asyncio.timeout(ttl_s):
                    generation = await stack.enter_async_context(
                        self._calls.generate(
                            parsed.requests,
                            caller,
                            reads_markup=parsed.kind == "chat",
                            in_one_message=scores and not parsed.stream,
                        )
                    )
                    first = await generation.read() if ttl_s is not None else []
            except InvalidArgument as error:
                raise renamed(with_format_field(error, parsed.format_field), parsed.names) from None
            except TimeoutError:
                raise Unavailable(
                    f"the request had not started within its {TTL_HEADER} of {ttl_s:g} s", retry_after_s=1.0
                ) from None
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
            if scores:
                # The answer may be a thousand times as long as others: other calls go on while it is written. It is
                # computed already, so that it waits however many others of the tenant wait.
                text = await self._calls.conversions.run(
                    caller.tenant, lambda: json_in_parts(reply.whole()), 0
                )
                return web.json_response(text=text, headers=headers)
            return web.json_response(reply.whole(), headers=headers)


def _by_itself(
    read: Callable[[Json, OnUnknown], ParsedRequest],
) -> Callable[[Json, OnUnknown], tuple[ParsedRequest, MakeReply]]:
    """Return how a body is read whose answer is OpenAI's own."""

    def both(body: Json, on_unknown: OnUnknown) -> tuple[ParsedRequest, MakeReply]:
        parsed = read(body, on_unknown)
        return parsed, partial(Reply, parsed)

    return both


def _response(body: Json, on_unknown: OnUnknown) -> tuple[ParsedRequest, MakeReply]:
    parsed, tools, repeated = read_responses(body, on_unknown)
    return parsed, partial(ResponsesReply, parsed, tools, repeated)


def _message(body: Json, on_unknown: OnUnknown) -> tuple[ParsedRequest, MakeReply]:
    parsed = read_messages(body, on_unknown)
    return parsed, partial(MessagesReply, parsed)


def _put_key(parsed: ParsedRequest, key: str) -> None:
    """Set the idempotency key from a header."""
    for request in parsed.requests:
        request.idempotency_key = key


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(
            address[:2], family=family, backlog=1024, dualstack_ipv6=host == EVERY_ADDRESS
        )
    except OSError as error:
        raise StartupError(
            f"The HTTP port {port} on {host} cannot be opened: {error.strerror or error}; "
            "choose another with LAPS_SD_HTTP_PORT."
        ) from error
