"""Whether kept priors can be what a scheduler learnt: a damaged or edited number must not decide about requests.

Sums decay, so each weight has a bound that no number of observations exceeds. The bounds here are twice as large.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from scheduler_svc.core.estimates import acceptance, calibration, cost, lengths
from scheduler_svc.core.estimates.sources import STAGES

__all__ = ["check_priors", "check_size", "within"]

MOST: Final = 1e30
"""Bound of every number."""
MOST_ENTRIES: Final = 4096
"""Bound of every list and mapping."""
MOST_LOG: Final = 1000.0
"""Bound of the logarithm of a length or of a guess."""
SLACK: Final = 2.0
LEAST: Final = -1e-6
"""Rounding makes some sums a little less than 0."""
ABOVE_ZERO: Final = 1e-9
"""Least value of what is divided by."""


def check_priors(data: Mapping[str, Any], most_classes: int) -> None:
    """Raise ValueError, with the field and its value, for what no scheduler can have learnt. What is missing
    or has another type raises LookupError, TypeError or AttributeError here or where it is read."""
    for field in data:
        _check_finite(field, data[field])
    within("version", data["version"], 0, MOST)
    _check_cost(data["cost"])
    _check_class("all", data["all"])
    check_size("classes", data["classes"], most_classes)
    for own in data["classes"].values():
        _check_class("classes", own)
    for source in ("hints", "predictions"):
        found = data[source]
        check_size(source, found["classes"], most_classes)
        for sums in [found["everyone"], *found["classes"].values()]:
            _check_history(source, *sums)
        _check_tenants(source, found)


def within(field: str, value: float, least: float, most: float) -> None:
    """Raise ValueError if a value is not a number within these bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{field} must be a number from {least:g} to {most:g}, got {value!r:.40}")


def check_size(field: str, found: Collection[Any], most: int, least: int = 0) -> None:
    """Raise ValueError if a list or a mapping is too short or too long."""
    if not least <= len(found) <= most:
        raise ValueError(f"{field} must have {least} to {most} entries, got {len(found)}")


def _check_finite(field: str, found: Any) -> None:
    waiting = [found]
    while waiting:
        value = waiting.pop()
        if isinstance(value, int | float):
            within(field, value, -MOST, MOST)
        elif isinstance(value, dict):
            check_size(field, value, MOST_ENTRIES)
            waiting.extend(value.values())
        elif isinstance(value, list):
            check_size(field, value, MOST_ENTRIES)
            waiting.extend(value)


def _check_sums(field: str, values: Collection[float], most: float = MOST) -> None:
    for value in values:
        within(field, value, LEAST, most)


def _check_cost(found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        if name in ("squares", "products", "fit"):
            entries = 10 if name == "squares" else cost.TERMS
            check_size(f"cost.{name}", value, entries, entries)
            _check_sums(f"cost.{name}", value)
        else:
            least = ABOVE_ZERO if name in ("batch", "tokens", "prefill_tokens") else LEAST
            within(f"cost.{name}", value, least, MOST)
    within("cost.rounds", found["rounds"], 0, SLACK * cost.ROUND_FORGET)


def _check_class(field: str, found: Mapping[str, Any]) -> None:
    sums = found["acceptance"]
    _check_sums(f"{field}.acceptance", sums.values())
    # Its root is taken.
    within(f"{field}.acceptance.sum_within", sums["sum_within"], 0, MOST)
    within(f"{field}.acceptance.sum_n2", sums["sum_n2"], 0, sums["sum_n"] ** 2)
    within(f"{field}.acceptance.rounds", sums["rounds"], 0, SLACK * acceptance.FORGET_ROUNDS)
    within(f"{field}.acceptance.requests", sums["requests"], 0, SLACK * acceptance.FORGET_REQUESTS)
    for name in ("length_counts", "length_cuts"):
        check_size(f"{field}.{name}", found[name], lengths.BINS)
        _check_sums(f"{field}.{name}", found[name].values(), SLACK * lengths.FORGET_REQUESTS)
    check_size(f"{field}.stages", found["stages"], STAGES, STAGES)
    for stage in found["stages"]:
        _check_history(f"{field}.stages", **stage["guesses"])
        _check_sums(f"{field}.stages", (stage["with_them"], stage["without_them"]))


def _check_tenants(field: str, found: Mapping[str, Any]) -> None:
    tenants, pairs = found["tenants"], found["tenants_by_class"]
    check_size(field, tenants, calibration.MOST_TENANTS)
    check_size(field, pairs, calibration.MOST_TENANTS)
    for pair in pairs:
        if not all(isinstance(name, str) for name in pair[:2]):
            raise ValueError(f"{field}.tenants_by_class must begin with two names, got {pair[:2]!r:.40}")
    for sums in [*tenants.values(), *[sums[2:] for sums in pairs]]:
        _check_history(field, *sums)


def _check_history(
    field: str,
    weight: float,
    lengths: float,
    guesses: float,
    length_squares: float,
    guess_squares: float,
    products: float,
) -> None:
    """Check the fields of a `GuessHistory`."""
    within(field, weight, 0, SLACK * calibration.GUESS_FORGET)
    logs = MOST_LOG * weight
    for value in (lengths, guesses):
        within(field, value, -logs, logs)
    for value in (length_squares, guess_squares):
        within(field, value, 0, MOST_LOG * logs)
    within(field, products, -MOST_LOG * logs, MOST_LOG * logs)
