"""The view of an operator with a Redis client, and no key that stays permanently."""

from __future__ import annotations

import asyncio

import grpc.aio
import redis.asyncio

from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2_grpc
from tests.helpers import wait_until_async
from tests.system.calls import seeded, stream_all


async def test_the_queue_is_a_sorted_set_requests_are_hashes_and_nothing_stays_for_ever() -> None:
    with LocalStack(engine="fake", slots=1, shard="look") as stack:
        record = redis.asyncio.Redis.from_url(stack.redis_url, decode_responses=True)
        async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            requests = [seeded(f"Story {n}:", seed=n, max_tokens=40, ignore_eos=True) for n in range(6)]
            running = asyncio.create_task(stream_all(stub, requests))

            async def waiting() -> list[str]:
                found = await record.zrange("laps-sd:{look}:unfinished", 0, -1)
                return found if len(found) >= 5 else []

            for request_id in await wait_until_async(waiting, description="five requests are in the queue"):
                request = await record.hgetall(f"laps-sd:{{look}}:request:{request_id}")
                assert request == {} or request["state"] in ("queued", "leased", "ended")
            outcomes = await running

        for outcome in outcomes:
            request = await record.hgetall(f"laps-sd:{{look}}:request:{outcome.request_id}")
            assert (request["state"], request["committed"]) == ("ended", "40")
        keys = [key async for key in record.scan_iter(match="*")]
        assert len(keys) > len(outcomes)
        for key in keys:
            assert await record.pttl(key) > 0, f"{key} has no expiry"
        await record.aclose()
