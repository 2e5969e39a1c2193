"""Problems that a pool, its Deployment and its scheduler show by themselves. Pure functions on dictionaries."""

from __future__ import annotations

from laps_sd_operator import objects, vllm
from laps_sd_operator.objects import Object, Shard
from laps_sd_operator.problems import Problem, Reason


def other_policy(pool: Object, shard: Shard) -> Problem | None:
    """Return the problem if the schedulers' policy, which is one of their own settings, differs from the
    pool's.
    """
    wanted = pool["spec"].get("policy")
    if not wanted or wanted == shard.policy:
        return None
    message = f"the schedulers order by {shard.policy}, not {wanted}: LAPS_SD_POLICY is a setting of theirs"
    return Problem(Reason.POLICY, message)


def unequal_ranks(pool: Object) -> Problem | None:
    """Return the problem if the pool's workers over vLLM have another number of GPUs than of ranks."""
    message = vllm.unequal_ranks(objects.template_of(pool), pool["spec"].get("gpuResource", ""))
    return Problem(Reason.RANKS, message) if message else None


def not_owned(pool: Object, deployment: Object | None) -> Problem | None:
    """Return the problem if the Deployment of the pool's name belongs to another owner or an earlier pool."""
    if deployment is None or objects.owns(pool, deployment):
        return None
    message = f"there is a Deployment {pool['metadata']['name']} that is not this pool's"
    return Problem(Reason.NOT_OWNED, message)


def no_pods(deployment: Object | None) -> Problem | None:
    """Return why Kubernetes creates no pods for an accepted Deployment: a missing account, a quota, the
    namespace's admission rules.
    """
    conditions = ((deployment or {}).get("status") or {}).get("conditions") or ()
    for one in conditions:
        if one["type"] == "ReplicaFailure" and one["status"] == "True":
            return Problem(Reason.NO_PODS, one.get("message") or "Kubernetes creates no pods")
    return None


def paused(deployment: Object | None) -> Problem | None:
    """Return the problem if the rollout of the Deployment is paused."""
    if deployment is None or not deployment["spec"].get("paused"):
        return None
    name = deployment["metadata"]["name"]
    message = f"the Deployment is paused, so changes of the pool do not reach its workers: kubectl rollout resume deployment/{name}"
    return Problem(Reason.PAUSED, message)
