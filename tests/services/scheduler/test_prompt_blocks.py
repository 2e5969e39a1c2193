"""A scheduler learns over the real links which prompt blocks requests begin with and workers hold."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from laps_sd.contract.prompt_blocks import (
    BLOCK_TOKENS,
    MOST_CACHED_BLOCKS,
    NAME_BYTES,
    most_cached,
    name_blocks,
)
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from scheduler_svc import metrics
from scheduler_svc.core.events import CacheChanged, Event, WorkerUp
from tests.services.scheduler.conftest import StartScheduler
from tests.services.scheduler.peers import SchedulerUnderTest, WorkerPeer, gateway, worker

PROMPT = tuple(range(2 * BLOCK_TOKENS + 1))
BLOCKS = name_blocks(PROMPT, "acme")


def known_blocks(scheduler: SchedulerUnderTest, request_id: str) -> bytes:
    """Return the names that the core has received with a request."""
    loop = scheduler.leadership.loop
    assert loop is not None
    return loop.working_copy.live[request_id].facts.prompt_blocks


class TestOfRequests:
    @pytest.mark.parametrize(
        ("blocks", "said"),
        [
            (bytes(NAME_BYTES + 1), "must hold 8 bytes for each block, not 9 in all"),
            (bytes(3 * NAME_BYTES), "must name at most 2 blocks, not 3"),
        ],
        ids=["not whole", "more than the prompt has"],
    )
    async def test_names_that_no_gateway_sends_are_refused_by_field(
        self, scheduler: SchedulerUnderTest, blocks: bytes, said: str
    ) -> None:
        async with gateway(scheduler.address) as client:
            refused = (await client.submit("r1", prompt=PROMPT, prompt_blocks=blocks)).refused

            assert refused.reason == gateway_pb.SubmitRefused.REASON_INVALID
            assert refused.detail.startswith("prompt_blocks")
            assert said in refused.detail
            assert await scheduler.store.unfinished_ids() == []

    async def test_a_salt_has_the_length_of_a_name(self, scheduler: SchedulerUnderTest) -> None:
        async with gateway(scheduler.address) as client:
            refused = (await client.submit("r1", cache_salt="s" * 257)).refused

            assert refused.reason == gateway_pb.SubmitRefused.REASON_INVALID
            assert refused.detail.startswith("specification.cache_salt")

    async def test_every_leader_knows_them(self, start: StartScheduler) -> None:
        first = await start(reattach_grace_s=60.0)
        async with gateway(first.address) as client:
            await client.submit("named", prompt=PROMPT, prompt_blocks=BLOCKS)
            await client.submit("of-an-earlier-gateway", prompt=PROMPT, submission_id=2)

            assert known_blocks(first, "named") == BLOCKS
            assert known_blocks(first, "of-an-earlier-gateway") == b""
            await first.crash()
        second = await start(reattach_grace_s=60.0)

        assert known_blocks(second, "named") == BLOCKS
        assert known_blocks(second, "of-an-earlier-gateway") == b""


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Return what the core receives, as turns end."""
    received: list[Event] = []
    count = metrics.observe_turn

    def observe_turn(events: Iterable[Event]) -> tuple[int, int, int]:
        received.extend(events)
        return count(events)

    monkeypatch.setattr(metrics, "observe_turn", observe_turn)
    return received


def changes(events: list[Event]) -> list[CacheChanged]:
    return [event for event in events if isinstance(event, CacheChanged)]


A, B, C = (bytes([number]) * NAME_BYTES for number in (1, 2, 3))


async def report(gpu: WorkerPeer, *reports: tuple[bytes, bytes]) -> None:
    """Report rounds after which the cache holds, and no longer holds, these blocks."""
    numbered = []
    for added, removed in reports:
        gpu.number += 1
        numbered.append(worker_pb.RoundReport(number=gpu.number, cached_blocks=added, evicted_blocks=removed))
    await gpu.send_reports(*numbered)
    await gpu.acknowledged(gpu.number)


class TestOfWorkers:
    async def test_a_hello_has_all_that_a_cache_holds(
        self, scheduler: SchedulerUnderTest, events: list[Event]
    ) -> None:
        async with worker(scheduler.address, cached_blocks=A + B) as gpu:
            await report(gpu, (b"", b""))
        async with worker(scheduler.address, cached_blocks=B) as gpu:  # it dials again
            await report(gpu, (b"", b""))

        assert [event.cached_blocks for event in events if isinstance(event, WorkerUp)] == [A + B, B]
        assert changes(events) == [], "a worker that reports no change"

    @pytest.mark.parametrize(
        ("blocks", "said"),
        [
            (bytes(NAME_BYTES + 1), "must hold 8 bytes for each block, not 9 in all"),
            (bytes(6 * NAME_BYTES), "must name at most 5 blocks, not 6"),
        ],
        ids=["not whole", "more than it has room for"],
    )
    async def test_a_hello_that_makes_no_sense_is_refused_by_field(
        self, scheduler: SchedulerUnderTest, blocks: bytes, said: str
    ) -> None:
        async with worker(scheduler.address, target_blocks=5, cached_blocks=blocks) as gpu:
            refused = await gpu.next("refused")

        assert refused.reason == worker_pb.WorkerRefused.REASON_CAPACITY
        assert refused.detail.startswith("cached_blocks")
        assert said in refused.detail

    async def test_changes_reach_the_core_in_their_order(
        self, scheduler: SchedulerUnderTest, events: list[Event]
    ) -> None:
        async with worker(scheduler.address) as gpu:
            await report(gpu, (A + B, b""), (b"", b""), (C, A), (b"", B), (B, b""))

        assert changes(events) == [
            CacheChanged("w1", A + B, b""),
            CacheChanged("w1", C, A),
            CacheChanged("w1", b"", B),
            CacheChanged("w1", B, b""),
        ]

    async def test_names_in_a_report_that_are_not_whole_or_too_many_count_as_none(
        self, scheduler: SchedulerUnderTest, events: list[Event]
    ) -> None:
        too_many = bytes((MOST_CACHED_BLOCKS + 1) * NAME_BYTES)
        async with worker(scheduler.address) as gpu:
            await report(gpu, (A + b"x", B), (too_many, b""), (C, too_many))

        assert changes(events) == [CacheChanged("w1", b"", B), CacheChanged("w1", C, b"")]


def test_a_worker_has_room_for_the_ends_of_so_many_blocks() -> None:
    assert most_cached(100, 16) == 100, "each may hold the end of another prompt's block"
    assert most_cached(100, 64) == 100
    assert most_cached(100, 65) == 200
    assert most_cached(100, 256) == 400
    assert most_cached(2**32 - 1, 16) == MOST_CACHED_BLOCKS
