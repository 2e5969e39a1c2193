"""Builders of requests and events for the tests of the store."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import redis.asyncio as redis_client

from laps_sd.contract.ends import End
from laps_sd.contract.length_features import packed
from scheduler_svc.core.commands import Commit, Finish, Lease, Standing, StoryLine
from scheduler_svc.store.batch import Batch, Pending
from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.records import NewRequest, StoredRequest, TransitionStatus
from scheduler_svc.store.scripts import Call
from scheduler_svc.store.store import Store
from tests.helpers import wait_until_async

OK, ALREADY, STALE, GONE = TransitionStatus

NOW_S = 1_700_000_000.5
"""Time of the stores' clock in tests."""

FEATURES = packed((3, 300, 2**15 - 1))
"""Length features of a request."""
BLOCKS = bytes(range(256 - 16, 256))
"""Names of the two blocks that a prompt starts with."""

STORY = (StoryLine(0.0, "arrived", ""), StoryLine(1.5, "ended", "stop"))

_shards = itertools.count()


def new_shard() -> str:
    """Return the name of a shard that no other test uses."""
    return f"shard-{next(_shards)}"


async def all_written(operator: redis_client.Redis) -> None:
    """Wait until no fsync is under way inside the server: a crash then loses nothing."""

    async def idle() -> bool:
        state = await operator.info("persistence")
        return state["aof_buffer_length"] == 0 and state["aof_pending_bio_fsync"] == 0

    await wait_until_async(idle, description="the append-only file is written")


def commits_file(server: EmbeddedServer) -> Path:
    """Return the file to which commits are appended."""
    return next(server.data_dir.glob("appendonlydir/*.incr.aof"))


def a_request(request_id: str = "r1", **changes: Any) -> NewRequest:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "tenant": "acme",
        "model": "demo",
        "priority": 0,
        "workload_class": "chat",
        "arrival_unix_ms": 1_700_000_000_000,
        "prompt_ids": (5, 6, 7),
        "max_tokens": 10,
        "expected_output_tokens": None,
        "deadline_unix_ms": None,
        "time_limit_ms": None,
        "keep": False,
        "grace_ms": 0,
        "idempotency_key": "",
        "body_hash": f"hash-of-{request_id}",
        "seed": 7,
        "submission": b"\x00\xffsettings",
        "length_features": FEATURES,
        "prompt_blocks": BLOCKS,
    }
    return NewRequest(**(fields | changes))


def a_standing(**changes: Any) -> Standing:
    fields: dict[str, Any] = {
        "rounds": 1,
        "drafts": 1,
        "drafted": 5,
        "accepted": 3,
        "attained_s": 0.25,
        "preemptions": 0,
        "level": 0,
        "score": 1.5,
    }
    return Standing(**(fields | changes))


def a_commit(request_id: str = "r1", **changes: Any) -> Commit:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "lease_epoch": 1,
        "position": 0,
        "tokens": (11, 12, 13),
        "standing": a_standing(),
        "end": None,
        "cut_characters": 0,
        "detail": "",
        "story": (),
    }
    return Commit(**(fields | changes))


def a_finish(request_id: str = "r1", end: End = End.CANCELLED, **changes: Any) -> Finish:
    fields: dict[str, Any] = {"detail": "the client left", "standing": a_standing(), "story": STORY}
    return Finish(request_id, end, **(fields | changes))


class One:
    """Runner of single transitions, each in a batch of its own, that returns the one status."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, verb: str) -> Any:
        async def run(command: Any) -> TransitionStatus:
            return (await self.many(verb, [command]))[0]

        return run

    async def many(self, verb: str, commands: list[Any]) -> list[TransitionStatus]:
        batch = Batch(self._store)
        pending: Pending[list[TransitionStatus]] = getattr(batch, verb)(commands)
        await batch.execute()
        return pending.result()


async def accept(store: Store, *requests: NewRequest) -> None:
    """Submit a request, and assert that it was accepted."""
    results = await store.submit(requests)

    assert {"accepted"} == {result.status.value for result in results}


async def lease(
    store: Store, request_id: str = "r1", worker_id: str = "w1", lease_epoch: int = 1, *, pair: str = "a pair"
) -> None:
    batch = Batch(store)
    answer = batch.lease([Lease(request_id, worker_id, lease_epoch)], pair)
    await batch.execute()
    assert answer.result() == [OK]


@contextlib.contextmanager
def losing_answers(store: Store) -> Iterator[list[Sequence[Call]]]:
    """Lose the answers of the record to what is sent; yield that."""
    run, sent = store.run, list[Sequence[Call]]()

    async def lost(calls: Sequence[Call], *, leading: bool = False) -> list[Any]:
        sent.append(calls)
        await run(calls, leading=leading)
        raise StoreUnavailable("the answer is lost")

    with patch.object(store, "run", lost), contextlib.suppress(StoreUnavailable):
        yield sent


async def take_over(open_store: Callable[..., Store], old: Store) -> Store:
    """Make another process the leader."""
    await old.resign()
    new = open_store()
    assert await new.acquire_leadership(owner="other:1", lease_s=60) is not None
    return new


async def fold(store: Store) -> None:
    """Write everything that only the log holds into the requests' own keys."""
    with patch("scheduler_svc.store.batch.FOLD_AFTER_MS", -1):
        await Batch(store).execute()


async def read(store: Store, request_id: str = "r1") -> StoredRequest:
    found = await store.read(request_id)
    assert found is not None
    return found


async def unfinished(store: Store) -> list[StoredRequest]:
    return [request async for chunk in store.load_unfinished() for request in chunk]


async def end_everything(store: Store) -> None:
    finishes = [a_finish(request.request_id) for request in await unfinished(store)]
    assert {OK}.issuperset(await One(store).many("finish", finishes))


async def ttls_ms(client: redis_client.Redis, keys: Iterable[str]) -> list[int]:
    """Return the time to live of each key; −1: no expiry, −2: no key."""
    return [await client.pttl(key) for key in keys]


async def keys_of(client: redis_client.Redis, prefix: str) -> list[str]:
    """Return every key of a shard."""
    return sorted([key.decode() async for key in client.scan_iter(match=prefix + "*", count=1000)])


async def assert_nothing_leaks(client: redis_client.Redis, prefix: str) -> None:
    """Assert that every remaining key expires, once all requests have ended."""
    keys = await keys_of(client, prefix)
    lasting = [key for key, ttl_ms in zip(keys, await ttls_ms(client, keys), strict=True) if ttl_ms == -1]

    assert lasting == []


async def forget_claims(client: redis_client.Redis) -> None:
    """Return the server's keys of this test: other tests have other shards, and the same idempotency keys."""
    if claims := await keys_of(client, "laps-sd:claim:"):
        await client.delete(*claims)
