"""Packages that only an extra of laps-sd brings.

with needs("gateway"):
    from gateway.app import serve
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needs"]


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """End the program with a sentence if a package that is imported inside is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        sys.exit(
            f"laps-sd: the package {error.name} is not installed: pip install 'laps-sd[{extra}]', "
            "or 'laps-sd[all]' for the whole system."
        )
