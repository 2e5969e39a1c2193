"""Items that reach the loop, and what one turn of it collects."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from scheduler_svc.core.commands import Command, Commit, Finish, Lease, Release
from scheduler_svc.core.events import Event
from scheduler_svc.leader.live import Live
from scheduler_svc.leader.sessions import GatewaySession, WorkerSession
from scheduler_svc.store.records import NewRequest, PackedPromptLogprobs, Shown
from scheduler_svc.wire.gateway_messages import Attach, Cancel, Detach, GatewayMessage, Submission
from scheduler_svc.wire.reports import WorkerHello, WorkerMessage
from scheduler_svc.wire.requests import Offer


@dataclass(frozen=True, slots=True)
class FromGateway:
    """One message of a gateway after its hello."""

    session: GatewaySession
    message: GatewayMessage


@dataclass(frozen=True, slots=True)
class GatewayClosed:
    """End of a gateway's stream; its clients may come back through it or another gateway."""

    session: GatewaySession


@dataclass(frozen=True, slots=True)
class WorkerOpened:
    """Accepted hello of a worker."""

    session: WorkerSession
    hello: WorkerHello


@dataclass(frozen=True, slots=True)
class FromWorker:
    """One message of a worker after its hello."""

    session: WorkerSession
    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class WorkerClosed:
    """End of a worker's stream; `silent`: the worker sent nothing for too long."""

    session: WorkerSession
    silent: bool


@dataclass(frozen=True, slots=True)
class DrainOrdered:
    """Order of an operator that a worker leaves."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class CancelOrdered:
    """Order of an operator that a request ends."""

    request_id: str


@dataclass(frozen=True, slots=True)
class LeadInDoubt:
    """Doubt about the record, which may have lost something: compare, and write back what it lacks. Then set
    `settled`.
    """

    settled: asyncio.Event | None = None


Item = (
    FromGateway
    | GatewayClosed
    | WorkerOpened
    | FromWorker
    | WorkerClosed
    | DrainOrdered
    | CancelOrdered
    | LeadInDoubt
)


@dataclass(frozen=True, slots=True)
class Restored:
    """A request that a gateway or a worker has brought back, with those of its tokens that were shown."""

    source: str
    """Label of a metric: gateway or worker."""
    submission: Submission
    new: NewRequest
    shown: Shown


Transition = Commit | Finish | Release | Lease
"""A command of the core for the record."""
TRANSITIONS = (Commit, Finish, Release, Lease)


@dataclass
class Turn:
    """One turn of the loop."""

    now_s: float
    events: list[Event] = field(default_factory=list)
    """Events for the core."""
    submits: list[tuple[GatewaySession, Submission]] = field(default_factory=list)
    """New requests, to be written to the record before the core receives them."""
    offers: list[Offer] = field(default_factory=list)
    """Requests that workers hold and that are not led here."""
    restores: list[Restored] = field(default_factory=list)
    """Requests that no client waits for yet: those that workers brought back, and those that gateways brought
    back while the record did not answer, and did not bring again.
    """
    seen_further: list[tuple[Live, tuple[int, ...]]] = field(default_factory=list)
    """Requests that were submitted again with more outputs shown than the record has, and those outputs."""
    lead_in_doubt: bool = False
    """True if leadership, and what the record holds, must be confirmed before anything else."""
    settled: list[asyncio.Event] = field(default_factory=list)
    """Events to set once the record holds what this leader holds."""
    unknown_attaches: list[tuple[GatewaySession, Attach]] = field(default_factory=list)
    """Attaches to requests that are not led here; they are looked up in the record."""
    unknown_submits: list[tuple[GatewaySession, Submission, str]] = field(default_factory=list)
    """Submissions that the record answered with a request that is not led here, and its id."""
    taken: list[Commit] = field(default_factory=list)
    """Reported tokens that this turn writes before the core has them."""
    prompt_logprobs: list[PackedPromptLogprobs] = field(default_factory=list)
    """Reported logprobs of prompts, which this turn writes too."""
    acknowledge: dict[WorkerSession, int] = field(default_factory=dict)
    """Newest report of each worker that can be acknowledged once this turn is on the record."""
    needs_core: set[WorkerSession] = field(default_factory=set)
    """Workers with reports that are on the record only with the transitions that the core decides."""
    commands: list[Command] = field(default_factory=list)
    """Decisions of the core."""
    transitions: list[Transition] = field(default_factory=list)
    """Those of them that the record must have first. The next turn writes them."""
    refused: set[str] = field(default_factory=set)
    """Requests for which the record refused a transition while or after the core decided: they are left out of
    lists.
    """
    departures: list[tuple[GatewaySession, Detach | Cancel | None]] = field(default_factory=list)
    """Detaches, cancels and closed streams (None), in order. Handled after this turn's admissions, which they
    may be about.
    """
    cancelled: list[tuple[GatewaySession, Cancel, Live]] = field(default_factory=list)
    """Answered once the ends are on the record: a request may have ended by itself in the same turn."""
    respecify: list[tuple[WorkerSession, str]] = field(default_factory=list)
    """Workers and the request ids of which they requested the specification again."""
    chores: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    """Work for the end of the turn, when nothing waits for it any more."""


class Timer:
    """One action at one time. `cancel` frees at once what the action holds, however far away its time is."""

    __slots__ = ("_timers", "action")

    def __init__(self, timers: Timers, action: Callable[[Turn], None]) -> None:
        self.action: Callable[[Turn], None] | None = action
        """Action of the timer; None once it has run or was cancelled."""
        self._timers = timers

    def cancel(self) -> None:
        """Cancel the action. It may have run, or be cancelled already."""
        if self.action is not None:
            self.action = None
            self._timers.cancelled()


class Timers:
    """Actions with their times. Cancelled timers never outnumber the others for long: the memory follows the
    actions that are still to run, not the number of all that were ever set.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._cancelled = 0
        """Number of entries of the heap that will not run."""

    def at(self, when_s: float, action: Callable[[Turn], None]) -> Timer:
        """Run `action` in the first turn at or after `when_s`."""
        timer = Timer(self, action)
        heapq.heappush(self._heap, (when_s, next(self._numbers), timer))
        return timer

    @property
    def next_s(self) -> float | None:
        """Return when the next timer is due; None without one."""
        return self._heap[0][0] if self._heap else None

    def run_due(self, turn: Turn, most: float = math.inf) -> None:
        """Run what is due, at most so many actions: others stay due. An action may set timers that are due at
        once.
        """
        while most > 0 and self._heap and self._heap[0][0] <= turn.now_s:
            timer = heapq.heappop(self._heap)[2]
            action, timer.action = timer.action, None
            if action is None:
                self._cancelled -= 1
            else:
                action(turn)
                most -= 1

    def cancelled(self) -> None:
        """Count one more cancelled entry. At half of the heap it is rebuilt without them, so that a
        cancellation costs constant time on average.
        """
        self._cancelled += 1
        if self._cancelled * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].action is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0
