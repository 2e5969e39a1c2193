"""Sentences of docs/evidence.md on each section, computed from its results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench._engine.cells import MIXED
from bench._engine.configs import PLAIN, SPECULATIVE
from bench._evidence.engine_table import rows_of_readme
from bench._evidence.readme import pair_in_words
from bench._evidence.results import Results, Row, read_rows
from bench._evidence.services import meeting_goals, policy_rows
from bench._gpu.options import verdict
from bench._markdown import verdict_of
from bench._policy.regime import OURS, ROUTER
from bench._table.plan import NAMES, PREFILL, threads_in_words
from bench._table.rows import is_ours
from bench._vllm import modes
from bench._vllm.figures import BURSTS, compared
from bench._vllm.on_shape import ON_SHAPE
from bench.report import as_text


def orders(results: Results) -> Iterator[str]:
    """Yield the gains over FCFS, what of them comes from acceptance, and their price."""
    if not results.reduced:
        yield f"{sum(row['met'] for row in results.verdicts)} of {len(results.verdicts)} goals are met."
    fcfs = [found for regime in results.regimes if (found := results.ratio(regime, "fcfs"))]
    if fcfs:
        ratios = _span(found[0] for found in fcfs)
        yield f"Mean latency over that of `fcfs`: {_count(fcfs)}; ratios from {ratios}."
    strongest = {
        regime: found
        for regime in results.regimes
        if (rival := results.strongest_length_only(regime)) and (found := results.ratio(regime, rival))
    }
    if strongest:
        middles = {regime: found[0] for regime, found in strongest.items()}
        best = min(middles, key=lambda regime: middles[regime])
        yield (
            "Over that of the strongest policy that uses predicted lengths but not acceptance: "
            f"{_count(list(strongest.values()))}; ratios from {middles[best]:.2f} (`{best}`) to "
            f"{max(middles.values()):.2f}, median {statistics.median(middles.values()):.2f}."
        )
        alone = statistics.median(
            float(row["ratio_fcfs"])
            for regime in strongest
            if (row := results.row(regime, results.strongest_length_only(regime) or ""))
            and "ratio_fcfs" in row
        )
        yield (
            f"That policy is itself at a median of {alone:.2f} of `fcfs`: this part of the first ratios comes "
            "from running short requests first, and only the second ratios come from using acceptance."
        )
    tails = [found for regime in results.regimes if (found := results.ours(regime).get("p99_ratio_fcfs"))]
    if tails:
        yield (
            "The longest requests wait longer: 99th percentile of latency over that of `fcfs`: "
            f"{_span(tails)}."
        )


def placement(path: Path) -> Iterator[str]:
    """Yield the ratios to a placement by load, and to those of other servers."""
    verdicts = [row for row in Results(path).verdicts if row["figure"] == "mean_s"]
    by_load = {
        row["regime"]: float(row["found"]) for row in verdicts if row["of"] == f"{OURS}:{ROUTER}=least-loaded"
    }
    others = _span(row["found"] for row in verdicts if row["of"].startswith("fcfs:"))
    best, worst = (find(by_load, key=lambda regime: by_load[regime]) for find in (min, max))
    yield (
        "Mean latency over that of a placement by load alone: "
        f"{by_load[best]:.2f} (`{best}`) to {by_load[worst]:.2f} (`{worst}`); on Mooncake's conversations "
        f"over those of SGLang's and Dynamo's placements: {others}."
    )


def conversations(path: Path) -> Iterator[str]:
    """Yield the ratios to a placement by load on the real stack."""
    rows = read_rows(path)[0]
    found = {row["goal"].partition(" ≤ ")[0]: row["found"] for row in rows if row.get("verdict")}
    yield (
        f"Over a placement by load alone: mean latency {found['mean_s / least-loaded']:.2f}, "
        f"time to the first token {found['first_token_s / least-loaded']:.2f}."
    )


def served(path: Path) -> Iterator[str]:
    """Yield the ratio to FCFS in each scenario, without hints and with them."""
    rows = policy_rows(read_rows(path)[0])
    ours = [row for row in rows if row["policy"] == OURS and "ratio_fcfs" in row]
    by_hints = "; ".join(
        ("without hints: " if hints == "none" else f"with hints of σ {hints}: ")
        + ", ".join(f"{row['ratio_fcfs']:.2f} ({row['config']})" for row in ours if row["hints"] == hints)
        for hints in sorted({row["hints"] for row in ours}, reverse=True)
    )
    yield f"Mean latency over that of `fcfs`, {by_hints}."


def deciding(path: Path) -> Iterator[str]:
    """Yield the time of a report in the core, and the number of workers that a shard carried."""
    rows = read_rows(path)[0]
    core = [row for row in rows if "median_ms" in row]
    yield (
        f"A report of {core[0]['slots']} requests takes the scheduler's core "
        f"{_span(row['median_ms'] for row in core)} ms in the median, with "
        f"{_span((row['queued'] for row in core), ',')} requests queued; "
        f"{meeting_goals(core)} of {len(core)} sizes meet the goals."
    )
    carried = [row for row in rows if row.get("carried")]
    if carried:
        yield (
            f"One shard carried {max(row['workers'] for row in carried)} workers that report every "
            f"{carried[0]['round_s'] * 1e3:g} ms; how many depends on the machine."
        )


def recovering(path: Path) -> Iterator[str]:
    """Yield the longest time in which a new leader read the record."""
    rows = read_rows(path)[0]
    yield f"A new leader reads {rows[0]['requests']:,} unfinished requests in {max(row['seconds'] for row in rows):.1f} s."


def gateway(path: Path) -> Iterator[str]:
    """Yield what one process carried."""
    carried = "; ".join(
        f"{row['config'].partition(',')[0]} {row['messages_per_s']:,.0f} with {row['gateway_cpu_share']:.0%} "
        f"of a core and a p99 delay of {row['delay_p99_s'] * 1e3:.1f} ms"
        for row in read_rows(path)[0]
    )
    yield f"Messages per second of one process: {carried}."


def engine(path: Path) -> Iterator[str]:
    """Yield the sentences of README.md on the demo pair."""
    yield from pair_in_words(path)


def memory_bound(path: Path) -> Iterator[str]:
    """Yield the gains over our own plain decoding and over vLLM's, and the times of forwards."""
    rows = [row for row in read_rows(path)[0] if row["kind"] == MIXED]
    ours = [row for row in rows if row["config"] == SPECULATIVE]
    plain = [row for row in rows if row["config"] == PLAIN]
    yield (
        f"Tokens per second with speculation over our own plain decoding: {_spread(ours, 'ratio_plain')}; "
        f"over vLLM without speculation: {_spread(ours, 'ratio_vllm')}. "
        f"Time of a forward over vLLM's: {_spread(plain, 'forward')}."
    )


def engine_table(path: Path) -> Iterator[str]:
    """Yield our speed over that of others, for the model and the precisions that README.md shows."""
    rows = rows_of_readme(read_rows(path)[0])
    here = [row for row in rows if row["ratio"] is not None and not is_ours(row)]
    if not here:
        return

    def over_others(rows: Sequence[Row]) -> str:
        return ", ".join(
            f"{_spread(own, 'ratio')} of {NAMES[name]}'s"
            for name in NAMES
            if (own := [row for row in rows if row["engine"] == name])
        )

    yield (
        f"Speed with a model of half a billion weights on {threads_in_words(here[0]['threads'])}, decoding: "
        f"{over_others([row for row in here if row['task'] != PREFILL])}; "
        f"prefill: {over_others([row for row in here if row['task'] == PREFILL])}."
    )


def on_gpu(path: Path) -> Iterator[str]:
    """Yield the time of a round over what it needs at least."""
    rows = read_rows(path)[0]
    measured = [row for row in rows if row["skipped"] is None]
    yield (
        f"It runs there and is not built for it: a round takes {_spread(measured, 'of_roofline', '.1f')} "
        f"times what its bytes and operations need, and the goal is {'met' if verdict(rows)[0] else 'missed'}. "
        "On GPUs use workers over vLLM."
    )


def inside_vllm(path: Path) -> Iterator[str]:
    """Yield the ratios to vLLM's FCFS in bursts, in which no prompt was served before."""
    found = {
        row["mode"]: row
        for row in compared(read_rows(path)[0])
        if (row["compared"], row["setting"]) == ("steps", BURSTS)
    }
    ratios = "; ".join(
        f"{mode.name}: {as_text(found[mode.name], 'ratio_fcfs', 2)}"
        for mode in modes.OURS
        if mode.name in found
    )
    if ratios:
        yield f"Mean latency in bursts over that of vLLM's FCFS, counted in engine steps. {ratios}."


def vllm_on_gpu(path: Path) -> Iterator[str]:
    """Yield the ratios to vLLM's FCFS in bursts on a GPU."""
    shape = [row for row in read_rows(path)[0] if row["measured"] == "shape"]
    rows = [row for row in shape if row["setting"].startswith("burst")]
    base = {(row["setting"], row["seed"]): row["mean"] for row in rows if row["mode"] == modes.FCFS}
    ratios = "; ".join(
        f"{mode.name}: {_span(row['mean'] / base[row['setting'], row['seed']] for row in own)}"
        for mode in ON_SHAPE[1:]
        if (own := [row for row in rows if row["mode"] == mode.name])
    )
    yield f"Mean latency in {len(base)} bursts over that of vLLM's FCFS. {ratios}."


def _spread(rows: Iterable[Row], name: str, form: str = ".2f") -> str:
    return _span((row[name] for row in rows if row[name] is not None), form)


def _span(values: Iterable[float], form: str = ".2f") -> str:
    """Return the least and the greatest value as text."""
    found = list(values)
    low, high = f"{min(found):{form}}", f"{max(found):{form}}"
    return low if low == high else f"{low} to {high}"


def _count(found: Sequence[Sequence[float]]) -> str:
    words = [verdict_of(each) for each in found]
    counts = [f"{word} in {words.count(word)}" for word in ("faster", "slower") if word in words]
    if "no difference shown" in words:
        counts.append(f"no difference shown in {words.count('no difference shown')}")
    return f"{', '.join(counts)} of {len(words)} regimes"
