"""A request that kills every worker that runs it, as an error in a kernel does, together with harmless
requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from laps_sd.stack.local import LocalStack
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import inference_pb2_grpc
from tests.conftest import StackMaker
from tests.system.calls import seeded, stream, stream_all

DEADLY_SEED = 666
WORKERS = ("worker-0", "worker-1")


@asynccontextmanager
async def started_again_when_they_die(stack: LocalStack) -> AsyncIterator[list[str]]:
    """Restart dead workers, as Kubernetes does. Yield the names of the workers that died, once for each
    death.
    """
    deaths: list[str] = []

    async def look() -> None:
        while True:
            for name in WORKERS:
                if not stack.children[name].alive:
                    deaths.append(name)
                    await asyncio.to_thread(stack.restart, name, wait=False)
            await asyncio.sleep(0.02)

    looking = asyncio.create_task(look())
    try:
        yield deaths
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def test_it_is_ended_after_a_few_workers_and_all_others_end_as_without_it(
    make_stack: StackMaker,
) -> None:
    stack = make_stack(
        workers=len(WORKERS), slots=4, environment={"LAPS_SD_FAKE_DEADLY_SEED": str(DEADLY_SEED)}
    )
    others = [seeded(f"Story {n}:", seed=n, max_tokens=64, ignore_eos=True) for n in range(12)]
    deadly = seeded("Story:", seed=DEADLY_SEED, max_tokens=64, idempotency_key="deadly")
    async with grpc.aio.insecure_channel(stack.gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        expected = await stream_all(stub, others, timeout_s=30)
        async with started_again_when_they_die(stack) as deaths:
            running = [asyncio.create_task(stream(stub, one, timeout_s=40)) for one in others]
            ended = await stream(stub, deadly, timeout_s=30)
            outcomes = await asyncio.gather(*running)
            again = await stream(stub, deadly, timeout_s=30)

    assert ended.end is not None and again.end is not None
    assert ended.end.finish_reason == pb.FINISH_REASON_ERROR
    assert ended.end.error == (
        "5 workers died in a row while they ran this request, 3 of them while they ran nothing else: it is not tried again"
    )
    assert again.end.error == ended.end.error, "a retry with its key gets the same answer, and kills nothing"
    # Four that are counted; before the first of them is noticed, it may be moved to a further worker.
    assert 5 <= len(deaths) <= 7
    assert [outcome.tokens for outcome in outcomes] == [outcome.tokens for outcome in expected]
    assert {outcome.end.finish_reason for outcome in outcomes if outcome.end} == {pb.FINISH_REASON_LENGTH}
