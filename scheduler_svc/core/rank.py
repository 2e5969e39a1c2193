"""What a policy says of one request: its rank, and the estimate behind it."""

from __future__ import annotations

from typing import NamedTuple

MAX_LEVELS = 32
"""Levels are numbered 0 … MAX_LEVELS − 1. The record has a sorted set for each, so the number has to be bounded."""
AHEAD = MAX_LEVELS
"""The bit between priority and level: set while the tenant is ahead of others (`core/tenants.py`), and no business of
a policy. MAX_LEVELS is a power of two, so it is a bit of the class of any priority.
"""


def pack_rank_class(priority: int, level: int) -> int:
    """Pack the precedence above the index into one number; smaller runs first.

    Precedence (our choice): the reserved share stands above all of this and is a flag of its own; then priority,
    higher first; then whether the tenant is ahead (when fairness is on); then the level. Each part has its own bits:

        rank_class = −priority · 2 · MAX_LEVELS + (AHEAD if the tenant is ahead) + level
    """
    return -priority * 2 * MAX_LEVELS + level


class Remaining(NamedTuple):
    """Estimated machine seconds that a request still needs, and the interval it is believed to lie in."""

    mean_s: float
    low_s: float
    high_s: float
    basis: str
    """What the estimate rests on, for people."""


class RankKey(NamedTuple):
    """Where a policy puts a request; what `laps_sd.choose` and the queue order by."""

    rank_class: int
    index_s: float
    """Order inside the class, the set-up cost left out: `resume_cost_s` is added while the KV is not on a device."""
    resume_cost_s: float
    """What it costs to take it up from where its KV lies now; if it lies on the device, to compute it again."""
    pinned: bool
    level: int
    perceptible: bool | None
    """None: the policy makes no such difference."""
    remaining: Remaining
