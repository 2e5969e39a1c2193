"""Releases that meet: peers speak this protocol version and the one before, and a record belongs to one
layout."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio
import pytest
import redis

from laps_sd.service.leader_link import COLUMNS_VERSION, PROTOCOL_VERSIONS
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import gateway_link_pb2_grpc
from laps_sd.v1 import worker_link_pb2 as worker_pb
from scheduler_svc.rpc import links
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.keys import SCHEMA_VERSION, Keys
from tests.services.scheduler.peers import (
    SchedulerUnderTest,
    all_deliveries,
    gateway,
    start_scheduler,
    worker,
)

NOW, BEFORE = PROTOCOL_VERSIONS
NEXT = NOW + 1
PATIENCE_S = 30.0
SHARDS = itertools.count()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("valkey")).start() as server:
        yield server


@pytest.fixture
async def scheduler(valkey: EmbeddedServer) -> AsyncIterator[SchedulerUnderTest]:
    started = await start_scheduler(valkey.url, shard=f"v{next(SHARDS)}")
    try:
        await started.wait_leading()
        yield started
    finally:
        await started.crash()


async def gateway_greeting(address: str, offered: list[int]) -> gateway_pb.SchedulerHello:
    async with grpc.aio.insecure_channel(address) as channel:
        call = gateway_link_pb2_grpc.GatewayLinkStub(channel).Connect()
        hello = gateway_pb.GatewayHello(gateway_id="g", protocol_versions=offered)
        await call.write(gateway_pb.GatewayMessage(hello=hello))
        async with asyncio.timeout(PATIENCE_S):
            reply = await call.read()
            if reply is grpc.aio.EOF:  # raises the status of the call
                await call.wait_for_connection()
                raise grpc.aio.AioRpcError(
                    await call.code(),
                    await call.initial_metadata(),
                    await call.trailing_metadata(),
                    details=await call.details(),
                )
        return reply.hello


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [([NOW, BEFORE], NOW), ([BEFORE, 0], BEFORE), ([NEXT, NOW], NOW), ([BEFORE, NOW], NOW)],
    ids=["same", "older", "newer", "any-order"],
)
async def test_the_scheduler_chooses_the_newest_version_that_both_speak(
    scheduler: SchedulerUnderTest, offered: list[int], chosen: int
) -> None:
    assert (await gateway_greeting(scheduler.address, offered)).protocol_version == chosen
    async with worker(scheduler.address, protocol_versions=offered) as gpu:
        assert (await gpu.next("hello")).protocol_version == chosen


@pytest.mark.parametrize("of_gateway", PROTOCOL_VERSIONS)
@pytest.mark.parametrize("of_worker", PROTOCOL_VERSIONS)
async def test_peers_of_this_release_and_the_one_before_are_served_together(
    scheduler: SchedulerUnderTest, of_gateway: int, of_worker: int
) -> None:
    async with (
        gateway(scheduler.address, protocol_versions=[of_gateway]) as client,
        worker(scheduler.address, protocol_versions=[of_worker]) as gpu,
    ):
        await client.submit("r1")
        epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.send_reports(gpu.report("r1", epoch, 0, [11, 12], columns=of_worker >= COLUMNS_VERSION))
        first = await client.wait_for(lambda m: m.WhichOneof("message") == "deliveries", "tokens")
        await gpu.run_round("r1", epoch, 2, [13], end=gateway_pb.RequestEnd.KIND_STOP)
        rest, _ = await client.read("r1-client")

        assert [list(delivery.token_ids) for delivery in all_deliveries(first)] == [[11, 12]]
        assert first.deliveries.HasField("plain") == (of_gateway >= COLUMNS_VERSION)
        assert rest == [13]


async def test_a_gateway_that_speaks_only_unknown_versions_is_refused_with_a_sentence(
    scheduler: SchedulerUnderTest,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await gateway_greeting(scheduler.address, [8, 7])

    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details() == "protocol versions [8, 7] are not supported, only [2, 1]"


async def test_a_worker_that_speaks_only_unknown_versions_is_refused_with_a_sentence(
    scheduler: SchedulerUnderTest,
) -> None:
    async with worker(scheduler.address, protocol_versions=[8, 7]) as gpu:
        refused = await gpu.next("refused")

    assert refused.reason == worker_pb.WorkerRefused.REASON_PROTOCOL
    assert refused.detail == "protocol versions [8, 7] are not supported, only [2, 1]"


async def ended(module: str, **settings: Any) -> tuple[int, str]:
    """Return exit code and stderr of a service that ends by itself."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAPS_SD_")}
    settings = {"grpc_port": 0, "metrics_port": "", **settings}
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        env=kept | {f"LAPS_SD_{name.upper()}": str(value) for name, value in settings.items()},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            _, told = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
    assert child.returncode is not None
    return child.returncode, told.decode()


async def test_a_worker_process_that_is_refused_ends_with_that_sentence(
    scheduler: SchedulerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "PROTOCOL_VERSIONS", (9, 8))

    code, told = await ended("worker_svc", engine="fake", scheduler_seeds=scheduler.address)

    assert code == 1
    assert told.splitlines()[-1] == (
        "laps-sd worker: The scheduler of pool 'demo' refuses this worker: "
        "protocol versions [2, 1] are not supported, only [9, 8]"
    )
    assert "Traceback" not in told


async def test_a_record_of_another_layout_stops_the_scheduler_with_a_sentence(valkey: EmbeddedServer) -> None:
    found = SCHEMA_VERSION + 1
    record = redis.Redis.from_url(valkey.url)
    key = Keys("later").schema_version()
    record.set(key, found)

    code, told = await ended("scheduler_svc", redis_url=valkey.url, shard="later")

    assert code == 1
    assert told.splitlines()[-1] == (
        f"laps-sd scheduler: Shard 'later' cannot be led: the record has schema version {found}, this release reads and "
        f"writes {SCHEMA_VERSION}: let the release that wrote it finish its requests, or use another shard name."
    )
    assert "Traceback" not in told
    assert record.keys("laps-sd:{later}:*") == [key.encode()]  # nothing was changed
    record.close()
