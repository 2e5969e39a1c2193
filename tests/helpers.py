"""Small things that many tests need."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from laps_sd.stack.ports import free_port as free_port

T = TypeVar("T")
PATIENCE_S = 60.0
"""Seconds for which a test waits. A machine that runs other tests at the same time may need most of them."""


class NotYetError(AssertionError):
    """Failure of a condition to become true in time."""


def wait_until(
    predicate: Callable[[], T], *, description: str, timeout_s: float = PATIENCE_S, every_s: float = 0.02
) -> T:
    """Call `predicate` until it returns a true value, and return that."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise NotYetError(f"not within {timeout_s} s: {description} (last answer: {answer!r})")
        time.sleep(every_s)


async def wait_until_async(
    predicate: Callable[[], T | Awaitable[T]],
    *,
    description: str,
    timeout_s: float = PATIENCE_S,
    every_s: float = 0.02,
) -> T:
    """Wait as `wait_until` does, without blocking the loop; `predicate` may be a coroutine function."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = predicate()
        answer: T = await found if inspect.isawaitable(found) else found
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise NotYetError(f"not within {timeout_s} s: {description} (last answer: {answer!r})")
        await asyncio.sleep(every_s)
