"""Reads and writes of the API server for one pool; objects are dictionaries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kubernetes_asyncio.client.exceptions import ApiException

from laps_sd_operator.answers import GONE, if_there
from laps_sd_operator.api import JSON_PATCH, MERGE, Api
from laps_sd_operator.objects import GROUP, PLURAL, POOL_LABEL, VERSION, Object

FIELD_MANAGER = "laps-sd-operator"
"""Name under which the operator writes fields."""
WRITES = {"fieldManager": FIELD_MANAGER}
STRICT = {**WRITES, "fieldValidation": "Strict"}
"""Query of writes of a Deployment. Without it the API server silently drops unknown fields of the template."""


def pools_path(namespace: str) -> str:
    """Return the path of the pools of a namespace."""
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"


def deployments_path(namespace: str) -> str:
    """Return the path of the Deployments of a namespace."""
    return f"/apis/apps/v1/namespaces/{namespace}/deployments"


def pods_path(namespace: str) -> str:
    """Return the path of the pods of a namespace."""
    return f"/api/v1/namespaces/{namespace}/pods"


@dataclass(frozen=True, slots=True)
class Found:
    """One pool and its objects. None: it does not exist."""

    pool: Object | None
    deployment: Object | None = None
    pods: tuple[Object, ...] = ()


class Kubernetes:
    """Calls for one pool. `watched` returns the newest known state of its objects."""

    def __init__(self, api: Api, namespace: str, name: str, watched: Callable[[], Found]) -> None:
        self._api = api
        self._namespace, self._name = namespace, name
        self._pool = f"{pools_path(namespace)}/{name}"
        self._deployments = deployments_path(namespace)
        self._pods = pods_path(namespace)
        self._watched = watched

    async def watched(self) -> Found:
        """Return the state that the watches show. It may be older than the last write."""
        return self._watched()

    async def read(self) -> Found:
        """Return the state that the API server has now."""
        deployment = if_there(self._api.call("GET", f"{self._deployments}/{self._name}"))
        pods = self._api.call("GET", self._pods, labelSelector=f"{POOL_LABEL}={self._name}")
        pool, deployment, pods = await asyncio.gather(
            if_there(self._api.call("GET", self._pool)), deployment, pods
        )
        return Found(pool, deployment, tuple(pods["items"]))

    async def create(self, deployment: dict[str, Any]) -> None:
        """Create the Deployment."""
        await self._api.call("POST", self._deployments, deployment, **STRICT)

    async def patch_deployment(
        self, operations: list[dict[str, Any]], *, dry_run: bool = False
    ) -> dict[str, Any]:
        """Send a JSON patch of the Deployment and return the result; a dry run changes nothing."""
        query = {**STRICT, "dryRun": "All"} if dry_run else STRICT
        path = f"{self._deployments}/{self._name}"
        return await self._api.call("PATCH", path, operations, content=JSON_PATCH, **query)

    async def patch_pod(self, name: str, patch: dict[str, Any]) -> None:
        """Send a merge patch of a pod's metadata."""
        await self._api.call("PATCH", f"{self._pods}/{name}", patch, content=MERGE, **WRITES)

    async def patch_pool(self, patch: dict[str, Any]) -> None:
        """Send a merge patch of the pool itself."""
        await self._api.call("PATCH", self._pool, patch, content=MERGE, **WRITES)

    async def patch_status(self, status: dict[str, Any]) -> None:
        """Send a merge patch of the pool's status; a pool that no longer exists needs none."""
        try:
            await self._api.call("PATCH", f"{self._pool}/status", {"status": status}, content=MERGE, **WRITES)
        except ApiException as error:
            if error.status != GONE:
                raise

    async def create_event(self, event: dict[str, Any]) -> None:
        """Create an Event."""
        await self._api.call("POST", f"/api/v1/namespaces/{self._namespace}/events", event, **WRITES)
