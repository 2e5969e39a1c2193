"""Handling of errors from the API server."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from kubernetes_asyncio.client.exceptions import ApiException

GONE, CONFLICT, UNPROCESSABLE = 404, 409, 422


async def if_there(asked: Awaitable[Any]) -> Any:
    """Return the result of the call; None if the object does not exist (404)."""
    try:
        return await asked
    except ApiException as error:
        if error.status == GONE:
            return None
        raise
