"""The span of a call, as a collector of OpenTelemetry gets it over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import grpc.aio
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from gateway.tracing import call_span
from laps_sd.service.tracing import QUIET
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateRequest,
    OutputFormat,
    SamplingParams,
    SpeculationSummary,
    Timing,
)
from tests.collector import Collector, collecting
from tests.services.gateway.conftest import Running, StartGateway
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind
from tests.services.gateway.reading import rest

TRACE, CALLER = "a" * 32, "b" * 16


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


async def test_a_call_is_a_span_of_its_caller(
    collector: Collector, scheduler: FakeScheduler, start_gateway: StartGateway
) -> None:
    running: Running = await start_gateway(scheduler.address, otlp_endpoint=collector.endpoint)
    await asyncio.wait_for(running.link.greeted.wait(), 10)
    call = running.stub.GenerateStream(
        GenerateRequest(
            messages=ChatMessages(messages=[ChatMessage(role="user", content="a secret")]),
            sampling=SamplingParams(max_tokens=9, seed=2**64 - 1, presence_penalty=0.5),
            output_format=OutputFormat(json_object=True),
        ),
        metadata=(("traceparent", f"00-{TRACE}-{CALLER}-01"),),
    )
    request_id = await scheduler.submitted()
    end = link_pb2.RequestEnd(
        kind=Kind.KIND_STOP,
        cached_prompt_tokens=2,
        speculation=SpeculationSummary(rounds=2, drafted=8, accepted=6),
        timing=Timing(queued_s=0.5, first_token_s=0.75, total_s=2.0, preemptions=1),
    )
    scheduler.commit(request_id, [70, 71, 72], end)
    await rest(call)
    await running.gateway.stop()

    (span,) = collector.spans()
    assert (span.name, span.service) == ("chat tiny", "gateway")
    assert (span.trace, span.parent) == (TRACE, CALLER)
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert span.attributes["gen_ai.request.max_tokens"] == 9
    assert span.attributes["gen_ai.response.id"] == request_id
    assert span.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert span.attributes["gen_ai.request.seed"] == -1
    assert span.attributes["gen_ai.request.presence_penalty"] == 0.5
    assert span.attributes["gen_ai.output.type"] == "json"
    assert span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    names = {name for name in span.attributes if name.startswith("gen_ai.")}
    assert names <= {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    assert "gen_ai.response.time_to_first_chunk" in span.attributes
    assert span.events == ("accepted", "ended")
    assert "secret" not in str(span)

    # Other services get the context of this span, not of the caller's.
    sent = scheduler.record.requests[request_id].submit.traceparent
    assert sent == f"00-{TRACE}-{span.id}-01"


async def test_a_refusal_is_an_error_of_its_span(
    collector: Collector, scheduler: FakeScheduler, start_gateway: StartGateway
) -> None:
    running: Running = await start_gateway(scheduler.address, otlp_endpoint=collector.endpoint)
    with pytest.raises(grpc.aio.AioRpcError):
        await running.stub.Generate(GenerateRequest(text="x", sampling=SamplingParams(top_p=2)))
    await running.gateway.stop()

    (span,) = collector.spans(name="text_completion tiny")
    assert span.attributes["error.type"] == "INVALID_ARGUMENT"
    assert "top_p" in span.error


async def test_the_input_of_a_call_is_that_of_all_its_prompts_and_its_failure_is_an_error(
    collector: Collector, scheduler: FakeScheduler, start_gateway: StartGateway
) -> None:
    running: Running = await start_gateway(scheduler.address, otlp_endpoint=collector.endpoint, http_port=0)
    await asyncio.wait_for(running.link.greeted.wait(), 10)
    assert running.gateway.http is not None
    async with aiohttp.ClientSession() as session:
        body = {"prompt": [[70], [70, 71]], "n": 2}
        call = asyncio.create_task(
            session.post(f"http://127.0.0.1:{running.gateway.http.port}/v1/completions", json=body)
        )
        await scheduler.submitted(4)
        broken = link_pb2.RequestEnd(
            kind=Kind.KIND_ERROR, detail="the device is gone", cached_prompt_tokens=2
        )
        for request_id, cached in zip(scheduler.record.requests, (1, 0, 2), strict=False):
            end = link_pb2.RequestEnd(kind=Kind.KIND_STOP, cached_prompt_tokens=cached)
            scheduler.commit(request_id, [72], end)
        scheduler.commit(await scheduler.submitted(4), [], broken)
        await call
    await running.gateway.stop()

    (span,) = collector.spans()
    assert span.attributes["gen_ai.usage.input_tokens"] == 3
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 2, "at most those of the input"
    assert span.attributes["gen_ai.request.choice.count"] == 4
    assert "error.type" in span.attributes
    assert span.error == "the device is gone"


async def test_a_request_that_failed_is_an_error_of_its_span(
    collector: Collector, scheduler: FakeScheduler, start_gateway: StartGateway
) -> None:
    running: Running = await start_gateway(scheduler.address, otlp_endpoint=collector.endpoint)
    call = running.stub.GenerateStream(GenerateRequest(text="x"))
    broken = link_pb2.RequestEnd(kind=Kind.KIND_ERROR, detail="the device is gone")
    scheduler.commit(await scheduler.submitted(), [], broken)
    await rest(call)
    await running.gateway.stop()

    (span,) = collector.spans()
    assert (span.attributes["error.type"], span.error) == ("request_failed", "the device is gone")


async def test_a_stream_over_http_that_failed_is_an_error_of_its_span(
    collector: Collector, scheduler: FakeScheduler, start_gateway: StartGateway
) -> None:
    running: Running = await start_gateway(scheduler.address, otlp_endpoint=collector.endpoint, http_port=0)
    await asyncio.wait_for(running.link.greeted.wait(), 10)
    assert running.gateway.http is not None
    url = f"http://127.0.0.1:{running.gateway.http.port}/v1/completions"
    empty = FakeScheduler(epoch="2-b")
    empty.refuse = link_pb2.SubmitRefused(reason=link_pb2.SubmitRefused.REASON_KEY_CONFLICT)
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={"prompt": "x", "stream": True}) as response,
    ):
        await scheduler.submitted()
        await scheduler.kill()
        try:
            await empty.start(scheduler.port)
            assert "idempotency key" in await response.text()
        finally:
            await empty.kill()
    await running.gateway.stop()

    (span,) = collector.spans()
    assert span.attributes["error.type"] == "ALREADY_EXISTS"
    assert "idempotency key" in span.error


def test_without_an_endpoint_the_callers_context_passes_through() -> None:
    with call_span(QUIET, [GenerateRequest(text="x")], "theirs", model="tiny") as span:
        assert span.traceparent == "theirs"
