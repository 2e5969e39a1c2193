"""Everything the core can ask for.

The caller's contract, per step:
  1. Carry out the record commands (Commit, Finish, Release, Lease, Rank) in the order given; nothing below
     happens before the record holds them.
  2. Answer refusals with `Refused` events at the next step, and leave refused requests out of `Assign`.
  3. Then acknowledge reports, show committed tokens to clients, and send Drop and Assign to the workers.

What is made for every request of every round is a named tuple, which costs a third of a frozen dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from scheduler_svc.core.events import End


class Standing(NamedTuple):
    """What the record keeps of a request's progress and place in the queue."""

    rounds: int
    drafted: int
    accepted: int
    attained_s: float
    preemptions: int
    level: int
    score: float
    """Order inside the level, smaller first; what an operator reads in the sorted set."""


class Commit(NamedTuple):
    """Append tokens, if the lease epoch and the position are still the record's; with `end`, finish in the same transition."""

    request_id: str
    lease_epoch: int
    position: int
    tokens: tuple[int, ...]
    standing: Standing
    end: End | None
    cut_characters: int
    detail: str
    story: tuple[StoryLine, ...]
    """With `end`: the whole story, for Explain of a finished request. Otherwise empty."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End a request that no report ends."""

    request_id: str
    end: End
    detail: str
    standing: Standing
    story: tuple[StoryLine, ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """Give the request to a worker under a new lease epoch (the record's must be `lease_epoch` − 1)."""

    request_id: str
    worker_id: str
    lease_epoch: int


@dataclass(frozen=True, slots=True)
class Release:
    """Take the request back from its worker; the lease epoch stays until the next lease raises it."""

    request_id: str
    lease_epoch: int


@dataclass(frozen=True, slots=True)
class Rank:
    """The request's place in the queue changed without a commit."""

    request_id: str
    level: int
    score: float


class AssignEntry(NamedTuple):
    """What `laps_sd.choose` needs to know from the scheduler; see `Candidate`."""

    request_id: str
    lease_epoch: int
    rank_class: int
    index_s: float
    resume_cost_s: float
    reserved: bool
    pinned: bool


@dataclass(frozen=True, slots=True)
class Assign:
    """Replaces the worker's list; best first, longer than its batch while that much is queued."""

    worker_id: str
    entries: tuple[AssignEntry, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """The worker forgets these and frees what they hold; only the named lease epoch or an older one."""

    worker_id: str
    requests: tuple[tuple[str, int], ...]
    """(request id, lease epoch)"""


@dataclass(frozen=True, slots=True)
class Drained:
    """The worker holds nothing any more and may leave."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class StoryLine:
    """One thing that happened to a request, for Explain."""

    at_s: float
    what: str
    """arrived, leased, started, paused, resumed, moved, level, perceptible, requeued, ended, …"""
    detail: str


Command = Commit | Finish | Lease | Release | Rank | Assign | Drop | Drained
