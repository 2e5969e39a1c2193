"""OpenAI's API over HTTP, in the gateway's process: the same calls as over gRPC, in another format.

    POST /v1/chat/completions, /v1/completions      whole, or as server-sent events that end in [DONE]
    GET  /v1/models, /v1/models/NAME
    GET  /health                                    200 while a new request would be accepted, else 503 and why
    GET  /live                                      200 while the process answers at all
    GET  /metrics                                   Prometheus, the same as at the metrics port
    GET  /openapi.json                              all of this as an OpenAPI description

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
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from http import HTTPStatus

import prometheus_client
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.api.http_connections import HEADERS_S, HttpConnections
from gateway.api.openai.body import Json, read_body
from gateway.api.openai.description import openapi_json
from gateway.api.openai.errors import error_json, http_status, retry_headers
from gateway.api.openai.headers import read_header, read_ttl_s
from gateway.api.openai.reply import DONE, Reply, model_json, models_json, sse
from gateway.api.openai.request import ParsedRequest, read_chat, read_completion
from gateway.calls.calls import Caller, Calls
from gateway.calls.generation import Event, Generation
from gateway.calls.validation import check_model
from gateway.tenants import Tenants
from laps_sd.errors import InvalidArgument, LapsSdError, StartupError, Unauthenticated, Unavailable
from laps_sd.service.log import get_logger
from laps_sd.service.metrics import REGISTRY
from laps_sd.service.serving import ServiceApp
from laps_sd.service.tracing import valid_traceparent

__all__ = ["TTL_HEADER", "HttpServer"]

log = get_logger(__name__)

REQUEST_ID_HEADER = "x-request-id"
TTL_HEADER = "x-llm-d-inference-ttl"
KEY_HEADER = "Idempotency-Key"
MAX_REQUEST_ID_CHARACTERS = 128
BACKLOG = 128
"""Number of connections that the operating system holds until they are accepted; aiohttp's choice."""
BODY_S = 30.0
"""Seconds after which a request is refused whose body has not arrived."""
QUIET_S = 15.0
"""Seconds of silence after which a stream gets a comment, so that proxies keep it open and a dead client is
noticed."""
LAST_WORDS_S = 0.2
EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

HTTP_LOGGER = "aiohttp.server"
"""Logger in which aiohttp reports bytes that are not HTTP, each with its traceback."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """The HTTP server: `start`, then `stop_listening` and `close`."""

    def __init__(self, calls: Calls, tenants: Tenants, app: ServiceApp) -> None:
        logging.getLogger(HTTP_LOGGER).addFilter(_is_news)
        self._calls = calls
        self._tenants = tenants
        self._app = app
        self._created = int(time.time())
        self.port = 0
        """The bound port, after `start`."""
        routes = web.Application(
            middlewares=[self._guarded], client_max_size=calls.settings.max_message_bytes
        )
        routes.router.add_post("/v1/chat/completions", self._chat, expect_handler=_expect)
        routes.router.add_post("/v1/completions", self._completion, expect_handler=_expect)
        routes.router.add_get("/v1/models", self._models)
        routes.router.add_get("/v1/models/{name:.+}", self._model)
        routes.router.add_get("/health", self._health)
        routes.router.add_get("/live", self._live)
        routes.router.add_get("/metrics", self._metrics)
        routes.router.add_get("/openapi.json", self._openapi)
        self.routes = routes.router
        self._runner = web.AppRunner(
            routes, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WORDS_S
        )
        self._connections: HttpConnections | None = None
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        """Return how many connections are open."""
        return 0 if self._connections is None else len(self._connections)

    async def start(self) -> None:
        """Bind the port and start to answer. Raises StartupError."""
        settings = self._calls.settings
        assert settings.http_port is not None, "whoever wants no HTTP makes no server"
        bound = _bind(settings.grpc_host, settings.http_port)
        self.port = int(bound.getsockname()[1])
        await self._runner.setup()
        assert self._runner.server is not None, "it was set up"
        self._connections = HttpConnections(self._runner.server, settings.max_http_connections)
        tls = self._tls()
        self._server = await asyncio.get_running_loop().create_server(
            self._connections.connect,
            sock=bound,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else HEADERS_S,
            backlog=BACKLOG,
        )
        log.info("listening for HTTP", host=settings.grpc_host, port=self.port, tls=settings.tls is not None)

    async def stop_listening(self) -> None:
        """Accept no new connections; calls in progress continue."""
        if self._server is not None:
            server, self._server = self._server, None
            server.close()

    async def close(self) -> None:
        """End all connections and calls."""
        await self.stop_listening()
        await self._runner.cleanup()

    def _tls(self) -> ssl.SSLContext | None:
        """Return the TLS context with the certificates of the gRPC port; None without TLS."""
        settings = self._calls.settings
        if settings.tls_cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(settings.tls_cert, settings.tls_key)
            if settings.tls_client_ca is not None:
                context.load_verify_locations(settings.tls_client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:  # ssl.SSLError too
            raise StartupError(f"The TLS files of the HTTP port cannot be used: {error}.") from error
        return context

    # ---- middleware

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer every call in OpenAI's shape and with a request id; count it as work in progress until it is
        over."""
        assert self._connections is not None, "it was started"
        with self._connections.request(request.transport):
            if self._app.stopping.is_set() and request.path != "/live":
                response: web.StreamResponse = _refusal(
                    Unavailable("this gateway is stopping; try another", retry_after_s=1.0)
                )
                response.force_close()
            else:
                with self._app.guard.counted():
                    response = await self._answered(request, handler)
        if not response.prepared:
            response.headers.setdefault(
                REQUEST_ID_HEADER, _own_request_id(request) or f"req-{secrets.token_hex(12)}"
            )
        return response

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except LapsSdError as error:
            return _refusal(error)
        except web.HTTPException as error:
            return _said_by_aiohttp(error, self._calls.settings.max_message_bytes)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            return _refusal(_incident(error, request.path))

    # ---- endpoints

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, read_chat)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, read_completion)

    async def _models(self, request: web.Request) -> web.Response:
        self._tenants.of(request.headers.items())
        return web.json_response(models_json(self._calls.model, self._created))

    async def _model(self, request: web.Request) -> web.Response:
        self._tenants.of(request.headers.items())
        check_model(request.match_info["name"], self._calls.model)
        return web.json_response(model_json(self._calls.model, self._created))

    async def _health(self, request: web.Request) -> web.Response:
        if reason := self._calls.refusal:
            return web.json_response({"status": "not ready", "reason": reason}, status=503)
        return web.json_response({"status": "ready", "workers": self._calls.workers})

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    async def _metrics(self, request: web.Request) -> web.Response:
        self._tenants.of(request.headers.items())
        body = prometheus_client.generate_latest(REGISTRY)
        return web.Response(body=body, headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.Response(body=openapi_json(), content_type="application/json")

    # ---- generation

    async def _generate(
        self, request: web.Request, read: Callable[[Json], ParsedRequest]
    ) -> web.StreamResponse:
        caller = Caller(
            tenant=self._tenants.of(request.headers.items()),
            traceparent=valid_traceparent(request.headers.get("traceparent", "")),
        )
        with self._calls.refusals(caller):
            ttl_s = read_ttl_s(
                TTL_HEADER, _header(request, TTL_HEADER), self._calls.settings.max_time_limit_s
            )
            parsed = read(read_body(await _body(request), self._calls.settings.max_message_fields))
            _put_key(parsed, read_header(KEY_HEADER, _header(request, KEY_HEADER)))
        async with AsyncExitStack() as stack:
            # With a time to live the status is sent only with the first tokens: before them the request can
            # still be refused.
            try:
                async with asyncio.timeout(ttl_s):
                    generation = await stack.enter_async_context(
                        self._calls.generate(parsed.requests, caller)
                    )
                    first = await generation.read() if ttl_s is not None else []
            except TimeoutError:
                raise Unavailable(
                    f"the request had not started within its {TTL_HEADER} of {ttl_s:g} s", retry_after_s=1.0
                ) from None
            reply = Reply(
                parsed, generation.accepted, created_unix_s=int(time.time()), model=self._calls.model
            )
            headers = {REQUEST_ID_HEADER: _own_request_id(request) or reply.id}
            if parsed.stream:
                return await _stream(request, generation, reply, first, headers)
            for choice, event in first:
                reply.add(choice, event)
            while not generation.over:
                for choice, event in await generation.read():
                    reply.add(choice, event)
            return web.json_response(reply.whole(), headers=headers)


async def _stream(
    request: web.Request,
    generation: Generation,
    reply: Reply,
    first: Sequence[tuple[int, Event]],
    headers: dict[str, str],
) -> web.StreamResponse:
    """Send server-sent events; events that arrived together are sent together."""
    response = web.StreamResponse(headers=EVENT_STREAM | headers)
    await response.prepare(request)
    try:
        chunks = list(reply.opening())
        events = list(first)
        while True:
            chunks += [chunk for choice, event in events for chunk in reply.chunks(choice, event)]
            if generation.over:
                chunks += reply.closing()
            if chunks:
                await response.write(b"".join(map(sse, chunks)))
            if generation.over:
                break
            chunks, events = [], await _next(generation, response)
    except LapsSdError as error:
        await response.write(sse(error_json(error)))
    except ConnectionError:
        raise
    except Exception as error:
        await response.write(sse(error_json(_incident(error, request.path))))
    await response.write(DONE)
    await response.write_eof()
    return response


async def _next(generation: Generation, response: web.StreamResponse) -> list[tuple[int, Event]]:
    """Return the next events; while waiting, send comments that show the client a live connection."""
    while True:
        try:
            async with asyncio.timeout(QUIET_S):
                return await generation.read()
        except TimeoutError:
            await response.write(b": waiting\n\n")


async def _body(request: web.Request) -> bytes:
    """Return the bytes of a body; its size is checked before it is read."""
    # A web page may post plain text to any address; for JSON the browser first sends a preflight request,
    # which is not granted.
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="the Content-Type must be application/json")
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise web.HTTPUnsupportedMediaType(text="the body must not be compressed")
    most = request.client_max_size
    if request.content_length is not None and request.content_length > most:
        raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=request.content_length)
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_S:g} s") from None


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Send 100 Continue (RFC 9110, section 10.1.1). aiohttp's own handler fails on an Expect header that is
    not text."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        return _said_by_aiohttp(
            web.HTTPExpectationFailed(text="the only expectation that is met is 100-continue"), 0
        )
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # no part of the answer is sent yet
    return None


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for client input that is not HTTP: the client gets an error, and the log stays
    free of it."""
    error = record.exc_info[1] if record.exc_info else None
    # UnicodeEncodeError: aiohttp tried to repeat bytes that are not text. Our own errors never get here, see
    # `_guarded`.
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError | UnicodeEncodeError)


def _header(request: web.Request, name: str) -> str:
    """Return the one value of a header, empty without one. Raises InvalidArgument."""
    given = request.headers.getall(name, [])
    if len(given) > 1:
        raise InvalidArgument(name, "must be sent once at most, got it twice")
    return given[0] if given else ""


def _put_key(parsed: ParsedRequest, key: str) -> None:
    """Set the idempotency key from a header."""
    for request in parsed.requests:
        request.idempotency_key = key


def _own_request_id(request: web.Request) -> str:
    """Return the client's id for its request if it is valid in a header and a log; otherwise an
    empty text."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return (
        given if len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable() else ""
    )


def _refusal(error: LapsSdError) -> web.Response:
    headers = retry_headers(error)
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"  # RFC 9110, section 15.5.2
    return web.json_response(error_json(error), status=http_status(error), headers=headers)


def _said_by_aiohttp(error: web.HTTPException, max_bytes: int) -> web.Response:
    """Return an error of aiohttp (unknown path, wrong method, body too large …) in OpenAI's shape."""
    message = error.text or HTTPStatus(error.status).phrase
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        message = f"the body must be at most {max_bytes} bytes"
    refusal = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    response = web.json_response({"error": refusal}, status=error.status)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    if error.status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT):
        response.force_close()  # the rest of the body is not worth reading
    return response


def _incident(error: Exception, path: str) -> LapsSdError:
    """Return the error for a bug in the gateway: the traceback is logged here, the client gets an id to find
    it by."""
    incident = secrets.token_hex(4)
    log.error("call failed", path=path, incident=incident, exc_info=error)
    return LapsSdError(f"internal error, incident {incident}")


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise StartupError(
            f"The HTTP port {port} on {host} cannot be opened: {error.strerror or error}; "
            "choose another with LAPS_SD_HTTP_PORT."
        ) from error
