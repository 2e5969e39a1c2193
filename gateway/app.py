"""The assembled gateway: model files, shards, services and servers."""

from __future__ import annotations

import asyncio

from gateway import memory
from gateway.api.http_server import HttpServer
from gateway.api.inference import InferenceService, identify
from gateway.api.open_inference import SERVER_METHODS, OpenInferenceService
from gateway.api.vllm_metrics import VllmMetrics
from gateway.calls.calls import Calls
from gateway.fair_turns import OwnTurns
from gateway.links.shards import Shards
from gateway.model.files import ModelFiles, ModelFilesError, load_model
from gateway.settings import GatewaySettings
from gateway.tenants import Tenants
from laps_sd.errors import StartupError
from laps_sd.service.adapters import adapter_names
from laps_sd.service.certificates import expose_expiry
from laps_sd.service.hub import local_model
from laps_sd.service.interceptor import OPEN_METHODS
from laps_sd.service.log import get_logger
from laps_sd.service.metrics import REGISTRY
from laps_sd.service.model_dir import demo_target_dir, served_name
from laps_sd.service.serving import ServiceApp
from laps_sd.v1 import (
    inference_pb2,
    inference_pb2_grpc,
    open_inference_pb2,
    open_inference_pb2_grpc,
)

log = get_logger(__name__)

HEALTH_EVERY_S = 0.25
"""Maximum age of the readiness in the gRPC health service, in seconds. A leader sends the state of its shard
once a second."""
TRAFFIC = "traffic"
"""Health name for whatever routes clients to gateways, such as a Kubernetes Service: a gateway that has to
refuse new requests still resumes and cancels requests and returns the time to retry after."""
DEMO_MODEL = "laps-sd-demo"
MESSAGES_AT_ONCE = 32
"""Most gRPC calls of one tenant whose messages are received at the same time. Our choice: with messages of the
largest size they take as much memory as the large HTTP bodies of a tenant. Further calls wait, as many as may
be open."""

__all__ = ["GatewayApp", "load_configured_model", "serve"]


class GatewayApp:
    """One gateway: `start`, then `run()` until a signal, or `stop()`."""

    def __init__(self, settings: GatewaySettings, model: ModelFiles) -> None:
        self.tenants = tenants = Tenants(settings)
        self.message_turns = OwnTurns(MESSAGES_AT_ONCE, most_waiting=settings.max_streams, what="messages")
        self.app = ServiceApp(
            "gateway",
            settings,
            authorize=lambda _, context: identify(context, tenants),
            message_turns=self.message_turns.of,
            open_methods=(*OPEN_METHODS, *SERVER_METHODS),
            max_fields=settings.max_message_fields,
            max_sent_bytes=settings.max_answer_bytes,
            max_connection_age_s=settings.max_connection_age_s,
        )
        self.shards = Shards(settings, model.vocabulary)
        self.calls = Calls(settings, model, self.shards, tenants, self.app.tracing)
        service = InferenceService(self.calls, tenants)
        inference_pb2_grpc.add_InferenceServicer_to_server(service, self.app.server)
        open_inference = OpenInferenceService(self.calls, tenants, self._is_ready)
        open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(open_inference, self.app.server)
        for descriptor in (inference_pb2.DESCRIPTOR, open_inference_pb2.DESCRIPTOR):
            self.app.names.extend(service.full_name for service in descriptor.services_by_name.values())

        self.app.own_names.append(TRAFFIC)
        self.http = (
            None if settings.http_port is None else HttpServer(self.calls, tenants, self.app, self.shards)
        )
        self._vllm_metrics = VllmMetrics(model.name, self.shards) if settings.vllm_metrics else None
        self.app.closing.push_async_callback(self._close)

    async def start(self) -> None:
        """Bind the ports. Raises StartupError, with nothing left open."""
        if self._vllm_metrics is not None:
            REGISTRY.register(self._vllm_metrics)
        try:
            await self.app.start()
            expose_expiry("link", self.calls.settings.link_tls_cert)
            if self.http is not None:
                await self.http.start()
        except StartupError:  # one of the two ports may be open
            await self.stop()
            raise
        self.app.spawn(self.shards.run(), name="links to the shards")
        if self.calls.settings.api_keys_file is not None:
            self.app.spawn(self.tenants.watch(), name="file of tenants")
        self.app.spawn(self._mind_health(), name="health")
        self.app.spawn(memory.keep_returning(), name="return of freed memory", may_end=True)

    async def run(self) -> None:
        """Serve until a signal, or until a task fails; raises the failure of the task."""
        await self.app.run(self._drain)

    async def stop(self) -> None:
        """Stop as after the first signal, and wait for the end."""
        await self.app.stop(self._drain)

    async def _drain(self) -> None:
        if self.http is not None:
            await self.http.stop_listening()

    async def _close(self) -> None:
        if self.http is not None:
            await self.http.close()
        if self._vllm_metrics is not None:
            REGISTRY.unregister(self._vllm_metrics)
            self._vllm_metrics = None
        await self.calls.close()

    def _is_ready(self) -> bool:
        return not (self.app.stopping.is_set() or self.calls.refusal)

    async def _mind_health(self) -> None:
        """Set readiness to whether a new request would be accepted now. TRAFFIC is set once a leader has
        greeted and stays set until the stop."""
        await self.shards.greeted()
        await self.app.set_health(TRAFFIC)
        while True:
            reason = self.calls.refusal
            self.app.set_ready(not reason, reason)
            await asyncio.sleep(HEALTH_EVERY_S)


def load_configured_model(settings: GatewaySettings) -> ModelFiles:
    """Load the model that the settings name. Raises StartupError."""
    named = settings.tokenizer_dir
    if named is None:
        if settings.model not in ("", DEMO_MODEL) or (demo := demo_target_dir()) is None:
            raise StartupError(
                "LAPS_SD_TOKENIZER_DIR must name the target model, by a directory with its tokenizer.json or as on the "
                "Hugging Face hub."
            )
        directory, name = demo, DEMO_MODEL
    else:
        directory, name = local_model(named, weights=False), settings.model or served_name(named)
    if taken := {name, *settings.model_aliases} & {*adapter_names(settings.adapters)}:
        raise StartupError(f"LAPS_SD_ADAPTERS has {taken.pop()!r}, which is a name of the model itself.")
    try:
        model = load_model(
            directory,
            name=name,
            context_tokens=settings.context_tokens,
            parsers=(settings.tool_parser, settings.reasoning_parser),
            recommendations=settings.generation_config == "model",
            aliases=settings.model_aliases,
            adapters=adapter_names(settings.adapters),
        )
    except ModelFilesError as error:
        raise StartupError(f"The model {name!r} cannot be served: {error}.") from error
    if model.template is not None:
        tools, reasoning = model.dialect.tools, model.dialect.reasoning
        log.info(
            "markup that is read in chats",
            tools="none" if tools is None else tools.name,
            reasoning="none" if reasoning is None else reasoning.begin,
        )
    return model


async def serve(settings: GatewaySettings) -> None:
    """Run one gateway until a signal."""
    gateway = GatewayApp(settings, load_configured_model(settings))
    await gateway.start()
    await gateway.run()
