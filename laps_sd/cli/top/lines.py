"""Readings of shards as rows and lines of text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from laps_sd.cli.states import request_state, worker_state
from laps_sd.cli.top.source import Reading
from laps_sd.v1 import admin_pb2

__all__ = ["REQUESTS", "WORKERS", "Head", "Key", "Row", "filtered", "plain", "requests", "summary", "workers"]

Key = tuple[int, str]
"""Position of a shard, and the id of a request or worker of it."""


@dataclass(frozen=True, slots=True)
class Head:
    """One column."""

    title: str
    rank: int
    """0: always shown. Of the others the one with the highest rank is left out first."""
    is_number: bool = False
    shortest: int | None = None
    """Characters to which its cells may be cut where the terminal is narrow; None: they are never cut."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row: `cells` to show, and `values` to sort by, one for each column."""

    key: Key
    cells: tuple[str, ...]
    values: tuple[str | float, ...]


REQUESTS = (
    Head("#", 7, is_number=True),
    Head("request", 0),
    Head("shard", 8),
    Head("tenant", 6, shortest=6),
    Head("state", 1),
    Head("level", 3, is_number=True),
    Head("age s", 1, is_number=True),
    Head("attained s", 5, is_number=True),
    Head("tokens", 2, is_number=True),
    Head("worker", 4),
    Head("ordered by", 9, shortest=12),
)
WORKERS = (
    Head("worker", 0),
    Head("shard", 8),
    Head("device", 9, shortest=8),
    Head("state", 1),
    Head("slots used", 2, is_number=True),
    Head("waiting", 5, is_number=True),
    Head("free KV", 4, is_number=True),
    Head("accepted", 3, is_number=True),
    Head("tokens/s", 2, is_number=True),
    Head("rounds", 10, is_number=True),
)


def plain(text: str) -> str:
    """Return the text without control characters: names come from clients and workers."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def requests(readings: Iterable[tuple[int, Reading]]) -> list[Row]:
    """Return the requests of all shards, best first."""
    rows = []
    for at, reading in readings:
        shard = plain(reading.shard.shard)
        names = {worker.worker_id: _name(worker) for worker in reading.workers.workers}
        for place, entry in enumerate(reading.queue.entries, start=1):
            row = _row(
                (at, entry.request_id),
                (place, str(place)),
                plain(entry.request_id),
                shard,
                plain(entry.tenant),
                request_state(entry.state),
                (entry.level, str(entry.level)) if entry.HasField("level") else (-1, ""),
                (entry.waiting_s, f"{entry.waiting_s:.1f}"),
                (entry.attained_s, f"{entry.attained_s:.2f}"),
                (entry.emitted_tokens, str(entry.emitted_tokens)),
                names.get(entry.worker_id) or plain(entry.worker_id),
                plain(entry.ordered_by),
            )
            rows.append(row)
    rows.sort(key=lambda row: (row.values[0], row.key))
    return rows


def workers(readings: Iterable[tuple[int, Reading]]) -> list[Row]:
    """Return the workers of all shards."""
    rows = []
    for at, reading in readings:
        shard = plain(reading.shard.shard)
        for worker in reading.workers.workers:
            waiting = max(0, worker.listed - worker.running)
            row = _row(
                (at, worker.worker_id),
                _name(worker),
                shard,
                plain(worker.device),
                worker_state(worker),
                (worker.running, f"{worker.running}/{worker.slots}"),
                (waiting, str(waiting)),
                (worker.free_target_blocks, f"{worker.free_target_blocks}/{worker.target_blocks}"),
                (worker.acceptance, f"{worker.acceptance:.0%}"),
                (worker.tokens_per_s, f"{worker.tokens_per_s:.1f}"),
                (worker.rounds, str(worker.rounds)),
            )
            rows.append(row)
    return rows


def _row(key: Key, *columns: str | tuple[float, str]) -> Row:
    """Return a row. Each column is its text, or a number to sort by and its text."""
    pairs = [(column, column) if isinstance(column, str) else column for column in columns]
    return Row(key, tuple(cell for _, cell in pairs), tuple(value for value, _ in pairs))


def _name(worker: admin_pb2.WorkerStatus) -> str:
    return plain(worker.worker_name or worker.worker_id)


def filtered(rows: Sequence[Row], heads: Sequence[Head], text: str) -> Sequence[Row]:
    """Return the rows that have every word of the text in some cell; `column:word` looks in one column only.

    Upper and lower case are the same.
    """
    for word in text.lower().split():
        title, colon, wanted = word.partition(":")
        at = next((at for at, head in enumerate(heads) if colon and head.title.startswith(title)), None)
        if at is not None and heads[at].is_number:  # level:1 is not level 10
            rows = [row for row in rows if row.cells[at] == wanted] if wanted else rows
        elif at is not None:
            rows = [row for row in rows if wanted in row.cells[at].lower()]
        else:
            rows = [row for row in rows if any(word in cell.lower() for cell in row.cells)]
    return rows


def summary(readings: Sequence[Reading]) -> list[str]:
    """Return the totals: for one shard in detail, for several a line each and their levels together."""
    if not readings:
        return ["no shard has answered yet"]
    lines = [line for reading in readings for line in _shard_lines(reading, alone=len(readings) == 1)]
    depths: list[int] = []
    for reading in readings:
        for level, depth in enumerate(reading.shard.depth_by_level):
            depths += [0] * (level + 1 - len(depths))
            depths[level] += depth
    if depths:  # policies without levels have one
        text = "  ".join(f"{at}: {depth}" for at, depth in enumerate(depths) if depth)
        lines.append(f"waiting by level  {text or 'none'}")
    if len(readings) == 1 and (errors := readings[0].shard.estimate_errors):
        text = "  ".join(f"{one.moment} {one.median_ratio:.2g} ({one.p90_ratio:.2g})" for one in errors)
        lines.append(f"actual/estimated time (p90)  {text}")
    return lines


def _shard_lines(reading: Reading, *, alone: bool) -> list[str]:
    shard, found = reading.shard, reading.workers.workers
    running = sum(worker.running for worker in found)
    total = reading.queue.total
    drafted = [worker.acceptance for worker in found if worker.running and worker.acceptance]
    connected = sum(worker.connected for worker in found)
    what = [
        f"shard {plain(shard.shard)}",
        f"{total} {'request' if total == 1 else 'requests'} ({running} running)",
        f"{connected} {'worker' if connected == 1 else 'workers'}",
        f"{sum(worker.tokens_per_s for worker in found):.0f} tokens/s",
    ]
    more = [f"backlog {shard.backlog_s:.1f} s", f"{shard.preemptions} preemptions"]
    if drafted:
        more.insert(0, f"{sum(drafted) / len(drafted):.0%} accepted")
    if shard.prompt_tokens:
        more.append(f"{shard.cached_prompt_tokens / shard.prompt_tokens:.0%} of prompt tokens cached")
    if not alone:
        return ["  ".join([*what, *more])]
    return ["  ".join([*what, f"policy {plain(shard.policy)}"]), "  ".join(more)]
