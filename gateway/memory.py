"""Return freed memory to the operating system.

glibc keeps freed memory between blocks that are still in use: after a flood of large messages a gateway would
keep hundreds of MiB as long as it runs. `malloc_trim` returns them.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

__all__ = ["keep_returning"]

RETURN_EVERY_S = 5.0
"""Seconds between two calls; our choice. A call takes about a millisecond, in a thread."""


async def keep_returning() -> None:
    """Return freed memory every few seconds until cancelled; return at once if the C library has no such
    call."""
    trim = _trim()
    while trim is not None:
        await asyncio.sleep(RETURN_EVERY_S)
        await asyncio.to_thread(trim, 0)


def _trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
