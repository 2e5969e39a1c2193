"""Figures and descriptions of regimes as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench._evidence.results import Row


def against(ratio: float) -> str:
    """Return a ratio of means as a phrase."""
    return f"{abs(1 - ratio):.0%} {'below' if ratio < 1 else 'above'}".replace("%", " %")


def share(value: float) -> str:
    """Return a percentage, with a decimal if it is small."""
    return f"{value:.{int(0 < value < 0.0995)}%}".replace("%", " %")


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
    sigma = f"σ {predictor['sigma']:g}"
    return {
        "noisy": sigma,
        "inverse": f"inverted, {sigma}",
        "recorded": "recorded classifier",
        "prompt": "words of the prompt",
        "shuffled": "words of other prompts",
        "short": "words as in the prompts with the shortest answers",
        "constant": f"always {predictor['value']}",
        "none": "none",
    }[predictor["kind"]]


def predictors_text(workload: Row) -> str:
    """Return the length predictions of a workload as text, with the number of tenants where these differ."""
    tenants: dict[str, int] = {}
    for tenant in workload.get("tenants") or ():
        text = predictor_text(tenant["predictor"])
        tenants[text] = tenants.get(text, 0) + tenant["count"]
    if len(tenants) > 1:
        return "; ".join(
            f"{text} ({count} of {sum(tenants.values())} tenants)" for text, count in tenants.items()
        )
    return next(iter(tenants), predictor_text(workload["predictor"]))


def arrivals_text(arrivals: Row) -> str:
    """Return the description of arrivals as text."""
    process = {"poisson": "Poisson", "gamma": f"gamma, CV {arrivals['cv']:g}", "trace": "recorded"}
    if arrivals["process"] == "burst":
        return "all at once"
    return f"{process[arrivals['process']]}, load {arrivals['load']:g}"


def goals_met(judged: Sequence[Any], remark: str = "") -> Iterator[str]:
    """Yield how many goals are met, and those that are not."""
    missed = [goal.text for goal in judged if not goal.met]
    yield (
        f"{len(judged) - len(missed)} of {len(judged)} goals are met, each by the end of its interval"
        + (f". {remark}" if remark else "")
        + (". Missed:" if missed else ".")
    )
    yield ""
    yield from (f"- {text}" for text in missed)
    yield ""
