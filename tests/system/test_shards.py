"""Several shards side by side: one that dies disturbs no other, and one more comes under traffic."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import grpc.aio

from laps_sd.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from tests.conftest import StackMaker
from tests.helpers import wait_until_async
from tests.system.calls import Outcome, seeded, stream, stream_all

STREAMS = 24


def request(number: int, **fields: Any) -> pb.GenerateRequest:
    return seeded(f"Story {number}:", seed=number, **{"max_tokens": 48, "ignore_eos": True, **fields})


def shard_of(outcome: Outcome) -> str:
    return outcome.request_id.partition(".")[0]


def stub_of(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)


async def all_linked(stack: LocalStack, shards: int) -> None:
    """Both gateways and all shards know each other: a metric says so."""

    def linked() -> bool:
        return all(stack.log(name).count("greeted") >= shards for name in ("gateway-0", "gateway-1"))

    await wait_until_async(linked, description=f"two gateways, {shards} shards")


async def test_the_death_of_one_leader_disturbs_no_other_shard(make_stack: StackMaker) -> None:
    stack = make_stack(shards=2, gateways=2, slots=8)
    await all_linked(stack, 2)
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        stub = stub_of(channel)
        expected = await stream_all(stub, [request(number) for number in range(STREAMS)])
        some = asyncio.Event()
        streaming: dict[str, str] = {}

        def seen(outcome: Outcome) -> None:
            streaming[outcome.request_id] = shard_of(outcome)
            if set(streaming.values()) == {"s0", "s1"}:
                some.set()

        running = [
            asyncio.create_task(stream(stub, request(number), on_tokens=seen)) for number in range(STREAMS)
        ]
        await some.wait()
        stack.kill("scheduler-0")
        ended_before = sum(task.done() for task in running)

        # While s0 has no leader: streams of s1 end, and new requests are served there.
        def ended_of_s1() -> list[Outcome]:
            return [task.result() for task in running if task.done() and shard_of(task.result()) == "s1"]

        await wait_until_async(ended_of_s1, description="streams of s1 end")
        while_down = await stream_all(stub, [request(number) for number in range(4)])
        await asyncio.to_thread(stack.restart, "scheduler-0")
        outcomes = await asyncio.gather(*running)

    assert ended_before < STREAMS // 2, "the kill came too late to show anything"
    assert {shard_of(outcome) for outcome in outcomes} == {"s0", "s1"}
    assert {shard_of(outcome) for outcome in while_down} == {"s1"}
    assert [outcome.tokens for outcome in outcomes] == [outcome.tokens for outcome in expected]
    assert "link broken" not in "".join(
        line for line in stack.log("gateway-0").splitlines(keepends=True) if "shard=s1" in line
    )


async def test_a_shard_is_added_under_traffic(make_stack: StackMaker) -> None:
    stack = make_stack(shards=2, gateways=2, slots=8)
    await all_linked(stack, 2)
    numbers = itertools.count()
    outcomes: dict[int, Outcome] = {}
    stopping = asyncio.Event()

    async def client(stub: Any) -> None:
        while not stopping.is_set():
            number = next(numbers)
            outcomes[number] = await stream(stub, request(number))

    async with (
        grpc.aio.insecure_channel(stack.gateway_addresses[0]) as first,
        grpc.aio.insecure_channel(stack.gateway_addresses[1]) as second,
    ):
        clients = [
            asyncio.create_task(client(stub_of(channel))) for channel in (first, second) for _ in range(8)
        ]
        await wait_until_async(lambda: len(outcomes) >= 16, description="traffic runs")
        kept = await stream_all(
            stub_of(first), [request(n, idempotency_key=f"key-{n}", keep=True) for n in range(12)]
        )

        added = await asyncio.to_thread(stack.add_shard)

        def served_there() -> bool:
            return sum(shard_of(outcome) == added for outcome in outcomes.values()) >= 8

        await wait_until_async(served_there, description="the new shard serves")
        again = await stream_all(
            stub_of(second), [request(n, idempotency_key=f"key-{n}", keep=True) for n in range(12)]
        )
        stopping.set()
        await asyncio.gather(*clients)
        alone = await stream_all(stub_of(first), [request(number) for number in outcomes])

    assert added == "s2"
    assert {shard_of(outcome) for outcome in outcomes.values()} == {"s0", "s1", "s2"}
    assert len({outcome.request_id for outcome in outcomes.values()}) == len(outcomes)
    assert [outcome.tokens for outcome in outcomes.values()] == [outcome.tokens for outcome in alone]
    assert [outcome.request_id for outcome in again] == [outcome.request_id for outcome in kept]
    assert [outcome.tokens for outcome in again] == [outcome.tokens for outcome in kept]


async def test_an_idempotency_key_means_one_request_even_when_all_gateways_and_shards_hear_of_it_at_once(
    make_stack: StackMaker,
) -> None:
    stack = make_stack(shards=2, gateways=2)
    await all_linked(stack, 2)
    async with (
        grpc.aio.insecure_channel(stack.gateway_addresses[0]) as first,
        grpc.aio.insecure_channel(stack.gateway_addresses[1]) as second,
    ):
        stubs = [stub_of(first), stub_of(second)]
        for attempt in range(4):
            same = request(attempt, idempotency_key=f"once-{attempt}")
            outcomes = await asyncio.gather(*(stream(stubs[n % 2], same) for n in range(8)))

            assert len({outcome.request_id for outcome in outcomes}) == 1
            assert len({tuple(outcome.tokens) for outcome in outcomes}) == 1
        shards = {shard_of(outcome) for outcome in await stream_all(stubs[0], [request(n) for n in range(8)])}

    assert shards == {"s0", "s1"}, "requests were not spread, so nothing was shown"


async def test_resume_explain_and_cancel_go_to_the_shard_that_the_id_names(make_stack: StackMaker) -> None:
    stack = make_stack(shards=2, gateways=2)
    await all_linked(stack, 2)
    async with (
        grpc.aio.insecure_channel(stack.gateway_addresses[0]) as first,
        grpc.aio.insecure_channel(stack.gateway_addresses[1]) as second,
    ):
        outcomes = await stream_all(stub_of(first), [request(number) for number in range(8)])
        by_shard = {shard_of(outcome): outcome for outcome in outcomes}
        assert set(by_shard) == {"s0", "s1"}
        elsewhere = stub_of(second)
        for outcome in by_shard.values():
            tokens: list[int] = []
            async for event in elsewhere.Resume(pb.ResumeRequest(request_id=outcome.request_id)):
                tokens += event.delta.token_ids
            explained = await elsewhere.Explain(pb.ExplainRequest(request_id=outcome.request_id))
            cancelled = await elsewhere.Cancel(pb.CancelRequest(request_id=outcome.request_id))

            assert tokens == outcome.tokens
            assert explained.explanation.request_id == outcome.request_id
            assert not cancelled.cancelled, "it had ended"
        try:
            await elsewhere.Explain(pb.ExplainRequest(request_id="s9." + "a" * 26))
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.NOT_FOUND
        else:
            raise AssertionError("a shard that does not exist answered")
