"""Conversion between Kubernetes' objects and the types of `reconcile`. Pure functions on dictionaries."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
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
CHOSEN_COST, RELEASED_COST = "-1000", "-2000"
"""Deletion costs: Kubernetes removes the pod with the lowest one first, of those that are equally ready."""
RESTARTED = "kubectl.kubernetes.io/restartedAt"
"""Annotation of a template, by which `kubectl rollout restart` replaces pods. The operator keeps it."""
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
        annotations = deployment["metadata"].get("annotations") or {}
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
    annotations = metadata.get("annotations") or {}
    return Pod(
        name=metadata["name"],
        phase=phase,
        template=(metadata.get("labels") or {}).get("pod-template-hash", ""),
        terminating=metadata.get("deletionTimestamp") is not None,
        chosen_s=_seconds(annotations.get(CHOSEN)),
        released=annotations.get(DELETION_COST) == RELEASED_COST,
    )


def _seconds(text: str | None) -> float | None:
    """Return the Unix seconds of a mark; None for an annotation that the operator did not write."""
    return float(text) if text and _UNIX_SECONDS.fullmatch(text) else None


_UNIX_SECONDS = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")


def owns(pool: Object, deployment: Object) -> bool:
    """Return whether the Deployment belongs to this very pool, not to another owner of the same name or to an
    earlier pool.
    """
    owners = deployment["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid") == pool["metadata"]["uid"] for owner in owners)


def scale_patch(deployment: Object, replicas: int) -> list[dict[str, Any]]:
    """Return a JSON patch of the Deployment, which fails if the scale was changed since it was read."""
    return [
        {"op": "test", "path": "/spec/replicas", "value": deployment["spec"].get("replicas", 1)},
        {"op": "replace", "path": "/spec/replicas", "value": replicas},
        *annotation_patch(deployment, LAST_SET, str(replicas)),
    ]


def template_patch(pool: Object, deployment: Object) -> list[dict[str, Any]]:
    """Return a JSON patch of the Deployment: template and strategy as a whole, without the replica count."""
    template = template_of(pool)
    of_now = (deployment["spec"]["template"].get("metadata") or {}).get("annotations") or {}
    if RESTARTED in of_now:
        annotations = template["metadata"].get("annotations") or {}
        template["metadata"]["annotations"] = {RESTARTED: of_now[RESTARTED], **annotations}
    return [
        {"op": "replace", "path": "/spec/template", "value": template},
        {"op": "add", "path": "/spec/strategy", "value": strategy_of(pool)},
        *annotation_patch(deployment, TEMPLATE, digest(pool)),
    ]


def annotation_patch(deployment: Object, name: str, value: str) -> list[dict[str, Any]]:
    """Return the operations of a JSON patch that set one annotation of the Deployment."""
    if not deployment["metadata"].get("annotations"):
        return [{"op": "add", "path": "/metadata/annotations", "value": {name: value}}]
    key = name.replace("~", "~0").replace("/", "~1")
    return [{"op": "add", "path": f"/metadata/annotations/{key}", "value": value}]


def mark_patch(since_s: float) -> dict[str, Any]:
    """Return a merge patch that marks a pod for removal."""
    return _annotations({CHOSEN: f"{since_s:.3f}", DELETION_COST: CHOSEN_COST})


def release_patch() -> dict[str, Any]:
    """Return a merge patch by which a marked pod goes before the other marked ones."""
    return _annotations({DELETION_COST: RELEASED_COST})


def spare_patch() -> dict[str, Any]:
    """Return a merge patch that removes the mark of a pod."""
    return _annotations({CHOSEN: None, DELETION_COST: None})


def _annotations(found: dict[str, str | None]) -> dict[str, Any]:
    return {"metadata": {"annotations": found}}
