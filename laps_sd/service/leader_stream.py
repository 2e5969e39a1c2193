"""The stream of a link to a scheduler: its messages, and why it ended. Gateway and worker read both in the
same way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from laps_sd.service.leader_link import LinkBroken, PeerSilent

__all__ = ["STREAM_ERRORS", "denial", "next_reply", "reason_of"]

STREAM_ERRORS = (LinkBroken, PeerSilent, grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError)
"""What ends a stream, or keeps it from beginning."""
REFUSAL_S = 1.0
"""Longest time, in seconds, that a refusal may take (our choice)."""


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


async def denial(call: Any, connect: Callable[[], Any]) -> str:
    """Return the message of a server that refuses this certificate; empty if it has not refused. `call` ended
    before a greeting, and `connect` makes another one.

    A server refuses a stream before it has read anything. A write that meets the refusal fails, and gRPC then
    has INTERNAL in place of the server's status, which comes again on a stream that nothing is written to.
    """
    if call is None or not call.done():
        return ""
    if await call.code() is grpc.StatusCode.INTERNAL:
        call = connect()
        with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(REFUSAL_S):
                await call.read()
        call.cancel()
    return str(await call.details()) if await call.code() is grpc.StatusCode.PERMISSION_DENIED else ""
