"""`laps_sd.v1.Inference` as a gateway serves it: proto in, link, proto out."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, TypeAlias

import grpc
import grpc.aio

from gateway import metrics
from gateway.link import ShardLink, deadline_of
from gateway.output import Output, accepted_event
from gateway.settings import GatewaySettings
from gateway.shards import Shards
from gateway.streams import Acceptance, ClientStream
from gateway.tokenizer import THREAD_FROM_CHARACTERS, ModelFiles, TemplateRefused
from gateway.validation import check_request, check_request_id, complete, valid_traceparent
from laps_sd.errors import InvalidArgument, LapsSdError, ResourceExhausted
from laps_sd.v1 import inference_pb2, inference_pb2_grpc

__all__ = ["TENANT_KEY", "InferenceService", "tenant_of"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

ANONYMOUS = "anonymous"
TENANT_KEY = "laps-sd-tenant"
MAX_TENANT_CHARACTERS = 64
LONG_PROMPTS_AT_ONCE = 2
"""Long prompts that are tokenized at the same time. A prompt of the largest size takes some hundred MiB meanwhile."""


def tenant_of(context: Context, *, trust_metadata: bool) -> str:
    """Whose call this is. The one place that decides it."""
    if not trust_metadata:
        return ANONYMOUS
    tenant = _metadata(context, TENANT_KEY)
    if len(tenant) > MAX_TENANT_CHARACTERS:
        raise InvalidArgument(
            TENANT_KEY, f"must be at most {MAX_TENANT_CHARACTERS} characters, got {len(tenant)}"
        )
    return tenant or ANONYMOUS


def _metadata(context: Context, key: str) -> str:
    value = next((value for name, value in context.invocation_metadata() or () if name == key), "")
    return value if isinstance(value, str) else ""


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """See the proto. One model."""

    def __init__(self, settings: GatewaySettings, model: ModelFiles, shards: Shards) -> None:
        self._settings = settings
        self._model = model
        self._shards = shards
        self._long_prompts = asyncio.Semaphore(LONG_PROMPTS_AT_ONCE)

    # The handlers write to the context instead of yielding: a cancelled call then runs their `finally` at once.
    # gRPC cancels a call at its deadline, so no wait here looks at it.

    async def GenerateStream(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Submits and streams."""
        began = _now()
        link, stream, acceptance = await self._submit(request, context)
        try:
            await self._relay(link, stream, acceptance, context, began=began)
        finally:
            link.close(stream)

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """Submits and collects."""
        began = _now()
        link, stream, acceptance = await self._submit(request, context)
        try:
            return await self._collect(link, stream, acceptance, began=began)
        finally:
            link.close(stream)

    async def Resume(self, request: inference_pb2.ResumeRequest, context: Context) -> None:  # type: ignore[override]
        """Attaches to a request and streams what lies behind the cursor."""
        began = _now()
        tenant = self._tenant(context)
        link = self._link_of(request.request_id)
        self._check_room()
        stream = link.attach(request.request_id, tenant=tenant)
        try:
            try:
                acceptance = await link.accepted(stream, wait_s=self._settings.scheduler_wait_s)
            except LapsSdError as error:
                metrics.REFUSED.labels(error.code.name).inc()
                raise
            await self._relay(link, stream, acceptance, context, began=began, cursor=request.cursor)
        finally:
            link.close(stream)

    async def Cancel(  # type: ignore[override]
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        """Ends a request."""
        tenant = self._tenant(context)
        link = self._link_of(request.request_id)
        cancelled = await link.cancel(
            request.request_id, tenant=tenant, wait_s=self._settings.scheduler_wait_s
        )
        return inference_pb2.CancelResponse(cancelled=cancelled)

    async def Explain(  # type: ignore[override]
        self, request: inference_pb2.ExplainRequest, context: Context
    ) -> inference_pb2.ExplainResponse:
        """Passes on what the shard's leader says."""
        tenant = self._tenant(context)
        link = self._link_of(request.request_id)
        return await link.explain(request.request_id, tenant=tenant, wait_s=self._settings.scheduler_wait_s)

    async def ListModels(  # type: ignore[override]
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """The one model."""
        model = inference_pb2.Model(
            name=self._model.name,
            context_tokens=self._model.context_tokens,
            vocab_size=self._model.vocab_size,
            has_chat_template=self._model.template is not None,
        )
        return inference_pb2.ListModelsResponse(models=[model])

    # ---- parts

    async def _submit(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> tuple[ShardLink, ClientStream, Acceptance]:
        """Validates, tokenizes and hands in. The caller closes the stream."""
        deadline = deadline_of(context.time_remaining(), _now())
        try:
            tenant = self._tenant(context)
            check_request(request, self._settings, self._model)
            self._check_room()
            prompt_ids = await self._prompt_ids(request)
            submit = complete(
                request,
                prompt_ids,
                settings=self._settings,
                model=self._model,
                tenant=tenant,
                fallback_seed=secrets.randbits(64),
            )
            submit.traceparent = valid_traceparent(_metadata(context, "traceparent"))
            link, stream, acceptance = await self._shards.place(
                submit, deadline=deadline, wait_s=self._settings.scheduler_wait_s
            )
        except LapsSdError as error:
            metrics.REFUSED.labels(error.code.name).inc()
            raise
        if not acceptance.attached:
            metrics.PROMPT_TOKENS.observe(acceptance.prompt_tokens)
        return link, stream, acceptance

    async def _prompt_ids(self, request: inference_pb2.GenerateRequest) -> list[int]:
        match request.WhichOneof("prompt"):
            case "text":
                return await self._encode(request.text, rendered=False)
            case "messages":
                assert self._model.template is not None, "check_request refuses messages without a template"
                messages = [
                    {"role": message.role, "content": message.content}
                    for message in request.messages.messages
                ]
                try:
                    rendered = self._model.template.render(messages)
                except TemplateRefused as error:
                    raise InvalidArgument("messages", f"do not fit the chat template: {error}") from error
                return await self._encode(rendered, rendered=True)
            case _:
                return list(request.token_ids.ids)

    async def _encode(self, text: str, *, rendered: bool) -> list[int]:
        if len(text) < THREAD_FROM_CHARACTERS:
            return await self._model.encode_off_loop(text, rendered=rendered)
        async with self._long_prompts:
            return await self._model.encode_off_loop(text, rendered=rendered)

    async def _relay(
        self,
        link: ShardLink,
        stream: ClientStream,
        acceptance: Acceptance,
        context: Context,
        *,
        began: float,
        cursor: inference_pb2.Cursor | None = None,
    ) -> None:
        accepted, output = accepted_event(acceptance, self._model), Output(acceptance, self._model, cursor)
        pace = _Pace(began, fresh=cursor is None)
        with pace:
            await context.write(inference_pb2.GenerateEvent(accepted=accepted))
            ended = False
            while not ended:
                batch = await link.read(stream)
                pace.tokens(len(batch.token_ids))
                for message in output.messages(batch):
                    if isinstance(message, inference_pb2.Delta):
                        await context.write(inference_pb2.GenerateEvent(delta=message))
                    else:
                        pace.end = _end_name(message)
                        ended = True
                        await context.write(inference_pb2.GenerateEvent(end=message))

    async def _collect(
        self, link: ShardLink, stream: ClientStream, acceptance: Acceptance, *, began: float
    ) -> inference_pb2.GenerateResponse:
        accepted, output = accepted_event(acceptance, self._model), Output(acceptance, self._model, None)
        response = inference_pb2.GenerateResponse(accepted=accepted)
        text: list[str] = []
        with _Pace(began, fresh=True) as pace:
            while not response.HasField("end"):
                batch = await link.read(stream)
                pace.tokens(len(batch.token_ids))
                for message in output.messages(batch):
                    if isinstance(message, inference_pb2.Delta):
                        text.append(message.text)
                        response.token_ids.extend(message.token_ids)
                        response.logprobs.extend(message.logprobs)
                    else:
                        pace.end = _end_name(message)
                        response.end.CopyFrom(message)
        response.text = "".join(text)
        return response

    def _check_room(self) -> None:
        if self._shards.streams >= self._settings.max_streams:
            raise ResourceExhausted(
                f"this gateway has {self._settings.max_streams} streams open, its limit", retry_after_s=1.0
            )

    def _tenant(self, context: Context) -> str:
        return tenant_of(context, trust_metadata=self._settings.trust_tenant_metadata)

    def _link_of(self, request_id: str) -> ShardLink:
        check_request_id(request_id)
        return self._shards.link_of(request_id)


class _Pace:
    """Measures one attachment: time to the first token, time per token, how it ended."""

    def __init__(self, began: float, *, fresh: bool) -> None:
        self.end = "gone"  # unless somebody says otherwise, the client left
        self._began = began
        self._fresh = fresh  # a resumed stream replays: its times say nothing about the model
        self._first: float | None = None
        self._last = 0.0
        self._count = 0

    def __enter__(self) -> _Pace:
        return self

    def tokens(self, count: int) -> None:
        """So many tokens arrived now."""
        if count == 0:
            return
        self._last = _now()
        self._count += count
        if self._first is None:
            self._first = self._last
            if self._fresh:
                metrics.FIRST_TOKEN.observe(self._first - self._began)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, LapsSdError):
            self.end = error.code.name.lower()
        metrics.REQUESTS.labels(self.end).inc()
        metrics.OUTPUT_TOKENS.inc(self._count)
        if self._fresh and self._first is not None and self._count > 1:
            metrics.TOKEN_TIME.observe((self._last - self._first) / (self._count - 1))


def _end_name(ended: inference_pb2.Ended) -> str:
    """A finish reason as a metric's label: "stop", "length" …"""
    return inference_pb2.FinishReason.Name(ended.finish_reason).removeprefix("FINISH_REASON_").lower()


def _now() -> float:
    return asyncio.get_running_loop().time()
