"""`inference.GRPCInferenceService`, the Open Inference Protocol: texts in, texts out, by the same calls as
the other protocols."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeAlias

import grpc
import grpc.aio

import laps_sd
from gateway.api.inference import caller_of
from gateway.api.openai.body import Json
from gateway.api.openai.limits import MAX_PROMPTS
from gateway.api.openai.models import SAMPLING_FIELDS
from gateway.api.openai.reply import Reply
from gateway.api.openai.request import ParsedRequest, read_completion
from gateway.calls.calls import Calls
from gateway.tenants import Tenants
from laps_sd.errors import InvalidArgument, NotFound
from laps_sd.v1 import open_inference_pb2 as pb
from laps_sd.v1 import open_inference_pb2_grpc

__all__ = ["SERVER_METHODS", "OpenInferenceService"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
SERVER_METHODS = tuple(
    f"/{SERVICE}/{method}" for method in ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata")
)
"""Methods open to all callers, as the health service is."""
INPUT, OUTPUT = "text_input", "text_output"
LENGTH_BYTES = 4
MAX_DIMENSIONS = 8
OTHERS = (
    "deadline_unix_ms",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "priority",
    "time_limit_ms",
    "workload_class",
)
NO_PARAMETERS = ("allowed_token_ids", "bad_words_ids", "logit_bias", "stop_token_ids")
"""Sampling parameters whose values no parameter of this protocol can hold."""
TAKEN = tuple(sorted((*OTHERS, *(name for name in SAMPLING_FIELDS if name not in NO_PARAMETERS))))
"""The fields of a completion that a parameter can hold."""


class OpenInferenceService(open_inference_pb2_grpc.GRPCInferenceServiceServicer):
    """The service of the proto. A request is converted to an OpenAI completion, so that parameters are read
    in one place only."""

    def __init__(self, calls: Calls, tenants: Tenants, ready: Callable[[], bool]) -> None:
        self._calls = calls
        self._tenants = tenants
        self._ready = ready

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:  # type: ignore[override]
        """Return that the process is alive: it answers."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:  # type: ignore[override]
        """Return the same readiness as the health service."""
        return pb.ServerReadyResponse(ready=self._ready())

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:  # type: ignore[override]
        """Return whether the model is ready: the one model is ready with the server."""
        return pb.ModelReadyResponse(ready=self._ready() and request.name in self._calls.model.names)

    async def ServerMetadata(  # type: ignore[override]
        self, request: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        """Return the name and version of the server."""
        return pb.ServerMetadataResponse(name="laps-sd", version=laps_sd.__version__)

    async def ModelMetadata(  # type: ignore[override]
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        """Return the metadata of the model: one input, one output."""
        model = self._calls.model.name
        if request.name not in self._calls.model.names:
            raise NotFound(f"there is no model {request.name[:80]!r}")
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=model,
            platform="laps-sd",
            inputs=[tensor(name=INPUT, datatype="BYTES", shape=[-1])],
            outputs=[tensor(name=OUTPUT, datatype="BYTES", shape=[-1])],
        )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:  # type: ignore[override]
        """Generate one text for each element of the input."""
        caller = caller_of(context, self._tenants)
        with self._calls.refusals(caller):
            parsed = _parsed(request)
        async with self._calls.generate(parsed.requests, caller, in_one_message=True) as generation:
            reply = Reply(parsed, generation, created_unix_s=0, model=self._calls.model)
            while not generation.over:
                for choice, piece in await generation.read():
                    reply.add(choice, piece)
        return _response(request, reply)


def _parsed(request: pb.ModelInferRequest) -> ParsedRequest:
    """Return the completion that a request describes. Raises InvalidArgument in the terms of this
    protocol."""
    body: Json = {"model": request.model_name, "prompt": _texts(request)}
    for name, parameter in request.parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if name not in TAKEN:
            raise InvalidArgument(f"parameters[{name[:40]}]", f"must be one of {', '.join(TAKEN)}")
        body[name] = None if kind is None else getattr(parameter, kind)
    if not request.model_name:
        raise InvalidArgument("model_name", "must not be empty")
    for output in request.outputs:
        if output.name != OUTPUT:
            raise InvalidArgument("outputs", f"must name {OUTPUT} only, got {output.name[:40]!r}")
    return read_completion(body)


def _texts(request: pb.ModelInferRequest) -> list[str]:
    if [tensor.name for tensor in request.inputs] != [INPUT]:
        raise InvalidArgument("inputs", f"must be one tensor, {INPUT}")
    (tensor,) = request.inputs
    if tensor.datatype != "BYTES":
        raise InvalidArgument("inputs[0].datatype", f"must be BYTES, got {tensor.datatype[:40]!r}")
    if len(request.raw_input_contents) > 1:
        raise InvalidArgument("raw_input_contents", "must be one, for the one tensor")
    if request.raw_input_contents:
        elements = list(islice(_split(request.raw_input_contents[0]), MAX_PROMPTS + 1))
    else:
        elements = list(tensor.contents.bytes_contents[: MAX_PROMPTS + 1])
    if len(elements) > MAX_PROMPTS:
        raise InvalidArgument("inputs[0]", f"must be at most {MAX_PROMPTS} elements")
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise InvalidArgument("inputs[0].shape", f"must be at most {MAX_DIMENSIONS} dimensions")
    if math.prod(tensor.shape) != len(elements) or not elements:
        raise InvalidArgument("inputs[0].shape", f"must hold as many elements as there are, {len(elements)}")
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        raise InvalidArgument("inputs[0]", "must be UTF-8") from None


def _split(raw: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        end = at + LENGTH_BYTES + int.from_bytes(raw[at : at + LENGTH_BYTES], "little")
        if end > len(raw):
            raise InvalidArgument(
                "raw_input_contents[0]", "must be elements, each after its length as 4 bytes"
            )
        yield raw[at + LENGTH_BYTES : end]
        at = end


def _response(request: pb.ModelInferRequest, reply: Reply) -> pb.ModelInferResponse:
    whole = reply.whole()
    texts = [choice["text"].encode() for choice in whole["choices"]]
    response = pb.ModelInferResponse(
        model_name=whole["model"],
        id=request.id,
        parameters={
            "request_id": pb.InferParameter(string_param=reply.id),
            "prompt_tokens": pb.InferParameter(int64_param=whole["usage"]["prompt_tokens"]),
            "completion_tokens": pb.InferParameter(int64_param=whole["usage"]["completion_tokens"]),
        },
        outputs=[pb.ModelInferResponse.InferOutputTensor(name=OUTPUT, datatype="BYTES", shape=[len(texts)])],
    )
    if request.raw_input_contents:  # the answer has the same form as the request
        response.raw_output_contents.append(
            b"".join(len(text).to_bytes(LENGTH_BYTES, "little") + text for text in texts)
        )
    else:
        response.outputs[0].contents.bytes_contents.extend(texts)
    return response
