"""Work of which a gateway does a little at a time is given to tenants in rotation: one with many calls does not hold
up the calls of another.
"""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.calls.prompts import LONG_PROMPTS_AT_ONCE, Prompts
from gateway.model.fair_turns import FairTurns
from gateway.model.files import THREAD_FROM_CHARACTERS
from laps_sd.v1.inference_pb2 import GenerateRequest


class Work:
    """Calls that take their turns and end when they are told to."""

    def __init__(self, most: int) -> None:
        self.turns = FairTurns(most)
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    def call(self, name: str) -> asyncio.Task[None]:
        """Start a call of the tenant that is the first letter of its name."""
        self._ends[name] = asyncio.Event()
        return asyncio.create_task(self._call(name))

    async def _call(self, name: str) -> None:
        async with self.turns.of(name[0]):
            self.begun.append(name)
            await self._ends[name].wait()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_take_turns_and_each_in_its_own_order() -> None:
    work = Work(1)
    calls = [work.call(name) for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1")]
    await settled()
    for _ in calls:
        await work.end(work.begun[-1])
    assert work.begun == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    await asyncio.gather(*calls)


async def test_no_more_run_at_once_than_there_are_turns() -> None:
    work = Work(2)
    calls = [work.call(f"a{n}") for n in range(5)]
    await settled()
    assert work.begun == ["a0", "a1"]
    await work.end("a1")
    assert work.begun == ["a0", "a1", "a2"]
    for n in (0, 2, 3, 4):
        await work.end(f"a{n}")
    await asyncio.gather(*calls)
    assert work.begun == [f"a{n}" for n in range(5)]


async def test_callers_that_leave_take_no_turn_with_them() -> None:
    work = Work(1)
    first, waiting, given, last = (work.call(name) for name in ("a1", "a2", "b1", "c1"))
    await settled()
    waiting.cancel()
    await settled()
    work._ends["a1"].set()
    await first
    given.cancel()  # in the moment in which it has the turn
    await settled()
    assert work.begun in (["a1", "c1"], ["a1", "b1", "c1"])
    await work.end("c1")
    await last
    await asyncio.wait_for(work.turns._take("a"), 5)  # the turn came back


class SlowModel:
    """Stands for a model whose tokenizer takes a long time."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.go_on = asyncio.Semaphore(0)

    async def encode_off_loop(self, text: str, *, rendered: bool) -> list[int]:
        self.texts.append(text)
        await self.go_on.acquire()
        return [len(text)]


async def test_many_long_prompts_of_a_tenant_delay_one_of_another_by_one_turn() -> None:
    model: Any = SlowModel()
    prompts = Prompts(model, None)

    def tokenize(letter: str) -> asyncio.Task[list[int]]:
        request = GenerateRequest(text=letter * THREAD_FROM_CHARACTERS)
        return asyncio.create_task(prompts.ids_of(request, "", letter))

    hostile = [tokenize("h") for _ in range(50)]
    await settled()
    other = tokenize("o")
    await settled()
    for _ in range(LONG_PROMPTS_AT_ONCE + 2):
        model.go_on.release()
        await settled()
    assert other.done()
    assert sum(task.done() for task in hostile) <= LONG_PROMPTS_AT_ONCE + 1
    for task in hostile:
        task.cancel()
