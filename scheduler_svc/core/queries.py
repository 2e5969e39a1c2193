"""Queries about the shard, for people and metrics. They change nothing."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from heapq import merge, nsmallest
from itertools import islice, pairwise

from scheduler_svc.core.estimates.basis import Basis
from scheduler_svc.core.estimates.errors import EstimateErrors, Moment
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.policies.base import Policy, resume_cost_s
from scheduler_svc.core.rank import BEHIND, MAX_LEVELS, OrderKey, pack_rank_class
from scheduler_svc.core.state.request import Request, order_key_of
from scheduler_svc.core.state.shard import Shard
from scheduler_svc.core.state.worker import Worker
from scheduler_svc.core.views import Ahead, Explanation, QueueEntry, RequestState, Totals, WorkerView


def explain(
    shard: Shard, policy: Policy, priors: Priors, errors: EstimateErrors, request_id: str, now_s: float
) -> Explanation | None:
    """Return everything about one request; None when it is not here (any more)."""
    request = shard.requests.get(request_id)
    if request is None:
        return None
    rank = request.rank
    return Explanation(
        request_id=request_id,
        tenant=request.facts.tenant,
        priority=request.facts.priority,
        state=_state_of(request),
        policy=policy.name,
        level=rank.level if policy.has_levels else None,
        ordered_by=policy.ordered_by(request),
        index_s=request.order_key[1],
        ahead=_ahead_of(shard, request),
        perceptible=rank.perceptible,
        remaining_s=rank.remaining.mean_s,
        remaining_low_s=rank.remaining.low_s,
        remaining_high_s=rank.remaining.high_s,
        basis="; ".join(_basis_of(request, priors, errors)),
        worker_id=request.worker,
        lease_epoch=request.lease_epoch,
        reserved=request.reserved,
        tenant_ahead=request.tenant_ahead,
        waits_for=_waits_for(shard, request),
        waiting_s=now_s - request.facts.arrival_s,
        attained_s=request.attained_s,
        rounds=request.rounds,
        drafted=request.drafted,
        accepted=request.accepted,
        emitted=request.emitted,
        preemptions=request.preemptions,
        story=tuple(request.story),
    )


def _basis_of(request: Request, priors: Priors, errors: EstimateErrors) -> Iterator[str]:
    """Yield what the estimate of its remaining service rests on, and how good such estimates have been."""
    remaining, guesses = request.rank.remaining, request.guesses
    basis = remaining.basis
    if basis is Basis.WORKER and guesses.worker is not None:
        prediction = guesses.worker
        yield (
            f"the worker's prediction of {prediction.remaining:.0f} more tokens after {prediction.emitted}"
        )
    if basis is Basis.LIMIT:
        yield f"its limit of {request.facts.max_tokens} tokens, before which nothing ends it"
    if basis in (Basis.CLIENT, Basis.CLIENT_AND_PROMPT):
        yield f"the client's estimate of {guesses.client:.0f} tokens"
    if basis in (Basis.PROMPT, Basis.CLIENT_AND_PROMPT):
        yield f"a prediction of {guesses.prompt:.0f} tokens from the words of its prompt"
    if basis is not Basis.LIMIT:
        seen = priors.lengths_seen(request.facts.workload_class)
        yield f"lengths of {seen:.0f} requests of its class"
    if remaining.own_rounds is not None:
        yield f"{remaining.own_rounds} rounds of its own"
    if remaining.note:
        yield remaining.note
    # At arrival no worker has predicted anything.
    moment, when = (
        (Moment.FIRST_ROUND, "after the first round")
        if basis is Basis.WORKER
        else (Moment.ARRIVAL, "at arrival")
    )
    judged = errors.by.get((moment, basis))
    if judged is not None:
        yield (
            f"{when} such estimates were wrong by a factor of {math.exp(judged.rms):.2g} (root mean square "
            f"of {judged.count} requests)"
        )


def queue(shard: Shard, policy: Policy, now_s: float, limit: int) -> list[QueueEntry]:
    """Return unfinished requests, best first, at most `limit`."""
    return [
        QueueEntry(
            request_id=request.request_id,
            tenant=request.facts.tenant,
            priority=request.facts.priority,
            state=_state_of(request),
            level=request.rank.level if policy.has_levels else None,
            ordered_by=policy.ordered_by(request),
            index_s=request.order_key[1],
            perceptible=request.rank.perceptible,
            waiting_s=now_s - request.facts.arrival_s,
            attained_s=request.attained_s,
            emitted=request.emitted,
            worker_id=request.worker,
        )
        for request in _first(shard, limit)
    ]


def workers(shard: Shard, priors: Priors) -> list[WorkerView]:
    """Return all workers, including those that only the record's leases name."""
    return [_view(shard.workers[worker_id], priors) for worker_id in sorted(shard.workers)]


def depth_by_level(shard: Shard) -> list[int]:
    """Return the number of waiting requests (queued, or listed and not running), by level, up to the
    highest level ever used.
    """
    return [shard.depth[level] for level in range(max(shard.depth, default=-1) + 1)]


def totals(shard: Shard, priors: Priors) -> Totals:
    """Return the shard in numbers."""
    queued = len(shard.queued) + len(shard.parked) + len(shard.suspects)
    full = _full_share(shard, priors)
    return Totals(
        queued=queued,
        listed=len(shard.requests) - queued,
        running=shard.running,
        backlog_s=max(0.0, shard.backlog_s) * full,
        preemptions=shard.preemptions,
    )


def arriving_load(shard: Shard, priors: Priors, now_s: float) -> float:
    """Return the machine seconds of work that arrive per second, if all slots were taken: the number of workers that the
    load keeps busy.
    """
    return shard.arriving.per_s(now_s) * _full_share(shard, priors)


def _full_share(shard: Shard, priors: Priors) -> float:
    """Return the share of a worker's time that a request takes where all slots are taken."""
    slots = [worker.slots for worker in shard.workers.values() if worker.facts is not None]
    return priors.cost.full_share(sum(slots) / len(slots)) if slots else 1.0


def _ahead_of(shard: Shard, request: Request) -> Ahead:
    """Return the numbers of unfinished requests that come before it. Costs four bisections for each
    list, and a pass over the requests that are neither queued nor on a list.
    """
    key = request.key_now
    of_priority = pack_rank_class(request.facts.priority, 0) + BEHIND
    of_turn = key[0] & -MAX_LEVELS
    ends: list[OrderKey] = [*((of, -math.inf, "") for of in (of_priority, of_turn, key[0])), key]
    before = [_position(shard, end) for end in ends]
    ahead = [before[0], *(after - earlier for earlier, after in pairwise(before))]
    for other in _unqueued(shard):  # one pass, since there may be 100,000 while no worker is there
        at = bisect_right(ends, other.key_now)
        if at < len(ends):
            ahead[at] += 1
    return Ahead(*ahead)


def _position(shard: Shard, key: OrderKey) -> int:
    listed = sum(bisect_left(worker.in_order, key, key=order_key_of) for worker in shard.workers.values())
    return shard.queued.position(key) + listed


def _unqueued(shard: Shard) -> tuple[Request, ...]:
    return (*shard.parked.values(), *shard.suspects.values())


def _first(shard: Shard, count: int) -> Iterator[Request]:
    """Yield the first unfinished requests, best first."""
    unqueued = nsmallest(count, [request.key_now for request in _unqueued(shard)])
    lists = [[request.order_key for request in worker.in_order] for worker in shard.workers.values()]
    for key in islice(merge(shard.queued, unqueued, *lists), count):
        yield shard.requests[key[-1]]


def _waits_for(shard: Shard, request: Request) -> str:
    if request.request_id in shard.suspects:
        return f"a worker of its own: {request.deaths} workers died with it"
    if request.shared_prefill is not None and request.running:
        left = request.missing_tokens
        return f"the other {left} tokens of its context to be computed: so far {request.shared_prefill}"
    if request.request_id not in shard.parked:
        return ""
    room = shard.capacity_tokens
    if room == 0:
        return "a worker: none takes work now"
    return f"a worker that can hold its {request.longest_tokens} tokens: the largest now holds {room}"


def _state_of(request: Request) -> RequestState:
    if request.worker is None:
        return RequestState.QUEUED
    return RequestState.RUNNING if request.running else RequestState.LISTED


def _view(worker: Worker, priors: Priors) -> WorkerView:
    facts = worker.facts
    return WorkerView(
        worker_id=worker.worker_id,
        up=facts is not None,
        draining=worker.draining,
        slots=worker.slots,
        running=len(worker.running),
        listed=len(worker.members),
        target_blocks=facts.target_blocks if facts else 0,
        draft_blocks=facts.draft_blocks if facts else 0,
        free_target_blocks=worker.free_target_blocks,
        free_draft_blocks=worker.free_draft_blocks,
        rounds=worker.rounds,
        tokens=worker.tokens,
        acceptance=worker.accepted / worker.drafted if worker.drafted else 0.0,
        tokens_per_s=worker.tokens_per_s,
        moving_cost_s=sum(
            resume_cost_s(request, priors) for request in worker.members.values() if request.ran_here
        ),
    )
