"""The store finds its server: in a cluster, with sentinels, and after a failover. All with real servers on
loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions as redis_errors
from redis.crc import key_slot

from scheduler_svc.store import embedded
from scheduler_svc.store.batch import Batch
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.errors import Fault, Fenced, RecordBehind, StoreUnavailable
from scheduler_svc.store.keys import CLAIM_SLACK_S
from scheduler_svc.store.records import SubmitStatus
from scheduler_svc.store.redis_url import RedisUrl, parse_redis_url
from scheduler_svc.store.servers import MAX_ATTEMPTS, SentinelUser, Servers
from scheduler_svc.store.store import FINISHED_TTL_S, Store
from scheduler_svc.store.transport import AWAY_S
from tests.helpers import free_port, wait_until_async
from tests.store.kit import ALREADY, OK, One, a_commit, a_finish, a_request, accept, lease, read
from tests.store.servers import (
    SLOTS,
    Sentinel,
    ask,
    in_step,
    key_claimed_at,
    primary_and_replica,
    promote,
    shard_at,
    stopped,
    take_no_node_for_dead,
    three_masters,
)
from tests.store.test_rights import documented_rule


class TestTheUrl:
    @pytest.mark.parametrize(
        ("text", "found"),
        [
            ("redis://h", RedisUrl("redis://h:6379/0", (("h", 6379),))),
            ("rediss://u:p%40@h:1/2", RedisUrl("rediss://h:1/2", (("h", 1),), "", "u", "p@")),
            ("redis://a:1,b:2/3", RedisUrl("redis://a:1/3", (("a", 1), ("b", 2)))),
            ("redis://[::1]:7/0", RedisUrl("redis://[::1]:7/0", (("::1", 7),))),
            (
                "redis+sentinel://a,b:2/main/1",
                RedisUrl("redis://a:26379/1", (("a", 26379), ("b", 2)), "main"),
            ),
            ("unix://u:p@/run/redis", RedisUrl("unix:///run/redis", (), "", "u", "p")),
        ],
    )
    def test_names_servers_or_sentinels(self, text: str, found: RedisUrl) -> None:
        assert parse_redis_url(text) == found

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "h:1",
            "http://h",
            "redis://h:0",
            "redis://h:x",
            "redis://h:1,b:99999",
            "redis://h/x",
            "redis+sentinel://h:1",
        ],
    )
    def test_is_refused_when_it_names_none(self, text: str) -> None:
        with pytest.raises(ValueError):
            parse_redis_url(text)


# ---- a cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EmbeddedServer]]:
    with three_masters(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[EmbeddedServer, EmbeddedServer]]:
    with primary_and_replica(tmp_path) as servers:
        yield servers


Open = Callable[..., Awaitable[Store]]


@pytest.fixture
async def open_store() -> AsyncIterator[Open]:
    """Return a factory of leaders."""
    opened: list[Store] = []

    async def open_one(*servers: EmbeddedServer, shard: str = "main", **settings: Any) -> Store:
        hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
        store = Store(f"redis://{hosts}", shard, **settings)
        opened.append(store)
        await store.acquire_leadership(owner="a:1", lease_s=60)
        assert store.epoch is not None
        return store

    yield open_one
    for store in opened:
        await store.close()


class TestACluster:
    async def test_any_node_leads_to_the_shard_and_each_shard_is_in_one_slot(
        self, cluster: list[EmbeddedServer], open_store: Open
    ) -> None:
        for node in range(3):
            shard = shard_at(node)
            store = await open_store(cluster[0], cluster[1], shard=shard)
            await accept(store, a_request("r1", idempotency_key=f"of {shard}"), a_request("r2"))
            await lease(store)
            assert await One(store).commit(a_commit()) is OK
            await One(store).finish(a_finish())
            await store.save_priors(b"{}")
            await store.settle_claims()

            assert (await read(store)).committed_ids == (11, 12, 13)
            assert await store.unfinished_ids() == ["r2"]
            for other in range(3):
                keys = await ask(cluster[other], "KEYS", f"laps-sd:{{{shard}}}:*")
                assert bool(keys) == (other == node)

    async def test_a_key_is_claimed_across_nodes(
        self, cluster: list[EmbeddedServer], open_store: Open
    ) -> None:
        """There are sixteen keys, so that their claims lie on every node."""
        first = await open_store(cluster[0], shard=shard_at(0, "first"))
        second = await open_store(cluster[0], shard=shard_at(1, "second"))
        keyed = [a_request(f"k{n}", idempotency_key=f"key-{n}") for n in range(16)]
        await accept(first, *keyed)

        results = await second.submit(keyed)

        assert {result.status for result in results} == {SubmitStatus.ELSEWHERE}
        assert {result.shard for result in results} == {first.keys.shard}
        counts = [len(await ask(server, "KEYS", "laps-sd:claim:*")) for server in cluster]
        assert all(counts)

    async def test_a_slot_that_moves_is_followed_and_the_leader_makes_sure_of_the_record(
        self, cluster: list[EmbeddedServer], open_store: Open
    ) -> None:
        shard = next(
            s for s in (f"moving-{n}" for n in range(1000)) if key_slot(f"{{{s}}}".encode()) * 3 // SLOTS == 0
        )
        store = await open_store(cluster[0], shard=shard)
        await accept(store, a_request())
        await lease(store)

        await self._move(cluster, shard)

        with pytest.raises(Fenced):  # another server: it could lack data
            await accept(store, a_request("r2"))
        with pytest.raises(RecordBehind):
            await store.renew_leadership()
        assert await store.reclaim_leadership(newest_sequence=1)
        assert await One(store).commit(a_commit()) is OK
        assert (await read(store)).committed_ids == (11, 12, 13)

    async def test_nodes_that_send_each_to_the_other_are_given_up(
        self, cluster: list[EmbeddedServer], open_store: Open
    ) -> None:
        shard = shard_at(0, "contested")
        store = await open_store(cluster[0], shard=shard)
        slot = key_slot(f"{{{shard}}}".encode())
        mine, other = [(await ask(server, "CLUSTER", "MYID")).decode() for server in cluster[:2]]
        await ask(cluster[0], "DEL", *await ask(cluster[0], "CLUSTER", "GETKEYSINSLOT", slot, 1000))
        await ask(
            cluster[0], "CLUSTER", "SETSLOT", slot, "NODE", other
        )  # in its own view still a slot of the first
        stranger = Store(f"redis://127.0.0.1:{cluster[1].port}", shard)

        with pytest.raises(StoreUnavailable, match=r"keys have moved to 127\.0\.0\.1:"):
            await stranger.leader()
        await ask(cluster[0], "CLUSTER", "SETSLOT", slot, "NODE", mine)
        assert await stranger.leader() is None
        assert await store.acquire_leadership(owner="a:1", lease_s=60)
        await stranger.close()

    async def test_another_node_that_does_not_answer_delays_only_keys_whose_claims_it_has(
        self, cluster: list[EmbeddedServer], open_store: Open
    ) -> None:
        now_s = 0.0
        await take_no_node_for_dead(cluster)
        store = await open_store(
            cluster[0], shard=shard_at(0, "beside"), timeout_s=0.5, monotonic=lambda: now_s
        )
        there, ended, lost = (
            a_request(name, idempotency_key=key_claimed_at(1, name)) for name in ("there", "ended", "lost")
        )
        here = a_request("here", idempotency_key=key_claimed_at(0, "here"))
        await accept(store, ended, lost)
        await One(store).finish(a_finish("ended"))
        claim_of = {one.request_id: store.keys.claim(store.claims.key_of(one)) for one in (ended, lost)}
        await ask(cluster[1], "DEL", claim_of["lost"])
        with stopped(cluster[1]):
            results = await store.submit([there, here, a_request("r2")])
        assert [result.status.value for result in results] == ["unclaimed", "accepted", "accepted"]

        await store.settle_claims()
        await store.claim_again([lost])
        now_s = AWAY_S - 0.01  # it is left in peace, though it would answer
        [again] = await store.submit([there])
        assert (again.status, again.error) == (
            SubmitStatus.UNCLAIMED,
            "the record did not answer within 0.5 s",
        )
        now_s = AWAY_S
        await accept(store, there)
        await store.settle_claims()
        assert await ask(cluster[1], "TTL", claim_of["ended"]) <= FINISHED_TTL_S + CLAIM_SLACK_S
        assert await ask(cluster[1], "GET", claim_of["lost"]) == f"{store.keys.shard} lost".encode()

    async def test_a_node_that_is_down_is_asked_again(self, cluster: list[EmbeddedServer]) -> None:
        await take_no_node_for_dead(cluster)
        cluster[0].kill()
        store = Store(f"redis://127.0.0.1:{cluster[1].port}", shard_at(0))

        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await store.ping()
        cluster[0].start()
        await store.ping()
        await store.close()

    async def test_a_cluster_that_serves_no_slot_is_unavailable(self, tmp_path: Path) -> None:
        settings = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
        with EmbeddedServer(tmp_path, settings=settings).start() as server:
            store = Store(server.url, "main")
            with pytest.raises(StoreUnavailable, match="Hash slot not served") as refused:
                await store.leader()
            assert refused.value.fault is Fault.OTHER
            await store.close()

    async def _move(self, cluster: list[EmbeddedServer], shard: str) -> None:
        source, target = cluster[0], cluster[2]
        slot = key_slot(f"{{{shard}}}".encode())
        ids = [(await ask(server, "CLUSTER", "MYID")).decode() for server in (source, target)]
        await ask(target, "CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        await ask(source, "CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        keys = await ask(source, "CLUSTER", "GETKEYSINSLOT", slot, 1000)
        await ask(source, "MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        for server in (target, source, cluster[1]):
            await ask(server, "CLUSTER", "SETSLOT", slot, "NODE", ids[1])


@pytest.fixture
def cluster_without_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EmbeddedServer]]:
    """Return a cluster whose nodes name only the port of another one: its host is that of the node itself."""
    host = "127.0.0.2"
    monkeypatch.setattr(embedded, "HOST", host)
    settings = ("--cluster-preferred-endpoint-type", "unknown-endpoint")
    with three_masters(tmp_path, host, settings) as servers:
        yield servers


async def test_a_node_that_names_no_host_means_its_own(cluster_without_names: list[EmbeddedServer]) -> None:
    store = Store(cluster_without_names[0].url, shard_at(1))
    assert await store.acquire_leadership(owner="a:1", lease_s=60)

    await accept(
        store, *(a_request(f"r{node}", idempotency_key=key_claimed_at(node, "k")) for node in range(3))
    )

    await store.close()


# ---- addresses


@contextlib.contextmanager
def a_port(*, answers: bool) -> Iterator[tuple[int, list[int]]]:
    """Yield a port that sends no reply or closes every connection at once, and a list that grows by one entry
    for each in the second case."""
    met: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_all() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, address = listener.accept()
                    met.append(address[1])
                    connection.close()

        thread = threading.Thread(target=close_all)
        if answers:
            thread.start()
        yield listener.getsockname()[1], met
        listener.shutdown(socket.SHUT_RDWR)
    if answers:
        thread.join()


async def test_an_address_that_is_named_twice_is_tried_once() -> None:
    with a_port(answers=True) as (port, met):
        store = Store(f"redis://127.0.0.1:{port},127.0.0.1:{port}", "main")
        with pytest.raises(StoreUnavailable):
            await store.ping()
        assert len(met) == 1
        await store.close()


async def test_the_addresses_of_the_url_outlive_any_number_of_others(tmp_path: Path) -> None:
    """A cluster has moved from node to node, and back."""
    with EmbeddedServer(tmp_path).start() as server:
        url = parse_redis_url(f"redis://127.0.0.1:{server.port}")
        servers = Servers(url, probe_key="key", timeout_s=5, max_connections=1)
        for port in range(1, 5 * MAX_ATTEMPTS):
            servers.prefer(("127.0.0.1", port))

        async def found() -> bool:
            try:
                await servers.pool.get_connection()
            except redis_errors.ConnectionError:
                return False
            return True

        assert [await found() for _ in range(2)] == [False, True]  # after the recently seen ones
        await servers.close()


async def test_a_sentinel_that_says_nothing_costs_one_call(primary: EmbeddedServer, tmp_path: Path) -> None:
    with a_port(answers=False) as (silent, _), Sentinel(tmp_path, primary.port or 0) as sentinel:
        await wait_until_async(sentinel.answers, description="the sentinel listens")
        url = f"redis+sentinel://:{RECORD_PASSWORD}@127.0.0.1:{silent},127.0.0.1:{sentinel.port}/main"
        store = Store(url, "main", timeout_s=0.5)
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await store.ping()

        await store.ping()
        await store.close()


# ---- a primary and its replica


async def doubts(store: Store) -> bool:
    """Return whether the leader has found the other server, and wants to compare."""
    try:
        await store.renew_leadership()
    except RecordBehind:
        return True
    except StoreUnavailable:
        return False
    raise AssertionError("the leader took the replica for the server it wrote to")


REQUESTS = ["r1", "r2", "r3", "r4"]


async def use_connections(store: Store) -> None:
    """Have as many connections as there are requests, none of them in use."""
    await asyncio.gather(*(store.last_sequence() for _ in REQUESTS))


class TestAReplicaThatIsPromoted:
    async def test_is_found_and_gets_what_it_lacks_from_the_leader(
        self, pair: tuple[EmbeddedServer, EmbeddedServer], open_store: Open
    ) -> None:
        primary, replica = pair
        await in_step(replica)
        store = await open_store(replica, primary)  # in the wrong order: a replica is passed over
        await accept(store, a_request())
        await lease(store)
        await wait_until_async(lambda: _holds(replica, store), description="the replica has the request")
        await promote(replica)  # from here on it lacks what is written
        assert await One(store).commit(a_commit()) is OK
        before = await read(store)
        primary.kill()

        await wait_until_async(lambda: doubts(store), description="the leader finds the new primary")
        assert await store.reclaim_leadership(newest_sequence=1)
        assert (await read(store)).committed_ids == ()
        assert (
            await One(store).restore(before) is ALREADY
        )  # what the leader still held went into the request first
        assert (await read(store)).committed_ids == (11, 12, 13)

    async def test_gets_nothing_before_the_leader_has_compared(
        self, pair: tuple[EmbeddedServer, EmbeddedServer], open_store: Open
    ) -> None:
        """A new request would get the number of one that the new primary lacks."""
        primary, replica = pair
        await in_step(replica)
        store = await open_store(primary, replica)
        await promote(replica)
        await accept(store, a_request())
        primary.kill()

        async def refused() -> bool:
            try:
                await accept(store, a_request("r2"))
            except StoreUnavailable:
                return False
            except Fenced:
                return True
            raise AssertionError("it was accepted")

        await wait_until_async(refused, description="the new primary is found")
        assert await store.reclaim_leadership(newest_sequence=1)
        [second] = await store.submit([a_request("r2")])
        assert second.sequence == 2

    async def test_gets_all_writes_though_the_old_primary_wakes_up(
        self, pair: tuple[EmbeddedServer, EmbeddedServer], open_store: Open
    ) -> None:
        """It holds the lease of this leader, and other connections lead to it."""
        primary, replica = pair
        await in_step(replica)
        store = await open_store(primary, replica, timeout_s=0.6)
        await use_connections(store)
        assert primary.pid is not None
        os.kill(primary.pid, signal.SIGSTOP)
        await promote(replica)
        await wait_until_async(lambda: doubts(store), description="the leader finds the new primary")
        assert await store.reclaim_leadership(newest_sequence=0)
        os.kill(primary.pid, signal.SIGCONT)

        await asyncio.gather(*(accept(store, a_request(request_id)) for request_id in REQUESTS))
        assert await ask(primary, "EXISTS", *map(store.keys.request, REQUESTS)) == 0
        assert await ask(replica, "EXISTS", *map(store.keys.request, REQUESTS)) == len(REQUESTS)

    async def test_is_found_by_all_connections_once_one_has_found_it(
        self, pair: tuple[EmbeddedServer, EmbeddedServer], open_store: Open
    ) -> None:
        primary, replica = pair
        await in_step(replica)
        store = await open_store(primary, replica)
        await use_connections(store)
        await promote(replica)
        await ask(primary, "REPLICAOF", "127.0.0.1", replica.port)  # it still answers
        await wait_until_async(lambda: doubts(store), description="the leader finds the new primary")
        assert await store.reclaim_leadership(newest_sequence=0)

        await asyncio.gather(*(accept(store, a_request(request_id)) for request_id in REQUESTS))

    @pytest.mark.parametrize("again_on", ["the same connection", "another connection"])
    async def test_lacks_nothing_that_was_waited_for(
        self, pair: tuple[EmbeddedServer, EmbeddedServer], open_store: Open, again_on: str
    ) -> None:
        primary, replica = pair
        await in_step(replica)
        store = await open_store(primary, replica, wait_replicas=1)
        await accept(store, a_request())
        await lease(store)
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGSTOP)
        batch = Batch(store)
        pending = batch.commit([a_commit()])
        for _ in range(2):  # nothing new is written the second time, and the replica still lacks it
            with pytest.raises(StoreUnavailable, match="only 0 of 1 required replicas have the write"):
                await batch.execute()
            if again_on == "another connection":
                await store.transport.client.connection_pool.disconnect()
        os.kill(replica.pid, signal.SIGCONT)

        async def executed() -> bool:
            try:
                await batch.execute()
            except StoreUnavailable:
                return False
            return True

        await wait_until_async(executed, description="the replica has it")
        primary.kill()
        await promote(replica)
        await wait_until_async(lambda: doubts(store), description="the leader finds the new primary")
        assert await store.reclaim_leadership(newest_sequence=1)

        assert pending.done
        assert (await read(store)).committed_ids == (11, 12, 13)


async def _holds(server: EmbeddedServer, store: Store) -> bool:
    return bool(await ask(server, "EXISTS", store.keys.request("r1")))


@pytest.mark.long
async def test_sentinels_name_the_primary_before_and_after_a_failover(
    pair: tuple[EmbeddedServer, EmbeddedServer], tmp_path: Path
) -> None:
    primary, replica = pair
    await in_step(replica)
    with Sentinel(tmp_path, primary.port or 0) as sentinel:
        store = Store(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/main", "main")
        await wait_until_async(sentinel.knows_a_replica, description="the sentinel has found the replica")
        await store.acquire_leadership(owner="a:1", lease_s=600)
        await accept(store, a_request())
        await wait_until_async(lambda: _holds(replica, store), description="the replica has the request")
        primary.kill()

        await wait_until_async(lambda: doubts(store), description="the leader is led over")
        assert await store.reclaim_leadership(newest_sequence=1)
        assert await store.unfinished_ids() == ["r1"]
        await store.close()


# ---- sentinels that want a password


RECORD_PASSWORD = "of-the-record"
SENTINEL_PASSWORD = "of-the-sentinels"


@pytest.fixture
async def primary(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """Return a primary whose password differs from that of the sentinels."""
    with EmbeddedServer(tmp_path / "primary").start() as server:
        await ask(server, "CONFIG", "SET", "requirepass", RECORD_PASSWORD)
        yield server


def secret(folder: Path, text: str) -> Path:
    path = folder / "secret"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("username", "settings"),
    [
        ("", ("requirepass", SENTINEL_PASSWORD)),
        ("asker", ("user default off\nuser asker", *documented_rule(SENTINEL_PASSWORD, user="asker"))),
    ],
    ids=["a password", "a user with the documented rights"],
)
async def test_sentinels_have_users_of_their_own(
    primary: EmbeddedServer, tmp_path: Path, username: str, settings: tuple[str, ...]
) -> None:
    lines = f"sentinel auth-pass main {RECORD_PASSWORD}\n{' '.join(settings)}\n"
    with Sentinel(tmp_path, primary.port or 0, lines) as sentinel:
        await wait_until_async(sentinel.answers, description="the sentinel listens")
        url = f"redis+sentinel://:{RECORD_PASSWORD}@127.0.0.1:{sentinel.port}/main"
        user = SentinelUser(username=username, password_file=secret(tmp_path, SENTINEL_PASSWORD + "\n"))
        store = Store(url, "main", sentinel_user=user)
        await store.ping()
        await store.close()

        elsewhere = Store(f"{url[: -len('/main')]}/other", "main", sentinel_user=user)
        with pytest.raises(StoreUnavailable, match="the sentinels watch no 'other'"):
            await elsewhere.ping()
        await elsewhere.close()

        nobody = Store(url, "main")
        with pytest.raises(StoreUnavailable, match=r"no sentinel names the primary: .*uthenticat"):
            await nobody.ping()
        await nobody.close()

        secret(tmp_path, RECORD_PASSWORD)
        wrong = Store(url, "main", sentinel_user=user)
        with pytest.raises(StoreUnavailable, match="no sentinel names the primary: ") as refused:
            await wrong.ping()
        assert RECORD_PASSWORD not in str(refused.value)
        secret(tmp_path, SENTINEL_PASSWORD)
        await wrong.ping()  # read for each query
        await wrong.close()


async def test_a_password_file_of_the_sentinels_that_is_gone_is_named(
    primary: EmbeddedServer, tmp_path: Path
) -> None:
    user = SentinelUser(password_file=tmp_path / "gone")
    with Sentinel(tmp_path, primary.port or 0) as sentinel:
        await wait_until_async(sentinel.answers, description="the sentinel listens")
        url = f"redis+sentinel://:{RECORD_PASSWORD}@127.0.0.1:{sentinel.port}/main"
        store = Store(url, "main", sentinel_user=user)
        with pytest.raises(StoreUnavailable, match=r"password file .*gone cannot be read: No such file"):
            await store.ping()
        await store.close()
