"""The record emptied, paused or restarted amid 32 streams, with and without its leader: clients notice at
most a pause."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import grpc.aio
import pytest
import redis.asyncio as redis_client

from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from tests.helpers import wait_until_async
from tests.system.calls import Outcome, seeded, stream, stream_all

STREAMS = 32
PAUSE_S = 10.0
"""Longer than the lease, than every silence and than the limit of work that a worker does in advance."""


def requests() -> list[pb.GenerateRequest]:
    return [
        seeded(f"Story {number}:", seed=number, max_tokens=64, ignore_eos=True) for number in range(STREAMS)
    ]


async def empty(stack: LocalStack) -> None:
    record = redis_client.Redis.from_url(stack.redis_url)
    await record.flushall()  # a server that this test started
    await record.aclose()


async def empty_and_kill_the_leader(stack: LocalStack) -> None:
    stack.kill("scheduler")
    await empty(stack)
    await asyncio.to_thread(stack.restart, "scheduler")


async def kill_and_restart(stack: LocalStack) -> None:
    stack.kill("valkey")
    await asyncio.to_thread(stack.restart, "valkey")


async def pause(stack: LocalStack) -> None:
    stack.pause("valkey")
    await asyncio.sleep(PAUSE_S)  # the fault itself
    stack.resume("valkey")


async def accepted(stack: LocalStack) -> int:
    """Return the number of requests that have ever been accepted."""
    async with redis_client.Redis.from_url(stack.redis_url) as record:
        return int(await record.get("laps-sd:{s0}:sequence") or 0)


@pytest.fixture(scope="module")
def wide_stack() -> Iterator[LocalStack]:
    with LocalStack(engine="fake", slots=8, workers=2) as stack:
        yield stack


@pytest.fixture(scope="module")
def narrow_stack() -> Iterator[LocalStack]:
    with LocalStack(engine="fake") as stack:
        yield stack


@pytest.fixture
def stack(narrow_stack: LocalStack) -> Iterator[LocalStack]:
    """Return a stack of one worker. What a test kills is started again after it."""
    yield narrow_stack
    for name, child in narrow_stack.children.items():
        if not child.alive:
            narrow_stack.restart(name)


@pytest.mark.parametrize(
    "fault",
    [
        empty,
        empty_and_kill_the_leader,
        pytest.param(kill_and_restart, marks=pytest.mark.long),
        pytest.param(pause, marks=pytest.mark.long),
    ],
)
async def test_every_stream_goes_on(
    fault: Callable[[LocalStack], Awaitable[None]], wide_stack: LocalStack
) -> None:
    stack = wide_stack
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        expected = await stream_all(stub, requests())
        accepted_before = await accepted(stack)

        streaming: set[str] = set()
        some_have_tokens = asyncio.Event()

        def seen(outcome: Outcome) -> None:
            streaming.add(outcome.request_id)
            if len(streaming) >= 4:
                some_have_tokens.set()

        async def all_are_accepted() -> bool:
            return await accepted(stack) >= accepted_before + STREAMS

        running = [asyncio.create_task(stream(stub, request, on_tokens=seen)) for request in requests()]
        await some_have_tokens.wait()
        await wait_until_async(all_are_accepted, description="all are on the record")
        ended_before = sum(task.done() for task in running)
        await fault(stack)
        outcomes = await asyncio.gather(*running)

        later = await stream(stub, requests()[0])

    assert ended_before < STREAMS // 2, "the fault came too late to show anything"
    assert [outcome.tokens for outcome in outcomes] == [outcome.tokens for outcome in expected]
    assert len({outcome.request_id for outcome in outcomes}) == STREAMS
    assert later.tokens == expected[0].tokens


async def test_a_kept_request_without_a_client_survives_record_and_leader_in_its_worker(
    stack: LocalStack,
) -> None:
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = requests()[0]
        request.sampling.max_tokens = 200
        expected = await stream(stub, request)
        request.keep = True
        tokens: list[int] = []
        call = stub.GenerateStream(request)
        async for event in call:
            if event.HasField("accepted"):
                request_id = event.accepted.request_id
            tokens += event.delta.token_ids
            if tokens:
                break
        call.cancel()
        await empty_and_kill_the_leader(stack)

        async def resumed() -> list[int]:
            found: list[int] = []
            try:
                async for event in stub.Resume(pb.ResumeRequest(request_id=request_id)):
                    found += event.delta.token_ids
            except grpc.aio.AioRpcError as error:  # until its worker has sent its hello
                assert error.code() is grpc.StatusCode.NOT_FOUND
            return found

        assert await wait_until_async(resumed, description="it is there again") == expected.tokens


async def test_what_nobody_holds_is_not_found_and_what_cannot_be_asked_is_unavailable(
    stack: LocalStack,
) -> None:
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        ended = await stream(stub, requests()[0])
        # Its worker gets the second after the message that the end of the first is kept.
        await stream(stub, requests()[1])
        await empty_and_kill_the_leader(stack)
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            async for _ in stub.Resume(pb.ResumeRequest(request_id=ended.request_id)):
                pass
        assert lost.value.code() is grpc.StatusCode.NOT_FOUND

        stack.kill("valkey")
        with pytest.raises(grpc.aio.AioRpcError) as away:
            await stub.Explain(pb.ExplainRequest(request_id=ended.request_id))
        assert away.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "cannot be read now" in (away.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream(stub, requests()[0])
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert any(key == "grpc-status-details-bin" for key, _ in refused.value.trailing_metadata() or ())
