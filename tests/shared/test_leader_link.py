"""The search for a leader and the silence of a peer, without a network."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import weakref

import pytest

from laps_sd.service.leader_link import (
    MAX_REFERRALS,
    BackOff,
    Candidates,
    LeaderSearch,
    Liveness,
    PeerSilent,
    Visit,
    named_leader,
    until_first_ends,
    watch,
)

LEADS = Visit(greeted=True)
STANDBY = Visit(greeted=False)


def dial(candidates: Candidates, named: dict[str, str]) -> list[str]:
    """Return the addresses dialled in a round in which schedulers name the given leaders."""
    dialled = []
    while (address := candidates.next_address()) is not None:
        dialled.append(address)
        candidates.refer(named.get(address, ""))
    return dialled


def test_a_referral_is_followed_before_the_next_address() -> None:
    assert dial(Candidates(["a", "b"]), {"a": "c"}) == ["a", "c", "b"]


def test_no_address_is_dialled_twice_in_a_round() -> None:
    assert dial(Candidates(["a", "b", "a"]), {"a": "b", "b": "a"}) == ["a", "b"]


def test_a_chain_of_referrals_has_a_bound() -> None:
    chain = {f"{n}": f"{n + 1}" for n in range(100)}

    dialled = dial(Candidates(["0", "seed"]), chain)

    assert dialled == [*[f"{n}" for n in range(MAX_REFERRALS + 1)], "seed"]


def test_a_known_address_does_not_use_up_a_referral() -> None:
    names = {"a": "a", "b": "a", "c": "a", "d": "a", "e": "a", "f": "g"}

    assert dial(Candidates("abcdef"), names) == [*"abcdefg"]


@pytest.mark.parametrize(
    ("detail", "leader"),
    [
        ("this scheduler does not lead shard s0: ask 10.0.0.7:50052", "10.0.0.7:50052"),
        ("this scheduler does not lead shard s0: ask host-1.a_b.svc:1; it cannot write", "host-1.a_b.svc:1"),
        ("this scheduler does not lead shard s0: ask [fd00::7]:50052", "[fd00::7]:50052"),
        ("this scheduler does not lead shard s0: ask nobody known", ""),
        ("", ""),
    ],
)
def test_the_leader_in_a_sentence(detail: str, leader: str) -> None:
    assert named_leader(detail) == leader


def test_pauses_double_up_to_the_longest_and_half_of_them_is_random() -> None:
    rng = random.Random(5)
    for failures, longest_s in [(0, 0.1), (1, 0.2), (2, 0.4), (5, 2.0), (10_000, 2.0)]:
        pauses = [BackOff(0.1, 2.0).pause_s(failures, rng) for _ in range(300)]

        assert longest_s / 2 <= min(pauses) < 0.55 * longest_s
        assert 0.95 * longest_s < max(pauses) <= longest_s


def search() -> LeaderSearch:
    return LeaderSearch(BackOff(0.1, 2.0), random.Random(3))


def one_round(searched: LeaderSearch, seeds: list[str], results: dict[str, Visit]) -> list[str]:
    """Return the addresses dialled in one round."""
    dialled = []
    searched.begin_round(seeds)
    while (address := searched.next_address()) is not None:
        dialled.append(address)
        searched.visited(address, results.get(address, STANDBY))
    return dialled


def test_a_failed_round_dials_every_seed_in_random_order() -> None:
    searched = search()
    orders = set()
    for _ in range(50):
        dialled = one_round(searched, ["a", "b", "c"], {})
        searched.end_round_s()
        assert sorted(dialled) == ["a", "b", "c"]
        orders.add(tuple(dialled))

    assert len(orders) == 6


def test_a_round_ends_with_the_leader_which_is_dialled_first_in_the_next() -> None:
    searched = search()
    seeds = ["a", "b", "c"]
    names_d = Visit(greeted=False, leader="d")

    first = one_round(searched, seeds, {"a": names_d, "b": names_d, "c": names_d, "d": LEADS})
    searched.end_round_s()
    second = one_round(searched, seeds, {})
    searched.end_round_s()
    third = one_round(searched, seeds, {})

    assert first[1:] == ["d"]
    assert (second[0], sorted(second[1:])) == ("d", seeds)
    assert sorted(third) == seeds


def test_a_leader_that_names_its_successor_is_replaced_by_it() -> None:
    searched = search()
    one_round(searched, ["a"], {"a": Visit(greeted=True, leader="z")})
    searched.end_round_s()

    assert one_round(searched, ["a"], {"z": LEADS}) == ["z"]


def test_pauses_grow_with_failed_rounds_and_start_again_after_a_greeting() -> None:
    searched = search()
    failed_s = []
    for _ in range(8):
        one_round(searched, ["a"], {})
        failed_s.append(searched.end_round_s())
    assert searched.failed_rounds == 8
    one_round(searched, ["a"], {"a": LEADS})
    greeted_s = searched.end_round_s()

    assert searched.failed_rounds == 0
    assert failed_s[0] <= 0.1 < 1.0 <= failed_s[-1] <= 2.0
    assert greeted_s <= 0.1


def test_heartbeats_are_due_at_once_and_then_at_their_interval() -> None:
    liveness = Liveness(100.0, heartbeat_s=1.0, silence_s=60.0)

    assert liveness.tick(100.0) == 1.0
    assert liveness.take_heartbeat()
    assert not liveness.take_heartbeat()
    assert liveness.tick(100.5) == 0.5
    assert not liveness.take_heartbeat()
    liveness.tick(101.25)
    assert liveness.take_heartbeat()
    assert liveness.tick(101.5) == 0.75


def test_a_peer_is_silent_after_its_last_message_exactly() -> None:
    liveness = Liveness(0.0, heartbeat_s=2.0, silence_s=5.0)
    liveness.received(3.5)

    liveness.tick(6.0)
    assert liveness.tick(7.0) == 1.0, "the next heartbeat"
    assert liveness.tick(8.0) == 0.5, "the end of the silence is earlier than the next heartbeat"
    with pytest.raises(PeerSilent, match="5 s"):
        liveness.tick(8.5)


def test_a_peer_that_is_not_read_is_not_silent() -> None:
    liveness = Liveness(0.0, heartbeat_s=1.0, silence_s=5.0)
    liveness.suspend()
    liveness.tick(1000.0)
    liveness.received(1000.0)

    liveness.tick(1004.9)
    with pytest.raises(PeerSilent):
        liveness.tick(1005.0)


async def test_watch_wakes_the_writer_and_raises_at_silence() -> None:
    loop = asyncio.get_running_loop()
    wake = asyncio.Event()
    began_s = loop.time()
    liveness = Liveness(began_s, heartbeat_s=0.02, silence_s=0.2)
    sent = 0

    async def write() -> None:
        nonlocal sent
        while True:
            await wake.wait()
            wake.clear()
            sent += liveness.take_heartbeat()

    with pytest.raises(PeerSilent):
        await until_first_ends(write(), watch(liveness, wake))

    assert loop.time() - began_s >= 0.2
    assert sent >= 2


async def test_the_first_part_to_end_ends_the_others() -> None:
    cancelled = []

    async def endless(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(name)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("its own")

    async def end() -> None:
        await asyncio.sleep(0)

    with pytest.raises(ValueError, match="its own"):
        await until_first_ends(endless("a"), fail(), endless("b"))
    await until_first_ends(end(), endless("c"))

    assert sorted(cancelled) == ["a", "b", "c"]


async def test_an_error_that_was_handled_leaves_nothing_of_its_connection() -> None:
    """Otherwise the connection stays open: gRPC closes it when its last call is gone."""

    class Connection:
        pass

    async def endless() -> None:
        await asyncio.Event().wait()

    async def read(connection: Connection) -> None:
        raise ValueError(connection)

    connection = Connection()
    left = weakref.ref(connection)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            await until_first_ends(read(connection), endless())
        del connection
        await asyncio.sleep(0)  # the event loop lets go of what it has run

        assert left() is None
    finally:
        gc.enable()
