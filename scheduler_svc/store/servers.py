"""Connections to the server that holds a shard's keys, at its present address.

Supported are one server, several servers of which one is the primary, a primary that sentinels name, and the
node of a Redis Cluster that has the shard's slot. A new connection finds the server. A caller that receives
the error that it has moved (`MOVED`, `READONLY`) closes the connection and takes a new one. Nothing here
retries a command.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import redis.asyncio as redis_client
from redis import exceptions as redis_errors
from redis.asyncio.connection import BlockingConnectionPool, Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from scheduler_svc.store.redis_url import Address, RedisUrl

MAX_ATTEMPTS = 8
"""Addresses that one new connection tries."""
MAX_PASSWORD_BYTES = 4096

_RUN_ID = re.compile(rb"^run_id:(\w+)", re.MULTILINE)
_MOVED = re.compile(r"\bMOVED \d+ (\S*):(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisTls:
    """PEM files. Without `ca` the system's roots verify the server; cert and key are for mutual TLS."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelUser:
    """Credentials of the scheduler for the sentinels, which have other users than the servers they watch."""

    username: str = ""
    """Empty: their default user."""
    password_file: Path


class PasswordFile(CredentialProvider):  # type: ignore[misc]  # redis-py has no types here
    """Credentials that are read from the file for each connection, so that a password can be changed under a
    running scheduler.
    """

    def __init__(self, path: Path, username: str) -> None:
        self._path = path
        self._username = username

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the password, and the user name if there is one.

        Raises ConnectionError: a file that cannot be read is treated as a record that cannot be reached.
        """
        try:
            with self._path.open("rb") as file:
                password = file.read(MAX_PASSWORD_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise redis_errors.ConnectionError(
                f"the password file {self._path} cannot be read: {reason}"
            ) from None
        return (self._username, password) if self._username else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Return the same: redis-py's own method also logs a warning for each connection."""
        return self.get_credentials()


def moved_to(error: object, host: str = "") -> Address | None:
    """Return the address at which a Redis Cluster has the keys of a command, from its error; an address
    without a host means `host`.
    """
    if isinstance(error, redis_errors.MovedError):  # read by redis-py itself, from release 8 on
        return error.host or host, int(error.port)
    found = _MOVED.search(str(error)) if isinstance(error, redis_errors.ResponseError) else None
    return (found[1] or host, int(found[2])) if found else None


class Servers:
    """Pool of connections of one store, and the search for its server."""

    def __init__(
        self,
        url: RedisUrl,
        *,
        probe_key: str,
        timeout_s: float,
        max_connections: int,
        tls: RedisTls | None = None,
        password_file: Path | None = None,
        sentinel_user: SentinelUser | None = None,
    ) -> None:
        """Make the pool; nothing connects yet. Raises ValueError or TypeError for an option of the URL that the
        client library does not have.

        `sentinel_user`: None where the sentinels need no password. `probe_key`: one of the shard's keys; a
        node of a cluster without that key answers with the key's address. `timeout_s`: to connect.
        """
        self.run_id = ""
        """Run id of the server of the newest connection; empty where the user may not read it."""
        self.host = ""
        """Host of the server of the newest connection."""
        self._url = url
        self._probe_key = probe_key
        self._sentinel_options: dict[str, Any] = {"socket_connect_timeout": timeout_s / 2, "protocol": 2}
        if sentinel_user is not None:
            self._sentinel_options["credential_provider"] = PasswordFile(
                sentinel_user.password_file, sentinel_user.username
            )
        options: dict[str, Any] = {
            "max_connections": max_connections,
            "timeout": timeout_s,
            "socket_timeout": None,
            # An address that never answers must leave time for the next one.
            "socket_connect_timeout": timeout_s if len(url.addresses) < 2 else timeout_s / 2,
            # Callers retry: they know whether the answer still matters.
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if password_file is not None:
            options["credential_provider"] = PasswordFile(password_file, url.username)
        else:
            options |= {"username": url.username or None, "password": url.password or None}
        if url.tls and tls is not None:
            files = {"ssl_ca_certs": tls.ca, "ssl_certfile": tls.cert, "ssl_keyfile": tls.key}
            encrypted: dict[str, Any] = {name: str(path) for name, path in files.items() if path is not None}
            encrypted["ssl_password"] = ""  # without one OpenSSL would ask at the terminal, and wait
            options |= encrypted
            self._sentinel_options |= encrypted
        if url.tls:
            self._sentinel_options["ssl"] = True
        self._options = options
        self._order = deque(url.addresses)
        self._elsewhere: dict[Address, BlockingConnectionPool] = {}
        if url.addresses:
            self.pool = _Pool.from_url(
                url.url,
                # The class named here wins over the scheme's own.
                **options | {"redis_connect_func": self._greet},
            )
            self.pool.connection_class = _routed(self._find, tls=url.tls)
        else:
            self.pool = _Pool.from_url(url.url, **options)
            self.pool.connection_kwargs["redis_connect_func"] = self._greet
        self.pool.make_connection()  # connects to nothing, but checks the options of the URL

    def at(self, address: Address) -> BlockingConnectionPool:
        """Return the connections to another node of the cluster, for keys that are not the shard's."""
        pool = self._elsewhere.get(address)
        if pool is None:
            host, port = address
            pool = self._elsewhere[address] = BlockingConnectionPool.from_url(self._url.url, **self._options)
            pool.connection_kwargs |= {"host": host, "port": port}
        return pool

    async def close(self) -> None:
        """Close all connections."""
        for pool in (self.pool, *self._elsewhere.values()):
            await pool.aclose()

    async def _find(self, connect: Callable[[Address], Awaitable[None]]) -> None:
        """Connect to the right server. Raises the error of the last attempt."""
        waiting = deque([await self._named_by_sentinels()] if self._url.sentinel_name else self._order)
        tried: set[Address] = set()
        error: Exception = redis_errors.ConnectionError("no server was tried")
        while waiting and len(tried) < MAX_ATTEMPTS:
            address = waiting.popleft()
            if address in tried:
                continue
            tried.add(address)
            try:
                await connect(address)
            except redis_errors.RedisError as failure:
                error = failure
                elsewhere = moved_to(failure, address[0])
                if elsewhere is not None:
                    waiting.appendleft(elsewhere)
                else:
                    self._demote(address)
            except BaseException:  # out of time: the next connection begins with another address
                self._demote(address)
                raise
            else:
                self.prefer(address)
                self.host = address[0]
                return
        raise error

    def prefer(self, address: Address) -> None:
        """Try this address first from now on: by the newest information, the shard's keys are there."""
        if self._url.sentinel_name:
            return  # the sentinels know better
        if address in self._order:
            self._order.remove(address)
        self._order.appendleft(address)
        if len(self._order) > MAX_ATTEMPTS + len(self._url.addresses):
            # Remove the address with the oldest information; those of the URL are always worth another try.
            self._order.remove(
                next(each for each in reversed(self._order) if each not in self._url.addresses)
            )

    def _demote(self, address: Address) -> None:
        if address in self._order:
            self._order.remove(address)
            if address in self._url.addresses:
                self._order.append(address)

    async def _named_by_sentinels(self) -> Address:
        error: Exception = redis_errors.ConnectionError("no sentinel was queried")
        for host, port in list(self._order):
            client = redis_client.Redis(
                host=host, port=port, retry=Retry(NoBackoff(), 0), **self._sentinel_options
            )
            try:
                found = await client.execute_command(
                    "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._url.sentinel_name
                )
            except (redis_errors.RedisError, OSError) as failure:
                error = failure
                self._demote((host, port))
            except BaseException:
                self._demote((host, port))
                raise
            else:
                if found:
                    named, at_port = found
                    return (named.decode() if isinstance(named, bytes) else named), int(at_port)
                error = redis_errors.ConnectionError(f"the sentinels watch no {self._url.sentinel_name!r}")
            finally:
                await client.aclose()
        raise redis_errors.ConnectionError(f"no sentinel names the primary: {error}")

    async def _greet(self, connection: Any) -> None:
        """Check a new connection: is this the right server, and which incarnation of it (its run id)? A user
        that may not read the run id counts as always connected to the same one.
        """
        await connection.on_connect()
        questions = [("INFO", "server"), ("INFO", "replication"), ("EXISTS", self._probe_key)]
        await connection.send_packed_command(
            [packed for question in questions for packed in connection.pack_command(*question)],
            check_health=False,
        )
        server, replication, probed = [await reply_of(connection) for _ in questions]
        if moved_to(probed):
            raise probed
        has_others = len(self._url.addresses) > 1 or self._url.sentinel_name
        if has_others and isinstance(replication, bytes) and b"role:slave" in replication:
            raise redis_errors.ReadOnlyError(f"{connection.host}:{connection.port} is a replica")
        found = _RUN_ID.search(server) if isinstance(server, bytes) else None
        self.run_id = found[1].decode() if found else ""
        self.pool.has_met(connection, self.run_id or str(connection.repr_pieces()))


class _Pool(BlockingConnectionPool):  # type: ignore[misc]  # redis-py has no types here
    """Connections of which each leads to the server that the newest one has found. A server that another one has
    replaced may still answer on the others.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._newest = ""
        self._server_of: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def has_met(self, connection: Any, server: str) -> None:
        """Note the server of a new connection."""
        self._newest = self._server_of[connection] = server

    async def ensure_connection(self, connection: Any) -> None:
        """Connect it if it is not, and again if it leads to another server than the newest one."""
        await super().ensure_connection(connection)
        if self._server_of.get(connection) != self._newest:
            await connection.disconnect()
            await super().ensure_connection(connection)


def _routed(
    find: Callable[[Callable[[Address], Awaitable[None]]], Awaitable[None]], *, tls: bool
) -> type[Any]:
    """Return a connection class that calls `find` for the address to connect to."""
    base: type[Any] = SSLConnection if tls else Connection

    class Routed(base):  # type: ignore[misc]  # chosen at run time
        async def connect(self) -> None:
            if self.is_connected:
                return
            await find(self._connect_to)

        async def _connect_to(self, address: Address) -> None:
            self.host, self.port = address
            await super().connect()

    return Routed


async def reply_of(connection: Any) -> Any:
    """Return the next reply; an error is a reply too."""
    try:
        return await connection.read_response()
    except redis_errors.ResponseError as error:
        return error
