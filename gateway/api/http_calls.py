"""The calls in progress at the HTTP port, and their end when the gateway stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from laps_sd.errors import Unavailable

__all__ = ["OpenCalls", "stopping"]


def stopping() -> Unavailable:
    """Return the error of a call that a stopping gateway does not serve."""
    return Unavailable("this gateway is stopping; try another", retry_after_s=1.0)


class OpenCalls:
    """The calls that a stop cuts off if they do not end in time."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        """Serve a call inside the context. Raises Unavailable at `cut_off`."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if limit.expired():
                raise stopping() from None
            raise

    def cut_off(self) -> None:
        """End the calls that are served now."""
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now)
