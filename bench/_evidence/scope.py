"""Sections of docs/evidence/orders.md and simulation.md on the paper, the data and the limits of the simulation."""

from __future__ import annotations

import json
from collections.abc import Iterator

from bench._evidence.phrases import acceptance_text, against, arrivals_text, lengths_text, predictors_text
from bench._evidence.results import Results, Row
from bench._markdown import spread, table
from bench._policy.regime import OURS, RIVALS
from bench.figures import named

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
    "lengths/alpaca_eval_derived.jsonl.gz": "alpaca_eval: prompts, and lengths of the answers of chat models; CC BY-NC",
    "lengths/prompts.jsonl.gz": "prompts and lengths of answers of the sources that [prompts.toml](../../bench/regimes/prompts.toml) names; "
    "[origin and licence](../lengths.md#where-the-start-weights-come-from) of all but HaluEval",
    "prompts/mbpp.jsonl.gz": "MBPP (Austin et al., 2021): characters of the reference programs; CC BY 4.0",
}
"""Recordings that regimes use."""


def paper(results: Results) -> Iterator[str]:
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


def data(results: Results) -> Iterator[str]:
    yield from ("## On what data", "")
    yield "Every regime is a file of [bench/regimes](../../bench/regimes). *After 1200*: the scheduler has learned from 1,200 other requests of the regime before the"
    yield "first one arrives; elsewhere it begins with nothing."
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
        if regime.get("slowness"):
            machines += ", slower by " + ", ".join(f"{times:.3g}" for times in regime["slowness"])
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
                str(workload["requests"])
                + (f", after {learned}" if (learned := workload.get("learned")) else ""),
                "recorded" if traced else outputs,
                "recorded" if traced else prompts,
                "; ".join(dict.fromkeys(acceptance_text(kind["acceptance"]) for kind in kinds)),
                predictors_text(workload),
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


def limits(results: Results) -> Iterator[str]:
    yield from ("## Limits of the simulation", "")
    yield from (
        "- The cost of a round is the formula above, with a fixed draft length. Real workers choose a new draft length for each round, and their",
        "  times scatter.",
        "- Deciding costs no time, and messages take none unless a regime sets it. `laps-sd bench control` measures the cost of decisions.",
        "- Acceptance is either a model (one value for each request, drifting, with noise) or replayed from greedy runs of one model at batch 1. A",
        "  replayed request that is longer than its recording starts it again.",
        "- Acceptance and length are drawn independently of each other and of the prompt's length, except what the class of a request has in common.",
        "- `σ` errors of a length prediction are independent of everything else. Real predictors are worse than σ 0.3 and err in ways that depend on",
        "  the request: the recorded classifier and the words of prompts are the only real ones here.",
        "- The predictor of the `prompts` regimes begins with start weights that were fitted to sources of most of these prompts",
        "  ([how much](../lengths.md#how-good-it-is)).",
        "- Hints and recorded predictions are made once, at arrival. No request is cancelled, no worker fails, no prompt shares a prefix with another.",
        "- A regime is stationary, but for bursts and for recorded arrivals. The cost of learning is in the figures, except in the regimes that begin",
        "  *after 1200* requests.",
        "- Intervals are over seeds of the same regime. They do not cover other regimes, nor other recordings, since all seeds draw from the same ones: in",
        "  `prompts` each has 2,700 of 10,330 answers, in `replay-eagle` 1,000 requests replay 320 logs.",
        "- A seed of a recorded trace is a window of it, drawn at random, and windows can overlap: of the ten pairs of `azure`'s five, two have 69 % and 35 %",
        "  of their requests in common, so its intervals are too narrow.",
        "",
        "That the simulator itself is right is tested: FCFS against the recursion of Lindley and the formula of Pollaczek and Khinchine, the oracle against",
        "exact SRPT, conservation of work for each policy, the same commands for the same jobs ([tests/sim](../../tests/sim)).",
        "",
    )
