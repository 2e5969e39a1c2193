"""Conversion between Kubernetes' objects and the types of `reconcile`. Pure functions on dictionaries."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laps_sd_operator import vllm
from laps_sd_operator.reconcile import Phase, Pod, Seen, Worker

GROUP, VERSION, PLURAL, KIND = "laps-sd.dev", "v1alpha1", "speculativepools", "SpeculativePool"
POOL_LABEL = "laps-sd.dev/speculative-pool"
LAST_SET = "laps-sd.dev/replicas-set"
"""Annotation of the Deployment: the replica count that the operator gave it."""
TEMPLATE = "laps-sd.dev/template"
"""Annotation of the Deployment: digest of the template and the strategy that the operator gave it."""
CHOSEN = "laps-sd.dev/chosen-at"
"""Annotation of a pod that is to be removed: Unix seconds of the choice."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LOWEST_COST = "-1000"
MAX_PROBLEM = 500
"""Largest number of characters of the problem in the status."""
END_S = 10
"""Seconds in which a pod may end after its drain."""

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """State of a pool, as reported by the scheduler."""

    workers: tuple[Worker, ...]
    cheapest: str | None
    queued: int
    backlog_s: float
    acceptance: float
    tokens_per_s: float
    policy: str


def template_of(pool: Object) -> dict[str, Any]:
    """Return the template of the pods: the pool's own, completed with the pool's settings."""
    spec = pool["spec"]
    template = copy.deepcopy(dict(spec["template"]))
    template.setdefault("metadata", {}).setdefault("labels", {})[POOL_LABEL] = pool["metadata"]["name"]
    pod = template["spec"]
    drain_s = drain_s_of(pool)
    least = math.ceil(drain_s) + END_S
    pod["terminationGracePeriodSeconds"] = max(pod.get("terminationGracePeriodSeconds") or 0, least)
    worker = next(container for container in pod["containers"] if container["name"] == "worker")
    if spec.get("resources"):
        worker["resources"] = spec["resources"]
    given = {"LAPS_SD_DRAIN_S": f"{drain_s:g}"}
    given |= vllm.engine_environment(spec, worker.get("resources") or {})
    kept = [one for one in worker.get("env", []) if one["name"] not in given]
    worker["env"] = kept + [{"name": name, "value": value} for name, value in given.items()]
    return template


def drain_s_of(pool: Object) -> float:
    """Return the drain time in seconds."""
    return float(pool["spec"].get("drainSeconds", 60))


def strategy_of(pool: Object) -> Object:
    """Return the pool's own strategy; by default a new worker is ready before an old one leaves."""
    own: Object | None = pool["spec"].get("strategy")
    return own or {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def digest(pool: Object) -> str:
    """Return a digest of all that a Deployment takes from the pool, by which a change is detected."""
    taken = (template_of(pool), strategy_of(pool))
    return hashlib.sha256(json.dumps(taken, sort_keys=True).encode()).hexdigest()[:16]


def deployment_of(pool: Object, replicas: int) -> dict[str, Any]:
    """Return the Deployment of a new pool. It is deleted with the pool (owner reference)."""
    metadata = pool["metadata"]
    selector = {POOL_LABEL: metadata["name"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": {**metadata.get("labels", {}), **selector},
            "annotations": {LAST_SET: str(replicas), TEMPLATE: digest(pool)},
            "ownerReferences": [
                {
                    "apiVersion": f"{GROUP}/{VERSION}",
                    "kind": KIND,
                    "name": metadata["name"],
                    "uid": metadata["uid"],
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": selector},
            "strategy": strategy_of(pool),
            "progressDeadlineSeconds": 3600,
            "template": template_of(pool),
        },
    }


def seen_of(
    pool: Object, deployment: Object | None, pods: Sequence[Object], shard: Shard | None, now_s: float
) -> Seen:
    """Return the input of `reconcile`. `pods` are those of the pool's selector."""
    spec = pool["spec"]
    replicas = last_set = None
    up_to_date = True
    if deployment is not None:
        annotations = deployment["metadata"].get("annotations", {})
        replicas = int(deployment["spec"].get("replicas", 1))
        last_set = int(annotations[LAST_SET]) if annotations.get(LAST_SET, "").isdecimal() else None
        up_to_date = annotations.get(TEMPLATE) == digest(pool)
    return Seen(
        now_s=now_s,
        wanted=int(spec.get("replicas", 1)),
        least=int(spec.get("minReplicas", 0)),
        most=spec.get("maxReplicas"),
        drain_s=drain_s_of(pool),
        replicas=replicas,
        last_set=last_set,
        up_to_date=up_to_date,
        pods=tuple(pod_of(pod) for pod in pods if pod.get("status", {}).get("phase") not in _ENDED),
        workers=shard.workers if shard is not None else None,
        cheapest=shard.cheapest if shard is not None else None,
    )


_ENDED = ("Succeeded", "Failed")


def pod_of(pod: Object) -> Pod:
    """Return a pod as the type of `reconcile`."""
    metadata, status = pod["metadata"], pod.get("status", {})
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())
    if not pod["spec"].get("nodeName"):
        phase = Phase.UNSCHEDULED
    elif status.get("phase") != "Running":
        phase = Phase.PENDING
    else:
        phase = Phase.READY if ready else Phase.RUNNING
    chosen = (metadata.get("annotations") or {}).get(CHOSEN)
    return Pod(
        name=metadata["name"],
        phase=phase,
        terminating=metadata.get("deletionTimestamp") is not None,
        chosen_s=float(chosen) if chosen else None,
    )


def owns(pool: Object, deployment: Object) -> bool:
    """Return whether the Deployment belongs to this very pool, not to another owner of the same name or to an
    earlier pool.
    """
    owners = deployment["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid") == pool["metadata"]["uid"] for owner in owners)


def failure_of(deployment: Object | None) -> str:
    """Return why Kubernetes creates no pods for an accepted Deployment (a missing account, a quota, the
    namespace's admission rules); empty if it creates them.
    """
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or ()
    said = (
        one.get("message", "")
        for one in conditions
        if one["type"] == "ReplicaFailure" and one["status"] == "True"
    )
    return next(iter(said), "")


def other_policy(pool: Object, shard: Shard) -> str:
    """Return the problem if the schedulers' policy, which is one of their own settings, differs from the
    pool's; empty if they agree.
    """
    wanted = pool["spec"].get("policy")
    if not wanted or wanted == shard.policy:
        return ""
    return f"the schedulers order by {shard.policy}, not {wanted}: LAPS_SD_POLICY is a setting of theirs"


def unequal_ranks(pool: Object) -> str:
    """Return the problem if the pool's workers over vLLM have another number of GPUs than of ranks, else empty."""
    return vllm.unequal_ranks(template_of(pool))


def status_of(pool: Object, seen: Seen, shard: Shard | None, problem: str) -> dict[str, Any]:
    """Return the pool's status as a merge patch. None removes a field: the scheduler's values while no
    scheduler answers, and the last problem once it is solved.
    """
    alive = [pod for pod in seen.pods if not pod.terminating]
    found: dict[str, Any] = {
        "observedGeneration": pool["metadata"].get("generation", 0),
        "replicas": len(alive),
        "ready": sum(pod.phase is Phase.READY for pod in alive),
        "draining": sum(pod.chosen_s is not None for pod in alive),
        "selector": f"{POOL_LABEL}={pool['metadata']['name']}",
        "problem": problem[:MAX_PROBLEM] or None,
    }
    return found | {
        "queued": shard and shard.queued,
        "backlogSeconds": shard and round(shard.backlog_s, 3),
        "acceptance": shard and round(shard.acceptance, 4),
        "tokensPerSecond": shard and round(shard.tokens_per_s, 1),
        "policy": shard and shard.policy,
    }


def scale_patch(before: int, replicas: int) -> list[dict[str, Any]]:
    """Return a JSON patch of the Deployment, which fails if the scale was changed since it was read."""
    return [
        {"op": "test", "path": "/spec/replicas", "value": before},
        {"op": "replace", "path": "/spec/replicas", "value": replicas},
        last_set_patch(replicas),
    ]


def last_set_patch(replicas: int) -> dict[str, Any]:
    """Return one operation of a JSON patch of the Deployment."""
    return {"op": "add", "path": _annotation(LAST_SET), "value": str(replicas)}


def template_patch(pool: Object) -> list[dict[str, Any]]:
    """Return a JSON patch of the Deployment: template and strategy as a whole, without the replica count."""
    return [
        {"op": "replace", "path": "/spec/template", "value": template_of(pool)},
        {"op": "add", "path": "/spec/strategy", "value": strategy_of(pool)},
        {"op": "add", "path": _annotation(TEMPLATE), "value": digest(pool)},
    ]


def mark_patch(since_s: float | None) -> dict[str, Any]:
    """Return a merge patch of a pod; None removes the mark."""
    marked = since_s is not None
    annotations = {
        CHOSEN: f"{since_s:.3f}" if marked else None,
        DELETION_COST: LOWEST_COST if marked else None,
    }
    return {"metadata": {"annotations": annotations}}


def _annotation(name: str) -> str:
    return "/metadata/annotations/" + name.replace("~", "~0").replace("/", "~1")
