"""What can go wrong with the record as a whole. A single refused transition is an answer, not an error."""

from __future__ import annotations


class StoreError(Exception):
    """The record answered something this code does not expect: a bug here, or keys that something else wrote."""


class StoreUnavailable(StoreError):
    """Expected: the record cannot be reached, is loading, full or read-only. What was sent may or may not have happened.

    Sending the very same thing again later is safe.
    """


class Fenced(StoreError):
    """Expected: another leader epoch is in force, or none. Whoever gets this has to stop acting as the leader."""


class SchemaMismatch(StoreError):
    """The keys of this shard were written by a release that laid them out differently."""
