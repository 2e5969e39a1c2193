"""SIGKILL or SIGSTOP of the scheduler or of a worker, or an engine that hangs, amid many streams: every
stream continues by itself and ends as without a fault.

The full matrix of faults is in the chaos runs; these tests check the design.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest

from demo.prompts import demo_prompts
from laps_sd.stack.local import LocalStack
from laps_sd.stack.readiness import is_serving
from laps_sd.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from laps_sd.v1 import inference_pb2 as pb
from tests.conftest import StackMaker
from tests.helpers import wait_until_async
from tests.system.calls import Outcome, seeded, stream, stream_all

STREAMS = 50


def requests() -> list[pb.GenerateRequest]:
    return [
        seeded(prompt.text, seed=number, max_tokens=48)
        for number, prompt in enumerate(demo_prompts(None, STREAMS, seed=11))
    ]


async def undisturbed(stack: LocalStack) -> list[Outcome]:
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        return await stream_all(inference_pb2_grpc.InferenceStub(channel), requests())


@pytest.fixture(scope="module", params=["fake", "demo"])
def calm_texts(request: pytest.FixtureRequest) -> Iterator[tuple[LocalStack, list[Outcome]]]:
    """Start a stack whose processes a test may kill and restart, and return it with the outcomes of the
    requests without a fault.
    """
    with LocalStack(engine=request.param, slots=8) as stack:
        yield stack, asyncio.run(undisturbed(stack))


@pytest.mark.parametrize("victim", ["scheduler", "worker"])
async def test_every_stream_goes_on_when_a_process_is_killed_and_restarted(
    calm_texts: tuple[LocalStack, list[Outcome]], victim: str
) -> None:
    stack, expected = calm_texts
    some_have_tokens = asyncio.Event()
    streaming: set[str] = set()

    def seen(outcome: Outcome) -> None:
        streaming.add(outcome.request_id)
        if len(streaming) >= 4:
            some_have_tokens.set()

    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        running = [asyncio.create_task(stream(stub, request, on_tokens=seen)) for request in requests()]
        await some_have_tokens.wait()
        stack.kill(victim)
        ended_before = sum(task.done() for task in running)
        await asyncio.to_thread(stack.restart, victim)
        outcomes = await asyncio.gather(*running)

    assert ended_before < STREAMS // 2, "the kill came too late to show anything"
    assert [outcome.tokens for outcome in outcomes] == [outcome.tokens for outcome in expected]
    assert [outcome.text for outcome in outcomes] == [outcome.text for outcome in expected]
    ends = [outcome.end.finish_reason for outcome in outcomes if outcome.end]
    assert set(ends) <= {pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH}
    assert len({outcome.request_id for outcome in outcomes}) == STREAMS


# -- processes that stand still and wake up again ---------------------------------------------------------------

SHORT = {"LAPS_SD_LEASE_S": "1", "LAPS_SD_SILENCE_S": "2"}


@contextlib.asynccontextmanager
async def amid_streams(stack: LocalStack) -> AsyncIterator[list[asyncio.Task[Outcome]]]:
    """Run the body once four of these streams have tokens. The streams continue during it, and end as those
    before it did.
    """
    wanted = [seeded(f"Story {n}:", seed=n, max_tokens=64, ignore_eos=True) for n in range(12)]
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        expected = await stream_all(stub, wanted)
        streaming: set[str] = set()
        running = [
            asyncio.create_task(stream(stub, one, on_tokens=lambda seen: streaming.add(seen.request_id)))
            for one in wanted
        ]
        await wait_until_async(lambda: len(streaming) >= 4, description="four streams have tokens")
        yield running
        outcomes = await asyncio.gather(*running)
    assert [outcome.tokens for outcome in outcomes] == [outcome.tokens for outcome in expected]
    assert [outcome.text for outcome in outcomes] == [outcome.text for outcome in expected]


async def serving(stack: LocalStack, name: str) -> bool:
    return await asyncio.to_thread(is_serving, stack.address(name))


async def listed(stack: LocalStack) -> dict[str, int]:
    """Return connected workers by name, and how many requests each has on its list."""

    async def leaders() -> list[str]:
        return [name for name in stack.schedulers if await serving(stack, name)]

    leader, *_ = await wait_until_async(leaders, description="a scheduler leads")
    async with grpc.aio.insecure_channel(stack.address(leader)) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        answer = await admin.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=20)
    return {one.worker_name: one.listed for one in answer.workers if one.connected}


@pytest.fixture(scope="module")
def nervous_stack() -> Iterator[LocalStack]:
    """Start a stack that soon gives up what stands still. All processes live and are linked after a test."""
    with LocalStack(engine="fake", schedulers=2, workers=2, slots=4, environment=SHORT) as stack:
        yield stack


async def test_a_leader_that_is_stopped_and_wakes_up_changes_nothing_and_steps_down(
    nervous_stack: LocalStack,
) -> None:
    stack = nervous_stack
    names = list(stack.schedulers)
    [leader] = [name for name in names if await serving(stack, name)]
    [standby] = [name for name in names if name != leader]
    async with amid_streams(stack) as running:
        stack.pause(leader)
        began_s = time.monotonic()
        await wait_until_async(lambda: serving(stack, standby), description="the standby leads")
        took_s = time.monotonic() - began_s
        print(f"\nled again after {took_s:.1f} s, with a lease of {SHORT['LAPS_SD_LEASE_S']} s")
        assert not all(task.done() for task in running), "the leader was stopped too late to show anything"
        stack.resume(leader)

        async def stepped_down() -> bool:
            return not await serving(stack, leader)

        await wait_until_async(stepped_down, description="the one that woke up has stepped down")
    assert await serving(stack, standby), "and nobody else has led since"


async def test_a_worker_that_is_stopped_and_wakes_up_disturbs_nobody(nervous_stack: LocalStack) -> None:
    stack = nervous_stack
    async with amid_streams(stack) as running:
        stack.pause("worker-0")

        async def given_up() -> bool:
            return "worker-0" not in await listed(stack)

        await wait_until_async(given_up, description="the scheduler has given the stopped worker up")
        assert not all(task.done() for task in running), "the worker was stopped too late to show anything"
        stack.resume("worker-0")

        async def back() -> bool:
            return len(await listed(stack)) == 2

        await wait_until_async(back, description="the worker that woke up is there again")


def engine_of(worker_pid: int) -> int:
    """Return the process of a worker's engine."""
    children = [
        int(child)
        for listing in Path(f"/proc/{worker_pid}/task").glob("*/children")
        for child in listing.read_text().split()
    ]
    [engine] = children
    return engine


@pytest.mark.long
async def test_requests_of_an_engine_that_hangs_go_on_at_another_worker(make_stack: StackMaker) -> None:
    """The worker itself is well: it is connected, and it sends heartbeats."""
    stack = make_stack(engine="demo", workers=2, slots=4, environment={"LAPS_SD_WATCHDOG_S": "3"})
    async with amid_streams(stack) as running:
        pid = stack.children["worker-0"].pid
        assert pid is not None
        engine = engine_of(pid)
        os.kill(engine, signal.SIGSTOP)
        try:

            async def given_up() -> bool:
                return "worker-0" not in await listed(stack)

            await wait_until_async(given_up, description="the scheduler has given the worker up")
            assert not all(task.done() for task in running), (
                "the engine was stopped too late to show anything"
            )
            assert stack.children["worker-0"].alive
        finally:
            os.kill(engine, signal.SIGCONT)

        async def back() -> bool:
            return len(await listed(stack)) == 2

        await wait_until_async(back, description="the worker is there again, as its engine goes on")
