"""A gateway survives any message of a scheduler: every call is answered, nothing is left over, and the next
leader is served.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter, deque
from typing import Any

import grpc
import grpc.aio
import pytest

from laps_sd.service.leader_link import PROTOCOL_VERSIONS
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1.inference_pb2 import CancelRequest, GenerateRequest, ResumeRequest, SamplingParams
from tests.helpers import wait_until_async
from tests.services.gateway.conftest import StartGateway
from tests.services.gateway.fake_scheduler import FakeScheduler, Kind, Reply
from tests.services.gateway.reading import ids_of, rest
from tests.services.hostile_link import HostileLink
from tests.system.hostile import DAMAGES, Hints, random_message, spoil

CLIENTS = 8
CALL_S = 0.5
EPOCH = "1-hostile"


class HostileScheduler(HostileLink):
    """A scheduler that greets as a leader does and accepts every request. Its answers are mostly right, with
    one or two wrong fields.
    """

    def __init__(self, seed: int) -> None:
        super().__init__("laps_sd.v1.GatewayLink", link_pb2.GatewayMessage, seed)
        self.silent = False
        self._submits: deque[link_pb2.Submit] = deque(maxlen=CLIENTS)
        self._attaches: deque[link_pb2.Attach] = deque(maxlen=CLIENTS)
        self._cancels: deque[int] = deque(maxlen=CLIENTS)

    def _is_silent(self) -> bool:
        return self.silent or not self._submits

    async def _greet(self, context: Any) -> bool:
        if self._rng.random() < 0.1:
            await context.write(self._damaged(self._greeting()))
        await context.write(self._greeting().SerializeToString())
        return True

    def _hear(self, message: link_pb2.GatewayMessage) -> None:
        match message.WhichOneof("message"):
            case "submit":
                self._submits.append(message.submit)
            case "attach":
                self._attaches.append(message.attach)
            case "cancel":
                self._cancels.append(message.cancel.cancel_id)

    def _greeting(self) -> Reply:
        hello = link_pb2.SchedulerHello(shard="s0", protocol_version=PROTOCOL_VERSIONS[0], pool="demo")
        return Reply(leader_epoch=EPOCH, hello=hello)

    def _anything(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.002:
            return self._damaged(self._answer())
        if rng.random() < 0.002:
            greeting = self._greeting()
            spoil(rng, greeting)
            return greeting.SerializeToString()
        reply = self._answer() if rng.random() < 0.8 else self._reflected()
        if rng.random() < 0.95:
            reply.leader_epoch = EPOCH
        return reply.SerializeToString()

    def _damaged(self, reply: Reply) -> bytes:
        return self._rng.choice(DAMAGES)(self._rng, reply.SerializeToString())

    def _answer(self) -> Reply:
        """Return an answer to one of the requests, with some wrong fields."""
        rng = self._rng
        reply = Reply()
        submit = rng.choice(self._submits)
        kind = rng.randrange(10)
        if kind < 3:
            reply.submit_reply.submission_id = submit.submission_id
            accepted = reply.submit_reply.accepted
            accepted.request_id, accepted.prompt_tokens, accepted.seed = submit.request_id, 3, 7
        elif kind < 5 and self._attaches:
            attach = rng.choice(self._attaches)
            reply.attach_reply.attach_id = attach.attach_id
            reply.attach_reply.result = rng.randrange(5)  # type: ignore[assignment]
            reply.attach_reply.prompt_tokens = 3
            if rng.random() < 0.5:
                reply.attach_reply.submission.CopyFrom(submit)
        elif kind < 6 and self._cancels:
            reply.cancel_reply.cancel_id = rng.choice(self._cancels)
            reply.cancel_reply.found = True
        elif kind < 8 and self._attaches:
            attach = rng.choice(self._attaches)
            plain = reply.deliveries.plain
            plain.attachment_ids.append(attach.attachment_id)
            plain.first_tokens.append(rng.randrange(4))
            plain.token_counts.append(3)
            plain.token_ids.extend([50, 51, 52])
        else:
            delivery = reply.deliveries.deliveries.add(
                request_id=submit.request_id, first_token=rng.randrange(4), token_ids=[50, 51, 52]
            )
            if rng.random() < 0.3:
                delivery.end.kind = rng.randrange(8)  # type: ignore[assignment]
        spoil(rng, reply, times=rng.choice((0, 0, 1, 1, 3)))
        return reply

    def _reflected(self) -> Reply:
        hints: Hints = {
            "request_id": [submit.request_id for submit in self._submits],
            "attachment_ids": [submit.attachment_id for submit in self._submits],
            "attachment_id": ["", *(submit.attachment_id for submit in self._submits)],
            "submission_id": [submit.submission_id for submit in self._submits],
            "attach_id": [attach.attach_id for attach in self._attaches] or [1],
            "cancel_id": list(self._cancels) or [1],
            "first_token": range(4),
        }
        reply = Reply()
        kind = self._rng.choice([one.name for one in Reply.DESCRIPTOR.oneofs_by_name["message"].fields])
        random_message(self._rng, getattr(reply, kind), hints, filled=0.7)
        getattr(reply, kind).SetInParent()
        if self._rng.random() < 0.1:
            random_message(self._rng, reply.load, filled=0.7)
        return reply


async def client(stub: Any, rng: random.Random, ends: Counter[str], stopping: asyncio.Event) -> None:
    """Make call after call; each must end in time, with a meaningful status."""
    ids = ["s0.aaaaaaaaaaaaaaaaaaaaaaaaaa"]
    for number in itertools.count():
        if stopping.is_set():
            return
        sampling = SamplingParams(max_tokens=20, stop=["zz"], seed=number)
        key = rng.choice(("", f"key-{number % 3}"))
        call: Any = (
            stub.Resume(ResumeRequest(request_id=rng.choice(ids)), timeout=CALL_S)
            if rng.random() < 0.3
            else stub.GenerateStream(
                GenerateRequest(text="the quick", sampling=sampling, idempotency_key=key), timeout=CALL_S
            )
        )
        try:
            async with asyncio.timeout(30):
                if rng.random() < 0.2:
                    await stub.Cancel(CancelRequest(request_id=rng.choice(ids)), timeout=CALL_S)
                async for event in call:
                    if event.WhichOneof("event") == "accepted":
                        ids = [*ids[-3:], event.accepted.request_id]
                ends["OK"] += 1
        except grpc.aio.AioRpcError as error:
            assert "incident" not in (error.details() or ""), "the gateway's own error"
            assert error.code() is not grpc.StatusCode.UNKNOWN
            ends[error.code().name] += 1
        finally:
            call.cancel()


@pytest.mark.parametrize("messages", [3_000, pytest.param(30_000, marks=pytest.mark.long)])
async def test_a_gateway_survives_whatever_a_scheduler_says(
    start_gateway: StartGateway, start_scheduler: StartGateway, messages: int
) -> None:
    hostile = HostileScheduler(seed=messages)
    port = await hostile.start()
    running = await start_gateway(f"127.0.0.1:{port}", scheduler_wait_s=1.0, restore_s=0.5)
    ends: Counter[str] = Counter()
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(running.stub, random.Random(number), ends, stopping))
        await wait_until_async(
            lambda: hostile.said >= messages and ends["OK"] > 0,
            description=f"{messages} messages, and a call that ends well",
            timeout_s=800,
        )
        stopping.set()
        hostile.silent = True
    await hostile.stop()
    print(f"\n{hostile.said} messages; calls ended with {dict(ends)}")

    successor: FakeScheduler = await start_scheduler(port=port, epoch="2-honest")
    call = running.stub.GenerateStream(GenerateRequest(text="the quick"), timeout=30)
    successor.commit(await successor.submitted(), [50, 51, 52], Kind.KIND_LENGTH)
    assert ids_of(await rest(call)) == [50, 51, 52]
    await wait_until_async(lambda: len(running.link.streams) == 0, description="no stream is left")
    assert ends["OK"] and len(ends) > 2, f"too little got through: {ends}"
