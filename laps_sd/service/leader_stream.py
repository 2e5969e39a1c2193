"""The stream of a link to a scheduler: its messages, and why it ended. Gateway and worker read both in the
same way."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from laps_sd.service.leader_link import LinkBroken, PeerSilent

__all__ = ["STREAM_ERRORS", "denial", "next_reply", "reason_of"]

STREAM_ERRORS = (LinkBroken, PeerSilent, grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError)
"""What ends a stream, or keeps it from beginning."""


async def next_reply(call: Any) -> tuple[Any, str | None]:
    """Return the next message of a scheduler, and its kind. Raises LinkBroken at the end of the stream, for
    bytes that are no message, and from a scheduler that does not lead."""
    reply = await call.read()
    if reply is grpc.aio.EOF:
        raise LinkBroken("the scheduler ended it")
    if reply is None:  # gRPC's value for bytes that it cannot decode
        raise LinkBroken("it sent an undecodable message")
    kind = reply.WhichOneof("message")
    if kind == "not_leader":
        raise LinkBroken("it does not lead", reply.not_leader.leader_address)
    return reply, kind


def reason_of(error: Exception) -> str:
    """Return why a stream ended, for the log; `error` is one of STREAM_ERRORS."""
    match error:
        case grpc.aio.AioRpcError():
            return f"{error.code().name}: {error.details()}"
        case asyncio.InvalidStateError():
            return "it ended while it was written to"
        case TimeoutError():
            return "it did not greet in time"
    return str(error)


async def denial(call: Any) -> str:
    """Return the message of a server that refuses this certificate; empty if it has not refused."""
    if call is None or not call.done() or await call.code() is not grpc.StatusCode.PERMISSION_DENIED:
        return ""
    return str(await call.details())
