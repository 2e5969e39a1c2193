"""The Open Inference Protocol, as a KServe client speaks it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from laps_sd.v1 import open_inference_pb2 as pb
from laps_sd.v1 import open_inference_pb2_grpc
from tests.services.gateway.conftest import Running
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind
from tests.services.gateway.reading import violations


@pytest.fixture
def stub(running: Running) -> Any:
    return open_inference_pb2_grpc.GRPCInferenceServiceStub(running.channel)


def infer(*texts: bytes, raw: bool = False, **parameters: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="tiny", id="mine")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    if raw:
        request.raw_input_contents.append(b"".join(len(one).to_bytes(4, "little") + one for one in texts))
    else:
        tensor.contents.bytes_contents.extend(texts)
    for name, value in parameters.items():
        request.parameters[name].CopyFrom(value)
    return request


def with_raw(*contents: bytes) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(model_name="tiny", inputs=infer(b"x").inputs, raw_input_contents=contents)


def with_shape(*sizes: int) -> pb.ModelInferRequest:
    request = infer(b"x")
    request.inputs[0].shape[:] = sizes
    return request


async def test_it_says_what_it_is_and_that_it_is_ready(stub: Any) -> None:
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await stub.ModelReady(pb.ModelReadyRequest(name="tiny"))).ready
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="other"))).ready
    assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name == "laps-sd"
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"))
    assert [(tensor.name, tensor.datatype) for tensor in metadata.inputs] == [("text_input", "BYTES")]
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.ModelMetadata(pb.ModelMetadataRequest(name="other"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("raw", [False, True])
async def test_each_element_gets_a_text(
    stub: Any, running: Running, scheduler: FakeScheduler, raw: bool
) -> None:
    parameters = {
        "max_tokens": pb.InferParameter(int64_param=7),
        "temperature": pb.InferParameter(double_param=0),
    }
    call = asyncio.ensure_future(stub.ModelInfer(infer(b"one", b"two", raw=raw, **parameters)))
    for count, text in ((1, "hello"), (2, "world")):
        request_id = await scheduler.submitted(count)
        scheduler.commit(request_id, running.model.encode_rendered(text), Kind.KIND_STOP)
    response = await call
    specification = next(iter(scheduler.record.requests.values())).submit.specification

    assert (specification.sampling.max_tokens, specification.sampling.temperature) == (7, 0)
    assert response.id == "mine"
    (output,) = response.outputs
    assert (output.name, list(output.shape)) == ("text_output", [2])
    if raw:
        assert response.raw_output_contents[0] == b"\5\0\0\0hello\5\0\0\0world"
    else:
        assert list(output.contents.bytes_contents) == [b"hello", b"world"]
    assert response.parameters["request_id"].string_param in scheduler.record.requests


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ModelInferRequest(model_name="tiny"), "inputs"),
        (infer(), "inputs[0].shape"),
        (infer(b"\xff"), "inputs[0]"),
        (infer(b"x", colour=pb.InferParameter(bool_param=True)), "parameters[colour]"),
        (infer(b"x", temperature=pb.InferParameter(double_param=-1)), "sampling.temperature"),
        (
            pb.ModelInferRequest(
                model_name="tiny", inputs=infer(b"x").inputs, raw_input_contents=[b"\\9\0\0\0x"]
            ),
            "raw_input_contents[0]",
        ),
        (with_raw(b"", b""), "raw_input_contents"),
        # Refused by number, before a message is made of each.
        (with_raw(bytes(4 * 1025)), "inputs[0]"),
        (infer(*[b""] * 1025), "inputs[0]"),
        (with_shape(*[2**62] * 100_000), "inputs[0].shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_refusal_names_the_field(
    stub: Any, scheduler: FakeScheduler, request_: pb.ModelInferRequest, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.ModelInfer(request_)

    assert violations(error.value)[0][0] == field
    assert scheduler.all_heard("submit") == []
