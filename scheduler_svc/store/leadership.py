"""The lease of the leader: which process may write the record, and on which data.

A standby leaves a record that may have lost something to its last leader for a while (`patience_s`): that leader
writes back what it holds in memory. A leader learns of a loss from `renew`.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable
from typing import Any

from scheduler_svc.store import scripts
from scheduler_svc.store.errors import RecordBehind, SchemaMismatch
from scheduler_svc.store.keys import SCHEMA_VERSION, SHARD_TTL_S, Keys
from scheduler_svc.store.records import Leader, LeaderEpoch
from scheduler_svc.store.scripts import Call, Script
from scheduler_svc.store.transport import Transport

_SHARD_TTL_MS = SHARD_TTL_S * 1000


class LeadershipLease:
    """The lease as one process sees it."""

    def __init__(self, transport: Transport, keys: Keys, monotonic: Callable[[], float]) -> None:
        """`monotonic` gives seconds: how long a standby has waited for the last leader."""
        self._transport = transport
        self._keys = keys
        self._shard_keys = [
            keys.leader(),
            keys.leader_count(),
            keys.schema_version(),
            keys.incarnation(),
            keys.sequence(),
            keys.priors(),
            keys.server(),
            keys.log(),
        ]
        self._monotonic = monotonic
        self.leadership = ""
        """Value of the leader key while this process leads, by which scripts recognize it; empty otherwise."""
        self.epoch: LeaderEpoch | None = None
        self.incarnation: str | None = None
        """Incarnation id of the record in which this process last led."""
        self.record_was_empty = False
        """True if there was nothing in the record when this process became its leader."""
        # One at a time: a renewal that overtakes a reclaim would look like another leader's.
        self._leading = asyncio.Lock()
        self._lease_ms = 0
        self._highest_number = 0
        self._next_incarnation = secrets.token_hex(8)
        self._nonce = secrets.token_hex(8)
        # Whether the record could not be reached since this process last saw a leader.
        self._in_doubt = False
        # When this standby found a record that may be older than what its last leader holds, and the state of
        # that record. A wait holds for one state: after another loss the last leader gets its time again.
        self._older_since_s: float | None = None
        self._older_state = ""

    @property
    def waits_for_last_leader(self) -> bool:
        """Return True if this standby found a record that may be older than what its last leader holds."""
        return self._older_since_s is not None

    def patience_s(self, lease_s: float) -> float:
        """Return the seconds for which a standby leaves a possibly older record to its last leader: two lease
        periods, and no less than three exchanges, in which a leader that is alive reaches the record again.
        Our choice.
        """
        return max(2 * lease_s, 3 * self._transport.timeout_s)

    def not_reached(self) -> None:
        """Note that the record could not be reached. As far as this process can see, the last leader cannot
        reach it either: its patience starts again.
        """
        self._in_doubt, self._older_since_s = True, None

    async def acquire(self, owner: str, lease_s: float) -> LeaderEpoch | None:
        """Become the leader; None while another process leads, or has to be waited for. Raises SchemaMismatch,
        StoreUnavailable.
        """
        lease_ms = math.ceil(lease_s * 1000)
        has_waited = (
            self._older_since_s is not None
            and self._monotonic() - self._older_since_s >= self.patience_s(lease_s)
        )
        reply = await self._call(
            scripts.ACQUIRE,
            [*self._shard_keys, *self._keys.before_the_log()],
            [
                # The same nonce until this process has led: an attempt whose answer was lost may have
                # succeeded.
                self._nonce,
                owner,
                lease_ms,
                SCHEMA_VERSION,
                self._next_incarnation,
                self._highest_number,
                self.incarnation or "",
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
            self.incarnation = reply[1].decode() or self.incarnation
            return None
        self.epoch = LeaderEpoch(reply[1].decode())
        self._highest_number = self.epoch.number
        self.leadership = f"{self.epoch} {owner}"
        self._lease_ms = lease_ms
        self._nonce = secrets.token_hex(8)
        self.record_was_empty = reply[2].decode() == self._next_incarnation
        self._adopt_incarnation(reply[2])
        return self.epoch

    async def renew(self) -> bool:
        """Renew the lease. Return False if this process does not lead. Raises RecordBehind."""
        async with self._leading:
            if self.epoch is None:
                return False
            renewed = await self._call(
                scripts.RENEW,
                self._shard_keys,
                [
                    self.leadership,
                    self._lease_ms,
                    self.epoch.number,
                    self.incarnation or "",
                    _SHARD_TTL_MS,
                ],
            )
            if renewed[0] == 0:
                self._forget()
            elif renewed[0] == 2:
                raise RecordBehind(
                    "the record was emptied or set back, or its server was restarted or replaced"
                )
            elif not self._transport.is_trusted:
                raise RecordBehind(
                    "the server of the record was restarted, or another one answers in its place"
                )
            return bool(renewed[0])

    async def reclaim(self, newest_sequence: int) -> bool:
        """Take the lead again after RecordBehind. Return False if another process leads by now."""
        async with self._leading:
            if self.epoch is None:
                return False
            reply = await self._call(
                scripts.RECLAIM,
                self._shard_keys,
                [
                    self.leadership,
                    self._lease_ms,
                    self.epoch.number,
                    self.incarnation or "",
                    self._next_incarnation,
                    SCHEMA_VERSION,
                    newest_sequence,
                    _SHARD_TTL_MS,
                ],
            )
            if reply[0] != 1:
                self._forget()
                return False
            self._adopt_incarnation(reply[1])
            return True

    async def resign(self) -> None:
        """Stop leading. The lease of another leader is not changed."""
        leadership = self.leadership
        self._forget()
        if leadership:
            await self._call(scripts.RESIGN, [self._keys.leader(), self._keys.server()], [leadership])

    async def leader(self) -> Leader | None:
        """Return the leader of the shard, whichever process it is."""
        found = await self._transport.get(self._keys.leader())
        if found is None:
            return None
        epoch, _, owner = found.decode().partition(" ")
        leader = Leader(owner=owner, epoch=LeaderEpoch(epoch))
        self._highest_number = max(self._highest_number, leader.epoch.number)
        return leader

    def _adopt_incarnation(self, incarnation: bytes) -> None:
        self.incarnation = incarnation.decode()
        self._next_incarnation = secrets.token_hex(8)
        self._transport.trust()

    def _forget(self) -> None:
        self.leadership, self.epoch = "", None
        self._transport.trust_any()

    async def _call(self, script: Script, keys: list[str], arguments: list[Any]) -> Any:
        return (await self._transport.run([Call(script, keys, arguments)]))[0]


def _schema_mismatch(found: bytes) -> SchemaMismatch:
    return SchemaMismatch(
        f"the record has schema version {found.decode(errors='replace')}, this release reads and writes "
        f"{SCHEMA_VERSION}: let the release that wrote it finish its requests, or use another shard name"
    )
