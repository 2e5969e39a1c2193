"""Explanations of requests: a call of the leader's Admin service, over the link's channel."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from laps_sd.errors import LapsSdError, NotFound, Unavailable
from laps_sd.v1 import admin_pb2, admin_pb2_grpc, inference_pb2


async def query_leader(
    channel: grpc.aio.Channel, request: admin_pb2.AdminExplainRequest
) -> inference_pb2.ExplainResponse | None:
    """Return the answer, or None if another leader must be tried. Raises the leader's refusal."""
    try:
        response: inference_pb2.ExplainResponse = await admin_pb2_grpc.AdminStub(channel).ExplainRequest(
            request
        )
        return response
    except grpc.aio.UsageError:  # the channel was closed in the meantime
        return None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return None  # the channel was closed under the call, which gRPC reports as its cancellation
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.NOT_FOUND:
            raise NotFound(f"there is no request {request.request_id!r}") from error
        if error.code() is grpc.StatusCode.UNAVAILABLE and _is_answer(error):
            raise Unavailable(
                error.details() or "the record cannot be read now", retry_after_s=1.0
            ) from error
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION):
            return None
        raise LapsSdError(f"the scheduler could not explain it: {error.details()}") from error


def _is_answer(error: grpc.aio.AioRpcError) -> bool:
    """Return whether the error comes from a scheduler (with details of google.rpc), not from the connection
    to it."""
    return any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())
