"""Records of more than one server, on loopback: a cluster, a primary and its replica, a sentinel over
them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import redis.asyncio as redis_client
from redis.crc import key_slot

from scheduler_svc.store.embedded import EmbeddedServer, packaged_binary
from scheduler_svc.store.keys import Keys
from tests.helpers import free_port, wait_until_async

SLOTS = 16384


def client_of(server: EmbeddedServer) -> redis_client.Redis:
    return redis_client.Redis.from_url(server.url, protocol=2)


async def ask(server: EmbeddedServer, *command: Any) -> Any:
    async with client_of(server) as client:
        return await client.execute_command(*command)


@contextlib.contextmanager
def three_masters(
    folder: Path, host: str = "127.0.0.1", settings: tuple[str, ...] = ()
) -> Iterator[list[EmbeddedServer]]:
    """Return a cluster with a third of the slots on each server; `host`: where they listen."""
    servers: list[EmbeddedServer] = []
    try:
        for number in range(3):
            own = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
            own += ("--cluster-port", str(free_port()), "--cluster-announce-ip", host)
            servers.append(EmbeddedServer(folder / str(number), settings=(*own, *settings)).start())
        asyncio.run(_join(servers, host))
        yield servers
    finally:
        for server in servers:
            server.stop()


async def _join(servers: list[EmbeddedServer], host: str) -> None:
    for number, server in enumerate(servers):
        first, last = SLOTS * number // 3, SLOTS * (number + 1) // 3 - 1
        await ask(server, "CLUSTER", "ADDSLOTSRANGE", first, last)
        bus = int((await ask(server, "CONFIG", "GET", "cluster-port"))[1])
        await ask(servers[0], "CLUSTER", "MEET", host, server.port, bus)

    async def joined() -> bool:
        states = [await ask(server, "CLUSTER", "INFO") for server in servers]
        return all(b"cluster_state:ok" in s and b"cluster_known_nodes:3" in s for s in map(_octets, states))

    await wait_until_async(joined, description="the cluster is complete")


def _octets(answer: Any) -> bytes:
    if isinstance(answer, dict):  # as redis-py parses CLUSTER INFO
        return b"\n".join(f"{key}:{value}".encode() for key, value in answer.items())
    return answer if isinstance(answer, bytes) else str(answer).encode()


def shard_at(node: int, prefix: str = "shard") -> str:
    """Return a shard whose slot is on that node of the cluster."""
    return next(
        shard
        for shard in (f"{prefix}-{n}" for n in range(1000))
        if key_slot(f"laps-sd:{{{shard}}}:leader".encode()) * 3 // SLOTS == node
    )


def key_claimed_at(node: int, prefix: str, tenant: str = "acme") -> str:
    """Return an idempotency key whose claim is on that node of the cluster."""
    keys = Keys("any")
    return next(
        key
        for key in (f"{prefix}-{n}" for n in range(1000))
        if key_slot((keys.claim(keys.idempotency(tenant, key)) or "").encode()) * 3 // SLOTS == node
    )


async def take_no_node_for_dead(servers: list[EmbeddedServer]) -> None:
    """Let the nodes of a cluster name one that does not answer for as long as a test lasts."""
    for server in servers:
        await ask(server, "CONFIG", "SET", "cluster-node-timeout", 600_000)


@contextlib.contextmanager
def stopped(server: EmbeddedServer) -> Iterator[None]:
    """Have the server not answer."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@contextlib.contextmanager
def primary_and_replica(folder: Path) -> Iterator[tuple[EmbeddedServer, EmbeddedServer]]:
    """Return a primary and a replica, which may still be catching up."""
    primary = EmbeddedServer(folder / "a", settings=("--repl-diskless-sync-delay", "0")).start()
    replica = EmbeddedServer(folder / "b", settings=("--replicaof", "127.0.0.1", str(primary.port))).start()
    yield primary, replica
    for server in (primary, replica):
        server.stop()


async def in_step(replica: EmbeddedServer) -> None:
    async def linked() -> bool:
        async with client_of(replica) as client:
            return bool((await client.info("replication")).get("master_link_status") == "up")

    await wait_until_async(linked, description="the replica follows")


async def promote(replica: EmbeddedServer) -> None:
    await ask(replica, "REPLICAOF", "NO", "ONE")


class Sentinel:
    """Takes the primary, known as `main`, for dead after a second, and promotes its replica."""

    def __init__(self, folder: Path, primary_port: int, settings: str = "") -> None:
        """`settings`: more lines of its file."""
        self.port = free_port()
        self._config = folder / "sentinel.conf"
        self._config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {folder}\n"
            f"sentinel monitor main 127.0.0.1 {primary_port} 1\n"
            f"sentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 5000\n{settings}"
        )

    def __enter__(self) -> Self:
        command = [str(packaged_binary()), str(self._config), "--sentinel"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        return self

    def __exit__(self, *reason: object) -> None:
        self._process.kill()
        self._process.wait()

    async def answers(self) -> bool:
        """Return whether the server replies to any client, even if only that a password is needed."""
        async with redis_client.Redis(port=self.port) as client:
            try:
                await client.ping()
            except redis_client.AuthenticationError:
                return True
            except redis_client.ConnectionError:
                return False
        return True

    async def knows_a_replica(self) -> bool:
        async with redis_client.Redis(port=self.port) as client:
            try:
                return bool(await client.execute_command("SENTINEL", "REPLICAS", "main"))
            except redis_client.ConnectionError:
                return False
