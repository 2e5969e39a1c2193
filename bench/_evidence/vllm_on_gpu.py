"""Section of docs/evidence/vllm.md on LAPS-SD inside vLLM on a GPU: what was measured, and what explains it, computed."""

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
    "- *Without any hint a burst has 0.85 and 0.91 of FCFS's mean latency*, the first one 0.78 in the run before, and 0.72 in both runs once 600 other requests have been served. At load 1.2 it has 0.69 and 0.72.",
    "  With equal times for all orders the two bursts would have 0.82 and 0.87, and before the exact learning 0.84 in the mean of six: the steps with prompts of these two runs took 13.6 to 13.8 ms, those of FCFS 9.6 to 10.6.",
    "  Lengths are predicted from the first request on, by start weights ([decision 0056](../decisions/0056-prompts-are-read-as-words-inside-vllm.md)). Three of the four sources of these requests are among those that the start weights were fitted to;",
    "  a source that they have not seen is below.",
    "- *With guesses it gains what the order can gain, and more than vLLM's priority policy does with them*: 0.62 to 0.71 of FCFS's mean in the bursts beside 0.71 to 0.79, and beside 0.60 to 0.73 for vLLM's priority by the true lengths.",
    "  It joins requests to a full step together, so fewer steps compute prompts. With a class it has 0.65 to 0.73, at load 1.2 0.62 and 0.72.",
    "- *While a full batch waits*, its tokens per second are 0.96 to 1.04 of FCFS's (vLLM's priority 0.91 to 1.04): decisions are made while the device works.",
    "- *The slowest wait longer*, as under every order by length: 1.08 to 1.19 of FCFS's p99 in the bursts (vLLM's priority 1.12 to 1.18), and 1.37 to 1.77 at load 1.2, where FCFS makes no request wait long.",
    "- *Steps with prompts* took 9 to 14 ms, the others 7.0: the CPU launches the former in parts, and a launch took 8 to 13 ms. So two runs of the same order differ by up to 0.07 of FCFS's mean in the burst and 0.14 in the load.",
)
"""Sentences that follow from the measured runs; they are written by hand."""
ONE_KIND_FINDINGS = (
    "- *Class* is the same as *no hint* here, since all requests have one: 0.90 and 0.83, 0.93 and 1.06. So far apart are two runs of the same scheduler; steps with prompts took 8.7 to 12.1 ms in these four.",
    "  At load 1.2 the true lengths gain 0.13, FCFS had the shortest such steps but one and *learnt before* the longest. Computed with equal times for all, over four seeds, *no hint* has 0.94 in the burst and 0.92 in the load.",
    "- *While a full batch waits*, tokens per second are 1.05 to 1.12 of FCFS's, whose steps with prompts were slower in that run.",
    "- *Where lengths hardly differ, no order gains much, and the slowest wait far longer*: 1.8 to 3.5 times as long at load 1.2.",
)
"""The same for requests of one kind."""
QUICK_FINDINGS = (
    "- *What steps cost.* Two costs for each run give its mean, p99, duration and number of steps within a few per cent (save the duration of *learnt before*, where the longest request",
    "  started earlier than it did on the GPU). C rose from run to run, and FCFS was first; with torch.compile it does not rise.",
    "- *What an order could gain.* Not much: a third of the requests is served before any waits, and the longest alone takes 850 of about 1,000 steps. An order that puts it last ends later.",
)
"""Sentences that follow from the earlier burst; they are written by hand."""
CELLS = {
    "burst of 400": "burst of 400, 32 places, fast",
    "load 1.2": "load 1.2, 400 requests, 32 places, fast",
}
"""The computed setting of each measured one."""
GRAPH_LAUNCH_MS = 2.5
"""CPU time to launch a step that is a CUDA graph: an estimate, the same for all runs."""


def vllm_on_gpu(path: Path) -> Iterator[str]:
    """Yield the section: the measured runs and what was computed for them, an earlier burst, the worker and the tests."""
    rows, source, about = read_rows(path)
    measured = [row for row in rows if row["measured"] == "shape"]
    yield f"{about['machine']} vLLM {about['vllm']}, its second model runner, async scheduling, an {about['shape']['shape'].upper()} shape in {about['shape']['dtype']} with weights at random and vLLM's default compilation:"
    yield f"{_setting(measured, about['shape'])} {source}. *Before*: `{about['before_command']}`, {about['before_date']}, on another machine of that kind, before the exact learning from the first 128 requests ([decision 0035](../decisions/0035-lengths-are-learned-from-hashed-words.md))."
    yield ""
    computed = newest(COMPUTED)
    cells = [] if computed is None else [row for row in read_rows(computed)[0] if row["computed"] == "cell"]
    for setting, seed in dict.fromkeys((row["setting"], row["seed"]) for row in measured):
        now, before = (
            [
                row
                for row in rows
                if row["measured"] == name and (row["setting"], row["seed"]) == (setting, seed)
            ]
            for name in ("shape", "shape before")
        )
        yield from _measured(setting, now, before, cells)
    yield from (*FINDINGS, "")
    yield from _one_kind([row for row in rows if row["measured"] == "one kind"], about)
    if computed is not None:
        yield from _where_an_order_gains(cells, read_rows(computed)[2])
        quick = [row for row in rows if row["measured"] == "quick start"]
        yield from _quick_start(quick, about)
        yield from _explained(quick, computed)
    yield from _worker([row for row in rows if row["measured"] == "worker"])
    yield from _tests([row for row in rows if row["measured"] == "tests"])


def _setting(rows: Sequence[Row], on: Row) -> str:
    """Return the size of the steps and of the requests in a sentence."""
    return (
        f"compilation mode {on['compilation']}, CUDA graphs {on['cuda_graphs']}. {on['slots']} requests in a step, {on['residents']} resident, {on['budget']:,} tokens a step,"
        f" recorded lengths (mean {_mean_length(rows):.0f}) that no scheduler sees."
    )


def _mean_length(rows: Sequence[Row]) -> float:
    mean: float = rows[0]["tokens"] / rows[0]["requests"]
    return mean


def _measured(
    setting: str, rows: Sequence[Row], before: Sequence[Row], cells: Sequence[Row]
) -> Iterator[str]:
    """Yield the runs of a setting in the order in which they ran, each with an earlier run of the same requests and what
    was computed for such a setting.
    """
    base = next(row for row in rows if row["mode"] == FCFS)
    base_before = next((row for row in before if row["mode"] == FCFS), None)
    earlier = (
        {} if base_before is None else {row["mode"]: row["mean"] / base_before["mean"] for row in before}
    )
    alike = [row for row in cells if row["setting"] == CELLS.get(setting)]
    begin = " within 2 s" if setting.startswith("burst") else f", {rows[0]['requests']} requests"
    seed = rows[0]["seed"]
    ended = "" if len(rows) == len(ON_SHAPE) else " The time was up before the last order ran."
    yield f"**Measured: {setting}{begin}, seed {seed}; one run of each, so there is no interval.** Seconds; in the order in which they ran.{ended} *Before*: the ratio of the means for the same requests in an earlier run. *Computed*: that ratio in the mean of six seeds, as below."
    yield from table(
        ("", "mean", "/ FCFS", "before", "computed", "p99", "/ FCFS", "first token", "lasted", "steps", "with prompts", "such a step, ms", "others, ms", "scheduler, CPU ms a step"),
        (
            (
                row["mode"],
                f"{row['mean']:.2f}",
                "–" if row is base else f"**{row['mean'] / base['mean']:.2f}**",
                "–" if row is base or row["mode"] not in earlier else f"{earlier[row['mode']]:.2f}",
                _short(ratio(alike, row["mode"], FCFS, "mean")) if row is not base and alike else "–",
                f"{row['p99']:.1f}",
                "–" if row is base else f"{row['p99'] / base['p99']:.2f}",
                *(f"{row[name]:.2f}" for name in ("first_token", "lasted_s")),
                f"{row['steps']:,}",
                f"{row['mixed_steps']:,}",
                *(f"{row[name]:.1f}" for name in ("mixed_step_ms", "decode_step_ms")),
                f"{row['scheduler_ms']:.2f}",
            )
            for row in rows
        ),
    )  # fmt: skip


def _one_kind(rows: Sequence[Row], about: Row) -> Iterator[str]:
    """Yield the runs with requests of one source, which the start weights have not seen."""
    if not rows:
        return
    yield f"**Measured: requests of one kind, from a source that the start weights have not seen** (HaluEval's user queries with the answers of one chat model, mean {_mean_length(rows):.0f} tokens, of the same seed and size; `{about['one_kind_command']}`, before the exact learning). Seconds; in the order in which they ran."
    base = {row["setting"]: row for row in rows if row["mode"] == FCFS}
    yield from table(
        (
            "",
            "",
            "mean",
            "/ FCFS",
            "p99",
            "/ FCFS",
            "first token",
            "lasted",
            "with prompts",
            "such a step, ms",
        ),
        (
            (
                row["setting"],
                row["mode"],
                *_beside(row, base[row["setting"]], "mean", 2),
                *_beside(row, base[row["setting"]], "p99", 1),
                *(f"{row[name]:.2f}" for name in ("first_token", "lasted_s")),
                f"{row['mixed_steps']:,}",
                f"{row['mixed_step_ms']:.1f}",
            )
            for row in rows
        ),
    )
    yield from (*ONE_KIND_FINDINGS, "")


def _beside(row: Row, base: Row, name: str, digits: int) -> tuple[str, str]:
    """Return a figure of a row, and what it is of the base's."""
    return f"{row[name]:.{digits}f}", "–" if row is base else f"{row[name] / base[name]:.2f}"


def _quick_start(rows: Sequence[Row], about: Row) -> Iterator[str]:
    """Yield an earlier burst with little contention."""
    yield (
        f"**Measured before that: a lighter burst without torch.compile, in which no order had a shorter mean than FCFS.** {rows[0]['requests']} requests within 2 s, one seed, the interpreted core, and requests"
        f" joined a full step one by one; {_setting(rows, about['quick_start'])} Steps with a part of a prompt are launched kernel by kernel (`{about['quick_start_command']}`). Seconds; in the order in which they ran."
    )
    yield from table(
        ("", "mean", "p50", "p99", "first token", "lasted", "steps", "tokens/s"),
        (
            (
                row["mode"],
                *(f"{row[name]:.2f}" for name in ("mean", "p50", "p99", "first_token", "lasted_s")),
                f"{row['steps']:,}",
                f"{row['tokens_per_s']:,.0f}",
            )
            for row in rows
        ),
    )  # fmt: skip


def _explained(measured: Sequence[Row], path: Path) -> Iterator[str]:
    rows, source, about = read_rows(path)
    fits = {row["mode"]: row for row in rows if row["computed"] == "fit"}
    of_mode = {row["mode"]: row for row in measured}
    yield (
        f"**Computed: why that burst was so.** The same requests at the same times on that clock ({source})."
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
    yield from ("", *QUICK_FINDINGS, "")


def _where_an_order_gains(cells: Sequence[Row], about: Row) -> Iterator[str]:
    yield "**Computed: where an order gains.** Requests on vLLM's real schedulers, without a model, on a virtual clock: A + B for each request where no prompt is in the step, C + D for each token where one is."
    yield "Mean latency over FCFS's with half the width of its 95 % interval, and the same for p99 in brackets, paired by seed. A burst arrives within 2 s."
    yield f"*Slow*: C is {about['slow_mixed_ms']:g} ms, as without torch.compile; *fast*: {about['fast_mixed_ms']:g} ms, as with it. Bold: all of the interval is below 1; italic: above."
    yield "*One unseen kind*: user queries of a source that the start weights have not seen."
    yield "Requests join a full step together ([decision 0054](../decisions/0054-requests-join-a-full-step-together.md)), as in the measured runs."
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
    yield "EAGLE, EAGLE-3 and MTP: the demo pair's target with heads that the tests train; in each comparison 20 of 20 texts were equal, and of the first draft tokens 0.35 to 0.39 were accepted, of MTP's 0.46."
    yield "Not run on a GPU: Medusa and other draft heads, quantised weights, more than one GPU, and torch 2.13."
    yield ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"
