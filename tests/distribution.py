"""Which process of `make test` runs which files: whole ones, those that wait most first.

A file that starts processes waits for them most of its time, and a file of the core computes. In this order
the machine is busy to the end, and the last files are short.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[1]
SHARED = "files that share the stacks of a session"
LAST = ("tests/services", "tests/worker", "tests/k8s", "tests/store", "tests/sim", "tests/core")
"""Folders of files that wait less, in this order; all other files come before them."""


def rank(file: str) -> int:
    """Return the place of a file in the order of the start."""
    if shares_stacks(file):
        return 0
    return next((place for place, folder in enumerate(LAST, 2) if file.startswith(folder)), 1)


@functools.cache
def shares_stacks(file: str) -> bool:
    """Return whether a file uses a stack that is started once in a session, and so in each process."""
    if file.startswith("tests/fundamentals/"):
        return True
    return re.search(r"\b(fake_stack|demo_stack)\b", (ROOT / file).read_text(encoding="utf-8")) is not None


class Distribution(LoadFileScheduling):
    """Gives each process whole files; all files that share stacks go to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return SHARED if shares_stacks(file) else file
