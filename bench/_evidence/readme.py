"""The figures of engines in README.md, between two comments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from bench._engine.cells import MIXED
from bench._engine.configs import SPECULATIVE
from bench._evidence.engine_table import in_readme
from bench._evidence.results import read_rows

BEGIN = "<!-- Written by `python -m bench.evidence`: -->"
END = "<!-- to here. -->"


def with_figures(text: str, measured: Mapping[str, Path]) -> str:
    """Return the text of README.md with the figures of these results between the comments.

    Raise ValueError if a comment is missing.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("README.md has no place for the figures of engines")
    lines = list(_lines(measured))
    figures = "\n".join(lines).strip().replace("\n\n\n", "\n\n")
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


def _lines(measured: Mapping[str, Path]) -> Iterator[str]:
    if "engine" in measured:
        yield from pair_in_words(measured["engine"])
        yield ""
    if "engine-table" in measured:
        yield from in_readme(measured["engine-table"])


def pair_in_words(path: Path) -> Iterator[str]:
    """Yield how many times as fast the demo pair is on our engine as on others."""
    rows, _, about = read_rows(path)
    here = [
        row
        for row in rows
        if (row["config"], row["kind"], row["temperature"]) == (SPECULATIVE, MIXED, 0.0)
        and row["ratio_vllm"] is not None
        and row["ratio_openvino"] is not None
    ]
    batches = sorted(row["batch"] for row in here)
    vllm, openvino = (
        f"{min(ratios):.1f} to {max(ratios):.1f}"
        for ratios in ([row[name] for row in here] for name in ("ratio_vllm", "ratio_openvino"))
    )
    threads = "one thread" if about["threads"] == 1 else f"{about['threads']} threads"
    yield f"On {threads} of a CPU, with the shipped pair of 4.7 million weights and the prompts that it was trained for, a worker generates {vllm} times as"
    yield f"many tokens per second as vLLM's CPU build and {openvino} times as many as OpenVINO GenAI, for {batches[0]} to {batches[-1]} requests at a time. With other prompts"
    yield "speculation gains less."
