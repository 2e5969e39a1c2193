"""A real Valkey for the folder, a fresh shard for each test."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvloop

from scheduler_svc.store.embedded import EmbeddedServer
from tests.services.scheduler.peers import SchedulerUnderTest, start_scheduler

_SHARDS = itertools.count()


@pytest.fixture(scope="package")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """Return the policy of the service's own loop: its transports differ from those of asyncio."""
    return uvloop.EventLoopPolicy()


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("valkey")).start() as server:
        yield server


@pytest.fixture
def shard() -> str:
    return f"t{next(_SHARDS)}"


StartScheduler = Callable[..., Awaitable[SchedulerUnderTest]]


@pytest.fixture
async def start(valkey: EmbeddedServer, shard: str) -> AsyncIterator[StartScheduler]:
    """Start schedulers of this test's shard; all are ended with the test."""
    started: list[SchedulerUnderTest] = []

    async def begin(*, lead: bool = True, **overrides: Any) -> SchedulerUnderTest:
        scheduler = await start_scheduler(valkey.url, shard=shard, **overrides)
        started.append(scheduler)
        if lead:
            await scheduler.wait_leading()
        return scheduler

    yield begin
    for scheduler in started:
        await scheduler.crash()


@pytest.fixture
async def scheduler(start: StartScheduler) -> SchedulerUnderTest:
    return await start()
