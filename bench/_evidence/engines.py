"""Sections of docs/evidence/engine.md from `laps-sd bench engine`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bench._engine.cells import BOTH, MIXED
from bench._engine.configs import PLAIN, SPECULATIVE
from bench._engine.goals import goals
from bench._engine.heading import models_in_words
from bench._evidence.phrases import goals_met
from bench._evidence.results import Row, read_rows
from bench._markdown import table
from bench.report import as_text


def engine(path: Path) -> Iterator[str]:
    """Yield the section on tokens per CPU second of the worker's engine and of others."""
    rows, source, about = read_rows(path)
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "vllm", "openvino") if name in about)
    yield f"The same pair, prompts, precision ({about['dtype']}) and number of threads ({about['threads']}); tokens per second of CPU time, all kinds of prompts in"
    yield f"equal parts, temperature 0, with up to this number of requests at a time; {versions}, on a CPU with {about['cpu']}. {source}."
    yield from _sizes(about)
    yield from _speeds(rows, texts=True)
    yield "Ratios of our engine with speculation, paired by turn, with their 95 % intervals; against several modes of one engine, to the best of them."
    yield from _ratios(
        rows,
        {
            "ratio_plain": "our own plain decoding, both temperatures", "ratio_assisted": "transformers, assisted generation, both temperatures",
            "ratio_peer_batch": "transformers, best batch mode, both temperatures", "ratio_vllm": "vLLM, temperature 0",
            "ratio_openvino": "OpenVINO GenAI, temperature 0",
        },
    )  # fmt: skip
    exact = about["dtype"] == "float32" and about["acceptance"] is None
    yield from goals_met(
        goals(rows, exact=exact),
        "Most of them require that speculation is never slower than 0.97 of our own plain decoding, for every kind of prompt alone, at every batch size",
    )


def memory_bound(path: Path) -> Iterator[str]:
    """Yield the same for a pair whose weights are larger than any cache."""
    rows, source, about = read_rows(path)
    yield "A pair of random weights, 287 M and 15 M, larger than any cache, as real ones are on a GPU: there a forward of one token takes nearly as long as one of five. The text"
    yield f"is nonsense, and {about['acceptance']:g} of the proposals are accepted by a random draw; peers that cannot do this run without speculation. {about['dtype']}, {about['threads']} thread; tokens per second of CPU"
    yield f"time, temperature 0. {source}."
    yield from _sizes(about)
    yield from _speeds(rows, texts=False)
    yield "Ratios, paired by turn; the last row compares one forward of a full batch, plain decoding, of ours with vLLM's shortest."
    yield from _ratios(
        rows,
        {
            "ratio_plain": "ours with speculation: our own plain decoding, both temperatures",
            "ratio_vllm": "ours with speculation: vLLM without, temperature 0",
            "forward": "time of a forward: vLLM's",
        },
    )
    yield from goals_met(
        goals(rows, memory_bound=True),
        "A forward is to take 1.1 of vLLM's at most, speculation 0.97 of plain decoding's speed at least",
    )


def _sizes(about: Row) -> Iterator[str]:
    """Yield the sizes of the models and the lengths of the prompts; results of before 2026-11-26 lack them."""
    if "prompt_tokens" in about:
        least, mean, most = about["prompt_tokens"][MIXED]
        yield f"Models: {models_in_words(about, about['dtype'])}. Prompts have {mean} tokens on average, {least} to {most}; outputs {about['tokens']} at most."


def _speeds(rows: Sequence[Row], *, texts: bool) -> Iterator[str]:
    """Yield the speeds of each engine; with `texts` also the number of its texts that equal ours."""
    mixed = [row for row in rows if row["kind"] == MIXED and row["temperature"] == 0.0]
    batches = sorted({row["batch"] for row in mixed})
    by_place = {(row["config"], row["batch"]): row for row in mixed}
    yield from table(
        ("engine", *(f"batch {batch}" for batch in batches), *(["same text as ours"] if texts else [])),
        (
            (
                config,
                *(
                    f"{row['tokens_per_cpu_s']:,.0f}" if (row := by_place.get((config, batch))) else "–"
                    for batch in batches
                ),
                *([_same(row for row in mixed if row["config"] == config)] if texts else []),
            )
            for config in dict.fromkeys(row["config"] for row in mixed)
        ),
    )


def _ratios(rows: Sequence[Row], labels: Mapping[str, str]) -> Iterator[str]:
    """Yield the ratios of the whole mix, by batch size, for ours with speculation and a forward of ours
    without: both temperatures where it was measured so, else 0.
    """
    found = {
        (name, row["batch"], row["temperature"]): row
        for row in rows
        if row["kind"] == MIXED
        for name in labels
        if row["config"] == (PLAIN if name == "forward" else SPECULATIVE) and row.get(name) is not None
    }
    batches = sorted({row["batch"] for row in rows if row["kind"] == MIXED})

    def ratio(name: str, batch: int) -> str:
        row = found.get((name, batch, BOTH)) or found.get((name, batch, 0.0))
        if row is None:
            return "–"
        return as_text(row, name, 2)

    yield from table(
        ("compared with", *(f"batch {batch}" for batch in batches)),
        ((words, *(ratio(name, batch) for batch in batches)) for name, words in labels.items()),
    )


def _same(rows: Iterable[Row]) -> str:
    shares = [row["identical"] for row in rows if row["identical"] is not None]
    return f"{min(shares):.0%}" if shares else "–"
