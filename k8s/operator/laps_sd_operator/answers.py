"""What an API server answers when it cannot do what it was asked."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from kubernetes_asyncio.client.exceptions import ApiException

GONE, CONFLICT, UNPROCESSABLE = 404, 409, 422


async def if_there(asked: Awaitable[Any]) -> Any:
    """What was asked for; None when there is no such thing."""
    try:
        return await asked
    except ApiException as error:
        if error.status == GONE:
            return None
        raise
