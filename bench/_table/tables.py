"""The tables that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench._table.plan import BY_THREADS, NAMES, threads_in_words
from bench.report import as_text, table


def tables(rows: Sequence[dict[str, Any]], about: Mapping[str, Any]) -> None:
    """Print one table for each model and number of threads, and one by threads; then what did not run."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for model in dict.fromkeys(row["model"] for row in rows):
        print(heading(about, model))
        here = [row for row in rows if row["model"] == model and row["comparison"] != BY_THREADS]
        for threads in dict.fromkeys(row["threads"] for row in here):
            clock = "CPU time" if threads == 1 else "wall clock"
            shown = [row for row in here if row["threads"] == threads]
            table(
                f"{model}, {threads_in_words(threads)}: tokens per second of {clock}; ours / it",
                list(_lines(shown, tasks, "ours / it")),
                width=170,
            )
        by_threads = [row for row in rows if row["model"] == model and row["comparison"] == BY_THREADS]
        if by_threads:
            table(
                f"{model}, ours by threads: tokens per second of wall clock; it / one thread",
                list(_lines(by_threads, tasks, "it / one thread")),
                width=170,
            )
    for reason in dict.fromkeys(
        f"{row['model']}, {threads_in_words(row['threads'])}: {NAMES[row['engine']]} {row['precision']} did not run: {row['not_run']}"
        for row in rows
        if row["not_run"] is not None
    ):
        print(reason)


def heading(about: Mapping[str, Any], model: str) -> str:
    """Return what a model is, and what is done with it."""
    facts = about["models"][model]
    return (
        f"{model}: {facts['parameters'] / 1e6:.1f} M weights, {facts['bytes'] / 1e6:.0f} MB in bfloat16; prompts of "
        f"{facts['prompt_tokens'][0]} to {facts['prompt_tokens'][1]} tokens, {facts['generated_tokens']} generated; "
        f"prefill of {about['long_prompt_tokens']:,} tokens; without speculation"
    )


def _lines(rows: Sequence[Mapping[str, Any]], tasks: Sequence[str], label: str) -> list[dict[str, str]]:
    by_place = {(place_of(row), row["task"]): row for row in rows}
    return [
        {
            "weights": place[0],
            "engine": f"{NAMES[place[1]]} {place[2]}",
            "threads": str(place[3]),
            **{task: _speed(by_place.get((place, task))) for task in tasks},
            **{f"{task}, {label}": as_text(by_place.get((place, task), {}), "ratio", 2) for task in tasks},
        }
        for place in dict.fromkeys(map(place_of, rows))
    ]


def place_of(row: Mapping[str, Any]) -> tuple[str, str, str, int]:
    """Return what a line of the table is for: comparison, engine, precision and threads."""
    return row["comparison"], row["engine"], row["precision"], row["threads"]


def _speed(row: Mapping[str, Any] | None) -> str:
    speed = None if row is None else row["tokens_per_s"]
    return "–" if speed is None else f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"
