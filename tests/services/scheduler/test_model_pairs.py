"""A pool serves one model pair: outputs of one are never continued by another, whichever scheduler leads and whichever
worker dials first. The pool takes another pair once nothing that workers of the present one have begun is unfinished.
"""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest
import redis.asyncio as redis_client
import structlog

from laps_sd.v1 import admin_pb2, admin_pb2_grpc
from laps_sd.v1 import worker_link_pb2 as worker_pb
from scheduler_svc.leader.live import Live
from scheduler_svc.leader.loop import BEGUN_KEPT_S
from scheduler_svc.store.embedded import EmbeddedServer
from tests.helpers import wait_until_async
from tests.services.scheduler.conftest import StartScheduler
from tests.services.scheduler.peers import SchedulerUnderTest, gateway, worker

RIGHT, WRONG = "the first pair", "another pair"


async def generate(scheduler: SchedulerUnderTest, *request_ids: str, tokens: list[int]) -> None:
    """Have a worker of the right pair generate tokens of kept requests, and leave."""
    async with (
        gateway(scheduler.address) as client,
        worker(scheduler.address, "before", fingerprint=RIGHT, slots=len(request_ids)) as gpu,
    ):
        for number, request_id in enumerate(request_ids):
            await client.submit(request_id, submission_id=number, keep=True)
        for request_id, running in (await gpu.assigned(*request_ids)).items():
            if tokens:
                await gpu.run_round(request_id, running.lease_epoch, 0, tokens)


async def refused(
    scheduler: SchedulerUnderTest, fingerprint: str = WRONG, *, worker_id: str = "wrong"
) -> worker_pb.WorkerRefused:
    async with worker(scheduler.address, worker_id, fingerprint=fingerprint) as gpu:
        message = await gpu.wait_for(lambda m: m.WhichOneof("message") in ("hello", "refused"), "an answer")
        assert message.WhichOneof("message") == "refused", "the worker was accepted"
        found: worker_pb.WorkerRefused = message.refused
        return found


def one_is_left(scheduler: SchedulerUnderTest) -> bool:
    loop = scheduler.leadership.loop
    return loop is not None and loop.begun() == 1


async def accepted(scheduler: SchedulerUnderTest, fingerprint: str) -> None:
    """Dial until the worker is accepted, as a worker that is refused for now does."""

    async def greeted() -> bool:
        async with worker(scheduler.address, "again", fingerprint=fingerprint) as gpu:
            message = await gpu.wait_for(
                lambda m: m.WhichOneof("message") in ("hello", "refused"), "an answer"
            )
            return bool(message.WhichOneof("message") == "hello")

    await wait_until_async(greeted, description=f"a worker with {fingerprint} is accepted")


async def continue_r1(scheduler: SchedulerUnderTest) -> None:
    async with worker(scheduler.address, "right", fingerprint=RIGHT) as gpu:
        running = (await gpu.assigned("r1"))["r1"]
        assert running.tokens == [10, 11]
        await gpu.run_round("r1", running.lease_epoch, 2, [12])


async def test_after_a_change_of_leaders_a_wrong_worker_that_dials_first_continues_nothing(
    start: StartScheduler,
) -> None:
    first = await start()
    await generate(first, "r1", tokens=[10, 11])
    await first.crash()
    second = await start()

    assert (await refused(second)).reason == worker_pb.WorkerRefused.REASON_FINGERPRINT

    await continue_r1(second)


async def test_the_refusal_counts_the_requests_and_says_how_to_get_on(start: StartScheduler) -> None:
    first = await start()
    await generate(first, "r1", "r2", tokens=[10, 11])
    await first.crash()
    second = await start()

    refusal = await refused(second)

    assert refusal.temporary, "the worker dials again"
    assert f"workers of the pair {RIGHT[:16]}… have begun unfinished requests (2), which" in refusal.detail
    assert "start a worker of that pair" in refusal.detail
    assert "wait for their deadlines" in refusal.detail
    assert "cancel them with laps-sd top" in refusal.detail


async def test_each_worker_that_is_refused_for_now_is_logged_once_however_often_it_dials(
    start: StartScheduler,
) -> None:
    first = await start()
    await generate(first, "r1", "r2", tokens=[10, 11])
    await first.crash()
    second = await start()

    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            for worker_id in ("wrong 1", "wrong 2"):
                await refused(second, worker_id=worker_id)
        async with grpc.aio.insecure_channel(second.address) as channel:
            cancel = admin_pb2.CancelRequestRequest(request_id="r1")
            await admin_pb2_grpc.AdminStub(channel).CancelRequest(cancel)
        await wait_until_async(lambda: one_is_left(second), description="the reason has another number")
        await refused(second, worker_id="wrong 1")

    logged = [line["worker_id"] for line in lines if line["event"] == "worker refused"]
    assert logged == ["wrong 1", "wrong 2"]


async def test_requests_are_counted_once_a_second_however_many_workers_dial(
    start: StartScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await start()
    await generate(first, "r1", "r2", tokens=[10, 11])
    await first.crash()
    second = await start()
    loop, now_s, looked_at = second.leadership.loop, [1e9], []
    assert loop is not None

    def has_begun(live: Live) -> bool:
        looked_at.append(live.request_id)
        return bool(live.taken)

    monkeypatch.setattr(loop, "clock", lambda: now_s[0])
    monkeypatch.setattr(Live, "has_begun", property(has_begun))
    for _ in range(5):
        await refused(second)
    assert sorted(looked_at) == ["r1", "r2"]

    now_s[0] += BEGUN_KEPT_S
    await refused(second)
    assert sorted(looked_at) == ["r1", "r1", "r2", "r2"]


async def test_while_a_worker_of_the_pool_is_connected_a_wrong_one_is_refused_for_good(
    scheduler: SchedulerUnderTest,
) -> None:
    async with worker(scheduler.address, "w1", fingerprint=RIGHT) as gpu:
        await gpu.next("hello")

        assert not (await refused(scheduler)).temporary


@pytest.mark.parametrize("changes_leader", [False, True], ids=["one leader", "the next leader"])
async def test_another_pair_is_accepted_once_the_requests_with_outputs_have_ended(
    start: StartScheduler, changes_leader: bool
) -> None:
    scheduler = await start()
    await generate(scheduler, "r1", tokens=[10, 11])
    if changes_leader:
        await scheduler.crash()
        scheduler = await start()
    await refused(scheduler)

    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        cancel = admin_pb2.CancelRequestRequest(request_id="r1")
        await admin_pb2_grpc.AdminStub(channel).CancelRequest(cancel)

    await accepted(scheduler, WRONG)


async def test_requests_without_output_are_run_by_the_pair_that_comes(start: StartScheduler) -> None:
    """Also those that a worker of the pair before held, once its grace is over."""
    first = await start(worker_grace_s=0.2)
    await generate(first, "r1", tokens=[])
    await first.crash()
    second = await start(worker_grace_s=0.2)

    await accepted(second, WRONG)

    async with worker(second.address, "new", fingerprint=WRONG) as gpu:
        running = (await gpu.assigned("r1"))["r1"]
        await gpu.run_round("r1", running.lease_epoch, 0, [20])
    await second.crash()
    await refused(await start(), RIGHT)


async def test_a_record_of_an_earlier_release_gets_the_pair_with_the_next_lease(
    start: StartScheduler, valkey: EmbeddedServer
) -> None:
    first = await start()
    await generate(first, "r1", tokens=[10, 11])
    async with redis_client.Redis.from_url(valkey.url, protocol=2) as operator:
        await operator.hdel(first.store.keys.request("r1"), "pair")
    await first.crash()
    second = await start()

    await continue_r1(second)
    await second.crash()

    await refused(await start())


async def test_the_leader_of_an_emptied_record_writes_the_pair_back(
    start: StartScheduler, valkey: EmbeddedServer
) -> None:
    first = await start()
    await generate(first, "r1", tokens=[10, 11])
    async with redis_client.Redis.from_url(valkey.url, protocol=2) as operator:
        keys = [key async for key in operator.scan_iter(match=f"{first.store.keys.prefix}*")]
        await operator.delete(*keys)

    async def written_back() -> bool:
        return await first.store.read("r1") is not None

    await wait_until_async(written_back, description="the leader has written it back")
    await first.crash()

    await refused(await start())


async def test_tokens_that_come_when_their_request_is_released_bind_the_pool_before_the_record_has_them(
    scheduler: SchedulerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = scheduler.leadership.loop
    assert loop is not None
    async with gateway(scheduler.address) as client, worker(scheduler.address, fingerprint=RIGHT) as gpu:
        await client.submit("r1")
        lease_epoch = (await gpu.assigned("r1"))["r1"].lease_epoch
        live = loop.working_copy.live["r1"]
        live.worker_id = None  # as the release leaves it: the core decides about these tokens
        record, at_the_write = loop._record, []

        async def watched(*what: Any) -> Any:
            at_the_write.append((list(live.committed), loop.begun()))
            return await record(*what)

        monkeypatch.setattr(loop, "_record", watched)
        await gpu.run_round("r1", lease_epoch, 0, [10, 11])

        assert at_the_write == [([], 1)]
        assert list(live.committed) == [10, 11]
