"""Replies to gateways and workers, built from values of core and leader.

Messages that are made for every request of every round are filled in place, field by field: half the time of
building messages and putting them into others, which copies them.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Mapping, Sequence

from laps_sd.contract.acceptance import mean_acceptance_length
from laps_sd.contract.ends import End
from laps_sd.contract.length_probe import LearntProbe
from laps_sd.service import ends
from laps_sd.service.text_parameters import text_parameters
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from scheduler_svc.core.commands import AssignEntry, Standing
from scheduler_svc.wire.requests import AcceptedRequest

GatewayReply = gateway_pb.GatewayLinkReply
WorkerReply = worker_pb.WorkerLinkReply
RequestEnd = gateway_pb.RequestEnd
"""End of a request as its clients receive it."""
SubmitRefused = gateway_pb.SubmitRefused
ShardLoad = gateway_pb.ShardLoad
TokenLogprobs = pb.TokenLogprobs
"""Logprobs of one token."""
PromptLogprobs = pb.PromptLogprobs
"""Logprobs of the tokens of a prompt, passed on unread."""

UNKNOWN_LOGPROBS = pb.TokenLogprobs(unknown=True).SerializeToString()
MAX_COUNT = 2**32 - 1
"""Largest value of a counter on the wire."""


class Refusal(enum.Enum):
    """Reason for which a submission is refused."""

    QUEUE_FULL = SubmitRefused.REASON_QUEUE_FULL
    TENANT_FULL = SubmitRefused.REASON_TENANT_FULL
    KEY_CONFLICT = SubmitRefused.REASON_KEY_CONFLICT
    STORE_UNAVAILABLE = SubmitRefused.REASON_STORE_UNAVAILABLE
    EXPIRED = SubmitRefused.REASON_EXPIRED
    INVALID = SubmitRefused.REASON_INVALID
    KEY_ELSEWHERE = SubmitRefused.REASON_KEY_ELSEWHERE


class AttachFailure(enum.Enum):
    """Reason for which a client is not attached."""

    NOT_FOUND = gateway_pb.AttachReply.RESULT_NOT_FOUND
    UNAVAILABLE = gateway_pb.AttachReply.RESULT_UNAVAILABLE
    NOT_FOUND_YET = gateway_pb.AttachReply.RESULT_NOT_FOUND_YET


# Gateways.


def refused(
    reason: Refusal, detail: str, retry_after_ms: int = 0, *, shard: str = "", field: str = ""
) -> SubmitRefused:
    """Return a refusal. `retry_after_ms`: when to try again, 0 for no advice; `shard`: the shard to submit
    to; `field`: the field that is out of bounds.
    """
    return SubmitRefused(
        reason=reason.value, detail=detail, retry_after_ms=retry_after_ms, shard=shard, field=field
    )


def submission_refused(submission_id: int, refused: SubmitRefused) -> GatewayReply:
    """Return the answer to a submission that is refused."""
    reply = gateway_pb.SubmitReply(submission_id=submission_id, refused=refused)
    return GatewayReply(submit_reply=reply)


def submission_accepted(submission_id: int, request: AcceptedRequest, *, existing: bool) -> GatewayReply:
    """Return the answer to a submission that is on the record; `existing`: as the request of an earlier
    submission.
    """
    accepted = gateway_pb.SubmitAccepted(
        request_id=request.facts.request_id,
        attached_to_existing=existing,
        seed=request.seed,
        prompt_tokens=request.facts.prompt_tokens,
    )
    reply = gateway_pb.SubmitReply(submission_id=submission_id, accepted=accepted)
    return GatewayReply(submit_reply=reply)


def attached(attach_id: int, request: AcceptedRequest, submission: gateway_pb.Submit | None) -> GatewayReply:
    """Return the answer to a client that is attached; with `submission` if its gateway wants it."""
    reply = gateway_pb.AttachReply(
        attach_id=attach_id,
        result=gateway_pb.AttachReply.RESULT_ATTACHED,
        prompt_tokens=request.facts.prompt_tokens,
        seed=request.seed,
        model=request.model,
        stop=request.sampling.stop,
        text=text_parameters(request.sampling),
        submission=submission,
    )
    return GatewayReply(attach_reply=reply)


def not_attached(attach_id: int, why: AttachFailure) -> GatewayReply:
    """Return the answer to a client that is not attached."""
    return GatewayReply(attach_reply=gateway_pb.AttachReply(attach_id=attach_id, result=why.value))


def cancel_reply(cancel_id: int, *, found: bool, cancelled: bool) -> GatewayReply:
    """Return the answer to a cancel."""
    reply = gateway_pb.CancelReply(cancel_id=cancel_id, found=found, cancelled=cancelled)
    return GatewayReply(cancel_reply=reply)


class Deliveries:
    """Message of deliveries that is filled one by one."""

    def __init__(self) -> None:
        self._reply = GatewayReply()
        self._deliveries = self._reply.deliveries.deliveries
        # Apart: a repeated field is filled faster at once than entry by entry.
        self._attachment_ids: list[str] = []
        self._first_tokens: list[int] = []
        self._token_counts: list[int] = []
        self._token_ids = array("i")

    def __len__(self) -> int:
        return len(self._deliveries) + len(self._attachment_ids)

    def add(
        self,
        request_id: str,
        attachment_id: str,
        first_token: int,
        token_ids: Sequence[int],
        logprobs: Sequence[bytes],
        end: RequestEnd | None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        """Add the next tokens of an attachment and, if they are known, the end of its request and, with the first
        token, the logprobs of its prompt. `logprobs`: those of the tokens, serialized.
        """
        delivery = self._deliveries.add()
        delivery.request_id = request_id
        delivery.first_token = first_token
        delivery.token_ids.extend(token_ids)
        delivery.attachment_id = attachment_id
        for one in logprobs:
            delivery.logprobs.add().MergeFromString(one)
        if end is not None:
            delivery.end.CopyFrom(end)
        if prompt_logprobs is not None:
            delivery.prompt_logprobs.CopyFrom(prompt_logprobs)

    def add_plain(self, attachment_id: str, first_token: int, token_ids: array[int]) -> None:
        """Add the next tokens of an attachment, in columns: for gateways that read them."""
        self._attachment_ids.append(attachment_id)
        self._first_tokens.append(first_token)
        self._token_counts.append(len(token_ids))
        self._token_ids.extend(token_ids)

    def reply(self) -> GatewayReply:
        """Return the message."""
        if self._attachment_ids:
            plain = self._reply.deliveries.plain
            plain.attachment_ids.extend(self._attachment_ids)
            plain.first_tokens.extend(self._first_tokens)
            plain.token_counts.extend(self._token_counts)
            plain.token_ids.extend(self._token_ids)
        return self._reply


def request_end(
    end: End,
    *,
    detail: str,
    cut_characters: int,
    cached_prompt_tokens: int,
    standing: Standing,
    arrival_s: float,
    started_s: float | None,
    first_token_s: float | None,
    ended_s: float,
) -> RequestEnd:
    """Return the end of a request for its clients; the last four are times on one clock."""
    return RequestEnd(
        kind=ends.KINDS[end],
        detail=detail,
        cut_characters=cut_characters,
        cached_prompt_tokens=cached_prompt_tokens,
        speculation=pb.SpeculationSummary(
            rounds=min(standing.rounds, MAX_COUNT),
            drafted=min(standing.drafted, MAX_COUNT),
            accepted=min(standing.accepted, MAX_COUNT),
            mean_acceptance_length=mean_acceptance_length(standing.accepted, standing.drafts),
            drafts=min(standing.drafts, MAX_COUNT),
        ),
        timing=pb.Timing(
            queued_s=_since(arrival_s, started_s, ended_s),
            first_token_s=_since(arrival_s, first_token_s, ended_s),
            total_s=max(0.0, ended_s - arrival_s),
            preemptions=standing.preemptions,
        ),
    )


def _since(arrival_s: float, moment_s: float | None, ended_s: float) -> float:
    return max(0.0, (ended_s if moment_s is None else moment_s) - arrival_s)


def shard_load(
    *,
    backlog_s: float,
    requests: int,
    workers: int,
    gateways: int,
    kv_usage: float,
    refuses: SubmitRefused | None,
    capacity_tokens: int,
    vocabulary: bytes,
) -> ShardLoad:
    """Return the load by which gateways choose a shard."""
    return ShardLoad(
        backlog_s=backlog_s,
        requests=requests,
        workers=workers,
        gateways=gateways,
        kv_usage=kv_usage,
        refuses=refuses,
        capacity_tokens=capacity_tokens,
        vocabulary=vocabulary,
    )


# Workers.


def drops(epochs: Mapping[str, int]) -> WorkerReply:
    """Return the order to drop these requests, at the given lease epoch or an older one."""
    requests = [
        worker_pb.DropRequest(request_id=request_id, lease_epoch=epoch)
        for request_id, epoch in epochs.items()
    ]
    return WorkerReply(drop=worker_pb.DropRequests(requests=requests))


def assignment(
    number: int, entries: Iterable[AssignEntry], *, changes: int = 0, removed: Iterable[str] = ()
) -> WorkerReply:
    """Return the worker's new list: whole, or as `changes` of the list of that number."""
    reply = WorkerReply()
    reply.assignment.number = number
    reply.assignment.changes = changes
    reply.assignment.removed.extend(removed)
    add = reply.assignment.entries.add
    for listed in entries:
        entry = add()
        entry.request_id = listed.request_id
        entry.lease_epoch = listed.lease_epoch
        entry.rank_class = listed.rank_class
        entry.index_s = listed.index_s
        entry.resume_cost_s = listed.resume_cost_s
        if listed.reserved:  # hardly any has either, and each value that is set costs as much as the others
            entry.reserved = True
        if listed.pinned:
            entry.pinned = True
    return reply


def acknowledged(number: int) -> WorkerReply:
    """Return the acknowledgement of all reports up to `number`."""
    return WorkerReply(acknowledged=worker_pb.ReportsAcknowledged(number=number))


def learnt_probe(learnt: LearntProbe) -> WorkerReply:
    """Return what another worker's probe has learnt."""
    kind = learnt.kind
    return WorkerReply(
        learnt_probe=worker_pb.LearntProbe(
            kind=worker_pb.ProbeKind(model=kind.model, layer=kind.layer, seed=kind.seed, dims=kind.dims),
            requests=learnt.requests,
            numbers=learnt.numbers,
        )
    )


def drain() -> WorkerReply:
    """Return the order of an operator that the worker leaves."""
    return WorkerReply(drain=worker_pb.Drain())


def drained() -> WorkerReply:
    """Return the notice that the worker holds nothing any more."""
    return WorkerReply(drained=worker_pb.Drained())
