"""`laps_sd.v1.Inference` as a gateway serves it: reads the proto, uses `calls`, writes the proto."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import grpc
import grpc.aio

from gateway.calls.calls import Caller, Calls, deadline_after
from gateway.calls.generation import Generation
from gateway.calls.output import Piece
from gateway.settings import STALLED_S
from gateway.tenants import Tenants
from laps_sd.errors import Unavailable
from laps_sd.service.tracing import valid_traceparent
from laps_sd.v1 import inference_pb2, inference_pb2_grpc

__all__ = ["InferenceService", "caller_of", "identify"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The service of the proto."""

    def __init__(self, calls: Calls, tenants: Tenants) -> None:
        self._calls = calls
        self._tenants = tenants

    # The handlers write to the context instead of yielding: a cancelled call then runs their `finally` at
    # once. gRPC cancels a call at its deadline, so no wait here looks at it.

    async def GenerateStream(self, request: inference_pb2.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        """Submit a request and stream its output."""
        async with self._calls.generate([request], self._caller(context)) as generation:
            await _relay(generation, context)

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        """Submit a request and return its whole output."""
        caller = self._caller(context)
        async with self._calls.generate([request], caller, in_one_message=True) as generation:
            return await _collect(generation)

    async def Resume(self, request: inference_pb2.ResumeRequest, context: Context) -> None:  # type: ignore[override]
        """Attach to a request and stream its output after the cursor."""
        caller = self._caller(context)
        async with self._calls.resume(request.request_id, request.cursor, caller) as generation:
            await _relay(generation, context)

    async def Cancel(  # type: ignore[override]
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        """End a request."""
        cancelled = await self._calls.cancel(request.request_id, self._caller(context))
        return inference_pb2.CancelResponse(cancelled=cancelled)

    async def Explain(  # type: ignore[override]
        self, request: inference_pb2.ExplainRequest, context: Context
    ) -> inference_pb2.ExplainResponse:
        """Return the explanation of the shard's leader."""
        return await self._calls.explain(request.request_id, self._caller(context))

    async def ListModels(  # type: ignore[override]
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """Return the one model, once for each of its names."""
        served = self._calls.model
        models = [
            inference_pb2.Model(
                name=name,
                context_tokens=served.context_tokens,
                vocab_size=served.vocab_size,
                has_chat_template=served.template is not None,
            )
            for name in served.names
        ]
        return inference_pb2.ListModelsResponse(models=models)

    async def Tokenize(  # type: ignore[override]
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Return the token ids of a prompt."""
        prompt = inference_pb2.GenerateRequest(model=request.model)
        if request.HasField("add_special_tokens"):
            prompt.add_special_tokens = request.add_special_tokens
        match request.WhichOneof("prompt"):
            case "text":
                prompt.text = request.text
            case "messages":
                prompt.messages.CopyFrom(request.messages)
        ids = await self._calls.tokenize(prompt, self._caller(context))
        return inference_pb2.TokenizeResponse(
            token_ids=ids, tokens_left=self._calls.model.context_tokens - len(ids)
        )

    async def Detokenize(  # type: ignore[override]
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Return the text of output tokens."""
        text = await self._calls.detokenize(request.model, request.token_ids, self._caller(context))
        return inference_pb2.DetokenizeResponse(text=text)

    def _caller(self, context: Context) -> Caller:
        return caller_of(context, self._tenants)


def identify(context: Context, tenants: Tenants) -> str:
    """Return the tenant of a gRPC call, from its metadata alone. Raises Unauthenticated, InvalidArgument."""
    return tenants.of(_metadata(context))


def caller_of(context: Context, tenants: Tenants) -> Caller:
    """Return the caller of a gRPC call, with its deadline. Raises Unauthenticated, InvalidArgument."""
    metadata = _metadata(context)
    return Caller(
        tenant=tenants.of(metadata),
        deadline=deadline_after(context.time_remaining(), asyncio.get_running_loop().time()),
        traceparent=valid_traceparent(dict(metadata).get("traceparent", "")),
    )


def _metadata(context: Context) -> list[tuple[str, str]]:
    return [(name, value) for name, value in context.invocation_metadata() or () if isinstance(value, str)]


async def _relay(generation: Generation, context: Context) -> None:
    """Write the output of a call as it comes. Raises Unavailable if its client reads nothing for too long."""
    try:
        for choice, accepted in enumerate(generation.accepted):
            await _write(context, inference_pb2.GenerateEvent(accepted=accepted, choice=choice))
        while not generation.over:
            for choice, piece in await generation.read():
                if piece.token_ids or piece.text:
                    await _write(context, _delta_event(choice, piece))
                if piece.end is not None:
                    await _write(context, inference_pb2.GenerateEvent(end=piece.end, choice=choice))
    except TimeoutError:
        generation.failed(ConnectionResetError("the client reads nothing"))
        raise Unavailable(f"the client has read nothing for {STALLED_S:g} s") from None


async def _write(context: Context, event: inference_pb2.GenerateEvent) -> None:
    async with asyncio.timeout(STALLED_S):
        await context.write(event)


def _delta_event(choice: int, piece: Piece) -> inference_pb2.GenerateEvent:
    event = inference_pb2.GenerateEvent(choice=choice)
    delta = event.delta
    delta.text = piece.text
    delta.token_ids.extend(piece.token_ids)
    delta.first_token = piece.first_token
    delta.cursor.next_token = piece.next_token
    delta.cursor.text_offset = piece.text_offset
    if piece.logprobs:
        delta.logprobs.extend(piece.logprobs)
    if piece.prompt_logprobs is not None:
        delta.prompt_logprobs.CopyFrom(piece.prompt_logprobs)
    return event


async def _collect(generation: Generation) -> inference_pb2.GenerateResponse:
    responses = [inference_pb2.GenerateResponse(accepted=accepted) for accepted in generation.accepted]
    texts: list[list[str]] = [[] for _ in responses]
    while not generation.over:
        for choice, piece in await generation.read():
            texts[choice].append(piece.text)
            responses[choice].token_ids.extend(piece.token_ids)
            responses[choice].logprobs.extend(piece.logprobs)
            if piece.prompt_logprobs is not None:
                responses[choice].prompt_logprobs.CopyFrom(piece.prompt_logprobs)
            if piece.end is not None:
                responses[choice].end.CopyFrom(piece.end)
    for response, text in zip(responses, texts, strict=True):
        response.text = "".join(text)
    responses[0].more.extend(responses[1:])
    return responses[0]
