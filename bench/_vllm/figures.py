"""Figures of one run, and ratios of runs paired by setting and seed."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from bench._vllm.modes import FCFS, PRIORITY
from bench.report import Interval, columns, quantile, ratio_interval

BURSTS = "all bursts"


def figures(latencies: Sequence[float]) -> dict[str, float]:
    """Return mean and quantiles of latencies."""
    ordered = sorted(latencies)
    at = {f"p{share}": quantile(ordered, share / 100) for share in (50, 90, 99)}
    return {"mean": statistics.fmean(ordered), **at, "worst": ordered[-1]}


def ratio(rows: Sequence[Mapping[str, Any]], mode: str, of: str, figure: str) -> Interval | None:
    """Return a mode's figure over that of another mode, paired by setting and seed; None with fewer than two seeds.

    The settings of a seed count as one pair, the geometric mean of their ratios: smaller bursts of a seed are parts of its
    larger ones.
    """
    by_run = {(row["setting"], row["seed"], row["mode"]): row for row in rows}
    of_seed: dict[int, list[float]] = defaultdict(list)
    for (setting, seed, name), row in by_run.items():
        if name == mode and (theirs := by_run.get((setting, seed, of))):
            of_seed[seed].append(row[figure] / theirs[figure])
    pairs = [(statistics.geometric_mean(ratios), 1.0) for ratios in of_seed.values()]
    return ratio_interval(pairs) if len(pairs) > 1 else None


def compared(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of ratios for each setting, all bursts together, and mode, by how it was measured."""
    found = []
    for measured in dict.fromkeys(
        row["measured"] for row in rows if "p99" in row and row["measured"] != "smoke"
    ):
        of_kind = [row for row in rows if row["measured"] == measured]
        settings = list(dict.fromkeys(row["setting"] for row in of_kind))
        for setting in (BURSTS, *settings):
            chosen = [row for row in of_kind if setting in (row["setting"], _pool(row["setting"]))]
            modes = dict.fromkeys(row["mode"] for row in chosen)
            found += [_compared(chosen, measured, setting, mode) for mode in modes]
    return found


def _pool(setting: str) -> str:
    return BURSTS if setting.startswith("burst") else ""


def _compared(rows: Sequence[Mapping[str, Any]], measured: str, setting: str, mode: str) -> dict[str, Any]:
    own = [row for row in rows if row["mode"] == mode]
    row: dict[str, Any] = {
        "compared": measured,
        "setting": setting,
        "mode": mode,
        "runs": len(own),
        "mean": statistics.fmean(each["mean"] for each in own),
        "p99": statistics.fmean(each["p99"] for each in own),
    }
    for name, of, figure in (
        ("ratio_fcfs", FCFS, "mean"),
        ("p99_ratio_fcfs", FCFS, "p99"),
        ("ratio_priority", PRIORITY, "mean"),
        ("p99_ratio_priority", PRIORITY, "p99"),
    ):
        between = None if mode == of else ratio(rows, mode, of, figure)
        row |= columns(name, between)
    return row
