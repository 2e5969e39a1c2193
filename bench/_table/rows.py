"""Rows of the table: the speed of each engine at each task, and ratios paired by turn."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench._table.plan import BY_THREADS, OURS, PREFILL, Entry, Session
from bench._table.turns import Measured
from bench.report import columns, ratio_interval

KEY = ("model", "comparison", "threads", "task", "engine", "precision")


def rows_of(session: Session, found: Mapping[Entry, Measured]) -> list[dict[str, Any]]:
    """Return a row for each engine and task.

    `ratio` is the speed of our engine over that of the row. By threads it is the other way round: the
    speed of the row over that on one thread.
    """
    rows = []
    for entry, measured in found.items():
        for task in session.tasks:
            speeds = measured.speeds.get(task, [])
            row: dict[str, Any] = {
                "model": session.model.name,
                "comparison": session.comparison,
                "threads": entry.threads,
                "task": name_of(task),
                "engine": entry.engine,
                "precision": entry.label,
                "clock": "wall" if session.by_wall_clock else "cpu",
                "tokens_per_s": statistics.median(speeds) if speeds else None,
                **columns("ratio", None),
                "turns": len(speeds),
                "not_run": None if speeds else (measured.not_run or "not measured"),
                "version": measured.version,
            }
            ours = found[session.reference].speeds.get(task, [])
            if entry != session.reference and len(speeds) == len(ours) > 1:
                pairs = list(zip(ours, speeds, strict=True))
                if session.comparison == BY_THREADS:
                    pairs = [(theirs, one) for one, theirs in pairs]
                row |= columns("ratio", ratio_interval(pairs))
            rows.append(row)
    return rows


def left_out(session: Session, reason: str) -> list[dict[str, Any]]:
    """Return the rows of a session that was not run."""
    return rows_of(session, {entry: Measured(not_run=reason) for entry in session.entries})


def name_of(task: int | str) -> str:
    """Return the name of a task in rows."""
    return PREFILL if task == PREFILL else f"batch {task}"


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what distinguishes a row."""
    return tuple(row[name] for name in KEY)


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the old rows, those that were measured again replaced, and the new ones."""
    found = {key_of(row): row for row in old}
    found.update({key_of(row): row for row in new})
    return list(found.values())


def is_ours(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of our engine in the precision that is compared."""
    return bool(row["engine"] == OURS and row["precision"] == row["comparison"])
