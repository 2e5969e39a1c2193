"""Process of the operator: `python -m laps_sd_operator`. kopf reports the pools; every two seconds each pool
has a turn.

A turn reads the current state, the pool included, calls `reconcile`, and executes its actions. After a failed
turn the next one sees all that it needs, so the operator may be killed at any moment. It leaves no finalizer
on a pool: Kubernetes' garbage collector deletes the Deployment with the pool, and a pool can be deleted after
its operator (as `helm uninstall` does). Of several operators, the holder of the Lease (`leadership`) has
turns; the others keep the list of pools and wait.

Environment: LAPS_SD_OPERATOR_NAMESPACE (required), LAPS_SD_OPERATOR_HEALTH_PORT (8080), POD_ID (its identity
in the election; default: the host and the process), and LAPS_SD_LINK_TLS… as for a worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import kopf
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import ApiException

from laps_sd.service.config import load
from laps_sd.service.log import configure, get_logger
from laps_sd.service.wire import LinkSettings, Tls, link_tls
from laps_sd_operator import objects, scheduler
from laps_sd_operator.answers import CONFLICT, GONE, UNPROCESSABLE, if_there
from laps_sd_operator.leadership import Leadership
from laps_sd_operator.reconcile import Action, Adopt, Create, Drain, Mark, Scale, Spare, Update, reconcile

TURN_S = 2.0
TURN_LIMIT_S = 60.0
"""Seconds after which a turn is cancelled, as its answer will not come: the client has no time limit of its
own."""

log = get_logger("operator")


@kopf.on.startup()
async def start(memo: kopf.Memo, settings: kopf.OperatorSettings, **_: Any) -> None:
    """Connect to Kubernetes, with the pod's account or with KUBECONFIG."""
    settings.scanning.disabled = True  # the operator has no rights outside its namespace
    settings.posting.enabled = False  # the pool's status shows the problems
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        config.load_incluster_config()
    else:
        await config.load_kube_config()
    api = client.ApiClient()
    identity = os.environ.get("POD_ID") or f"{socket.gethostname()}-{os.getpid()}"
    leadership = Leadership(api, os.environ["LAPS_SD_OPERATOR_NAMESPACE"], identity)
    memo.operator = Operator(api, link_tls(load(LinkSettings)), leadership)


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """End all turns, release the Lease and close the connections."""
    await memo.operator.close()


@kopf.on.event(objects.GROUP, objects.VERSION, objects.PLURAL)
async def heard(name: str, namespace: str, memo: kopf.Memo, **_: Any) -> None:
    """Start the turns of a new pool while this operator leads, until the pool is deleted."""
    memo.operator.look_after(namespace, name)


class Operator:
    """Tasks of the pools: one for each pool, while this operator leads."""

    def __init__(self, api: client.ApiClient, tls: Tls | None, leadership: Leadership) -> None:
        self._api = api
        self._tls = tls
        self._leadership = leadership
        self._leads = False
        self._tasks: dict[tuple[str, str], asyncio.Task[None] | None] = {}
        """Task of every known pool; None while another operator leads."""
        self._heard: set[tuple[str, str]] = set()
        """Pools with an event since their last turn began: such a pool may exist again although that turn did
        not find it."""
        self._candidate = asyncio.create_task(leadership.run(self._lead))

    def look_after(self, namespace: str, name: str) -> None:
        """Give turns to a pool until it is deleted."""
        self._heard.add((namespace, name))
        if self._tasks.setdefault((namespace, name)) is None and self._leads:
            self._begin(namespace, name)

    async def close(self) -> None:
        """End all turns, and release the Lease for another operator."""
        self._candidate.cancel()
        await asyncio.gather(self._candidate, return_exceptions=True)
        await self._leadership.release()
        await self._api.close()

    async def _lead(self) -> None:
        self._leads = True
        try:
            for namespace, name in self._tasks:
                self._begin(namespace, name)
            await asyncio.Event().wait()
        finally:
            self._leads = False
            tasks = [task for task in self._tasks.values() if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._tasks = dict.fromkeys(self._tasks)

    def _begin(self, namespace: str, name: str) -> None:
        self._tasks[namespace, name] = asyncio.create_task(self._turns(namespace, name))

    async def _turns(self, namespace: str, name: str) -> None:
        kubernetes = Kubernetes(self._api, namespace, name)
        logger = log.bind(pool=f"{namespace}/{name}")
        failed = ""
        while True:
            self._heard.discard((namespace, name))
            try:
                async with asyncio.timeout(TURN_LIMIT_S):
                    there = await turn(kubernetes, self._tls, logger, self._leadership.held)
            except Exception as error:
                # Logged once: an API server may be unreachable for long.
                if repr(error) != failed:
                    logger.exception("a turn failed; the next one begins anew")
                failed = repr(error)
            else:
                if failed:
                    logger.info("a turn succeeded again")
                failed = ""
                if not there and (namespace, name) not in self._heard:
                    break
            await asyncio.sleep(TURN_S)
        del self._tasks[namespace, name]


async def turn(
    kubernetes: Kubernetes, tls: Tls | None, logger: Any, may_act: Callable[[], bool] = lambda: True
) -> bool:
    """Run one turn of one pool; return False if the pool no longer exists. It ends early when `may_act`
    returns False.
    """
    pool = await kubernetes.pool()
    if pool is None:
        return False
    if pool["metadata"].get("deletionTimestamp"):
        return True  # its objects are deleted with it
    shard, problem = None, ""
    try:
        shard = await scheduler.shard(pool["spec"]["scheduler"], tls)
        problem = objects.unequal_ranks(pool) or objects.other_policy(pool, shard)
    except scheduler.NoScheduler as error:
        problem = f"no scheduler answers: {error}"
    # Read after the scheduler: a worker that drains there was marked before, so the mark is seen here and no
    # second worker is chosen.
    deployment, pods = await asyncio.gather(kubernetes.deployment(), kubernetes.pods())
    problem = objects.failure_of(deployment) or problem
    seen = objects.seen_of(pool, deployment, pods, shard, time.time())
    if deployment is not None and not objects.owns(pool, deployment):
        problem = f"there is a Deployment {pool['metadata']['name']} that is not this pool's"
    else:
        try:
            for action in reconcile(seen):
                if not may_act():
                    return True
                logger.info("acts", action=str(action))
                await carry_out(action, pool, seen.replicas, kubernetes, tls)
        except ApiException as error:
            problem = said_by(error) or problem
        except scheduler.NoScheduler as error:
            problem = f"no scheduler answers: {error}"
    status = objects.status_of(pool, seen, shard, problem)
    told = pool.get("status", {})
    if problem and problem != told.get("problem"):
        logger.warning("cannot do all it should", problem=problem)
    if may_act() and any(told.get(key) != value for key, value in status.items()):
        await kubernetes.tell(status)
    return True


def said_by(error: ApiException) -> str:
    """Return Kubernetes' message of the refusal; empty if the next turn sees the cause by itself, a
    concurrent change.
    """
    if error.status in (GONE, CONFLICT):
        return ""
    try:
        found = json.loads(error.body or "")
    except ValueError:
        return f"Kubernetes answers {error.status}: {error.reason}"
    if error.status == UNPROCESSABLE and not found.get("details", {}).get("causes"):
        return ""  # the test of a JSON patch failed: the replica count has changed
    return str(found.get("message", error.reason))


async def carry_out(
    action: Action, pool: dict[str, Any], before: int | None, kubernetes: Kubernetes, tls: Tls | None
) -> None:
    """Execute one action. Raises ApiException and NoScheduler."""
    match action:
        case Create(replicas):
            await kubernetes.create(objects.deployment_of(pool, replicas))
        case Update():
            await kubernetes.patch_deployment(objects.template_patch(pool))
        case Scale(replicas):
            assert before is not None, "there is a Deployment to scale"
            await kubernetes.patch_deployment(objects.scale_patch(before, replicas))
        case Adopt(replicas):
            await kubernetes.patch_pool({"spec": {"replicas": replicas}})
            await kubernetes.patch_deployment([objects.last_set_patch(replicas)])
        case Mark(pod, since_s):
            await kubernetes.patch_pod(pod, objects.mark_patch(since_s))
        case Spare(pod):
            await kubernetes.patch_pod(pod, objects.mark_patch(None))
        case Drain(worker):
            await scheduler.drain(pool["spec"]["scheduler"], tls, worker)


class Kubernetes:
    """Calls for one pool; objects are dictionaries."""

    def __init__(self, api: client.ApiClient, namespace: str, name: str) -> None:
        self._api = api
        self._apps = client.AppsV1Api(api)
        self._core = client.CoreV1Api(api)
        self._custom = client.CustomObjectsApi(api)
        self._name, self._namespace = name, namespace
        self._itself = (objects.GROUP, objects.VERSION, namespace, objects.PLURAL, name)

    async def pool(self) -> dict[str, Any] | None:
        """Return the pool, or None if it does not exist."""
        found: dict[str, Any] | None = await if_there(
            self._custom.get_namespaced_custom_object(*self._itself)
        )
        return found

    async def deployment(self) -> dict[str, Any] | None:
        """Return the Deployment of the pool's name, or None if it does not exist."""
        found = await if_there(self._apps.read_namespaced_deployment(self._name, self._namespace))
        plain: dict[str, Any] | None = self._api.sanitize_for_serialization(found)
        return plain

    async def pods(self) -> list[dict[str, Any]]:
        """Return all pods of the pool."""
        selector = f"{objects.POOL_LABEL}={self._name}"
        found = await self._core.list_namespaced_pod(self._namespace, label_selector=selector)
        plain: list[dict[str, Any]] = self._api.sanitize_for_serialization(found.items)
        return plain

    async def create(self, deployment: dict[str, Any]) -> None:
        """Create the Deployment."""
        await self._apps.create_namespaced_deployment(self._namespace, deployment)

    async def patch_deployment(self, operations: list[dict[str, Any]]) -> None:
        """Send a JSON patch of the Deployment: the client sends a list as a JSON patch."""
        await self._apps.patch_namespaced_deployment(self._name, self._namespace, operations)

    async def patch_pod(self, name: str, patch: dict[str, Any]) -> None:
        """Send a merge patch of a pod's metadata."""
        await self._core.patch_namespaced_pod(name, self._namespace, patch)

    async def patch_pool(self, patch: dict[str, Any]) -> None:
        """Send a merge patch of the pool itself."""
        await self._custom.patch_namespaced_custom_object(*self._itself, patch, _content_type=MERGE)

    async def tell(self, status: dict[str, Any]) -> None:
        """Send a merge patch of the pool's status."""
        try:
            await self._custom.patch_namespaced_custom_object_status(
                *self._itself, {"status": status}, _content_type=MERGE
            )
        except ApiException as error:
            if error.status != GONE:
                raise


MERGE = "application/merge-patch+json"


def main() -> None:
    """Run until a signal."""
    namespace = os.environ.get("LAPS_SD_OPERATOR_NAMESPACE")
    if not namespace:
        sys.exit("LAPS_SD_OPERATOR_NAMESPACE must name the namespace whose pools are looked after.")
    port = os.environ.get("LAPS_SD_OPERATOR_HEALTH_PORT", "8080")
    kopf.configure(verbose=False)
    configure("operator", level="info")
    kopf.run(namespaces=[namespace], liveness_endpoint=f"http://0.0.0.0:{port}/healthz", standalone=True)


if __name__ == "__main__":
    main()
