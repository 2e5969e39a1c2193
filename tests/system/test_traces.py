"""One call, one trace: spans of gateway, scheduler and worker, each below the right one, also when processes
die during the call.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import grpc.aio
import pytest

from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2_grpc
from tests.collector import Collector, SeenSpan, collecting
from tests.conftest import StackMaker
from tests.helpers import wait_until_async
from tests.system.calls import Outcome, seeded, stream

CALLER = "b7ad6b7169203331"


def environment(collector: Collector) -> dict[str, str]:
    return {
        "LAPS_SD_OTLP_ENDPOINT": collector.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "LAPS_SD_FAKE_TIME_SCALE": "0.5",
    }


@dataclass
class Traced:
    """A stack that sends its spans to the collector."""

    collector: Collector
    stack: LocalStack


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    with (
        collecting() as collector,
        LocalStack(engine="fake", slots=1, policy="srpt-length", environment=environment(collector)) as stack,
    ):
        yield Traced(collector, stack)


async def call(
    stack: LocalStack, tokens: int, *, flags: str = "01", first: asyncio.Event | None = None
) -> tuple[str, Outcome]:
    """Run a request with this many tokens, and return it with the id of its trace."""
    trace = secrets.token_hex(16)
    metadata = (("traceparent", f"00-{trace}-{CALLER}-{flags}"),)
    request = seeded(
        "Once upon", seed=tokens, max_tokens=tokens, ignore_eos=True, expected_output_tokens=tokens
    )
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        class WithTrace:
            @staticmethod
            def GenerateStream(request: object, timeout: float) -> object:
                return stub.GenerateStream(request, timeout=timeout, metadata=metadata)

        outcome = await stream(WithTrace, request, on_tokens=lambda _: first.set() if first else None)
    return trace, outcome


async def whole(collector: Collector, trace: str, tokens: int) -> list[SeenSpan]:
    """Return all spans of a trace, once every service has sent its own."""

    def complete() -> list[SeenSpan]:
        spans = collector.spans(trace)
        names = {span.name for span in spans}
        told = sum(span.attributes["laps_sd.output_tokens"] for span in spans if span.service == "worker")
        return spans if {"text_completion laps-sd-demo", "request"} <= names and told >= tokens else []

    return await wait_until_async(complete, description=f"{tokens} tokens in the spans of {trace}")


def named(spans: list[SeenSpan], name: str) -> list[SeenSpan]:
    return [span for span in spans if span.name == name]


def total(spans: list[SeenSpan], attribute: str) -> int:
    return sum(span.attributes[f"laps_sd.{attribute}"] for span in spans)


async def test_a_trace_holds_spans_of_all_three_services_each_below_the_right_one(traced: Traced) -> None:
    running = asyncio.Event()
    long = asyncio.create_task(call(traced.stack, 240, first=running))
    await running.wait()
    await call(traced.stack, 8)  # one slot: it takes the place of the long request
    trace, outcome = await long
    spans = await whole(traced.collector, trace, 240)

    (gateway,) = named(spans, "text_completion laps-sd-demo")
    (request,) = named(spans, "request")
    (run,) = named(spans, "run")
    of_worker = [span for span in spans if span.service == "worker"]
    assert (gateway.service, gateway.parent) == ("gateway", CALLER)
    assert (request.service, request.parent) == ("scheduler", gateway.id)
    assert {(span.service, span.parent) for span in named(spans, "queue")} == {("scheduler", request.id)}
    assert (run.service, run.parent) == ("scheduler", request.id)
    assert {span.name for span in of_worker} == {"prefill", "rounds"}
    assert {span.parent for span in of_worker} == {run.id}

    assert request.attributes["laps_sd.request_id"] == outcome.request_id
    assert request.attributes["laps_sd.policy"] == "srpt-length"
    assert request.attributes["laps_sd.end"] == "length"
    assert request.events[0] == "arrived"
    assert request.events[-1] == "ended"
    assert run.attributes["laps_sd.worker_id"] == of_worker[0].attributes["laps_sd.worker_id"]
    # The worker's spans add up to the tokens that the scheduler and the client received.
    assert outcome.end is not None
    for attribute, told in (
        ("drafted_tokens", outcome.end.speculation.drafted),
        ("accepted_tokens", outcome.end.speculation.accepted),
        ("output_tokens", 240),
    ):
        assert total(of_worker, attribute) == request.attributes[f"laps_sd.{attribute}"] == told
    assert max(span.attributes["laps_sd.rounds"] for span in of_worker) > 1, "rounds go in groups"


async def test_a_preemption_is_a_span_and_ends_a_group_of_rounds(traced: Traced) -> None:
    running = asyncio.Event()
    long = asyncio.create_task(call(traced.stack, 200, first=running))
    await running.wait()
    await call(traced.stack, 8)
    trace, outcome = await long
    spans = await whole(traced.collector, trace, 200)

    assert outcome.end is not None
    paused = named(spans, "paused")
    (run,) = named(spans, "run")
    assert len(paused) == outcome.end.timing.preemptions > 0
    assert {span.parent for span in paused} == {run.id}
    assert all("outranked" in span.attributes["laps_sd.reason"] for span in paused)
    assert len(named(spans, "rounds")) > len(paused)
    assert all(run.began_s <= span.began_s <= span.ended_s <= run.ended_s for span in paused)


async def test_what_its_caller_does_not_sample_is_drawn_by_nobody(traced: Traced) -> None:
    without, _ = await call(traced.stack, 20, flags="00")
    trace, _ = await call(traced.stack, 20)
    await whole(traced.collector, trace, 20)

    assert traced.collector.spans(without) == []


async def test_killed_processes_leave_a_trace_without_loose_ends(make_stack: StackMaker) -> None:
    """A worker dies, then the leader: two leases, on two workers, below one request that the next leader
    draws."""
    with collecting() as collector:
        stack = make_stack(workers=2, slots=2, environment=environment(collector))
        running = asyncio.Event()
        ongoing = asyncio.create_task(call(stack, 700, first=running))
        await running.wait()

        def first_worker() -> str:
            seen = collector.spans(name="prefill")
            return seen[0].attributes["laps_sd.worker_id"] if seen else ""

        victim = await wait_until_async(first_worker, description="the first worker has drawn its prefill")
        dead = victim.rpartition("-")[0]  # such as worker-1-0cccf3f9
        stack.kill(dead)
        # The leader has sent the spans of the lost lease: it sends spans in groups, and unsent ones are lost
        # with it.
        await wait_until_async(
            lambda: len(collector.spans(name="prefill")) == 2 and collector.spans(name="run"),
            description="another worker goes on, and the first lease is drawn",
        )
        await asyncio.to_thread(stack.restart, "scheduler")
        trace, outcome = await ongoing
        await wait_until_async(lambda: collector.spans(trace, "request"), description="the end is drawn")
        await asyncio.to_thread(stack.terminate, "worker-1" if dead == "worker-0" else "worker-0")
        spans = collector.spans(trace)

    assert len(outcome.tokens) == 700
    (request,) = named(spans, "request")
    prefills = sorted(named(spans, "prefill"), key=lambda span: span.began_s)
    assert prefills[0].attributes["laps_sd.worker_id"] == victim
    assert len({span.attributes["laps_sd.worker_id"] for span in prefills}) == 2
    runs = {span.id: span for span in named(spans, "run")}
    assert len(runs) == len(named(spans, "run")) >= 2, "one for each lease"
    assert {span.parent for span in runs.values()} == {request.id}
    assert {span.parent for span in spans if span.service == "worker"} <= set(runs)
    for span in prefills:
        assert span.attributes["laps_sd.worker_id"] == runs[span.parent].attributes["laps_sd.worker_id"]
    assert "recovered" in request.events
