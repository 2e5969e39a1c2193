"""The scheduler's messages as the runner takes them."""

from __future__ import annotations

from laps_sd.v1 import worker_link_pb2 as pb
from worker_svc.link.lists import AssignedList
from worker_svc.link.wire import learnt_probe, specification
from worker_svc.runner.messages import Acknowledged, Assigned, Dropped, Message, Specified, Taught


def acknowledged_number(reply: pb.WorkerLinkReply) -> int:
    """Return the number of the newest report that a message acknowledges; 0 if it acknowledges none."""
    return reply.acknowledged_number or reply.acknowledged.number


def runner_messages(kind: str | None, reply: pb.WorkerLinkReply, lists: AssignedList) -> list[Message]:
    """Return what a message of this kind contains for the runner; nothing, if it concerns the link alone.
    `lists`: of the stream. Raises LinkBroken.
    """
    messages = _of_kind(kind, reply, lists)
    if number := acknowledged_number(reply):
        messages.append(Acknowledged(number))
    return messages


def _of_kind(kind: str | None, reply: pb.WorkerLinkReply, lists: AssignedList) -> list[Message]:
    match kind:
        case "assignment":
            return [Assigned(lists.take(reply.assignment))]
        case "specifications":
            return [
                Specified(specification(leased.specification), leased.lease_epoch)
                for leased in reply.specifications.specifications
            ]
        case "drop":
            return [
                Dropped(tuple((request.request_id, request.lease_epoch) for request in reply.drop.requests))
            ]
        case "learnt_probe":
            learnt = learnt_probe(reply.learnt_probe)
            return [] if learnt is None else [Taught(learnt)]
        case _:
            return []
