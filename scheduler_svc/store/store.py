"""The record of one shard: the state that the scheduler must not lose, in Redis or Valkey.

Each request has keys of its own. What rounds add to it goes into the shard's log first, one entry a turn
(`log.py`), and from there into its own keys, seconds later or with its end (`batch.py`).

The scheduler decides, the scripts in `lua/` carry out. Each transition compares the state on which it was
decided with the record, so a decision that is out of date changes nothing, and one that is sent twice changes
nothing more.

An operator reads it with redis-cli: `HGETALL laps-sd:{shard}:request:ID` (state queued, leased or ended,
worker, lease_epoch, pair; committed, rounds, attained_s, level … up to five seconds old), `ZRANGE
laps-sd:{shard}:unfinished 0 -1`, `HGETALL laps-sd:{shard}:tenants`, `GET laps-sd:{shard}:leader`. `keys.py`
has all keys.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Container, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from scheduler_svc.store import scripts
from scheduler_svc.store.claims import Claims
from scheduler_svc.store.clock import RecordClock
from scheduler_svc.store.codec import Argument, new_fields, pack_ids
from scheduler_svc.store.errors import RecordBehind, StoreError, StoreUnavailable
from scheduler_svc.store.keys import SHARD_TTL_S, Keys
from scheduler_svc.store.leadership import LeadershipLease
from scheduler_svc.store.log import EMPTY
from scheduler_svc.store.reading import READ_CHUNK, Reader
from scheduler_svc.store.records import (
    LeaderEpoch,
    Limits,
    NewRequest,
    Shown,
    StoredRequest,
    SubmitResult,
    SubmitStatus,
    TransitionStatus,
)
from scheduler_svc.store.redis_url import parse_redis_url
from scheduler_svc.store.scripts import Call
from scheduler_svc.store.servers import RedisTls, SentinelUser, Servers
from scheduler_svc.store.tails import Tails
from scheduler_svc.store.transport import Transport

FINISHED_TTL_S = 15 * 60.0
"""Seconds for which a finished request can still be read, and its idempotency key attaches to it, unless its
deadline ended it.
"""

_SHARD_TTL_MS = SHARD_TTL_S * 1000
_NOT_SHOWN = Shown()


class Store:
    """The record of one shard, seen by one process, and the copy of it that this process has while it leads.
    Methods raise StoreUnavailable when the record cannot be reached.
    """

    def __init__(
        self,
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
    ) -> None:
        """Make the record's interface, which connects when first used. Raises ValueError.

        `url`: see `redis_url`; `tls`, `password_file`, `sentinel_user`: see `servers`.

        `wait_replicas`: nothing counts as written before this number of replicas has it.

        `timeout_s` bounds each exchange with the server, connecting included. `clock` gives Unix seconds that
        never step: the time of this machine. `monotonic` gives seconds: how long a standby has waited for the
        last leader, and how long ago a node of the cluster did not answer.
        """
        self.keys = Keys(shard)
        self._limits = limits or Limits()
        self.finished_ttl_ms = max(1, math.ceil(finished_ttl_s * 1000))
        self.clock = RecordClock(clock)
        """The record's time, once it was measured."""
        self.queue_keys = [
            self.keys.leader(),
            self.keys.unfinished(),
            self.keys.tenants(),
            self.keys.prompt_tokens(),
        ]
        self.tails = Tails()
        """Unfinished requests as this leader knows them."""
        self.tails_are_read = False
        self.generation = 0
        """Number of times that `tails` was built again: what was encoded before does not fit any more."""
        servers = Servers(
            parse_redis_url(url),
            probe_key=self.keys.leader(),
            timeout_s=timeout_s,
            max_connections=max_connections,
            tls=tls,
            password_file=password_file,
            sentinel_user=sentinel_user,
        )
        self.transport = Transport(
            servers, self.keys, timeout_s=timeout_s, wait_replicas=wait_replicas, monotonic=monotonic
        )
        self._lease = LeadershipLease(self.transport, self.keys, monotonic)
        self.claims = Claims(self.transport, self.keys, self.finished_ttl_ms)
        self.reader = Reader(self.transport, self.keys)

        # Methods of one part each, under the names by which callers know them.
        self.run, self.ping, self.close = self.transport.run, self.transport.ping, self.transport.close
        self.distrust = self.transport.distrust
        self.leader, self.patience_s = self._lease.leader, self._lease.patience_s
        self.claim_again, self.settle_claims = self.claims.claim_again, self.claims.settle
        self.unfinished_ids, self.reached = self.reader.unfinished_ids, self.reader.reached
        self.count_unfinished, self.last_sequence = self.reader.count_unfinished, self.reader.last_sequence
        self.load_priors, self.load_probes = self.reader.load_priors, self.reader.load_probes

    async def measure_clock(self) -> float:
        """Return how many seconds the server's clock is ahead of `clock`; 0 where the user may not run INFO.
        Raises StoreUnavailable.
        """
        began_s = self.clock.local_s()
        server_s = await self.transport.server_time_s()
        return 0.0 if server_s is None else self.clock.off_by_s(server_s, began_s)

    async def try_write(self) -> None:
        """Raise StoreUnavailable where a write that needs memory would be refused now. Changes nothing."""
        await self.transport.try_write(self.keys.unfinished())

    # leadership

    @property
    def epoch(self) -> LeaderEpoch | None:
        """Return the leader epoch this process leads under, as far as it knows; None if it does not lead."""
        return self._lease.epoch

    @property
    def leadership(self) -> str:
        """Return the name of the present leadership, by which the scripts refuse those of others."""
        return self._lease.leadership

    @property
    def incarnation(self) -> str | None:
        """Return the incarnation id of the record in which this process last led."""
        return self._lease.incarnation

    @property
    def record_was_empty(self) -> bool:
        """Return True if there was nothing in the record when this process became its leader."""
        return self._lease.record_was_empty

    @property
    def waits_for_last_leader(self) -> bool:
        """Return True if this standby found a record that may be older than what its last leader holds."""
        return self._lease.waits_for_last_leader

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
            self._lease.not_reached()
            raise

    async def _acquire(self, owner: str, lease_s: float) -> LeaderEpoch | None:
        try:
            if self.epoch is not None and await self.renew_leadership():
                return self.epoch
        except RecordBehind:
            # It leads without a working copy: there is nothing that it could write back.
            if await self.reclaim_leadership(newest_sequence=0):
                await self.reclaimed(written_back=False)
                return self.epoch
        epoch = await self._lease.acquire(owner, lease_s)
        if epoch is not None:
            self.claims.expires_with.clear()
            self._forget_copy()
        return epoch

    async def renew_leadership(self) -> bool:
        """Renew the lease. Return False if this process no longer leads, and the next batch would be fenced.
        Raises RecordBehind.
        """
        renewed = await self._lease.renew()
        if not renewed:
            self._forget_copy()
        return renewed

    async def reclaim_leadership(self, *, newest_sequence: int) -> bool:
        """Take the lead again after RecordBehind; then restore, then call `reclaimed`. Return False if
        another process leads by now.

        `newest_sequence`: the largest of all requests that were ever accepted; later ones get larger ones.
        """
        reclaimed = await self._lease.reclaim(newest_sequence)
        if reclaimed:
            self.tails.ahead = True
        else:
            self._forget_copy()
        return reclaimed

    async def reclaimed(self, *, written_back: bool = True) -> None:
        """Note that everything that this leader holds is written back, so that the log can go. Until then no
        standby leads before its patience is over.

        `written_back`: False for a leader that holds nothing, and continues from what it reads.

        Raises Fenced, and StoreUnavailable: then everything has to be written back again.
        """
        keys = [self.keys.leader(), self.keys.server(), self.keys.log()]
        call = Call(scripts.RECLAIMED, keys, [self.leadership, _SHARD_TTL_MS, int(written_back)])
        try:
            await self.run([call], leading=True)
        except StoreUnavailable:
            self.distrust()
            raise
        self.generation += 1
        if written_back:
            self.tails.all_folded()
        else:
            self._forget_copy()

    async def resign(self) -> None:
        """Stop leading, so that a standby need not wait for the lease to expire. The lease of another leader
        is not changed.
        """
        self._forget_copy()
        await self._lease.resign()

    def _forget_copy(self) -> None:
        """Forget the copy of the record: the next leadership reads it again."""
        self.tails.clear()
        self.tails_are_read = False

    # transitions

    async def submit(
        self,
        requests: Sequence[NewRequest],
        shown: Mapping[str, Shown] = MappingProxyType({}),
        only_known: Container[str] = (),
    ) -> list[SubmitResult]:
        """Write new requests to the record; those that are not ACCEPTED are not on it.

        `shown`: by request id, for requests that the record has had before and lost. Requests that it still
        has stay as they are. `only_known`: ids of requests that are not to be accepted unless they are, or their
        idempotency keys are known.

        An idempotency key is claimed first, so that no other shard takes it too.

        Raises Fenced, StoreUnavailable (then the outcome is unknown: submit the very same requests again,
        which answers ACCEPTED for those that are there), ValueError for token ids or request ids that cannot
        be stored.
        """
        entries = [
            self._submit_entry(
                request,
                shown.get(request.request_id, _NOT_SHOWN),
                -1 if request.request_id in only_known else len(request.prompt_ids),
            )
            for request in requests
        ]
        decides = await self.claims.claim(requests)
        # A request that was accepted once stays accepted, even if another shard has taken its key since.
        own = [
            isinstance(owner, str) and (request.request_id in shown or owner == self.keys.shard)
            for request, owner in zip(requests, decides, strict=True)
        ]
        calls = self._submit_calls([entry for entry, mine in zip(entries, own, strict=True) if mine])
        replies = iter([one for reply in await self.run(calls, leading=True) for one in reply])
        results = []
        refused: list[tuple[str, str]] = []
        for request, mine, owner in zip(requests, own, decides, strict=True):
            if isinstance(owner, StoreError):
                results.append(SubmitResult(SubmitStatus.UNCLAIMED, request.request_id, 0, error=str(owner)))
                continue
            if not mine:
                results.append(SubmitResult(SubmitStatus.ELSEWHERE, request.request_id, 0, owner))
                continue
            status, request_id, sequence = next(replies)
            result = SubmitResult(SubmitStatus(status.decode()), request_id.decode(), sequence)
            if result.status is SubmitStatus.ACCEPTED:
                self.claims.accepted(request)
                known = shown.get(request.request_id, _NOT_SHOWN)
                self.tails.submitted(
                    request.request_id, result.sequence, known.lease_epoch, len(known.token_ids)
                )
            elif result.status in (SubmitStatus.QUEUE_FULL, SubmitStatus.TENANT_FULL, SubmitStatus.UNKNOWN):
                refused.append((request.request_id, self.claims.key_of(request)))
            else:
                self.claims.attached(request, result.request_id)
            results.append(result)
        await self.claims.release(refused)
        return results

    async def extend(self, request_id: str, deadline_unix_ms: int | None) -> bool:
        """Give an unfinished request another deadline, or none. Return False if it has ended. Raises Fenced,
        StoreUnavailable.
        """
        keys = [self.keys.leader(), self.keys.request(request_id)]
        deadline = "" if deadline_unix_ms is None else deadline_unix_ms
        [[answer]] = await self.run([Call(scripts.EXTEND, keys, [self.leadership, deadline])], leading=True)
        return TransitionStatus(answer) is TransitionStatus.OK

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
            arguments: list[Argument] = [self.leadership]
            for request_id, sequence, expires_with in found:
                keys += (self.keys.request(request_id), self.keys.tokens(request_id))
                keys += (self.keys.payload(request_id), expires_with)
                arguments += (request_id, sequence)
            [answers] = await self.run([Call(scripts.WITHDRAW, keys, arguments)], leading=True)
            withdrawn += [
                (request_id, expires_with)
                for (request_id, _, expires_with), answer in zip(found, answers, strict=True)
                if TransitionStatus(answer) is TransitionStatus.OK
            ]
        await self.claims.release(withdrawn)
        for request_id, _ in withdrawn:
            self.tails.forget(request_id)
        return [request_id for request_id, _ in withdrawn]

    async def _read_submitted(self, request_ids: Sequence[str]) -> list[tuple[str, int, str]]:
        """Return (request id, sequence, key that expires with it) of those that are on the record."""
        keys = [self.keys.request(request_id) for request_id in request_ids]
        found = await self.transport.fields(keys, "sequence", "tenant", "idempotency_key")
        return [
            (
                request_id,
                int(sequence),
                self.claims.named(request_id, (tenant or b"").decode(), (key or b"").decode()),
            )
            for request_id, (sequence, tenant, key) in zip(request_ids, found, strict=True)
            if sequence is not None
        ]

    async def save_priors(self, blob: bytes) -> None:
        """Save what the policy has learnt. Raises Fenced."""
        await self._save_learnt(self.keys.priors(), blob)

    async def save_probes(self, blob: bytes) -> None:
        """Save what the workers' probes have learnt. Raises Fenced."""
        await self._save_learnt(self.keys.probes(), blob)

    async def _save_learnt(self, key: str, blob: bytes) -> None:
        call = Call(scripts.SAVE_LEARNT, [self.keys.leader(), key], [self.leadership, blob, _SHARD_TTL_MS])
        await self.run([call], leading=True)

    def _submit_calls(self, entries: Sequence[tuple[list[str], list[Argument]]]) -> list[Call]:
        keys = [*self.queue_keys, self.keys.sequence()]
        arguments: list[Argument] = [
            self.leadership,
            _limit(self._limits.max_requests),
            _limit(self._limits.max_prompt_tokens),
            _limit(self._limits.max_requests_per_tenant),
            _SHARD_TTL_MS,
        ]
        calls = []
        for start in range(0, len(entries), scripts.MAX_PROMPTS):
            some = entries[start : start + scripts.MAX_PROMPTS]
            calls.append(
                Call(
                    scripts.SUBMIT,
                    keys + [key for its_keys, _ in some for key in its_keys],
                    arguments + [one for _, its_arguments in some for one in its_arguments],
                )
            )
        return calls

    def _submit_entry(
        self, request: NewRequest, shown: Shown, prompt_tokens: int
    ) -> tuple[list[str], list[Argument]]:
        """Return the keys and arguments of one entry; `prompt_tokens`: see `submit.lua`. Raises ValueError."""
        request_id = request.request_id
        if not request_id or request_id.split() != [request_id]:
            raise ValueError(f"request id {request_id!r}: it must not be empty nor hold white space")
        keys = [
            self.keys.request(request_id),
            self.keys.payload(request_id),
            self.keys.tokens(request_id),
            self.claims.key_of(request),
        ]
        fields = new_fields(request, shown)
        arguments: list[Argument] = [
            request_id,
            request.tenant,
            request.body_hash,
            prompt_tokens,
            pack_ids(request.prompt_ids),
            request.submission,
            request.length_features,
            request.prompt_blocks,
            pack_ids(shown.token_ids),
            len(fields),
            *fields,
        ]
        return keys, arguments

    # reading

    async def load_unfinished(self) -> AsyncGenerator[list[StoredRequest], None]:
        """Yield all unfinished requests in the order of arrival, a chunk at a time: the working copy of a new
        leader.
        """
        leads = self.epoch is not None
        # The log first: what is folded in between, the requests' own keys hold by then.
        log = await self.reader.log()
        async with contextlib.aclosing(self.reader.unfinished()) as chunks:
            async for requests in chunks:
                unfinished = [log.continued(request) for request in requests]
                if leads:
                    for request, continued in zip(requests, unfinished, strict=True):
                        self.claims.expire_together(request)
                        self.tails.read(continued, len(request.committed_ids), log)
                if unfinished:
                    yield unfinished
        if leads:
            self.tails.all_read(log)
            self.tails_are_read = True

    async def read_tails(self) -> None:
        """Read what a leader knows of the unfinished requests."""
        async for _ in self.load_unfinished():
            pass

    async def read(self, request_id: str) -> StoredRequest | None:
        """Return one request, also a finished one until it expires."""
        return (await self._read([request_id]))[0]

    async def read_all(self, request_ids: Sequence[str]) -> dict[str, StoredRequest]:
        """Return those of the requests that are on the record, finished ones until they expire. Raises
        StoreUnavailable.
        """
        found: dict[str, StoredRequest] = {}
        for start in range(0, len(request_ids), READ_CHUNK):
            for stored in await self._read(request_ids[start : start + READ_CHUNK]):
                if stored is not None:
                    found[stored.request_id] = stored
        return found

    async def _read(self, request_ids: Sequence[str]) -> list[StoredRequest | None]:
        """Return requests with what the log has of them, and correct the leader's copy by them."""
        knows = self.tails_are_read and not self.tails.ahead
        log = EMPTY if knows else await self.reader.log()
        found: list[StoredRequest | None] = []
        for stored in await self.reader.requests(request_ids):
            if stored is not None and stored.end is None:
                stored = self.tails.continued(stored) if knows else log.continued(stored)
            if stored is not None and knows:
                self.tails.resolved(stored)
            if stored is not None and stored.end is not None:
                self.claims.let_go(stored.request_id)
            found.append(stored)
        return found


def _limit(value: int | None) -> int:
    return -1 if value is None else value
