"""Checks of whether a component is ready."""

from __future__ import annotations

import socket

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from laps_sd.service.wire import Tls, channel_options
from laps_sd.stack.ports import HOST

__all__ = ["answers_ping", "is_serving"]

CHECK_TIMEOUT_S = 1.0
"""Seconds to connect for a health check, and again to get the answer."""


def is_serving(address: str, service: str = "readiness", *, tls: Tls | None = None) -> bool:
    """Return whether a server answers health checks with SERVING.

    Each check uses a new channel: no back-off from earlier failures.
    """
    host, _, port = address.rpartition(":")
    try:
        # Cheaper than a channel while no server listens yet.
        socket.create_connection((host, int(port)), CHECK_TIMEOUT_S).close()
    except OSError:
        return False
    options = channel_options(address)
    with (
        grpc.insecure_channel(address, options=options)
        if tls is None
        else grpc.secure_channel(address, tls.channel_credentials(), options=options)
    ) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=CHECK_TIMEOUT_S
            )
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def answers_ping(port: int) -> bool:
    """Return whether a Redis or Valkey on this machine answers PING and has read its file."""
    try:
        with socket.create_connection((HOST, port), 1.0) as connection:
            connection.settimeout(1.0)
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")  # -LOADING while it reads its file
    except OSError:
        return False
