"""Real servers, one per kind and test run. Each test has its own shard, with a leak check at the end."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis_client

from scheduler_svc.store.embedded import EmbeddedServer
from scheduler_svc.store.store import Store
from tests.store.kit import NOW_S, assert_nothing_leaks, end_everything, forget_claims, new_shard

OpenStore = Callable[..., Store]


KINDS = ["embedded", "redis-server"]
"""Every kind of server that the record is promised to run on."""


def binary_of(kind: str) -> Path | None:
    """Return the path of the server program, or None for the packaged one. Skip the test when this machine
    has no such server."""
    if kind == "embedded":
        return None
    found = shutil.which(kind)
    if found is None:
        pytest.skip(f"there is no {kind} on the PATH")
    return Path(found)


@pytest.fixture(scope="session", params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedServer]:
    """Return the server that all non-destructive tests share."""
    binary = binary_of(request.param)
    with EmbeddedServer(tmp_path_factory.mktemp(request.param), binary=binary).start() as server:
        yield server


@pytest.fixture(params=KINDS)
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """Return a server that the test may break."""
    server = EmbeddedServer(tmp_path / "data", binary=binary_of(request.param)).start()
    yield server
    server.stop()


@pytest.fixture
async def client(server: EmbeddedServer) -> AsyncIterator[redis_client.Redis]:
    """Return a client with the operator's view, without the store."""
    client = redis_client.Redis.from_url(server.url, protocol=2)
    yield client
    await client.aclose()


@pytest.fixture
async def open_store(server: EmbeddedServer, client: redis_client.Redis) -> AsyncIterator[OpenStore]:
    """Return a factory of stores over the test's shard; at the end all requests end, and keys must expire."""
    shard = new_shard()
    opened: list[Store] = []

    def open_one(**settings: Any) -> Store:
        store = Store(server.url, shard, **({"clock": lambda: NOW_S} | settings))
        opened.append(store)
        return store

    yield open_one

    last = open_one()
    await client.delete(last.keys.leader(), last.keys.server(), last.keys.schema_version())
    await last.acquire_leadership(owner="the end:1", lease_s=60)
    await end_everything(last)
    await last.settle_claims()
    await assert_nothing_leaks(client, last.keys.prefix)
    await forget_claims(client)
    for store in opened:
        await store.close()


@pytest.fixture
async def store(open_store: OpenStore) -> Store:
    """Return the store of the leader."""
    store = open_store()
    assert await store.acquire_leadership(owner="leader:1", lease_s=60) is not None
    return store
