"""The operator as a process: `python -m laps_sd_operator`. kopf tells which pools there are; every two seconds each gets a turn.

A turn reads what is there, the pool included, asks `reconcile`, and carries out what it says. A failed turn changes nothing that
the next one would not see, so the operator may be killed at any moment. It leaves no finalizer on a pool: Kubernetes' garbage
collector takes the Deployment with it, and a pool can be deleted after its operator (`helm uninstall` does). Of several, the one
that holds the Lease (`leadership`) has turns; the others know the pools and wait.

Environment: LAPS_SD_OPERATOR_NAMESPACE (required), LAPS_SD_OPERATOR_HEALTH_PORT (8080), POD_ID (by which it stands for election; else
the host and the process), and LAPS_SD_LINK_TLS… as for a worker.
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

from laps_sd.config import load
from laps_sd.log import configure, get_logger
from laps_sd.wire import LinkSettings, Tls, link_tls
from laps_sd_operator import objects, scheduler
from laps_sd_operator.answers import CONFLICT, GONE, UNPROCESSABLE, if_there
from laps_sd_operator.leadership import Leadership
from laps_sd_operator.reconcile import Action, Adopt, Create, Drain, Mark, Scale, Spare, Update, reconcile

TURN_S = 2.0
TURN_LIMIT_S = 60.0
"""A turn that takes longer waits for an answer that will not come: the client gives up on nothing by itself."""

log = get_logger("operator")


@kopf.on.startup()
async def start(memo: kopf.Memo, settings: kopf.OperatorSettings, **_: Any) -> None:
    """Connects to Kubernetes, as the pod's account or as KUBECONFIG says."""
    settings.scanning.disabled = True  # it has no rights outside its namespace
    settings.posting.enabled = False  # what happens shows in status
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
    """Ends all turns, gives the Lease up and closes the connections."""
    await memo.operator.close()


@kopf.on.event(objects.GROUP, objects.VERSION, objects.PLURAL)
async def heard(name: str, namespace: str, memo: kopf.Memo, **_: Any) -> None:
    """A pool that was not known gets turns while this operator leads, until it is found to be gone."""
    memo.operator.look_after(namespace, name)


class Operator:
    """A task per pool, while it leads."""

    def __init__(self, api: client.ApiClient, tls: Tls | None, leadership: Leadership) -> None:
        self._api = api
        self._tls = tls
        self._leadership = leadership
        self._leads = False
        self._tasks: dict[tuple[str, str], asyncio.Task[None] | None] = {}
        """Of every known pool; none while another operator leads."""
        self._heard: set[tuple[str, str]] = set()
        """Of whom there was news since their last turn began: one that this turn found gone may be there again."""
        self._candidate = asyncio.create_task(leadership.run(self._lead))

    def look_after(self, namespace: str, name: str) -> None:
        """From now on, until it is found gone."""
        self._heard.add((namespace, name))
        if self._tasks.setdefault((namespace, name)) is None and self._leads:
            self._begin(namespace, name)

    async def close(self) -> None:
        """Ends all turns, and lets another operator lead."""
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
                if repr(error) != failed:  # said once: an API server may be away for long
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
    """One turn of one pool; False when there is no such pool any more. It ends early when it may not act any more."""
    pool = await kubernetes.pool()
    if pool is None:
        return False
    if pool["metadata"].get("deletionTimestamp"):
        return True  # what it owns goes with it
    shard, problem = None, ""
    try:
        shard = await scheduler.shard(pool["spec"]["scheduler"], tls)
        problem = objects.other_policy(pool, shard)
    except scheduler.NoScheduler as error:
        problem = f"no scheduler answers: {error}"
    # After the scheduler: who drains there was marked before, so that the mark is seen, and nobody is chosen in addition.
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
    """What Kubernetes refuses, in its words; empty for what the next turn sees by itself: somebody else was faster."""
    if error.status in (GONE, CONFLICT):
        return ""
    try:
        found = json.loads(error.body or "")
    except ValueError:
        return f"Kubernetes answers {error.status}: {error.reason}"
    if error.status == UNPROCESSABLE and not found.get("details", {}).get("causes"):
        return ""  # a JSON patch whose test failed: the replica count is another by now
    return str(found.get("message", error.reason))


async def carry_out(
    action: Action, pool: dict[str, Any], before: int | None, kubernetes: Kubernetes, tls: Tls | None
) -> None:
    """One action. Raises ApiException and NoScheduler."""
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
    """The calls for one pool; objects as dictionaries."""

    def __init__(self, api: client.ApiClient, namespace: str, name: str) -> None:
        self._api = api
        self._apps = client.AppsV1Api(api)
        self._core = client.CoreV1Api(api)
        self._custom = client.CustomObjectsApi(api)
        self._name, self._namespace = name, namespace
        self._itself = (objects.GROUP, objects.VERSION, namespace, objects.PLURAL, name)

    async def pool(self) -> dict[str, Any] | None:
        """The pool, if there is one."""
        found: dict[str, Any] | None = await if_there(
            self._custom.get_namespaced_custom_object(*self._itself)
        )
        return found

    async def deployment(self) -> dict[str, Any] | None:
        """The Deployment of the pool's name, if there is one."""
        found = await if_there(self._apps.read_namespaced_deployment(self._name, self._namespace))
        plain: dict[str, Any] | None = self._api.sanitize_for_serialization(found)
        return plain

    async def pods(self) -> list[dict[str, Any]]:
        """All pods of the pool."""
        selector = f"{objects.POOL_LABEL}={self._name}"
        found = await self._core.list_namespaced_pod(self._namespace, label_selector=selector)
        plain: list[dict[str, Any]] = self._api.sanitize_for_serialization(found.items)
        return plain

    async def create(self, deployment: dict[str, Any]) -> None:
        """The Deployment."""
        await self._apps.create_namespaced_deployment(self._namespace, deployment)

    async def patch_deployment(self, operations: list[dict[str, Any]]) -> None:
        """A JSON patch: the client sends a list as one."""
        await self._apps.patch_namespaced_deployment(self._name, self._namespace, operations)

    async def patch_pod(self, name: str, patch: dict[str, Any]) -> None:
        """A merge patch of a pod's metadata."""
        await self._core.patch_namespaced_pod(name, self._namespace, patch)

    async def patch_pool(self, patch: dict[str, Any]) -> None:
        """A merge patch of the pool itself."""
        await self._custom.patch_namespaced_custom_object(*self._itself, patch, _content_type=MERGE)

    async def tell(self, status: dict[str, Any]) -> None:
        """A merge patch of the pool's status."""
        try:
            await self._custom.patch_namespaced_custom_object_status(
                *self._itself, {"status": status}, _content_type=MERGE
            )
        except ApiException as error:
            if error.status != GONE:
                raise


MERGE = "application/merge-patch+json"


def main() -> None:
    """Runs until a signal."""
    namespace = os.environ.get("LAPS_SD_OPERATOR_NAMESPACE")
    if not namespace:
        sys.exit("LAPS_SD_OPERATOR_NAMESPACE must name the namespace whose pools are looked after.")
    port = os.environ.get("LAPS_SD_OPERATOR_HEALTH_PORT", "8080")
    kopf.configure(verbose=False)
    configure("operator", level="info")
    kopf.run(namespaces=[namespace], liveness_endpoint=f"http://0.0.0.0:{port}/healthz", standalone=True)


if __name__ == "__main__":
    main()
