"""Writes docs/evidence.md, its figures and the figures of engines in README.md from what `laps-sd bench policy`, `serve`, `control`, `engine`, `vllm`
and `gateway` wrote with `--json`: no figure in them is typed by hand.

    python -m bench.evidence                  # page and figures from the newest bench/results/*-policy.json, *-serve.json, …
    python -m bench.evidence --results FILE   # from another one
    python -m bench.evidence --check          # write nothing; exit 1 when the page is out of date

The figures need matplotlib (`pip install 'laps-sd[bench]'`), the page does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench._evidence.engine_table import engine_table
from bench._evidence.engines import engine, engine_again, memory_bound
from bench._evidence.estimates import errors_of_estimates, levels
from bench._evidence.gains import against_rivals, goals, no_gain, tail
from bench._evidence.gpu import on_gpu
from bench._evidence.head import Section, head
from bench._evidence.multi_turn import conversing
from bench._evidence.placement import placed
from bench._evidence.readme import with_figures
from bench._evidence.results import Results, newest, read_rows, source_of
from bench._evidence.scope import data, limits, paper
from bench._evidence.services import carried, deciding, policy_rows, served
from bench._evidence.vllm import inside_vllm
from bench._evidence.vllm_on_gpu import vllm_on_gpu
from bench.figures import draw_overview, draw_regime, ratios

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence.md"
README = ROOT / "README.md"
FIGURES = ROOT / "docs" / "figures"
MEASURED = {
    "placement": (placed, "simulated workers; SGLang's and Dynamo's placements in the same simulator"),
    "multi-turn": (conversing, "the system's processes with the demo pair, on a CPU"),
    "serve": (served, "the system's processes with the demo pair, on a CPU; beside it the simulator"),
    "control": (deciding, "scheduler and record; the workers' rounds are synthetic"),
    "engine": (engine, "engines alone with the demo pair, on one thread of a CPU"),
    "engine-again": (engine_again, "engines alone with the demo pair, on one thread of a CPU"),
    "memory-bound": (memory_bound, "engines alone with a larger pair of random weights, on a CPU"),
    "engine-table": (engine_table, "engines alone with a model of 0.5 B random weights, on a CPU"),
    "engine-on-gpu": (on_gpu, "the worker's own engine with random weights, on one H100"),
    "vllm": (inside_vllm, "vLLM with the demo pair, on a CPU"),
    "vllm-on-gpu": (vllm_on_gpu, "vLLM with an 8B model of random weights, on one H100"),
    "gateway": (carried, "a gateway; the scheduler's messages are synthetic"),
}
"""Benchmarks that have a section: the function that writes it, and what ran."""


def page(results: Results, measured: Mapping[str, Path] | None = None) -> str:
    """Return the text of docs/evidence.md. `measured` has the results of the benchmarks of `MEASURED`, by
    name, which have a section each.
    """
    measured = measured or {}
    written = [
        Section(list(write(measured[name])), what, read_rows(measured[name])[2]["date"])
        for name, (write, what) in MEASURED.items()
        if name in measured
    ]
    parts = (
        head(results, written), goals(results), against_rivals(results), no_gain(results), tail(results), levels(results),
        errors_of_estimates(results), paper(results), data(results), limits(results), *(section.lines for section in written),
    )  # fmt: skip
    lines = [line for part in parts for line in part]
    text = "\n".join(lines).replace("\n\n\n", "\n\n")
    return text.rstrip() + "\n"


def draw(results: Results, folder: Path, serve: Path | None = None) -> list[Path]:
    """Draw the figures that the page shows, and delete those of other results."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("policy-*.svg"):
        old.unlink()
    drawn = []
    if len(results.regimes) > 1:
        drawn.append(folder / "policy-overview.svg")
        draw_overview(drawn[-1], results.all, results.source)
    for regime in results.figures():
        drawn.append(folder / f"policy-{regime}.svg")
        draw_regime(drawn[-1], results.all, regime, results.source)
    if serve is not None:
        drawn.append(folder / "serve.svg")
        ratios(drawn[-1], policy_rows(json.loads(serve.read_bytes())["rows"]), source_of(serve))
    return drawn


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.evidence",
        description=(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, help="default: the newest bench/results/*-policy.json")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when the page is out of date"
    )
    options = parser.parse_args(argv)
    try:
        chosen = options.results or newest("policy")
        if chosen is None:
            raise FileNotFoundError(
                "bench/results has no *-policy.json: run laps-sd bench policy with --json"
            )
        results = Results(chosen)
    except (OSError, ValueError) as error:
        print(f"bench.evidence: {error}", file=sys.stderr)
        return 2
    measured = {name: path for name in MEASURED if (path := newest(name))}
    text = page(results, measured)
    readme = README.read_text(encoding="utf-8")
    new_readme = with_figures(readme, measured)
    if options.check:
        stale = [
            name
            for name, is_stale in (
                ("docs/evidence.md", not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text),
                ("README.md", readme != new_readme),
            )
            if is_stale
        ]
        for name in stale:
            print(f"{name} is out of date: run python -m bench.evidence", file=sys.stderr)
        return int(bool(stale))
    for path in draw(results, FIGURES, measured.get("serve")):
        print(f"{path} drawn")
    PAGE.write_text(text, encoding="utf-8")
    README.write_text(new_readme, encoding="utf-8")
    print(f"docs/evidence.md written from {results.source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
