"""Calls to the API server, with JSON objects as dictionaries. The classes of the Kubernetes client drop fields that
are newer than the client.

    api = Api(await connect())
    pool = await api.call("GET", "/apis/laps-sd.dev/v1alpha1/namespaces/models/speculativepools/a")
    async with api.stream(pods, watch="true") as lines: ...
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from kubernetes_asyncio import client, config
from kubernetes_asyncio.client.exceptions import ApiException

CALL_S = 20.0
"""Seconds for one call; the client has no limit of its own."""
JSON, MERGE, JSON_PATCH = "application/json", "application/merge-patch+json", "application/json-patch+json"
ANSWERS = {200: "object", 201: "object", 202: "object"}


async def connect() -> client.ApiClient:
    """Return a connection with the pod's account, or with KUBECONFIG."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        config.load_incluster_config()
    else:
        await config.load_kube_config()
    return client.ApiClient()


class Api:
    """The API server."""

    def __init__(self, connection: client.ApiClient) -> None:
        self._connection = connection

    async def call(
        self, method: str, path: str, body: Any = None, *, content: str = JSON, **query: str
    ) -> dict[str, Any]:
        """Return the object of the answer. Raises ApiException, aiohttp.ClientError, TimeoutError."""
        found: dict[str, Any] = await self._connection.call_api(
            path,
            method,
            body=body,
            query_params=list(query.items()),
            header_params={"Accept": JSON, "Content-Type": content},
            auth_settings=["BearerToken"],
            response_types_map=ANSWERS,
            _return_http_data_only=True,
            _request_timeout=CALL_S,
        )
        return found

    @contextlib.asynccontextmanager
    async def stream(self, path: str, *, limit_s: float, **query: str) -> AsyncIterator[aiohttp.StreamReader]:
        """Open an answer that consists of lines, and end it after `limit_s` seconds. Raises as `call`."""
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CALL_S)
        answer: aiohttp.ClientResponse = await self._connection.call_api(
            path,
            "GET",
            query_params=list(query.items()),
            header_params={"Accept": JSON},
            auth_settings=["BearerToken"],
            _preload_content=False,
            _request_timeout=timeout,
        )
        try:
            if answer.status != 200:
                error = ApiException(status=answer.status, reason=answer.reason)
                error.body = await answer.read()
                raise error
            yield answer.content
        finally:
            answer.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._connection.close()
