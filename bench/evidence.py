"""Writes docs/evidence.md and its figures from what `laps-sd bench policy`, `serve`, `control`, `engine` and `gateway` wrote with `--json`:
no figure in them is typed by hand.

    python -m bench.evidence                  # page and figures from the newest bench/results/*-policy.json, *-serve.json, …
    python -m bench.evidence --results FILE   # from another one
    python -m bench.evidence --check          # write nothing; exit 1 when the page is out of date

The figures need matplotlib (`pip install 'laps-sd[bench]'`), the page does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._markdown import spread, table, verdict_of
from bench._measured import carried, deciding, engine, engine_again, memory_bound, policy_rows, served
from bench._policy_tables import expected_text
from bench.figures import draw_overview, draw_regime, named, ratios
from bench.policy import OURS, RIVALS, SWEEP_SHARE, WORK_SHARE

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence.md"
FIGURES = ROOT / "docs" / "figures"
GENERATED = "<!-- Written by `python -m bench.evidence` from the results of `laps-sd bench policy`, `serve`, `control`, `engine` and `gateway`. Run them again to change it. -->"
MEASURED = {
    "serve": served,
    "control": deciding,
    "engine": engine,
    "engine-again": engine_again,
    "memory-bound": memory_bound,
    "gateway": carried,
}
"""Benchmarks of real processes, each with the function that writes its section."""
LENGTH_ONLY = ("srpt-length", "sjf-length")
"""Policies that know predicted lengths and nothing about acceptance: the rivals that matter."""
PAPER = "[arXiv 2505.17074](https://arxiv.org/abs/2505.17074)"
PAPER_CLAIM = "39 %"
"""Claim of the paper about its own experiments."""
ORIGINS = {
    "traces/azure2023_conv.csv.gz": "Azure/AzurePublicDataset, conversation trace of 2023 (Patel et al., Splitwise, ISCA 2024); CC BY 4.0",
    "traces/length_prediction_pairs.csv.gz": "James-QiuHaoran/LLM-serving-with-proxy-models: true lengths (vicuna-13b, up to 511) "
    "and what a fine-tuned BERT classifier said of them; Apache-2.0",
    "traces/servegen_deepseek-r1.jsonl.gz": "alibaba/ServeGen, deepseek-r1: summaries of clients, lengths as quantiles "
    "(Xiang et al., arXiv 2505.09999); Apache-2.0",
    "acceptance/per_step.jsonl.gz": "logs of the Spec-Bench harness (yukiki-jc, BNukhkadiev, BrodskaiaIrina) and of REST: tokens of "
    "each verification step, greedy, batch 1; Apache-2.0",
    "prompts/mbpp.jsonl.gz": "MBPP (Austin et al., 2021): characters of the reference programs; CC BY 4.0",
}
"""Recordings that regimes use."""

Row = Mapping[str, Any]


class Results:
    """Results of one run of `laps-sd bench policy`, for queries."""

    def __init__(self, path: Path) -> None:
        self.all: dict[str, Any] = json.loads(path.read_bytes())
        self.about: dict[str, Any] = self.all["about"]
        self.regimes: dict[str, dict[str, Any]] = self.about["regimes"]
        self.name = path.name
        self.source = source_of(path)
        self.reduced = not all(regime["goals"] for regime in self.regimes.values())
        """True if options changed the regimes, so that their goals do not hold for them."""
        rows = self.all["rows"]
        self.verdicts: list[Row] = [row for row in rows if row["kind"] == "verdict"]
        self.swept = list(dict.fromkeys(row["regime"] for row in rows if row["kind"] == "sweep"))
        self._rows = {(row["regime"], row["policy"]): row for row in rows if row["kind"] == "policy"}

    def row(self, regime: str, policy: str) -> Row | None:
        """Return the row of the policy in the regime, if it ran."""
        return self._rows.get((regime, policy))

    def ours(self, regime: str) -> Row:
        """Return the row of `laps-sd`."""
        found: Row = self._rows[regime, OURS]
        return found

    def ratio(self, regime: str, rival: str) -> tuple[float, float, float] | None:
        """Return the mean latency of `laps-sd` over that of a rival, with its interval; None if the rival did
        not run there.
        """
        found = self.ours(regime)["ratios"].get(rival)
        return None if found is None else tuple(found)

    def strongest_length_only(self, regime: str) -> str | None:
        """Return the policy with the least mean latency of those that ran there."""
        ran = [name for name in LENGTH_ONLY if self.row(regime, name)]
        return min(ran, key=lambda name: self._rows[regime, name]["mean_s"], default=None)

    def figures(self) -> list[str]:
        """Return the regimes that have a figure of their own."""
        return [name for name in self.regimes if name in self.swept or name == "mixture"]


def source_of(path: Path) -> str:
    """Return the source that every figure names, so that a figure of other results is found."""
    return f"{path.name} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def newest(benchmark: str) -> Path | None:
    """Return the newest results of the benchmark, by name, which begins with the date. Return None if there
    are none.
    """
    return max((ROOT / "bench" / "results").glob(f"*-{benchmark}.json"), default=None)


# -- words ----------------------------------------------------------------------------------------------------------------


def against(ratio: float) -> str:
    """Return a ratio of means as a phrase."""
    return f"{abs(1 - ratio):.0%} {'below' if ratio < 1 else 'above'}".replace("%", " %")


def share(value: float) -> str:
    """Return a percentage, with a decimal if it is small."""
    return (
        f"{value:.0%}".replace("%", " %")
        if value >= 0.0995 or not value
        else f"{value:.1%}".replace("%", " %")
    )


def listed(names: Sequence[str]) -> str:
    """Return the names of regimes as part of a sentence."""
    return ", ".join(f"`{name}`" for name in names) or "none"


def lengths_text(lengths: Row) -> str:
    """Return the description of lengths as text."""
    match lengths["kind"]:
        case "constant":
            text = f"{lengths['value']}"
        case "lognormal":
            text = f"lognormal, median {lengths['median']:g}, σ {lengths['sigma']:g}"
        case "code":
            text = "reference programs"
        case kind:
            text = f"recorded ({kind})"
    return text + (f", × {lengths['times']:g}" if lengths["times"] != 1 else "")


def acceptance_text(acceptance: Row) -> str:
    """Return the description of acceptance as text."""
    if acceptance["kind"] == "process":
        return f"Beta, mean {acceptance['mean']:g}, concentration {acceptance['concentration']:g}"
    return "replayed " + ", ".join(acceptance["runs"])


def predictor_text(predictor: Row) -> str:
    """Return the description of the length prediction as text."""
    return {"noisy": f"σ {predictor['sigma']:g}", "recorded": "recorded classifier", "none": "none"}[
        predictor["kind"]
    ]


def arrivals_text(arrivals: Row) -> str:
    """Return the description of arrivals as text."""
    process = {"poisson": "Poisson", "gamma": f"gamma, CV {arrivals['cv']:g}", "trace": "recorded"}
    if arrivals["process"] == "burst":
        return "all at once"
    return f"{process[arrivals['process']]}, load {arrivals['load']:g}"


# -- the page -------------------------------------------------------------------------------------------------------------


def page(results: Results, measured: Mapping[str, Path] | None = None) -> str:
    """Return the text of docs/evidence.md. `measured` has the results of the benchmarks of `MEASURED`, by
    name, which have a section each.
    """
    measured = measured or {}
    parts = (
        _head(results, on_processes="serve" in measured), _goals(results), _rivals(results), _nothing(results), _tail(results), _levels(results),
        _estimates(results), _paper(results), *(write(measured[name]) for name, write in MEASURED.items() if name in measured),
        _data(results), _limits(results),
    )  # fmt: skip
    lines = [line for part in parts for line in part]
    text = "\n".join(lines).replace("\n\n\n", "\n\n")
    return text.rstrip() + "\n"


def _head(results: Results, *, on_processes: bool) -> Iterator[str]:
    about = results.about
    strongest = [
        (regime, found)
        for regime in results.regimes
        if (rival := results.strongest_length_only(regime)) and (found := results.ratio(regime, rival))
    ]
    fcfs = [found for regime in results.regimes if (found := results.ratio(regime, "fcfs"))]
    yield from (GENERATED, "# Evidence: what LAPS-SD gains, and where it gains nothing", "")
    yield "This page compares orders of the same requests on the same virtual machines: the production scheduling core runs in"
    yield "virtual time ([simulator](../simulator)), with the same estimates, memory rules and costs for every policy"
    yield "([policies.md](policies.md)). These are simulations; what they leave out is [at the end](#limits-of-the-simulation)."
    if on_processes:
        yield "The same policies on real processes: [below](#the-same-on-the-real-system)."
    yield ""
    yield f"Run on {about['date']}, {about['seeds']} seeds of each regime ([results](../bench/results/{results.name})):"
    yield from ("", "```", about["command"], "```", "")
    yield "To repeat it, with the recordings of [the last but one section](#on-what-data) in a folder:"
    yield from ("", "```", f"{about['command']} --data FOLDER --json bench/results/DATE-policy.json")
    yield from ("python -m bench.evidence", "```", "")
    yield "Ratios are mean latencies divided, paired by seed (each seed draws the same jobs for every policy), geometric mean over seeds"
    yield "with the 95 % interval (Student's t on the logarithm). Below 1, `laps-sd` is faster. **Bold**: the whole interval is below 1;"
    yield "*italic*: all of it is above; otherwise no difference is shown."
    if results.reduced:
        yield ""
        yield "**This is a reduced run: its regimes are not those of [bench/regimes](../bench/regimes), and its figures show nothing but the form of this page.**"
    yield from ("", "## In short", "")
    if fcfs:
        middles = [found[0] for found in fcfs]
        yield f"- Against `fcfs`: {_count(fcfs)}; ratios from {min(middles):.2f} to {max(middles):.2f}."
    if strongest:
        middles = [found[0] for _, found in strongest]
        best = min(strongest, key=lambda each: each[1][0])[0]
        yield (
            f"- Against the strongest policy that uses predicted lengths but not acceptance: "
            f"{_count([found for _, found in strongest])}; ratios from {min(middles):.2f} (`{best}`) to {max(middles):.2f}, "
            f"median {statistics.median(middles):.2f}."
        )
        alone = statistics.median(
            float(row["ratio_fcfs"])
            for regime, _ in strongest
            if (row := results.row(regime, results.strongest_length_only(regime) or ""))
            and "ratio_fcfs" in row
        )
        yield (
            f"- That policy is itself at a median of {alone:.2f} of `fcfs`: this part of the first line comes from running short requests first, and only "
            "the second line from using acceptance."
        )
    yield ""


def _count(found: Sequence[Sequence[float]]) -> str:
    words = [verdict_of(each) for each in found]
    counts = [f"{word} in {words.count(word)}" for word in ("faster", "slower") if word in words]
    if "no difference shown" in words:
        counts.append(f"no difference shown in {words.count('no difference shown')}")
    return f"{', '.join(counts)} of {len(words)} regimes"


def _goals(results: Results) -> Iterator[str]:
    yield from ("## Goals", "")
    if results.reduced:
        yield "None were judged: this run changed the regimes (fewer requests, another load …), and goals hold for them as they are in"
        yield "[bench/regimes](../bench/regimes)."
        yield ""
        return
    met = sum(verdict["met"] for verdict in results.verdicts)
    everywhere = [verdict for verdict in results.verdicts if _is_everywhere(verdict)]
    yield f"{met} of {len(results.verdicts)} are met. A goal is judged by the mean over seeds; the last column shows whether the whole"
    yield "interval is inside it too. The command exits with an error when one is missed."
    rows = [
        (
            f"`{verdict['regime']}`",
            f"`{named(verdict['policy'])}`: {expected_text({**verdict, 'of': named(verdict['of'])})}",
            f"{verdict['found']:.3f} [{verdict['found_low']:.3f}, {verdict['found_high']:.3f}]",
            "met" if verdict["met"] else "**missed**",
            "yes" if _inside(verdict) else "no",
        )
        for verdict in results.verdicts
        if not (_is_everywhere(verdict) and verdict["met"])
    ]
    if rows:
        yield from table(("regime", "goal", "found", "", "interval inside"), rows)
    yield "In every regime (those that miss it are in the table):"
    yield ""
    for figure, what, worst_of in (
        ("mean_s", "what the levels cost: `laps-sd` over `sd-index`, the same policy without them", max),
        (
            "levels_at_work",
            f"levels of `laps-sd` with at least {share(WORK_SHARE)} of the machine's time",
            min,
        ),
    ):
        own = [verdict for verdict in everywhere if verdict["figure"] == figure]
        if own:
            worst = worst_of(own, key=lambda verdict: verdict["found"])
            bound = expected_text(worst).split()[-2:]
            yield (
                f"- {what}, {' '.join(bound)}: met in {sum(verdict['met'] for verdict in own)} of {len(own)}, "
                f"at worst {worst['found']:.3g} (`{worst['regime']}`)."
            )
    yield ""


def _is_everywhere(verdict: Row) -> bool:
    """Return whether it is one of those that every regime has."""
    return bool(
        verdict["policy"] == OURS and (verdict["of"] == "sd-index" or verdict["figure"] == "levels_at_work")
    )


def _inside(verdict: Row) -> bool:
    most = math.inf if verdict["at_most"] is None else verdict["at_most"]
    return bool(verdict["at_least"] <= verdict["found_low"] and verdict["found_high"] <= most)


def _rivals(results: Results) -> Iterator[str]:
    rivals = [
        rival for rival in RIVALS if rival != OURS and any(results.row(r, rival) for r in results.regimes)
    ]
    yield from ("## Against each rival", "")
    yield "Mean latency of `laps-sd`, divided by that of the rival. A dash means that it did not run there."
    yield from table(
        ("regime", *(f"`{named(rival)}`" for rival in rivals)),
        (
            (f"`{regime}`", *(spread(results.ratio(regime, rival)) for rival in rivals))
            for regime in results.regimes
        ),
    )
    rows = []
    for rival in rivals:
        found = [ratio for regime in results.regimes if (ratio := results.ratio(regime, rival))]
        middles = [ratio[0] for ratio in found]
        words = [verdict_of(ratio) for ratio in found]
        counts = (str(words.count(word)) for word in ("faster", "no difference shown", "slower"))
        rows.append(
            (
                f"`{named(rival)}`",
                str(len(found)),
                *counts,
                f"{min(middles):.2f} … {statistics.median(middles):.2f} … {max(middles):.2f}",
            )
        )
    yield from table(
        ("rival", "regimes", "faster", "no difference shown", "slower", "ratio: least … median … greatest"),
        rows,
    )
    yield "`oracle` knows the true remaining service of each request; no policy can be expected to be much better."
    yield "`laps-sd-paper` is our reading of what is public of the paper's algorithm, *perceived levels* its more favourable reading."
    yield ""
    if len(results.regimes) > 1:
        yield "![laps-sd by regime, with goals](figures/policy-overview.svg)"
        yield ""
    for regime in results.figures():
        yield f"![{results.regimes[regime]['title']}](figures/policy-{regime}.svg)"
        yield ""
    if results.swept:
        yield f"The curves over load ran {share(SWEEP_SHARE)} of the requests of their regime at each load."
        yield ""


def _nothing(results: Results) -> Iterator[str]:
    yield from ("## Where it gains nothing", "")
    yield "The strongest rival that knows lengths only (of `srpt-length` and `sjf-length`, as far as they ran) and `fcfs`, in every regime,"
    yield "the largest gain from acceptance first."
    judged: list[tuple[str, str, tuple[float, float, float]]] = []
    for regime in results.regimes:
        rival = results.strongest_length_only(regime)
        found = results.ratio(regime, rival) if rival else None
        if rival and found:
            judged.append((regime, rival, found))
    judged.sort(key=lambda each: each[2][0])
    yield from table(
        ("regime", "strongest by length", "laps-sd / it", "", "laps-sd / fcfs", "that rival / fcfs"),
        (
            (
                f"`{regime}`",
                f"`{rival}`",
                spread(found),
                verdict_of(found),
                spread(results.ratio(regime, "fcfs")),
                f"{(results.row(regime, rival) or {}).get('ratio_fcfs', math.nan):.3f}",
            )
            for regime, rival, found in judged
        ),
    )
    by_word = {
        word: [regime for regime, _, found in judged if verdict_of(found) == word]
        for word in ("faster", "no difference shown", "slower")
    }
    yield f"- Acceptance gains something against it: {listed(by_word['faster'])}."
    yield f"- No difference is shown: {listed(by_word['no difference shown'])}."
    yield f"- It loses: {listed(by_word['slower'])}."
    idle = [
        regime
        for regime in results.regimes
        if (found := results.ratio(regime, "fcfs")) and verdict_of(found) != "faster"
    ]
    yield f"- Nothing is gained even against `fcfs`: {listed(idle)}."
    yield ""


def _tail(results: Results) -> Iterator[str]:
    yield from ("## What it costs: the tail", "")
    yield "Running short requests first makes the longest wait longer. Ratios to `fcfs` and `srpt-length` of the 99th percentile of latency and of the longest time"
    yield "that a request did not run. The reserved share (slots for the oldest requests) bounds it; it is on unless the regime turns it off."

    def cells(regime: str) -> Iterator[str]:
        ours = results.ours(regime)
        yield f"`{regime}`"
        yield "on" if results.regimes[regime]["settings"].get("reserved_share", True) else "off"
        for figure in ("p99_", "longest_wait_"):
            for base in ("fcfs", "srpt_length"):
                key = f"{figure}ratio_{base}"
                known = key in ours
                yield spread((ours[key], ours[f"{key}_low"], ours[f"{key}_high"])) if known else "–"
        yield f"{ours['preemptions']:.2f}"
        yield f"{ours['evictions']:.2f}"

    yield from table(
        (
            "regime", "reserved share", "p99 / fcfs", "p99 / srpt-length", "longest wait / fcfs",
            "longest wait / srpt-length", "preemptions per request", "evictions per request",
        ),
        (tuple(cells(regime)) for regime in results.regimes),
    )  # fmt: skip


def _levels(results: Results) -> Iterator[str]:
    yield from ("## Levels and perceptibility", "")
    levels = sorted({int(level) for regime in results.regimes for level in results.ours(regime)["level_s"]})
    yield "Share of the machine's time that each level of `laps-sd` carried, and in brackets how many requests ever ran in it (a request falls from"
    yield "level to level as it comes nearer to its end)."

    def carried(regime: str, level: str) -> str:
        row = results.ours(regime)
        seconds = row["level_s"].get(level, 0.0)
        if not seconds:
            return ""
        requests = row["level_requests"][level]
        return f"{share(seconds / sum(row['level_s'].values()))} ({requests:.{0 if requests >= 1 else 1}f})"

    yield from table(
        ("regime", *(f"level {level}" for level in levels)),
        ((f"`{regime}`", *(carried(regime, str(level)) for level in levels)) for regime in results.regimes),
    )
    yield "A request is *perceptible* when its remaining service is known well enough to give it a level. The table shows how many are perceptible at arrival, how many ever,"
    yield "and after how many rounds (of those that become so; at arrival counts as 0):"
    names = [name for name in RIVALS if name in (OURS, "laps-sd-paper")]
    found = [
        (regime, name, row)
        for regime in results.regimes
        for name in names
        if (row := results.row(regime, name))
    ]

    def rounds(row: Row) -> tuple[str, ...]:
        keys = ("", "_p50", "_p90")
        values = [row[f"perceptible_after_rounds{key}"] for key in keys]
        return tuple("–" if value is None else f"{value:.1f}" for value in values)

    yield from table(
        ("regime", "length prediction", "policy", "at arrival", "ever", "rounds, mean", "p50", "p90"),
        (
            (
                f"`{regime}`",
                predictor_text(results.regimes[regime]["workload"]["predictor"]),
                f"`{named(name)}`",
                share(row["perceptible_at_arrival_share"]),
                share(row["perceptible_share"]),
                *rounds(row),
            )
            for regime, name, row in found
        ),
    )
    if {"tail", "no-predictor"} <= set(results.regimes):
        yield "`tail` and `no-predictor` are the same requests with and without a length prediction."
        yield ""


def _estimates(results: Results) -> Iterator[str]:
    yield from ("## How wrong the estimates are", "")
    yield "Remaining service, in machine seconds: what was charged afterwards divided by the estimate, at arrival, after the first round, when the request"
    yield "became perceptible, and after 32 rounds. *All*: the sums divided, 1 if the mean is right. *p10 … p90*: of the requests. *Error*: the root mean"
    yield "square of the logarithm. The last column is the error of an estimate that knows the class's acceptance only (that of `srpt-length`)."
    shown: dict[str, str] = {}
    for regime, about in results.regimes.items():
        shown.setdefault(predictor_text(about["workload"]["predictor"]), regime)
    if "mixture" in results.regimes:
        shown["mixture"] = "mixture"
    rows = []
    for regime in dict.fromkeys(shown.values()):
        theirs = results.row(regime, "srpt-length")
        errors = {(e["moment"], e["basis"]): e["log_rms"] for e in (theirs or {"estimates": ()})["estimates"]}
        for each in results.ours(regime)["estimates"]:
            other = errors.get((each["moment"], each["basis"]))
            rows.append(
                (
                    f"`{regime}`",
                    each["basis"],
                    each["moment"].replace("_", " "),
                    str(each["requests"]),
                    f"{each['actual_s'] / each['predicted_s']:.2f}",
                    f"{each['ratio_p10']:.2f} … {each['ratio_p50']:.2f} … {each['ratio_p90']:.2f}",
                    f"{each['log_rms']:.2f}",
                    "–" if other is None else f"{other:.2f}",
                )
            )
    yield from table(
        (
            "regime",
            "length from",
            "said at",
            "requests",
            "all",
            "p10 … p50 … p90",
            "error",
            "without its own acceptance",
        ),
        rows,
    )


def _paper(results: Results) -> Iterator[str]:
    yield from (f"## The paper's {PAPER_CLAIM}", "")
    yield f"LAPS-SD is the policy of {PAPER}, which reports about {PAPER_CLAIM} lower mean latency than state-of-the-art scheduling. We know of the paper what is"
    yield "public about it, partly at second hand. Number and thresholds of its levels, the rule of demotion, the test of stability, its predictors, its"
    yield "baselines by name, its figures by data set and its code are not public. `laps-sd-paper` is a reconstruction in which each gap is our choice, and"
    yield "`laps-sd` keeps its structure and replaces its estimates. **No figure on this page is the paper's, and none confirms or refutes it.**"
    yield ""
    regime = "mixture"
    if regime in results.regimes:
        mixture = {name: results.ratio(regime, name) for name in RIVALS if name != OURS}
        known = {name: found for name, found in mixture.items() if found}
        said = "; ".join(
            f"{against(found[0])} `{named(name)}` ({spread(found)})" for name, found in known.items()
        )
        yield f"`mixture` comes nearest to what the paper describes ({results.regimes[regime]['title'].split(': ', 1)[-1]}): chat lengths, lengths of MBPP"
        yield "programs, lengths of a reasoning service (not the paper's reasoning data). There the mean latency of `laps-sd` is"
        yield f"{said}."
        yield ""
        row = results.row(regime, "srpt-length")
        if row and "ratio_fcfs" in row:
            yield f"`srpt-length`, which knows nothing of acceptance, is {against(row['ratio_fcfs'])} `fcfs` in the same regime. So a difference of the size"
            yield "that the paper reports means little by itself: it depends on the policy that it is compared with. The part that comes from acceptance is the"
            yield "column of `srpt-length`, and above all the table of [where it gains nothing](#where-it-gains-nothing)."
            yield ""


def _data(results: Results) -> Iterator[str]:
    yield from ("## On what data", "")
    yield "Every regime is a file of [bench/regimes](../bench/regimes)."
    rows = []
    files: set[str] = set()
    for name, regime in results.regimes.items():
        workload, machine = regime["workload"], regime["machine"]
        kinds = workload["kinds"]
        files |= {workload["arrivals"]["file"], workload["predictor"]["file"]}
        files |= {
            part["file"] for kind in kinds for part in (kind["prompt"], kind["output"], kind["acceptance"])
        }
        machines = f"{regime['workers']} × batch {machine['slots']}"
        if machine["kv_tokens"]:
            machines += f", KV {machine['kv_tokens']} tokens"
        traced = workload["arrivals"]["process"] == "trace"
        outputs = "; ".join(dict.fromkeys(lengths_text(kind["output"]) for kind in kinds))
        prompts = "; ".join(dict.fromkeys(lengths_text(kind["prompt"]) for kind in kinds))
        rows.append(
            (
                f"`{name}`",
                regime["title"],
                machines,
                arrivals_text(workload["arrivals"]),
                str(workload["requests"]),
                "recorded" if traced else outputs,
                "recorded" if traced else prompts,
                "; ".join(dict.fromkeys(acceptance_text(kind["acceptance"]) for kind in kinds)),
                predictor_text(workload["predictor"]),
            )
        )
    yield from table(
        (
            "regime", "what", "workers", "arrivals", "requests per seed", "output tokens", "prompt tokens", "acceptance",
            "length prediction",
        ),
        rows,
    )  # fmt: skip
    used = sorted(files - {""})
    if used:
        yield "Recordings (public; not part of this repository):"
        yield from table(("file", "origin"), ((f"`{file}`", ORIGINS.get(file, "one's own")) for file in used))
    modelled = list(
        {json.dumps(_costs(regime)): _costs(regime) for regime in results.regimes.values()}.values()
    )
    for costs in modelled:
        yield (
            f"The machine is a model of a 7B-like target with a small draft on one GPU (our choice, not a measurement): a round of B sequences takes "
            f"{costs['round_s'] * 1e3:g} ms + {costs['verified_token_s'] * 1e3:g} ms × {costs['draft_len'] + 1} × B + {costs['context_token_s'] * 1e3:g} ms × context tokens "
            f"({costs['draft_len']} tokens drafted), prefill {costs['prefill_token_s'] * 1e3:g} ms and swapping {costs['swap_token_s'] * 1e3:g} ms a token."
        )
        yield ""


def _costs(regime: Row) -> dict[str, float]:
    names = ("round_s", "verified_token_s", "draft_len", "context_token_s", "prefill_token_s", "swap_token_s")
    return {name: regime["machine"][name] for name in names}


def _limits(results: Results) -> Iterator[str]:
    yield from ("## Limits of the simulation", "")
    yield from (
        "- The cost of a round is the formula above, with a fixed draft length. Real workers choose a new draft length for each round, and their",
        "  times scatter.",
        "- Deciding costs no time, and messages take none unless a regime sets it. `laps-sd bench control` measures the cost of decisions.",
        "- Acceptance is either a model (one value for each request, drifting, with noise) or replayed from greedy runs of one model at batch 1. A",
        "  replayed request that is longer than its recording starts it again.",
        "- Acceptance and length are drawn independently of each other and of the prompt's length, except what the class of a request has in common.",
        "- `σ` errors of a length prediction are independent of everything else. Real predictors are worse than σ 0.3 and err in ways that depend on",
        "  the request: the recorded classifier is the only real one here.",
        "- Predictions are made once, at arrival. No request is cancelled, no worker fails, no prompt shares a prefix with another.",
        "- A regime is stationary (but for bursts), and the learning starts with no history in each run: its cost is in the figures.",
        "- Intervals are over seeds of the same regime. They do not cover other regimes.",
        "",
        "That the simulator itself is right is tested: FCFS against the recursion of Lindley and the formula of Pollaczek and Khinchine, the oracle against",
        "exact SRPT, conservation of work for each policy, the same commands for the same jobs ([tests/sim](../tests/sim)).",
    )


# -- the command ----------------------------------------------------------------------------------------------------------


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
    if options.check:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
        if stale:
            print("docs/evidence.md is out of date: run python -m bench.evidence", file=sys.stderr)
        return int(stale)
    for path in draw(results, FIGURES, measured.get("serve")):
        print(f"{path.relative_to(ROOT)} drawn")
    PAGE.write_text(text, encoding="utf-8")
    print(f"docs/evidence.md written from {results.source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
