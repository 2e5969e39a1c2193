"""Commands of the core to its caller.

The caller's contract, per step:
  1. Carry out the record commands (Commit, Finish, Release, Lease) in the order given; nothing below happens
     before the record holds them. Rank is none of them: its values are written with the request's next tokens.
  2. Answer refusals with `Refused` events at the next step, and leave refused requests out of `Assign`.
  3. Then acknowledge reports, show committed tokens to clients, and send Drop and Assign to the workers.

Commands made for every request of every round have their constructors written out, for the reason given in
`core/rank.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from laps_sd.contract.ends import End
from scheduler_svc.core.native import mypyc_attr


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class Standing:
    """Progress of a request and its place in the queue, for the record."""

    rounds: Final[int]
    drafts: Final[int]
    """Rounds that had draft tokens."""
    drafted: Final[int]
    accepted: Final[int]
    attained_s: Final[float]
    preemptions: Final[int]
    level: Final[int]
    score: Final[float]
    """Order inside the level, smaller first; for people."""

    def __init__(
        self,
        rounds: int,
        drafts: int,
        drafted: int,
        accepted: int,
        attained_s: float,
        preemptions: int,
        level: int,
        score: float,
    ) -> None:
        self.rounds = rounds
        self.drafts = drafts
        self.drafted = drafted
        self.accepted = accepted
        self.attained_s = attained_s
        self.preemptions = preemptions
        self.level = level
        self.score = score


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class Commit:
    """Append tokens, if the lease epoch and the position are still the record's; with `end`, finish in the
    same transition."""

    request_id: Final[str]
    lease_epoch: Final[int]
    position: Final[int]
    tokens: Final[tuple[int, ...]]
    standing: Final[Standing]
    end: Final[End | None]
    cut_characters: Final[int]
    detail: Final[str]
    story: Final[tuple[StoryLine, ...]]
    """With `end`: the whole story, for Explain of a finished request. Otherwise empty."""

    def __init__(
        self,
        request_id: str,
        lease_epoch: int,
        position: int,
        tokens: tuple[int, ...],
        standing: Standing,
        end: End | None,
        cut_characters: int,
        detail: str,
        story: tuple[StoryLine, ...],
    ) -> None:
        self.request_id = request_id
        self.lease_epoch = lease_epoch
        self.position = position
        self.tokens = tokens
        self.standing = standing
        self.end = end
        self.cut_characters = cut_characters
        self.detail = detail
        self.story = story


@dataclass(frozen=True, slots=True)
class Finish:
    """End a request that no report ends."""

    request_id: str
    end: End
    detail: str
    standing: Standing
    story: tuple[StoryLine, ...]


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class Lease:
    """Give the request to a worker under a new lease epoch (the record's must be `lease_epoch` − 1)."""

    request_id: Final[str]
    worker_id: Final[str]
    lease_epoch: Final[int]

    def __init__(
        self,
        request_id: str,
        worker_id: str,
        lease_epoch: int,
    ) -> None:
        self.request_id = request_id
        self.worker_id = worker_id
        self.lease_epoch = lease_epoch


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class Release:
    """Take the request back from its worker; the lease epoch stays until the next lease raises it."""

    request_id: Final[str]
    lease_epoch: Final[int]
    deaths: Final[int]
    """As in `Request`, like the next one; the record keeps both for the next leader."""
    death_round: Final[int]

    def __init__(
        self,
        request_id: str,
        lease_epoch: int,
        deaths: int = 0,
        death_round: int = 0,
    ) -> None:
        self.request_id = request_id
        self.lease_epoch = lease_epoch
        self.deaths = deaths
        self.death_round = death_round


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class Rank:
    """The request's place in the queue changed without a commit."""

    request_id: Final[str]
    level: Final[int]
    score: Final[float]
    preemptions: Final[int]

    def __init__(
        self,
        request_id: str,
        level: int,
        score: float,
        preemptions: int = 0,
    ) -> None:
        self.request_id = request_id
        self.level = level
        self.score = score
        self.preemptions = preemptions


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class AssignEntry:
    """The scheduler's part of the input of `laps_sd.contract.choose`; see `Candidate`."""

    request_id: Final[str]
    lease_epoch: Final[int]
    rank_class: Final[int]
    index_s: Final[float]
    resume_cost_s: Final[float]
    reserved: Final[bool]
    pinned: Final[bool]

    def __init__(
        self,
        request_id: str,
        lease_epoch: int,
        rank_class: int,
        index_s: float,
        resume_cost_s: float,
        reserved: bool,
        pinned: bool,
    ) -> None:
        self.request_id = request_id
        self.lease_epoch = lease_epoch
        self.rank_class = rank_class
        self.index_s = index_s
        self.resume_cost_s = resume_cost_s
        self.reserved = reserved
        self.pinned = pinned


@dataclass(frozen=True, slots=True)
class Assign:
    """Replaces the worker's list; best first, longer than its batch while the queue can fill it."""

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


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class StoryLine:
    """One thing that happened to a request, for Explain."""

    at_s: Final[float]
    what: Final[str]
    """arrived, leased, started, paused, resumed, moved, level, perceptible, requeued, cleared, given up,
    ended, …"""
    detail: Final[str]

    def __init__(
        self,
        at_s: float,
        what: str,
        detail: str,
    ) -> None:
        self.at_s = at_s
        self.what = what
        self.detail = detail


Command = Commit | Finish | Lease | Release | Rank | Assign | Drop | Drained
