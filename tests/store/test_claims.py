"""One idempotency key belongs to one shard, for any set and order of shards, before and after one is
added."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis.asyncio as redis_client

from laps_sd.contract.ends import End
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.keys import CLAIM_SLACK_S, CLAIM_TTL_S
from scheduler_svc.store.records import Limits, SubmitStatus, TransitionStatus
from scheduler_svc.store.scripts import MAX_ENTRIES
from scheduler_svc.store.store import Store
from tests.store.kit import NOW_S, One, a_commit, a_finish, a_request, accept, forget_claims, new_shard

OpenShard = Callable[..., Any]
TTL_S = 60.0


@pytest.fixture
async def open_shard(server: EmbeddedServer, client: redis_client.Redis) -> AsyncIterator[OpenShard]:
    """Return leaders of shards over the same record."""
    opened: list[Store] = []

    async def open_one(**settings: Any) -> Store:
        store = Store(
            server.url, new_shard(), **({"clock": lambda: NOW_S, "finished_ttl_s": TTL_S} | settings)
        )
        opened.append(store)
        await store.acquire_leadership(owner="a:1", lease_s=60)
        return store

    yield open_one
    await forget_claims(client)
    for store in opened:
        await store.close()


def keyed(request_id: str, **changes: Any) -> Any:
    return a_request(request_id, **({"idempotency_key": "k", "body_hash": "b"} | changes))


async def claims(client: redis_client.Redis) -> list[str]:
    return [key.decode() async for key in client.scan_iter(match="laps-sd:claim:*")]


async def test_the_shard_that_was_asked_first_decides(open_shard: OpenShard) -> None:
    first, second = await open_shard(), await open_shard()
    await accept(first, keyed("r1"))

    [result] = await second.submit([keyed("r2")])

    assert (result.status, result.shard) == (SubmitStatus.ELSEWHERE, first.keys.shard)
    assert await second.read("r2") is None
    [there] = await first.submit([keyed("r3")])
    assert (there.status, there.request_id) == (SubmitStatus.ATTACHED, "r1")


async def test_only_that_key_of_that_tenant_is_taken(open_shard: OpenShard) -> None:
    first, second = await open_shard(), await open_shard()
    await accept(first, keyed("r1"))

    await accept(second, keyed("r2", idempotency_key="k2"), keyed("r3", tenant="other"), a_request("r4"))


async def test_in_one_call_the_others_are_taken_in_and_answers_keep_their_order(
    open_shard: OpenShard,
) -> None:
    first, second = await open_shard(), await open_shard()
    await accept(first, keyed("r1"))

    results = await second.submit([a_request("r2"), keyed("r3"), a_request("r4")])

    assert [result.status.value for result in results] == ["accepted", "elsewhere", "accepted"]
    assert [result.request_id for result in results] == ["r2", "r3", "r4"]


async def test_a_refused_submission_leaves_the_key_to_others(open_shard: OpenShard) -> None:
    full, roomy = await open_shard(limits=Limits(max_requests=0)), await open_shard()
    [refused] = await full.submit([keyed("r1")])
    assert refused.status is SubmitStatus.QUEUE_FULL

    await accept(roomy, keyed("r2"))


async def test_what_was_to_be_accepted_only_if_known_leaves_the_key_to_others(open_shard: OpenShard) -> None:
    first, second = await open_shard(), await open_shard()
    await accept(first, keyed("r1"))
    news = [keyed("r1"), keyed("r2"), keyed("r3", idempotency_key="k2")]

    results = await first.submit(news, only_known={"r1", "r2", "r3"})

    assert [(result.status.value, result.request_id) for result in results] == [
        ("accepted", "r1"),
        ("attached", "r1"),
        ("unknown", "r3"),
    ]
    assert await first.read("r3") is None
    await accept(second, keyed("r4", idempotency_key="k2"))


async def test_a_refusal_does_not_take_the_key_from_a_newer_submission(
    open_shard: OpenShard, client: redis_client.Redis
) -> None:
    """A leader is paused between the refusal and the release of the key, while its successor accepts the
    key."""
    paused, other = await open_shard(), await open_shard()
    await paused.claims.claim([keyed("r1")])
    await accept(paused, keyed("r2"))

    await paused.claims.release([("r1", paused.claims.key_of(keyed("r1")))])

    [result] = await other.submit([keyed("r3")])
    assert result.status is SubmitStatus.ELSEWHERE


async def test_the_claim_stays_where_the_record_refuses_the_end(
    open_shard: OpenShard, client: redis_client.Redis
) -> None:
    """Otherwise another shard could take the key of a request that goes on."""
    store = await open_shard()
    await accept(store, keyed("r1"))
    stale = a_commit("r1", lease_epoch=7, end=End.STOP)
    assert await One(store).commit(stale) is TransitionStatus.STALE
    await store.settle_claims()

    [claim] = await claims(client)
    assert await client.ttl(claim) > TTL_S + CLAIM_SLACK_S


async def test_the_claim_outlives_the_ended_request_a_little(
    open_shard: OpenShard, client: redis_client.Redis
) -> None:
    store = await open_shard()
    await accept(store, keyed("r1"))
    [claim] = await claims(client)
    assert TTL_S + CLAIM_SLACK_S < await client.ttl(claim) <= CLAIM_TTL_S

    await One(store).finish(a_finish("r1"))
    await store.settle_claims()

    assert await client.pttl(store.keys.idempotency("acme", "k")) < await client.pttl(claim)
    assert await client.ttl(claim) <= TTL_S + CLAIM_SLACK_S


async def test_so_does_each_claim_of_many_that_ended_together(
    open_shard: OpenShard, client: redis_client.Redis
) -> None:
    store = await open_shard()
    names = [f"r{number}" for number in range(MAX_ENTRIES + 1)]
    await accept(store, *(keyed(name, idempotency_key=name) for name in names))
    await One(store).many("finish", [a_finish(name) for name in names])
    await store.settle_claims()

    remaining_s = [await client.ttl(claim) for claim in await claims(client)]
    assert len(remaining_s) == len(names)
    assert max(remaining_s) <= TTL_S + CLAIM_SLACK_S


@pytest.mark.parametrize(
    ("body_hash", "status"), [("b", SubmitStatus.ATTACHED), ("other", SubmitStatus.CONFLICT)]
)
async def test_a_submission_with_the_key_of_an_ended_request_does_not_prolong_the_claim_by_days(
    open_shard: OpenShard, client: redis_client.Redis, body_hash: str, status: SubmitStatus
) -> None:
    store = await open_shard()
    await accept(store, keyed("r1"))
    await One(store).finish(a_finish("r1"))
    await store.settle_claims()
    [result] = await store.submit([keyed("r2", body_hash=body_hash)])
    assert (result.status, result.request_id) == (status, "r1")
    await store.settle_claims()

    [claim] = await claims(client)
    assert await client.ttl(claim) <= TTL_S + CLAIM_SLACK_S


async def test_a_submission_that_comes_again_after_the_end_does_not_prolong_the_claim_either(
    open_shard: OpenShard, client: redis_client.Redis
) -> None:
    """Its gateway did not get the answer. The leader answers from the record."""
    store = await open_shard()
    await accept(store, keyed("r1"))
    await One(store).finish(a_finish("r1"))
    await store.settle_claims()
    await accept(store, keyed("r1"))
    assert list(await store.read_all(["r1"])) == ["r1"]
    await store.settle_claims()

    [claim] = await claims(client)
    assert await client.ttl(claim) <= TTL_S + CLAIM_SLACK_S
    assert not store.claims.expires_with


async def test_a_submission_with_the_key_of_an_unfinished_request_leaves_the_claim(
    open_shard: OpenShard, client: redis_client.Redis
) -> None:
    store = await open_shard()
    await accept(store, keyed("r1"))
    [result] = await store.submit([keyed("r2")])
    assert result.status is SubmitStatus.ATTACHED
    await store.settle_claims()

    [claim] = await claims(client)
    assert await client.ttl(claim) > TTL_S + CLAIM_SLACK_S


async def test_a_key_that_is_used_anew_is_not_let_go_for_the_request_before(
    open_shard: OpenShard, client: redis_client.Redis
) -> None:
    store = await open_shard()
    await accept(store, keyed("r1"))
    await One(store).finish(a_finish("r1"))
    await client.delete(store.keys.idempotency("acme", "k"))  # expired
    await accept(store, keyed("r2"))
    await store.settle_claims()

    [claim] = await claims(client)
    assert await client.ttl(claim) > TTL_S + CLAIM_SLACK_S


async def test_what_was_accepted_before_the_record_was_emptied_claims_its_key_again(
    open_shard: OpenShard, client: redis_client.Redis
) -> None:
    first, second = await open_shard(), await open_shard()
    await accept(first, keyed("r1"))
    await forget_claims(client)
    await first.claim_again([keyed("r1")])

    [result] = await second.submit([keyed("r2")])

    assert result.status is SubmitStatus.ELSEWHERE


async def test_a_claim_is_of_bounded_size_and_in_no_slot_of_a_clients_choice(
    open_shard: OpenShard, client: redis_client.Redis
) -> None:
    store = await open_shard()
    await accept(store, keyed("r1", idempotency_key="{x}" + "y" * 125))

    [claim] = await claims(client)
    assert "{" not in claim
    assert len(claim) == len("laps-sd:claim:") + 32
