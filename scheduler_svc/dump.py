"""Prints the record of a shard: `laps-sd record`. It needs no scheduler, and changes nothing.

The first lines describe the record as a whole. Then comes one line for each unfinished request, in the order of
arrival, with the progress that only the log holds. Requests are read a chunk at a time. What another program wrote
under a key of the shard is an error that names the key; a single request with such keys is listed as `unreadable`.
"""

from __future__ import annotations

from laps_sd.service.interrupts import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

import asyncio
import json
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from laps_sd.service.config import ConfigError, load
from laps_sd.service.extras import needs
from laps_sd.service.flags import GroupedCommand, options, with_version

with needs("scheduler"):
    from scheduler_svc.record import open_record
    from scheduler_svc.record_settings import RecordSettings
    from scheduler_svc.store.errors import SchemaMismatch, StoreError, StoreUnavailable
    from scheduler_svc.store.keys import SCHEMA_VERSION
    from scheduler_svc.store.log import Log, read_log
    from scheduler_svc.store.records import StoredRequest
    from scheduler_svc.store.store import Store

_READABLE = (None, b"1", str(SCHEMA_VERSION).encode())
"""Schema versions; None: there is no record, or it has lost the key. Version 1 has no log."""
_COLUMNS = {
    "request_id": ("request", "<30"),
    "tenant": ("tenant", "<16"),
    "state": ("state", "<10"),
    "worker": ("worker", "<16"),
    "lease_epoch": ("epoch", ">5"),
    "committed_tokens": ("tokens", ">6"),
    "rounds": ("rounds", ">6"),
    "level": ("level", ">5"),
    "age_s": ("age s", ">9"),
}
"""Title and width of each field of a request."""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(cls=GroupedCommand)
@with_version
@options(RecordSettings)
def record(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print lines of JSON: first the record, then each request.")
    ] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With --json: add the token ids of prompts and outputs.")
    ] = False,
    **overrides: Any,
) -> None:
    """Print the record of a shard with its unfinished requests; no scheduler is needed, nothing is changed."""
    try:
        if tokens and not as_json:
            raise ConfigError(["--tokens needs --json."])
        asyncio.run(_print(load(RecordSettings, overrides), as_json=as_json, tokens=tokens))
    except ConfigError as error:
        for problem in error.problems:
            print(f"laps-sd record: {problem}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from None
    except StoreUnavailable as error:
        reason = str(error).rstrip(".")  # the client's sentence ends with one, or with two
        print(f"laps-sd record: {reason}. --redis-url or LAPS_SD_REDIS_URL names another", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1) from None
    except StoreError as error:
        print(f"laps-sd record: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1) from None


async def _print(settings: RecordSettings, *, as_json: bool, tokens: bool) -> None:
    store = open_record(settings)
    try:
        head, log = await read_head(store)
        print(json.dumps(head) if as_json else "\n".join(head_lines(head)))  # noqa: T201
        problems = []
        async for row in read_rows(store, log, tokens=tokens):
            print(json.dumps(row) if as_json else row_line(row))  # noqa: T201
            if "problem" in row:
                problems.append(row["problem"])
        if problems:
            more = f". So it is with {len(problems) - 1} more" if len(problems) > 1 else ""
            raise _Unreadable(problems[0] + more)
    finally:
        await store.close()


class _Unreadable(StoreError):
    """A key holds what no release of LAPS-SD writes."""


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Raise _Unreadable for what is read inside and has a form that the store does not write."""
    try:
        yield
    except (KeyError, ValueError, OverflowError, struct.error) as error:
        cause: Exception = error
    except StoreError as error:
        if "WRONGTYPE" not in str(error):
            raise
        cause = error
    else:
        return
    raise _Unreadable(
        f"{what} cannot be read: LAPS-SD wrote no such value ({type(cause).__name__}: {cause}). "
        "Another program uses the names of this shard, or the record is damaged"
    ) from cause


async def read_head(store: Store) -> tuple[dict[str, Any], Log]:
    """Return what the record holds as a whole, and its log. Raises StoreUnavailable, SchemaMismatch, and
    StoreError for a key with the value of another program.
    """
    keys = store.keys
    with _readable(keys.schema_version()):
        version = await store.transport.get(keys.schema_version())
    if version not in _READABLE:
        found = (version or b"").decode(errors="replace")
        raise SchemaMismatch(
            f"the record has schema version {found}, this release reads {SCHEMA_VERSION}: use the release that wrote it"
        )
    with _readable(keys.leader()):
        leader = await store.leader()
    with _readable(keys.incarnation()):
        incarnation = await store.transport.get(keys.incarnation())
        incarnation_id = incarnation and incarnation.decode()
    with _readable(keys.log()):
        entries = await store.reader.log_entries()
        log = read_log(entries)
    with _readable(keys.unfinished()):
        unfinished = await store.count_unfinished()
    head = {
        "shard": keys.shard,
        "schema_version": version and int(version),
        "leader": leader and leader.owner,
        "leader_epoch": leader and leader.epoch,
        "incarnation": incarnation_id,
        "log_entries": len(entries),
        "log_bytes": sum(len(packed) for _, fields in entries for packed in fields.values()),
        "unfinished": unfinished,
    }
    return head, log


async def read_rows(store: Store, log: Log, *, tokens: bool = False) -> AsyncIterator[dict[str, Any]]:
    """Yield each unfinished request. Those that lack keys or tokens have the state `incomplete`, and those with
    keys of another program the state `unreadable` and the reason as `problem`.

    `log`: read before. `tokens`: with the token ids of prompt and output. Raises StoreUnavailable, and StoreError for
    an index of another program.
    """
    now_s = await store.transport.server_time_s() or time.time()
    index = store.reader.index()
    while True:
        with _readable(store.keys.unfinished()):
            request_ids = await anext(index, None)
        if request_ids is None:
            return
        for request_id, stored in zip(
            request_ids, await _requests(store, request_ids, payload=tokens), strict=True
        ):
            if isinstance(stored, _Unreadable):
                yield _without_fields(request_id, "unreadable") | {"problem": str(stored)}
            elif stored is None:
                yield _without_fields(request_id, "incomplete")
            elif stored.end is None:
                request = log.continued(stored)
                row: dict[str, Any] = {
                    "request_id": request_id,
                    "tenant": request.tenant,
                    "state": "queued" if request.worker_id is None else "leased",
                    "worker": request.worker_id,
                    "lease_epoch": request.lease_epoch,
                    "committed_tokens": len(request.committed_ids),
                    "rounds": request.standing.rounds,
                    "level": request.standing.level,
                    "age_s": round(now_s - request.arrival_unix_ms / 1000, 1),
                    "pair": request.pair or None,
                }
                if tokens:
                    row |= {"prompt_ids": list(request.prompt_ids), "committed_ids": request.committed_ids}
                yield row


def _without_fields(request_id: str, state: str) -> dict[str, Any]:
    return dict.fromkeys((*_COLUMNS, "pair")) | {"request_id": request_id, "state": state}


async def _requests(
    store: Store, request_ids: Sequence[str], *, payload: bool
) -> Sequence[StoredRequest | _Unreadable | None]:
    """Return requests as `Reader.requests` does, or why one of them cannot be read."""
    try:
        with _readable(f"the request {request_ids[0]}"):
            return await store.reader.requests(request_ids, payload=payload)
    except _Unreadable as error:
        if len(request_ids) > 1:
            return [
                one
                for request_id in request_ids
                for one in await _requests(store, [request_id], payload=payload)
            ]
        return [error]


def head_lines(head: dict[str, Any]) -> list[str]:
    """Return the record as a whole for a person, with the titles of the lines that follow."""
    leader = f"{head['leader']} (epoch {head['leader_epoch']})" if head["leader"] else "none"
    return [
        f"shard           {head['shard']}",
        f"schema version  {head['schema_version'] or 'none: there is no record of this shard'}",
        f"leader          {leader}",
        f"incarnation     {head['incarnation'] or 'none'}",
        f"log             {head['log_entries']} entries, {head['log_bytes']} bytes",
        f"unfinished      {head['unfinished']}",
        "",
        row_line({name: title for name, (title, _) in _COLUMNS.items()}),
    ]


def row_line(row: dict[str, Any]) -> str:
    """Return a request for a person."""
    return " ".join(
        f"{'-' if row[name] is None else row[name]:{width}}" for name, (_, width) in _COLUMNS.items()
    ).rstrip()


if __name__ == "__main__":
    app(prog_name="laps-sd record")
