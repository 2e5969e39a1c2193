"""Calls of the leader's Admin service, over the link's channel."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from laps_sd.errors import LapsSdError, NotFound, Unavailable
from laps_sd.v1 import admin_pb2_grpc

__all__ = ["call_leader"]

Answer = TypeVar("Answer")


async def call_leader(
    channel: grpc.aio.Channel, call: Callable[[admin_pb2_grpc.AdminAsyncStub], Awaitable[Answer]]
) -> Answer | None:
    """Return the answer, or None if another leader must be tried. Raises the leader's refusal."""
    try:
        return await call(admin_pb2_grpc.AdminStub(channel))
    except grpc.aio.UsageError:  # the channel was closed in the meantime
        return None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return None  # the channel was closed under the call, which gRPC reports as its cancellation
    except grpc.aio.AioRpcError as error:
        details = error.details() or error.code().name
        match error.code():
            case grpc.StatusCode.NOT_FOUND:
                raise NotFound(details) from error
            case grpc.StatusCode.UNAVAILABLE if _is_answer(error):
                raise Unavailable(details, retry_after_s=1.0) from error
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.FAILED_PRECONDITION:
                return None
        raise LapsSdError(f"the scheduler could not answer: {details}") from error


def _is_answer(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the error comes from a scheduler (with details of google.rpc), not from the connection
    to it."""
    return any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())
