"""Errors of the record as a whole. A single refused transition is an answer, not an error."""

from __future__ import annotations

import enum


class StoreError(Exception):
    """Unexpected answer of the record: a bug here, or keys that another program wrote."""


class Fault(enum.Enum):
    """Reason for which a record is unavailable; the label of a metric."""

    UNREACHABLE = "unreachable"
    """A missing or broken connection."""
    SLOW = "slow"
    """An answer that did not come in time: the server is paused or overloaded, or the network drops messages."""
    LOADING = "loading"
    """The server reads its data after a start."""
    FULL = "full"
    """`maxmemory` is reached: existing data can be read and requests can end, nothing grows."""
    READ_ONLY = "read_only"
    """The server is a replica."""
    OTHER = "other"


class StoreUnavailable(StoreError):
    """Expected: the record cannot be reached, is loading, full or read-only. What was sent may or may not
    have happened.

    Sending the very same thing again later is safe.
    """

    def __init__(self, message: str, fault: Fault = Fault.OTHER) -> None:
        super().__init__(message)
        self.fault = fault


class Fenced(StoreError):
    """Expected: another leader epoch is in force, or none, or the record may have lost something. A process
    that gets this error must not act as the leader until `renew_leadership` (and `reclaim_leadership`, if the
    former raises RecordBehind) has confirmed the lead.
    """


class RecordBehind(StoreError):
    """Expected: no other process has led, but the record was emptied, or may have lost the last of what was
    written (it was restarted, or another server answers in its place). Call `reclaim_leadership`, then
    `Batch.restore` with the working copy, then `Store.reclaimed`.
    """


class SchemaMismatch(StoreError):
    """The keys of this shard were written by a release that laid them out differently."""
