"""Turns at work of which a gateway does a little at a time, given to tenants in rotation.

    turns = FairTurns(2)
    async with turns.of("acme"):        # two at a time
        ...

However many calls of one tenant wait, they delay those of another by one turn at a time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["FairTurns"]


class FairTurns:
    """A semaphore whose waiting callers get their turns by tenant, and within a tenant in the order of their
    arrival. For one event loop."""

    def __init__(self, most: int) -> None:
        """`most`: turns at the same time."""
        self._free = most
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting callers by tenant; the first tenant has the next turn."""

    @asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the context."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, tenant: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given in the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, turns = self._waiting.popitem(last=False)
            while turns:
                turn = turns.popleft()
                if not turn.done():  # else its caller has left
                    if turns:
                        self._waiting[tenant] = turns
                    turn.set_result(None)
                    return
        self._free += 1
