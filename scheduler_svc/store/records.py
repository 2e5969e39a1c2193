"""Data that goes into the record and that comes out of it. Plain data; no client library, no clock.

Requests have `Final` fields and are not frozen: a frozen dataclass of 34 fields takes 7.5 µs to make, this one 1.5 µs, and
a new leader makes one for each unfinished request.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Standing, StoryLine


class LeaderEpoch(str):
    """Fencing token of a leadership, `number:nonce`. The record compares it for equality; the nonce is random
    and distinguishes two epochs that got the same number because the record was lost.

    The number orders the epochs of one shard, so that a peer can distinguish a newer leader from an older
    one.
    """

    __slots__ = ()

    @property
    def number(self) -> int:
        """Return the number, which is never used again for this shard and is larger than any before."""
        return int(self.partition(":")[0])


@dataclass(frozen=True, slots=True)
class Leader:
    """Present leader of the shard."""

    owner: str
    """Address at which peers connect to it."""
    epoch: LeaderEpoch


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what the shard accepts. Checked by the submit script, so that concurrent submits cannot
    exceed them together.
    """

    max_requests: int | None = None
    """Unfinished requests in the shard. None: no limit."""
    max_prompt_tokens: int | None = None
    """Prompt tokens of all unfinished requests. A single request larger than this limit never fits. Outputs are not counted:
    they take no room before they are computed.
    """
    max_requests_per_tenant: int | None = None
    """Unfinished requests of one tenant."""


@dataclass(slots=True)
class NewRequest:
    """A request as it was submitted. The record issues its sequence number."""

    request_id: Final[str]
    tenant: Final[str]
    model: Final[str]
    priority: Final[int]
    workload_class: Final[str]
    arrival_unix_ms: Final[int]
    prompt_ids: Final[Sequence[int]]
    """Token ids, each below 2^31. Read back as an array."""
    max_tokens: Final[int]
    expected_output_tokens: Final[int | None]
    deadline_unix_ms: Final[int | None]
    """Hard deadline: when it has passed, the work stops and the result is not needed."""
    time_limit_ms: Final[int | None]
    """Soft limit: generation stops this long after arrival, and the tokens so far are the result."""
    keep: Final[bool]
    grace_ms: Final[int]
    """Milliseconds that the request lives without an attached client; −1: without end."""
    idempotency_key: Final[str]
    """Idempotency key of the client, unique per tenant. Empty: none."""
    body_hash: Final[str]
    """Hash of the body. Same idempotency key and same hash: the same request. Another hash: refused."""
    seed: Final[int]
    submission: Final[bytes]
    """Serialized specification (sampling settings, stop strings …) without prompt and outputs. Opaque to the store."""
    length_features: Final[bytes]
    """Packed hashed words of the prompt; empty: none. The record drops them at the end."""
    prompt_blocks: Final[bytes]
    """Names of the blocks that the prompt starts with; empty: none. The record drops them at the end."""


@dataclass(frozen=True, slots=True)
class Shown:
    """State of a request that was on the record before, when it is submitted again."""

    token_ids: Sequence[int] = ()
    """Outputs that a client has seen."""
    lease_epoch: int = 0
    """Lease epoch at least as large as any under which a worker may still hold the request."""


@dataclass(slots=True)
class StoredRequest(NewRequest):
    """A request as the record holds it."""

    sequence: Final[int]
    """Arrival order within the shard."""
    committed_ids: Final[tuple[int, ...]]
    lease_epoch: Final[int]
    """Lease epoch of the newest lease; 0 when there was none."""
    worker_id: Final[str | None]
    """Worker that holds the lease; None while the request is queued, and once it has ended."""
    standing: Final[Standing]
    end: Final[End | None]
    cut_characters: Final[int]
    detail: Final[str]
    story: Final[tuple[StoryLine, ...]]
    """Timeline of the request, written at its end; empty before."""
    ended_unix_ms: Final[int | None]
    first_token_unix_ms: Final[int | None]
    deaths: Final[int]
    """Workers that died while the request may have been in their batch, since the count was last cleared."""
    death_round: Final[int]
    """Rounds of the request at the last of these deaths."""
    prompt_logprobs: Final[bytes]
    """Log probabilities of the prompt, as the leader wrote them; empty: none."""
    pair: Final[str]
    """Fingerprint of the model pair of the worker that it was leased to last: all its outputs are of this pair. Empty:
    it was never leased, or by a leader of an earlier version of the software.
    """


@dataclass(frozen=True, slots=True)
class PackedPromptLogprobs:
    """Log probabilities of a prompt that the worker of a request has reported."""

    request_id: str
    lease_epoch: int
    """Lease epoch of that worker."""
    packed: bytes
    """Opaque to the store."""


def standing_at_arrival(sequence: int) -> Standing:
    """Return the progress of a request that has just been accepted."""
    return Standing(
        rounds=0,
        drafts=0,
        drafted=0,
        accepted=0,
        attained_s=0.0,
        preemptions=0,
        level=0,
        score=float(sequence),
    )


class SubmitStatus(enum.Enum):
    """Outcome of a submission."""

    ACCEPTED = "accepted"
    ATTACHED = "attached"
    """Same idempotency key, same body: `request_id` names the request that exists, which may have ended."""
    CONFLICT = "conflict"
    """Same idempotency key (or same request id), other body."""
    QUEUE_FULL = "queue_full"
    TENANT_FULL = "tenant_full"
    UNKNOWN = "unknown"
    """Neither the request nor its idempotency key is known, and it was not to be accepted."""
    ELSEWHERE = "elsewhere"
    """Another shard decides about the idempotency key."""
    UNCLAIMED = "unclaimed"
    """It is not known which shard decides: the cluster's node with the claim did not answer. Nothing was
    submitted.
    """


@dataclass(frozen=True, slots=True)
class SubmitResult:
    """The record's answer to one submission."""

    status: SubmitStatus
    request_id: str
    sequence: int
    """0 when nothing was accepted or attached to."""
    shard: str = ""
    """For ELSEWHERE: the other shard."""
    error: str = ""
    """For UNCLAIMED."""


class TransitionStatus(enum.Enum):
    """The record's answer to one entry of a batch."""

    OK = 0
    ALREADY = 1
    """This very transition is on the record: a retry. Equivalent to OK."""
    STALE = 2
    """Another lease epoch or position is on the record. Nothing changed."""
    GONE = 3
    """The record has no such unfinished request. Nothing changed."""


ON_RECORD = (TransitionStatus.OK, TransitionStatus.ALREADY)
"""Answers after which the record has the transition. A tuple: the hash of an enum's member is slow."""
