"""What workers' probes have learnt is kept by the scheduler and given to workers that connect."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest

from laps_sd.contract.length_probe import MAX_BYTES, LearntProbe, ProbeKind
from laps_sd.v1 import worker_link_pb2 as worker_pb
from scheduler_svc.leader.probes import MAX_KINDS, Probes
from tests.helpers import wait_until_async
from tests.services.scheduler.conftest import StartScheduler
from tests.services.scheduler.peers import SchedulerUnderTest, WorkerPeer, worker

KIND = ProbeKind("ab12", 3, 1, 128)


def learnt(requests: int, kind: ProbeKind = KIND, *, first: float = 0.5) -> LearntProbe:
    return LearntProbe(kind, requests, struct.pack("<3e", first, -1.0, 2.0))


def on_wire(kind: ProbeKind) -> worker_pb.ProbeKind:
    return worker_pb.ProbeKind(model=kind.model, layer=kind.layer, seed=kind.seed, dims=kind.dims)


async def send(peer: WorkerPeer, one: LearntProbe) -> None:
    message = worker_pb.LearntProbe(kind=on_wire(one.kind), requests=one.requests, numbers=one.numbers)
    await peer.send(worker_pb.WorkerMessage(learnt_probe=message))


# -- which one is kept ---------------------------------------------------------------------------------------


def test_of_each_kind_the_one_from_most_requests_is_kept_and_the_last_of_equals() -> None:
    probes = Probes()
    for one in (learnt(10), learnt(30, first=1.0), learnt(20), learnt(30, first=2.0)):
        assert probes.take(one) == ""
    assert probes.of(KIND) == learnt(30, first=2.0)
    assert probes.of(replace(KIND, layer=4)) is None


@pytest.mark.parametrize(
    "broken",
    [
        replace(learnt(5), numbers=b""),
        replace(learnt(5), numbers=bytes(3)),
        replace(learnt(5), numbers=bytes(MAX_BYTES + 2)),
        replace(learnt(5), numbers=struct.pack("<e", float("nan"))),
        replace(learnt(5), numbers=struct.pack("<e", float("inf"))),
        learnt(0, replace(KIND, layer=5)),
        learnt(5, replace(KIND, model="")),
        learnt(5, replace(KIND, model="x" * 1000)),
    ],
)
def test_what_is_damaged_is_refused(broken: LearntProbe) -> None:
    probes = Probes()
    probes.take(learnt(1))
    probes.unsaved = False
    assert probes.take(broken) != ""
    assert probes.of(KIND) == learnt(1)
    assert not probes.unsaved


def test_the_kind_that_changed_least_recently_makes_room() -> None:
    probes = Probes()
    kinds = [replace(KIND, layer=layer) for layer in range(MAX_KINDS + 1)]
    for kind in kinds[:-1]:
        probes.take(learnt(1, kind))
    probes.take(learnt(2, kinds[0]))
    probes.take(learnt(1, kinds[-1]))
    assert [kind for kind in kinds if probes.of(kind) is None] == [kinds[1]]


def test_the_records_copy_gives_the_same_probes() -> None:
    probes = Probes()
    probes.take(learnt(7))
    probes.take(learnt(9, replace(KIND, model="cd34")))
    again = Probes.from_blob(probes.to_blob())
    assert again.of(KIND) == learnt(7)
    assert again.of(replace(KIND, model="cd34")) == learnt(9, replace(KIND, model="cd34"))
    assert not again.unsaved


def entry(**changes: object) -> dict[str, object]:
    return {"model": "ab12", "layer": 3, "seed": 1, "dims": 128, "requests": 7, "numbers": "AAA=", **changes}


@pytest.mark.parametrize(
    "blob",
    [
        None,
        b"",
        b"{",
        b"[]",
        b"7",
        b"{}",
        json.dumps({"format": 2, "probes": [entry()]}).encode(),
        json.dumps({"format": 1}).encode(),
        json.dumps({"format": 1, "probes": [entry(numbers="?")]}).encode(),
        json.dumps({"format": 1, "probes": [entry(numbers=None)]}).encode(),
        json.dumps({"format": 1, "probes": [entry(layer="x")]}).encode(),
        json.dumps({"format": 1, "probes": [entry(layer=float("inf"))]}).encode(),
        json.dumps({"format": 1, "probes": [entry(requests=-1)]}).encode(),
        json.dumps({"format": 1, "probes": [{}]}).encode(),
    ],
)
def test_a_copy_that_cannot_be_read_counts_as_none(blob: bytes | None) -> None:
    assert Probes.from_blob(blob).of(KIND) is None


# -- over the links ------------------------------------------------------------------------------------------


async def test_a_worker_that_connects_gets_what_another_has_learnt(scheduler: SchedulerUnderTest) -> None:
    async with worker(scheduler.address, "w1", length_probe=on_wire(KIND)) as first:
        await first.next("hello")
        await send(first, learnt(40))
        loop = scheduler.leadership.loop
        assert loop is not None
        await wait_until_async(lambda: loop.probes.of(KIND), description="it is kept")
        async with worker(scheduler.address, "w2", length_probe=on_wire(KIND)) as second:
            given = await second.next("learnt_probe")
            assert (given.requests, given.numbers) == (40, learnt(40).numbers)
            assert given.kind == on_wire(KIND)
        other = on_wire(replace(KIND, layer=9))
        async with (
            worker(scheduler.address, "w3", length_probe=other) as third,
            worker(scheduler.address, "w4") as old,
        ):
            for peer in (third, old):
                await peer.next("assignment")
                assert not any(message.WhichOneof("message") == "learnt_probe" for message in peer.heard)


async def test_what_was_learnt_survives_the_leader(start: StartScheduler) -> None:
    first = await start(priors_save_s=0.1)
    async with worker(first.address, "w1", length_probe=on_wire(KIND)) as peer:
        await peer.next("hello")
        await send(peer, learnt(40))

        async def saved() -> bool:
            return await first.store.load_probes() is not None

        await wait_until_async(saved, description="it is on the record")
    await first.crash()
    second = await start()
    async with worker(second.address, "w2", length_probe=on_wire(KIND)) as peer:
        assert (await peer.next("learnt_probe")).requests == 40


async def test_a_damaged_probe_is_ignored_and_the_worker_stays(scheduler: SchedulerUnderTest) -> None:
    async with worker(scheduler.address, "w1", length_probe=on_wire(KIND)) as peer:
        await peer.next("hello")
        await send(peer, replace(learnt(40), numbers=b"123"))
        await send(peer, learnt(2))
        loop = scheduler.leadership.loop
        assert loop is not None
        await wait_until_async(lambda: loop.probes.of(KIND), description="the sound one is kept")
        assert loop.probes.of(KIND) == learnt(2)
