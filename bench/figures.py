"""Figures of the benchmarks. matplotlib is needed by these alone, and only when a figure is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def lines(
    path: Path,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    goal: float | None = None,
) -> None:
    """One line for each series of (x, y), and a dashed one at `goal`; the suffix of `path` says PNG or SVG."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, points in series.items():
        axes.plot([point[0] for point in points], [point[1] for point in points], marker="o", label=name)
    if goal is not None:
        axes.axhline(goal, color="grey", linestyle="--", label="goal")
    axes.set(title=title, xlabel=x, ylabel=y)
    if log_x:
        axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def ratios(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Mean latency over that of fcfs by policy, one panel per scenario: measured with its interval, and as simulated. Rows of
    `bench.serve`; those without the ratio are left out."""
    pyplot = _pyplot()
    scenarios = list(dict.fromkeys(row["config"] for row in rows))
    size = (4.2 * len(scenarios), 4.0)
    figure, panels = pyplot.subplots(
        1, len(scenarios), figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    for axes, scenario in zip(panels[0], scenarios, strict=True):
        shown = [row for row in rows if row["config"] == scenario and "ratio_fcfs" in row]
        places = range(len(shown))
        middles = [row["ratio_fcfs"] for row in shown]
        ends = [
            [abs((row[f"ratio_fcfs_{end}"] or row["ratio_fcfs"]) - row["ratio_fcfs"]) for row in shown]
            for end in ("low", "high")
        ]
        axes.bar(places, middles, yerr=ends, capsize=3, color="tab:blue", alpha=0.7, label="measured")
        predicted = [row["simulated_ratio_fcfs"] for row in shown]
        axes.scatter(places, predicted, marker="D", color="tab:orange", zorder=3, label="simulated")
        axes.set_xticks(list(places), [row["policy"] for row in shown], rotation=45, ha="right")
        axes.set_title(scenario)
        axes.grid(visible=True, axis="y", alpha=0.3)
    panels[0][0].set_ylabel("mean latency / fcfs")
    panels[0][0].legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("Figures need matplotlib: pip install 'laps-sd[bench]'.") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
