"""Writes docs/evidence.md, the pages in docs/evidence, their figures, and the figures of engines in README.md
from what the benchmarks wrote with `--json`: no figure in them is typed by hand.

    python -m bench.evidence                  # pages and figures from the newest bench/results/*-policy.json, *-serve.json, …
    python -m bench.evidence --results FILE   # from another one
    python -m bench.evidence --check          # write nothing; exit 1 when a page is out of date

The figures need matplotlib (`pip install 'laps-sd[bench]'`), the pages do not.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench._evidence import in_short
from bench._evidence.engine_table import engine_table
from bench._evidence.engines import engine, memory_bound
from bench._evidence.estimates import errors_of_estimates, levels
from bench._evidence.gains import against_rivals, goals, no_gain, tail
from bench._evidence.gpu import on_gpu
from bench._evidence.head import GENERATED, anchor, compared_orders
from bench._evidence.multi_turn import conversing
from bench._evidence.placement import placed
from bench._evidence.readme import with_figures
from bench._evidence.results import Results, newest, read_rows, source_of
from bench._evidence.scope import data, limits, paper
from bench._evidence.services import carried, deciding, policy_rows, recovering, served
from bench._evidence.vllm import inside_vllm
from bench._evidence.vllm_on_gpu import vllm_on_gpu
from bench._markdown import table
from bench.figures import draw_overview, draw_regime, ratios

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
FIGURES = DOCS / "figures"
ENTRY = "evidence.md"


class Section(NamedTuple):
    """A section on what a benchmark measured."""

    title: str
    what: str
    """What ran."""
    write: Callable[[Path], Iterator[str]]
    in_short: Callable[[Path], Iterator[str]]


PAGES: dict[str, tuple[str, dict[str, Section]]] = {
    "evidence/placement.md": (
        "Placement of requests",
        {
            "placement": Section(
                "Placement by what is cached",
                "simulated workers; SGLang's and Dynamo's placements in the same simulator",
                placed,
                in_short.placement,
            ),
            "multi-turn": Section(
                "Conversations on the real stack",
                "the system's processes with the demo pair, on a CPU",
                conversing,
                in_short.conversations,
            ),
        },
    ),
    "evidence/system.md": (
        "The whole system",
        {
            "serve": Section(
                "Orders on the real system",
                "the system's processes with the demo pair, on a CPU; beside it the simulator",
                served,
                in_short.served,
            ),
            "control": Section(
                "What decisions cost",
                "scheduler and record; the workers' rounds are synthetic",
                deciding,
                in_short.deciding,
            ),
            "recovery": Section(
                "What a change of leaders costs",
                "a scheduler that reads a record of synthetic requests",
                recovering,
                in_short.recovering,
            ),
            "gateway": Section(
                "What a gateway carries",
                "a gateway; the scheduler's messages are synthetic",
                carried,
                in_short.gateway,
            ),
        },
    ),
    "evidence/engine.md": (
        "Our own engine",
        {
            "engine": Section(
                "The engine compared with others",
                "engines alone with the demo pair, on one thread of a CPU",
                engine,
                in_short.engine,
            ),
            "memory-bound": Section(
                "Where weights come from memory",
                "engines alone with a larger pair of random weights, on a CPU",
                memory_bound,
                in_short.memory_bound,
            ),
            "engine-table": Section(
                "By precision of the weights and threads",
                "engines alone with a model of 0.5 B random weights, on a CPU",
                engine_table,
                in_short.engine_table,
            ),
            "engine-on-gpu": Section(
                "Our own engine on a GPU",
                "the worker's own engine with random weights, on one H100",
                on_gpu,
                in_short.on_gpu,
            ),
        },
    ),
    "evidence/vllm.md": (
        "With vLLM",
        {
            "vllm-on-gpu": Section(
                "Inside vLLM on a GPU",
                "vLLM with an 8B model of random weights, on one H100",
                vllm_on_gpu,
                in_short.vllm_on_gpu,
            ),
            "vllm": Section(
                "Inside one vLLM server",
                "vLLM with the demo pair, on a CPU",
                inside_vllm,
                in_short.inside_vllm,
            ),
        },
    ),
}
"""Title and sections of each page on what was measured, by its path in docs/; the sections by benchmark."""
MEASURED = tuple(name for _, sections in PAGES.values() for name in sections)


def pages(results: Results, measured: Mapping[str, Path] | None = None) -> dict[str, str]:
    """Return the text of each page by its path in docs/. `measured` has the newest results of the benchmarks of
    `MEASURED`, by name.
    """
    measured = measured or {}
    found = {
        ENTRY: _page("Evidence: what LAPS-SD gains, and where it gains nothing", _entry(results, measured)),
        "evidence/orders.md": _page(
            "Orders, simulated",
            compared_orders(results), goals(results), against_rivals(results), no_gain(results), tail(results), paper(results),
        ),
        "evidence/simulation.md": _page(
            "Levels, estimates and data of the simulated orders",
            levels(results), errors_of_estimates(results), data(results), limits(results),
        ),
    }  # fmt: skip
    for name, (title, sections) in PAGES.items():
        found[name] = _page(
            title,
            *(
                [f"## {section.title}", "", *section.write(measured[benchmark]), ""]
                for benchmark, section in sections.items()
                if benchmark in measured
            ),
        )
    return found


def _page(title: str, *parts: Iterable[str]) -> str:
    lines = [GENERATED, f"# {title}", "", *(line for part in parts for line in part)]
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip() + "\n"


def _entry(results: Results, measured: Mapping[str, Path]) -> Iterator[str]:
    """Yield the sections by page, each with what ran, when, and what was found, in short."""
    yield "Each section names the command that repeats it. [bench/README.md](../bench/README.md) describes"
    yield "the benchmarks."
    yield ""
    simulated = ("the scheduling core in the simulator", results.about["date"])
    rows = [
        ("[Orders, simulated](evidence/orders.md), their costs, and where they gain nothing", *simulated),
        ("[Levels, estimates and data of these](evidence/simulation.md)", *simulated),
    ]
    short = ["### [Orders, simulated](evidence/orders.md)", ""]
    short += [f"- {line}" for line in in_short.orders(results)]
    for name, (title, sections) in PAGES.items():
        short += ["", f"### [{title}]({name})", ""]
        for benchmark, section in sections.items():
            if benchmark not in measured:
                continue
            link = f"[{section.title}]({name}#{anchor(section.title)})"
            date = read_rows(measured[benchmark])[2]["date"]
            rows.append((link, section.what, date))
            sentences = list(section.in_short(measured[benchmark]))
            if met := re.search(r"\d+ of \d+ goals are met", "\n".join(section.write(measured[benchmark]))):
                sentences.append(f"{met[0]}.")
            short.append(f"- *{section.title}.* {' '.join(sentences)}")
    yield from table(("section", "what ran", "on"), rows)
    yield from ("", "## In short", "", *short)


def draw(results: Results, folder: Path, serve: Path | None = None) -> list[Path]:
    """Draw the figures that the pages show, and delete those of other results."""
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
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.evidence",
        description=(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", type=Path, help="default: the newest bench/results/*-policy.json")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a page is out of date"
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
    texts = {DOCS / name: text for name, text in pages(results, measured).items()}
    texts[README] = with_figures(README.read_text(encoding="utf-8"), measured)
    if options.check:
        stale = [
            path
            for path, text in texts.items()
            if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run python -m bench.evidence", file=sys.stderr)
        return int(bool(stale))
    for path in draw(results, FIGURES, measured.get("serve")):
        print(f"{path} drawn")
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"docs/evidence.md and docs/evidence/ written from {results.source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
