"""Reads of the record, by any process: requests as their own keys hold them, the index of the unfinished ones, the
log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from redis import exceptions as redis_errors

from scheduler_svc.store.codec import stored_request
from scheduler_svc.store.keys import Keys
from scheduler_svc.store.log import Log, read_log
from scheduler_svc.store.records import StoredRequest
from scheduler_svc.store.scripts import MAX_ENTRIES
from scheduler_svc.store.transport import Transport

K = TypeVar("K")
T = TypeVar("T")
_Found = tuple[str, dict[bytes, bytes]]
"""A request's id and its hash, empty where there is none."""

READ_CHUNK = 128
"""Requests read together: bounds the time for which one read blocks the server for others."""
READ_TOKENS = 1 << 20
"""Tokens of prompts and outputs read together, or one request with more: bounds the time for which the caller handles
them, in which the timeout of the next read runs.
"""
_INDEX_CHUNK = 4096
"""Request ids that are read together."""
_LOG_CHUNK = 64
"""Entries of the log that are read together."""


class Reached(NamedTuple):
    """State of an unfinished request on the record."""

    lease_epoch: int
    committed: int
    """Committed tokens in its own keys."""
    logged: int
    """Committed tokens with those that only the log has."""
    deadline_unix_ms: int | None


class Reader:
    """Reader of one shard's record."""

    def __init__(self, transport: Transport, keys: Keys) -> None:
        self._transport = transport
        self._keys = keys

    async def requests(
        self, request_ids: Sequence[str], *, payload: bool = True
    ) -> list[StoredRequest | None]:
        """Return requests as their own keys hold them; None for one that is not there, or that lacks tokens.

        `payload`: False leaves out prompt and its log probabilities, submission, features, names of blocks and story.
        """
        found: list[StoredRequest | None] = []
        for some in _groups(await self._hashes(request_ids), payload=payload):
            found += await self._completed(some, payload=payload)
        return found

    async def unfinished(self) -> AsyncGenerator[list[StoredRequest], None]:
        """Yield all unfinished requests as their own keys hold them, in the order of arrival, a chunk at a
        time. The server reads the next chunk while the caller handles one.
        """
        async with contextlib.aclosing(_ahead(self._unfinished_groups(), self._completed)) as chunks:
            async for chunk in chunks:
                yield [request for request in chunk if request is not None and request.end is None]

    async def _unfinished_groups(self) -> AsyncGenerator[list[_Found], None]:
        async with contextlib.aclosing(_ahead(self.index(), self._hashes)) as chunks:
            async for hashes in chunks:
                for some in _groups(hashes, payload=True):
                    yield some

    async def _hashes(self, request_ids: Sequence[str]) -> list[_Found]:
        """Return requests with their hashes."""
        replies = await self._transport.read(
            [("HGETALL", self._keys.request(request_id)) for request_id in request_ids]
        )
        return list(zip(request_ids, map(_hash, replies), strict=True))

    async def _completed(
        self, found: Sequence[_Found], *, payload: bool = True
    ) -> list[StoredRequest | None]:
        """Return requests whose hashes were read, with the rest of them."""
        # Not in a transaction, which a full server refuses. The hash was read first: tokens are only ever
        # appended, so the first tokens, by the count in the hash, are those of its moment, whatever is
        # committed in between.
        commands = [("HGETALL", self._keys.payload(request_id)) for request_id, _ in found] if payload else []
        # Most of many requests wait and have no tokens; each reply costs time.
        begun = [request_id for request_id, fields in found if fields.get(b"committed", b"0") != b"0"]
        commands += [("GET", self._keys.tokens(request_id)) for request_id in begun]
        replies = await self._transport.read(commands)
        payloads = [_hash(reply) for reply in replies[: len(found)]] if payload else [{}] * len(found)
        tokens = dict(zip(begun, replies[len(commands) - len(begun) :], strict=True))
        return [
            stored_request(request_id, fields, tokens.get(request_id), its_payload)
            for (request_id, fields), its_payload in zip(found, payloads, strict=True)
        ]

    async def index(self) -> AsyncGenerator[list[str], None]:
        """Yield the ids of all unfinished requests in the order of arrival, READ_CHUNK at a time."""
        newest = 0.0
        while True:
            async with self._transport.exchange():
                index = await self._transport.client.zrangebyscore(
                    self._keys.unfinished(), f"({newest}", "+inf", start=0, num=_INDEX_CHUNK, withscores=True
                )
            if not index:
                return
            newest = index[-1][1]  # as it is: rounded down, a fraction would be read again and again
            request_ids = [request_id.decode() for request_id, _ in index]
            for start in range(0, len(request_ids), READ_CHUNK):
                yield request_ids[start : start + READ_CHUNK]

    async def log(self) -> Log:
        """Return the log."""
        return read_log(await self.log_entries(), await self._newest_entry())

    async def log_entries(self) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return the entries of the log, oldest first, as (id, fields)."""
        entries: list[tuple[bytes, dict[bytes, bytes]]] = []
        while True:
            after = f"({entries[-1][0].decode()}" if entries else "-"
            async with self._transport.exchange():
                some = await self._transport.client.xrange(self._keys.log(), after, "+", count=_LOG_CHUNK)
            entries += some
            if len(some) < _LOG_CHUNK:
                return entries

    async def _newest_entry(self) -> str:
        """Return the id of the newest entry that the log ever had; empty without a log."""
        async with self._transport.exchange():
            try:
                info = await self._transport.client.xinfo_stream(self._keys.log())
            except redis_errors.ResponseError as error:
                if str(error) != "no such key":
                    raise
                return ""
        return str(info["last-generated-id"].decode())

    async def unfinished_ids(self) -> list[str]:
        """Return the ids of all unfinished requests, in the order of arrival."""
        return [request_id async for ids in self.index() for request_id in ids]

    async def count_unfinished(self) -> int:
        """Return the number of unfinished requests."""
        async with self._transport.exchange():
            return int(await self._transport.client.zcard(self._keys.unfinished()))

    async def reached(self, request_ids: Sequence[str]) -> list[Reached | None]:
        """Return how far the record has each; None for a request that is not there."""
        log = await self.log()
        names = "lease_epoch", "committed", "deadline_unix_ms", "sequence"
        found: list[Reached | None] = []
        for start in range(0, len(request_ids), MAX_ENTRIES):
            keys = [self._keys.request(request_id) for request_id in request_ids[start : start + MAX_ENTRIES]]
            for epoch, count, deadline, sequence in await self._transport.fields(keys, *names):
                if epoch is None or count is None or sequence is None:
                    found.append(None)
                    continue
                logged = log.reached(int(sequence), int(count))
                found.append(Reached(int(epoch), int(count), logged, int(deadline) if deadline else None))
        return found

    async def last_sequence(self) -> int:
        """Return the sequence number of the newest request, ended or not; 0 when there was none."""
        return int(await self._transport.get(self._keys.sequence()) or 0)

    async def load_priors(self) -> bytes | None:
        """Return what `save_priors` kept last, by any leader of this incarnation."""
        return await self._transport.get(self._keys.priors())

    async def load_probes(self) -> bytes | None:
        """Return what `save_probes` kept last, by any leader of this incarnation."""
        return await self._transport.get(self._keys.probes())


def _hash(reply: list[bytes]) -> dict[bytes, bytes]:
    """Return the fields of an HGETALL's reply."""
    fields = iter(reply)
    return dict(zip(fields, fields, strict=True))


def _groups(found: Sequence[_Found], *, payload: bool) -> Iterator[list[_Found]]:
    """Yield requests in their order, together as long as they have READ_TOKENS at most; `payload`: with prompts."""
    some: list[_Found] = []
    tokens = 0
    for one in found:
        its_tokens = int(one[1].get(b"committed", b"0"))
        if payload:
            its_tokens += int(one[1].get(b"prompt_tokens", b"0"))
        if some and tokens + its_tokens > READ_TOKENS:
            yield some
            some, tokens = [], 0
        some.append(one)
        tokens += its_tokens
    if some:
        yield some


async def _ahead(
    wanted: AsyncGenerator[K, None], read: Callable[[K], Coroutine[Any, Any, T]]
) -> AsyncGenerator[T, None]:
    """Yield what is read of each that is wanted. The next one is read while the caller handles one."""
    reading: deque[asyncio.Task[T]] = deque()
    async with contextlib.aclosing(wanted):
        try:
            async for one in wanted:
                reading.append(asyncio.create_task(read(one)))
                if len(reading) > 1:
                    yield await reading.popleft()
            while reading:
                yield await reading.popleft()
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
