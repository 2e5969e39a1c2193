"""Input on any port causes no harm: every input is answered, other clients are not affected, nothing is left
over.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import grpc.aio
import pytest

from laps_sd.service.leader_link import PROTOCOL_VERSIONS
from laps_sd.stack.local import LocalStack
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import inference_pb2_grpc
from laps_sd.v1 import worker_link_pb2 as worker_pb
from laps_sd.v1.inference_pb2 import SamplingParams
from tests.helpers import wait_until_async
from tests.system import hostile
from tests.system.calls import seeded, stream
from tests.system.hostile import (
    Caller,
    Generator,
    Hints,
    KServeGenerator,
    SchedulerGenerator,
    random_message,
)
from tests.system.tally import Tally, send_all
from tests.system.watch import Watch, check_queue_empties, queue, undisturbed

SHORT_INPUTS = 1_500
KSERVE_INPUTS = 1_000
SCHEDULER_INPUTS = 1_000
LONG_INPUTS = 40_000
"""Some hundred of each kind; the seeds are fixed, so that more would be the same again in each run."""
AT_ONCE = 48
WARM_UP_INPUTS = 600
"""Sent before memory is measured: caches and arenas have their size by then."""
SHORT_GROWTH_MIB = 96.0
LONG_GROWTH_MIB = 64.0
"""A leak of 1.7 kB an input; 28 MiB were seen at most."""
PEERS_GROWTH_MIB = 120.0
ANSWER_S = 30.0
"""Time to wait for a raw connection; gRPC itself gives up those that never acknowledge its settings, after 60
s.
"""
GATEWAY_LINK = "/laps_sd.v1.GatewayLink/Connect"
WORKER_LINK = "/laps_sd.v1.WorkerLink/Connect"


def fuzzed_stack() -> LocalStack:
    return LocalStack(workers=2, engine="fake", environment={"LAPS_SD_FAKE_TIME_SCALE": "0"})


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[LocalStack]:
    """Start a stack for all input of this file; the fake engine runs at full speed."""
    with fuzzed_stack() as stack:
        yield stack


Make = Callable[[int, list[str]], Generator | KServeGenerator | SchedulerGenerator]


async def fuzz(stack: LocalStack, count: int, *, seed: int, make: Make = Generator) -> tuple[Tally, Watch]:
    """Send this many inputs to one port, with other clients at the same time; return the tally, and a watch
    from after the warm-up.
    """
    address = stack.scheduler_address if make is SchedulerGenerator else stack.gateway_address
    async with undisturbed(stack) as alone:
        finished = [outcome.request_id for outcome in alone]
        channels = hostile.channels(address, 4)
        senders = [Caller(channels).judged] * AT_ONCE
        await send_all(make(seed + 1, finished).inputs(WARM_UP_INPUTS), senders)
        watch = Watch.over(stack)
        tally = await send_all(make(seed, finished).inputs(count), senders)
        for channel in channels:
            await channel.close()
    await check_queue_empties(stack)
    return tally, watch


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (Generator, SHORT_INPUTS),
        (KServeGenerator, KSERVE_INPUTS),
        (SchedulerGenerator, SCHEDULER_INPUTS),
    ],
)
async def test_every_bad_input_is_answered_by_name_and_nobody_beside_it_notices(
    fuzzed: LocalStack, make: Make, count: int
) -> None:
    tally, watch = await fuzz(fuzzed, count, seed=1, make=make)
    watch.check(tally, count=count, most_mib=SHORT_GROWTH_MIB)


@pytest.mark.long
@pytest.mark.parametrize("make", [Generator, KServeGenerator, SchedulerGenerator])
async def test_tens_of_thousands_of_bad_inputs_change_nothing(make: Make) -> None:
    with fuzzed_stack() as stack:
        tally, watch = await fuzz(stack, LONG_INPUTS, seed=2, make=make)
        watch.check(tally, count=LONG_INPUTS, most_mib=LONG_GROWTH_MIB)


async def test_octets_that_no_grpc_client_would_send_end_their_connection_and_nothing_else(
    fuzzed: LocalStack,
) -> None:
    watch = Watch.over(fuzzed)
    async with undisturbed(fuzzed):
        for address in (fuzzed.gateway_address, fuzzed.scheduler_address):
            named = dict(hostile.raw_conversations())
            ends = await asyncio.gather(
                *(hostile.converse(address, octets, patience_s=ANSWER_S) for octets in named.values()),
                return_exceptions=True,
            )
            hung = [name for name, end in zip(named, ends, strict=True) if isinstance(end, BaseException)]
            assert not hung, f"never ended: {hung}"
            print("\n" + ", ".join(f"{name}: {end}" for name, end in zip(named, ends, strict=True)))
    await check_queue_empties(fuzzed)
    watch.check_alive()


# -- the links between services -------------------------------------------------------------------------------


class LinkPeer:
    """One end of a link that writes raw bytes and reads any answer."""

    def __init__(self, channel: grpc.aio.Channel, method: str, reply_type: Any) -> None:
        self._call = channel.stream_stream(method, response_deserializer=reply_type.FromString)()
        self.heard: list[Any] = []
        self.reader = asyncio.create_task(self._read())
        self.sent = 0

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for message in self._call:
                if message.WhichOneof("message") not in ("heartbeat", None):
                    self.heard.append(message)

    async def send(self, payload: bytes) -> bool:
        """Send a message; return False if the stream is over."""
        if self.reader.done():
            return False
        try:
            await self._call.write(payload)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False
        self.sent += 1
        return True

    async def heard_of(self, kind: str) -> Any:
        """Return the first message of this kind."""

        def found() -> Any:
            return next((m for m in self.heard if m.WhichOneof("message") == kind), None)

        return getattr(await wait_until_async(found, description=f"a {kind} is heard"), kind)

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.gather(self.reader, return_exceptions=True)


def submission(rng: random.Random, request_id: str) -> gateway_pb.Submit:
    """Return a correct submission."""
    return gateway_pb.Submit(
        submission_id=rng.randrange(2**63),
        request_id=request_id,
        tenant="anonymous",
        attachment_id=f"hostile/{request_id}",
        model="laps-sd-demo",
        specification=gateway_pb.Specification(
            request_id=request_id,
            prompt_ids=[1, 2, 3],
            sampling=SamplingParams(max_tokens=4, temperature=0.0, top_p=1.0, seed=1),
        ),
    )


def gateway_message(rng: random.Random, ids: list[str]) -> bytes:
    """Return a possible message of a gateway, with random values."""
    hints: Hints = {
        "request_id": ids,
        "tenant": ("anonymous",),
        "attachment_id": [f"hostile/{request_id}" for request_id in ids],
        "prompt_ids": range(1024),
        "max_tokens": (1, 4, 40),
    }
    if rng.random() < 0.01:
        return rng.randbytes(rng.choice((1, 10, 300)))
    message = gateway_pb.GatewayMessage()
    kind = rng.choice(("submit", "submit", "submit", "attach", "detach", "cancel", "hello", "heartbeat", ""))
    if kind == "submit":
        # Mostly right, so that it passes the checks: one extreme value in an otherwise plain submission.
        message.submit.CopyFrom(submission(rng, rng.choice((*ids, f"s0.hostile{rng.randrange(2**40):x}"))))
        hostile.spoil(rng, message.submit, times=rng.choice((0, 1, 1, 1, 2)))
        if rng.random() < 0.1:
            random_message(rng, message.submit, hints, filled=0.5)
    elif kind:
        random_message(rng, getattr(message, kind), hints, filled=0.8)
        getattr(message, kind).SetInParent()
    return message.SerializeToString()


async def hostile_gateway(address: str, seed: int, ids: list[str], messages: int) -> int:
    rng = random.Random(seed)
    async with grpc.aio.insecure_channel(address) as channel:
        peer = LinkPeer(channel, GATEWAY_LINK, gateway_pb.GatewayLinkReply)
        if rng.random() < 0.95:
            hello = gateway_pb.GatewayHello(gateway_id=f"hostile-{seed}", protocol_versions=PROTOCOL_VERSIONS)
            if rng.random() < 0.1:
                hello.protocol_versions[:] = [7] * 50_000
            await peer.send(gateway_pb.GatewayMessage(hello=hello).SerializeToString())
        for _ in range(messages):
            if not await peer.send(gateway_message(rng, ids)):
                break
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        await peer.close()
        return peer.sent


def worker_message(rng: random.Random, ids: list[str]) -> bytes:
    """Return a possible message of a worker, with random values."""
    hints: Hints = {
        "request_id": ids,
        "request_ids": ids,
        "lease_epoch": (0, 1, 2),
        "lease_epochs": (0, 1, 2),
        "position": (0, 1, 5),
    }
    if rng.random() < 0.01:
        return rng.randbytes(rng.choice((1, 10, 300)))
    message = worker_pb.WorkerMessage()
    kind = rng.choice(("reports", "reports", "reports", "missing", "hello", "heartbeat", "drain", ""))
    if kind:
        random_message(rng, getattr(message, kind), hints, filled=rng.choice((0.3, 0.8)))
        getattr(message, kind).SetInParent()
    return message.SerializeToString()


async def hostile_worker(address: str, seed: int, ids: list[str], messages: int) -> int:
    """Run a worker whose longest context is one token, so that no client's request is leased to it."""
    rng = random.Random(seed)
    hints: Hints = {
        "pool": ("demo",),
        "fingerprint": ("fake",),
        "protocol_versions": PROTOCOL_VERSIONS,
        "request_id": ids,
    }
    hello = worker_pb.WorkerHello()
    random_message(rng, hello, hints, filled=0.9)
    hello.worker_id = f"hostile-{seed}"
    if rng.random() < 0.8:
        del hello.protocol_versions[:]
        hello.protocol_versions.extend(PROTOCOL_VERSIONS)
        hello.pool, hello.fingerprint, hello.worker_name = "demo", "fake", hello.worker_id
        hello.slots, hello.target_blocks = rng.choice((1, 8, 65_536)), rng.choice((1, 2**32 - 1))
        hello.block_size = rng.choice((1, 16, 2**32 - 1))
        hello.draft_blocks, hello.max_draft_tokens = hello.target_blocks, rng.choice((0, 4))
    hello.max_length = 2
    async with grpc.aio.insecure_channel(address) as channel:
        peer = LinkPeer(channel, WORKER_LINK, worker_pb.WorkerLinkReply)
        await peer.send(worker_pb.WorkerMessage(hello=hello).SerializeToString())
        for _ in range(messages):
            if not await peer.send(worker_message(rng, ids)):
                break
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        await peer.close()
        return peer.sent


async def cancel_all(stack: LocalStack) -> None:
    """End the requests that hostile gateways left: they may have no time limit."""
    async with grpc.aio.insecure_channel(stack.scheduler_address) as channel:
        peer = LinkPeer(channel, GATEWAY_LINK, gateway_pb.GatewayLinkReply)
        hello = gateway_pb.GatewayHello(gateway_id="janitor", protocol_versions=PROTOCOL_VERSIONS)
        await peer.send(gateway_pb.GatewayMessage(hello=hello).SerializeToString())
        for entry in (await queue(stack)).entries:
            cancel = gateway_pb.CancelRequested(request_id=entry.request_id, tenant=entry.tenant)
            assert await peer.send(gateway_pb.GatewayMessage(cancel=cancel).SerializeToString())
        await check_queue_empties(stack)
        await peer.close()


async def peers_at_once(make: Callable[[int], Any], count: int, *, at_once: int = 12) -> int:
    """Run this many peers, some at a time, and return the number of messages that they sent."""
    seeds = iter(range(count))

    async def work() -> int:
        sent = 0
        for seed in seeds:
            sent += await make(seed)
        return sent

    return sum(await asyncio.gather(*(work() for _ in range(at_once))))


@pytest.mark.parametrize("peers", [200, pytest.param(1200, marks=pytest.mark.long)])
async def test_a_scheduler_survives_whatever_gateways_and_workers_say(fuzzed: LocalStack, peers: int) -> None:
    watch = Watch.over(fuzzed)
    address = fuzzed.scheduler_address
    async with undisturbed(fuzzed) as alone:
        ids = [
            *(outcome.request_id for outcome in alone),
            *(f"s0.hostile{i}" for i in range(20)),
            "s0.nobody",
        ]
        from_gateways, from_workers = await asyncio.gather(
            peers_at_once(lambda seed: hostile_gateway(address, seed, ids, 40), peers),
            peers_at_once(lambda seed: hostile_worker(address, seed, ids, 40), peers),
        )
    await cancel_all(fuzzed)
    print(f"\n{from_gateways} messages of gateways, {from_workers} of workers")
    watch.check_alive()
    assert min(from_gateways, from_workers) > 10 * peers
    watch.check_memory(PEERS_GROWTH_MIB)


def in_columns(report: worker_pb.RoundReport) -> None:
    """Move the progress of a report into columns."""
    for one in report.progress:
        report.plain.request_ids.append(one.request_id)
        report.plain.lease_epochs.append(one.lease_epoch)
        report.plain.positions.append(one.position)
        report.plain.token_counts.append(len(one.token_ids))
        report.plain.token_ids.extend(one.token_ids)
        report.plain.drafted.append(one.drafted)
        report.plain.accepted.append(one.accepted)
    del report.progress[:]


def lying_report(
    rng: random.Random, number: int, leases: dict[str, int], positions: dict[str, int]
) -> worker_pb.RoundReport:
    """Return a report of a round of requests that this worker may report, with values that no engine
    produces.
    """
    ids = list(leases)[-8:]
    hints: Hints = {
        "request_id": ids,
        "lease_epoch": (1,),
        "position": (0, 0, 1, 2, 5),
        "token_ids": range(1024),
    }
    report = worker_pb.RoundReport(
        number=number, draft_s=0.01, verify_s=0.01, total_s=0.02, free_target_blocks=100
    )
    for request_id in rng.sample(ids, rng.randint(1, len(ids))):
        report.progress.add(
            request_id=request_id, lease_epoch=leases[request_id], position=positions.get(request_id, 0),
            token_ids=[5, 6], drafted=4, accepted=1,
        )  # fmt: skip
    if rng.random() < 0.5:
        report.progress.append(rng.choice(report.progress))  # the same request twice
    if rng.random() < 0.5:
        in_columns(report)
    if rng.random() < 0.7:
        hostile.spoil(rng, report, times=rng.choice((1, 1, 3)))
    else:
        random_message(rng, report, hints, filled=0.4)
    rows = [(one.request_id, one.position, len(one.token_ids)) for one in report.progress if not one.end]
    plain = report.plain
    rows += zip(plain.request_ids, plain.positions, plain.token_counts, strict=False)
    for request_id, position, count in rows:
        if position == positions.get(request_id, 0) and count < 10:
            positions[request_id] = position + count
    return report


@pytest.mark.parametrize("rounds", [600, pytest.param(8_000, marks=pytest.mark.long)])
async def test_a_worker_that_lies_about_its_leases_harms_only_its_own_requests(
    make_stack: Callable[..., LocalStack], rounds: int
) -> None:
    stack = make_stack(workers=0)
    watch = Watch.over(stack)
    rng = random.Random(rounds)
    async with grpc.aio.insecure_channel(stack.scheduler_address) as channel:
        client = LinkPeer(channel, GATEWAY_LINK, gateway_pb.GatewayLinkReply)
        hello = gateway_pb.GatewayHello(gateway_id="g", protocol_versions=PROTOCOL_VERSIONS)
        await client.send(gateway_pb.GatewayMessage(hello=hello).SerializeToString())
        worker = LinkPeer(channel, WORKER_LINK, worker_pb.WorkerLinkReply)
        introduction = worker_pb.WorkerHello(  # version 1: its lists come whole
            worker_id="liar", worker_name="liar", pool="demo", protocol_versions=[1], fingerprint="fake",
            slots=8, target_blocks=4096, draft_blocks=4096, block_size=16, max_length=2048, max_draft_tokens=8,
        )  # fmt: skip
        await worker.send(worker_pb.WorkerMessage(hello=introduction).SerializeToString())
        await worker.heard_of("hello")
        positions: dict[str, int] = {}
        reported = 0
        for number in range(1, rounds + 1):
            if number % 10 == 1:
                for index in range(4):
                    submit = submission(rng, f"s0.victim{number}x{index}")
                    submit.specification.sampling.max_tokens = rng.choice((1, 4, 1000))
                    message = gateway_pb.GatewayMessage(submit=submit)
                    assert await client.send(message.SerializeToString()), stack.log("scheduler")[-4000:]
            lists = [m.assignment for m in worker.heard if m.WhichOneof("message") == "assignment"]
            leases = {entry.request_id: entry.lease_epoch for entry in lists[-1].entries} if lists else {}
            if leases:
                report = lying_report(rng, number, leases, positions)
                named = [*(one.request_id for one in report.progress), *report.plain.request_ids]
                reported += sum(request_id in leases for request_id in named)
                message = worker_pb.WorkerMessage(reports=worker_pb.RoundReports(reports=[report]))
                assert await worker.send(message.SerializeToString()), stack.log("scheduler")[-4000:]
            await asyncio.sleep(0.002)
            del worker.heard[:-50], client.heard[:-50]
        await worker.close()
        await client.close()
    watch.check_alive()
    await cancel_all(stack)
    watch.check_alive()
    assert reported > rounds // 4
    stack.add_worker()
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        outcome = await stream(
            inference_pb2_grpc.InferenceStub(channel),
            seeded("After all", seed=1, max_tokens=8, ignore_eos=True),
        )
    assert len(outcome.tokens) == 8
