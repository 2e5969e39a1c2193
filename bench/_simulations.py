"""Many simulations at once, one process each, with progress; and where their recorded data lies."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.report import progress

BESIDE = Path(__file__).parents[2] / "shared" / "data"
LINES_OF_PROGRESS = 50
"""Lines of progress where there is no terminal to draw a bar on."""

Key = TypeVar("Key")
Found = TypeVar("Found")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--data` and `--processes`."""
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(given) if (given := os.environ.get("LAPS_SD_BENCH_DATA")) else BESIDE,
        help="folder with the recordings (traces/, acceptance/, prompts/); also LAPS_SD_BENCH_DATA; "
        "default: shared/data beside the checkout",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        help="simulations at once (default: one per core)",
    )


def run_all(
    simulate: Callable[..., Found],
    tasks: Mapping[Key, tuple[Any, ...]],
    processes: int,
    name_of: Callable[[Key], str],
) -> dict[Key, Found]:
    """Run `simulate` with the arguments of each task, in that number of processes; return the results in the
    order of the tasks.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    began_s = time.monotonic()
    found: dict[Key, Found] = {}
    with (
        Progress(*columns, console=console) as shown,
        ProcessPoolExecutor(processes) as pool,
    ):
        bar = shown.add_task("simulating", total=len(tasks))
        futures = {pool.submit(simulate, *arguments): key for key, arguments in tasks.items()}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                key = futures[future]
                found[key] = future.result()
                shown.update(bar, advance=1, description=name_of(key))
                if not console.is_terminal and done % max(1, len(tasks) // LINES_OF_PROGRESS) == 0:
                    spent_min = (time.monotonic() - began_s) / 60
                    progress(f"{done}/{len(tasks)} simulations, {name_of(key)}; {spent_min:.1f} minutes")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {key: found[key] for key in tasks}
