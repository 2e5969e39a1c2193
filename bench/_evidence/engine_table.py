"""Section of docs/evidence/engine.md, and a part of README.md, from `laps-sd bench engine --table`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bench._evidence.phrases import goals_met
from bench._evidence.results import Row, read_rows
from bench._markdown import table
from bench._table.goals import goals
from bench._table.plan import BY_THREADS, NAMES, OURS, threads_in_words
from bench._table.rows import is_ours
from bench._table.tables import heading, place_of
from bench.report import as_text

README_MODEL, README_PRECISIONS = "qwen2.5-0.5b", ("bfloat16", "int8", "int4")
"""The rows that a user would meet: of a model of half a billion weights, on all threads that were measured."""


def engine_table(path: Path) -> Iterator[str]:
    """Yield the section on precisions and threads."""
    rows, source, about = read_rows(path)
    versions = _versions(rows)
    yield f"Without speculation, each engine in a process of its own, in turns; on {about['cpu_name']} with {about['machine_threads']} threads and {about['cpu']}. {source}."
    yield "Tokens per second: of CPU time on one thread, of wall clock on several. In brackets: the speed of ours over it, with its 95 % interval;"
    yield "*prefill* is one prompt, up to its first token. Of each precision of weights ours is the first row, and what it gains over bfloat16 the last."
    yield f"{', '.join(f'{NAMES[engine]} {version}' for engine, version in versions.items() if engine != OURS)}; ours: {versions.get(OURS)}."
    for model in about["models"]:
        if all(row["model"] != model for row in rows):
            continue  # it was not asked for
        yield from ("", f"**{heading(about, model)}.**")
        here = [row for row in rows if row["model"] == model and row["comparison"] != BY_THREADS]
        for threads in sorted({row["threads"] for row in here}):
            yield from _speeds([row for row in here if row["threads"] == threads], threads_in_words(threads))
        several = [row for row in rows if row["model"] == model and row["comparison"] == BY_THREADS]
        if several:
            yield from ("", "Ours by threads, wall clock; in brackets its speed over that on one thread.")
            yield from _speeds(several, "threads")
    not_run = [row for row in rows if row["not_run"]]
    if not_run:
        yield from ("", "Not run:", "")
        yield from dict.fromkeys(
            f"- {row['model']}, {threads_in_words(row['threads'])}: {NAMES[row['engine']]} {row['precision']}: {row['not_run']}"
            for row in not_run
        )
        yield ""
    yield from goals_met(
        goals(rows),
        "Ours is to decode as fast as OpenVINO and vLLM in bfloat16, prefill at 0.9 of them, and reach 0.95 of OpenVINO with int8 and int4",
    )


def in_readme(path: Path) -> Iterator[str]:
    """Yield the rows of the table that README.md shows, if that model was measured."""
    rows, _, about = read_rows(path)
    if README_MODEL not in about["models"]:
        return
    here = rows_of_readme(rows)
    yield f"A model of the shape of Qwen2.5-0.5B ({about['models'][README_MODEL]['parameters'] / 1e6:.0f} M weights) on {threads_in_words(here[0]['threads'])} of {about['cpu_name']}, tokens per second"
    yield "without speculation; in brackets the speed of ours over it ([all figures](docs/evidence/engine.md#by-precision-of-the-weights-and-threads)):"
    yield from _speeds(here, "weights")


def rows_of_readme(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the model that README.md shows, on the most threads that were measured."""
    threads = max(row["threads"] for row in rows if row["not_run"] is None)
    return [
        row
        for row in rows
        if row["model"] == README_MODEL
        and row["threads"] == threads
        and row["comparison"] in README_PRECISIONS
        and (is_ours(row) or row["precision"] != "bfloat16" or row["comparison"] == "bfloat16")
    ]


def _speeds(rows: Sequence[Row], title: str) -> Iterator[str]:
    """Yield a table with a row for each engine and precision, and a column for each task."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    by_place = {(*place_of(row), row["task"]): row for row in rows}
    yield from table(
        (title, "engine", *tasks),
        (
            (
                threads_in_words(place[3]) if place[0] == BY_THREADS else place[0],
                f"{NAMES[place[1]]} {place[2]}",
                *(_cell(by_place.get((*place, task))) for task in tasks),
            )
            for place in dict.fromkeys(map(place_of, rows))
        ),
    )


def _versions(rows: Sequence[Row]) -> dict[str, str]:
    """Return the version of each engine; of ours the path that served on the most threads."""
    ordered = sorted((row for row in rows if row["version"]), key=lambda row: int(row["threads"]))
    return {row["engine"]: row["version"] for row in ordered}


def _cell(row: Row | None) -> str:
    if row is None or row["tokens_per_s"] is None:
        return "–"
    speed = f"{row['tokens_per_s']:,.0f}"
    return speed if row["ratio"] is None else f"{speed} ({as_text(row, 'ratio', 2)})"
