"""What the core tells people and metrics. Copies: nothing here changes the core."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from scheduler_svc.core.commands import StoryLine


class Place(enum.Enum):
    """Where an unfinished request is."""

    QUEUED = "queued"
    """With no worker."""
    LISTED = "listed"
    """On a worker's list, not running."""
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Ahead:
    """How many unfinished requests come before one, by the first thing that puts them there."""

    by_priority: int
    """Theirs is higher."""
    by_tenant: int
    """Of its priority; its own tenant had more service than theirs (only with fairness between tenants)."""
    by_level: int
    """Of its priority and turn, at a lower level."""
    by_rank: int
    """Beside it in all of that, and sooner by what the policy orders by."""

    @property
    def total(self) -> int:
        """Its rank among all unfinished requests; 0 is the best."""
        return self.by_priority + self.by_tenant + self.by_level + self.by_rank


@dataclass(frozen=True, slots=True)
class Explanation:
    """Everything about one unfinished request. Names no other request."""

    request_id: str
    tenant: str
    priority: int
    place: Place
    policy: str
    level: int | None
    """None: the policy has no levels."""
    ordered_by: str
    """What its place rests on, for people."""
    index_s: float
    """The number behind it, set-up cost included where the policy counts that. Seconds, if it is of time at all."""
    ahead: Ahead
    perceptible: bool | None
    """None: the policy makes no such difference."""
    remaining_s: float
    remaining_low_s: float
    remaining_high_s: float
    basis: str
    """What the estimate rests on, for people."""
    worker_id: str | None
    lease_epoch: int
    reserved: bool
    """Among the oldest (of the tenants that are not ahead): may use the reserved share."""
    tenant_ahead: bool
    """It waits for requests of other tenants, because its own had more (only with fairness between tenants)."""
    waits_for: str
    """What it needs before its rank matters, for people; empty: some worker that is up could hold it."""
    waiting_s: float
    """Since its arrival."""
    attained_s: float
    rounds: int
    drafted: int
    accepted: int
    emitted: int
    preemptions: int
    arrival_s: float
    story: tuple[StoryLine, ...]
    """Times, like `arrival_s`, on the clock of `step`."""

    @property
    def fits_a_worker(self) -> bool:
        """False: no worker that is up could hold it, so it waits for one."""
        return not self.waits_for


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One line of the queue."""

    request_id: str
    tenant: str
    priority: int
    place: Place
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
    """False: the record has leases of it, and it has not said hello to this leader."""
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
    """Accepted over drafted tokens, of late."""
    tokens_per_s: float
    """Of late."""
    moving_cost_s: float
    """Machine seconds that taking its requests elsewhere would cost: who is cheapest to lose."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The shard in numbers."""

    queued: int
    """With no worker."""
    listed: int
    """On lists, the running ones included."""
    running: int
    backlog_s: float
    """Machine seconds of work that is left, by the estimates, were all slots taken."""
