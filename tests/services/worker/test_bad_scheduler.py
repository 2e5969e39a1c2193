"""A worker survives any message of a scheduler, and works for the next leader as before."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError

from laps_sd.service.leader_link import PROTOCOL_VERSIONS, BackOff
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as pb
from tests.helpers import wait_until_async
from tests.services.hostile_link import HostileLink
from tests.services.worker.harness import on_wire, scheduler, spec, worker
from tests.system.hostile import DAMAGES, Hints, random_message, spoil
from worker_svc.fake.engine import FakeEngine
from worker_svc.link import link

EPOCH = "1-hostile"
NAMES = [f"r{number}" for number in range(12)]
KINDS = (
    "assignment", "assignment", "assignment", "specifications", "specifications", "drop", "acknowledged", "heartbeat",
)  # fmt: skip
"""All messages of a leader except those that rightly end a worker."""


class HostileScheduler(HostileLink):
    """A scheduler that greets as a leader does; later messages are right but for one or two fields, or are
    not messages at all.
    """

    def __init__(self, seed: int) -> None:
        super().__init__("laps_sd.v1.WorkerLink", pb.WorkerMessage, seed)
        self.reports = 0

    async def _greet(self, context: Any) -> bool:
        rng = self._rng
        if rng.random() < 0.1:
            reply = pb.WorkerLinkReply()
            reply.not_leader.leader_address = rng.choice(("", "x", "a:b:c", "\0", "é:1", ":::0", "h:99999"))
            await context.write(reply.SerializeToString())
            return False
        greeting = gateway_pb.SchedulerHello(shard="s0", protocol_version=PROTOCOL_VERSIONS[0], pool="demo")
        await context.write(pb.WorkerLinkReply(leader_epoch=EPOCH, hello=greeting).SerializeToString())
        return True

    def _hear(self, message: pb.WorkerMessage) -> None:
        self.reports += len(message.reports.reports)

    def _anything(self) -> bytes:
        rng = self._rng
        reply = pb.WorkerLinkReply()
        kind = rng.choice(KINDS)
        if rng.random() < 0.3:
            hints: Hints = {"request_id": NAMES, "lease_epoch": (1, 2, 3), "number": (1, 2**64 - 1)}
            random_message(rng, getattr(reply, kind), hints, filled=0.7)
        else:
            self._sensible(reply, kind)
            spoil(rng, getattr(reply, kind), times=rng.choice((0, 0, 1, 3)))
        getattr(reply, kind).SetInParent()
        if rng.random() < 0.1:
            reply.acknowledged_number = rng.choice((self.reports, 2**64 - 1))
        reply.leader_epoch = EPOCH if rng.random() < 0.95 else "2-other"
        octets = reply.SerializeToString()
        if rng.random() < 0.002:
            damaged = rng.choice(DAMAGES)(rng, octets)
            return octets if ends_a_worker(damaged) else damaged
        return octets

    def _sensible(self, reply: pb.WorkerLinkReply, kind: str) -> None:
        rng = self._rng
        some = rng.sample(NAMES, rng.randint(1, 6))
        match kind:
            case "assignment":
                for name in some:
                    reply.assignment.entries.add(request_id=name, lease_epoch=rng.randint(1, 3), index_s=1.0)
            case "specifications":
                for name in some:
                    one = on_wire(
                        spec(name, max_tokens=rng.randint(1, 400), committed=range(rng.randint(0, 2)))
                    )
                    reply.specifications.specifications.add(specification=one, lease_epoch=rng.randint(1, 3))
            case "drop":
                for name in some:
                    reply.drop.requests.add(request_id=name, lease_epoch=rng.randint(1, 3))
            case "acknowledged":
                reply.acknowledged.number = self.reports


def ends_a_worker(octets: bytes) -> bool:
    """Return whether this is one of the messages that end every worker."""
    try:
        kind = pb.WorkerLinkReply.FromString(octets).WhichOneof("message")
    except DecodeError:
        return False
    return kind in ("hello", "refused", "drain", "drained")


@pytest.mark.parametrize("messages", [3_000, pytest.param(30_000, marks=pytest.mark.long)])
async def test_a_worker_survives_whatever_a_scheduler_says(
    monkeypatch: pytest.MonkeyPatch, messages: int
) -> None:
    # One message in 16 ends its stream. Pauses of the usual length would be three quarters of the test.
    monkeypatch.setattr(link, "BackOff", lambda: BackOff(0.001, 0.01))
    engine = FakeEngine(slots=4)
    hostile = HostileScheduler(seed=messages)
    port = await hostile.start()
    async with scheduler() as honest:
        honest.refer_to = f"127.0.0.1:{port}"
        async with worker(honest.address, engine=engine) as w:
            await wait_until_async(
                lambda: w.running.done() or hostile.said >= messages,
                description=f"{messages} messages",
                timeout_s=800,
            )
            assert not w.running.done(), f"it ended after {hostile.said} messages: {w.running}"
            print(f"\n{hostile.said} messages, {hostile.reports} reports of rounds")
            honest.refer_to = None
            await hostile.stop()

            stream = await honest.greet("3-honest")
            one = spec("afterwards", max_tokens=50)
            await stream.lease(one)
            await stream.assign("afterwards")
            await stream.until_ended("afterwards")
            assert stream.tokens("afterwards") == engine.expected(one)[0]
    assert hostile.reports > 0, "no round was ever run"
