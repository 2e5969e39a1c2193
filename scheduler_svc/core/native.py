"""Instructions to mypyc for classes of the core, by `mypyc_attr`. It changes nothing where the core runs uncompiled.

* `acyclic=True`: an object is never part of a reference cycle, so the garbage collector need not look at it. A
  shard with 100,000 requests has a million such objects.
* `free_list_len=1`: the memory of the last object that was freed is used for the next one. For objects that live
  for one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

try:
    from mypy_extensions import mypyc_attr
except ImportError:  # pragma: no cover  # only the compiler reads it

    def mypyc_attr(*attrs: str, **kwattrs: object) -> Callable[[T], T]:
        """Return a decorator that changes nothing."""
        return lambda decorated: decorated


__all__ = ["mypyc_attr"]
