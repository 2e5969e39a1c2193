"""Messages into and out of the thread or process that runs the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from laps_sd.contract.choose import Residency
from laps_sd.contract.length_probe import LearntProbe, ProbeKind
from worker_svc.engine.interface import (
    NO_CHANGES,
    CacheChanges,
    Capacity,
    ComputedBy,
    RequestRound,
    RoundResult,
    Specification,
)

__all__ = [
    "Acknowledged",
    "Assigned",
    "Dropped",
    "Failed",
    "HeldNow",
    "HeldRequest",
    "HeldRequested",
    "Inbox",
    "Learnt",
    "Listed",
    "Message",
    "Missing",
    "Outcome",
    "ResidencyChange",
    "Round",
    "RunnerHandle",
    "Specified",
    "Taught",
]

# -- what comes in -------------------------------------------------------------------------------------------


class Listed(NamedTuple):
    """One entry of an assignment; `laps_sd.contract.choose.Candidate` documents the fields."""

    request_id: str
    lease_epoch: int
    rank_class: int
    index_s: float
    resume_cost_s: float
    reserved: bool
    pinned: bool


@dataclass(frozen=True, slots=True)
class Specified:
    """A request that may be listed from now on. Replaces one of an older lease."""

    spec: Specification
    lease_epoch: int


@dataclass(frozen=True, slots=True)
class Assigned:
    """An assignment that replaces the previous one from the next round on."""

    entries: tuple[Listed, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Requests to forget if they are held under the named lease epoch or an older one."""

    requests: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Number of the last report that need not be offered again, like all before it."""

    number: int


@dataclass(frozen=True, slots=True)
class HeldRequested:
    """A request for a `HeldNow`."""


@dataclass(frozen=True, slots=True)
class Taught:
    """The learnt state of another worker's probe."""

    learnt: LearntProbe


Message = Specified | Assigned | Dropped | Acknowledged | HeldRequested | Taught


# -- what goes out -------------------------------------------------------------------------------------------


class ResidencyChange(NamedTuple):
    """A new location of the KV of a request that has not ended."""

    request_id: str
    lease_epoch: int
    residency: Residency


@dataclass(slots=True)
class Round:
    """One report. Cheap to make; its wire message is built elsewhere. Never changed once it is delivered."""

    number: int
    result: RoundResult
    """Result of the round; without requests and times in a report that only contains errors."""
    progress: list[tuple[int, RequestRound]]
    """(lease epoch, outcome) of the requests of the round, and of those that failed outside of one."""
    residency: list[ResidencyChange]
    swap_out_s: float
    """Seconds spent on making room before the round; not part of `result`."""
    idle_s: float
    """Seconds from the end of the round before to the start of this one, without making room."""
    waited_s: float
    """The part of `idle_s` in which there was nothing to run."""
    preempted: int
    """Requests of the round before that have not ended and were not in this one."""
    out_of_memory: int = 0
    """Rounds since the report before for which the device had no memory."""
    cache: CacheChanges = NO_CHANGES
    """Changes of the prefix cache since the report before."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Requests that are listed, but without a specification of that lease."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A held request as reported in a hello."""

    spec: Specification
    lease_epoch: int
    residency: Residency
    output_ids: tuple[int, ...]
    acknowledged: int
    """Number of leading `output_ids` that are acknowledged."""
    predicted_remaining_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class HeldNow:
    """All that is held, after the report `last_report` and before the next."""

    requests: tuple[HeldRequest, ...]
    last_report: int
    cached_blocks: bytes = b""
    """Names of the prompt blocks in the prefix cache. The next report may add some of them again."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of the thread, because the engine cannot be used any more."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Learnt:
    """The learnt state of the engine's probe, for other workers."""

    learnt: LearntProbe


Outcome = Round | Missing | HeldNow | Failed | Learnt


# -- the two ends --------------------------------------------------------------------------------------------


class Inbox(Protocol):
    """The runner's end of the way on which messages arrive."""

    stopped: bool
    """True once the runner must end."""

    def take(self) -> Sequence[Message]:
        """Return the messages that have arrived, in order, without waiting."""
        ...

    def wait(self, *, holds_nothing: bool) -> None:
        """Wait until a message has arrived, or the runner must end. `holds_nothing`: it holds no request."""
        ...


class RunnerHandle(Protocol):
    """A runner as its link sees it: the engine runs in another thread or process."""

    @property
    def capacity(self) -> Capacity:
        """Capacity of the engine."""
        ...

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the engine's model pair."""
        ...

    @property
    def facts(self) -> tuple[str, ...]:
        """Facts about the engine, for the log."""
        ...

    @property
    def computed_by(self) -> ComputedBy:
        """The same for metrics."""
        ...

    @property
    def probe_kind(self) -> ProbeKind | None:
        """Kind of the engine's probe of output lengths, if it has one."""
        ...

    def start(self, deliver: Callable[[Outcome], None]) -> None:
        """Start to run rounds; `deliver` is called in another thread with each outcome."""
        ...

    def put(self, *messages: Message) -> None:
        """Hand over messages; they are taken in, in order, before the next round. Returns at once."""
        ...

    @property
    def holds_nothing(self) -> bool:
        """True if no request is held and no message is on its way."""
        ...

    def stop(self) -> None:
        """End after the present round. Returns when it has ended, or hangs."""
        ...
