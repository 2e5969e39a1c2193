"""Wire ↔ core: what a peer sends becomes core types here, or is refused by name. Nothing else knows both."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from laps_sd.contract import limits
from laps_sd.contract.choose import Residency
from laps_sd.errors import InvalidArgument
from laps_sd.service import ends
from laps_sd.v1 import admin_pb2 as admin_pb
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import inference_pb2 as pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from scheduler_svc.core.commands import StoryLine
from scheduler_svc.core.estimates.acceptance import MAX_POSITIONS
from scheduler_svc.core.events import Held, Progress, ResidencyChange, RoundReported, WorkerFacts
from scheduler_svc.core.views import Explanation, QueueEntry, RequestState, WorkerView
from scheduler_svc.leader.sessions import WorkerSession
from scheduler_svc.store.records import NewRequest, StoredRequest

RESIDENCIES = {
    worker_pb.HeldRequest.RESIDENCY_UNSPECIFIED: Residency.NONE,
    worker_pb.HeldRequest.RESIDENCY_NONE: Residency.NONE,
    worker_pb.HeldRequest.RESIDENCY_HOST: Residency.HOST,
    worker_pb.HeldRequest.RESIDENCY_DEVICE: Residency.DEVICE,
}
MAX_NAME_LENGTH = 256
MAX_DRAFTED_PER_ROUND = 4096
"""Upper bound of the draft tokens of a round, more than any draft is long: a larger number from a worker
counts as this, so that no sum overflows.
"""
MAX_PREFILLED_PER_ROUND = 2**24
"""Upper bound of the prefilled tokens of a round, more than any context is long; a larger number counts as
this.
"""
MAX_HELD = 100_000
MAX_SLOTS = 65_536
MAX_TOKEN_ID = 2**31 - 1
MAX_BODY_HASH_BYTES = 64
MAX_TIME_MS = 10 * 365 * 86_400_000
"""Ten years: the value that gateways treat as "no deadline"."""
MAX_DURATION_S = 86_400.0
"""Upper bound of a duration: no part of a round takes a day."""
NOWHERE = 2**32
"""Position that no output reaches: for the core, a worker that reports it has a wrong state of the
request.
"""


def check_submission(submit: gateway_pb.Submit, max_context_tokens: int) -> None:
    """Refuse a submission that none of our gateways sends; gateways get less trust here than the design gives
    them.

    Raises InvalidArgument naming the field and the limit.
    """
    specification = submit.specification
    prompt_tokens = len(specification.prompt_ids)
    _bounded("request_id", submit.request_id, minimum=1)
    if not submit.request_id.isprintable() or " " in submit.request_id:
        raise InvalidArgument("request_id", "must hold printable characters and no white space")
    _bounded("tenant", submit.tenant, minimum=1)
    _bounded("idempotency_key", submit.idempotency_key)
    _bounded("workload_class", submit.workload_class)
    _bounded("model", submit.model)
    _bounded("traceparent", submit.traceparent)
    _bounded("specification.traceparent", submit.specification.traceparent)
    if len(submit.body_hash) > MAX_BODY_HASH_BYTES:
        raise InvalidArgument(
            "body_hash", f"must be at most {MAX_BODY_HASH_BYTES} bytes, got {len(submit.body_hash)}"
        )
    for name in ("deadline_in_ms", "time_limit_ms", "grace_ms"):
        if getattr(submit, name) > MAX_TIME_MS:
            raise InvalidArgument(name, f"must be at most {MAX_TIME_MS}, got {getattr(submit, name)}")
    if prompt_tokens == 0:
        raise InvalidArgument("specification.prompt_ids", "must not be empty")
    if specification.max_tokens == 0:
        raise InvalidArgument("specification.max_tokens", "must be at least 1")
    if prompt_tokens + specification.max_tokens > max_context_tokens:
        raise InvalidArgument(
            "specification.max_tokens",
            f"with {prompt_tokens} prompt tokens must be at most {max_context_tokens - prompt_tokens}, "
            f"got {specification.max_tokens}",
        )
    if max(specification.prompt_ids) > MAX_TOKEN_ID:
        raise InvalidArgument("specification.prompt_ids", f"must be at most {MAX_TOKEN_ID}")
    if len(submit.shown_ids) > specification.max_tokens:
        raise InvalidArgument(
            "shown_ids",
            f"must have at most max_tokens ({specification.max_tokens}) entries, got {len(submit.shown_ids)}",
        )
    if max(submit.shown_ids, default=0) > MAX_TOKEN_ID:
        raise InvalidArgument("shown_ids", f"must be at most {MAX_TOKEN_ID}")
    if submit.shown_ids and not submit.restores:
        raise InvalidArgument("shown_ids", "must be empty in a submission that restores nothing")
    if not (math.isfinite(specification.temperature) and specification.temperature >= 0):
        raise InvalidArgument("specification.temperature", "must be finite and not negative")
    if not 0 < specification.top_p <= 1:
        raise InvalidArgument("specification.top_p", "must lie in (0, 1]")
    if len(specification.stop) > limits.RECORDED_STOP_STRINGS:
        raise InvalidArgument(
            "specification.stop", f"must have at most {limits.RECORDED_STOP_STRINGS} entries"
        )
    for stop in specification.stop:
        _bounded("specification.stop", stop, minimum=1)
    if len(specification.logit_bias) > limits.RECORDED_LOGIT_BIAS:
        raise InvalidArgument(
            "specification.logit_bias", f"must have at most {limits.RECORDED_LOGIT_BIAS} entries"
        )
    if specification.output_format.ByteSize() > limits.RECORDED_FORMAT_BYTES:
        raise InvalidArgument(
            "specification.output_format", f"must have at most {limits.RECORDED_FORMAT_BYTES} bytes"
        )
    if specification.logprobs > limits.RECORDED_LOGPROBS:
        raise InvalidArgument("specification.logprobs", f"must be at most {limits.RECORDED_LOGPROBS}")


def check_attachment(submit: gateway_pb.Submit) -> None:
    """Check the attachment id of a gateway's submission, which is an attachment too. Raises
    InvalidArgument.
    """
    _bounded("attachment_id", submit.attachment_id, minimum=1)


def check_request_id(request_id: str) -> None:
    """Raise InvalidArgument for a string that cannot be a request id."""
    _bounded("request_id", request_id, minimum=1)


def can_be_named(*names: str) -> bool:
    """Return True if all of these strings have a valid length for names here. A call with any other name gets
    "not found".
    """
    return all(1 <= len(name) <= MAX_NAME_LENGTH for name in names)


def _bounded(field: str, value: str, *, minimum: int = 0) -> None:
    if not minimum <= len(value) <= MAX_NAME_LENGTH:
        raise InvalidArgument(field, f"must have {minimum} to {MAX_NAME_LENGTH} characters, got {len(value)}")


def new_request(submit: gateway_pb.Submit, arrival_unix_ms: int) -> NewRequest:
    """Return a checked submission as the record takes it."""
    specification = submit.specification
    settings = gateway_pb.Specification()
    settings.CopyFrom(specification)
    settings.ClearField("prompt_ids")
    settings.ClearField("committed_ids")
    settings.ClearField("origin")
    return NewRequest(
        request_id=submit.request_id,
        tenant=submit.tenant,
        model=submit.model,
        priority=submit.priority,
        workload_class=submit.workload_class,
        arrival_unix_ms=arrival_unix_ms,
        prompt_ids=tuple(specification.prompt_ids),
        max_tokens=specification.max_tokens,
        expected_output_tokens=submit.expected_output_tokens
        if submit.HasField("expected_output_tokens")
        else None,
        deadline_unix_ms=arrival_unix_ms + submit.deadline_in_ms
        if submit.HasField("deadline_in_ms")
        else None,
        time_limit_ms=submit.time_limit_ms if submit.HasField("time_limit_ms") else None,
        keep=submit.keep,
        grace_ms=-1 if submit.keep else submit.grace_ms,
        idempotency_key=submit.idempotency_key,
        body_hash=submit.body_hash.hex(),
        seed=specification.seed,
        submission=settings.SerializeToString(deterministic=True),
    )


def offered(held: worker_pb.HeldRequest, incarnation: str, now_unix_ms: int) -> gateway_pb.Submit | None:
    """Return the submission of a request that a worker holds, if its record is gone: with the outputs that a
    leader had acknowledged. Return None if the present record is the one that had the request (then the
    request has ended), or for invalid data.
    """
    origin = gateway_pb.Origin()
    try:
        origin.ParseFromString(held.specification.origin)
    except DecodeError:
        return None
    submit = origin.submit
    if origin.incarnation in ("", incarnation) or submit.request_id != held.request_id:
        return None
    elapsed_ms = max(0, now_unix_ms - origin.written_unix_ms)
    for name in ("deadline_in_ms", "time_limit_ms"):
        if submit.HasField(name):
            setattr(submit, name, max(1, getattr(submit, name) - elapsed_ms))
    submit.specification.prompt_ids.extend(held.specification.prompt_ids)
    submit.shown_ids.extend(held.specification.committed_ids)
    submit.restores = True
    return submit


def check_gateway_hello(hello: gateway_pb.GatewayHello) -> None:
    """Refuse a gateway without a name, or with a name that is too long for a log. Raises InvalidArgument."""
    _bounded("hello.gateway_id", hello.gateway_id, minimum=1)


def check_hello(hello: worker_pb.WorkerHello) -> None:
    """Refuse a worker whose numbers make no sense. Raises InvalidArgument naming the field and the limit."""
    _bounded("worker_id", hello.worker_id, minimum=1)
    _bounded("worker_name", hello.worker_name, minimum=1)
    _bounded("fingerprint", hello.fingerprint)
    _bounded("device", hello.device)
    for name in ("slots", "target_blocks", "block_size", "max_length"):
        if getattr(hello, name) < 1:
            raise InvalidArgument(name, "must be at least 1")
    if hello.slots > MAX_SLOTS:
        raise InvalidArgument("slots", f"must be at most {MAX_SLOTS}, got {hello.slots}")
    if len(hello.held) > MAX_HELD:
        raise InvalidArgument("held", f"must have at most {MAX_HELD} entries, got {len(hello.held)}")


def worker_facts(hello: worker_pb.WorkerHello) -> WorkerFacts:
    """Return the facts about a worker that the core needs."""
    return WorkerFacts(
        worker_id=hello.worker_id,
        slots=hello.slots,
        target_blocks=hello.target_blocks,
        draft_blocks=hello.draft_blocks,
        block_size=hello.block_size,
        max_length=hello.max_length,
        max_draft_len=hello.max_draft_tokens,
    )


def held_requests(hello: worker_pb.WorkerHello) -> tuple[Held, ...]:
    """Return the requests that the worker holds by its hello."""
    return tuple(
        Held(held.request_id, held.lease_epoch, RESIDENCIES.get(held.residency, Residency.NONE))
        for held in hello.held
    )


def round_reported(worker_id: str, report: worker_pb.RoundReport) -> RoundReported:
    """Return one round as an event for the core. A report is never refused: invalid times count as 0, a
    request that is named twice counts once, and invalid tokens count as a wrong state of the request.
    """
    heard = [_progress(progress) for progress in report.progress]
    once = {(progress.request_id, progress.lease_epoch): progress for progress in reversed(heard)}
    return RoundReported(
        worker_id=worker_id,
        progress=tuple(reversed(once.values())),
        residency=tuple(
            ResidencyChange(
                change.request_id, change.lease_epoch, RESIDENCIES.get(change.residency, Residency.NONE)
            )
            for change in report.residency
        ),
        draft_s=_duration(report.draft_s),
        verify_s=_duration(report.verify_s),
        prefill_s=_duration(report.prefill_s),
        swap_s=_duration(report.swap_s),
        idle_s=_duration(report.idle_s),
        total_s=_duration(report.total_s),
        free_target_blocks=report.free_target_blocks,
        free_draft_blocks=report.free_draft_blocks,
    )


def _duration(value_s: float) -> float:
    return value_s if 0 < value_s <= MAX_DURATION_S else 0.0  # NaN fails both comparisons


def _progress(progress: worker_pb.RequestProgress) -> Progress:
    predicted = (
        progress.predicted_remaining_tokens if progress.HasField("predicted_remaining_tokens") else None
    )
    # Slices: reading a repeated field entry by entry takes twice as long.
    tokens = tuple(progress.token_ids[:])
    tested = progress.tested_by_position[:MAX_POSITIONS]
    if tested and max(tested) > MAX_DRAFTED_PER_ROUND:
        tested = [min(count, MAX_DRAFTED_PER_ROUND) for count in tested]
    kept = progress.accepted_by_position[: len(tested)]
    if any(map(operator.gt, kept, tested)):
        kept = list(map(min, kept, tested))
    believable = not tokens or max(tokens) <= MAX_TOKEN_ID
    return Progress(
        request_id=progress.request_id,
        lease_epoch=progress.lease_epoch,
        position=progress.position if believable else NOWHERE,
        tokens=tokens if believable else (),
        drafted=min(progress.drafted, MAX_DRAFTED_PER_ROUND),
        accepted=min(progress.accepted, progress.drafted, MAX_DRAFTED_PER_ROUND),
        prefilled=min(progress.prefilled, MAX_PREFILLED_PER_ROUND),
        end=ends.end_of_kind(progress.end),
        cut_characters=progress.cut_characters,
        error=progress.error[:1024],
        tested_by_position=tuple(tested),
        accepted_by_position=tuple(kept),
        predicted_remaining_tokens=predicted if predicted is not None and math.isfinite(predicted) else None,
    )


def story_lines(lines: Iterable[StoryLine], arrival_s: float) -> list[pb.StoryLine]:
    """Return a timeline for a client: seconds since acceptance."""
    return [
        pb.StoryLine(at_s=max(0.0, line.at_s - arrival_s), what=line.what, detail=line.detail)
        for line in lines
    ]


STATES = {
    RequestState.QUEUED: pb.Explanation.STATE_QUEUED,
    RequestState.LISTED: pb.Explanation.STATE_LISTED,
    RequestState.RUNNING: pb.Explanation.STATE_RUNNING,
}


def explanation(view: Explanation) -> pb.Explanation:
    """Return the core's explanation of an unfinished request."""
    return pb.Explanation(
        request_id=view.request_id,
        state=STATES[view.state],
        policy=view.policy,
        level=view.level,
        ahead=view.ahead.total,
        ahead_by_priority=view.ahead.by_priority,
        ahead_by_tenant=view.ahead.by_tenant,
        ahead_by_level=view.ahead.by_level,
        waits_for=view.waits_for,
        reserved=view.reserved,
        age_s=view.waiting_s,
        perceptible=view.perceptible,
        ordered_by=view.ordered_by,
        remaining_s=view.remaining_s,
        remaining_low_s=view.remaining_low_s,
        remaining_high_s=view.remaining_high_s,
        basis=view.basis,
        attained_s=view.attained_s,
        rounds=view.rounds,
        drafted=view.drafted,
        accepted=view.accepted,
        emitted_tokens=view.emitted,
        preemptions=view.preemptions,
        story=story_lines(view.story, view.story[0].at_s if view.story else 0.0),
        tenant=view.tenant,
        priority=view.priority,
        worker_id=view.worker_id or "",
        tenant_ahead=view.tenant_ahead,
    )


def stored_explanation(stored: StoredRequest, policy: str) -> pb.Explanation:
    """Return the explanation of a request that has ended: the whole timeline, from the record."""
    standing = stored.standing
    return pb.Explanation(
        request_id=stored.request_id,
        state=pb.Explanation.STATE_ENDED if stored.end is not None else pb.Explanation.STATE_QUEUED,
        policy=policy,
        level=standing.level,
        basis=stored.detail,
        attained_s=standing.attained_s,
        rounds=standing.rounds,
        drafted=standing.drafted,
        accepted=standing.accepted,
        emitted_tokens=len(stored.committed_ids),
        preemptions=standing.preemptions,
        story=story_lines(stored.story, stored.arrival_unix_ms / 1000.0),
        finish_reason=ends.FINISH_REASONS[stored.end],
        tenant=stored.tenant,
        priority=stored.priority,
    )


def queue_entry(entry: QueueEntry) -> admin_pb.QueueEntry:
    """Return one line of the queue."""
    return admin_pb.QueueEntry(
        request_id=entry.request_id,
        tenant=entry.tenant,
        priority=entry.priority,
        state=STATES[entry.state],
        level=entry.level,
        index_s=entry.index_s,
        perceptible=entry.perceptible,
        ordered_by=entry.ordered_by,
        waiting_s=entry.waiting_s,
        attained_s=entry.attained_s,
        emitted_tokens=entry.emitted,
        worker_id=entry.worker_id or "",
    )


def worker_status(view: WorkerView, session: WorkerSession | None) -> admin_pb.WorkerStatus:
    """Return the status of one worker and of its requests; `session` is its stream, None while it is in its
    grace period.
    """
    return admin_pb.WorkerStatus(
        worker_id=view.worker_id,
        worker_name=session.worker_name if session is not None else "",
        device=session.device if session is not None else "",
        connected=session is not None,
        draining=view.draining,
        slots=view.slots,
        running=view.running,
        listed=view.listed,
        target_blocks=view.target_blocks,
        free_target_blocks=view.free_target_blocks,
        rounds=view.rounds,
        tokens=view.tokens,
        acceptance=view.acceptance,
        tokens_per_s=view.tokens_per_s,
    )
