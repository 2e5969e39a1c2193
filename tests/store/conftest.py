"""Real servers, one per kind and test run, and for each test a shard of its own with a leak check at the end."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio as redis_client

from scheduler_svc.store import Store
from scheduler_svc.store.embedded import EmbeddedServer
from tests.store.kit import NOW_S, assert_nothing_leaks, end_everything, forget_claims, new_shard

OpenStore = Callable[..., Store]


KINDS = ["embedded", "redis-server"]
"""Every kind of server that the record is promised to run on."""


def binary_of(kind: str) -> Path | None:
    """None: the packaged one. Skips the test when this machine has no such server."""
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
    """One server for all tests that do it no harm."""
    binary = binary_of(request.param)
    with EmbeddedServer(tmp_path_factory.mktemp(request.param), binary=binary).start() as server:
        yield server


@pytest.fixture(params=KINDS)
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that the test may break."""
    server = EmbeddedServer(tmp_path / "data", binary=binary_of(request.param)).start()
    yield server
    server.stop()


@pytest.fixture
async def client(server: EmbeddedServer) -> AsyncIterator[redis_client.Redis]:
    """The operator's view, past the store."""
    client = redis_client.Redis.from_url(server.url, protocol=2)
    yield client
    await client.aclose()


@pytest.fixture
async def open_store(server: EmbeddedServer, client: redis_client.Redis) -> AsyncIterator[OpenStore]:
    """Opens any number of stores over the test's own shard; at the end all requests end and no key may outlive them."""
    shard = new_shard()
    opened: list[Store] = []

    def open_one(**settings: Any) -> Store:
        store = Store.open(server.url, shard, **({"clock": lambda: NOW_S} | settings))
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
    """The leader's."""
    store = open_store()
    assert await store.acquire_leadership(owner="leader:1", lease_s=60) is not None
    return store
