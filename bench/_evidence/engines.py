"""Sections of docs/evidence.md from what real processes did: `laps-sd bench serve`, `control`, `engine` and `gateway`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._generating import MIXED
from bench._markdown import spread, table
from bench.control import GOAL_GROWTH, GOAL_MS

Row = Mapping[str, Any]


def policy_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of single policies in the results of `laps-sd bench serve`; the others are single runs
    and verdicts.
    """
    return [row for row in rows if "policy" in row and not row.get("run")]


def _read(path: Path) -> tuple[list[Row], str, Row]:
    """Return the rows, their source, and the facts of the run."""
    found = json.loads(path.read_text())
    about = found["about"]
    source = (
        f"`{about['command']}`, {about['date']} ([results](../bench/results/{path.name}), "
        "[how it is measured](../bench/README.md))"
    )
    return found["rows"], source, about


def served(path: Path) -> Iterator[str]:
    """Yield the section on policies on the one-machine stack, with the simulator's
    results for the same runs.
    """
    rows, source, _ = _read(path)
    policies = policy_rows(rows)
    goals = [row for row in rows if row.get("verdict")]
    yield from ("## The same on the real system", "")
    yield "Gateway, scheduler, record and one worker with the demo pair, each a process; an open loop of requests through the public gRPC API, the"
    yield f"same for every policy of a seed. {source}."
    yield "Ratios of mean latencies, paired by seed; *simulated* is the simulator's result for the same arrivals, lengths and rounds."
    for scenario in dict.fromkeys(row["config"] for row in policies):
        yield from ("", f"**{scenario}**")
        yield from table(
            ("policy", "mean s", "p99 s", "first token s", "slowdown", "/ `fcfs`", "simulated", "/ `srpt-length`", "simulated"),
            (
                (
                    f"`{row['policy']}`",
                    *(f"{row[key]:.2f}" for key in ("mean_s", "p99_s", "first_token_s")),
                    f"{row['mean_slowdown']:.1f}",
                    *_ratio(row, "fcfs"),
                    *_ratio(row, "srpt-length"),
                )
                for row in policies
                if row["config"] == scenario and "mean_s" in row
            ),
        )  # fmt: skip
    yield from ("![measured and simulated ratios to fcfs](figures/serve.svg)", "")
    missed = [row for row in goals if not row["met"]]
    yield f"{len(goals) - len(missed)} of {len(goals)} goals are met" + (". Missed:" if missed else ".")
    yield ""
    for row in missed:
        yield f"- {row['config']}, {row['goal']}: {row['found']}, asked {row['asked']}"
    yield ""


def _ratio(row: Row, of: str) -> tuple[str, str]:
    """Return the measured ratio with its interval, and the simulated one; dashes for the policy itself and
    where there is none.
    """
    key = f"ratio_{of.replace('-', '_')}"
    if row["policy"] == of or row.get(key) is None or row.get(f"{key}_low") is None:
        return "–", "–"
    measured = spread((row[key], row[f"{key}_low"], row[f"{key}_high"]))
    return measured, f"{row[f'simulated_{key}']:.3f}"


def deciding(path: Path) -> Iterator[str]:
    """Yield the section on the cost of a report for the core and the whole scheduler."""
    rows, source, _ = _read(path)
    core = [row for row in rows if "median_ms" in row]
    whole = [row for row in rows if "cpu_ms_per_report" in row]
    yield from ("## What decisions cost", "")
    how = "compiled as in the scheduler's image" if core[0]["compiled"] else "not compiled"
    yield f"One report of {core[0]['slots']} requests through the core of the scheduler, {how}, which orders and answers it. {source}."
    yield from table(
        ("workers", "queued", "median ms", "p99 ms", "/ shortest queue", "bytes per queued request"),
        (
            (
                f"{row['workers']:,}",
                f"{row['queued']:,}",
                f"{row['median_ms']:.2f}",
                f"{row['p99_ms']:.2f}",
                f"{row['ratio_shortest']:.2f}",
                f"{row['memory_per_queued_bytes']:.0f}",
            )
            for row in core
        ),
    )
    met = sum(row["median_ms"] <= GOAL_MS and row["ratio_shortest"] <= GOAL_GROWTH for row in core)
    yield (
        f"The goals are {GOAL_MS:g} ms in the median, and {GOAL_GROWTH:g} times the shortest queue's at most: {met} of {len(core)} rows meet both."
    )
    yield ""
    for row in whole:
        yield (
            f"The whole scheduler process (decode, core, commit to the record, publish; {row['config'].removeprefix('scheduler, ')}, "
            f"{row['slots']} requests in a report): {row['cpu_ms_per_report']:.2f} ms of CPU time per report. So one core carries "
            f"{row['workers_per_shard']} workers whose rounds take {row['at_round_s'] * 1e3:g} ms; more need another shard."
        )
    yield ""


def engine(path: Path) -> Iterator[str]:
    """Yield the section on tokens per CPU second of the worker's engine and of others."""
    from bench.engine import goals  # needs torch

    rows, source, about = _read(path)
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "vllm", "openvino") if name in about)
    cpu = f", on a CPU with {about['cpu']}" if "cpu" in about else ""
    yield from ("## The engine compared with others", "")
    yield f"The same pair, prompts, precision ({about['dtype']}) and number of threads ({about['threads']}); tokens per second of CPU time, all kinds of prompts in"
    yield f"equal parts, temperature 0, with up to this number of requests at a time; {versions}{cpu}. {source}."
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
    yield from _goals(
        goals(rows, exact=exact),
        "Most of them require that speculation is never slower than 0.97 of our own plain decoding, for every kind of prompt alone, at every batch size",
    )


def engine_again(path: Path) -> Iterator[str]:
    """Yield the section on our engine against itself alone, with more turns than a run with other engines has
    time for.
    """
    from bench.engine import SPECULATIVE, goals, told_ratio

    rows, source, about = _read(path)
    batches = ", ".join(str(batch) for batch in sorted({row["batch"] for row in rows}))
    least = min(
        (row for row in rows if row["config"] == SPECULATIVE), key=lambda row: float(row["ratio_plain_low"])
    )
    yield from ("### Speculation compared with plain decoding, again", "")
    yield f"Without other engines and with {about['turns']} turns, at batch {batches}, where speculation gains least and a loss shows first. {source}."
    yield ""
    yield from _goals(
        goals(rows, exact=about["dtype"] == "float32"),
        f"The least: {told_ratio(least, 'ratio_plain')} for *{least['kind']}* at temperature {least['temperature']}",
    )


def memory_bound(path: Path) -> Iterator[str]:
    """Yield the same for a pair whose weights are larger than any cache."""
    from bench.engine import goals

    rows, source, about = _read(path)
    yield from ("### Where weights come from memory", "")
    yield "A pair of random weights, 287 M and 15 M, larger than any cache, as real ones are on a GPU: there a forward of one token takes nearly as long as one of five. The text"
    yield f"is nonsense, and {about['acceptance']:g} of the proposals are accepted by a random draw; peers that cannot do this run without speculation. {about['dtype']}, {about['threads']} thread; tokens per second of CPU"
    yield f"time, temperature 0. {source}."
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
    yield from _goals(
        goals(rows, memory_bound=True),
        "A forward is to take 1.1 of vLLM's at most, speculation 0.97 of plain decoding's speed at least",
    )


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
    from bench.engine import BOTH, PLAIN, SPECULATIVE, told_ratio  # needs torch

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
        return told_ratio(row, name)

    yield from table(
        ("compared with", *(f"batch {batch}" for batch in batches)),
        ((words, *(ratio(name, batch) for batch in batches)) for name, words in labels.items()),
    )


def _goals(judged: Sequence[Any], words: str) -> Iterator[str]:
    missed = [goal.text for goal in judged if not goal.met]
    yield (
        f"{len(judged) - len(missed)} of {len(judged)} goals are met, each by the end of its interval. {words}"
        + (". Missed:" if missed else ".")
    )
    yield ""
    yield from (f"- {text}" for text in missed)
    yield ""


def _same(rows: Iterable[Row]) -> str:
    shares = [row["identical"] for row in rows if row["identical"] is not None]
    return f"{min(shares):.0%}" if shares else "–"


def carried(path: Path) -> Iterator[str]:
    """Yield the section on the load that one gateway process carries."""
    from bench.gateway import GOAL_MESSAGES_PER_CPU_S, GOAL_P99_S

    rows, source, _ = _read(path)
    yield from ("## What a gateway carries", "")
    yield f"One gateway process, tokens delivered at a steady rate, about three in a message. {source}."
    yield from table(
        ("streams", "messages per second", "of its CPU", "messages per CPU second", "added delay p50", "p99"),
        (
            (
                row["config"],
                f"{row['messages_per_s']:,.0f}",
                f"{row['gateway_cpu_share']:.0%}",
                f"{row['messages_per_cpu_s']:,.0f}",
                f"{row['delay_p50_s'] * 1e3:.1f} ms",
                f"{row['delay_p99_s'] * 1e3:.1f} ms",
            )
            for row in rows
        ),
    )
    met = all(
        row["deliveries_per_cpu_s"] >= GOAL_MESSAGES_PER_CPU_S and row["delay_p99_s"] < GOAL_P99_S
        for row in rows
    )
    yield (
        f"The goals are {GOAL_MESSAGES_PER_CPU_S:,.0f} messages per CPU second and a p99 delay below {GOAL_P99_S * 1e3:g} ms: "
        + ("met." if met else "missed.")
    )
    yield ""
