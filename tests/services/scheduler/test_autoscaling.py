"""KEDA's contract, checked with a stock client: the calls of KEDA 2, over a real server and record."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from laps_sd.keda import externalscaler_pb2 as pb
from laps_sd.keda import externalscaler_pb2_grpc
from laps_sd.service.metrics import REGISTRY, value
from scheduler_svc import metrics
from scheduler_svc.leader.chores import MEAN_REQUEST_S
from scheduler_svc.rpc.autoscaling import DEFAULT_TARGET_LOAD, DEFAULT_TARGET_S
from tests.helpers import wait_until_async
from tests.services.scheduler.conftest import StartScheduler
from tests.services.scheduler.peers import SchedulerUnderTest, gateway, worker


@pytest.fixture
async def scheduler(start: StartScheduler) -> SchedulerUnderTest:
    """Start a scheduler. The gateways here send no heartbeats."""
    return await start(silence_s=600.0)


def scaled(**metadata: str) -> pb.ScaledObjectRef:
    return pb.ScaledObjectRef(
        name="laps-sd-demo-worker", namespace="models", scalerMetadata={"pool": "demo", **metadata}
    )


@asynccontextmanager
async def keda(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield externalscaler_pb2_grpc.ExternalScalerStub(channel)


async def backlog_s(stub: Any) -> float:
    return await read(stub, "backlog")


async def load(stub: Any) -> float:
    return await read(stub, "load")


async def read(stub: Any, which: str) -> float:
    """Read a metric as KEDA does: by the name that the specification gave."""
    specs = (await stub.GetMetricSpec(scaled())).metricSpecs
    (name,) = [spec.metricName for spec in specs if f"-{which}-" in spec.metricName]
    reply = await stub.GetMetrics(pb.GetMetricsRequest(scaledObjectRef=scaled(), metricName=name))
    (metric,) = reply.metricValues
    assert metric.metricName == name
    assert metric.metricValue >= metric.metricValueFloat > metric.metricValue - 1 or metric.metricValue == 0
    return metric.metricValueFloat


async def test_the_specification_is_never_empty_and_names_the_target_in_both_forms(
    scheduler: SchedulerUnderTest,
) -> None:
    async with keda(scheduler.address) as stub:
        usual = (await stub.GetMetricSpec(scaled())).metricSpecs
        own = (await stub.GetMetricSpec(scaled(targetLoad="0.55", targetBacklogSeconds="12.5"))).metricSpecs

    assert [(one.metricName, one.targetSize, one.targetSizeFloat) for one in usual] == [
        ("laps-sd-load-demo", 1, DEFAULT_TARGET_LOAD),
        ("laps-sd-backlog-seconds-demo", math.ceil(DEFAULT_TARGET_S), DEFAULT_TARGET_S),
    ]
    assert [(one.targetSize, one.targetSizeFloat) for one in own] == [(1, 0.55), (13, 12.5)]


async def test_the_load_is_there_as_soon_as_requests_arrive_and_needs_no_worker(
    scheduler: SchedulerUnderTest,
) -> None:
    async with keda(scheduler.address) as stub, gateway(scheduler.address) as client:
        assert await load(stub) == 0.0
        await client.submit("r1")
        one = await load(stub)
        await client.submit("r2")

        assert 0.0 < one < await load(stub)


async def test_a_queue_without_a_worker_is_active_so_that_the_first_one_starts(
    scheduler: SchedulerUnderTest,
) -> None:
    async with keda(scheduler.address) as stub, gateway(scheduler.address) as client:
        assert (await stub.IsActive(scaled())).result is False
        assert await backlog_s(stub) == 0.0

        await client.submit("r1")
        assert (await stub.IsActive(scaled())).result is True
        one_s = await backlog_s(stub)
        await client.submit("r2")
        two_s = await backlog_s(stub)

        assert 0.0 < one_s < two_s


async def test_the_stream_tells_at_once_and_when_it_changes_and_ends_when_the_scheduler_stops(
    scheduler: SchedulerUnderTest,
) -> None:
    async with keda(scheduler.address) as stub, gateway(scheduler.address) as client:
        stream = stub.StreamIsActive(scaled())
        assert (await stream.read()).result is False

        await client.submit("r1")
        assert (await stream.read()).result is True

        scheduler.stopping.set()
        assert await stream.read() is grpc.aio.EOF


async def test_a_standby_answers_from_the_record(start: StartScheduler) -> None:
    leader = await start(priors_save_s=0.1, silence_s=600.0)
    standby = await start(lead=False)
    async with keda(standby.address) as stub, gateway(leader.address) as client:
        assert (await stub.IsActive(scaled())).result is False
        assert await backlog_s(stub) == 0.0

        await client.submit("r1")
        await client.submit("r2")

        async def learnt() -> bool:
            return MEAN_REQUEST_S.encode() in (await leader.store.load_priors() or b"")

        await wait_until_async(learnt, description="the leader has saved what a request needs")
        assert standby.leadership.loop is None
        assert (await stub.IsActive(scaled())).result is True
        assert leader.leadership.loop is not None
        assert await backlog_s(stub) == pytest.approx(leader.leadership.loop.core.totals().backlog_s)
        assert 0.0 < await load(stub) <= 2.0 * await backlog_s(stub)


async def test_before_anything_is_learnt_a_standby_counts_a_second_for_each_request(
    start: StartScheduler,
) -> None:
    leader = await start(priors_save_s=3600.0, silence_s=600.0)
    standby = await start(lead=False)
    async with keda(standby.address) as stub, gateway(leader.address) as client:
        await client.submit("r1")
        await client.submit("r2")

        assert await backlog_s(stub) == 2.0


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"pool": "other"}, "scalerMetadata.pool must be 'demo', the pool of this scheduler, got 'other'"),
        ({"targetBacklogSeconds": "soon"}, "targetBacklogSeconds must be a number from 0.001 to 1000000"),
        ({"targetBacklogSeconds": "0"}, "must be a number from 0.001 to 1000000, got '0'"),
        ({"targetBacklogSeconds": "0.0009"}, "must be a number from 0.001 to 1000000"),
        ({"targetBacklogSeconds": "nan"}, "must be a number from 0.001 to 1000000"),
        ({"targetBacklogSeconds": "1e7"}, "must be a number from 0.001 to 1000000"),
        ({"targetLoad": "1.01"}, "targetLoad must be a number from 0.001 to 1, got '1.01'"),
        (
            {"targetBacklogsSeconds": "5"},
            "must have no key but pool, targetLoad, targetBacklogSeconds, got 'targetBacklogsSeconds'",
        ),
    ],
)
async def test_a_trigger_that_makes_no_sense_is_told_why(
    scheduler: SchedulerUnderTest, metadata: dict[str, str], said: str
) -> None:
    async with keda(scheduler.address) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetMetricSpec(scaled(**metadata))

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in (refused.value.details() or "")


async def test_what_keda_reads_itself_is_no_matter(scheduler: SchedulerUnderTest) -> None:
    async with keda(scheduler.address) as stub:
        found = await stub.GetMetricSpec(scaled(scalerAddress="s:50052", enableTLS="true", unsafeSsl="false"))

    assert len(found.metricSpecs) == 2


async def test_a_metric_that_does_not_exist_is_refused(scheduler: SchedulerUnderTest) -> None:
    async with keda(scheduler.address) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetMetrics(
                pb.GetMetricsRequest(scaledObjectRef=scaled(), metricName="laps-sd-noise-demo")
            )

    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "must be 'laps-sd-load-demo' or 'laps-sd-backlog-seconds-demo'" in (refused.value.details() or "")


async def test_the_gauge_is_the_backlog_per_worker(scheduler: SchedulerUnderTest) -> None:
    labels = {"pool": "demo"}
    async with gateway(scheduler.address) as client:
        await client.submit("r1")
        await wait_until_async(
            lambda: value("laps_sd_backlog_seconds", labels), description="a gauge above 0"
        )
        alone_s = value("laps_sd_backlog_seconds", labels)
        assert alone_s == pytest.approx(value("laps_sd_scheduler_backlog_seconds"))

        async with worker(scheduler.address, "w1"), worker(scheduler.address, "w2"):
            await wait_until_async(
                lambda: value("laps_sd_scheduler_workers") == 2, description="the gauges show two workers"
            )

            assert value("laps_sd_backlog_seconds", labels) == pytest.approx(
                value("laps_sd_scheduler_backlog_seconds") / 2
            )


def test_a_scheduler_that_no_longer_leads_shows_no_load_of_the_pool() -> None:
    names = ("laps_sd_arriving_load", "laps_sd_backlog_seconds")
    for gauge in (metrics.ARRIVING, metrics.POOL_BACKLOG):
        gauge.labels("demo").set(3)
    metrics.leads(False)

    assert [REGISTRY.get_sample_value(name, {"pool": "demo"}) for name in names] == [None, None]
