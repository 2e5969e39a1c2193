"""Reads of the record, by any process: requests as their own keys hold them, the index of the unfinished ones, the
log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from redis import exceptions as redis_errors

from scheduler_svc.store.codec import stored_request
from scheduler_svc.store.keys import Keys
from scheduler_svc.store.log import Log, read_log
from scheduler_svc.store.records import StoredRequest
from scheduler_svc.store.scripts import MAX_ENTRIES
from scheduler_svc.store.transport import Transport

READ_CHUNK = 128
"""Requests read together: bounds the time for which one read blocks the server for others."""
_INDEX_CHUNK = 4096
"""Request ids that are read together."""
_LOG_CHUNK = 64
"""Entries of the log that are read together."""


class Reader:
    """Reader of one shard's record."""

    def __init__(self, transport: Transport, keys: Keys) -> None:
        self._transport = transport
        self._keys = keys

    async def requests(
        self, request_ids: Sequence[str], *, payload: bool = True
    ) -> list[StoredRequest | None]:
        """Return requests as their own keys hold them; None for one that is not there, or that lacks tokens.

        `payload`: False leaves out prompt, submission, features, names of blocks and story.
        """
        # Not in a transaction, which a full server refuses. The hash is read first: tokens are only ever
        # appended, so the first tokens, by the count in the hash, are those of its moment, whatever is
        # committed in between.
        count = len(request_ids)
        commands = [("HGETALL", self._keys.request(request_id)) for request_id in request_ids]
        if payload:
            commands += [("HGETALL", self._keys.payload(request_id)) for request_id in request_ids]
        hashes = [_hash(reply) for reply in await self._transport.read(commands)]
        found = dict(zip(request_ids, hashes[:count], strict=True))
        payloads = hashes[count:] if payload else [{}] * count
        # Most of many requests wait and have no tokens; each reply costs time.
        begun = [request_id for request_id, fields in found.items() if fields.get(b"committed", b"0") != b"0"]
        replies = await self._transport.read([("GET", self._keys.tokens(request_id)) for request_id in begun])
        tokens = dict(zip(begun, replies, strict=True))
        return [
            stored_request(request_id, found[request_id], tokens.get(request_id), its_payload)
            for request_id, its_payload in zip(request_ids, payloads, strict=True)
        ]

    async def unfinished(self) -> AsyncGenerator[list[StoredRequest], None]:
        """Yield all unfinished requests as their own keys hold them, in the order of arrival, a chunk at a
        time. The server reads the next chunk while the caller handles one.
        """
        reading: deque[asyncio.Task[list[StoredRequest | None]]] = deque()
        try:
            async for request_ids in self.index():
                reading.append(asyncio.create_task(self.requests(request_ids)))
                if len(reading) > 1:
                    yield _unfinished(await reading.popleft())
            while reading:
                yield _unfinished(await reading.popleft())
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    async def index(self) -> AsyncIterator[list[str]]:
        """Yield the ids of all unfinished requests in the order of arrival, READ_CHUNK at a time."""
        newest = 0.0
        while True:
            async with self._transport.reached():
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
            async with self._transport.reached():
                some = await self._transport.client.xrange(self._keys.log(), after, "+", count=_LOG_CHUNK)
            entries += some
            if len(some) < _LOG_CHUNK:
                return entries

    async def _newest_entry(self) -> str:
        """Return the id of the newest entry that the log ever had; empty without a log."""
        async with self._transport.reached():
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
        async with self._transport.reached():
            return int(await self._transport.client.zcard(self._keys.unfinished()))

    async def reached(self, request_ids: Sequence[str]) -> list[tuple[int, int] | None]:
        """Return the lease epoch and the number of committed tokens that its own keys hold of each; None for a
        request that is not there.
        """
        found: list[tuple[int, int] | None] = []
        for start in range(0, len(request_ids), MAX_ENTRIES):
            keys = [self._keys.request(request_id) for request_id in request_ids[start : start + MAX_ENTRIES]]
            for epoch, count in await self._transport.fields(keys, "lease_epoch", "committed"):
                found.append(None if epoch is None or count is None else (int(epoch), int(count)))
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


def _unfinished(requests: list[StoredRequest | None]) -> list[StoredRequest]:
    return [request for request in requests if request is not None and request.end is None]
