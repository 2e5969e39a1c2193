"""Answers to operators and to Explain: the core's views and the store's records as public messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import laps_sd
from laps_sd.service import ends
from laps_sd.v1 import admin_pb2 as admin_pb
from laps_sd.v1 import inference_pb2 as pb
from scheduler_svc.core.commands import StoryLine
from scheduler_svc.core.estimates.errors import EstimateErrors, Moment
from scheduler_svc.core.state.found_tokens import FoundTokens
from scheduler_svc.core.views import Explanation, QueueEntry, RequestState, Totals, WorkerView
from scheduler_svc.store.records import StoredRequest


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


def worker_status(view: WorkerView, *, connected: bool, name: str, device: str) -> admin_pb.WorkerStatus:
    """Return the status of one worker and of its requests. `connected`: it has a stream, and is not in its
    grace period; name and device are empty without one.
    """
    return admin_pb.WorkerStatus(
        worker_id=view.worker_id,
        worker_name=name,
        device=device,
        connected=connected,
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


def shard_status(
    totals: Totals,
    *,
    shard: str,
    pool: str,
    leader_epoch: str,
    policy: str,
    workers: int,
    depth_by_level: Sequence[int],
    found: FoundTokens,
    errors: EstimateErrors,
) -> admin_pb.GetShardResponse:
    """Return the state of the shard."""
    return admin_pb.GetShardResponse(
        shard=shard,
        pool=pool,
        leader_epoch=leader_epoch,
        policy=policy,
        queued=totals.queued,
        listed=totals.listed,
        backlog_s=totals.backlog_s,
        workers=workers,
        software_version=laps_sd.__version__,
        depth_by_level=depth_by_level,
        preemptions=totals.preemptions,
        prompt_tokens=found.all_prompt,
        cached_prompt_tokens=found.all_found,
        estimate_errors=list(_estimate_errors(errors)),
    )


def _estimate_errors(errors: EstimateErrors) -> Iterator[admin_pb.EstimateError]:
    """Yield the errors of the moments at which estimates were made that are judged by now."""
    for moment in Moment:
        summary = errors.of(moment)
        if summary.count:
            yield admin_pb.EstimateError(
                moment=moment.value,
                count=summary.count,
                median_ratio=math.exp(summary.quantile(0.5)),
                p90_ratio=math.exp(summary.quantile(0.9)),
                coverage=summary.coverage,
            )
