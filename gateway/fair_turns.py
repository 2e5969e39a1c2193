"""Turns at work of which a gateway does a little at a time, given to tenants in rotation.

    turns = FairTurns(2, most_waiting=64, what="long prompts")
    async with turns.of("acme"):        # two at a time
        ...
    await turns.run("acme", work)       # in a thread

However many calls of one tenant wait, they delay those of another by one turn at a time. What waits takes memory, so
there is a limit of it for each tenant.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

from laps_sd.errors import ResourceExhausted

__all__ = ["FairTurns", "OwnTurns"]

T = TypeVar("T")


class FairTurns:
    """A semaphore whose waiting callers get their turns by tenant, and within a tenant in the order of their
    arrival. For one event loop."""

    def __init__(self, most: int, *, most_waiting: int, what: str) -> None:
        """`most`: turns at the same time. `most_waiting`: the largest sum of the sizes of one tenant's callers that wait,
        unless only one waits. `what`: that which has turns, for errors."""
        self._free = most
        self._most_waiting = most_waiting
        self._what = what
        self._sizes = Counter[str]()
        """Sum of the sizes of the waiting callers of each tenant."""
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting callers by tenant; the first tenant has the next turn."""

    @asynccontextmanager
    async def of(self, tenant: str, size: int = 1) -> AsyncIterator[None]:
        """Wait for a turn, which lasts as long as the context. Raises ResourceExhausted if too much of the tenant waits,
        unless the size is 0."""
        await self._take(tenant, size)
        try:
            yield
        finally:
            self._pass_on()

    async def run(self, tenant: str, work: Callable[[], T], size: int = 1) -> T:
        """Return the result of work in a thread. Its turn lasts until it is done, also if the caller leaves: nothing
        ends a thread. Raises ResourceExhausted as `of` does."""
        await self._take(tenant, size)
        result = asyncio.get_running_loop().run_in_executor(None, work)
        result.add_done_callback(self._ran)
        return await asyncio.shield(result)

    def _ran(self, result: asyncio.Future[T]) -> None:
        if not result.cancelled():
            result.exception()  # its caller may have left
        self._pass_on()

    async def _take(self, tenant: str, size: int) -> None:
        if self._free:
            self._free -= 1
            return
        waiting = self._sizes[tenant]
        if size and waiting and waiting + size > self._most_waiting:
            raise ResourceExhausted(
                f"too many {self._what} of the tenant wait at this gateway", retry_after_s=1.0
            )
        self._sizes[tenant] += size
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given in the same moment
                self._pass_on()
            raise
        finally:
            self._sizes[tenant] -= size
            if not self._sizes[tenant]:
                del self._sizes[tenant]

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


class OwnTurns:
    """Turns that each tenant has for itself, so that one whose turns last long delays no other."""

    def __init__(self, most: int, *, most_waiting: int, what: str) -> None:
        """`most`: turns of one tenant at the same time; for the others see `FairTurns`."""
        self._most = most
        self._most_waiting = most_waiting
        self._what = what
        self._of_tenants: WeakValueDictionary[str, FairTurns] = WeakValueDictionary()
        """Turns of each tenant that has a turn now."""

    def of(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Wait for a turn of the tenant, as `FairTurns.of` does."""
        turns = self._of_tenants.get(tenant)
        if turns is None:
            turns = FairTurns(self._most, most_waiting=self._most_waiting, what=self._what)
            self._of_tenants[tenant] = turns
        return turns.of(tenant)
