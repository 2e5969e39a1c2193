"""Output of every benchmark: progress, a table, one summary line, JSON rows, an exit code."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# 97.5 % quantiles of Student's t by degrees of freedom 1 … 30.
_T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

PATHS = {
    "--vllm": "PYTHON", "--openvino": "PYTHON", "--llamacpp": "PYTHON", "--cache": "DIR",
    "--compiled": "DIR", "--lengths": "FILE", "--logs": "DIR", "--trace": "FILE",
}  # fmt: skip
"""Options of benchmarks with a path of this machine, and what results have in its place."""


@dataclass(frozen=True)
class Interval:
    """Estimate with its 95 % confidence interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} [{self.low:.3f}, {self.high:.3f}]"


def quantile(ordered: Sequence[float], level: float) -> float:
    """Return the smallest of the values, given in ascending order, that at least this share does not exceed
    (nearest rank).
    """
    # Rounded, because 0.07 · 100 is a little more than 7.
    return ordered[max(1, math.ceil(round(level * len(ordered), 6))) - 1]


def interval(samples: Sequence[float]) -> Interval:
    """Return the mean and Student's t interval of independent samples (two at least)."""
    mean = statistics.fmean(samples)
    freedom = len(samples) - 1
    half = (_T975[freedom - 1] if freedom <= len(_T975) else 1.96) * statistics.stdev(samples)
    half /= math.sqrt(len(samples))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Return the ratio of paired positive figures, first over second: geometric mean, and Student's t interval
    on the logarithm, where a ratio and its inverse weigh the same. One pair has no interval: its ends are equal.
    """
    if len(pairs) == 1:
        alone = pairs[0][0] / pairs[0][1]
        return Interval(alone, alone, alone)
    found = interval([math.log(ours / theirs) for ours, theirs in pairs])
    return Interval(math.exp(found.middle), math.exp(found.low), math.exp(found.high))


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the median with its 95 % interval from order statistics: the effect of a noisy neighbour on one
    sample moves it little.
    """
    ordered = sorted(samples)
    n = len(ordered)
    # The k-th smallest and largest enclose the median unless fewer than k samples lie on one side of it.
    outside, k = 0.0, 0
    while outside + 2 * math.comb(n, k) / 2**n <= 0.05:
        outside += 2 * math.comb(n, k) / 2**n
        k += 1
    k = max(k, 1)
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[n - k])


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's tau-b (Kendall 1945): concordant less discordant pairs, over the geometric mean of the
    pairs that are not tied in either; 0 where all are tied.
    """
    import numpy as np

    x = np.sign(np.subtract.outer(np.asarray(first), np.asarray(first)))
    y = np.sign(np.subtract.outer(np.asarray(second), np.asarray(second)))
    pairs = math.sqrt(float(np.sum(x * x)) * float(np.sum(y * y)))
    return float(np.sum(x * y)) / pairs if pairs else 0.0


def columns(name: str, found: Interval | None) -> dict[str, float | None]:
    """Return the three columns that an interval has in a row, which `as_text` reads."""
    if found is None:
        return dict.fromkeys((name, f"{name}_low", f"{name}_high"))
    return {name: found.middle, f"{name}_low": found.low, f"{name}_high": found.high}


def as_text(row: Mapping[str, Any], name: str, digits: int = 3) -> str:
    """Return an interval of a row as text: nothing if the row has none, the middle alone if it has no ends."""
    middle, low, high = (row.get(f"{name}{end}") for end in ("", "_low", "_high"))
    if middle is None:
        return ""
    return f"{middle:.{digits}f}" + (
        "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
    )


def progress(line: str) -> None:
    """Print one line on stderr, so that a waiting person sees the progress and a pipe stays clean."""
    print(line, file=sys.stderr, flush=True)


def table(title: str, rows: Sequence[dict[str, Any]], *, width: int = 100) -> None:
    """Print rows with the same keys for people; a terminal that is narrower wraps them, so that no name or
    figure is cut off.
    """
    shown = Table(title=title, title_justify="left")
    for key in rows[0]:
        shown.add_column(key, justify="left" if isinstance(rows[0][key], str) else "right")
    for row in rows:
        shown.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    console = Console()
    needed = console.measure(shown, options=console.options.update(max_width=1000)).maximum
    Console(width=max(width, needed, console.width)).print(shown)


def numbers(text: str) -> list[int]:
    """Return the numbers of an option like `--batch 1,4,16`. Raise ValueError if it is not a list of whole
    numbers.
    """
    return [int(part) for part in text.split(",") if part]


def command_line(benchmark: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's options, of which `--json` is one."""
    parser = argparse.ArgumentParser(
        prog=f"laps-sd bench {benchmark}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser


def about(benchmark: str, given: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the description of a run for its results file: the date, and the command without paths of this
    machine, and without the options for its results, for the folder of recordings, and for the pieces and processes in
    which it was made.
    """
    said, options = ["laps-sd bench", benchmark], iter(sys.argv[1:] if given is None else given)
    for option in options:
        name, equals, _ = option.partition("=")
        if name in ("--json", "--figure", "--runs", "--data", "--processes"):
            if not equals:
                next(options, None)
        elif name in PATHS:
            said.append(f"{name}{equals or ' '}{PATHS[name]}")
            if not equals:
                next(options, None)
        elif option != "--resume":
            said.append(option)
    return {"command": " ".join(said), "date": datetime.date.today().isoformat()}


def finish(
    rows: Sequence[dict[str, Any]],
    *,
    json_file: Path | None,
    summary: str,
    met: bool | None,
    about: Mapping[str, Any] | None = None,
) -> int:
    """Write the rows (and `about` them), each on a line of its own; print the summary line, return the exit
    code. `met`: None if the benchmark has no goal.
    """
    if json_file is not None:
        head = "" if about is None else f'"about": {json.dumps(about)},\n'
        lines = ",\n".join(json.dumps(row) for row in rows)
        json_file.write_text(f'{{{head}"rows": [\n{lines}\n]}}\n')
    if met is None:
        print(f"no goal: {summary}")
        return 0
    print(("goal met: " if met else "GOAL MISSED: ") + summary)
    return 0 if met else 1
