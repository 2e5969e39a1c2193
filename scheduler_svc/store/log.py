"""The log of the record: what each turn adds to the outputs and the progress of requests, one entry a turn.

An entry is written by `lua/append.lua` and holds, in the order of the turn, one row for each report about a
request. Rows name requests by their sequence number, which is unique in a shard. A row counts where it
continues the tokens before it; what the request's own keys hold already it repeats (`lua/fold.lua`).

    entry   int64 Unix milliseconds of the turn, then rows
    row     sequence int64, position, tokens, rounds, drafts, drafted, accepted, preemptions uint32 each,
            level uint8, attained_s, score float64, then the token ids, int32 each; all little-endian
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from scheduler_svc.core.commands import Standing
from scheduler_svc.store.codec import check_level, safe_score, safe_seconds, unpack_ids
from scheduler_svc.store.records import StoredRequest

_TIME = struct.Struct("<q")
_ROW = struct.Struct("<qIIIIIIIBdd")


class Row(NamedTuple):
    """Progress of one request."""

    at_ms: int
    """Unix milliseconds."""
    entry: int
    """Number of its entry."""
    position: int
    """Committed tokens before these."""
    tokens: tuple[int, ...]
    standing: Standing


@lru_cache(maxsize=64)
def _row_of(tokens: int) -> struct.Struct:
    """Return the layout of a row with that many tokens."""
    return struct.Struct(f"{_ROW.format}{tokens}i")


def pack_row(
    request_id: str, sequence: int, position: int, tokens: Sequence[int], standing: Standing
) -> bytes:
    """Return one row. Raises ValueError for a value that does not fit."""
    count = len(tokens)
    try:
        return _row_of(count).pack(
            sequence,
            position,
            count,
            standing.rounds,
            standing.drafts,
            standing.drafted,
            standing.accepted,
            standing.preemptions,
            check_level(request_id, standing.level),
            safe_seconds(standing.attained_s),
            safe_score(standing.score),
            *tokens,
        )
    except struct.error as error:
        raise ValueError(f"request {request_id}: progress that does not fit the log: {error}") from None


def pack_entry(at_ms: int, rows: Iterable[bytes]) -> bytes:
    """Return an entry of packed rows."""
    return _TIME.pack(at_ms) + b"".join(rows)


def unpack_entry(number: int, entry: bytes) -> Iterator[tuple[int, Row]]:
    """Yield (sequence, row) of an entry. Raises struct.error for one that this code did not write."""
    (at_ms,) = _TIME.unpack_from(entry)
    at = _TIME.size
    while at < len(entry):
        (
            sequence,
            position,
            count,
            rounds,
            drafts,
            drafted,
            accepted,
            preemptions,
            level,
            attained_s,
            score,
        ) = _ROW.unpack_from(entry, at)
        at += _ROW.size
        tokens = unpack_ids(entry[at : at + 4 * count])
        at += 4 * count
        standing = Standing(rounds, drafts, drafted, accepted, attained_s, preemptions, level, score)
        yield sequence, Row(at_ms, number, position, tokens, standing)


@dataclass(frozen=True, slots=True)
class Log:
    """All entries of a log, by request."""

    newest: str
    """Id of the newest entry that there ever was; empty without one."""
    rows: dict[int, list[Row]]
    """Rows by sequence number, in their order."""

    def continued(self, stored: StoredRequest) -> StoredRequest:
        """Return the request with what the log has of it."""
        rows = self.rows.get(stored.sequence)
        return stored if rows is None else continued(stored, rows)

    def reached(self, sequence: int, committed: int) -> int:
        """Return the tokens of a request with what the log has of it; its own keys have `committed`."""
        ends = [row.position + len(row.tokens) for row in self.rows.get(sequence, ())]
        return max([committed, *ends])


EMPTY = Log("", {})


def continued(stored: StoredRequest, rows: Iterable[Row]) -> StoredRequest:
    """Return a request, as its own keys have it, with the progress of these rows. Rows after a gap, or that
    contradict the tokens before them, do not count: a log whose appends were answered has none.
    """
    tokens, standing, first_ms = stored.committed_ids, stored.standing, stored.first_token_unix_ms
    for row in rows:
        known = tokens[row.position : row.position + len(row.tokens)]
        if row.position > len(tokens) or row.tokens[: len(known)] != known:
            break
        tokens += row.tokens[len(known) :]
        if row.standing.rounds >= standing.rounds:
            standing = row.standing
        if first_ms is None and row.position == 0 and row.tokens:
            first_ms = row.at_ms
    return replace(stored, committed_ids=tokens, standing=standing, first_token_unix_ms=first_ms)


def number_of(entry_id: str) -> int:
    """Return the number of an entry from its id; 0 for none."""
    return int(entry_id.partition("-")[0] or 0)


def read_log(entries: Iterable[tuple[bytes, dict[bytes, bytes]]], newest: str = "") -> Log:
    """Return the log of stream entries, oldest first; `newest`: id of the newest that there ever was."""
    rows: dict[int, list[Row]] = {}
    for entry_id, fields in entries:
        for sequence, row in unpack_entry(number_of(entry_id.decode()), fields[b"p"]):
            rows.setdefault(sequence, []).append(row)
    return Log(newest, rows)
