"""One slot, a long request running, a short one arriving: the policy decides which request ends first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc.aio
import pytest

from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from tests.system.calls import Outcome, seeded, stream


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    # The fake engine at real speed: a long request takes seconds, whatever the machine.
    with LocalStack(engine="fake", slots=1) as stack:
        yield stack


async def long_then_short(stack: LocalStack) -> tuple[Outcome, Outcome, list[pb.Explanation]]:
    """Send the short request once the long one has its first tokens; return both results and explanations."""
    running = asyncio.Event()
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        long = asyncio.create_task(
            stream(
                stub,
                seeded(
                    "Once upon a time", seed=1, max_tokens=200, ignore_eos=True, expected_output_tokens=200
                ),
                on_tokens=lambda _: running.set(),
            )
        )
        await running.wait()
        short = await stream(
            stub, seeded("Count:", seed=2, max_tokens=8, ignore_eos=True, expected_output_tokens=8)
        )
        outcomes = await long, short
        stories = [
            (await stub.Explain(pb.ExplainRequest(request_id=outcome.request_id))).explanation
            for outcome in outcomes
        ]
    return *outcomes, stories


@pytest.mark.parametrize(
    ("policy", "short_first"), [("laps-sd", True), ("srpt-length", True), ("fcfs", False)]
)
async def test_the_short_request_overtakes_where_the_policy_preempts(
    stack: LocalStack, policy: str, short_first: bool
) -> None:
    await asyncio.to_thread(stack.restart, "scheduler", policy=policy)
    long, short, (long_story, short_story) = await long_then_short(stack)

    assert (short.finished_order < long.finished_order) == short_first
    assert len(long.tokens) == 200
    assert len(short.tokens) == 8
    assert long.end is not None
    assert (long.end.timing.preemptions > 0) == short_first
    happened = [line.what for line in long_story.story]
    assert ("paused" in happened) == short_first
    assert ("resumed" in happened) == short_first
    assert long_story.preemptions == long.end.timing.preemptions
    assert long_story.policy == policy
    assert [line.what for line in short_story.story][-1] == "ended"
    assert short.request_id not in str(long_story), "a story names no other request"
