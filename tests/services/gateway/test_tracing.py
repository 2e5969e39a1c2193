"""Spans, as a collector of OpenTelemetry gets them over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from gateway.settings import GatewaySettings
from gateway.tracing import Tracing
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateRequest,
    SamplingParams,
    SpeculationSummary,
    Timing,
)
from tests.services.gateway.conftest import Running, StartGateway
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind
from tests.services.gateway.reading import rest

TRACE, CALLER = "a" * 32, "b" * 16


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    server = grpc.aio.server()
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield collector, f"http://127.0.0.1:{port}"
    await server.stop(None)


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


async def test_a_call_is_a_span_of_its_caller_with_its_phases_below(
    collector: tuple[Collector, str], scheduler: FakeScheduler, start_gateway: StartGateway
) -> None:
    kept, endpoint = collector
    running: Running = await start_gateway(scheduler.address, otlp_endpoint=endpoint)
    await asyncio.wait_for(running.link.greeted.wait(), 10)
    call = running.stub.GenerateStream(
        GenerateRequest(
            messages=ChatMessages(messages=[ChatMessage(role="user", content="a secret")]),
            sampling=SamplingParams(max_tokens=9),
        ),
        metadata=(("traceparent", f"00-{TRACE}-{CALLER}-01"),),
    )
    request_id = await scheduler.submitted()
    end = link_pb2.RequestEnd(
        kind=Kind.KIND_STOP,
        speculation=SpeculationSummary(rounds=2, drafted=8, accepted=6),
        timing=Timing(queued_s=0.5, first_token_s=0.75, total_s=2.0, preemptions=1),
    )
    scheduler.commit(request_id, [70, 71, 72], end)
    await rest(call)
    await running.gateway.stop()

    span = kept.spans["chat tiny"]
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)
    told = attributes(span)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.max_tokens"] == 9
    assert told["gen_ai.response.id"] == request_id
    assert told["gen_ai.usage.output_tokens"] == 3
    assert "gen_ai.response.time_to_first_chunk" in told
    assert "secret" not in str(kept.spans)

    phases = [kept.spans[name] for name in ("queue", "prefill", "generate")]
    assert {phase.parent_span_id for phase in phases} == {span.span_id}
    lasted = [(phase.end_time_unix_nano - phase.start_time_unix_nano) / 1e9 for phase in phases]
    assert lasted == pytest.approx([0.5, 0.25, 1.25])
    assert attributes(phases[2])["laps_sd.accepted_tokens"] == 6

    # The services behind hear of this span, not of the caller's.
    sent = scheduler.record.requests[request_id].submit.traceparent
    assert sent == f"00-{TRACE}-{span.span_id.hex()}-01"


async def test_a_refusal_is_an_error_of_its_span(
    collector: tuple[Collector, str], scheduler: FakeScheduler, start_gateway: StartGateway
) -> None:
    kept, endpoint = collector
    running: Running = await start_gateway(scheduler.address, otlp_endpoint=endpoint)
    with pytest.raises(grpc.aio.AioRpcError):
        await running.stub.Generate(GenerateRequest(text="x", sampling=SamplingParams(top_p=2)))
    await running.gateway.stop()

    span = kept.spans["text_completion tiny"]
    assert attributes(span)["error.type"] == "INVALID_ARGUMENT"
    assert "top_p" in span.status.message


def test_without_an_endpoint_the_callers_context_passes_through() -> None:
    with Tracing(GatewaySettings()).call([GenerateRequest(text="x")], "theirs", model="tiny") as span:
        assert span.traceparent == "theirs"
