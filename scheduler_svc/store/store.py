"""The record of one shard: the state that the scheduler must not lose, in Redis or Valkey.

Each request has keys of its own. What rounds add to it goes into the shard's log first, one entry a turn
(`log.py`), and from there into its own keys, seconds later and before it ends (`batch.py`).

The scheduler decides, the scripts in `lua/` carry out. Each transition compares the state on which it was
decided with the record, so a decision that is out of date changes nothing, and one that is sent twice changes
nothing more.

An operator reads it with redis-cli: `HGETALL laps-sd:{shard}:request:ID` (state queued, leased or ended,
worker, lease_epoch; committed, rounds, attained_s, level … up to five seconds old), `ZRANGE
laps-sd:{shard}:unfinished 0 -1`, `HGETALL laps-sd:{shard}:tenants`, `GET laps-sd:{shard}:leader`. `keys.py`
has all keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import redis.asyncio as redis_client
from hiredis import pack_command
from redis import exceptions as redis_errors
from redis.asyncio.connection import BlockingConnectionPool

from scheduler_svc.store import scripts
from scheduler_svc.store.batch import Batch, Call
from scheduler_svc.store.clock import RecordClock
from scheduler_svc.store.codec import (
    Argument,
    new_fields,
    pack_ids,
    reserved_tokens,
    stored_request,
    submission_fields,
)
from scheduler_svc.store.errors import (
    Fault,
    Fenced,
    RecordBehind,
    SchemaMismatch,
    StoreError,
    StoreUnavailable,
)
from scheduler_svc.store.keys import CLAIM_SLACK_S, CLAIM_TTL_S, SCHEMA_VERSION, SHARD_TTL_S, Keys
from scheduler_svc.store.log import EMPTY, Log, read_log
from scheduler_svc.store.records import (
    Leader,
    LeaderEpoch,
    Limits,
    NewRequest,
    Shown,
    StoredRequest,
    SubmitResult,
    SubmitStatus,
    TransitionStatus,
)
from scheduler_svc.store.redis_url import Address, parse_redis_url
from scheduler_svc.store.scripts import MAX_ENTRIES, Script
from scheduler_svc.store.servers import RedisTls, SentinelUser, Servers, moved_to, reply_of
from scheduler_svc.store.tails import Tails

FINISHED_TTL_S = 15 * 60.0
"""Seconds for which a finished request can still be read, and its idempotency key attaches to it, unless its
deadline ended it.
"""

_READ_CHUNK = 128
"""Requests read together: bounds the time for which one read blocks the server for others."""
_LOG_CHUNK = 64
"""Entries of the log that are read together."""
_SHARD_TTL_MS = SHARD_TTL_S * 1000
_NOT_SHOWN = Shown()
_STATUS = {status.value: status for status in TransitionStatus}
_FAULTS = {
    "OOM": Fault.FULL,
    "READONLY": Fault.READ_ONLY,
    "LOADING": Fault.LOADING,
    "BUSY": Fault.SLOW,
    "MASTERDOWN": Fault.OTHER,
    "MISCONF": Fault.OTHER,
    "NOREPLICAS": Fault.OTHER,
    "CLUSTERDOWN": Fault.OTHER,
    "TRYAGAIN": Fault.OTHER,
    "MOVED": Fault.OTHER,
    "ASK": Fault.OTHER,
}
"""Error codes of a server that cannot be read or written at present."""


class Store:
    """The record of one shard, seen by one process. Methods raise StoreUnavailable when it cannot be
    reached.
    """

    def __init__(
        self,
        servers: Servers,
        shard: str,
        *,
        limits: Limits | None = None,
        finished_ttl_s: float = FINISHED_TTL_S,
        timeout_s: float = 2.0,
        wait_replicas: int = 0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the record's interface; `open` also makes the servers.

        `wait_replicas`: nothing counts as written before this number of replicas has it.

        `timeout_s` bounds each exchange with the server, connecting included. `clock` gives Unix seconds that
        never step: the time of this machine. `monotonic` gives seconds: how long a standby has waited for the
        last leader.
        """
        self.keys = Keys(shard)
        self._servers = servers
        self._client = redis_client.Redis(connection_pool=servers.pool)
        self._limits = limits or Limits()
        self.finished_ttl_ms = max(1, math.ceil(finished_ttl_s * 1000))
        self._timeout_s = timeout_s
        self._wait_replicas = wait_replicas
        self.clock = RecordClock(clock)
        """The record's time, once it was measured."""
        self._monotonic = monotonic
        self.queue_keys = [
            self.keys.leader(),
            self.keys.unfinished(),
            self.keys.tenants(),
            self.keys.reserved(),
        ]
        self._shard_keys = [
            self.keys.leader(),
            self.keys.leader_count(),
            self.keys.schema_version(),
            self.keys.incarnation(),
            self.keys.sequence(),
            self.keys.priors(),
            self.keys.server(),
            self.keys.log(),
        ]
        self.tails = Tails()
        """Unfinished requests as this leader knows them."""
        self.tails_are_read = False
        self.generation = 0
        """Number of times that `tails` was built again: what was encoded before does not fit any more."""
        self._leadership = ""
        # One at a time: a renewal that overtakes a reclaim would look like another leader's.
        self._leading = asyncio.Lock()
        self._lease_ms = 0
        self._epoch: LeaderEpoch | None = None
        self._highest_number = 0
        self._incarnation: str | None = None
        self._next_incarnation = secrets.token_hex(8)
        self.record_was_empty = False
        """True if there was nothing in the record when this process became its leader."""
        self._nonce = secrets.token_hex(8)
        # Whether the record could not be reached since this process last saw a leader.
        self._in_doubt = False
        # When this standby found a record that may be older than what its last leader holds, and the state of
        # that record. A wait holds for one state: after another loss the last leader gets its time again.
        self._older_since_s: float | None = None
        self._older_state = ""
        # The run id of the server that holds all that this leader wrote.
        self._trusted_server: str | None = ""
        # The key that expires with each request, by request id: its idempotency key, or its own. A leader has
        # submitted or loaded every request that it ends, so this saves a read of the record at the end;
        # without an entry here the record is read.
        self.expires_with: dict[str, str] = {}
        # Claims of requests that have ended; their expiry is set by the next `settle_claims`.
        self._ended_claims: set[str] = set()

    @classmethod
    def open(
        cls,
        url: str,
        shard: str,
        *,
        limits: Limits | None = None,
        finished_ttl_s: float = FINISHED_TTL_S,
        timeout_s: float = 2.0,
        max_connections: int = 16,
        tls: RedisTls | None = None,
        password_file: Path | None = None,
        sentinel_user: SentinelUser | None = None,
        wait_replicas: int = 0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Store:
        """Return the record of a shard, which connects when first used.

        `url`: see `redis_url`; `tls`, `password_file`, `sentinel_user`: see `servers`.

        Raises ValueError.
        """
        servers = Servers(
            parse_redis_url(url),
            probe_key=Keys(shard).leader(),
            timeout_s=timeout_s,
            max_connections=max_connections,
            tls=tls,
            password_file=password_file,
            sentinel_user=sentinel_user,
        )
        return cls(
            servers,
            shard,
            limits=limits,
            finished_ttl_s=finished_ttl_s,
            timeout_s=timeout_s,
            wait_replicas=wait_replicas,
            clock=clock,
            monotonic=monotonic,
        )

    async def ping(self) -> None:
        """Return if the record can be reached; otherwise raise StoreUnavailable."""
        async with self._reached():
            await self._client.ping()

    async def measure_clock(self) -> float:
        """Return how many seconds the server's clock is ahead of `clock`; 0 where the user may not run INFO.
        Raises StoreUnavailable.
        """
        began_s = self.clock.local_s()
        async with self._reached():
            try:
                found = await self._client.info("server")
            except redis_errors.NoPermissionError:
                return 0.0
        return self.clock.off_by_s(found["server_time_usec"] / 1e6, began_s)

    async def close(self) -> None:
        """Close the connections. Leadership, if held, expires by itself; `resign` first to hand it over at
        once.
        """
        await self._servers.close()

    # leadership

    @property
    def epoch(self) -> LeaderEpoch | None:
        """Return the leader epoch this process leads under, as far as it knows; None if it does not lead."""
        return self._epoch

    @property
    def incarnation(self) -> str | None:
        """Return the incarnation id of the record in which this process last led."""
        return self._incarnation

    async def acquire_leadership(self, *, owner: str, lease_s: float) -> LeaderEpoch | None:
        """Become the leader. Return None while another process leads.

        For `patience_s` the answer is None also where the record may be older than what its last leader holds
        in memory: a leader that is alive writes that back first. The record may be older when its server was
        restarted or replaced, when it lacks an epoch or the data that this process has seen, or when this
        process could not reach it. The answer is the present epoch if this process leads already.

        `owner` is the address where peers find this process. Raises SchemaMismatch, StoreUnavailable.
        """
        try:
            return await self._acquire(owner, lease_s)
        except StoreUnavailable:
            # As far as this process can see, the last leader cannot reach the record either: its patience
            # starts again.
            self._in_doubt, self._older_since_s = True, None
            raise

    @property
    def waits_for_last_leader(self) -> bool:
        """Return True if this standby found a record that may be older than what its last leader holds."""
        return self._older_since_s is not None

    def patience_s(self, lease_s: float) -> float:
        """Return the seconds for which a standby leaves a possibly older record to its last leader: two lease
        periods, and no less than three exchanges, in which a leader that is alive reaches the record again.
        Our choice.
        """
        return max(2 * lease_s, 3 * self._timeout_s)

    async def _acquire(self, owner: str, lease_s: float) -> LeaderEpoch | None:
        try:
            if self._leadership and await self.renew_leadership():
                return self._epoch
        except RecordBehind:
            # It leads without a working copy: there is nothing that it could write back.
            if await self.reclaim_leadership(newest_sequence=0):
                await self.reclaimed(written_back=False)
                return self._epoch
        lease_ms = math.ceil(lease_s * 1000)
        has_waited = (
            self._older_since_s is not None
            and self._monotonic() - self._older_since_s >= self.patience_s(lease_s)
        )
        reply = await self._call(
            scripts.ACQUIRE,
            [*self._shard_keys, *self.keys.before_the_log()],
            [
                # The same nonce until this process has led: an attempt whose answer was lost may have
                # succeeded.
                self._nonce,
                owner,
                lease_ms,
                SCHEMA_VERSION,
                self._next_incarnation,
                self._highest_number,
                self._incarnation or "",
                int(self._in_doubt),
                self._older_state if has_waited else "",
                _SHARD_TTL_MS,
            ],
        )
        if reply[0] == b"schema":
            raise _schema_mismatch(reply[1])
        if reply[0] == b"older":
            state = reply[1].decode()
            if self._older_since_s is None or self._older_state != state:
                self._older_since_s, self._older_state = self._monotonic(), state
            return None
        self._older_since_s = None
        self._in_doubt = False
        if reply[0] != b"ok":
            self._incarnation = reply[1].decode() or self._incarnation
            return None
        self._epoch = LeaderEpoch(reply[1].decode())
        self._highest_number = self._epoch.number
        self._leadership = f"{self._epoch} {owner}"
        self._lease_ms = lease_ms
        self._nonce = secrets.token_hex(8)
        self.record_was_empty = reply[2].decode() == self._next_incarnation
        self._lives_in(reply[2])
        self.expires_with.clear()
        self.tails.clear()
        self.tails_are_read = False
        return self._epoch

    async def renew_leadership(self) -> bool:
        """Renew the lease. Return False if this process no longer leads, and the next batch would be fenced.
        Raises RecordBehind.
        """
        async with self._leading:
            return await self._renew()

    async def _renew(self) -> bool:
        if self._epoch is None:
            return False
        renewed = await self._call(
            scripts.RENEW,
            self._shard_keys,
            [self._leadership, self._lease_ms, self._epoch.number, self._incarnation or "", _SHARD_TTL_MS],
        )
        if renewed[0] == 0:
            self._forget_leadership()
        elif renewed[0] == 2:
            raise RecordBehind("the record was emptied or set back, or its server was restarted or replaced")
        elif self._servers.run_id != self._trusted_server:
            raise RecordBehind("the server of the record was restarted, or another one answers in its place")
        return bool(renewed[0])

    async def reclaim_leadership(self, *, newest_sequence: int) -> bool:
        """Take the lead again after RecordBehind; then restore, then call `reclaimed`. Return False if
        another process leads by now.

        `newest_sequence`: the largest of all requests that were ever accepted; later ones get larger ones.
        """
        async with self._leading:
            return await self._reclaim(newest_sequence)

    async def _reclaim(self, newest_sequence: int) -> bool:
        if self._epoch is None:
            return False
        reply = await self._call(
            scripts.RECLAIM,
            self._shard_keys,
            [
                self._leadership,
                self._lease_ms,
                self._epoch.number,
                self._incarnation or "",
                self._next_incarnation,
                SCHEMA_VERSION,
                newest_sequence,
                _SHARD_TTL_MS,
            ],
        )
        if reply[0] != 1:
            self._forget_leadership()
            return False
        self._lives_in(reply[1])
        self.tails.ahead = True
        return True

    async def reclaimed(self, *, written_back: bool = True) -> None:
        """Note that everything that this leader holds is written back, so that the log can go. Until then no
        standby leads before its patience is over.

        `written_back`: False for a leader that holds nothing, and continues from what it reads.

        Raises Fenced, and StoreUnavailable: then everything has to be written back again.
        """
        keys = [self.keys.leader(), self.keys.server(), self.keys.log()]
        call = Call(scripts.RECLAIMED, keys, [self._leadership, _SHARD_TTL_MS, int(written_back)])
        try:
            await self.run([call], leading=True)
        except StoreUnavailable:
            self.distrust()
            raise
        self.generation += 1
        if written_back:
            self.tails.all_folded()
        else:
            self.tails_are_read = False

    def distrust(self) -> None:
        """Fence everything until the next `reclaim_leadership`: the data to be written back did not
        arrive.
        """
        self._trusted_server = None

    def _lives_in(self, incarnation: bytes) -> None:
        self._incarnation = incarnation.decode()
        self._next_incarnation = secrets.token_hex(8)
        self._trusted_server = self._servers.run_id

    async def resign(self) -> None:
        """Stop leading, so that a standby need not wait for the lease to expire. The lease of another leader
        is not changed.
        """
        leadership = self._leadership
        self._forget_leadership()
        if leadership:
            await self._call(scripts.RESIGN, [self.keys.leader(), self.keys.server()], [leadership])

    async def leader(self) -> Leader | None:
        """Return the leader of the shard, whichever process it is."""
        async with self._reached():
            found = await self._client.get(self.keys.leader())
        if found is None:
            return None
        epoch, _, owner = found.decode().partition(" ")
        leader = Leader(owner=owner, epoch=LeaderEpoch(epoch))
        self._highest_number = max(self._highest_number, leader.epoch.number)
        return leader

    # transitions

    async def submit(
        self, requests: Sequence[NewRequest], shown: Mapping[str, Shown] = MappingProxyType({})
    ) -> list[SubmitResult]:
        """Write new requests to the record; those that are not ACCEPTED are not on it.

        `shown`: by request id, for requests that the record has had before and lost. Requests that it still
        has stay as they are.

        An idempotency key is claimed first, so that no other shard takes it too.

        Raises Fenced, StoreUnavailable (then the outcome is unknown: submit the very same requests again,
        which answers ACCEPTED for those that are there), ValueError for token ids or request ids that cannot
        be stored.
        """
        calls = [
            self._submit_call(request, shown.get(request.request_id, _NOT_SHOWN)) for request in requests
        ]
        decides = await self._claim(
            [(request.request_id, self._idempotency_key(request)) for request in requests]
        )
        # A request that was accepted once stays accepted, even if another shard has taken its key since.
        own = [
            request.request_id in shown or owner == self.keys.shard
            for request, owner in zip(requests, decides, strict=True)
        ]
        replies = iter(
            await self.run([call for call, mine in zip(calls, own, strict=True) if mine], leading=True)
        )
        results = []
        refused: list[tuple[str, str]] = []
        for request, mine, owner in zip(requests, own, decides, strict=True):
            if not mine:
                results.append(SubmitResult(SubmitStatus.ELSEWHERE, request.request_id, 0, owner))
                continue
            status, request_id, sequence = next(replies)
            result = SubmitResult(SubmitStatus(status.decode()), request_id.decode(), sequence)
            expires_with = self._idempotency_key(request)
            if result.status is SubmitStatus.ACCEPTED:
                self.expires_with[request.request_id] = expires_with
                known = shown.get(request.request_id, _NOT_SHOWN)
                self.tails.submitted(
                    request.request_id, result.sequence, known.lease_epoch, len(known.token_ids)
                )
                self._ended_claims.discard(self.keys.claim(expires_with) or "")
            elif result.status in (SubmitStatus.QUEUE_FULL, SubmitStatus.TENANT_FULL):
                refused.append((request.request_id, expires_with))
            results.append(result)
        await self._unclaim(refused)
        return results

    async def claim_again(self, requests: Sequence[NewRequest]) -> None:
        """Claim the idempotency keys of requests again after the record was emptied, so that this shard
        decides about them, as before. A key that another shard has taken in between stays with it.
        """
        await self._claim([(request.request_id, self._idempotency_key(request)) for request in requests])

    async def extend(self, request_id: str, deadline_unix_ms: int | None) -> bool:
        """Give an unfinished request another deadline, or none. Return False if it has ended. Raises Fenced,
        StoreUnavailable.
        """
        keys = [self.keys.leader(), self.keys.request(request_id)]
        deadline = "" if deadline_unix_ms is None else deadline_unix_ms
        [[answer]] = await self.run([Call(scripts.EXTEND, keys, [self._leadership, deadline])], leading=True)
        return _STATUS[answer] is TransitionStatus.OK

    async def withdraw(self, request_ids: Sequence[str]) -> list[str]:
        """Remove requests whose submission was refused because the record did not answer, with their
        idempotency keys. Return those that were on the record and had not ended. Raises Fenced,
        StoreUnavailable (then the outcome is unknown: withdraw them again, before any of them is submitted
        again).

        A request that is submitted again later has another sequence, so a withdrawal that the server executes
        late does not remove it.
        """
        withdrawn: list[tuple[str, str]] = []
        for start in range(0, len(request_ids), scripts.MAX_ENTRIES):
            found = await self._read_submitted(request_ids[start : start + scripts.MAX_ENTRIES])
            if not found:
                continue
            keys = self.queue_keys.copy()
            arguments: list[Argument] = [self._leadership]
            for request_id, sequence, expires_with in found:
                keys += (self.keys.request(request_id), self.keys.tokens(request_id))
                keys += (self.keys.payload(request_id), expires_with)
                arguments += (request_id, sequence)
            [answers] = await self.run([Call(scripts.WITHDRAW, keys, arguments)], leading=True)
            withdrawn += [
                (request_id, expires_with)
                for (request_id, _, expires_with), answer in zip(found, answers, strict=True)
                if _STATUS[answer] is TransitionStatus.OK
            ]
        await self._unclaim(withdrawn)
        for request_id, _ in withdrawn:
            self.tails.forget(request_id)
        return [request_id for request_id, _ in withdrawn]

    async def _read_submitted(self, request_ids: Sequence[str]) -> list[tuple[str, int, str]]:
        """Return (request id, sequence, key that expires with it) of those that are on the record."""
        async with self._reached(), self._client.pipeline(transaction=False) as pipeline:
            for request_id in request_ids:
                pipeline.hmget(self.keys.request(request_id), "sequence", "tenant", "idempotency_key")
            replies = await pipeline.execute()
        return [
            (
                request_id,
                int(sequence),
                self._key_of(request_id, tenant.decode(), key.decode()),
            )
            for request_id, (sequence, tenant, key) in zip(request_ids, replies, strict=True)
            if sequence is not None
        ]

    async def settle_claims(self) -> None:
        """Let the claims of ended requests expire soon after them. Call about once a second; raises
        StoreUnavailable.
        """
        while self._ended_claims:
            some = list(itertools.islice(self._ended_claims, MAX_ENTRIES))
            ttl_ms = self.finished_ttl_ms + CLAIM_SLACK_S * 1000
            await self._run_anywhere(
                [Call(scripts.UNCLAIM, [claim], [self.keys.shard, "", ttl_ms]) for claim in some]
            )
            self._ended_claims.difference_update(some)

    def batch(self) -> Batch:
        """Return a batch: transitions that are sent together, under the present leadership."""
        return Batch(self, self._leadership)

    async def save_priors(self, blob: bytes) -> None:
        """Save what the policy has learnt. Raises Fenced."""
        await self._save_learnt(self.keys.priors(), blob)

    async def save_probes(self, blob: bytes) -> None:
        """Save what the workers' probes have learnt. Raises Fenced."""
        await self._save_learnt(self.keys.probes(), blob)

    async def _save_learnt(self, key: str, blob: bytes) -> None:
        call = Call(scripts.SAVE_LEARNT, [self.keys.leader(), key], [self._leadership, blob, _SHARD_TTL_MS])
        await self.run([call], leading=True)

    async def try_write(self) -> None:
        """Raise StoreUnavailable where a write that needs memory would be refused now. Changes nothing."""
        # With XX no member is added, and no member has this name. The server refuses it as it would refuse
        # any write.
        nothing = _packed("ZADD", self.keys.unfinished(), "XX", 0, "-")
        try:
            _raise_errors(await self._send([nothing], self._servers.pool, leading=True))
        except Fenced:  # another server answers: the next renewal decides what that means
            return

    # reading

    async def load_unfinished(self) -> AsyncIterator[list[StoredRequest]]:
        """Yield all unfinished requests in the order of arrival, a chunk at a time: the working copy of a new
        leader.
        """
        leads = self._epoch is not None
        # The log first: what is folded in between, the requests' own keys hold by then.
        log = await self._read_log()
        async for index in self._index():
            found = await self._read_keys([request_id.decode() for request_id, _ in index])
            unfinished = []
            for request in found:
                if request is not None and request.end is None:
                    continued = log.continued(request)
                    unfinished.append(continued)
                    if leads:
                        self.expires_with[request.request_id] = self._idempotency_key(request)
                        self.tails.read(continued, len(request.committed_ids), log)
            if unfinished:
                yield unfinished
        if leads:
            self.tails.newest, self.tails.has_entries = log.newest, bool(log.newest)
            self.tails_are_read = True

    async def read_tails(self) -> None:
        """Read what a leader knows of the unfinished requests."""
        async for _ in self.load_unfinished():
            pass

    async def unfinished_ids(self) -> list[str]:
        """Return the ids of all unfinished requests, in the order of arrival."""
        ids: list[str] = []
        async for index in self._index():
            ids += [request_id.decode() for request_id, _ in index]
        return ids

    async def count_unfinished(self) -> int:
        """Return the number of unfinished requests."""
        async with self._reached():
            return int(await self._client.zcard(self.keys.unfinished()))

    async def reached(self, request_ids: Sequence[str]) -> list[tuple[int, int] | None]:
        """Return the lease epoch and the number of committed tokens that its own keys hold of each; None for a
        request that is not there.
        """
        found: list[tuple[int, int] | None] = []
        for start in range(0, len(request_ids), MAX_ENTRIES):
            async with self._reached(), self._client.pipeline(transaction=False) as pipeline:
                for request_id in request_ids[start : start + MAX_ENTRIES]:
                    pipeline.hmget(self.keys.request(request_id), "lease_epoch", "committed")
                replies = await pipeline.execute()
            found += [None if epoch is None else (int(epoch), int(count)) for epoch, count in replies]
        return found

    async def read(self, request_id: str) -> StoredRequest | None:
        """Return one request, also a finished one until it expires."""
        return (await self._read([request_id]))[0]

    async def read_all(self, request_ids: Sequence[str]) -> dict[str, StoredRequest]:
        """Return those of the requests that are on the record, finished ones until they expire. Raises
        StoreUnavailable.
        """
        found: dict[str, StoredRequest] = {}
        for start in range(0, len(request_ids), _READ_CHUNK):
            for stored in await self._read(request_ids[start : start + _READ_CHUNK]):
                if stored is not None:
                    found[stored.request_id] = stored
        return found

    async def last_sequence(self) -> int:
        """Return the sequence number of the newest request, ended or not; 0 when there was none."""
        async with self._reached():
            found = await self._client.get(self.keys.sequence())
        return int(found or 0)

    async def load_priors(self) -> bytes | None:
        """Return what `save_priors` kept last, by any leader of this incarnation."""
        async with self._reached():
            blob: bytes | None = await self._client.get(self.keys.priors())
        return blob

    async def load_probes(self) -> bytes | None:
        """Return what `save_probes` kept last, by any leader of this incarnation."""
        async with self._reached():
            blob: bytes | None = await self._client.get(self.keys.probes())
        return blob

    # inside

    async def _index(self) -> AsyncIterator[list[tuple[bytes, float]]]:
        """Yield (request id, sequence) of all unfinished requests, a chunk at a time."""
        newest = 0
        while True:
            async with self._reached():
                index = await self._client.zrangebyscore(
                    self.keys.unfinished(), f"({newest}", "+inf", start=0, num=_READ_CHUNK, withscores=True
                )
            if not index:
                return
            newest = int(index[-1][1])
            yield index

    async def _read(self, request_ids: Sequence[str]) -> list[StoredRequest | None]:
        """Return requests with what the log has of them."""
        knows = self.tails_are_read and not self.tails.ahead
        log = EMPTY if knows else await self._read_log()
        found: list[StoredRequest | None] = []
        for stored in await self._read_keys(request_ids):
            if stored is not None and stored.end is None:
                stored = self.tails.continued(stored) if knows else log.continued(stored)
            if stored is not None and knows:
                self.tails.resolved(stored)
            found.append(stored)
        return found

    async def _read_log(self) -> Log:
        entries: list[tuple[bytes, dict[bytes, bytes]]] = []
        while True:
            after = f"({entries[-1][0].decode()}" if entries else "-"
            async with self._reached():
                some = await self._client.xrange(self.keys.log(), after, "+", count=_LOG_CHUNK)
            entries += some
            if len(some) < _LOG_CHUNK:
                return read_log(entries, await self._newest_entry())

    async def _newest_entry(self) -> str:
        """Return the id of the newest entry that the log ever had; empty without a log."""
        async with self._reached():
            try:
                info = await self._client.xinfo_stream(self.keys.log())
            except redis_errors.ResponseError as error:
                if str(error) != "no such key":
                    raise
                return ""
        return str(info["last-generated-id"].decode())

    async def _read_keys(self, request_ids: Sequence[str]) -> list[StoredRequest | None]:
        # Not in a transaction, which a full server refuses. The hash is read first: tokens are only ever
        # appended, so the first tokens, by the count in the hash, are those of its moment, whatever is
        # committed in between.
        async with self._reached(), self._client.pipeline(transaction=False) as pipeline:
            for request_id in request_ids:
                pipeline.hgetall(self.keys.request(request_id))
                pipeline.get(self.keys.tokens(request_id))
                pipeline.hgetall(self.keys.payload(request_id))
            replies = await pipeline.execute()
        parts = zip(request_ids, replies[0::3], replies[1::3], replies[2::3], strict=True)
        return [stored_request(*part) for part in parts]

    def _submit_call(self, request: NewRequest, shown: Shown) -> Call:
        if not request.request_id or request.request_id.split() != [request.request_id]:
            raise ValueError(f"request id {request.request_id!r}: it must not be empty nor hold white space")
        keys = [
            *self.queue_keys,
            self.keys.sequence(),
            self.keys.request(request.request_id),
            self.keys.payload(request.request_id),
            self.keys.tokens(request.request_id),
            self._idempotency_key(request),
        ]
        arguments: list[Argument] = [
            self._leadership,
            request.request_id,
            request.tenant,
            request.body_hash,
            reserved_tokens(request),
            _limit(self._limits.max_requests),
            _limit(self._limits.max_tokens),
            _limit(self._limits.max_requests_per_tenant),
            _SHARD_TTL_MS,
            pack_ids(request.prompt_ids),
            request.submission,
            request.length_features,
            pack_ids(shown.token_ids),
            *new_fields(shown),
            *submission_fields(request),
        ]
        return Call(scripts.SUBMIT, keys, arguments)

    async def _claim(self, entries: Sequence[tuple[str, str]]) -> list[str]:
        """Return the shard that decides, for each request id and the key that expires with it; this one where
        there is no key.
        """
        shard, ttl_ms = self.keys.shard, CLAIM_TTL_S * 1000
        claims = [self.keys.claim(expires_with) for _, expires_with in entries]
        replies = iter(
            await self._run_anywhere(
                [
                    Call(scripts.CLAIM, [claim], [shard, request_id, ttl_ms])
                    for (request_id, _), claim in zip(entries, claims, strict=True)
                    if claim is not None
                ]
            )
        )
        return [shard if claim is None else next(replies)[0].decode() for claim in claims]

    async def _unclaim(self, entries: Sequence[tuple[str, str]]) -> None:
        """Release the claims of refused requests, so that another shard may take the key. If the record
        cannot be reached now, a claim stays until CLAIM_TTL_S is over.
        """
        calls = [
            Call(scripts.UNCLAIM, [claim], [self.keys.shard, request_id, 0])
            for request_id, expires_with in entries
            if (claim := self.keys.claim(expires_with)) is not None
        ]
        with contextlib.suppress(StoreUnavailable):
            await self._run_anywhere(calls)

    def _idempotency_key(self, request: NewRequest) -> str:
        """Return the key that expires with the request: its idempotency key, or without one its own, which
        changes nothing.
        """
        return self._key_of(request.request_id, request.tenant, request.idempotency_key)

    def _key_of(self, request_id: str, tenant: str, idempotency_key: str) -> str:
        return (
            self.keys.idempotency(tenant, idempotency_key)
            if idempotency_key
            else self.keys.request(request_id)
        )

    async def learn_idempotency_keys(self, request_ids: Iterable[str]) -> None:
        """Read the idempotency keys of requests that this process ends, but has neither submitted nor
        loaded.
        """
        unknown = [request_id for request_id in request_ids if request_id not in self.expires_with]
        if not unknown:
            return
        async with self._reached(), self._client.pipeline(transaction=False) as pipeline:
            for request_id in unknown:
                pipeline.hmget(self.keys.request(request_id), "tenant", "idempotency_key")
            replies = await pipeline.execute()
        for request_id, (tenant, key) in zip(unknown, replies, strict=True):
            self.expires_with[request_id] = self._key_of(
                request_id, (tenant or b"").decode(), (key or b"").decode()
            )

    def let_go(self, request_id: str) -> None:
        """Forget a request that has ended."""
        claim = self.keys.claim(self.expires_with.pop(request_id, ""))
        if claim is not None:
            self._ended_claims.add(claim)

    def expire_together(self, request: NewRequest) -> str:
        """Return the key that expires with a request, and remember it."""
        key = self.expires_with[request.request_id] = self._idempotency_key(request)
        return key

    def _forget_leadership(self) -> None:
        self._leadership, self._epoch = "", None
        self.tails.clear()
        self.tails_are_read = False

    @contextlib.asynccontextmanager
    async def _reached(self) -> AsyncIterator[None]:
        """Bound the time of an exchange with the server and translate its errors; used around every exchange.

        The client's own timeouts are off. They can swallow the cancellation of the calling task
        (`asyncio.wait_for` of Python 3.11 does, when its work is done in the same moment).
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError as error:
            raise StoreUnavailable(
                f"the record did not answer within {self._timeout_s} s", Fault.SLOW
            ) from error
        except (redis_errors.RedisError, OSError) as error:
            if moved := moved_to(error):
                self._servers.prefer(moved)
                await self._servers.pool.disconnect(inuse_connections=False)
            raise _translated(error) from error

    async def _call(self, script: Script, keys: list[str], arguments: list[Argument]) -> Any:
        return (await self.run([Call(script, keys, arguments)]))[0]

    async def run(self, calls: Sequence[Call], *, leading: bool = False) -> list[Any]:
        """Run the calls in one pipeline, in order. Raises Fenced, StoreUnavailable, StoreError.

        `leading`: only on the server that is known to hold what this leader wrote; on another one, raise
        Fenced.
        """
        replies = await self._replies(calls, self._servers.pool, leading=leading)
        if moved := next((address for reply in replies if (address := moved_to(reply))), None):
            # Calls that ran before the slot moved answer that they have run. A shard's keys all move
            # together.
            self._servers.prefer(moved)
            async with self._reached():
                await self._servers.pool.disconnect(inuse_connections=False)
            replies = await self._replies(calls, self._servers.pool, leading=leading)
        _raise_errors(replies)
        for reply in replies:
            if reply and reply[0] == b"fenced":
                raise Fenced(
                    "another leader epoch is in force, or none: this process does not lead the shard"
                )
        return replies

    async def _run_anywhere(self, calls: Sequence[Call]) -> list[Any]:
        """Run calls that each have one key in a slot of its own: in a cluster, on the nodes that the cluster
        names.
        """
        replies = await self._replies(calls, self._servers.pool)
        moved: dict[Address, list[int]] = {}
        for number, reply in enumerate(replies):
            address = moved_to(reply)
            if address is not None:
                moved.setdefault(address, []).append(number)
        for address, numbers in moved.items():
            there = await self._replies([calls[number] for number in numbers], self._servers.at(address))
            for number, reply in zip(numbers, there, strict=True):
                replies[number] = reply
        _raise_errors(replies)
        return replies

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
            await self._send([_packed("SCRIPT", "LOAD", script.source) for script in scripts.ALL], pool)
            replies = await self._send(packed, pool, leading=leading)
        return replies

    async def _send(
        self, packed: list[bytes], pool: BlockingConnectionPool, *, leading: bool = False
    ) -> list[Any]:
        if not packed:
            return []
        expected = len(packed)
        if leading and self._wait_replicas:
            wait_ms = max(1, int(self._timeout_s * 1000 / 2))
            packed = [*packed, _packed("WAIT", self._wait_replicas, wait_ms)]
        async with self._reached():
            connection = await pool.get_connection()
            try:
                if leading and self._epoch is not None and self._servers.run_id != self._trusted_server:
                    raise Fenced("another server answers for the record: it may lack the newest commits")
                await connection.send_packed_command(packed)
                replies = [await reply_of(connection) for _ in packed]
                if any(isinstance(reply, redis_errors.ReadOnlyError) or moved_to(reply) for reply in replies):
                    # The server is a replica by now, or without the slot: a new connection may lead to the
                    # right server.
                    await connection.disconnect(nowait=True)
                if len(packed) > expected:
                    self._check_replicas(replies.pop())
                return replies
            except (Fenced, StoreUnavailable):
                raise
            except BaseException:
                # Answers may still be on their way: no other caller may read them.
                await connection.disconnect(nowait=True)
                raise
            finally:
                await asyncio.shield(pool.release(connection))

    def _check_replicas(self, reached: Any) -> None:
        if isinstance(reached, Exception):
            raise _translated(reached)
        if reached < self._wait_replicas:
            raise StoreUnavailable(
                f"only {reached} of {self._wait_replicas} required replicas have the write", Fault.OTHER
            )


def _schema_mismatch(found: bytes) -> SchemaMismatch:
    return SchemaMismatch(
        f"the record has schema version {found.decode(errors='replace')}, this release reads and writes "
        f"{SCHEMA_VERSION}: let the release that wrote it finish its requests, or use another shard name"
    )


def _packed(*parts: Argument) -> bytes:
    # Its type hint has a tuple of one argument where any number is meant.
    packed: bytes = pack_command(parts)  # type: ignore[arg-type]
    return packed


def _raise_errors(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, Exception):
            raise _translated(reply) from reply


def _limit(value: int | None) -> int:
    return -1 if value is None else value


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
        case redis_errors.AskError() | redis_errors.TryAgainError() | redis_errors.ClusterDownError():
            fault = Fault.OTHER  # MASTERDOWN is a kind of CLUSTERDOWN
        case _:
            fault = next((fault for code, fault in _FAULTS.items() if str(error).startswith(code)), None)
    if fault is not None:
        return StoreUnavailable(f"the record cannot be read or written now: {error}", fault)
    return StoreError(f"the record answered: {error}")
