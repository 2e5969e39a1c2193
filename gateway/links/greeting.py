"""The greeting of a scheduler: a hello in both directions, before anything else."""

from __future__ import annotations

import asyncio

import grpc.aio

import laps_sd
from laps_sd.service.leader_link import PROTOCOL_VERSIONS, LinkBroken
from laps_sd.service.leader_stream import next_reply
from laps_sd.v1 import gateway_link_pb2 as link_pb2

Call = grpc.aio.StreamStreamCall


async def exchange_hellos(
    call: Call[link_pb2.GatewayMessage, link_pb2.GatewayLinkReply], gateway_id: str, *, timeout_s: float
) -> link_pb2.GatewayLinkReply:
    """Send a hello and return the leader's. Raises LinkBroken, TimeoutError and the errors of gRPC."""
    hello = link_pb2.GatewayHello(
        gateway_id=gateway_id,
        protocol_versions=PROTOCOL_VERSIONS,
        software_version=laps_sd.__version__,
    )
    reply: link_pb2.GatewayLinkReply
    async with asyncio.timeout(timeout_s):
        await call.write(link_pb2.GatewayMessage(hello=hello))
        reply, kind = await next_reply(call)
    if kind != "hello":
        raise LinkBroken(f"it began with {kind} instead of a hello")
    return reply


def check_hello(reply: link_pb2.GatewayLinkReply, shard: str) -> link_pb2.SchedulerHello:
    """Return the hello of a leader of this shard. Raises LinkBroken for one that this gateway cannot use."""
    hello = reply.hello
    if hello.shard != shard:
        raise LinkBroken(f"it serves shard {hello.shard!r}, not {shard!r}")
    if hello.protocol_version not in PROTOCOL_VERSIONS:
        raise LinkBroken(
            f"it chose protocol version {hello.protocol_version}, which this gateway does not support"
        )
    if not reply.leader_epoch:
        raise LinkBroken("its hello has no leader epoch")
    return hello
