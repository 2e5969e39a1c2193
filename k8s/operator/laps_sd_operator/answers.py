"""Handling of errors from the API server."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any

from kubernetes_asyncio.client.exceptions import ApiException

GONE, CONFLICT, EXPIRED, UNPROCESSABLE = 404, 409, 410, 422


async def if_there(asked: Awaitable[Any]) -> Any:
    """Return the result of the call; None if the object does not exist (404)."""
    try:
        return await asked
    except ApiException as error:
        if error.status == GONE:
            return None
        raise


def body_of(error: ApiException) -> str:
    """Return the text of the answer."""
    body: bytes | str = error.body or ""
    return body.decode(errors="replace") if isinstance(body, bytes) else body


def refusal_of(error: ApiException) -> str:
    """Return Kubernetes' message of the refusal; empty if the next turn sees the cause by itself, a
    concurrent change.
    """
    if error.status in (GONE, CONFLICT):
        return ""
    try:
        found = json.loads(body_of(error))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return f"Kubernetes answers {error.status}: {error.reason}"
    if error.status == UNPROCESSABLE and not (found.get("details") or {}).get("causes"):
        return ""  # the test of a JSON patch failed: the replica count has changed
    return str(found.get("message") or error.reason)
