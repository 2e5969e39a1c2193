"""Status of a pool: numbers, the problem, and the condition Ready. Pure functions on dictionaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from laps_sd_operator.objects import POOL_LABEL, Object, Shard
from laps_sd_operator.problems import MAX_MESSAGE, Problem
from laps_sd_operator.reconcile import Phase, Seen, wanted_of

READY = "Ready"
AS_WANTED, UPDATING, NOT_READY = "AsWanted", "Updating", "WorkersNotReady"
"""Reasons of the condition while there is no problem."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of pods that are not being deleted."""

    wanted: int
    alive: int
    ready: int
    draining: int


def counts_of(seen: Seen) -> Counts:
    """Return the pool's numbers of pods."""
    alive = [pod for pod in seen.pods if not pod.terminating]
    return Counts(
        wanted=wanted_of(seen),
        alive=len(alive),
        ready=sum(pod.phase is Phase.READY for pod in alive),
        draining=sum(pod.chosen_s is not None for pod in alive),
    )


def status_of(
    pool: Object,
    seen: Seen,
    shard: Shard | None,
    problem: Problem | None,
    deployment: Object | None,
    pods: Sequence[Object] = (),
) -> dict[str, Any]:
    """Return the pool's status as a merge patch. None removes a field: the scheduler's values while no
    scheduler answers, and the last problem once it is solved.
    """
    counts = counts_of(seen)
    found: dict[str, Any] = {
        "replicas": counts.alive,
        "ready": counts.ready,
        "draining": counts.draining,
        "selector": f"{POOL_LABEL}={pool['metadata']['name']}",
        "queued": shard and shard.queued,
        "backlogSeconds": shard and round(shard.backlog_s, 3),
        "acceptance": shard and round(shard.acceptance, 4),
        "tokensPerSecond": shard and round(shard.tokens_per_s, 1),
        "policy": shard and shard.policy,
    }
    if problem is not None:
        return found | failed_status(pool, problem, seen.now_s)
    status, reason, message = _progress(counts, seen, deployment, pods)
    return found | _verdict(pool, None, _condition(pool, status, reason, message, seen.now_s))


def failed_status(pool: Object, problem: Problem, now_s: float) -> dict[str, Any]:
    """Return the part of the status that a problem decides, as a merge patch."""
    return _verdict(pool, str(problem), _condition(pool, "False", problem.reason, str(problem), now_s))


def _verdict(pool: Object, problem: str | None, condition: dict[str, Any]) -> dict[str, Any]:
    generation = pool["metadata"].get("generation", 0)
    return {"observedGeneration": generation, "problem": problem, "conditions": [condition]}


def _progress(
    counts: Counts, seen: Seen, deployment: Object | None, pods: Sequence[Object]
) -> tuple[str, str, str]:
    """Return status, reason and message of the condition of a pool without a problem."""
    workers = f"{counts.ready} of {counts.wanted} workers are ready"
    why = _waiting(pods)
    why = f": {why}" if why else ""
    if counts.ready < counts.wanted:
        return "False", NOT_READY, f"{workers}{why}"
    if not seen.up_to_date or not _rolled_out(counts.wanted, deployment):
        return "Unknown", UPDATING, f"{workers}, and not yet all have the pool's template{why}"
    return "True", AS_WANTED, f"{workers}, {counts.draining} drain" if counts.draining else workers


def _rolled_out(wanted: int, deployment: Object | None) -> bool:
    if deployment is None:
        return False
    status = deployment.get("status") or {}
    observed = status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
    updated = status.get("updatedReplicas", 0)
    return bool(observed and updated >= wanted and updated >= status.get("replicas", 0))


def _waiting(pods: Sequence[Object]) -> str:
    """Return why the first pod that waits does so, as Kubernetes reports it; empty: no pod shows a cause."""
    for pod in pods:
        status = pod.get("status") or {}
        for container in [
            *(status.get("initContainerStatuses") or ()),
            *(status.get("containerStatuses") or ()),
        ]:
            waits = (container.get("state") or {}).get("waiting")
            if waits and waits.get("reason") not in ("ContainerCreating", "PodInitializing"):
                parts = (pod["metadata"]["name"], waits.get("reason"), waits.get("message"))
                return ": ".join(part for part in parts if part)
        for one in status.get("conditions") or ():
            if one["type"] == "PodScheduled" and one["status"] == "False":
                return f"{pod['metadata']['name']}: {one.get('message') or one.get('reason', '')}"
    return ""


def _condition(pool: Object, status: str, reason: str, message: str, now_s: float) -> dict[str, Any]:
    """Return the condition Ready; its time changes with its status only."""
    told = (pool.get("status") or {}).get("conditions") or ()
    before: Mapping[str, Any] = next((one for one in told if one.get("type") == READY), {})
    since = before.get("lastTransitionTime") if before.get("status") == status else None
    return {
        "type": READY,
        "status": status,
        "reason": str(reason),
        "message": message[:MAX_MESSAGE],
        "lastTransitionTime": since or datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "observedGeneration": pool["metadata"].get("generation", 0),
    }
