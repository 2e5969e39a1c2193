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

import prometheus_client
from aiohttp import web

from gateway.api.console.routes import ConsoleRoutes
from gateway.api.description import openapi_json
from gateway.api.docs_page import POLICY, docs_page
from gateway.api.http_calls import stopping
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
from gateway.api.http_generation import GenerationRoutes
from gateway.api.http_requests import JsonBodies, id_headers, tenant_of
from gateway.api.http_vllm import VllmRoutes
from gateway.api.openai.reply import model_json, models_json
from gateway.api.openai.unknown_fields import UnknownFields
from gateway.calls.calls import Calls
from gateway.calls.validation import check_model
from gateway.links.shards import Shards
from gateway.tenants import Tenants
from laps_sd.errors import LapsSdError, StartupError
from laps_sd.service.certificates import ServedCertificate
from laps_sd.service.listening import EVERY_ADDRESS
from laps_sd.service.log import get_logger
from laps_sd.service.metrics import REGISTRY
from laps_sd.service.serving import ServiceApp

__all__ = ["HttpServer"]

log = get_logger(__name__)

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
        self._cors = Cors(calls.settings.cors_origins)
        self.port = 0
        """The bound port, after `start`."""
        routes = web.Application(
            middlewares=[self._guarded], client_max_size=calls.settings.max_message_bytes
        )
        unknown = UnknownFields(calls.settings.unknown_fields)
        bodies = JsonBodies(calls.settings.max_message_fields)
        self._generation = GenerationRoutes(calls, tenants, unknown, bodies)
        self._generation.add_to(routes.router)
        routes.router.add_get("/v1/models", self._models)
        routes.router.add_get("/v1/models/{name:.+}", self._model)
        routes.router.add_get("/health", self._health)
        routes.router.add_get("/live", self._live)
        routes.router.add_get("/metrics", self._metrics)
        routes.router.add_get("/openapi.json", self._openapi)
        routes.router.add_get("/docs", self._docs)
        VllmRoutes(calls, tenants, unknown, bodies).add_to(routes.router, self._health)
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
        self._generation.cut_off()
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
