"""Reads and writes of the record that are repeated until it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from scheduler_svc.leader.outage import Outage
from scheduler_svc.store.errors import Fenced, StoreUnavailable

T = TypeVar("T")

FIRST_RETRY_S = 0.02
LONGEST_RETRY_S = 1.0


async def until_answered(
    outage: Outage,
    attempt: Callable[[], Awaitable[T]],
    *,
    fenced: Callable[[], Awaitable[None]] | None = None,
) -> T:
    """Call `attempt` until the record answers it, and return its result. The pause between two attempts doubles, up to
    `LONGEST_RETRY_S`.

    After Fenced, `fenced` is awaited before the next attempt; without it, Fenced is raised. The attempt must
    be one that is safe to repeat.
    """
    pause_s = FIRST_RETRY_S
    while True:
        try:
            return await attempt()
        except Fenced:
            if fenced is None:
                raise
            await fenced()
        except StoreUnavailable as error:
            outage.began(error, stuck=True)
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_RETRY_S, pause_s * 2)
