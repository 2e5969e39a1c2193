"""Statistics learnt online, per workload class and of the machine; a restart reads them back from the record.

The scheduler updates them, policies read them. Ranks are computed when their request is touched, so a change
here reaches a waiting request with its next event, never by itself.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from scheduler_svc.core.estimates.acceptance import (
    DEFAULT_TOKENS_PER_ROUND,
    DEFAULT_WEIGHT_ROUNDS,
    POOL_WEIGHT_ROUNDS,
    AcceptanceStatistics,
    TokensPerRound,
    shrinkage,
    tokens_per_round,
)
from scheduler_svc.core.estimates.basis import BY_CLASS, Basis
from scheduler_svc.core.estimates.calibration import ASSUMED, Calibration, GuessSource
from scheduler_svc.core.estimates.cost import CostModel
from scheduler_svc.core.estimates.guesses import GuessedLengths
from scheduler_svc.core.estimates.lengths import BINS, EDGES, LengthTable, TokensLeft
from scheduler_svc.core.estimates.plausible import check_priors
from scheduler_svc.core.estimates.prompt_lengths import PromptLengths
from scheduler_svc.core.estimates.sources import (
    STAGES,
    Guesses,
    Prediction,
    StageHistory,
    stage_of,
)

FORMAT: Final = 6
COST_CHANGE: Final = 0.05
MAX_CLASSES: Final = 256
"""Bound on classes: clients name them, and they must not grow the memory. A further class replaces the class
with the oldest last end of a request, among the classes of the tenant that has brought the most: one tenant's
classes do not drive out those of others."""
MOST_RESIDUALS: Final = 32
"""Tables of the remaining length, one per number of tokens so far, that a class keeps."""


@dataclass(slots=True)
class ClassPriors:
    """Statistics of one workload class."""

    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    lengths: LengthTable = field(default_factory=LengthTable)
    stages: list[StageHistory] = field(default_factory=lambda: [StageHistory() for _ in range(STAGES)])
    """Predictions of workers."""
    guessed: GuessedLengths = field(init=False)
    of_stages: list[Calibration] = field(default_factory=lambda: [ASSUMED] * STAGES)
    """Calibrations of workers' predictions, as of the last build of the table."""
    residuals: dict[int, GuessedLengths] = field(default_factory=dict)
    """Likely lengths beyond the edge of a bin, by the bin."""
    owner: str = ""
    """The tenant that brought the class."""
    variances: tuple[float, float] | None = None
    """Variances of its acceptance, as of the newest end. They are kept, because computing them for each rank
    would cost too much."""

    def __post_init__(self) -> None:
        self.guessed = GuessedLengths(self.lengths)

    def rebuild_lengths(self, pool: ClassPriors | None) -> None:
        """Recompute the tables from the lengths and predictions observed so far."""
        self.lengths.rebuild(None if pool is None else pool.lengths)
        self.guessed = GuessedLengths(self.lengths)
        self.residuals.clear()
        wider = [ASSUMED] * STAGES if pool is None else pool.of_stages
        self.of_stages = [
            stage.guesses.calibrated(prior) for stage, prior in zip(self.stages, wider, strict=True)
        ]

    def remaining(self, emitted: int) -> GuessedLengths:
        """Return the likely lengths of what remains after `emitted` tokens; to the edge of a bin."""
        at = max(0, bisect_right(EDGES, emitted) - 1)
        found = self.residuals.get(at)
        if found is None:
            if len(self.residuals) >= MOST_RESIDUALS:
                self.residuals.clear()
            table = self.lengths if at == 0 else self.lengths.after(int(EDGES[at]))
            found = self.residuals[at] = GuessedLengths(table)
        return found


class Priors:
    """Everything learnt.

    Estimates for a rank always use the newest statistics. `version` shows when older ranks should be computed
    again: it grows at intervals (`publish`), and only if a length table was rebuilt or the cost of a round
    moved by more than `COST_CHANGE`.
    """

    def __init__(self, prompts: PromptLengths | None = None) -> None:
        self.version = 0
        self.prompts: Final = PromptLengths() if prompts is None else prompts
        self.cost = CostModel()
        self._all = ClassPriors()
        self._classes: dict[str, ClassPriors] = {}
        """Ordered by the time of their last end of a request, oldest first."""
        self._hints = GuessSource()
        self._predictions = GuessSource()
        """Predictions from prompts, as if they were another client's hints."""
        self._share_s = self.cost.share_s(0)
        """Cost of a round as of this version."""
        self._tables_changed = False

    # Estimates, for policies.

    def tokens_per_round(self, workload_class: str, rounds: int, emitted: int) -> TokensPerRound:
        """Return the tokens that a request of this class will gain per round, after `rounds` rounds and
        `emitted` tokens of its own.
        """
        own, everyone = self._of(workload_class), self._all
        pooled = everyone.acceptance.mean(DEFAULT_TOKENS_PER_ROUND, DEFAULT_WEIGHT_ROUNDS)
        mean = own.acceptance.mean(pooled, POOL_WEIGHT_ROUNDS)
        variances = own.variances or everyone.variances
        # With no history, rounds are about as spread as a geometric count of that mean.
        within = variances[0] if variances else pooled
        return tokens_per_round(mean, shrinkage(variances), within, rounds, emitted)

    def mean_tokens_per_round(self, workload_class: str) -> float:
        """Return the class mean, for policies that ignore a request's own acceptance."""
        return self.tokens_per_round(workload_class, 0, 0).mean

    def tokens_left(
        self, workload_class: str, emitted: int, most: int, guesses: Guesses, tenant: str = ""
    ) -> TokensLeft:
        """Return the remaining output tokens of a request that emitted `emitted` of at most `most`, by the
        lengths of its class and by the guesses whose sources have been worth something."""
        worker = guesses.worker
        if worker is not None and self._all.stages[stage_of(worker.emitted)].is_used:
            return self._by_worker(workload_class, worker, emitted, most)
        return self._by_arrival(workload_class, emitted, most, guesses, tenant)

    def _by_worker(self, workload_class: str, prediction: Prediction, emitted: int, most: int) -> TokensLeft:
        own, at = self._of(workload_class), prediction.emitted
        line = own.of_stages[stage_of(at)]
        table = own.remaining(at)
        # A worker may claim more tokens than the request can have.
        most_left = max(1, most - at)
        return table.left(line, prediction.remaining, max(0, emitted - at), most_left, Basis.WORKER)

    def _by_arrival(
        self, workload_class: str, emitted: int, most: int, guesses: Guesses, tenant: str
    ) -> TokensLeft:
        """Each guess is a measurement of ln(length), and their errors are taken to be independent."""
        own = self._of(workload_class)
        basis = BY_CLASS
        precision = weighted = 0.0
        if guesses.client is not None:
            line = self._hints.line(tenant, workload_class)
            if line.precision > 0:
                basis = Basis.CLIENT
                precision = line.precision
                weighted = precision * line.log_length(guesses.client)
        if guesses.prompt is not None:
            line = self._predictions.line(tenant, workload_class)
            if line.precision > 0:
                basis = Basis.PROMPT if basis is BY_CLASS else Basis.CLIENT_AND_PROMPT
                precision += line.precision
                weighted += line.precision * line.log_length(guesses.prompt)
        if basis is BY_CLASS:
            return own.lengths.left(emitted, most)
        return own.guessed.near(weighted / precision, 1 / math.sqrt(precision), emitted, most, basis)

    def prediction(
        self, workload_class: str, remaining: float, emitted: int, most: int, guesses: Guesses, tenant: str
    ) -> Prediction:
        """Return a worker's prediction with the estimates that it is judged by."""
        made = Prediction(remaining, emitted)
        made.with_it = self._by_worker(workload_class, made, emitted, most).mean
        made.without_it = self._by_arrival(workload_class, emitted, most, guesses, tenant).mean
        return made

    def has_class(self, workload_class: str) -> bool:
        """Return whether this class has statistics of its own."""
        return workload_class in self._classes

    def lengths_seen(self, workload_class: str) -> float:
        """Return how many requests of this class its lengths were learned from; older ones count less."""
        return self._of(workload_class).lengths.weight

    # Observations, from the scheduler. Those of costs go to `cost` itself.

    def publish(self) -> bool:
        """Start a new version if that would change ranks; return whether it did."""
        share_s = self.cost.share_s(0)
        if self._tables_changed or abs(share_s - self._share_s) > COST_CHANGE * self._share_s:
            self._share_s = share_s
            self._tables_changed = False
            self.version += 1
            return True
        return False

    def observe_tokens(
        self,
        workload_class: str,
        tokens: int,
        tenant: str = "",
        rounds: int = 1,
    ) -> None:
        """Learn from `rounds` rounds of a request, which gained `tokens` tokens in all."""
        for priors in self._touch(workload_class, tenant, ended=False):
            priors.acceptance.observe_round(tokens, rounds)

    def observe_acceptance(
        self, workload_class: str, rounds: int, tokens: int, squares: int, tenant: str = ""
    ) -> None:
        """Learn from an ended request: its rounds, their tokens and squared tokens."""
        for priors in self._touch(workload_class, tenant, ended=True):
            priors.acceptance.observe_end(rounds, tokens, squares)
            priors.variances = priors.acceptance.variances()

    def observe_length(
        self, workload_class: str, length: int, guesses: Guesses, tenant: str = "", *, cut: bool = False
    ) -> None:
        """Learn from a request that ran to its own end after `length` tokens, or to its limit (`cut`).

        Guesses are learned from known lengths only. The line is of the guess at a given length
        (`calibration.py`), so it does not matter that long requests are missing.
        """
        if not cut:
            if guesses.client is not None:
                self._hints.observe(tenant, workload_class, guesses.client, length)
            if guesses.prompt is not None:
                self._predictions.observe(tenant, workload_class, guesses.prompt, length)
        for priors in self._touch(workload_class, tenant, ended=True):
            priors.lengths.observe(length, cut=cut)
            if not cut:
                for prediction in guesses.by_stage:
                    priors.stages[stage_of(prediction.emitted)].observe(prediction, length)
            if priors.lengths.stale:
                priors.rebuild_lengths(None if priors is self._all else self._all)
                self._tables_changed = True
                self._hints.settle()
                self._predictions.settle()
        self._classes[workload_class] = self._classes.pop(workload_class)

    def _of(self, workload_class: str) -> ClassPriors:
        return self._classes.get(workload_class, self._all)

    def _touch(self, workload_class: str, tenant: str, *, ended: bool) -> list[ClassPriors]:
        """Return everything that learns from a request of this class; the sum over all classes first.

        Only an end replaces a class: requests of more than `MAX_CLASSES` classes that run at the same time
        would otherwise replace each other in every round.
        """
        own = self._classes.get(workload_class)
        if own is None:
            if len(self._classes) >= MAX_CLASSES:
                if not ended:
                    return [self._all]
                self._forget_class(tenant)
            own = self._classes[workload_class] = ClassPriors(owner=tenant)
            own.rebuild_lengths(self._all)
        return [self._all, own]

    def _forget_class(self, newcomer: str) -> None:
        """Make room for a class that `newcomer` brings."""
        count = Counter([newcomer, *[priors.owner for priors in self._classes.values()]])
        most = max(count.values())
        for name, priors in self._classes.items():
            if count[priors.owner] == most:
                del self._classes[name]
                for table in self._tables_by_class():
                    table.pop(name, None)
                return

    def _tables_by_class(self) -> list[dict[str, Any]]:
        """Return what else is learned for each class. It has no classes but those that are here."""
        return [self._hints.classes, self._predictions.classes, self.prompts.classes]

    # The record.

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, lists and dictionaries, for JSON."""
        return {
            "format": FORMAT,
            "version": self.version,
            "cost": asdict(self.cost),
            "all": _class_to_dict(self._all),
            "classes": {name: _class_to_dict(priors) for name, priors in self._classes.items()},
            "hints": self._hints.to_dict(),
            "predictions": self._predictions.to_dict(),
            "prompts": self.prompts.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], prompts: PromptLengths | None = None) -> Priors:
        """Return the priors that `to_dict` gave; `prompts`, still untaught, learns on from what it had learned.

        Raises ValueError, with a sentence, where they are damaged or of another format. Then `prompts` may have
        changed.
        """
        if not isinstance(data, Mapping):
            raise ValueError("what was learnt must be a mapping")
        if data.get("format") != FORMAT:
            raise ValueError("it was written by another version of LAPS-SD")
        priors = cls(prompts)
        try:
            check_priors(data, MAX_CLASSES)
            priors._restore(data)
        except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"what was learnt is damaged: {type(error).__name__}: {error}") from error
        return priors

    def lacks_words_of(self, data: Mapping[str, Any]) -> bool:
        """Return True if `data`, from which `from_dict` made these, had learned from words of prompts that these do not
        have: their key or the start weights were others.
        """
        return bool(data["prompts"]["learned"] > self.prompts.learned)

    def _restore(self, data: Mapping[str, Any]) -> None:
        self.version = data["version"]
        self.cost = CostModel(**{**data["cost"], "fit": tuple(data["cost"]["fit"])})
        self._share_s = self.cost.share_s(0)
        self._all = everyone = _class_from_dict(data["all"], None)
        self._classes = {name: _class_from_dict(own, everyone) for name, own in data["classes"].items()}
        self._hints = GuessSource.from_dict(data["hints"])
        if self.prompts.restore(data["prompts"]):
            self._predictions = GuessSource.from_dict(data["predictions"])
        for table in self._tables_by_class():
            for name in table.keys() - self._classes.keys():
                del table[name]


def _class_to_dict(priors: ClassPriors) -> dict[str, Any]:
    return {
        "acceptance": asdict(priors.acceptance),
        "length_counts": _filled(priors.lengths.counts),
        "length_cuts": _filled(priors.lengths.cuts),
        "stages": [stage.to_dict() for stage in priors.stages],
        "owner": priors.owner,
    }


def _filled(by_bin: list[float]) -> dict[str, float]:
    return {str(i): count for i, count in enumerate(by_bin) if count}


def _by_bin(filled: Mapping[str, float]) -> list[float]:
    return [filled.get(str(i), 0.0) for i in range(BINS)]


def _class_from_dict(data: Mapping[str, Any], pool: ClassPriors | None) -> ClassPriors:
    priors = ClassPriors(
        acceptance=AcceptanceStatistics(**data["acceptance"]),
        stages=[StageHistory.from_dict(stage) for stage in data["stages"]],
        owner=data["owner"],
    )
    priors.lengths.restore(_by_bin(data["length_counts"]), _by_bin(data["length_cuts"]))
    priors.rebuild_lengths(pool)
    priors.variances = priors.acceptance.variances()
    return priors
