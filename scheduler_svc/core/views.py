"""Views of the core for people and metrics. They are copies: nothing here changes the core."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from scheduler_svc.core.commands import StoryLine


class RequestState(enum.Enum):
    """State of an unfinished request."""

    QUEUED = "queued"
    """With no worker."""
    LISTED = "listed"
    """On a worker's list, not running."""
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Ahead:
    """Numbers of unfinished requests that come before one, by the first reason that puts them there."""

    by_priority: int
    """Requests of a higher priority."""
    by_tenant: int
    """Requests of its priority whose tenants had less service than its own (only with fairness between
    tenants)."""
    by_level: int
    """Requests of its priority and turn, at a lower level."""
    by_rank: int
    """Requests that are equal in all of that, and earlier by the order of the policy."""

    @property
    def total(self) -> int:
        """Return its position among all unfinished requests; 0 is the best."""
        return self.by_priority + self.by_tenant + self.by_level + self.by_rank


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything about one unfinished request. Names no other request."""

    request_id: str
    tenant: str
    priority: int
    state: RequestState
    policy: str
    level: int | None
    """Its level; None if the policy has no levels."""
    ordered_by: str
    """Basis of its place, for people."""
    index_s: float
    """Number that orders it, set-up cost included where the policy counts that. In seconds, if it is a time
    at all."""
    ahead: Ahead
    perceptible: bool | None
    """True if its level is known; None if the policy makes no such difference."""
    remaining_s: float
    remaining_low_s: float
    remaining_high_s: float
    basis: str
    """Basis of the estimate, for people."""
    worker_id: str | None
    lease_epoch: int
    reserved: bool
    """Among the oldest (of the tenants that are not ahead): may use the reserved share."""
    tenant_ahead: bool
    """True if it waits for requests of other tenants, because its own had more service (only with fairness
    between tenants)."""
    waits_for: str
    """Condition that must hold before its rank matters, or before it gets a token although it runs, for people; empty:
    there is none."""
    waiting_s: float
    """Time since its arrival."""
    attained_s: float
    rounds: int
    drafted: int
    accepted: int
    emitted: int
    preemptions: int
    story: tuple[StoryLine, ...]
    """Times on the clock of `step`."""


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One line of the queue."""

    request_id: str
    tenant: str
    priority: int
    state: RequestState
    level: int | None
    ordered_by: str
    index_s: float
    perceptible: bool | None
    waiting_s: float
    attained_s: float
    emitted: int
    worker_id: str | None


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker and what it carries."""

    worker_id: str
    up: bool
    """False: the record has leases of it, and this leader has received no hello from it."""
    draining: bool
    slots: int
    running: int
    listed: int
    """Requests on its list, the running ones included."""
    target_blocks: int
    draft_blocks: int
    free_target_blocks: int
    free_draft_blocks: int
    rounds: int
    tokens: int
    acceptance: float
    """Accepted over drafted tokens, over recent rounds."""
    tokens_per_s: float
    """Recent rate."""
    moving_cost_s: float
    """Machine seconds that moving its requests elsewhere would cost. The worker with the lowest cost is the
    cheapest to lose."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The shard in numbers."""

    queued: int
    """Requests with no worker."""
    listed: int
    """Requests on lists, the running ones included."""
    running: int
    backlog_s: float
    """Machine seconds of remaining work, by the estimates, if all slots were taken."""
    preemptions: int = 0
    """Pauses of running requests since this leader began."""
