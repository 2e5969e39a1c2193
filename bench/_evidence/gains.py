"""Sections of docs/evidence/orders.md on goals, rivals and the tail."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from bench._evidence.phrases import listed, share
from bench._evidence.results import Results, Row
from bench._markdown import spread, table, verdict_of
from bench._policy.judge import WORK_SHARE
from bench._policy.regime import OURS, RIVALS
from bench._policy.rows import SWEEP_SHARE
from bench._policy.tables import expected_text
from bench.figures import named
from bench.report import as_text


def goals(results: Results) -> Iterator[str]:
    yield from ("## Goals", "")
    if results.reduced:
        yield "None were judged: this run changed the regimes (fewer requests, another load …), and goals hold for them as they are in"
        yield "[bench/regimes](../../bench/regimes)."
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
            as_text(verdict, "found"),
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


def against_rivals(results: Results) -> Iterator[str]:
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
        yield "![laps-sd by regime, with goals](../figures/policy-overview.svg)"
        yield ""
    for regime in results.figures():
        yield f"![{results.regimes[regime]['title']}](../figures/policy-{regime}.svg)"
        yield ""
    if results.swept:
        yield f"The curves over load ran {share(SWEEP_SHARE)} of the requests of their regime at each load."
        yield ""


def no_gain(results: Results) -> Iterator[str]:
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


def tail(results: Results) -> Iterator[str]:
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
