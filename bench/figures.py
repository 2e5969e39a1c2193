"""Figures of the benchmarks. Only these need matplotlib, and only when a figure is requested."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {
    "laps-sd": "#c1121f",
    "sd-index": "#f4a261",
    "laps-sd-paper": "#7b2cbf",
    "laps-sd-paper, perceived levels": "#c77dff",
    "srpt-length": "#1565c0",
    "sjf-length": "#64b5f6",
    "las": "#00897b",
    "mlfq": "#9ccc65",
    "fcfs": "#616161",
    "oracle": "#000000",
}
"""Colour of each policy, the same in all figures."""
YARDSTICKS = ("fcfs", "srpt-length", "oracle")


def _pyplot() -> Any:
    """Return pyplot for drawing without a screen; the same input gives the same SVG, with
    its text as text.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("Figures need matplotlib: pip install 'laps-sd[bench]'.") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    matplotlib.rcParams |= {"svg.hashsalt": "laps-sd", "svg.fonttype": "none", "font.size": 9}
    return pyplot


def _save(figure: Any, path: Path, source: str = "") -> None:
    """Save the figure; an SVG names the data it was drawn from, `source`."""
    own = {"Date": None, "Source": source or None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=own, dpi=150)
    _pyplot().close(figure)
    if path.suffix == ".svg":  # a hundredth of a point is enough
        drawn = path.read_text(encoding="utf-8")
        path.write_text(re.sub(r"(\d\.\d\d)\d+", r"\1", drawn), encoding="utf-8")


def ratios(path: Path, rows: Sequence[Mapping[str, Any]], source: str = "") -> None:
    """Draw the mean latency over that of fcfs by policy, one panel per scenario: measured with its interval,
    and as simulated, with each kind of hints side by side. `rows` are those of `bench.serve`; those without
    the ratio are left out.
    """
    scenarios = list(dict.fromkeys(row["config"] for row in rows))
    size = (4.2 * len(scenarios), 4.0)
    figure, panels = _pyplot().subplots(
        1, len(scenarios), figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    kinds = list(dict.fromkeys(row["hints"] for row in rows))
    width = 0.8 / len(kinds)
    for axes, scenario in zip(panels[0], scenarios, strict=True):
        shown = [row for row in rows if row["config"] == scenario and "ratio_fcfs" in row]
        policies = list(dict.fromkeys(row["policy"] for row in shown))
        for number, hints in enumerate(kinds):
            own = [row for row in shown if row["hints"] == hints]
            places = [policies.index(row["policy"]) + (number - (len(kinds) - 1) / 2) * width for row in own]
            ends = [
                [abs((row[f"ratio_fcfs_{end}"] or row["ratio_fcfs"]) - row["ratio_fcfs"]) for row in own]
                for end in ("low", "high")
            ]
            axes.bar(
                places,
                [row["ratio_fcfs"] for row in own],
                width,
                yerr=ends,
                capsize=3,
                color=f"C{number}",
                alpha=0.7,
                label="no hints" if hints == "none" else f"hints, σ {hints}",
            )
            predicted = [row["simulated_ratio_fcfs"] for row in own]
            label = None if number else "simulated"
            axes.scatter(places, predicted, marker="D", s=14, color="black", zorder=3, label=label)
        axes.set_xticks(range(len(policies)), policies, rotation=45, ha="right")
        axes.set_title(scenario)
        axes.grid(visible=True, axis="y", alpha=0.3)
    panels[0][0].set_ylabel("mean latency / fcfs")
    panels[0][-1].legend()
    _save(figure, path, source)


# -- policies -------------------------------------------------------------------------------------------------------------


def named(spec: str) -> str:
    """Return a policy with its settings, in words."""
    return spec.replace(":perceived_levels=true", ", perceived levels")


def draw_policy(path: Path, results: Mapping[str, Any]) -> None:
    """Draw the results of `laps-sd bench policy` (`about` and `rows`, as it writes them): of one regime all
    policies, of several regimes `laps-sd` alone.
    """
    regimes = list(results["about"]["regimes"])
    if len(regimes) == 1:
        draw_regime(path, results, regimes[0])
    else:
        draw_overview(path, results)


def draw_regime(path: Path, results: Mapping[str, Any], regime: str, source: str = "") -> None:
    """Draw two panels: the distribution of latencies of all seeds together; mean latency against load if it
    was swept, and otherwise the mean as ratio to FCFS and the oracle.
    """
    own = [row for row in results["rows"] if row["regime"] == regime]
    rows = [row for row in own if row["kind"] == "policy"]
    swept = [row for row in own if row["kind"] == "sweep"]
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    for row in rows:
        values = row["latencies_s"]
        left.plot(
            values, [(at + 0.5) / len(values) for at in range(len(values))], **_line(row["policy"], width=1.4)
        )
    left.set(xscale="log", ylim=(0, 1), xlabel="latency (s)", ylabel="share of requests", title="Latency")
    left.grid(visible=True, alpha=0.25)
    if swept:
        _against_load(right, swept)
    else:
        _ratios(right, rows)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(results["about"]["regimes"][regime]["title"], fontsize=10)
    _save(figure, path, source)


def _line(spec: str, width: float) -> dict[str, Any]:
    name = named(spec)
    ours, truth = name == "laps-sd", name == "oracle"
    return {
        "label": name,
        "color": COLOURS.get(name),
        "linewidth": 2.2 if ours else width,
        "linestyle": ":" if truth else "-",
        "zorder": 3 if ours else 2,
    }


def _against_load(axes: Any, swept: Sequence[Mapping[str, Any]]) -> None:
    for spec in dict.fromkeys(row["policy"] for row in swept):
        points = [(row["load"], row["mean_s"]) for row in swept if row["policy"] == spec]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, **_line(spec, width=1.2))
    axes.set(yscale="log", xlabel="load", ylabel="mean latency (s)", title="Mean latency against load")
    axes.set_xticks(sorted({row["load"] for row in swept}))
    _plain_ticks(axes.yaxis)
    axes.grid(visible=True, which="both", alpha=0.25)


def _ratios(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for base, marker, shift in (("fcfs", "o", -0.15), ("oracle", "D", 0.15)):
        for at, row in enumerate(rows):
            key = f"ratio_{base}"
            if key in row and row["policy"] != base:
                _dot(
                    axes, at + shift, (row[key], row[f"{key}_low"], row[f"{key}_high"]), row["policy"], marker
                )
        axes.plot([], [], marker, color="grey", label=f"to {base}")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [named(row["policy"]) for row in rows])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="ratio of mean latencies, 95 % interval", title="Mean latency, as a ratio")
    _plain_ticks(axes.xaxis)
    axes.grid(visible=True, axis="x", which="both", alpha=0.25)
    axes.legend(fontsize=8)


def _dot(axes: Any, at: float, found: Sequence[float], spec: str, marker: str) -> None:
    middle, low, high = found
    colour = COLOURS.get(named(spec))
    axes.plot([low, high], [at, at], color=colour, linewidth=1.4)
    axes.plot([middle], [at], marker, color=colour, markersize=5)


def _plain_ticks(axis: Any) -> None:
    """Show plain numbers on a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 8), numticks=20))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def draw_overview(path: Path, results: Mapping[str, Any], source: str = "") -> None:
    """Draw the mean latency of `laps-sd` by regime as a ratio to FCFS, the strongest rival and the oracle,
    with its goals.
    """
    regimes = list(results["about"]["regimes"])
    rows = {
        row["regime"]: row
        for row in results["rows"]
        if row["kind"] == "policy" and row["policy"] == "laps-sd"
    }
    goals = [
        row
        for row in results["rows"]
        if row["kind"] == "verdict" and row["policy"] == "laps-sd" and row["figure"] == "mean_s"
    ]
    height = 1.4 + 0.27 * len(regimes)
    figure, panels = _pyplot().subplots(1, 3, figsize=(10, height), sharey=True, layout="constrained")
    for base, axes in zip(YARDSTICKS, panels, strict=True):
        found = [
            (at, *rows[regime]["ratios"][base])
            for at, regime in enumerate(regimes)
            if regime in rows and base in rows[regime]["ratios"]
        ]
        if found:
            places, middles, lows, highs = zip(*found, strict=True)
            axes.hlines(places, lows, highs, color=COLOURS["laps-sd"], linewidth=1.6)
            axes.plot(middles, places, "o", color=COLOURS["laps-sd"], markersize=5)
        for goal in goals:
            for bound in (goal["at_least"], goal["at_most"]):
                if goal["of"] == base and bound:
                    colour = "#2e7d32" if goal["met"] else "#000000"
                    at = regimes.index(goal["regime"])
                    axes.plot([bound], [at], "|", color=colour, markersize=13, markeredgewidth=2)
        axes.axvline(1, color="grey", linewidth=0.8)
        axes.set(xscale="log", title=f"laps-sd / {base}", xlabel="ratio of mean latencies")
        _plain_ticks(axes.xaxis)
        axes.grid(visible=True, axis="both", alpha=0.25)
    panels[0].set_yticks(range(len(regimes)), regimes)
    panels[0].invert_yaxis()
    axes.plot([], [], "o-", color=COLOURS["laps-sd"], label="found, 95 % interval")
    axes.plot([], [], "|", color="#2e7d32", markersize=11, markeredgewidth=2, label="goal, met")
    axes.plot([], [], "|", color="#000000", markersize=11, markeredgewidth=2, label="goal, missed")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    _save(figure, path, source)


# -- autoscaling ----------------------------------------------------------------------------------------------------------

SIGNALS = {
    "load": ("#c1121f", "arriving load, and backlog (KEDA)"),
    "backlog": ("#f4a261", "backlog alone: machine seconds"),
    "requests": ("#1565c0", "unfinished requests"),
    "queue": ("#64b5f6", "requests that wait"),
    "utilisation": ("#9ccc65", "utilisation"),
    "fixed": ("#616161", "fixed number"),
}
"""Colour and label of each signal."""


def draw_autoscale(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the points of `laps-sd bench autoscale`: devices held on average against latency, one curve per
    signal and one point per target; 95 % intervals over windows of the trace where there are several.
    """
    figure, panels = _pyplot().subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    for axes, latency, title in zip(panels, ("p99_s", "mean_s"), ("99th percentile", "Mean"), strict=True):
        for signal, (colour, label) in SIGNALS.items():
            points = sorted(
                (row for row in rows if row["kind"] == "point" and row["config"] == signal),
                key=lambda row: row["target"],
            )
            if not points:
                continue
            places = [row["devices"] for row in points]
            heights = [row[latency] for row in points]
            axes.plot(places, heights, marker="o", markersize=4, color=colour, label=label)
            if f"{latency}_low" in points[0]:
                for row in points:
                    low_s = max(row[f"{latency}_low"], row[latency] / 10)
                    axes.plot([row["devices"]] * 2, [low_s, row[f"{latency}_high"]], color=colour, alpha=0.25)
            for row in points:
                axes.annotate(
                    f"{row['target']:g}",
                    (row["devices"], row[latency]),
                    textcoords="offset points",
                    xytext=(4, 3),
                    fontsize=6,
                    color=colour,
                )
        axes.set(yscale="log", xlabel="devices held, on average", ylabel="latency (s)", title=title)
        _plain_ticks(axes.yaxis)
        axes.grid(visible=True, which="both", alpha=0.25)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    _save(figure, path)
