"""Sections of docs/evidence/simulation.md on levels, perceptibility and the errors of the estimates."""

from __future__ import annotations

from collections.abc import Iterator

from bench._evidence.phrases import predictor_text, predictors_text, share
from bench._evidence.results import Results, Row
from bench._markdown import table
from bench._policy.regime import OURS, RIVALS
from bench.figures import named


def levels(results: Results) -> Iterator[str]:
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
                predictors_text(results.regimes[regime]["workload"]),
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


def errors_of_estimates(results: Results) -> Iterator[str]:
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
            "estimated at",
            "requests",
            "all",
            "p10 … p50 … p90",
            "error",
            "without its own acceptance",
        ),
        rows,
    )
