"""Idempotency keys: the claim by which one shard decides about a key for all shards, and the key that expires with
each request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from scheduler_svc.store import scripts
from scheduler_svc.store.errors import StoreError, StoreUnavailable
from scheduler_svc.store.keys import CLAIM_SLACK_S, CLAIM_TTL_S, Keys
from scheduler_svc.store.records import NewRequest
from scheduler_svc.store.scripts import Call
from scheduler_svc.store.transport import Transport


class Claims:
    """Claims of one shard's requests."""

    def __init__(self, transport: Transport, keys: Keys, finished_ttl_ms: int) -> None:
        """`finished_ttl_ms`: milliseconds for which an ended request stays."""
        self._transport = transport
        self._keys = keys
        self._finished_ttl_ms = finished_ttl_ms
        self.expires_with: dict[str, str] = {}
        """The key that expires with each request, by request id: its idempotency key, or its own. A leader has
        submitted or loaded every request that it ends, so this saves a read of the record at the end; without
        an entry here the record is read.
        """
        # Claims of requests that have ended; their expiry is set by the next `settle`.
        self._ended: set[str] = set()
        # Requests whose claims could not be written again; the next `settle` tries.
        self._unclaimed: list[NewRequest] = []

    async def claim(self, requests: Sequence[NewRequest]) -> list[str | StoreError]:
        """Return the shard that decides, for each request; this one for a request without an idempotency key,
        and the error where the cluster's node with the claim does not answer. Raises StoreUnavailable.

        A key that another shard has taken stays with it: after the record was emptied too, when a leader
        claims the keys of its requests again.
        """
        shard, ttl_ms = self._keys.shard, CLAIM_TTL_S * 1000
        claims = [self._keys.claim(self.key_of(request)) for request in requests]
        replies = await self._transport.run_anywhere(
            [
                Call(scripts.CLAIM, [claim], [shard, request.request_id, ttl_ms])
                for request, claim in zip(requests, claims, strict=True)
                if claim is not None
            ]
        )
        deciding = (reply if isinstance(reply, StoreError) else reply[0].decode() for reply in replies)
        return [shard if claim is None else next(deciding) for claim in claims]

    async def claim_again(self, requests: Sequence[NewRequest]) -> None:
        """Claim the keys of requests that are on the record; those of a node that does not answer, later."""
        decides = await self.claim(requests)
        self._unclaimed += [
            request for request, owner in zip(requests, decides, strict=True) if isinstance(owner, StoreError)
        ]

    async def release(self, entries: Iterable[tuple[str, str]]) -> None:
        """Release the claims of requests that are not on the record, so that another shard may take the key.
        If the record cannot be reached now, a claim stays until CLAIM_TTL_S is over.

        `entries`: request id, and the key that expires with it.
        """
        calls = [
            Call(scripts.UNCLAIM, [claim], [self._keys.shard, request_id, 0])
            for request_id, expires_with in entries
            if (claim := self._keys.claim(expires_with)) is not None
        ]
        with contextlib.suppress(StoreUnavailable):
            await self._transport.run_anywhere(calls)

    async def settle(self) -> None:
        """Let the claims of ended requests expire soon after them. Call about once a second; raises
        StoreUnavailable. What a node does not answer is left for the next time.
        """
        unclaimed = self._unclaimed[: scripts.MAX_ENTRIES]
        await self.claim_again([request for request in unclaimed if request.request_id in self.expires_with])
        del self._unclaimed[: len(unclaimed)]
        ended = list(self._ended)
        ttl_ms = self._finished_ttl_ms + CLAIM_SLACK_S * 1000
        for start in range(0, len(ended), scripts.MAX_ENTRIES):
            some = ended[start : start + scripts.MAX_ENTRIES]
            replies = await self._transport.run_anywhere(
                [Call(scripts.UNCLAIM, [claim], [self._keys.shard, "", ttl_ms]) for claim in some]
            )
            self._ended.difference_update(
                claim for claim, reply in zip(some, replies, strict=True) if not isinstance(reply, StoreError)
            )

    def key_of(self, request: NewRequest) -> str:
        """Return the key that expires with the request: its idempotency key, or without one its own, which
        changes nothing.
        """
        return self.named(request.request_id, request.tenant, request.idempotency_key)

    def named(self, request_id: str, tenant: str, idempotency_key: str) -> str:
        """Return the key that expires with a request of these fields."""
        return (
            self._keys.idempotency(tenant, idempotency_key)
            if idempotency_key
            else self._keys.request(request_id)
        )

    def expire_together(self, request: NewRequest) -> str:
        """Return the key that expires with a request, and remember it."""
        key = self.expires_with[request.request_id] = self.key_of(request)
        return key

    def accepted(self, request: NewRequest) -> None:
        """Note that a request is on the record: its claim stays."""
        self._ended.discard(self._keys.claim(self.expire_together(request)) or "")

    def attached(self, request: NewRequest, request_id: str) -> None:
        """Note that a submission was answered with the earlier request `request_id`. It has renewed the claim, which
        does not stay for one that has ended.
        """
        claim = self._keys.claim(self.key_of(request))
        if claim is not None and request_id not in self.expires_with:
            self._ended.add(claim)

    def let_go(self, request_id: str) -> None:
        """Forget a request that has ended."""
        claim = self._keys.claim(self.expires_with.pop(request_id, ""))
        if claim is not None:
            self._ended.add(claim)

    async def learn(self, request_ids: Iterable[str]) -> None:
        """Read the idempotency keys of requests that this process ends, but has neither submitted nor
        loaded.
        """
        unknown = [request_id for request_id in request_ids if request_id not in self.expires_with]
        if not unknown:
            return
        found = await self._transport.fields(
            [self._keys.request(request_id) for request_id in unknown], "tenant", "idempotency_key"
        )
        for request_id, (tenant, key) in zip(unknown, found, strict=True):
            self.expires_with[request_id] = self.named(
                request_id, (tenant or b"").decode(), (key or b"").decode()
            )
