"""Lets classes of the compiled core have subclasses that are not compiled, such as those of the simulator."""

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
