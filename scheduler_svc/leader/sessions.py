"""Content to be sent on each stream, as state rather than as a queue.

A session holds the *newest* state for its peer, so a slow peer costs no memory: an assignment replaces the
one before, an acknowledgement the smaller one, and an attachment is only a position in tokens that the
working copy (or the record) holds anyway.

The loop writes to a session, the stream's handler takes from it; both on one event loop, so no lock.

Messages that are made for every request of every round are filled in place, field by field: half the time of
building messages and putting them into others, which copies them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from scheduler_svc.core.commands import AssignEntry
from scheduler_svc.leader.live import Attachment, Live

MAX_BYTES_PER_MESSAGE = 2 * 1024 * 1024
"""Bytes of specifications in one message, which stays well below the limit of the peer: an output format may
be larger than its prompt.
"""
MAX_TOKENS_PER_MESSAGE = 65_536
"""Token ids in one message of deliveries."""
TOKENS_PER_ALTERNATIVE = 4
"""Size of a token's probability on the wire, in token ids."""
MAX_DELIVERIES_PER_MESSAGE = 512
MAX_ANSWERS = 10_000
"""Answers to a gateway, or drops for a worker, that may wait to be sent; with more, the peer is no longer
read: a peer that sends requests and does not read the answers costs no more memory than this.
"""
ACKNOWLEDGE_WITHIN_S = 0.02
"""Seconds that an acknowledgement may wait for another message to travel with. A worker needs it only for its
bound of unacknowledged tokens, and each message costs the worker interpreter time that its engine needs.
"""


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(eq=False)
class WorkerSession:
    """One connected worker process."""

    worker_id: str
    worker_name: str
    device: str
    fingerprint: str
    known: dict[str, int] = field(default_factory=dict)
    """Specifications the worker has: request id → lease epoch it has it under."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Event = field(default_factory=_set_event)
    """Event that is cleared while `MAX_ANSWERS` wait."""
    closed: bool = False
    close_reason: str = ""
    _specifications: dict[str, worker_pb.LeasedSpecification] = field(default_factory=dict)
    _drops: dict[str, int] = field(default_factory=dict)
    _assignment: worker_pb.WorkerLinkReply | None = None
    _assignments: int = 0
    _acknowledged: int = 0
    _acknowledged_sent: int = 0
    _acknowledging: asyncio.TimerHandle | None = None
    _acknowledgement_due: bool = False
    _drain: bool = False
    _drained: bool = False

    def acknowledge(self, number: int) -> None:
        """Acknowledge all reports up to `number`, which are handled for good."""
        self._acknowledged = max(self._acknowledged, number)
        if self._acknowledging is None:
            self._acknowledging = asyncio.get_running_loop().call_later(
                ACKNOWLEDGE_WITHIN_S, self._acknowledge_alone
            )

    def _acknowledge_alone(self) -> None:
        self._acknowledgement_due = True
        self.wake.set()

    def drop(self, requests: tuple[tuple[str, int], ...]) -> None:
        """Send the order to drop these requests, at this lease epoch or an older one."""
        for request_id, lease_epoch in requests:
            self._drops[request_id] = max(lease_epoch, self._drops.get(request_id, 0))
            pending = self._specifications.get(request_id)
            if pending is not None and pending.lease_epoch <= lease_epoch:
                del self._specifications[request_id]
            if self.known.get(request_id, -1) <= lease_epoch:
                self.known.pop(request_id, None)
        if len(self._drops) >= MAX_ANSWERS:
            self.room.clear()
        self.wake.set()

    def specify(self, live: Live, lease_epoch: int, origin: gateway_pb.Origin) -> None:
        """Send the specification before the next assignment."""
        self.known[live.request_id] = lease_epoch
        self._specifications[live.request_id] = worker_pb.LeasedSpecification(
            specification=live.specification_with_outputs(origin, lease_epoch), lease_epoch=lease_epoch
        )
        self.wake.set()

    def assign(self, entries: Sequence[AssignEntry]) -> None:
        """Replace the worker's list."""
        self._assignments += 1
        self._assignment = worker_pb.WorkerLinkReply()
        self._assignment.assignment.number = self._assignments
        add = self._assignment.assignment.entries.add
        for listed in entries:
            entry = add()
            entry.request_id = listed.request_id
            entry.lease_epoch = listed.lease_epoch
            entry.rank_class = listed.rank_class
            entry.index_s = listed.index_s
            entry.resume_cost_s = listed.resume_cost_s
            entry.reserved = listed.reserved
            entry.pinned = listed.pinned
        self.wake.set()

    def drain(self) -> None:
        """Send the order of an operator that this worker leaves."""
        self._drain = True
        self.wake.set()

    def drained(self) -> None:
        """Send the notice that the worker holds nothing any more."""
        self._drained = True
        self.wake.set()

    def close(self, reason: str) -> None:
        """End the stream: another leader, another connection of the same worker, or silence."""
        self.closed = True
        self.close_reason = reason
        self.wake.set()

    def take(self) -> list[worker_pb.WorkerLinkReply]:
        """Return the messages to send now, in the order that a worker needs: drops, specifications,
        assignment, the rest.
        """
        self.wake.clear()
        self.room.set()
        replies: list[worker_pb.WorkerLinkReply] = []
        if self._drops:
            drops = [
                worker_pb.DropRequest(request_id=request_id, lease_epoch=epoch)
                for request_id, epoch in self._drops.items()
            ]
            replies.append(worker_pb.WorkerLinkReply(drop=worker_pb.DropRequests(requests=drops)))
            self._drops = {}
        replies.extend(
            worker_pb.WorkerLinkReply(specifications=chunk)
            for chunk in _chunks(list(self._specifications.values()))
        )
        self._specifications = {}
        if self._assignment is not None:
            replies.append(self._assignment)
            self._assignment = None
        if self._acknowledging is not None and (replies or self._drained or self._acknowledgement_due):
            self._acknowledging.cancel()
            self._acknowledging, self._acknowledgement_due = None, False
            if self._acknowledged > self._acknowledged_sent:
                self._acknowledged_sent = self._acknowledged
                replies.append(
                    worker_pb.WorkerLinkReply(
                        acknowledged=worker_pb.ReportsAcknowledged(number=self._acknowledged)
                    )
                )
        if self._drain:
            self._drain = False
            replies.append(worker_pb.WorkerLinkReply(drain=worker_pb.Drain()))
        if self._drained:
            self._drained = False
            replies.append(worker_pb.WorkerLinkReply(drained=worker_pb.Drained()))
        return replies


def _chunks(specifications: list[worker_pb.LeasedSpecification]) -> Iterator[worker_pb.Specifications]:
    chunk = worker_pb.Specifications()
    room = MAX_BYTES_PER_MESSAGE
    for leased in specifications:
        size = leased.ByteSize()
        if chunk.specifications and size > room:
            yield chunk
            chunk, room = worker_pb.Specifications(), MAX_BYTES_PER_MESSAGE
        chunk.specifications.append(leased)
        room -= size
    if chunk.specifications:
        yield chunk


@dataclass(eq=False)
class GatewaySession:
    """One connected gateway process."""

    gateway_id: str
    attachments: dict[str, Attachment] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Event = field(default_factory=_set_event)
    """Event that is cleared while `MAX_ANSWERS` wait."""
    closed: bool = False
    close_reason: str = ""
    _replies: list[gateway_pb.GatewayLinkReply] = field(default_factory=list)
    _dirty: dict[str, Attachment] = field(default_factory=dict)

    def reply(self, reply: gateway_pb.GatewayLinkReply) -> None:
        """Send the answer to a message of the gateway."""
        self._replies.append(reply)
        if len(self._replies) >= MAX_ANSWERS:
            self.room.clear()
        self.wake.set()

    def owe(self, attachment: Attachment) -> None:
        """Mark an attachment whose request has tokens or an end that it has not been sent."""
        self._dirty[attachment.attachment_id] = attachment
        self.wake.set()

    def forget(self, attachment_id: str) -> None:
        """Remove an attachment; nothing more is sent to it."""
        self.attachments.pop(attachment_id, None)
        self._dirty.pop(attachment_id, None)

    def close(self, reason: str) -> None:
        """End the stream."""
        self.closed = True
        self.close_reason = reason
        self.wake.set()

    def take(self) -> list[gateway_pb.GatewayLinkReply]:
        """Return the messages to send now: answers first, then one message of deliveries; call again until it
        is empty.
        """
        self.wake.clear()
        self.room.set()
        replies, self._replies = self._replies, []
        reply = gateway_pb.GatewayLinkReply()
        deliveries = reply.deliveries.deliveries
        room = MAX_TOKENS_PER_MESSAGE
        for attachment_id, attachment in list(self._dirty.items()):
            if len(deliveries) >= MAX_DELIVERIES_PER_MESSAGE or room <= 0:
                break
            live, first = attachment.live, attachment.next_token
            each = 1
            if live.most_logprobs is not None:
                each += TOKENS_PER_ALTERNATIVE * (1 + live.most_logprobs)
            fresh = live.committed[first : first + max(1, room // each)]
            attachment.next_token += len(fresh)
            room -= len(fresh) * each
            last = attachment.next_token >= len(live.committed)
            ended = live.end if last else None
            if fresh or ended is not None:
                delivery = deliveries.add()
                delivery.request_id = live.request_id
                delivery.first_token = first
                delivery.token_ids.extend(fresh)
                delivery.attachment_id = attachment_id
                if live.most_logprobs is not None:
                    delivery.logprobs.extend(live.logprobs_of(first, len(fresh)))
            if last:
                del self._dirty[attachment_id]
            if ended is not None:
                delivery.end.CopyFrom(ended)
                self.forget(attachment_id)
                live.attachments.pop(attachment_id, None)  # nothing holds what has been delivered
        if self._dirty:
            self.wake.set()
        if deliveries:
            replies.append(reply)
        return replies
