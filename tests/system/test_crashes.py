"""SIGKILL of the scheduler, or of the worker, amid 50 streams: every stream continues by itself and ends as if nothing was.

The full matrix of faults comes with the chaos runs; these two keep the design honest.
"""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from laps_sd.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from tests.system.calls import Outcome, seeded, stream, stream_all
from worker_svc.demo.prompts import demo_prompts

STREAMS = 50


def requests() -> list[pb.GenerateRequest]:
    return [
        seeded(prompt.text, seed=number, max_tokens=48)
        for number, prompt in enumerate(demo_prompts(None, STREAMS, seed=11))
    ]


async def undisturbed(stack: LocalStack) -> list[Outcome]:
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        return await stream_all(inference_pb2_grpc.InferenceStub(channel), requests())


@pytest.mark.parametrize("victim", ["scheduler", "worker"])
@pytest.mark.parametrize("engine", ["fake", "demo"])
async def test_every_stream_goes_on_when_a_process_is_killed_and_restarted(engine: str, victim: str) -> None:
    with LocalStack(engine=engine, slots=8) as stack:
        expected = await undisturbed(stack)

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
