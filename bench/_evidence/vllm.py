"""Section of docs/evidence/vllm.md from `laps-sd bench vllm`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._evidence.phrases import goals_met
from bench._evidence.results import Row, read_rows
from bench._markdown import spread, table
from bench._vllm.decisions import COMPILED, INTERPRETED, SLOTS, WAITING, least
from bench._vllm.figures import compared, ratio
from bench._vllm.goals import goals
from bench._vllm.modes import FCFS, MODES, OURS
from bench._vllm.workers import PLAIN, SAMPLING

BOUNDS = (
    "How far four of them can be met, measured on a virtual engine (8 requests in a step, four kinds of requests with lognormal lengths, ten seeds at load 0.9 and five of bursts) and by instructions:",
    "",
    "- *The slowest 1 % at load 0.9.* They are the longest requests, and wait because shorter ones overtake them. A second of the 8 places for the oldest requests brings their p99 from 1.08",
    "  of vLLM's priority to 0.97, and costs 0.6 % of the mean at this load, but 1 to 3.5 % in bursts, with and without guesses; so there is one. More hysteresis (30 and 60 %) changes p99 by",
    "  less than 1 %. `LAPS_SD_POLICY=sjf-length`, which does not preempt, has a p99 of 0.95 and a mean of 0.99 of priority's, where `laps-sd` has 0.94.",
    "- *Core and choose.* With guesses 45 % of the instructions are for the 2.8 requests that end and arrive in a step (without hints 30 %, for 1.5 of them): what is learnt from a request,",
    "  and four waiting requests that are ranked again. A rank with a guess needs the lengths that are likely near it, which are computed again whenever a table of lengths was.",
    "- *Tokens while a full batch waits.* A step of the pair takes 7 ms on a faster machine (12 in the run above), and our part of it there",
    "  0.46 ms more than FCFS's, of which 0.17 ms remain where no model's weights displace its memory from the caches (virtual runner). With as many tokens in a step 0.98 needs a step of 11 ms or more.",
    "- *A worker's engine over vLLM.* With the demo pair a worker adds 0.20 ms to a step of 4.8 ms (quiet machine), for its report, its rows and its choice: 0.96 of the tokens per CPU second.",
    "  0.97 needs 0.15 ms, or a model whose step takes 6.5 ms or more.",
    "",
)
"""Results that show how far the goals can be met; measured by hand, on 2026-11-26."""

PROMPTS_REPEATED_UNTIL = "2026-11-27"
PROMPTS_REPEATED = (
    "The servers went on learning, and in this run prompts came again: a quarter of those of the bursts, and all of those at load 0.9, which were those of the burst before. LAPS-SD knew their",
    "lengths, so its figures without hints may be better here than for new prompts; counted in steps, above, no prompt was served before. The benchmark sends none twice since.",
)


def inside_vllm(path: Path) -> Iterator[str]:
    """Yield the section on LAPS-SD inside one vLLM server, compared with vLLM's own schedulers."""
    rows, source, about = read_rows(path)
    yield f"LAPS-SD as the scheduler class of vLLM {about['vllm']} ([how to](../vllm.md)), the demo pair as target and draft, {about['slots']} requests in a step, temperature 0, {about['tokens']} tokens"
    yield "at most; the same requests in turn under vLLM's own schedulers. Guesses are the true lengths times exp(σ z), σ 0.5; *learnt before* starts with what an earlier"
    yield f"burst taught. {source}." + (f" {about['machine']}" if "machine" in about else "")
    yield ""
    for measured, words in (
        ("steps", "Counted in engine steps, so that no clock of a busy machine is in it"),
        ("clock", "On the clock, through one OpenAI server for each mode; seconds"),
    ):
        of_kind = [row for row in rows if row["measured"] == measured]
        if of_kind:
            yield f"**{words}.** {_runs(of_kind)}"
            if measured == "clock" and about["date"] <= PROMPTS_REPEATED_UNTIL:
                yield from PROMPTS_REPEATED
            yield from _latencies(of_kind)
    yield from _check(rows)
    yield from _speeds([row for row in rows if row["measured"] == "speed"])
    yield from _costs(rows)
    yield from _workers([row for row in rows if row["measured"] == "worker"])
    yield from goals_met(goals(rows))
    yield from ("", *BOUNDS)


def _runs(rows: Sequence[Row]) -> str:
    seeds = len({row["seed"] for row in rows})
    settings = ", ".join(dict.fromkeys(row["setting"] for row in rows))
    return f"{settings}; {seeds} seeds each."


def _latencies(rows: Sequence[Row]) -> Iterator[str]:
    found = compared(rows)
    settings = list(dict.fromkeys(row["setting"] for row in found))
    bursts = [setting for setting in settings if setting.startswith("burst")]
    for setting in settings:
        if [setting] == bursts:
            continue  # all bursts are this one
        yield from table(
            (setting, "mean", "p99", "mean / FCFS", "p99 / FCFS", "mean / priority by guess", "p99 / priority by guess"),
            (
                (
                    row["mode"],
                    f"{row['mean']:.3g}",
                    f"{row['p99']:.3g}",
                    *(_ratio(row, name) for name in ("ratio_fcfs", "p99_ratio_fcfs", "ratio_priority", "p99_ratio_priority")),
                )
                for row in found
                if row["setting"] == setting
            ),
        )  # fmt: skip


def _ratio(row: Mapping[str, Any], name: str) -> str:
    return spread(None if row[name] is None else (row[name], row[f"{name}_low"], row[f"{name}_high"]))


def _check(rows: Sequence[Row]) -> Iterator[str]:
    """Yield how the replayed steps agree with those of the engine."""
    checked = [row for row in rows if row.get("in_engine") is not None]
    if not checked:
        return
    same = sum(row["mean"] == row["in_engine"] for row in checked)
    most = max(abs(row["in_engine"] / row["mean"] - 1) for row in checked)
    texts = sum(row["same_texts"] for row in checked)
    yield (
        f"The steps are replays of what the engine emitted. For {checked[0]['setting']}, seed {checked[0]['seed']}, the engine ran in every mode: in {same} of {len(checked)} the mean"
        f" latency was the same, in the others it differed by {most:.1%} at most; {texts} of {sum(row['requests'] for row in checked)} texts were those of FCFS."
    )
    yield ""


def _speeds(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the tokens per second while a full batch waits."""
    if not rows:
        return
    yield "**While a full batch waits**, tokens per second of the engine's CPU time, paired by turn. *By parts*: tokens per step, less the scheduler's share of the step; the model's part is"
    yield "the same in all modes, so other work on the machine is not in it."
    yield from table(
        ("", "tokens per CPU second", "scheduler's share", "measured / FCFS", "by parts / FCFS"),
        ((mode.name, *_speed(rows, mode.name)) for mode in (MODES[0], *OURS)),
    )


def _speed(rows: Sequence[Row], mode: str) -> Iterator[str]:
    own = [row for row in rows if row["mode"] == mode]
    yield f"{statistics.median(row['full_speed'] for row in own):,.0f}"
    yield f"{statistics.median(row['scheduler_share'] for row in own):.1%}"
    for figure in ("full_speed", "full_speed_by_parts"):
        yield "–" if mode == FCFS else str(ratio(rows, mode, FCFS, figure))


def _workers(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the speed of a worker over vLLM against that of vLLM alone."""
    if not rows:
        return
    yield (
        f"**A worker over vLLM** (`LAPS_SD_ENGINE=vllm`) and vLLM alone on the same {rows[0]['setting']}, all there from the start, first come first served: the runner, the"
        " engine and its reports against vLLM's loop; no network on either side."
    )
    yield from table(
        ("", "tokens per CPU second", "of vLLM alone", "texts as vLLM's"),
        (
            (
                mode,
                f"{statistics.median(row['worker_speed'] for row in own):,.0f}",
                "–" if mode == PLAIN else str(ratio(rows, mode, PLAIN, "worker_speed")),
                f"{sum(row['same_texts'] for row in own):,}",
            )
            for mode in (PLAIN, *SAMPLING)
            if (own := [row for row in rows if row["mode"] == mode])
        ),
    )


def _costs(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the CPU time of decisions."""
    if not any(row["measured"] == "cost" for row in rows):
        return
    alone = least(rows, FCFS, INTERPRETED, "schedule_ms")
    yield (
        f"**What a decision costs**: {SLOTS} requests in a step, {WAITING:,} waiting, vLLM's scheduler with a virtual runner; CPU milliseconds a step, the least of the"
        f" turns. *Core and choose* selects the requests of the step and reports it; *schedule* is all of the scheduler's step (vLLM's FCFS: {alone:.2f})."
    )
    yield from table(
        ("", *(f"{part}, {core}" for core in (INTERPRETED, COMPILED) for part in ("core and choose", "schedule"))),
        (
            (
                mode.name,
                *(
                    "–" if (found := least(rows, mode.name, core, key)) is None else f"{found:.2f}"
                    for core in (INTERPRETED, COMPILED)
                    for key in ("decision_ms", "schedule_ms")
                ),
            )
            for mode in OURS
        ),
    )  # fmt: skip
