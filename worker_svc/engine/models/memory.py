"""Returns memory to the system while a model changes its layout."""

from __future__ import annotations

import ctypes


def _trim_of_libc() -> ctypes._NamedFuncPointer | None:
    try:
        return ctypes.CDLL(None).malloc_trim  # glibc
    except (OSError, AttributeError):
        return None


_TRIM = _trim_of_libc()


def return_memory() -> None:
    """Return freed memory to the system, where the C library keeps it otherwise.

    glibc keeps freed blocks below 32 MB for later ones. Those of a weight are of no use for the next one's new
    layout as long as pieces of others lie between them, and a model would be in memory twice.
    """
    if _TRIM is not None:
        _TRIM(0)
