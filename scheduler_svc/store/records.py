"""What goes into the record and what comes out of it. Plain data; no client library, no clock."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.commands import Standing, StoryLine
from scheduler_svc.core.events import End


class LeaderEpoch(str):
    """Fencing token of a leadership, `number:nonce`. Compared for equality by the record; the nonce is random and tells
    apart two epochs that got the same number because the record was lost.

    The number orders the epochs of one shard, so that a peer can tell a newer leader from an older one.
    """

    __slots__ = ()

    @property
    def number(self) -> int:
        """Never used again for this shard, and larger than any before."""
        return int(self.partition(":")[0])


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads the shard now."""

    owner: str
    """Where peers dial it."""
    epoch: LeaderEpoch


@dataclass(frozen=True, slots=True)
class Limits:
    """What the shard takes in. Checked by the submit script, so that concurrent submits cannot exceed them together."""

    max_requests: int | None = None
    """Unfinished requests in the shard. None: no limit."""
    max_tokens: int | None = None
    """Sum over the unfinished requests of prompt tokens and `max_tokens`. A request larger than all of it never fits."""
    max_requests_per_tenant: int | None = None
    """Unfinished requests of one tenant."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as it was submitted. The record issues its sequence number."""

    request_id: str
    tenant: str
    model: str
    priority: int
    workload_class: str
    arrival_unix_ms: int
    prompt_ids: Sequence[int]
    """Token ids, each below 2^31. Read back as a tuple."""
    max_tokens: int
    expected_output_tokens: int | None
    deadline_unix_ms: int | None
    """Hard: when it has passed, the work stops and nobody wants the result."""
    time_limit_ms: int | None
    """Soft: generation stops this long after arrival and what exists is the result."""
    keep: bool
    grace_ms: int
    """How long it lives with nobody attached; −1: without end."""
    idempotency_key: str
    """The client's, unique per tenant. Empty: none."""
    body_hash: str
    """Same idempotency key and same hash: the same request. Another hash: refused."""
    seed: int
    submission: bytes
    """The serialized submission (sampling settings, stop strings …). Opaque to the store."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What is known of a request that was on the record before, when it is submitted again."""

    token_ids: Sequence[int] = ()
    """Outputs that a client has seen."""
    lease_epoch: int = 0
    """At least as large as any that a worker may still hold it under."""


@dataclass(frozen=True, slots=True)
class StoredRequest(NewRequest):
    """A request as the record holds it."""

    sequence: int
    """Arrival order within the shard."""
    committed_ids: tuple[int, ...]
    lease_epoch: int
    """Of the newest lease; 0 when there was none."""
    worker_id: str | None
    """Who holds the lease; None while it is queued, and once it has ended."""
    standing: Standing
    end: End | None
    cut_characters: int
    detail: str
    story: tuple[StoryLine, ...]
    """Written at the end; empty before."""
    ended_unix_ms: int | None
    first_token_unix_ms: int | None
    deaths: int = 0
    """Workers that died while it may have been in their batch, since it was last cleared; and its rounds at the last death."""
    death_round: int = 0


class SubmitStatus(enum.Enum):
    """What became of a submission."""

    ACCEPTED = "accepted"
    ATTACHED = "attached"
    """Same idempotency key, same body: `request_id` names the request that exists, which may have ended."""
    CONFLICT = "conflict"
    """Same idempotency key (or same request id), other body."""
    QUEUE_FULL = "queue_full"
    TENANT_FULL = "tenant_full"
    ELSEWHERE = "elsewhere"
    """Another shard decides about the idempotency key."""


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """The record's answer to one submission."""

    status: SubmitStatus
    request_id: str
    sequence: int
    """0 when nothing was accepted or attached to."""
    shard: str = ""
    """Of ELSEWHERE: which."""


class TransitionStatus(enum.Enum):
    """The record's answer to one entry of a batch."""

    OK = 0
    ALREADY = 1
    """This very transition is on the record: a retry. As good as OK."""
    STALE = 2
    """Another lease epoch or position is on the record. Nothing changed."""
    GONE = 3
    """No such unfinished request. Nothing changed."""
