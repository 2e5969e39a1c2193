"""Sections of docs/evidence.md from what real processes did: `laps-sd bench serve` and `laps-sd bench control`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench._markdown import spread, table
from bench.control import GOAL_GROWTH, GOAL_MS

Row = Mapping[str, Any]


def policy_rows(rows: Iterable[Row]) -> list[Row]:
    """Of what `laps-sd bench serve` wrote, what was found of each policy; the others are single runs and verdicts."""
    return [row for row in rows if "policy" in row and not row.get("run")]


def _read(path: Path) -> tuple[list[Row], str]:
    """Rows, and where they are from."""
    found = json.loads(path.read_text())
    about = found["about"]
    return found["rows"], (
        f"`{about['command']}`, {about['date']} ([results](../bench/results/{path.name}), "
        "[how it is measured](../bench/README.md))"
    )


def served(path: Path) -> Iterator[str]:
    """Policies on the one-machine stack, beside what the simulator says of the same runs."""
    rows, source = _read(path)
    policies = policy_rows(rows)
    goals = [row for row in rows if row.get("verdict")]
    yield from ("## The same on the real system", "")
    yield "Gateway, scheduler, record and one worker with the demo pair, each a process; an open loop of requests through the public gRPC API, the"
    yield f"same for every policy of a seed. {source}."
    yield "Ratios of mean latencies, paired by seed; *simulated* is what the simulator says of the very same arrivals, lengths and rounds."
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
    """Measured with its interval, and simulated; dashes for the policy itself and where there is none."""
    key = f"ratio_{of.replace('-', '_')}"
    if row["policy"] == of or row.get(key) is None or row.get(f"{key}_low") is None:
        return "–", "–"
    measured = spread((row[key], row[f"{key}_low"], row[f"{key}_high"]))
    return measured, f"{row[f'simulated_{key}']:.3f}"


def deciding(path: Path) -> Iterator[str]:
    """What a report costs the core and the whole scheduler."""
    rows, source = _read(path)
    core = [row for row in rows if "median_ms" in row]
    whole = [row for row in rows if "cpu_ms_per_report" in row]
    yield from ("## What deciding costs", "")
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
        f"Asked for are {GOAL_MS:g} ms in the median, and {GOAL_GROWTH:g} times the shortest queue's at most: {met} of {len(core)} rows meet both."
    )
    yield ""
    for row in whole:
        yield (
            f"The whole scheduler process (decode, core, commit to the record, publish; {row['config'].removeprefix('scheduler, ')}, "
            f"{row['slots']} requests in a report): {row['cpu_ms_per_report']:.2f} ms of CPU time per report. One core so carries "
            f"{row['workers_per_shard']} workers whose rounds take {row['at_round_s'] * 1e3:g} ms; more need another shard."
        )
    yield ""
