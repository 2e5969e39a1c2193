"""The operator as a process: `python -m laps_sd_operator`. kopf watches the pools; every two seconds each gets one turn.

A turn reads what is there, asks `reconcile`, and carries out what it says. A failed turn changes nothing that the next one
would not see. Several operators may run: kopf's peering lets one of them work.

Environment: LAPS_SD_OPERATOR_NAMESPACE (required), POD_NAME, and LAPS_SD_LINK_TLS… as for a worker.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

import kopf
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import ApiException

from laps_sd.config import load
from laps_sd.wire import LinkSettings, Tls, link_tls
from laps_sd_operator import objects, scheduler
from laps_sd_operator.reconcile import Action, Adopt, Create, Drain, Mark, Scale, Spare, Update, reconcile

TURN_S = 2.0
GONE, CONFLICT, TEST_FAILED = 404, 409, 422


@kopf.on.startup()
async def start(memo: kopf.Memo, settings: kopf.OperatorSettings, **_: Any) -> None:
    """Connects to Kubernetes, as the pod's account or as KUBECONFIG says."""
    settings.persistence.finalizer = f"{objects.GROUP}/operator"
    settings.posting.level = 30  # warnings; what happens shows in status
    settings.peering.name = "laps-sd"
    settings.peering.mandatory = True
    settings.peering.priority = random.randint(0, 32767)
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        config.load_incluster_config()
    else:
        await config.load_kube_config()
    memo.api = client.ApiClient()
    memo.tls = link_tls(load(LinkSettings))


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Closes the connections."""
    await memo.api.close()


@kopf.timer(objects.GROUP, objects.VERSION, objects.PLURAL, interval=TURN_S)
async def turn(body: kopf.Body, patch: kopf.Patch, memo: kopf.Memo, logger: kopf.Logger, **_: Any) -> None:
    """One turn of one pool."""
    pool = dict(body)
    kubernetes = Kubernetes(memo.api, pool)
    deployment, pods = await asyncio.gather(kubernetes.deployment(), kubernetes.pods())
    try:
        shard = await scheduler.shard(pool["spec"]["scheduler"], memo.tls)
    except scheduler.NoScheduler as error:
        logger.warning("no scheduler answers: %s", error)
        shard = None
    seen = objects.seen_of(pool, deployment, pods, shard, time.time())
    for action in reconcile(seen):
        logger.info("%s", action)
        await carry_out(action, seen.replicas, kubernetes, memo.tls)
    status = objects.status_of(pool, seen, shard)
    if any(body.status.get(key) != value for key, value in status.items()):
        patch.status.update(status)


async def carry_out(action: Action, before: int | None, kubernetes: Kubernetes, tls: Tls | None) -> None:
    """One action. What somebody else changed in between is left to the next turn."""
    try:
        match action:
            case Create(replicas):
                await kubernetes.create(replicas)
            case Update():
                await kubernetes.patch_deployment(objects.template_patch(kubernetes.pool))
            case Scale(replicas):
                assert before is not None, "there is a Deployment to scale"
                await kubernetes.patch_deployment(objects.scale_patch(before, replicas))
            case Adopt(replicas):
                await kubernetes.scale_pool(replicas)
                await kubernetes.patch_deployment([objects.last_set_patch(replicas)])
            case Mark(pod, since_s):
                await kubernetes.patch_pod(pod, objects.mark_patch(since_s))
            case Spare(pod):
                await kubernetes.patch_pod(pod, objects.mark_patch(None))
            case Drain(worker):
                await scheduler.drain(kubernetes.pool["spec"]["scheduler"], tls, worker)
    except ApiException as error:
        if error.status not in (GONE, CONFLICT, TEST_FAILED):
            raise
    except scheduler.NoScheduler as error:
        raise kopf.TemporaryError(str(error), delay=TURN_S) from error


class Kubernetes:
    """The calls of one turn, for one pool; objects as dictionaries."""

    def __init__(self, api: client.ApiClient, pool: dict[str, Any]) -> None:
        self.pool = pool
        self._api = api
        self._apps = client.AppsV1Api(api)
        self._core = client.CoreV1Api(api)
        self._custom = client.CustomObjectsApi(api)
        self._name, self._namespace = pool["metadata"]["name"], pool["metadata"]["namespace"]

    async def deployment(self) -> dict[str, Any] | None:
        """The pool's Deployment, if there is one."""
        try:
            found = await self._apps.read_namespaced_deployment(self._name, self._namespace)
        except ApiException as error:
            if error.status == GONE:
                return None
            raise
        plain: dict[str, Any] = self._api.sanitize_for_serialization(found)
        return plain

    async def pods(self) -> list[dict[str, Any]]:
        """All pods of the pool."""
        selector = f"{objects.POOL_LABEL}={self._name}"
        found = await self._core.list_namespaced_pod(self._namespace, label_selector=selector)
        plain: list[dict[str, Any]] = self._api.sanitize_for_serialization(found.items)
        return plain

    async def create(self, replicas: int) -> None:
        """The Deployment."""
        await self._apps.create_namespaced_deployment(
            self._namespace, objects.deployment_of(self.pool, replicas)
        )

    async def patch_deployment(self, operations: list[dict[str, Any]]) -> None:
        """A JSON patch: the client sends a list as one."""
        await self._apps.patch_namespaced_deployment(self._name, self._namespace, operations)

    async def patch_pod(self, name: str, patch: dict[str, Any]) -> None:
        """A merge patch of a pod's metadata."""
        await self._core.patch_namespaced_pod(name, self._namespace, patch)

    async def scale_pool(self, replicas: int) -> None:
        """The pool itself."""
        await self._custom.patch_namespaced_custom_object(
            objects.GROUP,
            objects.VERSION,
            self._namespace,
            objects.PLURAL,
            self._name,
            {"spec": {"replicas": replicas}},
            _content_type="application/merge-patch+json",
        )


def main() -> None:
    """Runs until a signal."""
    namespace = os.environ["LAPS_SD_OPERATOR_NAMESPACE"]
    kopf.configure(verbose=False)
    kopf.run(namespaces=[namespace], liveness_endpoint="http://0.0.0.0:8080/healthz", standalone=False)


if __name__ == "__main__":
    main()
