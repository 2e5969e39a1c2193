"""The behaviour of a scheduler when its record is emptied, set back, slow, full, read-only or gone: a real
server with real faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
import redis.asyncio as redis_client
import structlog

from bench._proxy import BOTH, Proxy
from gateway.links.link import ShardLink
from gateway.settings import GatewaySettings
from laps_sd.contract.ends import End
from laps_sd.contract.length_features import packed
from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, name_blocks
from laps_sd.v1 import admin_pb2 as admin_pb
from laps_sd.v1 import admin_pb2_grpc
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from laps_sd.v1.inference_pb2 import SamplingParams
from scheduler_svc import metrics
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.leader import chores, clients, working_copy
from scheduler_svc.store import transport
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.records import StoredRequest, SubmitStatus
from scheduler_svc.wire.checks import MAX_TIME_MS
from scheduler_svc.wire.requests import Offer, offered
from tests.helpers import wait_until_async
from tests.services.scheduler.peers import Running, SchedulerUnderTest, gateway, start_scheduler, worker
from tests.store.kit import a_request, all_written, commits_file
from tests.store.servers import key_claimed_at, shard_at, stopped, take_no_node_for_dead, three_masters

STOP = gateway_pb.RequestEnd.KIND_STOP
Refused = gateway_pb.SubmitRefused
StartScheduler = Callable[..., Awaitable[SchedulerUnderTest]]
TRACEPARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
PROMPT = tuple(range(BLOCK_TOKENS + 1))
BLOCKS = name_blocks(PROMPT, "acme")


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """Start a server that the test may break."""
    server = EmbeddedServer(tmp_path / "record").start()
    yield server
    server.stop()


@pytest.fixture
async def operator(own_valkey: EmbeddedServer) -> AsyncIterator[redis_client.Redis]:
    operator = redis_client.Redis.from_url(own_valkey.url, protocol=2, decode_responses=True)
    yield operator
    await operator.aclose()


@pytest.fixture
async def start_own(own_valkey: EmbeddedServer) -> AsyncIterator[StartScheduler]:
    started: list[SchedulerUnderTest] = []

    async def begin(**overrides: Any) -> SchedulerUnderTest:
        scheduler = await start_scheduler(own_valkey.url, shard="s", **overrides)
        started.append(scheduler)
        await scheduler.wait_leading()
        return scheduler

    yield begin
    for scheduler in started:
        await scheduler.crash()


async def empty(server: EmbeddedServer, operator: redis_client.Redis) -> None:
    await operator.flushall()  # a server that this test started


async def start_without_data(server: EmbeddedServer, operator: redis_client.Redis) -> None:
    server.kill()
    shutil.rmtree(server.data_dir / "appendonlydir")
    server.start()


async def claimed(operator: redis_client.Redis) -> dict[str, str]:
    """Return the claims of idempotency keys, which all shards share."""
    return {key: await operator.get(key) for key in await operator.keys("laps-sd:claim:*")}


@pytest.mark.parametrize("lose_it", [empty, start_without_data])
async def test_the_leader_writes_an_emptied_record_back_and_everybody_goes_on(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler, lose_it: Any
) -> None:
    scheduler = await start_own()
    epoch, incarnation = scheduler.leadership.epoch, scheduler.store.incarnation
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r0", submission_id=9, idempotency_key="k0", body_hash=b"b")
        lease = (await gpu.assigned("r0"))["r0"].lease_epoch
        await gpu.run_round("r0", lease, 0, [9], end=STOP)
        await client.read("r0-client")
        await client.submit(
            "r1",
            prompt=PROMPT,
            prompt_blocks=BLOCKS,
            priority=3,
            time_limit_ms=60_000,
            workload_class="chat",
            length_features=[1, 300],
        )
        lease = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.run_round("r1", lease, 0, [10, 11])
        await client.submit(
            "r2", submission_id=2, idempotency_key="k", body_hash=b"b", keep=True, length_features=[2]
        )
        await gpu.next("assignment")
        before = [await scheduler.store.read(request_id) for request_id in ("r1", "r2")]
        counters = (
            await operator.hgetall("laps-sd:{s}:tenants"),
            await operator.get("laps-sd:{s}:prompt_tokens"),
        )
        claims = await claimed(operator)

        await lose_it(own_valkey, operator)

        await gpu.run_round("r1", lease, 2, [12])
        assert (await client.read("r1-client", until=3))[0] == [10, 11, 12]
        [r1, r2] = [await scheduler.store.read(request_id) for request_id in ("r1", "r2")]
        assert r1 is not None
        assert (r1.committed_ids, r1.lease_epoch, r1.worker_id) == ((10, 11, 12), lease, "w1")
        assert before[0] is not None
        assert (r1.priority, r1.time_limit_ms, r1.submission) == (3, 60_000, before[0].submission)
        assert (r1.length_features, r1.prompt_blocks) == (packed([1, 300]), BLOCKS)
        assert r2 == before[1]
        assert counters == (
            await operator.hgetall("laps-sd:{s}:tenants"),
            await operator.get("laps-sd:{s}:prompt_tokens"),
        )
        r0 = await scheduler.store.read("r0")
        assert r0 is not None
        assert (r0.end, r0.committed_ids) == (End.STOP, (9,))
        assert len(claims) == 2
        assert await claimed(operator) == claims  # other shards find the keys
        for key, known in (("k0", "r0"), ("k", "r2")):
            same = await client.submit("r3", submission_id=3, idempotency_key=key, body_hash=b"b")
            assert same.accepted.request_id == known
        new = await client.submit("r4", submission_id=4)
        assert new.accepted.request_id == "r4"

        await gpu.run_round("r1", lease, 3, [13], end=STOP)
        tokens, end = await client.read("r1-client")
        assert (tokens, end.kind) == ([13], STOP)
        assert scheduler.leadership.epoch == epoch
        assert scheduler.store.incarnation != incarnation


async def test_an_idle_leader_notices_an_emptied_record_too(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    scheduler = await start_own()
    async with gateway(scheduler.address) as client:
        await client.submit("r1")
        await operator.flushall()

        await wait_until_async(lambda: scheduler.store.read("r1"), description="r1 is on the record again")
        assert await scheduler.store.last_sequence() == 1


async def test_what_was_learned_is_written_to_an_emptied_record_though_nothing_is_learned_since(
    operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    scheduler = await start_own(priors_save_s=0.1)
    before = await wait_until_async(scheduler.store.load_priors, description="priors are on the record")
    await operator.flushall()

    after = await wait_until_async(scheduler.store.load_priors, description="they are there again")
    assert after == before


async def test_an_idle_leader_does_not_encode_what_it_has_saved(
    start_own: StartScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many workload classes that takes a tenth of a second."""
    scheduler = await start_own(priors_save_s=0.1)
    encoded = 0

    def counted(learnt: dict[str, Any], **options: Any) -> str:
        nonlocal encoded
        encoded += 1
        return json.dumps(learnt, **options)

    monkeypatch.setattr(chores, "json", SimpleNamespace(dumps=counted))
    await asyncio.sleep(0.5)
    assert encoded <= 1, "the first one"

    async with gateway(scheduler.address) as client:
        before = encoded
        await client.submit("r1")
        await wait_until_async(lambda: encoded > before, description="it is encoded after an event")


async def test_an_idle_leader_that_had_to_wait_until_its_lead_was_confirmed_admits_again(
    operator: redis_client.Redis, start_own: StartScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs, so no write comes after the confirmation, and the priors are saved much later."""
    scheduler = await start_own(priors_save_s=600.0)
    outage = scheduler.leadership.outage

    async def no_answer() -> None:
        monkeypatch.undo()
        raise StoreUnavailable("no answer")

    monkeypatch.setattr(scheduler.store, "reclaimed", no_answer)
    async with gateway(scheduler.address) as client:
        await operator.flushall()
        await scheduler.leadership.write_back()

        await wait_until_async(lambda: not outage.on, description="the outage is over")
        assert (await client.submit("r1")).accepted.request_id == "r1"


async def test_what_a_crash_of_the_server_took_is_written_again(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    """Power loss takes the last second of the append-only file: tokens, an end and a whole request."""
    scheduler = await start_own(lease_s=30.0)
    async with gateway(scheduler.address) as client, worker(scheduler.address, slots=2) as gpu:
        await client.submit("r1")
        await client.submit("r2", submission_id=2)
        leases = {**await gpu.assigned("r1", "r2")}
        r1, r2 = leases["r1"].lease_epoch, leases["r2"].lease_epoch
        await gpu.run_round("r1", r1, 0, [10])
        size = await written_size(own_valkey, operator)
        await gpu.run_round("r1", r1, 1, [11, 12])
        await gpu.run_round("r2", r2, 0, [20, 21], end=STOP)
        tokens, _ = await client.read("r2-client")
        assert tokens == [20, 21]
        await client.submit("r3", submission_id=3)
        await written_size(own_valkey, operator)
        own_valkey.kill()
        os.truncate(commits_file(own_valkey), size)
        own_valkey.start()

        await gpu.run_round("r1", r1, 3, [13], end=STOP)
        tokens, end = await client.read("r1-client")
        assert (tokens, end.kind) == ([10, 11, 12, 13], STOP)
        ended = await scheduler.store.read("r2")
        assert ended is not None
        assert (ended.end, ended.committed_ids) == (End.STOP, (20, 21))
        waiting = await scheduler.store.read("r3")
        assert waiting is not None
        assert waiting.end is None
        new = await client.submit("r4", submission_id=4)
        assert new.accepted.request_id == "r4"


@pytest.mark.parametrize(("lost", "counted"), [(0, 0), (1, 1)])
async def test_only_requests_of_which_the_record_lost_something_count_as_written_back(
    own_valkey: EmbeddedServer,
    operator: redis_client.Redis,
    start_own: StartScheduler,
    lost: int,
    counted: int,
) -> None:
    """The newest tokens are in the log alone, which outlives a restart."""
    scheduler = await start_own(lease_s=30.0)
    before = metrics.WRITTEN_BACK.labels("leader")._value.get()
    async with gateway(scheduler.address) as client, worker(scheduler.address, slots=2) as gpu:
        await client.submit("r1")
        await client.submit("r2", submission_id=2)
        running = await gpu.assigned("r1", "r2")
        for request_id in ("r1", "r2"):
            await gpu.run_round(request_id, running[request_id].lease_epoch, 0, [10, 11])
        size = await written_size(own_valkey, operator)
        await gpu.run_round("r1", running["r1"].lease_epoch, 2, [12])
        size_after = await written_size(own_valkey, operator)
        own_valkey.kill()
        os.truncate(commits_file(own_valkey), size if lost else size_after)
        own_valkey.start()
        with structlog.testing.capture_logs() as lines:
            await scheduler.leadership.write_back()

        assert metrics.WRITTEN_BACK.labels("leader")._value.get() == before + counted
        warned = [line["requests"] for line in lines if line["event"] == "written back"]
        assert warned == ([counted] if counted else [])
        stored = await scheduler.store.read("r1")
        assert stored is not None
        assert stored.committed_ids == (10, 11, 12)


async def test_a_later_deadline_that_a_crash_of_the_server_took_is_written_again(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    key = {"idempotency_key": "more time", "body_hash": b"a", "keep": True}
    scheduler = await start_own(lease_s=30.0)
    async with gateway(scheduler.address) as client:
        await client.submit("r1", deadline_in_ms=60_000, **key)
        await client.submit("r2", submission_id=2, deadline_in_ms=60_000)
        size = await written_size(own_valkey, operator)
        await client.submit("r3", submission_id=3, deadline_in_ms=600_000, **key)
        before = [await scheduler.store.read(request_id) for request_id in ("r1", "r2")]
        await written_size(own_valkey, operator)
        own_valkey.kill()
        os.truncate(commits_file(own_valkey), size)
        own_valkey.start()

        assert (await client.submit("r4", submission_id=4)).accepted.request_id == "r4"
        after = [await scheduler.store.read(request_id) for request_id in ("r1", "r2")]
        assert after == before


async def test_a_standby_leaves_a_record_that_lost_its_tail_to_the_leader_that_is_alive(
    own_valkey: EmbeddedServer,
    operator: redis_client.Redis,
    start_own: StartScheduler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The standby polls more often than the leader renews, and finds no lease. The record lost an end with
    its idempotency key, a cancellation, and an accepted request. An outage can last longer than ends are kept
    for a record that answers.
    """
    leader = await start_own()
    epoch = leader.leadership.epoch
    standby = await start_scheduler(own_valkey.url, shard="s", lease_s=0.5)
    async with gateway(leader.address) as client, worker(leader.address, slots=3) as gpu:
        await client.submit("r0")
        size = await written_size(own_valkey, operator)
        await client.submit("r1", submission_id=1, idempotency_key="k", body_hash=b"b")
        lease = (await gpu.assigned("r0", "r1"))["r1"].lease_epoch
        await gpu.run_round("r1", lease, 0, [10, 11], end=STOP)
        await client.read("r1-client")
        cancel = gateway_pb.CancelRequested(cancel_id=1, request_id="r0", tenant="anonymous")
        await client.send(gateway_pb.GatewayMessage(cancel=cancel))
        assert (await client.next("cancel_reply")).cancelled
        await client.submit("r2", submission_id=2, keep=True)

        await written_size(own_valkey, operator)
        own_valkey.kill()
        os.truncate(commits_file(own_valkey), size)
        await wait_until_async(lambda: leader.leadership.outage.on, description="the leader has noticed")
        await wait_until_async(lambda: standby.leadership.outage.on, description="the standby has noticed")
        monkeypatch.setattr(working_copy, "ENDS_KEPT_S", 0.0)
        await asyncio.sleep(leader.settings.lease_s)  # the lease has to run out on the record's clock
        own_valkey.start()

        async def written_back() -> bool:
            with contextlib.suppress(Exception):
                return await leader.store.unfinished_ids() == ["r2"]
            return False

        await wait_until_async(written_back, description="the leader has written back")
        ends = [await leader.store.read(request_id) for request_id in ("r0", "r1")]
        assert [stored and (stored.end, stored.committed_ids) for stored in ends] == [
            (End.CANCELLED, ()),
            (End.STOP, (10, 11)),
        ]
        await wait_until_async(lambda: not leader.leadership.outage.on, description="it is renewed again")
        again = await client.submit("r3", submission_id=3, idempotency_key="k", body_hash=b"b")
        assert again.accepted.request_id == "r1", "the key ran once"
        assert (leader.leadership.epoch, standby.leadership.loop) == (epoch, None)
    await standby.crash()


async def test_an_end_that_was_written_back_is_kept_as_long_as_a_new_one(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    """The record can lose it a second time."""
    scheduler = await start_own()
    loop = scheduler.leadership.loop
    assert loop is not None
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        lease = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.run_round("r1", lease, 0, [10], end=STOP)
        await client.read("r1-client")
        [before] = loop.working_copy.recent_ends
        await operator.flushall()
        await wait_until_async(lambda: scheduler.store.read("r1"), description="r1 is on the record again")

        await wait_until_async(
            lambda: loop.working_copy.recent_ends[0].at_s > before.at_s, description="its time begins again"
        )


async def test_a_leader_that_is_stopped_writes_back_first_what_the_record_has_lost(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    first = await start_own(lease_s=30.0)  # no renewal comes in between
    async with gateway(first.address) as client:
        size = await written_size(own_valkey, operator)
        await client.submit("r1", keep=True)
        await written_size(own_valkey, operator)
    own_valkey.kill()
    os.truncate(commits_file(own_valkey), size)
    own_valkey.start()
    await first.leadership.write_back()
    await first.leadership.resign()

    second = await start_own()
    assert await second.store.unfinished_ids() == ["r1"]
    await second.leadership.resign()
    await second.leadership.write_back()  # it is no longer the leader: nothing to do


async def test_a_leader_that_is_stopped_does_not_wait_for_ever_for_the_record(
    own_valkey: EmbeddedServer, start_own: StartScheduler
) -> None:
    leader = await start_own(lease_s=0.5)
    own_valkey.kill()
    with structlog.testing.capture_logs() as lines:
        async with asyncio.timeout(15):  # two lease periods are one second
            await leader.leadership.write_back()

    assert any(line["event"].startswith("stopping while the record is unavailable") for line in lines)


async def test_a_request_whose_end_was_lost_long_ago_is_not_run_again(
    own_valkey: EmbeddedServer,
    operator: redis_client.Redis,
    start_own: StartScheduler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record is from an old backup: the leader no longer holds the request, and its client has had its
    end.
    """
    monkeypatch.setattr(working_copy, "MAX_ENDS_KEPT", 0)
    scheduler = await start_own(lease_s=30.0)
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        lease = (await gpu.assigned("r1"))["r1"].lease_epoch
        size = await written_size(own_valkey, operator)
        await gpu.run_round("r1", lease, 0, [10], end=STOP)
        await client.submit("r2", submission_id=2)
        await written_size(own_valkey, operator)
        own_valkey.kill()
        os.truncate(commits_file(own_valkey), size)
        own_valkey.start()

        async def ended() -> bool:
            stored = await scheduler.store.read("r1")
            return stored is not None and stored.end is End.ERROR

        await gpu.assigned("r2")
        assert (await client.submit("r3", submission_id=3)).accepted.request_id == "r3"
        await wait_until_async(ended, description="r1 has an end")
        assert await scheduler.store.unfinished_ids() == ["r2", "r3"]


async def test_one_lost_request_is_written_back_when_the_record_is_found_without_it(
    operator: redis_client.Redis, start_own: StartScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found when what the log has goes into the request's own keys."""
    monkeypatch.setattr("scheduler_svc.store.batch.FOLD_AFTER_MS", -1)
    scheduler = await start_own()
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        lease = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.run_round("r1", lease, 0, [10])
        await operator.delete(*[f"laps-sd:{{s}}:{kind}:r1" for kind in ("request", "tokens", "payload")])
        await operator.delete("laps-sd:{s}:unfinished", "laps-sd:{s}:tenants", "laps-sd:{s}:prompt_tokens")

        await gpu.send_reports(gpu.report("r1", lease, 1, [11]))
        again = (await gpu.assigned("r1"))["r1"]
        position = len(again.tokens)
        await gpu.run_round("r1", again.lease_epoch, position, [11, 12][position - 1 :], end=STOP)
        tokens, end = await client.read("r1-client")
        assert (tokens, end.kind) == ([10, 11, 12], STOP)


async def test_a_request_continues_that_the_record_has_leased_to_a_worker_that_is_gone(
    operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    """The record refuses a report, and names another worker. No stream of that one will ever end, so only its grace
    period ends the lease.
    """
    scheduler = await start_own(worker_grace_s=0.1)
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        await client.submit("r1")
        lease = (await gpu.assigned("r1"))["r1"].lease_epoch
        of_another = {"worker": "gone", "leased_to": "gone", "lease_epoch": lease + 1}
        await operator.hset("laps-sd:{s}:request:r1", mapping=of_another)

        await gpu.send_reports(gpu.report("r1", lease, 0, [10], end=STOP))

        again = (await gpu.assigned("r1"))["r1"].lease_epoch
        assert again == lease + 2
        await gpu.run_round("r1", again, 0, [10], end=STOP)
        tokens, end = await client.read("r1-client")
        assert (tokens, end.kind) == ([10], STOP)


async def test_without_leader_and_record_a_gateway_restores_what_it_has_shown(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    first = await start_own()
    async with gateway(first.address) as client, worker(first.address) as gpu:
        await client.submit("r1")
        old = (await gpu.assigned("r1"))["r1"].lease_epoch
        await gpu.run_round("r1", old, 0, [10, 11])
        await first.crash()
    await operator.flushall()
    second = await start_own(reattach_grace_s=60.0)
    async with gateway(second.address) as client, worker(second.address) as gpu:
        gone = await client.attach("r1", from_token=2, attachment_id="r1-client")
        assert gone.result == gateway_pb.AttachReply.RESULT_NOT_FOUND_YET
        reply = await client.submit("r1", restores=True, shown_ids=[10, 11], idempotency_key="k")
        assert (reply.accepted.request_id, reply.accepted.attached_to_existing) == ("r1", False)
        listed = (await gpu.assigned("r1"))["r1"]

        assert listed.tokens == [10, 11]
        assert listed.lease_epoch > old + 1000, "a lease that a worker may still hold must not come again"
        await gpu.run_round("r1", listed.lease_epoch, 2, [12], end=STOP)
        tokens, end = await client.read("r1-client")
        assert (tokens, end.kind) == ([12], STOP)
        stored = await second.store.read("r1")
        assert stored is not None
        assert stored.committed_ids == (10, 11, 12)


async def test_without_leader_and_record_the_gateway_that_a_client_went_to_restores_it_too(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    first = await start_own()
    async with gateway(first.address, "g1") as submitted:
        await submitted.submit(
            "r1",
            tenant="acme",
            idempotency_key="k",
            deadline_in_ms=60_000,
            grace_ms=30_000,
            length_features=[1, 300],
            prompt=PROMPT,
            prompt_blocks=BLOCKS,
            cache_salt="acme",
        )
    async with gateway(first.address, "g2") as resumed:
        attached = await resumed.attach("r1", tenant="acme", wants_submission=True)
        plain = await resumed.attach("r1", tenant="acme", attachment_id="other")
    assert not plain.HasField("submission")
    await first.crash()
    await operator.flushall()
    second = await start_own()
    async with gateway(second.address, "g2") as client, worker(second.address) as gpu:
        submit = attached.submission
        assert 0 < submit.deadline_in_ms <= 60_000
        submit.restores, submit.submission_id, submit.attachment_id = True, 9, "late"
        submit.shown_ids.extend([10, 11])
        await client.send(gateway_pb.GatewayMessage(submit=submit))
        assert (await client.next("submit_reply")).accepted.request_id == "r1"

        listed = (await gpu.assigned("r1"))["r1"]
        assert (tuple(listed.specification.prompt_ids), listed.tokens) == (PROMPT, [10, 11])
        assert listed.specification.cache_salt == "acme"
        restored = await second.store.read("r1")
        assert restored is not None
        assert (restored.tenant, restored.idempotency_key, restored.grace_ms) == ("acme", "k", 30_000)
        assert (restored.length_features, restored.prompt_blocks) == (packed([1, 300]), BLOCKS)


async def test_of_two_streams_the_one_that_was_shown_more_counts(start_own: StartScheduler) -> None:
    scheduler = await start_own()
    async with (
        gateway(scheduler.address, "g1") as less,
        gateway(scheduler.address, "g2") as more,
        worker(scheduler.address) as gpu,
    ):
        await less.submit("r1", restores=True, shown_ids=[10], attachment_id="first")
        await gpu.assigned("r1")
        await more.submit("r1", restores=True, shown_ids=[10, 11], attachment_id="second")
        again = (await gpu.assigned("r1"))["r1"]

        assert again.tokens == [10, 11]
        await gpu.run_round("r1", again.lease_epoch, 2, [12], end=STOP)
        assert (await less.read("first"))[0] == [11, 12]
        assert (await more.read("second"))[0] == [12]


async def test_a_leader_that_found_the_record_empty_says_not_found_only_when_nobody_has_brought_it_back(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    yet, gone = gateway_pb.AttachReply.RESULT_NOT_FOUND_YET, gateway_pb.AttachReply.RESULT_NOT_FOUND
    first = await start_own(reattach_grace_s=60.0)  # a new shard is as empty as one that has lost everything
    async with gateway(first.address) as client:
        assert (await client.attach("r1")).result == yet
    await first.crash()
    second = await start_own(reattach_grace_s=60.0)
    async with gateway(second.address) as client:
        assert (await client.attach("r1")).result == gone, "the record was not empty any more"
    await second.crash()
    await operator.flushall()
    third = await start_own(reattach_grace_s=0.2)
    async with gateway(third.address) as client:

        async def is_certain() -> bool:
            return (await client.attach("r1")).result == gone

        await wait_until_async(is_certain, description="nobody has brought it back")


def held_by_a_worker(running: Running, tokens: list[int]) -> worker_pb.HeldRequest:
    """Return the entry of a worker's hello for a request, with this many outputs acknowledged."""
    specification = gateway_pb.Specification()
    specification.CopyFrom(running.specification)
    specification.ClearField("committed_ids")
    specification.committed_ids.extend(tokens)
    return worker_pb.HeldRequest(
        request_id=specification.request_id,
        lease_epoch=running.lease_epoch,
        emitted=len(tokens),
        specification=specification,
    )


async def test_without_leader_record_and_gateway_a_worker_restores_what_it_holds(
    operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    first = await start_own()
    async with gateway(first.address) as client, worker(first.address) as gpu:
        await client.submit(
            "r1",
            keep=True,
            tenant="acme",
            idempotency_key="k",
            body_hash=b"b",
            priority=2,
            time_limit_ms=60_000,
            traceparent=TRACEPARENT,
            length_features=[1, 300],
            prompt=PROMPT,
            prompt_blocks=BLOCKS,
            cache_salt="acme",
        )
        running = (await gpu.assigned("r1"))["r1"]
        running.specification.traceparent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"  # of its lease
        await gpu.run_round("r1", running.lease_epoch, 0, [10, 11])
        lost = await first.store.read("r1")
        await first.crash()
    await operator.flushall()
    second = await start_own()
    held = held_by_a_worker(running, [10, 11])
    async with worker(second.address, held=[held]) as gpu, gateway(second.address) as client:
        again = (await gpu.assigned("r1"))["r1"]

        assert again.tokens == [10, 11]
        assert again.lease_epoch > running.lease_epoch
        restored = await second.store.read("r1")
        assert restored is not None
        assert lost is not None
        for field in (
            "tenant",
            "priority",
            "keep",
            "idempotency_key",
            "body_hash",
            "seed",
            "prompt_ids",
            "model",
            "submission",
            "length_features",
            "prompt_blocks",
        ):
            assert getattr(restored, field) == getattr(lost, field)
        assert lost.prompt_blocks == BLOCKS
        assert restored.time_limit_ms is not None
        assert restored.time_limit_ms <= 60_000
        assert (await client.attach("r1", tenant="acme")).result == gateway_pb.AttachReply.RESULT_ATTACHED
        await gpu.run_round("r1", again.lease_epoch, 2, [12], end=STOP)
        assert (await client.read("late"))[0] == [10, 11, 12]


@pytest.mark.parametrize(("passed_ms", "left_ms"), [(20_000, 40_000), (70_000, 1), (-20_000, 60_000)])
def test_what_a_worker_restores_has_the_rest_of_its_times(passed_ms: int, left_ms: int) -> None:
    submit = gateway_pb.Submit(request_id="r1", deadline_in_ms=60_000, time_limit_ms=60_000)
    origin = gateway_pb.Origin(submit=submit, written_unix_ms=1_000_000, incarnation="lost")
    specification = gateway_pb.Specification(prompt_ids=(1, 2), origin=origin.SerializeToString())
    held = worker_pb.HeldRequest(request_id="r1", specification=specification)

    restored = offered(Offer(held), "another", 1_000_000 + passed_ms)

    assert restored is not None
    assert restored.message.deadline_in_ms == restored.message.time_limit_ms == left_ms


async def test_a_leader_that_predicts_no_lengths_keeps_no_words_of_what_a_worker_brings_back(
    operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    first = await start_own()
    async with gateway(first.address) as client, worker(first.address) as gpu:
        await client.submit("r1", keep=True, length_features=[1, 300])
        running = (await gpu.assigned("r1"))["r1"]
        await first.crash()
    await operator.flushall()
    second = await start_own(predict_lengths=False)
    async with worker(second.address, held=[held_by_a_worker(running, [])]) as gpu:
        await gpu.assigned("r1")
        restored = await second.store.read("r1")

        assert restored is not None
        assert restored.length_features == b""


async def test_a_request_that_has_ended_is_not_restored_by_a_worker_that_missed_its_end(
    start_own: StartScheduler,
) -> None:
    first = await start_own()
    async with gateway(first.address) as client, worker(first.address) as gpu:
        await client.submit("r1")
        running = (await gpu.assigned("r1"))["r1"]
        await gpu.run_round("r1", running.lease_epoch, 0, [10], end=STOP)
        await first.store.transport.client.delete(first.store.keys.request("r1"))  # as if it had expired
        await first.crash()
    second = await start_own()
    async with worker(second.address, held=[held_by_a_worker(running, [10])]) as gpu:
        assert [drop.request_id for drop in (await gpu.next("drop")).requests] == ["r1"]
        assert await second.store.unfinished_ids() == []


async def test_commits_that_record_and_leader_lost_come_back_from_the_worker_they_were_acknowledged_to(
    start_own: StartScheduler,
) -> None:
    first = await start_own()
    async with gateway(first.address) as client, worker(first.address) as gpu:
        await client.submit("r1", keep=True)
        running = (await gpu.assigned("r1"))["r1"]
        await gpu.run_round("r1", running.lease_epoch, 0, [10])
        await first.crash()
    second = await start_own()
    async with worker(second.address, held=[held_by_a_worker(running, [10, 11])]) as gpu:
        again = (await gpu.assigned("r1"))["r1"]

        assert again.tokens == [10, 11]
        stored = await second.store.read("r1")
        assert stored is not None
        assert stored.committed_ids == (10, 11)


@pytest.mark.parametrize("origin", [b"", b"\xff\xff", b"\x12\x03"])
async def test_an_origin_that_makes_no_sense_restores_nothing(
    start_own: StartScheduler, origin: bytes
) -> None:
    scheduler = await start_own()
    specification = gateway_pb.Specification(
        request_id="r1", prompt_ids=[1], sampling=SamplingParams(max_tokens=4), origin=origin
    )
    held = worker_pb.HeldRequest(request_id="r1", lease_epoch=1, specification=specification)
    async with worker(scheduler.address, held=[held]) as gpu:
        await gpu.next("drop")
        assert await scheduler.store.unfinished_ids() == []


@pytest.mark.parametrize("field", ["deadline_in_ms", "time_limit_ms", "grace_ms"])
async def test_times_that_no_clock_can_reach_are_refused(scheduler: SchedulerUnderTest, field: str) -> None:
    async with gateway(scheduler.address) as client:
        longest = await client.submit("r1", submission_id=1, **{field: MAX_TIME_MS})
        beyond = await client.submit("r2", submission_id=2, **{field: MAX_TIME_MS + 1})

        assert longest.HasField("accepted")
        assert beyond.refused.reason == Refused.REASON_INVALID
        assert beyond.refused.detail.startswith(f"{field} must be at most {MAX_TIME_MS}")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"restores": True, "shown_ids": [1] * 9}, "shown_ids"),
        ({"restores": True, "shown_ids": [2**31]}, "shown_ids"),
        ({"shown_ids": [1]}, "shown_ids"),
    ],
)
async def test_tokens_that_cannot_have_been_shown_are_refused(
    scheduler: SchedulerUnderTest, fields: dict[str, Any], field: str
) -> None:
    async with gateway(scheduler.address) as client:
        reply = await client.submit("r1", max_tokens=8, **fields)

        assert reply.refused.reason == Refused.REASON_INVALID
        assert field in reply.refused.detail


async def written_size(server: EmbeddedServer, operator: redis_client.Redis) -> int:
    """Return the bytes of the append-only file, after all writes."""
    await all_written(operator)
    return commits_file(server).stat().st_size


def lose_the_answer_to_a_submission(scheduler: SchedulerUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the record execute the next submission, and lose its answer."""
    submit = scheduler.store.submit

    async def lose_the_answer(*args: Any) -> Any:
        monkeypatch.undo()
        await submit(*args)
        raise StoreUnavailable("the answer is lost")

    monkeypatch.setattr(scheduler.store, "submit", lose_the_answer)


@contextlib.asynccontextmanager
async def full(server: EmbeddedServer, operator: redis_client.Redis) -> AsyncIterator[None]:
    await operator.config_set("maxmemory", "1")
    yield
    await operator.config_set("maxmemory", "0")


@contextlib.asynccontextmanager
async def read_only(server: EmbeddedServer, operator: redis_client.Redis) -> AsyncIterator[None]:
    await operator.replicaof("127.0.0.1", "1")
    yield
    await operator.replicaof("NO", "ONE")


@contextlib.asynccontextmanager
async def slow(server: EmbeddedServer, operator: redis_client.Redis) -> AsyncIterator[None]:
    with stopped(server):
        yield


@contextlib.asynccontextmanager
async def unreachable(server: EmbeddedServer, operator: redis_client.Redis) -> AsyncIterator[None]:
    server.stop()
    yield
    server.start()


@pytest.mark.parametrize("fault", [full, read_only, slow, unreachable])
async def test_while_the_record_cannot_be_written_everybody_waits_and_afterwards_goes_on(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler, fault: Any
) -> None:
    """The lease runs out during the fault, and the watchdog would have given up a worker without reports."""
    scheduler = await start_own(watchdog_s=1.0)
    name = fault.__name__
    counted = metrics.STORE_FAULTS.labels(name)._value.get()
    with structlog.testing.capture_logs() as lines:
        async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
            await client.submit("r1")
            lease = (await gpu.assigned("r1"))["r1"].lease_epoch
            loop = scheduler.leadership.loop
            assert loop is not None
            async with fault(own_valkey, operator):
                await gpu.send_reports(gpu.report("r1", lease, 0, [10]))
                await wait_until_async(lambda: loop.outage.stuck, description="the scheduler has noticed")
                refused = await client.submit("r2", submission_id=2)
                assert refused.refused.reason == Refused.REASON_STORE_UNAVAILABLE
                assert refused.refused.retry_after_ms > 0
                await asyncio.sleep(
                    2.0
                )  # the lease and the watchdog are over: what follows must not depend on them
                assert not any(m.WhichOneof("message") == "deliveries" for m in client.heard)
                assert metrics.STORE_DOWN._value.get() == 1
            await gpu.acknowledged(1)
            await gpu.run_round("r1", lease, 1, [11], end=STOP)
            tokens, end = await client.read("r1-client")

            assert (tokens, end.kind) == ([10, 11], STOP)
            assert (await client.submit("r2", submission_id=3)).accepted.request_id == "r2"
            assert not gpu.ended
            assert scheduler.leadership.loop is loop, "nobody else has led"
    told = [line for line in lines if "the record is unavailable" in line["event"]]
    assert [line["fault"] for line in told].count(name) == 1
    assert len(told) <= 3, "one line for each kind of fault"
    assert len([line for line in lines if line["event"] == "the record is back"]) == 1
    assert metrics.STORE_FAULTS.labels(name)._value.get() == counted + 1
    assert metrics.STORE_DOWN._value.get() == 0


async def test_another_scheduler_leads_while_the_record_is_full(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    first = await start_own()
    async with gateway(first.address) as client:
        await client.submit("r1", keep=True)
    async with full(own_valkey, operator):
        await first.crash()
        second = await start_own()
        async with gateway(second.address) as client:
            assert (await client.attach("r1")).result == gateway_pb.AttachReply.RESULT_ATTACHED
            refused = await client.submit("r2", submission_id=2)
            assert refused.refused.reason == Refused.REASON_STORE_UNAVAILABLE
    async with gateway(second.address) as client, worker(second.address) as gpu:
        lease = (await gpu.assigned("r1"))["r1"].lease_epoch
        await client.attach("r1")
        await gpu.run_round("r1", lease, 0, [10], end=STOP)
        tokens, end = await client.read("late")
    assert (tokens, end.kind) == ([10], STOP)


async def test_no_client_is_given_up_that_could_not_come_back_while_the_record_was_away(
    own_valkey: EmbeddedServer,
    operator: redis_client.Redis,
    start_own: StartScheduler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The grace of its request is over when the record is back, and the client comes a moment later."""
    monkeypatch.setattr(clients, "STILL_COMING_S", 600.0)
    scheduler = await start_own(reattach_grace_s=2.0)
    loop = scheduler.leadership.loop
    assert loop is not None
    async with worker(scheduler.address) as gpu:
        async with gateway(scheduler.address) as client:
            await client.submit("r1")
            lease = (await gpu.assigned("r1"))["r1"].lease_epoch
        r1 = loop.working_copy.live["r1"]
        await wait_until_async(lambda: r1.grace is not None, description="its grace has begun")
        async with slow(own_valkey, operator):
            over_s = loop.clock() + 2.0
            await gpu.send_reports(gpu.report("r1", lease, 0, [10]))
            await wait_until_async(lambda: loop.outage.stuck, description="the scheduler has noticed")
            await wait_until_async(lambda: loop.clock() > over_s, description="the grace is over")
        await gpu.acknowledged(1)
        async with gateway(scheduler.address, "g2") as client:
            for number in (2, 3):  # turns in which its end would be decided and written
                await client.submit(f"r{number}", submission_id=number)

            assert (await client.attach("r1")).result == gateway_pb.AttachReply.RESULT_ATTACHED
            assert r1.end is None


@pytest.mark.parametrize("fault", [full, read_only, slow, unreachable])
async def test_an_idle_leader_notices_and_reports_that_the_record_cannot_be_written(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler, fault: Any
) -> None:
    """Nothing is submitted, runs or is saved: only the renewal of the lease can find the fault."""
    scheduler = await start_own(lease_s=0.9, priors_save_s=600.0)
    outage = scheduler.leadership.outage
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        async with fault(own_valkey, operator):
            await wait_until_async(lambda: outage.on, description="the leader has noticed")
            reports = [
                (await admin.GetRecord(admin_pb.GetRecordRequest())).record_outage,
                (await admin.ListQueue(admin_pb.ListQueueRequest())).record_outage,
                (await admin.ListWorkers(admin_pb.ListWorkersRequest())).record_outage,
            ]
            assert {report.fault for report in reports} == {fault.__name__}
            assert all(report.error and report.lasts_s >= 0 for report in reports)
        await wait_until_async(lambda: not outage.on, description="the leader has noticed the end too")
        assert not (await admin.GetRecord(admin_pb.GetRecordRequest())).HasField("record_outage")


async def test_a_standby_says_that_nobody_leads_because_the_record_is_away(
    own_valkey: EmbeddedServer, start_own: StartScheduler
) -> None:
    await start_own()
    standby = await start_scheduler(own_valkey.url, shard="s")
    try:
        async with grpc.aio.insecure_channel(standby.address) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            own_valkey.stop()
            await wait_until_async(lambda: standby.leadership.outage.on, description="it has noticed")

            with pytest.raises(grpc.aio.AioRpcError, match="it cannot use the record \\(unreachable\\) for"):
                await admin.ListQueue(admin_pb.ListQueueRequest())
            answer = await admin.GetRecord(admin_pb.GetRecordRequest())
            assert answer.record_outage.fault == "unreachable"
    finally:
        await standby.crash()


async def test_a_leader_that_was_cut_off_and_fenced_reports_the_record_as_available_and_admits_when_it_leads_again(
    own_valkey: EmbeddedServer, start_own: StartScheduler
) -> None:
    """A write waited when another process took the lead: it is gone with that lead."""
    network = Proxy(own_valkey.url.removeprefix("redis://").partition("/")[0])
    await network.serve()
    first = await start_scheduler(f"redis://{network.address}/0", shard="s", priors_save_s=3600.0)
    outage = first.leadership.outage
    try:
        await first.wait_leading()
        async with gateway(first.address) as client, worker(first.address) as gpu:
            await client.submit("r1")
            lease = (await gpu.assigned("r1"))["r1"].lease_epoch
            network.hold(os.getpid(), BOTH)
            await gpu.send_reports(gpu.report("r1", lease, 0, [10]))
            await wait_until_async(lambda: outage.stuck, description="the write waits")
            second = await start_own()
            network.release(os.getpid())

            await wait_until_async(lambda: not outage.on, description="the record answers the first one too")
            assert first.leadership.loop is None
            async with grpc.aio.insecure_channel(first.address) as channel:
                record = await admin_pb2_grpc.AdminStub(channel).GetRecord(admin_pb.GetRecordRequest())
            assert not record.HasField("record_outage")
        await second.leadership.resign()
        await second.crash()
        await first.wait_leading()
        async with gateway(first.address) as client:
            assert (await client.submit("r2")).accepted.request_id == "r2"
    finally:
        await first.crash()
        await network.close()


async def test_peers_of_a_leader_that_alone_cannot_reach_the_record_find_the_next_one(
    own_valkey: EmbeddedServer, start_own: StartScheduler
) -> None:
    """Its heartbeats go on, and nothing else shows them that another process leads."""
    network = Proxy(own_valkey.url.removeprefix("redis://").partition("/")[0])
    await network.serve()
    first = await start_scheduler(f"redis://{network.address}/0", shard="s", priors_save_s=3600.0)
    first.store.patience_s = lambda lease_s: 2 * lease_s  # type: ignore[method-assign]
    link = ShardLink(GatewaySettings(), "s", seeds=[first.address])
    linked = asyncio.create_task(link.run())
    try:
        await first.wait_leading()
        await wait_until_async(lambda: link.connected, description="the gateway has found the first leader")
        async with worker(first.address) as gpu:
            await gpu.next("assignment")
            network.hold(os.getpid(), BOTH)
            second = await start_own()
            link.seeds = [first.address, second.address]

            await gpu.wait_ended()
            await wait_until_async(
                lambda: link._leader_epoch == second.leadership.epoch,
                description="it has found the second one",
            )
        assert first.leadership.loop is not None, "it keeps what it holds"
    finally:
        linked.cancel()
        await asyncio.gather(linked, return_exceptions=True)
        await first.crash()
        await network.close()


async def test_peers_that_are_turned_away_come_back_if_no_other_leads_and_their_requests_go_on(
    own_valkey: EmbeddedServer,
) -> None:
    """The record is away for longer than a gateway's grace: an idle leader looks at that all the same."""
    network = Proxy(own_valkey.url.removeprefix("redis://").partition("/")[0])
    await network.serve()
    leader = await start_scheduler(f"redis://{network.address}/0", shard="s", reattach_grace_s=2.0)
    leader.store.patience_s = lambda lease_s: 2 * lease_s  # type: ignore[method-assign]
    link = ShardLink(GatewaySettings(), "s", seeds=[leader.address])
    linked = asyncio.create_task(link.run())
    sampling = SamplingParams(max_tokens=8, temperature=0.0, top_p=1.0, seed=7)
    request = gateway_pb.Submit(
        request_id="s.r1",
        tenant="t",
        model="m",
        specification=gateway_pb.Specification(request_id="s.r1", prompt_ids=[1, 2, 3], sampling=sampling),
    )
    try:
        await leader.wait_leading()
        await wait_until_async(lambda: link.connected, description="the gateway has found the leader")
        stream = link.submit(request, deadline=None)
        await link.accepted(stream, wait_s=10.0)
        network.hold(os.getpid(), BOTH)
        for state in (False, True, False, True):
            await wait_until_async(
                lambda state=state: link.connected is state, description=f"connected: {state}"
            )
        network.release(os.getpid())
        await wait_until_async(lambda: not leader.leadership.outage.on, description="the record is back")
        async with worker(leader.address) as gpu:
            lease = (await gpu.assigned("s.r1"))["s.r1"].lease_epoch
            await gpu.run_round("s.r1", lease, 0, [10, 11], end=gateway_pb.RequestEnd.KIND_STOP)
            await wait_until_async(lambda: stream.over, description="its end has arrived")
        batch = link.take(stream, 0.0)
        assert list(batch.token_ids) == [10, 11]
    finally:
        linked.cancel()
        await asyncio.gather(linked, return_exceptions=True)
        await leader.crash()
        await network.close()


async def test_what_a_leader_that_was_fenced_has_led_is_gone_before_it_leads_again(
    own_valkey: EmbeddedServer, start_own: StartScheduler
) -> None:
    """It is full of cycles, for which Python looks seldom in this process."""
    network = Proxy(own_valkey.url.removeprefix("redis://").partition("/")[0])
    await network.serve()
    first = await start_scheduler(f"redis://{network.address}/0", shard="s", priors_save_s=3600.0)
    gc.disable()
    try:
        await first.wait_leading()
        assert first.leadership.loop is not None
        led = weakref.ref(first.leadership.loop)
        async with worker(first.address) as gpu:
            await gpu.next("assignment")
            network.hold(os.getpid(), BOTH)
            await start_own()
            network.release(os.getpid())
            await gpu.wait_ended()

        await wait_until_async(lambda: led() is None, description="the loop of the first leader is gone")
    finally:
        gc.enable()
        await first.crash()
        await network.close()


async def test_a_standby_of_a_record_that_was_read_only_reports_it_as_available_once_another_leads(
    own_valkey: EmbeddedServer, operator: redis_client.Redis
) -> None:
    """No process can take the lead of a record that is read-only, and a standby writes nothing else."""
    async with read_only(own_valkey, operator):
        both = [await start_scheduler(own_valkey.url, shard="s") for _ in range(2)]
        outages = [one.leadership.outage for one in both]
        await wait_until_async(lambda: all(one.on for one in outages), description="both have noticed")
    try:
        await wait_until_async(lambda: not any(one.on for one in outages), description="it has room for both")
    finally:
        for one in both:
            await one.crash()


@pytest.mark.parametrize("fault", [full, slow, unreachable])
async def test_an_outage_that_the_renewal_has_found_is_not_tried_by_each_submission(
    own_valkey: EmbeddedServer,
    operator: redis_client.Redis,
    start_own: StartScheduler,
    monkeypatch: pytest.MonkeyPatch,
    fault: Any,
) -> None:
    """Each attempt would take seconds, and those behind it would wait for as long."""
    scheduler = await start_own(lease_s=0.9)
    submit = scheduler.store.submit
    tried: list[str] = []

    async def noted(requests: Any, *others: Any) -> Any:
        tried.extend(new.request_id for new in requests)
        return await submit(requests, *others)

    monkeypatch.setattr(scheduler.store, "submit", noted)
    outage = scheduler.leadership.outage
    async with gateway(scheduler.address) as client:
        async with fault(own_valkey, operator):
            await wait_until_async(lambda: outage.on, description="the leader has noticed")
            reply = await client.submit("r1", idempotency_key="k")
            assert reply.refused.reason == Refused.REASON_STORE_UNAVAILABLE
            assert reply.refused.retry_after_ms > 0
        await wait_until_async(lambda: not outage.on, description="the record is back")
        again = await client.submit("r2", submission_id=2, idempotency_key="k")

        assert again.accepted.request_id == "r2"
        assert tried == ["r2"]


async def test_a_full_record_admits_nothing_and_says_when_it_has_room_again(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    """Nothing runs, so only a submission, or a trial write, can find the fault."""
    scheduler = await start_own(priors_save_s=0.1)
    async with gateway(scheduler.address) as client:
        with structlog.testing.capture_logs() as lines:
            async with full(own_valkey, operator):
                for number in range(5):
                    reply = await client.submit(f"r{number}", submission_id=number)
                    assert reply.refused.reason == Refused.REASON_STORE_UNAVAILABLE
                    assert scheduler.leadership.loop is not None
            await wait_until_async(
                lambda: metrics.STORE_DOWN._value.get() == 0, description="the gauge is down again"
            )
        assert len([line for line in lines if line["log_level"] == "error"]) == 1
        assert (await client.submit("r9", submission_id=9)).accepted.request_id == "r9"


async def test_a_restoring_submission_that_was_refused_for_the_record_is_not_ended_behind_its_back(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    """Its first attempt may still have been written: its gateway tries again after the reply to wait."""
    scheduler = await start_own()
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        async with slow(own_valkey, operator):
            reply = await client.submit("r1", restores=True, shown_ids=[10])
            assert reply.refused.reason == Refused.REASON_STORE_UNAVAILABLE
        await wait_until_async(lambda: _reached(scheduler), description="the record answers again")
        await client.submit("r0", submission_id=2)
        again = await client.submit("r1", restores=True, shown_ids=[10], submission_id=3)

        assert again.accepted.request_id == "r1"
        await client.detach("r0", "r0-client")
        listed = (await gpu.assigned("r1"))["r1"]
        await gpu.run_round("r1", listed.lease_epoch, 1, [11], end=STOP)
        tokens, end = await client.read("r1-client")
        assert (tokens, end.kind) == ([11], STOP)


async def test_what_a_worker_holds_is_led_though_another_request_comes_before_the_second_attempt(
    operator: redis_client.Redis, start_own: StartScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record has executed the first attempt, and only its answer was lost."""
    first = await start_own()
    async with gateway(first.address) as client, worker(first.address) as gpu:
        await client.submit("r1", keep=True)
        running = (await gpu.assigned("r1"))["r1"]
        await gpu.run_round("r1", running.lease_epoch, 0, [10, 11])
        await first.crash()
    await operator.flushall()
    second = await start_own()

    async def is_written() -> bool:
        return await second.store.unfinished_ids() == ["r1"]

    lose_the_answer_to_a_submission(second, monkeypatch)
    held = held_by_a_worker(running, [10, 11])
    async with worker(second.address, slots=2, held=[held]) as gpu, gateway(second.address) as client:
        await wait_until_async(is_written, description="r1 is on the record again")
        await client.submit("r2", submission_id=2)

        assert (await gpu.assigned("r1", "r2"))["r1"].tokens == [10, 11]


@pytest.mark.parametrize("others", [[], ["r2"]])
async def test_a_restoring_submission_that_does_not_come_again_is_led_all_the_same(
    start_own: StartScheduler, monkeypatch: pytest.MonkeyPatch, others: list[str]
) -> None:
    """The record has executed it, only the answer was lost, and its gateway is gone since."""
    scheduler = await start_own(reattach_grace_s=0.1)
    async with gateway(scheduler.address) as client:
        lose_the_answer_to_a_submission(scheduler, monkeypatch)
        reply = await client.submit("r1", restores=True, shown_ids=[10])
        assert reply.refused.reason == Refused.REASON_STORE_UNAVAILABLE
        for other in others:
            assert (await client.submit(other, submission_id=2)).accepted.request_id == other
        assert await scheduler.store.unfinished_ids() == ["r1", *others]

    async def ended() -> StoredRequest | None:
        stored = await scheduler.store.read("r1")
        return stored if stored is not None and stored.end is not None else None

    await wait_until_async(ended, description="r1 has ended, as one whose client went away")
    stored = await scheduler.store.read("r1")
    assert stored is not None
    assert await scheduler.store.unfinished_ids() == []
    assert (stored.end, stored.committed_ids) == (End.CANCELLED, (10,))


async def test_a_submission_that_was_refused_for_the_record_leaves_its_key_to_the_retry(
    start_own: StartScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record has executed the refused submission, and only its answer was lost."""
    scheduler = await start_own()
    async with gateway(scheduler.address) as client, worker(scheduler.address) as gpu:
        lose_the_answer_to_a_submission(scheduler, monkeypatch)
        first = await client.submit("r1", idempotency_key="k", body_hash=b"b")
        assert first.refused.reason == Refused.REASON_STORE_UNAVAILABLE
        retry = await client.submit("r2", submission_id=2, idempotency_key="k", body_hash=b"b")

        assert (retry.accepted.request_id, retry.accepted.attached_to_existing) == ("r2", False)
        lease = (await gpu.assigned("r2"))["r2"].lease_epoch
        await gpu.run_round("r2", lease, 0, [10], end=STOP)
        tokens, end = await client.read("r2-client")
        assert (tokens, end.kind) == ([10], STOP)
        assert await scheduler.store.read("r1") is None
        assert await scheduler.store.unfinished_ids() == []


async def test_a_submission_sent_again_waits_until_its_withdrawal_is_confirmed(
    start_own: StartScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway sends it again after a broken stream. The withdrawal without an answer may be executed later,
    and must not find an accepted request.
    """
    scheduler = await start_own()
    withdraw = scheduler.store.withdraw
    answers = iter([StoreUnavailable("no answer"), None])

    async def not_at_first(request_ids: Any) -> Any:
        if (error := next(answers)) is not None:
            raise error
        return await withdraw(request_ids)

    async def no_answer(*args: Any) -> Any:
        monkeypatch.undo()
        monkeypatch.setattr(scheduler.store, "withdraw", not_at_first)
        raise StoreUnavailable("no answer")

    async with gateway(scheduler.address) as client:
        monkeypatch.setattr(scheduler.store, "submit", no_answer)
        replies = [await client.submit("r1", submission_id=number) for number in range(3)]

    assert [reply.refused.reason for reply in replies[:2]] == [Refused.REASON_STORE_UNAVAILABLE] * 2
    assert replies[2].accepted.request_id == "r1"


async def test_a_refused_submission_that_is_written_late_goes_with_the_next_retry(
    start_own: StartScheduler,
) -> None:
    """The server may read the connection of the refused submission after that of its withdrawal."""
    scheduler = await start_own()
    late = a_request("r1", tenant="anonymous", idempotency_key="k", body_hash=b"b".hex())
    async with gateway(scheduler.address) as client:
        [written] = await scheduler.store.submit([late])
        assert written.status is SubmitStatus.ACCEPTED

        retry = await client.submit("r2", submission_id=2, idempotency_key="k", body_hash=b"b")
        assert retry.refused.reason == Refused.REASON_STORE_UNAVAILABLE
        again = await client.submit("r3", submission_id=3, idempotency_key="k", body_hash=b"b")

        assert again.accepted.request_id == "r3"
        assert await scheduler.store.unfinished_ids() == ["r3"]


async def _reached(scheduler: SchedulerUnderTest) -> bool:
    with contextlib.suppress(Exception):
        await scheduler.store.ping()
        return True
    return False


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[list[EmbeddedServer]]:
    with three_masters(tmp_path) as servers:
        yield servers


async def test_a_node_of_the_cluster_that_is_away_disturbs_only_requests_whose_keys_are_claimed_there(
    cluster: list[EmbeddedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    await take_no_node_for_dead(cluster)
    monkeypatch.setattr(transport, "AWAY_S", 0.0)
    scheduler = await start_scheduler(cluster[0].url, shard=shard_at(0), reattach_grace_s=0.1)
    await scheduler.wait_leading()
    scheduler.store.transport.timeout_s = 0.5
    new, old = (
        {"idempotency_key": key_claimed_at(1, name, tenant="anonymous"), "body_hash": b"b"}
        for name in ("new", "old")
    )
    async with gateway(scheduler.address) as client:
        with structlog.testing.capture_logs() as lines, stopped(cluster[1]):
            keyed = await client.submit("r1", **new)
            restored = await client.submit("r2", submission_id=2, restores=True, shown_ids=[10], **old)
            assert {reply.refused.reason for reply in (keyed, restored)} == {Refused.REASON_STORE_UNAVAILABLE}
            assert keyed.refused.retry_after_ms > 0
            other = await client.submit("r3", submission_id=3)
            assert other.accepted.request_id == "r3"
            assert not scheduler.leadership.outage.on
        assert not [line for line in lines if line["log_level"] == "error"]

        retry = await client.submit("r1", submission_id=4, **new)
        assert retry.accepted.request_id == "r1"

        async def is_restored() -> bool:
            return await scheduler.store.read("r2") is not None

        await wait_until_async(is_restored, description="what was brought back is on the record")
    await scheduler.crash()


async def test_explain_of_an_ended_request_says_at_once_that_the_record_is_away(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    scheduler = await start_own()
    async with grpc.aio.insecure_channel(scheduler.address) as channel, unreachable(own_valkey, operator):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await admin_pb2_grpc.AdminStub(channel).ExplainRequest(
                admin_pb.AdminExplainRequest(request_id="r1", tenant="anonymous")
            )
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "record" in (error.value.details() or "")


async def test_made_up_ids_are_read_together(
    own_valkey: EmbeddedServer, operator: redis_client.Redis, start_own: StartScheduler
) -> None:
    """Clients choose the ids: a read for each would hold up all other requests for as long as the record
    takes, here its timeout.
    """
    scheduler = await start_own(reattach_grace_s=0.1)
    async with gateway(scheduler.address) as client:
        async with slow(own_valkey, operator):
            for number in range(100):
                made_up = f"made-up-{number}"
                attach = gateway_pb.Attach(
                    attach_id=number, request_id=made_up, tenant="anonymous", attachment_id=made_up
                )
                await client.send(gateway_pb.GatewayMessage(attach=attach))
                cancel = gateway_pb.CancelRequested(cancel_id=number, request_id=made_up, tenant="anonymous")
                await client.send(gateway_pb.GatewayMessage(cancel=cancel))
            replies = [await client.next("attach_reply") for _ in range(100)]

        assert {reply.result for reply in replies} == {gateway_pb.AttachReply.RESULT_UNAVAILABLE}
        outage = scheduler.leadership.outage
        await wait_until_async(lambda: not outage.on, description="the record is back")
        assert (await client.submit("r1")).accepted.request_id == "r1"
        cancel = gateway_pb.CancelRequested(cancel_id=1000, request_id="made-up", tenant="anonymous")
        await client.send(gateway_pb.GatewayMessage(cancel=cancel))
        assert not (await client.next("cancel_reply")).found


@pytest.mark.parametrize("damage", ["[", "[]", '"all"', "NaN", "another format", "another key", "probes"])
async def test_a_leader_logs_that_it_begins_anew_where_what_was_learnt_cannot_be_used(
    start: StartScheduler, damage: str
) -> None:
    learnt = Priors().to_dict()
    learnt["prompts"]["learned"] = 1
    if damage == "NaN":
        learnt["cost"]["prefill_s"] = float("nan")
    elif damage == "another format":
        learnt["format"] += 1
    first = await start(priors_save_s=3600.0)
    if damage == "probes":
        await first.store.save_probes(b'{"format": 2, "probes": []}')
    else:
        whole = damage in ("NaN", "another format", "another key")
        await first.store.save_priors((json.dumps(learnt) if whole else damage).encode())
    await first.crash()
    with structlog.testing.capture_logs() as lines:
        second = await start()

    assert second.leadership.loop is not None
    (line,) = (
        line for line in lines if line["event"] == "what was learnt cannot be used: learning starts again"
    )
    named = {"another format": "another version", "another key": "LAPS_SD_LENGTH_KEY", "probes": "probes"}
    assert named.get(damage, "") in line["reason"]
