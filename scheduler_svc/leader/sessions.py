"""Content to be sent on each stream, as state rather than as a queue.

A session holds the *newest* state for its peer, so a slow peer costs no memory: an assignment replaces the
one before, an acknowledgement the smaller one, an attachment is only a position in tokens that the
working copy (or the record) holds anyway, and a specification is built when it is sent.

The loop writes to a session, the stream's handler takes from it; both on one event loop, so no lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from laps_sd.contract.length_probe import LearntProbe
from laps_sd.service.leader_link import COLUMNS_VERSION, PROTOCOL_VERSIONS
from scheduler_svc.core.commands import AssignEntry
from scheduler_svc.leader.live import Attachment, Live
from scheduler_svc.wire import replies, reports
from scheduler_svc.wire.replies import GatewayReply, WorkerReply

MAX_TOKENS_PER_MESSAGE = 65_536
"""Token ids in one message of deliveries or of specifications, unless one specification has more: the event loop does
nothing else while the message is built, which takes some milliseconds.
"""
TOKENS_PER_ALTERNATIVE = 4
"""Size of a token's probability on the wire, in token ids."""
TOKENS_PER_PROMPT_LOGPROB = 3
"""The same for a token of a prompt, and each of its alternatives."""
MAX_DELIVERIES_PER_MESSAGE = 512
MAX_ANSWERS = 10_000
"""Answers to a gateway, or drops for a worker, that may wait to be sent; with more, the peer is no longer
read: a peer that sends requests and does not read the answers costs no more memory than this.
"""
ACKNOWLEDGE_WITHIN_S = 0.1
"""Seconds that an acknowledgement may wait for another message to travel with. A worker needs it only for its
bound of unacknowledged tokens, and each message costs the worker interpreter time that its engine needs.
"""


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(eq=False, kw_only=True)
class _Session:
    """One connected process."""

    protocol_version: int = PROTOCOL_VERSIONS[0]
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Event = field(default_factory=_set_event)
    """Event that is cleared while `MAX_ANSWERS` wait."""
    closed: bool = False
    close_reason: str = ""

    def close(self, reason: str) -> None:
        """End the stream: another leader, another connection of the same process, or silence."""
        self.closed = True
        self.close_reason = reason
        self.wake.set()


@dataclass(frozen=True, slots=True)
class _Unsent:
    """A specification that is not sent. It is built when it is, with the tokens that are committed then."""

    live: Live
    lease_epoch: int
    now_s: float
    incarnation: str


@dataclass(eq=False)
class WorkerSession(_Session):
    """One connected worker process."""

    worker_id: str
    worker_name: str
    device: str
    known: dict[str, int] = field(default_factory=dict)
    """Specifications the worker has: request id → lease epoch it has it under."""
    _specifications: dict[str, _Unsent] = field(default_factory=dict)
    _drops: dict[str, int] = field(default_factory=dict)
    _list: Sequence[AssignEntry] | None = None
    """Newest list, if it is not sent."""
    _listed: dict[str, AssignEntry] = field(default_factory=dict)
    """List that was sent last."""
    _assignments: int = 0
    _acknowledged: int = 0
    _acknowledged_sent: int = 0
    _acknowledging: asyncio.TimerHandle | None = None
    _acknowledgement_due: bool = False
    _learnt: LearntProbe | None = None
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
            unsent = self._specifications.get(request_id)
            if unsent is not None and unsent.lease_epoch <= lease_epoch:
                del self._specifications[request_id]
            if self.known.get(request_id, -1) <= lease_epoch:
                self.known.pop(request_id, None)
        if len(self._drops) >= MAX_ANSWERS:
            self.room.clear()
        self.wake.set()

    def specify(self, live: Live, lease_epoch: int, *, now_s: float, incarnation: str) -> None:
        """Send the specification of a request under this lease before the next assignment."""
        self.known[live.request_id] = lease_epoch
        self._specifications[live.request_id] = _Unsent(live, lease_epoch, now_s, incarnation)
        self.wake.set()

    def _specified(self) -> WorkerReply:
        """Return the message with the specifications that come next."""
        reply = WorkerReply()
        message = reply.specifications.specifications
        room = MAX_TOKENS_PER_MESSAGE
        for request_id, unsent in list(self._specifications.items()):
            size = unsent.live.specification_tokens
            if message and size > room:
                break
            room -= size
            del self._specifications[request_id]
            unsent.live.specify(
                message.add(), unsent.lease_epoch, now_s=unsent.now_s, incarnation=unsent.incarnation
            )
        return reply

    def assign(self, entries: Sequence[AssignEntry]) -> None:
        """Replace the worker's list."""
        self._list = entries
        self.wake.set()

    def _assigned(self, entries: Sequence[AssignEntry]) -> WorkerReply:
        """Return the message with a new list: what has changed, if the worker has the one before and reads
        changes.
        """
        before, self._listed = self._listed, {entry.request_id: entry for entry in entries}
        self._assignments += 1
        if not before or self.protocol_version < COLUMNS_VERSION:
            return replies.assignment(self._assignments, entries)
        return replies.assignment(
            self._assignments,
            [entry for entry in entries if before.get(entry.request_id) is not entry],
            changes=self._assignments - 1,
            removed=before.keys() - self._listed.keys(),
        )

    def teach(self, learnt: LearntProbe) -> None:
        """Send what the probe of another worker has learnt."""
        self._learnt = learnt
        self.wake.set()

    def drain(self) -> None:
        """Send the order of an operator that this worker leaves."""
        self._drain = True
        self.wake.set()

    def drained(self) -> None:
        """Send the notice that the worker holds nothing any more."""
        self._drained = True
        self.wake.set()

    def take(self) -> list[WorkerReply]:
        """Return the messages to send now, in the order that a worker needs: drops, one message of
        specifications, the assignment if these were the last, the rest. Call again until it is empty.
        """
        self.wake.clear()
        self.room.set()
        due: list[WorkerReply] = []
        if self._drops:
            due.append(replies.drops(self._drops))
            self._drops = {}
        if self._specifications:
            due.append(self._specified())
        if self._specifications:
            self.wake.set()
        elif self._list is not None:
            due.append(self._assigned(self._list))
            self._list = None
        if self._acknowledging is not None and (due or self._drained or self._acknowledgement_due):
            self._acknowledging.cancel()
            self._acknowledging, self._acknowledgement_due = None, False
            if self._acknowledged > self._acknowledged_sent:
                self._acknowledged_sent = self._acknowledged
                if due and self.protocol_version >= COLUMNS_VERSION:
                    due[-1].acknowledged_number = self._acknowledged
                else:
                    due.append(replies.acknowledged(self._acknowledged))
        if self._learnt is not None:
            due.append(replies.learnt_probe(self._learnt))
            self._learnt = None
        if self._drain:
            self._drain = False
            due.append(replies.drain())
        if self._drained:
            self._drained = False
            due.append(replies.drained())
        return due


@dataclass(eq=False)
class GatewaySession(_Session):
    """One connected gateway process."""

    gateway_id: str
    attachments: dict[str, Attachment] = field(default_factory=dict)
    _replies: list[GatewayReply] = field(default_factory=list)
    _dirty: dict[str, Attachment] = field(default_factory=dict)

    def reply(self, reply: GatewayReply) -> None:
        """Send the answer to a message of the gateway."""
        self._replies.append(reply)
        if len(self._replies) >= MAX_ANSWERS:
            self.room.clear()
        self.wake.set()

    def mark_dirty(self, attachment: Attachment) -> None:
        """Mark an attachment whose request has tokens or an end that it has not been sent."""
        if not self._dirty:  # otherwise it is set already
            self.wake.set()
        self._dirty[attachment.attachment_id] = attachment

    def forget(self, attachment_id: str) -> None:
        """Remove an attachment; nothing more is sent to it."""
        self.attachments.pop(attachment_id, None)
        self._dirty.pop(attachment_id, None)

    def take(self) -> list[GatewayReply]:
        """Return the messages to send now: answers first, then one message of deliveries; call again until it
        is empty.
        """
        self.wake.clear()
        self.room.set()
        due, self._replies = self._replies, []
        deliveries = replies.Deliveries()
        columns = self.protocol_version >= COLUMNS_VERSION
        room = MAX_TOKENS_PER_MESSAGE
        for attachment_id, attachment in list(self._dirty.items()):
            if len(deliveries) >= MAX_DELIVERIES_PER_MESSAGE or room <= 0:
                break
            live, first = attachment.live, attachment.next_token
            each = 1
            most = live.request.most_logprobs
            if most is not None:
                each += TOKENS_PER_ALTERNATIVE * (1 + most)
            fresh = live.committed[first : first + max(1, room // each)]
            attachment.next_token += len(fresh)
            room -= len(fresh) * each
            last = attachment.next_token >= len(live.committed)
            end = live.end_message if last else None
            of_prompt = live.prompt_logprobs if first == 0 and fresh else None
            if of_prompt is not None:
                room -= TOKENS_PER_PROMPT_LOGPROB * reports.prompt_logprobs_in(of_prompt)
            if fresh and end is None and most is None and of_prompt is None and columns:
                deliveries.add_plain(attachment_id, first, fresh)
            elif fresh or end is not None:
                logprobs = live.logprobs_of(first, len(fresh)) if most is not None else ()
                deliveries.add(live.request_id, attachment_id, first, fresh, logprobs, end, of_prompt)
            if last:
                del self._dirty[attachment_id]
            if end is not None:
                self.forget(attachment_id)
                live.attachments.pop(attachment_id, None)  # nothing holds what has been delivered
        if self._dirty:
            self.wake.set()
        if deliveries:
            due.append(deliveries.reply())
        return due
