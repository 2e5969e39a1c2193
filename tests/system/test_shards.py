"""Several shards at the same time: one that dies disturbs no other, and one is added under traffic."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import grpc.aio
import pytest

from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from tests.conftest import StackMaker
from tests.helpers import wait_until_async
from tests.system.calls import Outcome, seeded, stream, stream_all

STREAMS = 16


def request(number: int, **fields: Any) -> pb.GenerateRequest:
    return seeded(f"Story {number}:", seed=number, **{"max_tokens": 48, "ignore_eos": True, **fields})


def shard_of(outcome: Outcome) -> str:
    return outcome.request_id.partition(".")[0]


def stub_of(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceStub(channel)


def add_shard(stack: LocalStack) -> str:
    """Add a shard with its schedulers and workers and return its name. Then they are ready, and gateways may
    use the shard.
    """
    shard = f"s{len(set(stack._plan.shards.values()))}"
    schedulers = [f"scheduler-{stack._plan.count('scheduler') + n}" for n in range(stack.options.schedulers)]
    workers = [f"worker-{stack._plan.count('worker') + n}" for n in range(stack.options.workers)]
    for name in schedulers:
        stack._plan.add_scheduler(name, shard, stack._ports)
    for name in workers:
        stack._plan.add_worker(name, shard, stack._ports)
    stack._began = time.monotonic()
    for name in (*schedulers, *workers):
        stack._launch(stack.children[name])
    stack._wait_for({*schedulers, *workers})
    stack._plan.write_shards()
    return shard


async def all_linked(stack: LocalStack, shards: int) -> None:
    """Wait until every gateway has been greeted by the leader of every shard."""
    gateways = [name for name in stack.children if name.startswith("gateway-")]

    def linked() -> bool:
        return all(stack.log(name).count("greeted") >= shards for name in gateways)

    await wait_until_async(linked, description=f"{len(gateways)} gateways know {shards} shards")


async def test_the_death_of_one_leader_disturbs_no_other_shard(make_stack: StackMaker) -> None:
    stack = make_stack(shards=2, slots=8)
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
            outcomes[number] = await stream(stub, request(number, max_tokens=16))

    async with (
        grpc.aio.insecure_channel(stack.gateway_addresses[0]) as first,
        grpc.aio.insecure_channel(stack.gateway_addresses[1]) as second,
    ):
        stubs = [stub_of(first), stub_of(second)]
        # The same key through both gateways at once is one request.
        keyed = [request(n, idempotency_key=f"key-{n}", keep=True) for n in range(6)]
        before = await stream_all(stubs[0], keyed)
        for same, outcome in zip(keyed, before, strict=True):
            both = await asyncio.gather(*(stream(stub, same) for stub in stubs))
            assert {one.request_id for one in both} == {outcome.request_id}
        fresh = request(99, idempotency_key="at once")
        assert (
            len(
                {
                    one.request_id
                    for one in await asyncio.gather(*(stream(stubs[n % 2], fresh) for n in range(6)))
                }
            )
            == 1
        )

        clients = [asyncio.create_task(client(stub)) for stub in stubs for _ in range(3)]
        await wait_until_async(lambda: len(outcomes) >= 6, description="traffic runs")
        added = await asyncio.to_thread(add_shard, stack)

        def served_there() -> bool:
            return any(shard_of(outcome) == added for outcome in outcomes.values())

        await wait_until_async(served_there, description="the new shard serves")
        after = await stream_all(stubs[1], keyed)
        stopping.set()
        await asyncio.gather(*clients)

        # An id names its shard: through the other gateway it is resumed and explained, and nothing is left to
        # cancel.
        for outcome in {shard_of(outcome): outcome for outcome in outcomes.values()}.values():
            tokens: list[int] = []
            async for event in stubs[0].Resume(pb.ResumeRequest(request_id=outcome.request_id)):
                tokens += event.delta.token_ids
            explained = await stubs[1].Explain(pb.ExplainRequest(request_id=outcome.request_id))
            cancelled = await stubs[1].Cancel(pb.CancelRequest(request_id=outcome.request_id))
            assert tokens == outcome.tokens
            assert explained.explanation.request_id == outcome.request_id
            assert not cancelled.cancelled
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stubs[0].Explain(pb.ExplainRequest(request_id="s9." + "a" * 26))

    assert unknown.value.code() is grpc.StatusCode.UNAVAILABLE, "another gateway may know that shard"
    assert added == "s2"
    assert {shard_of(outcome) for outcome in outcomes.values()} == {"s0", "s1", "s2"}
    assert len({outcome.request_id for outcome in outcomes.values()}) == len(outcomes)
    assert all(len(outcome.tokens) == 16 for outcome in outcomes.values())
    assert [outcome.request_id for outcome in after] == [outcome.request_id for outcome in before]
    assert [outcome.tokens for outcome in after] == [outcome.tokens for outcome in before]
