"""Figures of the benchmarks. matplotlib is needed by these alone, and only when a figure is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


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
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("Figures need matplotlib: pip install 'laps-sd[bench]'.") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

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
