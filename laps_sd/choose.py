"""Which of the ranked requests of one worker run next: one pure function, the same in the worker and in the simulator.

The scheduler decides levels, ranks, priorities and placement; this function applies what only the place
knows at the moment of the round: slots, KV blocks, hysteresis, the reserved share and the KV latch.

Invariants
  * Standard library only: no clock, no I/O, no randomness. Equal arguments give equal answers.
  * Nothing is evicted while the KV of everything that runs fits.
  * The chosen requests always fit: slots, and blocks with their growth in this round.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Residency(enum.IntEnum):
    """Where the KV of a request lies on its worker."""

    NONE = 0
    HOST = 1
    DEVICE = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """One entry of the assignment, joined with what the worker knows of the request."""

    request_id: str
    rank_class: int
    """Precedence above the index (priority, tenant deficit, level packed into one number); smaller runs first."""
    index_s: float
    """Position inside the class: machine seconds that remain, or what the policy orders by; smaller runs first."""
    resume_cost_s: float
    """Machine seconds it costs to take it up again (prefill, swap in) if it is not on the device."""
    reserved: bool
    """One of the oldest requests of the shard: may use the reserved share."""
    pinned: bool
    """Never paused once it runs (policies without preemption)."""
    running: bool
    """Took part in the previous round."""
    residency: Residency
    tokens: int
    """Context length now: prompt and outputs."""
    target_blocks: int
    """KV blocks of the target pool that it holds on the device."""
    draft_blocks: int


@dataclass(frozen=True, slots=True)
class Place:
    """The worker at this round boundary."""

    slots: int
    block_size: int
    target_blocks: int
    """Blocks in the whole target pool."""
    draft_blocks: int
    max_growth_tokens: int
    """Tokens a request can grow in one round: the longest draft and the bonus token (γ + 1)."""
    round_number: int
    """Rounds this worker has run; drives the reserved slices of a one-slot worker."""
    kv_latched: bool = False
    """What `Choice.kv_latched` said at the last round."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the worker does before its next round."""

    run: tuple[str, ...]
    """Requests of the next round, best first."""
    evict: tuple[str, ...]
    """Requests on the device whose blocks are needed: worst rank first. Swapped out, or dropped if the host is full."""
    kv_latched: bool = False
    """True while KV pressure suspends preemption (POLICY 2.9); handed back in at the next round."""


def choose(candidates: Sequence[Candidate], place: Place) -> Choice:
    """Return who runs in the next round and whose KV goes first."""
    raise NotImplementedError
