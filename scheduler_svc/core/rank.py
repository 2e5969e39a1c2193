"""The result of a policy for one request: its rank, and the estimate that the rank uses; and the key that
orders requests by it.

The first two are made for every request of every round, so their constructors are written out: compiled, such
a class costs a tenth of a named tuple, or of a dataclass whose constructor is generated when it is imported,
and stores its numbers in itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final, final

from scheduler_svc.core.estimates.basis import Basis
from scheduler_svc.core.native import mypyc_attr

MAX_LEVELS: Final = 32
"""Levels are numbered 0 … MAX_LEVELS − 1: five bits of a rank's class."""
AHEAD: Final = MAX_LEVELS
"""The bit between priority and level: set while the tenant is ahead of others (`core/state/tenants.py`).
Policies do not use it. MAX_LEVELS is a power of two, so it is a bit of the class of any priority."""
BEHIND: Final = -MAX_LEVELS
"""Added to the class of a request on a list while its tenant is behind others."""

OrderKey = tuple[int, float, str]
"""(rank_class, cost, request id): how requests are compared everywhere, smaller first."""


def pack_rank_class(priority: int, level: int) -> int:
    """Pack the precedence above the index into one number; smaller runs first.

    Precedence (our choice): the reserved share stands above all of this and is a flag of its own; then
    priority, higher first; then whether the tenant is behind or ahead (when fairness is on); then the level:

        rank_class = −priority · 4 · MAX_LEVELS + (BEHIND, 0 or AHEAD) + level
    """
    return -priority * 4 * MAX_LEVELS + level


def last_of_class(key: OrderKey) -> OrderKey:
    """Return a key after all keys of the same priority and tenant turn, whatever their level and cost."""
    return (key[0] | (MAX_LEVELS - 1), inf, "")


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class Remaining:
    """Estimated machine seconds that a request still needs, and the interval it is believed to lie in."""

    mean_s: Final[float]
    low_s: Final[float]
    high_s: Final[float]
    basis: Final[Basis]
    """Source of the estimate of the length."""
    own_rounds: Final[int | None]
    """The request's own rounds that its pace is estimated from; None if it is taken to be as fast as its
    class."""
    note: Final[str]
    """More about the estimate, for people."""

    def __init__(
        self,
        mean_s: float,
        low_s: float,
        high_s: float,
        basis: Basis,
        own_rounds: int | None = None,
        note: str = "",
    ) -> None:
        self.mean_s = mean_s
        self.low_s = low_s
        self.high_s = high_s
        self.basis = basis
        self.own_rounds = own_rounds
        self.note = note


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class RankKey:
    """Rank that a policy gives to a request; `laps_sd.contract.choose` and the queue order by it."""

    rank_class: Final[int]
    index_s: Final[float]
    """Order inside the class, the set-up cost left out: `resume_cost_s` is added while the KV is not on a
    device."""
    resume_cost_s: Final[float]
    """Cost of taking the request up from where its KV lies now, in machine seconds; if the KV is on the
    device, the cost of computing it again. 0 with a policy that does not count it."""
    pinned: Final[bool]
    level: Final[int]
    perceptible: Final[bool | None]
    """True if its level is known; None if the policy makes no such difference."""
    remaining: Final[Remaining]

    def __init__(
        self,
        rank_class: int,
        index_s: float,
        resume_cost_s: float,
        pinned: bool,
        level: int,
        perceptible: bool | None,
        remaining: Remaining,
    ) -> None:
        self.rank_class = rank_class
        self.index_s = index_s
        self.resume_cost_s = resume_cost_s
        self.pinned = pinned
        self.level = level
        self.perceptible = perceptible
        self.remaining = remaining
