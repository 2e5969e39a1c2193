"""Exchanges with the server of a shard's record: script calls in one pipeline and reads. Each is bounded in time,
and an error is one of the store's, never one of the client library's.

Nothing is sent again after an error, except where the server has answered that it has not run it: a script is not
loaded, or the slot has moved.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import redis.asyncio as redis_client
from hiredis import pack_command
from redis import exceptions as redis_errors
from redis.asyncio.connection import BlockingConnectionPool

from laps_sd.service.log import get_logger
from scheduler_svc.store import scripts
from scheduler_svc.store.codec import Argument
from scheduler_svc.store.errors import Fault, Fenced, StoreError, StoreUnavailable
from scheduler_svc.store.keys import SHARD_TTL_S, Keys
from scheduler_svc.store.redis_url import Address
from scheduler_svc.store.scripts import Call
from scheduler_svc.store.servers import Servers, moved_to, reply_of

log = get_logger(__name__)

AWAY_S = 10.0
"""Seconds for which another node of the cluster that did not answer is not tried again: no turn of a leader
waits for it twice in that time. Our choice.
"""
_NO_SERVER = "-"
"""A run id that no server has."""
_FAULTS = {
    "BUSY": Fault.SLOW,
    "MISCONF": Fault.OTHER,
    "NOREPLICAS": Fault.OTHER,
    "MASTERDOWN": Fault.OTHER,
    "CLUSTERDOWN": Fault.OTHER,
    "TRYAGAIN": Fault.OTHER,
    "ASK": Fault.OTHER,
}
"""Error codes of a server that cannot be read or written at present, for which the client library has no class; for the
last four it has one from release 8 on.
"""


class Transport:
    """Sends the calls and reads of one process to the server of its shard."""

    def __init__(
        self,
        servers: Servers,
        keys: Keys,
        *,
        timeout_s: float,
        wait_replicas: int,
        monotonic: Callable[[], float],
    ) -> None:
        """`timeout_s` bounds each exchange, connecting included. `wait_replicas`: what a leader writes counts
        only once this number of replicas has it. `monotonic` gives seconds.
        """
        self.client = redis_client.Redis(connection_pool=servers.pool)
        self.timeout_s = timeout_s
        self._servers = servers
        self._wait_replicas = wait_replicas
        # WAIT waits for the last write of its own connection. What was written on another one, and answers
        # here that it is there, needs a write after it. This one changes no value, on a full server too.
        self._touch = _packed("PEXPIRE", keys.incarnation(), SHARD_TTL_S * 1000)
        # The run id of the server that holds all that this leader wrote; None while this process does not lead.
        self._trusted: str | None = None
        self._monotonic = monotonic
        # Other nodes of the cluster that did not answer: when they are tried again, and the error.
        self._away: dict[Address, tuple[float, StoreError]] = {}

    async def close(self) -> None:
        """Close the connections. Leadership, if held, expires by itself; `resign` first to hand it over at
        once.
        """
        await self._servers.close()

    # the server that may get what a leader writes

    @property
    def is_trusted(self) -> bool:
        """Return whether the server of the newest connection may get what a leader writes."""
        return self._trusted is None or self._servers.run_id == self._trusted

    def trust(self) -> None:
        """Trust the server of the newest connection, and no other one: it holds all that this leader wrote."""
        self._trusted = self._servers.run_id

    def distrust(self) -> None:
        """Trust no server: everything that a leader writes is fenced until the next `reclaim_leadership`,
        since data to be written back did not arrive.
        """
        self._trusted = _NO_SERVER

    def trust_any(self) -> None:
        """Trust every server: this process does not lead, and the scripts refuse what it writes as a leader."""
        self._trusted = None

    # exchanges

    @contextlib.asynccontextmanager
    async def exchange(self) -> AsyncIterator[None]:
        """Bound the time of an exchange with the server and translate its errors; used around every exchange.

        The client's own timeouts are off. They can swallow the cancellation of the calling task
        (`asyncio.wait_for` of Python 3.11 does, when its work is done in the same moment).
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                yield
        except TimeoutError as error:
            raise StoreUnavailable(
                f"the record did not answer within {self.timeout_s} s", Fault.SLOW
            ) from error
        except (redis_errors.RedisError, OSError) as error:
            if moved := moved_to(error, self._servers.host):
                self._servers.prefer(moved)
                await self._servers.pool.disconnect(inuse_connections=False)
            raise _translated(error) from error

    async def ping(self) -> None:
        """Return if the record can be reached; otherwise raise StoreUnavailable."""
        async with self.exchange():
            await self.client.ping()

    async def server_time_s(self) -> float | None:
        """Return the server's clock, in Unix seconds; None where the user may not run INFO. Raises
        StoreUnavailable.
        """
        async with self.exchange():
            try:
                found = await self.client.info("server")
            except redis_errors.NoPermissionError:
                return None
        return float(found["server_time_usec"] / 1e6)

    async def get(self, key: str) -> bytes | None:
        """Return a string of the record; None without one."""
        async with self.exchange():
            value: bytes | None = await self.client.get(key)
        return value

    async def read(self, commands: Sequence[Sequence[Argument]]) -> list[Any]:
        """Return the answers to commands that change nothing, sent in one pipeline. Raises StoreUnavailable,
        StoreError.
        """
        # As in `_replies`, the client's own pipeline would cost more than all the rest.
        replies = await self._send([_packed(*command) for command in commands], self._servers.pool)
        async with self.exchange():
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
        return replies

    async def fields(self, keys: Sequence[str], *names: str) -> list[list[bytes | None]]:
        """Return these fields of each of the hashes."""
        async with self.exchange(), self.client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.hmget(key, *names)
            found: list[list[bytes | None]] = await pipeline.execute()
        return found

    async def try_write(self, key: str) -> None:
        """Raise StoreUnavailable where a write that needs memory would be refused now. Changes nothing.

        `key`: of a sorted set without a member `-`.
        """
        # With XX no member is added. The server refuses it as it would refuse any write.
        nothing = _packed("ZADD", key, "XX", 0, "-")
        try:
            _raise_errors(await self._send([nothing], self._servers.pool, leading=True))
        except Fenced:  # another server answers: the next renewal decides what that means
            return

    async def run(self, calls: Sequence[Call], *, leading: bool = False) -> list[Any]:
        """Run the calls in one pipeline, in order. Raises Fenced, StoreUnavailable, StoreError.

        `leading`: only on the server that is known to hold what this leader wrote; on another one, raise
        Fenced.
        """
        replies = await self._replies(calls, self._servers.pool, leading=leading)
        host = self._servers.host
        if moved := next((address for reply in replies if (address := moved_to(reply, host))), None):
            # Calls that ran before the slot moved answer that they have run. A shard's keys all move
            # together.
            self._servers.prefer(moved)
            async with self.exchange():
                await self._servers.pool.disconnect(inuse_connections=False)
            replies = await self._replies(calls, self._servers.pool, leading=leading)
        _raise_errors(replies)
        for reply in replies:
            if reply and reply[0] == b"fenced":
                raise Fenced(
                    "another leader epoch is in force, or none: this process does not lead the shard"
                )
        return replies

    async def run_anywhere(self, calls: Sequence[Call]) -> list[Any]:
        """Run calls that each have one key in a slot of its own: in a cluster, on the nodes that the cluster
        names. What another node than the shard's does not carry out has its error in place of an answer.
        """
        replies = await self._replies(calls, self._servers.pool)
        moved: dict[Address, list[int]] = {}
        for number, reply in enumerate(replies):
            address = moved_to(reply, self._servers.host)
            if address is not None:
                moved.setdefault(address, []).append(number)
        _raise_errors([reply for reply in replies if not moved_to(reply)])
        there = [
            self._elsewhere([calls[number] for number in numbers], address)
            for address, numbers in moved.items()
        ]
        for numbers, answers in zip(moved.values(), await asyncio.gather(*there), strict=True):
            for number, answer in zip(numbers, answers, strict=True):
                replies[number] = answer
        return replies

    async def _elsewhere(self, calls: Sequence[Call], address: Address) -> list[Any]:
        """Return the answers of another node of the cluster, errors included. For `AWAY_S` after it did not
        answer, nothing waits for it again.
        """
        until_s, error = self._away.get(address, (0.0, StoreError()))
        if self._monotonic() < until_s:
            return [error] * len(calls)
        try:
            replies = await self._replies(calls, self._servers.at(address))
        except StoreError as failure:
            self._away[address] = self._monotonic() + AWAY_S, failure
            log.warning(
                "a node of the record's cluster does not answer: idempotency keys that it has are refused",
                address=f"{address[0]}:{address[1]}",
                error=str(failure),
            )
            return [failure] * len(calls)
        return [_translated(reply) if isinstance(reply, Exception) else reply for reply in replies]

    async def _replies(
        self, calls: Sequence[Call], pool: BlockingConnectionPool, *, leading: bool = False
    ) -> list[Any]:
        """Return the answer of the server of `pool` to each call, errors included. The scripts are loaded if
        necessary.
        """
        # The client's own pipeline encodes each argument in Python, which costs more than all the rest of a
        # commit.
        packed = [
            _packed("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.arguments) for call in calls
        ]
        replies = await self._send(packed, pool, leading=leading)
        if any(isinstance(reply, redis_errors.NoScriptError) for reply in replies):
            # The server was restarted. Calls that ran already answer that they have run.
            load = [_packed("SCRIPT", "LOAD", script.source) for script in scripts.ALL]
            _raise_errors(await self._send(load, pool))
            replies = await self._send(packed, pool, leading=leading)
        return replies

    async def _send(
        self, packed: list[bytes], pool: BlockingConnectionPool, *, leading: bool = False
    ) -> list[Any]:
        if not packed:
            return []
        expected = len(packed)
        if leading and self._wait_replicas:
            wait_ms = max(1, int(self.timeout_s * 1000 / 2))
            packed = [*packed, self._touch, _packed("WAIT", self._wait_replicas, wait_ms)]
        async with self.exchange():
            connection = await pool.get_connection()
            try:
                if leading and not self.is_trusted:
                    raise Fenced("another server answers for the record: it may lack the newest commits")
                # Joined: of 128 buffers, writing takes six times as long.
                await connection.send_packed_command([b"".join(packed)])
                replies = [await reply_of(connection) for _ in packed]
                if any(isinstance(reply, redis_errors.ReadOnlyError) or moved_to(reply) for reply in replies):
                    # The server is a replica by now, or without the slot: a new connection may lead to the
                    # right server.
                    await connection.disconnect(nowait=True)
                if len(packed) > expected:
                    self._check_replicas(*replies[expected:])
                return replies[:expected]
            except (Fenced, StoreUnavailable):
                raise
            except BaseException:
                # Answers may still be on their way: no other caller may read them.
                await connection.disconnect(nowait=True)
                raise
            finally:
                await asyncio.shield(pool.release(connection))

    def _check_replicas(self, touched: Any, reached: Any) -> None:
        for reply in (touched, reached):
            if isinstance(reply, Exception) and not moved_to(reply):
                raise _translated(reply)
        if reached < self._wait_replicas:
            raise StoreUnavailable(
                f"only {reached} of {self._wait_replicas} required replicas have the write", Fault.OTHER
            )


def _packed(*parts: Argument) -> bytes:
    # Its type hint has a tuple of one argument where any number is meant.
    packed: bytes = pack_command(parts)  # type: ignore[arg-type]
    return packed


def _raise_errors(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, Exception):
            raise _translated(reply) from reply


def _translated(error: Exception) -> StoreError:
    """Return the store's error for one of the client library, none of whose errors leaves this module."""
    if moved := moved_to(error):
        return StoreUnavailable(f"the record's keys have moved to {moved[0]}:{moved[1]}", Fault.OTHER)
    match error:
        case redis_errors.OutOfMemoryError():
            fault: Fault | None = Fault.FULL
        case redis_errors.ReadOnlyError():
            fault = Fault.READ_ONLY
        case redis_errors.BusyLoadingError():
            fault = Fault.LOADING
        case redis_errors.ConnectionError() | redis_errors.TimeoutError() | OSError():
            return StoreUnavailable(f"the record cannot be reached: {error}", Fault.UNREACHABLE)
        case redis_errors.NoScriptError():
            # They were loaded a moment ago: the server was restarted since, or an operator flushes them.
            return StoreUnavailable("the record has lost its scripts again", Fault.OTHER)
        case redis_errors.AskError() | redis_errors.TryAgainError() | redis_errors.ClusterDownError():
            fault = Fault.OTHER  # MASTERDOWN is a kind of CLUSTERDOWN
        case _:
            fault = next((fault for code, fault in _FAULTS.items() if str(error).startswith(code)), None)
    if fault is not None:
        return StoreUnavailable(f"the record cannot be read or written now: {error}", fault)
    return StoreError(f"the record answered: {error}")
