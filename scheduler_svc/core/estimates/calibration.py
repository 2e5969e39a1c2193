"""Error of guessed output lengths, learned from requests that ended.

A guess is a measurement of ln(length): ln(guess) = offset + slope · ln(length) + an error of some spread. The
slope shows whether guesses follow the length at all: 1 for honest guesses, 0 for a constant, negative for
those that point the wrong way (which then carry as much information as honest ones). A regression of the
guess on the length, and not the other way round, because the lengths themselves are known from their class
(`lengths.py`): the two are combined by Bayes' rule (`guesses.py`), and a guess that does not depend on the
length then changes nothing.

All of this is our choice; the paper takes predicted lengths as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar, final

Key = TypeVar("Key")

GUESS_LOG_SPREAD: Final = 0.7
"""Error of a guess (standard deviation of ln(guess/length)) without history: between an optimistic 0.3 and
the 1.0 and more of real predictors."""
GUESS_WEIGHT: Final = 8.0
"""Weight of the assumed line, in requests; in the slope, in requests whose ln(length) has a variance of 1."""
TENANT_WEIGHT: Final = 2.0
"""Weight of the line of a class in that of one of its tenants. Less, because a few tenants whose guesses are
wrong shift the line of the class by far: with 8, the others' lengths were taken for 14 % longer after 50
requests each, and the two of ten that lied gained 8 % by that alone. The spread of the class does not count
at all, but `GUESS_LOG_SPREAD`."""
GUESS_FORGET: Final = 300.0
MOST_TENANTS: Final = 512
"""Tenants whose guesses are judged by their own history; and as many pairs of a tenant and a class."""
MOST_LINES = 4096
"""Lines that are kept computed."""
LEAST_LOG_SPREAD: Final = 0.01
WORTHLESS_SPREAD: Final = 3.0
"""Guesses with an error beyond a factor of 20 are not used."""
_KEEP: Final = 1 - 1 / GUESS_FORGET
_LEAST_VARIANCE: Final = LEAST_LOG_SPREAD**2


@final
class Calibration:
    """The line and the spread: ln(guess) = `offset` + `slope` · ln(length) ± sqrt(`variance`)."""

    __slots__ = ("offset", "precision", "slope", "spread", "variance")

    def __init__(self, slope: float, offset: float, variance: float) -> None:
        self.slope: Final = slope
        self.offset: Final = offset
        self.variance: Final = variance
        steep = abs(slope)
        spread = math.sqrt(variance)
        is_informative = steep * WORTHLESS_SPREAD > spread
        self.spread: Final = max(LEAST_LOG_SPREAD, spread / steep) if is_informative else math.inf
        """Standard deviation of ln(length) given the guess; infinite where guesses carry no information."""
        self.precision: Final = self.spread**-2
        """0 where guesses carry no information."""

    def log_length(self, guess: float) -> float:
        """Return ln(length) for a guess; valid only where `spread` is finite."""
        return (math.log(guess) - self.offset) / self.slope


ASSUMED: Final = Calibration(1.0, 0.0, GUESS_LOG_SPREAD**2)
"""Before anything is known of a source: right on average."""


@dataclass(slots=True)
class GuessHistory:
    """Guesses and the lengths that came: decayed sums over ended requests of ln(length), ln(guess) and their
    products."""

    weight: float = 0.0
    lengths: float = 0.0
    guesses: float = 0.0
    length_squares: float = 0.0
    guess_squares: float = 0.0
    products: float = 0.0

    def observe(self, guess: float, length: int) -> None:
        """Take in a request with this guess (above 0) that ended by itself after `length` tokens (1 or more)."""
        y, x = math.log(length), math.log(guess)
        self.weight = self.weight * _KEEP + 1
        self.lengths = self.lengths * _KEEP + y
        self.guesses = self.guesses * _KEEP + x
        self.length_squares = self.length_squares * _KEEP + y * y
        self.guess_squares = self.guess_squares * _KEEP + x * x
        self.products = self.products * _KEEP + x * y

    def sums(self) -> list[float]:
        """Return the fields in their order. `dataclasses.astuple` takes eight times as long, and a leader that saves what it
        has learnt does nothing else meanwhile.
        """
        return [
            self.weight,
            self.lengths,
            self.guesses,
            self.length_squares,
            self.guess_squares,
            self.products,
        ]

    def calibrated(self, prior: Calibration, prior_weight: float = GUESS_WEIGHT) -> Calibration:
        """Return the line through this history and `prior_weight` requests on the prior's line, around the
        same lengths; the spread is that of this history and of `prior_weight` requests with the assumed one.
        """
        weight = self.weight
        if not weight:
            return prior
        length, guess = self.lengths / weight, self.guesses / weight
        # Sums of squares and products around the means; rounding must not make them negative.
        of_lengths = max(0.0, self.length_squares - weight * length * length)
        of_guesses = max(0.0, self.guess_squares - weight * guess * guess)
        of_both = self.products - weight * length * guess
        slope = (of_both + prior_weight * prior.slope) / (of_lengths + prior_weight)
        expected = prior.offset + prior.slope * length
        offset = (weight * guess + prior_weight * expected) / (weight + prior_weight) - slope * length
        miss = guess - offset - slope * length
        squares = of_guesses - 2 * slope * of_both + slope * slope * of_lengths + weight * miss * miss
        variance = (max(0.0, squares) + prior_weight * ASSUMED.variance) / (weight + prior_weight)
        return Calibration(slope, offset, max(_LEAST_VARIANCE, variance))


SUMS: Final = tuple(field.name for field in fields(GuessHistory))
"""Names of these sums, in the order of `GuessHistory.sums`."""


class TenantGuesses:
    """Histories of single tenants, over all classes and in each class. The least recently ended ones are
    forgotten."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, GuessHistory] = {}
        self.by_class: dict[tuple[str, str], GuessHistory] = {}
        """By tenant and class."""

    def observe(self, tenant: str, workload_class: str, guess: float, length: int) -> None:
        """Take in a request that ended by itself; see `GuessHistory.observe`."""
        _newest(self.by_tenant, tenant).observe(guess, length)
        _newest(self.by_class, (tenant, workload_class)).observe(guess, length)

    def calibrated(
        self, tenant: str, workload_class: str, class_history: GuessHistory, of_class: Calibration
    ) -> Calibration:
        """Return the line of this tenant in this class: shrunk to that of the tenant in all classes, and that
        to the line of all tenants in the class. So a tenant whose guesses are wrong is not believed again in
        a new class.

        A history that is the same as a wider one counts once. Their sums are compared: all weights become the
        same number after some 9,400 observations.
        """
        of_tenant = self.by_tenant.get(tenant)
        if of_tenant is None:
            return of_class
        of_pair = self.by_class.get((tenant, workload_class))
        if of_pair is None:
            return of_tenant.calibrated(of_class, TENANT_WEIGHT)
        if of_pair == class_history:
            return of_class
        prior = of_class
        if of_tenant != of_pair:
            prior = of_tenant.calibrated(of_class, TENANT_WEIGHT)
        return of_pair.calibrated(prior, TENANT_WEIGHT)


@final
class GuessSource:
    """One source of guesses: what it was worth so far in each class, and for each tenant there."""

    def __init__(self) -> None:
        self.everyone = GuessHistory()
        self.classes: dict[str, GuessHistory] = {}
        """Those that `Priors` has a place for."""
        self.tenants = TenantGuesses()
        self._of_class: dict[str | None, Calibration] = {}
        """None: of all classes."""
        self._of_pair: dict[tuple[str, str], Calibration] = {}

    def observe(self, tenant: str, workload_class: str, guess: float, length: int) -> None:
        """Take in a request that ended by itself; see `GuessHistory.observe`."""
        self.everyone.observe(guess, length)
        self.classes.setdefault(workload_class, GuessHistory()).observe(guess, length)
        self.tenants.observe(tenant, workload_class, guess, length)
        self._of_pair.pop((tenant, workload_class), None)

    def line(self, tenant: str, workload_class: str) -> Calibration:
        """Return the line of this tenant in this class. The history of the class is that of the last `settle`,
        that of the tenant is the newest."""
        key = (tenant, workload_class)
        found = self._of_pair.get(key)
        if found is None:
            history = self.classes.get(workload_class, self.everyone)
            name = workload_class if history is not self.everyone else None
            of_class = self._of_class.get(name)
            if of_class is None:
                of_class = self._of_class[name] = history.calibrated(ASSUMED)
            if len(self._of_pair) >= MOST_LINES:
                self._of_pair.clear()
            found = self.tenants.calibrated(tenant, workload_class, history, of_class)
            self._of_pair[key] = found
        return found

    def settle(self) -> None:
        """Use what was observed so far in the lines of all classes."""
        self._of_class.clear()
        self._of_pair.clear()

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, lists and dictionaries, for JSON."""
        tenants = self.tenants
        return {
            "everyone": self.everyone.sums(),
            "classes": {name: history.sums() for name, history in self.classes.items()},
            "tenants": {tenant: history.sums() for tenant, history in tenants.by_tenant.items()},
            "tenants_by_class": [[*key, *history.sums()] for key, history in tenants.by_class.items()],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GuessSource:
        """Return the source that `to_dict` gave."""
        source = cls()
        source.everyone = GuessHistory(*data["everyone"])
        source.classes = {name: GuessHistory(*sums) for name, sums in data["classes"].items()}
        tenants = source.tenants
        tenants.by_tenant = {tenant: GuessHistory(*sums) for tenant, sums in data["tenants"].items()}
        tenants.by_class = {
            (tenant, workload_class): GuessHistory(*sums)
            for tenant, workload_class, *sums in data["tenants_by_class"]
        }
        return source


def _newest(histories: dict[Key, GuessHistory], key: Key) -> GuessHistory:
    """Return the history with this key, moved to the end or added there; the one at the front may make room."""
    history = histories.pop(key) if key in histories else GuessHistory()
    histories[key] = history
    if len(histories) > MOST_TENANTS:
        del histories[next(iter(histories))]
    return history
