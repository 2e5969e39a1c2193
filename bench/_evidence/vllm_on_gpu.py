"""Section of docs/evidence.md on LAPS-SD inside vLLM on a GPU: what was measured, and what explains it, computed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench._evidence.results import Row, newest, read_rows
from bench._markdown import spread, table
from bench._vllm.figures import ratio
from bench._vllm.modes import FCFS
from bench._vllm.on_shape import ON_SHAPE
from bench._vllm.workers import PLAIN
from bench.report import Interval

COMPUTED = "vllm-computed"
FINDINGS = (
    "- *What steps cost.* Two costs for each run give its mean, p99, duration and number of steps within a few per cent (save the duration of *learnt before*, where the longest request",
    "  started earlier than it did on the GPU). They are not the same in all runs: C was lowest in the run of FCFS, which was the first, and highest in the last. The CPU time that was measured",
    "  shows the same, without this model. Which of the two matters, the order of requests or the place of the run, one burst cannot show, and why C rose is not known. The benchmark has",
    "  FCFS at any place since then, and the next run shows the times and launches of both kinds of steps.",
    "- *What an order could gain.* Not much: a third of the requests is served before any waits, and the longest alone takes 850 of about 1,000 steps. An order that puts it last ends later. With twice",
    "  the requests and half the places the same orders gain a third.",
    "- *Without a hint* LAPS-SD gains little over FCFS in bursts of such lengths: their standard deviation is 0.96 of the mean (0.46 to 0.55 within a source), and an order that serves the least served",
    "  first gains only where it is above the mean. It needs a class, a guess, or time to learn: at load 1.2 it gains, and its slowest 1 % wait longer, as under every order by length.",
)
"""What follows from both tables; written by hand."""
GRAPH_LAUNCH_MS = 2.5
"""CPU time to launch a step that is a CUDA graph: an estimate, the same for all runs."""


def vllm_on_gpu(path: Path) -> Iterator[str]:
    """Yield the section: one measured burst, what explains it, other settings, the worker and the tests."""
    rows, source, about = read_rows(path)
    on = about["shape"]
    measured = [row for row in rows if row["measured"] == "shape"]
    yield from ("## Inside vLLM on a GPU", "")
    yield f"{about['machine']} vLLM {about['vllm']}, its second model runner, async scheduling, an {on['shape'].upper()} shape in {on['dtype']} with weights at random, compilation mode {on['compilation']}, CUDA graphs"
    yield f"{on['cuda_graphs']}: steps without a part of a prompt are graphs, all others are launched kernel by kernel. {on['slots']} requests in a step, {on['residents']} resident, {on['budget']:,} tokens a step,"
    yield f"recorded lengths (mean {measured[0]['tokens'] / measured[0]['requests']:.0f}) that no scheduler sees. {source}."
    yield ""
    yield from _measured(measured)
    computed = newest(COMPUTED)
    if computed is not None:
        yield from _explained(measured, computed)
    yield from _worker([row for row in rows if row["measured"] == "worker"])
    yield from _tests([row for row in rows if row["measured"] == "tests"])


def _measured(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the runs in the order in which they ran."""
    settings = ", ".join(dict.fromkeys(row["setting"] for row in rows))
    seeds = len({row["seed"] for row in rows})
    best = min(rows, key=lambda row: float(row["mean"]))["mode"]
    verdict = (
        "no order had a shorter mean than FCFS" if best == FCFS else f"the shortest mean is that of {best}"
    )
    yield f"**Measured: {settings}, within 2 s; {_counted(seeds, 'seed')}, so there is no interval, and {verdict}.** Seconds; in the order in which they ran."
    yield from table(
        ("", "mean", "p50", "p99", "first token", "lasted", "steps", "tokens/s", "while twice a step is unfinished", "scheduler, CPU ms a step", "all CPU, ms a step"),
        (
            (
                row["mode"],
                *(f"{row[name]:.2f}" for name in ("mean", "p50", "p99", "first_token", "lasted_s")),
                f"{row['steps']:,}",
                f"{row['tokens_per_s']:,.0f}",
                f"{row['full_tokens_per_s']:,.0f}",
                *(f"{row[name]:.2f}" for name in ("scheduler_ms", "cpu_ms")),
            )
            for row in rows
        ),
    )  # fmt: skip


def _explained(measured: Sequence[Row], path: Path) -> Iterator[str]:
    rows, source, about = read_rows(path)
    fits = {row["mode"]: row for row in rows if row["computed"] == "fit"}
    of_mode = {row["mode"]: row for row in measured}
    yield (
        "**Computed: why.** The same requests at the same times on vLLM's real schedulers, without a model, on a virtual clock: A + B for each request where"
        f" no prompt is in the step, C + D for each token where one is ({source})."
        f" B is {about['decode_row_ms']:g} ms and D {about['mixed_token_ms']:g} ms; A and C are those that come closest to the measured mean, p99, duration and speed of each run."
    )
    yield from table(
        ("in the order of the runs", "A, ms", "C, ms", "C by the CPU time that was measured, ms", "mean, computed", "measured", "p99, computed", "measured", "steps with prompts", "without"),
        (
            (
                mode,
                f"{fit['decode_ms']:g}",
                f"{fit['mixed_ms']:g}",
                f"{_launch_ms(row, fit):.0f}",
                *(text for name in ("mean", "p99") for text in (f"{fit[name]:.2f}", f"{row[name]:.2f}")),
                f"{fit['mixed_steps']:,}",
                f"{fit['decode_steps']:,}",
            )
            for mode, row in of_mode.items()
            if (fit := fits.get(mode))
        ),
    )  # fmt: skip
    equal = {row["mode"]: row for row in rows if row["computed"] == "equal costs"}
    ratios = ", ".join(
        f"{mode} {row['mean'] / equal[FCFS]['mean']:.2f}" for mode, row in equal.items() if mode != FCFS
    )
    yield f"With C = {about['slow_mixed_ms']:g} ms in all runs the means of this burst over FCFS's would be: {ratios}."
    yield from ("", *FINDINGS, "")
    cells = [row for row in rows if row["computed"] == "cell"]
    yield "**Computed: where an order gains.** Mean latency over FCFS's with half the width of its 95 % interval, and the same for p99 in brackets, paired by seed. A burst arrives within 2 s."
    yield f"*Slow*: C is {about['slow_mixed_ms']:g} ms, as without torch.compile; *fast*: {about['fast_mixed_ms']:g} ms, an estimate for vLLM's default, which has not run. Bold: all of the interval is below 1; italic: above."
    yield "Here requests join a full step together ([decision 0054](decisions/0054-requests-join-a-full-step-together.md)), as they did not in the measured run."
    names = list(dict.fromkeys(row["setting"] for row in cells))
    modes = [mode.name for mode in ON_SHAPE[1:]]
    yield from table(
        ("", "seeds", *modes),
        (
            (name, str(len({row["seed"] for row in own})), *(_pair(own, mode) for mode in modes))
            for name in names
            if (own := [row for row in cells if row["setting"] == name])
        ),
    )


def _launch_ms(row: Row, fit: Row) -> float:
    """Return the CPU time of a step with a prompt, from all CPU time of the run that is not the scheduler's."""
    total_ms = (row["cpu_ms"] - row["scheduler_ms"]) * row["steps"]
    launches_ms: float = total_ms - GRAPH_LAUNCH_MS * (row["steps"] - fit["mixed_steps"])
    return launches_ms / int(fit["mixed_steps"])


def _pair(rows: Sequence[Row], mode: str) -> str:
    return f"{_short(ratio(rows, mode, FCFS, 'mean'))} ({_short(ratio(rows, mode, FCFS, 'p99'))})"


def _short(found: Interval | None) -> str:
    """Return a ratio with half the width of its interval, marked like others."""
    if found is None:
        return "–"
    mark = spread((found.middle, found.low, found.high))[:2].rstrip("0123456789.")
    return f"{mark}{found.middle:.2f}{mark} ±{100 * (math.sqrt(found.high / found.low) - 1):.0f} %"


def _worker(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    ours = [row for row in rows if row["mode"] != PLAIN]
    same = sum(row["same_texts"] for row in ours)
    speeds = "; ".join(
        f"{mode} {statistics.fmean(row['worker_speed'] for row in rows if row['mode'] == mode):,.0f}" for mode in modes
    )  # fmt: skip
    turns = len({row["seed"] for row in rows})
    yield (
        f"**Measured: a worker over vLLM** with the demo pair and speculation, and vLLM alone, 100 requests in each of {_counted(turns, 'turn')}, eager: {same} of {100 * len(ours)} texts of the worker are"
        f" those of vLLM. Tokens per CPU second ({speeds}) differ more between turns than between engines, so they decide nothing."
    )
    yield ""


def _tests(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield "**Tests on the same device.** What is skipped is only for CPUs, or needs numbers that do not depend on the batch. The test that failed found a fault of our metrics, which is mended and has not run on a GPU again."
    yield from table(
        ("tests", "dtype", "`VLLM_BATCH_INVARIANT=1`", "passed", "skipped", "failed"),
        (
            (row["what"], row["dtype"], "yes" if row["invariant"] else "", *(str(row[name]) for name in ("passed", "skipped", "failed")))
            for row in rows
        ),
    )  # fmt: skip
    yield "Not run on a GPU: vLLM's default compilation (torch.compile and its graphs) under our scheduler, EAGLE and other draft heads, quantised weights, more than one GPU, and torch 2.13."
    yield ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"
