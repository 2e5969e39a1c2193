"""Work of which a gateway does a little at a time is given to tenants in rotation: one with many calls does not hold
up the calls of another.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from gateway.calls.prompts import (
    LONG_PROMPTS_AT_ONCE,
    THREAD_FROM_CHARACTERS,
    THREAD_FROM_MESSAGES,
    Prompts,
)
from gateway.fair_turns import FairTurns
from laps_sd.errors import ResourceExhausted
from laps_sd.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest
from tests.helpers import wait_until_async


class Work:
    """Calls that take their turns and end when they are told to."""

    def __init__(self, most: int) -> None:
        self.turns = FairTurns(most, most_waiting=10, what="things")
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    def call(self, name: str, size: int = 1) -> asyncio.Task[None]:
        """Start a call of the tenant that is the first letter of its name."""
        self._ends[name] = asyncio.Event()
        return asyncio.create_task(self._call(name, size))

    async def _call(self, name: str, size: int) -> None:
        async with self.turns.of(name[0], size):
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
    await asyncio.wait_for(work.turns._take("a", 1), 5)  # the turn came back


async def test_so_much_of_a_tenant_waits_and_no_more() -> None:
    work = Work(1)
    first, large, left = work.call("a1"), work.call("a2", size=11), work.call("b1", size=6)
    await settled()
    for name, size in (("a3", 1), ("b2", 5)):
        with pytest.raises(ResourceExhausted, match="too many things of the tenant wait at this gateway"):
            await work.call(name, size)
    fits, free = work.call("b3", size=4), work.call("b0", size=0)
    left.cancel()  # makes room
    await settled()
    then = work.call("b4", size=6)
    await settled()
    order = ["a1", "a2", "b3", "b0", "b4"]
    for name in order:
        await work.end(name)
    await asyncio.gather(first, large, fits, free, then)
    assert work.begun == order
    assert not work.turns._sizes


class SlowModel:
    """Stands for a model whose tokenizer takes a long time."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.go_on = threading.Semaphore(0)
        self.template = self

    def render(self, messages: list[dict[str, Any]], *_: Any, **__: Any) -> str:
        text = "".join(message["content"] for message in messages)
        self.encode_text(text)
        return text

    def encode_text(self, text: str) -> list[int]:
        assert threading.current_thread() is not threading.main_thread()
        self.texts.append(text)
        self.go_on.acquire()
        return [len(text)]

    async def begun(self, count: int) -> None:
        await wait_until_async(lambda: len(self.texts) == count, description=f"{count} texts")


def tokenize(prompts: Prompts, letter: str) -> asyncio.Task[list[int]]:
    request = GenerateRequest(text=letter * THREAD_FROM_CHARACTERS)
    return asyncio.create_task(prompts.ids_of(request, "", letter))


async def test_many_long_prompts_of_a_tenant_delay_one_of_another_by_one_turn() -> None:
    model: Any = SlowModel()
    prompts = Prompts(model, None)
    hostile = [tokenize(prompts, "h") for _ in range(50)]
    await model.begun(LONG_PROMPTS_AT_ONCE)
    other = tokenize(prompts, "o")
    await settled()
    for number in (1, 2):
        model.go_on.release()
        await model.begun(LONG_PROMPTS_AT_ONCE + number)
    assert model.texts[-1][0] == "o"
    model.go_on.release(60)
    assert await asyncio.gather(other, *hostile) == [[THREAD_FROM_CHARACTERS]] * 51


async def test_long_chats_take_the_same_turns() -> None:
    """A template takes 130 ms for 8,192 messages, in which no other call went on."""
    model: Any = SlowModel()
    prompts = Prompts(model, None)
    chat = ChatMessages(messages=[ChatMessage(role="user", content="c")] * THREAD_FROM_MESSAGES)
    rendered = [
        asyncio.create_task(prompts.rendered(GenerateRequest(messages=chat), "c"))
        for _ in range(LONG_PROMPTS_AT_ONCE)
    ]
    await model.begun(LONG_PROMPTS_AT_ONCE)
    other = tokenize(prompts, "o")
    await settled()
    assert prompts._long_prompts._waiting
    model.go_on.release(LONG_PROMPTS_AT_ONCE + 1)
    assert await asyncio.gather(*rendered) == ["c" * THREAD_FROM_MESSAGES] * LONG_PROMPTS_AT_ONCE
    assert await other == [THREAD_FROM_CHARACTERS]


async def test_a_caller_that_leaves_keeps_its_turn_as_long_as_its_thread_works() -> None:
    """Clients that leave at once would have all threads work for them."""
    model: Any = SlowModel()
    prompts = Prompts(model, None)
    left = [tokenize(prompts, "h") for _ in range(LONG_PROMPTS_AT_ONCE)]
    await model.begun(LONG_PROMPTS_AT_ONCE)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    other = tokenize(prompts, "o")
    await settled()
    assert prompts._long_prompts._waiting
    model.go_on.release()
    await model.begun(LONG_PROMPTS_AT_ONCE + 1)
    model.go_on.release(LONG_PROMPTS_AT_ONCE)
    assert await other == [THREAD_FROM_CHARACTERS]
