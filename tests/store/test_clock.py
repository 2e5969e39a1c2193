"""The clock of the record: measured at a takeover, followed slowly, never set back."""

from __future__ import annotations

import time

import pytest
import redis.asyncio as redis_client

from scheduler_svc.store.clock import MOST_FOLLOWED_S, RecordClock
from tests.store.conftest import OpenStore
from tests.store.test_rights import documented_rule


class Local:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_leader_begins_with_the_time_of_the_server() -> None:
    local = Local()
    clock = RecordClock(local)
    assert clock() == 1000.0
    began_s = clock.local_s()
    local.now_s += 0.2  # the server answered in the middle

    assert clock.off_by_s(910.1, began_s) == pytest.approx(-90.0)
    clock.set(-90.0)
    assert clock() == pytest.approx(910.2)


@pytest.mark.parametrize("off_by_s", [-60.0, 60.0])
def test_it_follows_by_a_little_at_a_time(off_by_s: float) -> None:
    local = Local()
    clock = RecordClock(local)
    clock.follow(off_by_s)
    local.now_s += 1.0

    assert clock() == pytest.approx(1001.0 + (MOST_FOLLOWED_S if off_by_s > 0 else -MOST_FOLLOWED_S))


def test_it_stands_still_rather_than_going_back() -> None:
    local = Local()
    clock = RecordClock(local)
    before_s = clock()
    clock.follow(-0.05)
    assert clock() == before_s
    local.now_s += 0.04
    assert clock() == before_s
    local.now_s += 0.02
    assert clock() == pytest.approx(1000.01)


@pytest.mark.parametrize("skew_s", [-90.0, 0.0, 90.0])
async def test_the_difference_is_measured_at_the_server(open_store: OpenStore, skew_s: float) -> None:
    store = open_store(clock=lambda: time.time() + skew_s)
    off_by_s = await store.measure_clock()

    assert off_by_s == pytest.approx(-skew_s, abs=5.0)
    store.clock.set(off_by_s)
    assert store.clock() == pytest.approx(time.time(), abs=5.0)


async def test_without_the_right_to_run_info_the_clock_stays_as_it_is(
    open_store: OpenStore, client: redis_client.Redis
) -> None:
    assert "+info" in documented_rule()
    await client.execute_command("ACL", "SETUSER", "default", "-info")
    try:
        assert await open_store(clock=lambda: 5.0).measure_clock() == 0.0
    finally:
        await client.execute_command("ACL", "SETUSER", "default", "+@all")
