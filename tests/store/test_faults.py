"""Faults of a server, produced for real: killed, paused, full, read-only, emptied."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as redis_client

from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Lease, Release
from scheduler_svc.store.batch import Batch
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.errors import Fault, Fenced, RecordBehind, StoreUnavailable
from scheduler_svc.store.store import Store
from tests.helpers import free_port, wait_until_async
from tests.store.kit import (
    ALREADY,
    GONE,
    OK,
    One,
    a_commit,
    a_finish,
    a_request,
    a_standing,
    accept,
    all_written,
    commits_file,
    end_everything,
    lease,
    read,
    ttls_ms,
    unfinished,
)


@pytest.fixture
async def store(own_server: EmbeddedServer) -> AsyncIterator[Store]:
    store = Store(own_server.url, "main", timeout_s=1.0)
    assert await store.acquire_leadership(owner="leader:1", lease_s=60) is not None
    yield store
    await store.close()


@pytest.fixture
async def operator(own_server: EmbeddedServer) -> AsyncIterator[redis_client.Redis]:
    operator = redis_client.Redis.from_url(own_server.url, protocol=2)
    yield operator
    await operator.aclose()


async def start_again(server: EmbeddedServer, store: Store) -> None:
    server.start()

    async def reached() -> bool:
        with contextlib.suppress(StoreUnavailable):
            await store.ping()
            return True
        return False

    await wait_until_async(reached, description="the old connections are noticed to be dead")


async def trust_again(store: Store) -> None:
    """Assert that the leader is fenced after a restart, which may have lost data, until it confirms that."""
    with pytest.raises(Fenced):
        await One(store).lease(Lease("r1", "w1", 1))
    with pytest.raises(RecordBehind):
        await store.renew_leadership()
    assert await store.reclaim_leadership(newest_sequence=0) is True
    assert await store.renew_leadership() is True


async def test_a_restarted_server_is_left_to_the_last_leader_first_by_a_standby_that_saw_nothing(
    own_server: EmbeddedServer, store: Store
) -> None:
    """The run id of the server shows the restart, so that a standby that has just been started knows it
    too."""
    now_s = 0.0
    own_server.kill()
    await start_again(own_server, store)
    standby = Store(own_server.url, store.keys.shard, timeout_s=0.3, monotonic=lambda: now_s)
    lease_s = 0.001  # of the leader too: it has run out
    assert await standby.acquire_leadership(owner="b:1", lease_s=lease_s) is None
    await _no_lease(own_server, store)

    assert await standby.acquire_leadership(owner="b:1", lease_s=lease_s) is None
    with pytest.raises(RecordBehind):
        await store.renew_leadership()
    assert await store.reclaim_leadership(newest_sequence=0) is True
    await store.reclaimed()
    await _no_lease(own_server, store)
    assert await standby.acquire_leadership(owner="b:1", lease_s=60) is not None
    await standby.close()


async def test_a_leader_that_never_comes_back_is_waited_for_no_longer_than_the_patience(
    own_server: EmbeddedServer, store: Store
) -> None:
    now_s = 0.0
    own_server.kill()
    await start_again(own_server, store)
    await _no_lease(own_server, store)
    standby = Store(own_server.url, store.keys.shard, timeout_s=2.0, monotonic=lambda: now_s)
    assert standby.patience_s(3.0) == standby.patience_s(0.5) == 6.0
    assert standby.patience_s(10.0) == 20.0

    assert await standby.acquire_leadership(owner="b:1", lease_s=3.0) is None
    now_s = 5.99
    assert await standby.acquire_leadership(owner="b:1", lease_s=3.0) is None
    now_s = 6.0
    assert await standby.acquire_leadership(owner="b:1", lease_s=3.0) is not None
    await standby.close()


async def test_a_leader_that_resigned_is_not_waited_for(own_server: EmbeddedServer, store: Store) -> None:
    await store.resign()
    own_server.stop()
    await start_again(own_server, store)

    standby = Store(own_server.url, store.keys.shard)
    assert await standby.acquire_leadership(owner="b:1", lease_s=60) is not None
    await standby.close()


async def _no_lease(server: EmbeddedServer, store: Store) -> None:
    async with redis_client.Redis.from_url(server.url) as client:
        await client.delete(store.keys.leader())


async def test_a_killed_server_is_unavailable_and_comes_back_with_what_was_committed(
    own_server: EmbeddedServer, store: Store, operator: redis_client.Redis
) -> None:
    await accept(store, a_request("r1", idempotency_key="k"), a_request("r2"))
    await lease(store)
    await One(store).commit(a_commit(standing=a_standing(level=2)))
    before = await unfinished(store)
    await all_written(operator)
    batch = Batch(store)
    pending = batch.commit([a_commit(position=3, tokens=(14,), end=End.STOP)])
    own_server.kill()

    for attempt in (
        batch.execute(),
        store.submit([a_request("r3")]),
        store.read("r1"),
        store.ping(),
        store.leader(),
        store.renew_leadership(),
        store.save_priors(b""),
        store.load_priors(),
        store.save_probes(b""),
        store.load_probes(),
        store.last_sequence(),
        unfinished(store),
    ):
        with pytest.raises(StoreUnavailable):
            await attempt

    await start_again(own_server, store)
    assert await unfinished(store) == before
    await trust_again(store)
    await batch.execute()
    assert pending.result() == [OK]
    assert (await read(store)).committed_ids == (11, 12, 13, 14)
    await end_everything(store)


async def test_a_batch_whose_answer_was_lost_is_safe_to_send_again(
    own_server: EmbeddedServer, store: Store
) -> None:
    """The server stands still while the batch is on its way, runs it later, and then gets it a second
    time."""
    await accept(store, a_request())
    hasty = Store(own_server.url, "main", timeout_s=0.1)
    await store.resign()
    await hasty.acquire_leadership(owner="hasty:1", lease_s=60)
    batch = Batch(hasty)
    answers = [
        batch.lease([Lease("r1", "w1", 1)]),
        batch.commit([a_commit(), a_commit(position=3, tokens=(14,))]),
        batch.release([Release("r1", 1)]),
    ]
    assert own_server.pid is not None
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable):
            await batch.execute()
    finally:
        os.kill(own_server.pid, signal.SIGCONT)

    async def goes_through() -> bool:
        try:
            await batch.execute()
        except StoreUnavailable:
            return False
        return True

    await wait_until_async(goes_through, description="the server goes on")
    assert {status for answer in answers for status in answer.result()} <= {OK, ALREADY}
    await batch.execute()
    assert {status for answer in answers for status in answer.result()} == {ALREADY}
    stored = await read(hasty)
    assert (stored.committed_ids, stored.lease_epoch, stored.worker_id) == ((11, 12, 13, 14), 1, None)
    await hasty.close()


async def test_a_call_that_is_given_up_leaves_no_answer_behind_for_the_next(
    own_server: EmbeddedServer, store: Store
) -> None:
    await accept(store, a_request())
    assert own_server.pid is not None
    os.kill(own_server.pid, signal.SIGSTOP)
    given_up = asyncio.create_task(One(store).lease(Lease("r1", "w1", 1)))
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    os.kill(own_server.pid, signal.SIGCONT)

    async def is_over() -> bool:
        with contextlib.suppress(StoreUnavailable):
            return await One(store).lease(Lease("r1", "w1", 1)) in (OK, ALREADY)
        return False

    await wait_until_async(is_over, description="the server goes on")
    results = await asyncio.gather(*(store.read("r1") for _ in range(20)), *(store.ping() for _ in range(20)))
    assert {request.worker_id for request in results[:20] if request is not None} == {"w1"}
    await end_everything(store)


async def test_a_full_server_takes_nothing_in_but_lets_requests_end(
    store: Store, operator: redis_client.Redis
) -> None:
    await accept(store, a_request("r1"), a_request("r2"))
    await lease(store)
    await operator.config_set("maxmemory", "1")

    with pytest.raises(StoreUnavailable, match="written") as refused:
        await store.submit([a_request("r3")])
    assert refused.value.fault is Fault.FULL
    with pytest.raises(StoreUnavailable, match="written"):
        await One(store).commit(a_commit())
    assert (await read(store)).committed_ids == ()
    assert await store.renew_leadership() is True
    assert await One(store).finish(a_finish("r2")) is OK
    await operator.config_set("maxmemory", "0")
    assert await One(store).commit(a_commit()) is OK
    await end_everything(store)


async def test_a_full_server_gets_a_new_leader_under_which_requests_end(
    store: Store, own_server: EmbeddedServer, operator: redis_client.Redis
) -> None:
    await accept(store, a_request("r1"), a_request("r2"))
    await store.resign()
    await operator.config_set("maxmemory", "1")
    other = Store(own_server.url, "main", timeout_s=1.0)

    assert await other.acquire_leadership(owner="other:1", lease_s=60) is not None
    assert await One(other).finish(a_finish("r2")) is OK

    await operator.config_set("maxmemory", "0")
    await end_everything(other)
    await other.close()


async def test_a_read_only_server_is_unavailable(store: Store, operator: redis_client.Redis) -> None:
    """The server is a replica after a failover that the client has not followed."""
    await accept(store, a_request())
    await operator.replicaof("127.0.0.1", "1")

    with pytest.raises(StoreUnavailable, match="written") as refused:
        await One(store).finish(a_finish())
    assert refused.value.fault is Fault.READ_ONLY
    await operator.replicaof("NO", "ONE")
    assert await One(store).finish(a_finish()) is OK


async def test_an_emptied_server_fences_its_leader_until_it_has_written_its_working_copy_back(
    store: Store, operator: redis_client.Redis
) -> None:
    await accept(store, a_request("r1"), a_request("r2"))
    await lease(store)
    await One(store).commit(a_commit())
    working_copy, incarnation = await unfinished(store), store.incarnation
    await operator.flushall()  # a server that this test started

    with pytest.raises(Fenced):
        await One(store).commit(a_commit(position=3))
    with pytest.raises(RecordBehind):
        await store.renew_leadership()
    assert await store.reclaim_leadership(newest_sequence=2) is True
    assert store.incarnation != incarnation
    assert await One(store).commit(a_commit(position=3)) is GONE
    assert await One(store).many("restore", working_copy) == [OK, OK]
    assert await One(store).commit(a_commit(position=3)) is OK
    await store.reclaimed()
    assert await One(store).commit(a_commit(position=6)) is OK
    await end_everything(store)


async def test_power_loss_takes_the_newest_commits_and_restoring_brings_them_back(
    own_server: EmbeddedServer, store: Store, operator: redis_client.Redis
) -> None:
    """The file is cut where the last fsync left it; the leader still holds what the record lost."""
    await accept(store, a_request())
    await lease(store)
    await One(store).commit(a_commit())
    await all_written(operator)
    own_server.kill()
    file = commits_file(own_server)
    await start_again(own_server, store)
    await trust_again(store)
    await all_written(operator)
    size = file.stat().st_size
    await One(store).commit(a_commit(position=3, tokens=(14, 15)))
    working_copy = await read(store)
    await all_written(operator)
    own_server.kill()
    os.truncate(file, size + 20)  # in the middle of the last commit
    await start_again(own_server, store)

    assert await store.reclaim_leadership(newest_sequence=1)
    assert (await read(store)).committed_ids == (11, 12, 13)
    assert await One(store).restore(working_copy) is OK
    await store.reclaimed()
    assert await read(store) == working_copy
    await end_everything(store)


async def test_all_keys_of_a_shard_live_in_one_slot_of_a_cluster(tmp_path: Path) -> None:
    settings = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
    with EmbeddedServer(tmp_path / "cluster", settings=settings).start() as server:
        operator = redis_client.Redis.from_url(server.url, protocol=2)
        await operator.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

        async def whole() -> bool:
            return "cluster_state:ok" in str(await operator.execute_command("CLUSTER", "INFO"))

        await wait_until_async(whole, description="the cluster of one is whole")
        store = Store(server.url, "main")
        await store.acquire_leadership(owner="leader:1", lease_s=60)
        await accept(
            store, a_request("{odd} id".replace(" ", "-"), idempotency_key="{k}", tenant="{t}"), a_request()
        )
        await lease(store)
        batch = Batch(store)
        answers = [batch.commit([a_commit(end=End.STOP)]), batch.restore(await unfinished(store))]
        await batch.execute()
        assert [answer.result()[0] for answer in answers] == [OK, ALREADY]
        await end_everything(store)
        assert -1 not in await ttls_ms(operator, [key.decode() for key in await operator.keys("*")])
        await store.close()
        await operator.aclose()


async def test_a_renewal_that_waits_behind_a_reclaim_finds_the_leader_leading(
    own_server: EmbeddedServer, operator: redis_client.Redis
) -> None:
    """There is one connection, so that the second call runs after the first has changed the record."""
    store = Store(own_server.url, "main", max_connections=1)
    await store.acquire_leadership(owner="a:1", lease_s=60)
    epoch = store.epoch
    await operator.flushall()  # a server that this test started

    reclaimed, renewed = await asyncio.gather(
        store.reclaim_leadership(newest_sequence=0), store.renew_leadership()
    )

    assert (reclaimed, renewed) == (True, True)
    assert store.epoch == epoch
    await store.close()


async def test_who_finds_the_record_emptied_and_then_led_by_another_does_not_lead(
    own_server: EmbeddedServer, operator: redis_client.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Store(own_server.url, "main") for _ in range(2))
    assert await first.reclaim_leadership(newest_sequence=0) is False  # it never led
    await first.acquire_leadership(owner="a:1", lease_s=60)
    await operator.flushall()  # a server that this test started
    renew = first.renew_leadership

    async def and_then_the_other_is_faster() -> bool:
        try:
            return await renew()
        except RecordBehind:
            assert await second.acquire_leadership(owner="b:1", lease_s=60)
            raise

    monkeypatch.setattr(first, "renew_leadership", and_then_the_other_is_faster)

    assert await first.acquire_leadership(owner="a:1", lease_s=60) is None
    leader = await first.leader()
    assert leader is not None and leader.owner == "b:1"
    await first.close()
    await second.close()


async def test_a_server_that_still_reads_its_file_is_unavailable_and_says_so(tmp_path: Path) -> None:
    slowly = ("--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024")
    server = EmbeddedServer(tmp_path, settings=slowly).start()
    store = Store(server.url, "main")
    async with redis_client.Redis.from_url(server.url, protocol=2) as operator:
        await operator.mset({f"key-{n}": "x" * 1024 for n in range(1000)})
        await operator.bgrewriteaof()

        async def rewritten() -> bool:
            state = await operator.info("persistence")
            return not (state["aof_rewrite_in_progress"] or state["aof_rewrite_scheduled"])

        await wait_until_async(rewritten, description="the file is one to be read key by key")
    server.kill()
    starting = asyncio.create_task(asyncio.to_thread(server.start))
    faults = []
    while not starting.done():
        try:
            await store.ping()
        except StoreUnavailable as unavailable:
            faults.append(unavailable.fault)

    await starting
    assert Fault.LOADING in faults
    await store.ping()
    await store.close()
    server.stop()
