"""The whole stack over a record of several servers: streams continue when the primary dies, and shards share
a cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc.aio
import pytest

from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2_grpc
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.keys import Keys
from tests.helpers import wait_until_async
from tests.store.servers import ask, in_step, primary_and_replica, promote, three_masters
from tests.system.calls import Outcome, seeded, stream, stream_all

STREAMS = 16


def url(*servers: EmbeddedServer) -> str:
    return "redis://" + ",".join(f"127.0.0.1:{server.port}" for server in servers) + "/0"


async def newest_entry(server: EmbeddedServer, log_key: str) -> int:
    """Return the number of the newest entry that the server has of the log; 0 without one."""
    found = await ask(server, "XREVRANGE", log_key, "+", "-", "COUNT", 1)
    return int(found[0][0].split(b"-")[0]) if found else 0


async def test_streams_go_on_over_a_replica_that_is_promoted(tmp_path: Path) -> None:
    requests = [
        seeded(f"Story {n}:", seed=n, max_tokens=64, ignore_eos=True, idempotency_key=f"k{n}")
        for n in range(STREAMS)
    ]
    with (
        primary_and_replica(tmp_path) as (primary, replica),
        LocalStack(engine="fake", slots=8, redis_url=url(primary, replica)) as stack,
    ):
        await in_step(replica)
        async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            accepted: set[str] = set()
            streaming: set[str] = set()
            time_for_the_fault = asyncio.Event()  # all are on the record, and some have tokens

            def note(seen: set[str], outcome: Outcome) -> None:
                seen.add(outcome.request_id)
                if len(accepted) == STREAMS and len(streaming) >= 4:
                    time_for_the_fault.set()

            running = [
                asyncio.create_task(
                    stream(
                        stub, request, on_accepted=partial(note, accepted), on_tokens=partial(note, streaming)
                    )
                )
                for request in requests
            ]
            await time_for_the_fault.wait()
            ended_before = sum(task.done() for task in running)
            # From here on the replica lacks what is committed: more than any replica ever lags.
            await promote(replica)
            log_key = Keys(stack.shard_of("scheduler")).log()

            async def lacks_tokens() -> bool:
                there, here = [await newest_entry(server, log_key) for server in (replica, primary)]
                return here > there + 1  # the leader has the answer to the first of the two

            await wait_until_async(lacks_tokens, description="the replica lacks tokens")
            primary.kill()
            outcomes = await asyncio.gather(*running)
            again = await stream_all(stub, requests)
        log = stack.log("scheduler")

    assert ended_before < STREAMS // 2, "the fault came too late to show anything"
    assert all(len(outcome.tokens) == 64 for outcome in outcomes)
    assert [outcome.request_id for outcome in again] == [outcome.request_id for outcome in outcomes]
    assert [outcome.tokens for outcome in again] == [outcome.tokens for outcome in outcomes]
    assert "written back" in log


@pytest.fixture
def masters(tmp_path: Path) -> Iterator[list[EmbeddedServer]]:
    with three_masters(tmp_path) as servers:
        yield servers


async def test_shards_share_a_cluster_of_three_masters(masters: list[EmbeddedServer]) -> None:
    requests = [
        seeded(f"Story {n}:", seed=n, max_tokens=16, ignore_eos=True, idempotency_key=f"k{n}")
        for n in range(STREAMS)
    ]
    with LocalStack(engine="fake", shards=3, redis_url=url(*masters)) as stack:
        async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            outcomes = await stream_all(stub, requests)
            again = await stream_all(stub, requests)
        holding = {
            shard: [bool(await ask(node, "KEYS", f"laps-sd:{{{shard}}}:*")) for node in masters]
            for shard in ("s0", "s1", "s2")
        }

    assert all(len(outcome.tokens) == 16 for outcome in outcomes)
    assert [outcome.request_id for outcome in again] == [outcome.request_id for outcome in outcomes]
    assert all(sum(nodes) == 1 for nodes in holding.values()), "a shard is on one node"
    assert len({tuple(nodes) for nodes in holding.values()}) > 1, "and not all are on the same"
