"""Readers of public recordings of arrivals, lengths and acceptance. A file whose name ends in `.gz` is
decompressed.

Of a trace the first line identifies the format:
  * CSV with a header that contains `arrival_s`, `input_tokens` and `output_tokens` (Azure's trace in this
    form, or any other).
  * Mooncake's JSON lines: `timestamp` (ms), `input_length`, `output_length`, and `hash_ids` for the blocks of a
    prompt. Its clock ticks about every 3 s, which would turn single arrivals into bursts; requests of one tick
    are spread evenly over the time to the next.

Acceptance comes as JSON lines: `run`, `task`, `category`, `accept` (tokens of each round, the bonus token included).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from laps_sd.contract.prompt_blocks import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One line of a trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: bytes = b""
    """Names of the blocks of the prompt, as `laps_sd.contract.prompt_blocks` packs them; empty: not recorded."""


@dataclass(frozen=True, slots=True)
class RecordedAcceptance:
    """Rounds of one recorded request."""

    run: str
    task: str
    category: str
    paces: tuple[int, ...]
    """Tokens per round; a round without tokens, which some harnesses log at the end, is left out."""


MOONCAKE_BLOCK = 512
"""Tokens in the block of each id of Mooncake's `hash_ids`."""


class TraceError(ValueError):
    """Error for a file in an unknown format; the message names the file and the line."""


def _lines(path: Path) -> Iterator[str]:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from file
    else:
        with path.open(encoding="utf-8") as file:
            yield from file


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file with their line numbers. Raises TraceError."""
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"{path}, line {number}: no JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise TraceError(f"{path}, line {number}: a JSON object was expected")
        yield number, row


def read_column(path: Path, column: str) -> list[int]:
    """Return one integer column of a CSV file with a header."""
    rows = csv.DictReader(io.StringIO("".join(_lines(path))))
    if column not in (rows.fieldnames or ()):
        raise TraceError(f"{path} has no column {column!r}; there are: {', '.join(rows.fieldnames or ())}")
    return [_whole(path, number, row[column], column) for number, row in enumerate(rows, start=2)]


def read_texts(path: Path, name: str) -> list[str]:
    """Return one text field of a JSON-lines file."""
    return [str(row[name]) for _, row in json_lines(path) if name in row]


def read_trace(path: Path) -> list[TracedRequest]:
    """Return arrivals with lengths, by time; requests without an output are left out, as nothing was
    generated.
    """
    first = next(_lines(path), "")
    rows = _read_mooncake(path) if first.lstrip().startswith("{") else _read_csv(path)
    found = sorted((row for row in rows if row.output_tokens > 0), key=lambda row: row.arrival_s)
    if not found:
        raise TraceError(f"{path} holds no requests")
    return found


def _read_csv(path: Path) -> list[TracedRequest]:
    rows = csv.DictReader(io.StringIO("".join(_lines(path))))
    wanted = ("arrival_s", "input_tokens", "output_tokens")
    missing = [name for name in wanted if name not in (rows.fieldnames or ())]
    if missing:
        raise TraceError(f"{path} has no column {missing[0]!r}; a trace needs {', '.join(wanted)}")
    found = []
    for number, row in enumerate(rows, start=2):
        try:
            arrival_s = float(row["arrival_s"])
        except (TypeError, ValueError) as error:
            raise TraceError(f"{path}, line {number}: arrival_s is no number") from error
        if not 0 <= arrival_s < float("inf"):
            raise TraceError(f"{path}, line {number}: arrival_s must not be negative or infinite")
        tokens, output = (_whole(path, number, row[name], name) for name in wanted[1:])
        found.append(TracedRequest(arrival_s, tokens, output))
    return found


def _read_mooncake(path: Path) -> list[TracedRequest]:
    found = []
    for number, row in json_lines(path):
        for name in ("timestamp", "input_length", "output_length"):
            if name not in row:
                raise TraceError(f"{path}, line {number}: {name!r} is missing")
        tokens, output = (_whole(path, number, row[name], name) for name in ("input_length", "output_length"))
        blocks = _names_of(row.get("hash_ids") or (), tokens)
        found.append(TracedRequest(float(row["timestamp"]) / 1000, tokens, output, blocks))
    ticks = [list(tick) for _, tick in groupby(found, key=lambda row: row.arrival_s)]
    gaps = [after[0].arrival_s - tick[0].arrival_s for tick, after in pairwise(ticks)]
    gaps.append(gaps[-1] if gaps else 0.0)
    return [
        replace(row, arrival_s=row.arrival_s + gap_s * place / len(tick))
        for tick, gap_s in zip(ticks, gaps, strict=True)
        for place, row in enumerate(tick)
    ]


def _names_of(ids: Sequence[int], tokens: int) -> bytes:
    """Return names for the blocks of a prompt; each of Mooncake's ids names 512 tokens and those before them."""
    parts = MOONCAKE_BLOCK // BLOCK_TOKENS
    names = array("Q", [number * parts + part for number in ids for part in range(parts)])
    return names[: tokens // BLOCK_TOKENS].tobytes()


def read_acceptance(path: Path) -> list[RecordedAcceptance]:
    """Return the recorded rounds of requests."""
    found = []
    for number, row in json_lines(path):
        accept = row.get("accept")
        if not isinstance(accept, list) or not all(
            isinstance(tokens, int) and tokens >= 0 for tokens in accept
        ):
            raise TraceError(f"{path}, line {number}: 'accept' must be a list of whole numbers")
        paces = tuple(tokens for tokens in accept if tokens)
        if paces:
            run, task, category = (str(row.get(name, "")) for name in ("run", "task", "category"))
            found.append(RecordedAcceptance(run, task, category, paces))
    if not found:
        raise TraceError(f"{path} holds no recorded rounds")
    return found


def read_quantiles(path: Path, column: str) -> list[tuple[float, list[float]]]:
    """Return ServeGen's client summaries: (request rate, quantiles of `column`) of each client and period
    with such quantiles.
    """
    found = []
    for _, client in json_lines(path):
        rates: dict[int, float] = {}
        periods = client.get("lengths") or {}
        starts = sorted(int(start) for start in periods)
        for start_s, rate_per_s, *_ in client.get("windows", []):
            before = [start for start in starts if start <= start_s]
            if before:
                rates[before[-1]] = rates.get(before[-1], 0.0) + rate_per_s
        for start, rate in rates.items():
            quantiles = periods[str(start)].get(column)
            if quantiles:
                found.append((rate, [float(value) for value in quantiles]))
    if not found:
        raise TraceError(f"{path} holds no quantiles of {column!r}")
    return found


SERVEGEN_LEVELS = (
    0.0, 0.001, 0.005, 0.01, 0.025, *(step / 20 for step in range(1, 20)), 0.975, 0.99, 0.995, 0.999, 1.0,
)  # fmt: skip
"""Levels of ServeGen's 29 quantiles."""


def _whole(path: Path, number: int, value: object, name: str) -> int:
    try:
        whole = int(str(value))
    except ValueError as error:
        raise TraceError(f"{path}, line {number}: {name} is no whole number") from error
    if whole < 0:
        raise TraceError(f"{path}, line {number}: {name} must not be negative")
    return whole
