"""What a policy says of one request: its rank, and the estimate behind it."""

from __future__ import annotations

from typing import NamedTuple

MAX_LEVELS = 32
"""Levels are numbered 0 … MAX_LEVELS − 1. The record has a sorted set for each, so the number has to be bounded."""
DEFICIT_BANDS = 64
"""Room for the tenant deficit between priority and level."""


def pack_rank_class(priority: int, level: int, deficit_band: int = 0) -> int:
    """Pack the precedence above the index into one number; smaller runs first.

    Precedence (our choice): the reserved share stands above all of this and is a flag of its own; then priority,
    higher first; then the tenant's deficit (when fairness is on); then the level. Each part has its own digits:

        rank_class = (−priority · DEFICIT_BANDS + deficit_band) · MAX_LEVELS + level
    """
    return (-priority * DEFICIT_BANDS + deficit_band) * MAX_LEVELS + level


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
