"""A namespace of a real API server, and a kubelet that runs no container: it reports that pods run, and lets
workers act for them.

The API server is the one of KUBECONFIG; one that does not answer, and any cluster with nodes, is left alone.
It needs Kubernetes' controllers and must have no node of its own, so that no other kubelet runs the pods.
Everything that is made is in a namespace that is deleted at the end, but for a node of that name, which is
deleted too, and the resource definition of the pools, which is replaced by that of this checkout.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import ApiException

from tests.helpers import wait_until_async
from tests.k8s.helm import CHART
from tests.services.scheduler.peers import WorkerPeer, worker

ANSWER_S = 20.0
MERGE = "application/merge-patch+json"
POOLS = ("laps-sd.dev", "v1alpha1")
PLURAL = "speculativepools"
PREFIX = "laps-sd-test-"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


class Cluster:
    """One namespace, with the means of a test to look at it and change it. All objects are dictionaries."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self.core = client.CoreV1Api(api)
        self.apps = client.AppsV1Api(api)
        self.custom = client.CustomObjectsApi(api)

    def _plain(self, found: Any) -> Any:
        return self.api.sanitize_for_serialization(found)

    async def request(
        self, method: str, path: str, body: Any = None, query: dict[str, str] | None = None, **headers: str
    ) -> Any:
        """A call that no typed client has, such as a server-side apply. ApiException as from all others."""
        return await self.api.call_api(
            path,
            method,
            body=body,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": "application/json", **headers},
            auth_settings=["BearerToken"],
            response_types_map={200: "object", 201: "object"},
            _return_http_data_only=True,
        )

    # The server.

    async def serves(self, group: str) -> bool:
        """Return whether the server has an API group."""
        return group in [one["name"] for one in (await self.request("GET", "/apis"))["groups"]]

    # Pools.

    async def create_pool(self, pool: dict[str, Any], **query: Any) -> dict[str, Any]:
        created: dict[str, Any] = await self.custom.create_namespaced_custom_object(
            *POOLS, self.namespace, PLURAL, pool, **query
        )
        return created

    async def pool(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = await self.custom.get_namespaced_custom_object(
            *POOLS, self.namespace, PLURAL, name
        )
        return found

    async def pools(self) -> list[str]:
        found = await self.custom.list_namespaced_custom_object(*POOLS, self.namespace, PLURAL)
        return [one["metadata"]["name"] for one in found["items"]]

    async def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.pool(name)).get("status", {})
        return found

    async def patch_pool(self, name: str, patch: dict[str, Any]) -> None:
        await self.custom.patch_namespaced_custom_object(
            *POOLS, self.namespace, PLURAL, name, patch, _content_type=MERGE
        )

    async def scale_pool(self, name: str, replicas: int) -> dict[str, Any]:
        """Scale a pool by the scale subresource, as `kubectl scale`, an HPA and KEDA do."""
        found: dict[str, Any] = await self.custom.patch_namespaced_custom_object_scale(
            *POOLS, self.namespace, PLURAL, name, {"spec": {"replicas": replicas}}, _content_type=MERGE
        )
        return found

    async def delete_pool(self, name: str, propagation: str = "Background") -> None:
        await self.custom.delete_namespaced_custom_object(
            *POOLS, self.namespace, PLURAL, name, body={"propagationPolicy": propagation}
        )

    # What is made of them.

    async def deployment(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._plain(
                await self.apps.read_namespaced_deployment(name, self.namespace)
            )
        except ApiException as error:
            if error.status == 404:
                return None
            raise
        return found

    async def replicas(self, name: str) -> int | None:
        found = await self.deployment(name)
        return None if found is None else int(found["spec"]["replicas"])

    async def scale_deployment(self, name: str, replicas: int) -> None:
        await self.apps.patch_namespaced_deployment_scale(
            name, self.namespace, {"spec": {"replicas": replicas}}
        )

    async def lease(self) -> dict[str, Any]:
        """Return the content of the operators' Lease; empty while there is none."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases/laps-sd-operator"
        try:
            found: dict[str, Any] = (await self.request("GET", path))["spec"]
        except ApiException as error:
            if error.status == 404:
                return {}
            raise
        return found

    async def pods(self) -> dict[str, dict[str, Any]]:
        found = self._plain((await self.core.list_namespaced_pod(self.namespace)).items)
        return {pod["metadata"]["name"]: pod for pod in found}

    async def marked(self) -> list[str]:
        """Return the pods with the annotation that makes Kubernetes take them first."""
        return sorted(
            name
            for name, pod in (await self.pods()).items()
            if pod["metadata"].get("annotations", {}).get("controller.kubernetes.io/pod-deletion-cost")
            and "deletionTimestamp" not in pod["metadata"]
        )


class Kubelet:
    """A kubelet that reports pods as running as soon as they exist, and ends them when they are deleted. With
    the address of a scheduler each pod gets a worker of its name, which is controlled by the test.
    """

    def __init__(self, cluster: Cluster, scheduler: str | None = None) -> None:
        self._cluster = cluster
        self._scheduler = scheduler
        self._speakers: dict[str, contextlib.AsyncExitStack] = {}
        self.workers: dict[str, WorkerPeer] = {}
        self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        for name in list(self._speakers):
            await self._silence(name)

    async def _run(self) -> None:
        while True:
            for name, pod in (await self._cluster.pods()).items():
                try:
                    await self._tend(name, pod)
                except ApiException as error:
                    if error.status not in (404, 409):
                        raise
            await asyncio.sleep(0.1)

    async def _tend(self, name: str, pod: dict[str, Any]) -> None:
        core, namespace = self._cluster.core, self._cluster.namespace
        if "deletionTimestamp" in pod["metadata"]:
            await self._silence(name)
            await core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
        elif not pod["spec"].get("nodeName"):
            node = {"apiVersion": "v1", "kind": "Node", "name": namespace}
            await self._cluster.request(
                "POST",
                f"/api/v1/namespaces/{namespace}/pods/{name}/binding",
                {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": node},
            )
        elif pod["status"].get("phase") != "Running":
            ready = [{"type": "Ready", "status": "True"}]
            await core.patch_namespaced_pod_status(
                name, namespace, {"status": {"phase": "Running", "conditions": ready}}
            )
            await self._speak(name)

    async def _speak(self, name: str) -> None:
        if self._scheduler is not None:
            self._speakers[name] = contextlib.AsyncExitStack()
            peer = await self._speakers[name].enter_async_context(worker(self._scheduler, name))
            self.workers[name] = peer

    async def _silence(self, name: str) -> None:
        self.workers.pop(name, None)
        if name in self._speakers:
            await self._speakers.pop(name).aclose()


def kubeconfig_of_test() -> str:
    found = os.environ.get("KUBECONFIG")
    if not found:
        pytest.skip("no API server: KUBECONFIG is not set (docs/kubernetes.md, Tests on a cluster)")
    if not Path(found).is_file():
        pytest.skip(f"no API server: KUBECONFIG is {found}, which is not a file")
    return found


@contextlib.asynccontextmanager
async def namespace_of_test() -> AsyncIterator[Cluster]:
    """Create a fresh namespace that admits restricted pods only, with this checkout's definition of pools."""
    await config.load_kube_config(kubeconfig_of_test())
    async with client.ApiClient() as api:
        try:
            async with asyncio.timeout(ANSWER_S):
                nodes = [one.metadata.name for one in (await client.CoreV1Api(api).list_node()).items]
        except (OSError, TimeoutError, ApiException) as error:
            pytest.skip(f"the API server of KUBECONFIG does not tell its nodes: {error!r}")
        if not all(name.startswith(PREFIX) for name in nodes):
            pytest.skip("the cluster has nodes: these tests want to run its pods themselves")
        cluster = Cluster(api, f"{PREFIX}{secrets.token_hex(4)}")
        await define_pools(cluster)
        labelled = {"name": cluster.namespace, "labels": RESTRICTED}
        await cluster.core.create_namespace({"metadata": labelled})
        # Of the namespace's name. Kubernetes collects pods of nodes that it does not know; a scheduler is to
        # leave it alone.
        node = {"metadata": {"name": cluster.namespace}, "spec": {"unschedulable": True}}
        await cluster.core.create_node(node)
        await wait_until_async(
            lambda: _has_account(cluster), description="the namespace has its default account"
        )
        try:
            yield cluster
        finally:
            await cluster.core.delete_namespace(cluster.namespace)
            # It gets no new pods any more; those that it has wait for a kubelet to end them, and it for them.
            await cluster.core.delete_collection_namespaced_pod(cluster.namespace, grace_period_seconds=0)
            await cluster.core.delete_node(cluster.namespace)


async def _has_account(cluster: Cluster) -> bool:
    accounts = await cluster.core.list_namespaced_service_account(cluster.namespace)
    return bool(accounts.items)


async def define_pools(cluster: Cluster) -> None:
    """Apply the definition and wait until the API server serves it."""
    for definition in yaml.safe_load_all(
        (CHART / "crds" / "speculativepools.yaml").read_text(encoding="utf-8")
    ):
        name = definition["metadata"]["name"]
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
        await apply(cluster, path, definition)

        async def established(path: str = path) -> bool:
            found = await cluster.request("GET", path)
            conditions = found.get("status", {}).get("conditions") or []  # null at first
            return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)

        await wait_until_async(established, description=f"{name} is established")


async def apply(cluster: Cluster, path: str, found: dict[str, Any], **query: str) -> Any:
    """Apply an object by server-side apply."""
    return await cluster.request(
        "PATCH",
        path,
        found,
        {"fieldManager": "laps-sd-tests", "force": "true", **query},
        **{"Content-Type": "application/apply-patch+yaml"},
    )


async def token_of(cluster: Cluster, account: str) -> str:
    """Return a token of an account of the namespace, for an hour."""
    request = {"spec": {"audiences": [], "expirationSeconds": 3600}}
    answer = await cluster.core.create_namespaced_service_account_token(account, cluster.namespace, request)
    return str(answer.status.token)


def kubeconfig_with(token: str, path: Path) -> Path:
    """Write the cluster of the test's kubeconfig, with another user."""
    own = Path(kubeconfig_of_test())
    given = yaml.safe_load(own.read_text(encoding="utf-8"))
    contexts = {one["name"]: one["context"] for one in given["contexts"]}
    name = contexts[given["current-context"]]["cluster"]
    (cluster,) = (one for one in given["clusters"] if one["name"] == name)
    if "certificate-authority" in cluster["cluster"]:  # as seen from where the file lies
        authority = own.parent.resolve() / cluster["cluster"]["certificate-authority"]
        cluster["cluster"]["certificate-authority"] = str(authority)
    account = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [cluster],
        "users": [{"name": "account", "user": {"token": token}}],
        "contexts": [{"name": "account", "context": {"cluster": name, "user": "account"}}],
        "current-context": "account",
    }
    path.write_text(yaml.safe_dump(account), encoding="utf-8")
    return path
