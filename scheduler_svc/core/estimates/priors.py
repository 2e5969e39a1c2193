"""Statistics learnt online, per workload class and of the machine; a restart reads them back from the record.

The scheduler updates them, policies read them. Ranks are computed when their request is touched, so a change
here reaches a waiting request with its next event, never by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from scheduler_svc.core.estimates.acceptance import (
    DEFAULT_TOKENS_PER_ROUND,
    DEFAULT_WEIGHT_ROUNDS,
    POOL_WEIGHT_ROUNDS,
    AcceptanceStatistics,
    PositionStatistics,
    TokensPerRound,
    shrinkage,
    tokens_per_round,
)
from scheduler_svc.core.estimates.calibration import ASSUMED, Calibration, GuessHistory, TenantGuesses
from scheduler_svc.core.estimates.cost import CostModel
from scheduler_svc.core.estimates.guesses import GuessedLengths
from scheduler_svc.core.estimates.lengths import BINS, LengthTable, TokensLeft

FORMAT = 4
READABLE_FORMATS = (2, 3, 4)
"""Formats that can be read. Priors of earlier builds are used, except the errors of guesses in formats 2 and
3, which have no slope."""
COST_CHANGE = 0.05
ENOUGH_ROUNDS = 50.0
"""Rounds of a class before its means are carried from one draft length to another."""
MAX_CLASSES = 256
"""Bound on classes: clients name them, and they must not grow the memory. A further class replaces the class
with the oldest last end of a request, among the classes of the tenant that has brought the most: one tenant's
classes do not drive out those of others."""
MAX_CALIBRATIONS = 4096


@dataclass(slots=True)
class ClassPriors:
    """Statistics of one workload class."""

    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    positions: PositionStatistics = field(default_factory=PositionStatistics)
    lengths: LengthTable = field(default_factory=LengthTable)
    client_guesses: GuessHistory = field(default_factory=GuessHistory)
    worker_guesses: GuessHistory = field(default_factory=GuessHistory)
    guessed: GuessedLengths = field(init=False)
    of_client: Calibration = ASSUMED
    """Calibration of the hints of all clients in this class. This and `of_worker` are as of the last build of
    the table."""
    of_worker: Calibration = ASSUMED
    owner: str = ""
    """The tenant that brought the class."""
    variances: tuple[float, float] | None = None
    """Variances of its acceptance, as of the newest end. They are kept, because computing them for each rank
    would cost too much."""
    draft_length_factor: float = 1.0
    """Tokens per round at the present draft length, over those at the draft lengths of the class's history."""

    def __post_init__(self) -> None:
        self._take_up_guesses()

    def rebuild_lengths(self, pool: LengthTable | None) -> None:
        """Recompute the tables from the lengths and guesses observed so far."""
        self.lengths.rebuild(pool)
        self._take_up_guesses()

    def _take_up_guesses(self) -> None:
        self.guessed = GuessedLengths(self.lengths)
        self.of_client = self.client_guesses.calibrated(ASSUMED)
        self.of_worker = self.worker_guesses.calibrated(ASSUMED)

    def rebuild_positions(self, pool: list[float] | None) -> None:
        """Recompute the tables from the draft positions and draft lengths observed so far."""
        self.positions.rebuild(pool)
        acceptance = self.acceptance
        if self.positions.rounds >= ENOUGH_ROUNDS:
            usual = self.positions.tokens(acceptance.drafted / acceptance.rounds)
            self.draft_length_factor = self.positions.tokens(acceptance.drafted_of_late) / usual


class Priors:
    """Everything learnt.

    Estimates for a rank always use the newest statistics. `version` shows when older ranks should be computed
    again: it grows at intervals (`publish`), and only if a length table was rebuilt or the cost of a round
    moved by more than `COST_CHANGE`.
    """

    def __init__(self) -> None:
        self.version = 0
        self.cost = CostModel()
        self._all = ClassPriors()
        self._classes: dict[str, ClassPriors] = {}
        """Ordered by the time of their last end of a request, oldest first."""
        self._tenants = TenantGuesses()
        self._calibrations: dict[tuple[str, str], Calibration] = {}
        """Calibration of the hints of a tenant in a class, as of its last end there or of the last build of a
        table."""
        self._share_s = self.cost.share_s(0)
        """Cost of a round as of this version."""
        self._tables_changed = False

    # Estimates, for policies.

    def tokens_per_round(self, workload_class: str, rounds: int, emitted: int) -> TokensPerRound:
        """Return the tokens that a request of this class will gain per round, after `rounds` rounds and
        `emitted` tokens of its own.

        The means of the class and of all classes are converted to the recent draft length, by the acceptance
        of each draft position: where workers draft less than they used to (a fuller batch, another setting),
        the estimate follows in a few hundred rounds and not in the 20,000 that a mean takes to forget. A
        request's own rounds are not converted: workers choose the draft length for each request, and continue
        to do so.
        """
        own, everyone = self._of(workload_class), self._all
        pooled = everyone.acceptance.mean(
            DEFAULT_TOKENS_PER_ROUND, DEFAULT_WEIGHT_ROUNDS, everyone.draft_length_factor
        )
        mean = own.acceptance.mean(pooled, POOL_WEIGHT_ROUNDS, own.draft_length_factor)
        variances = own.variances or everyone.variances
        # With no history, rounds are about as spread as a geometric count of that mean.
        within = variances[0] if variances else pooled
        return tokens_per_round(mean, shrinkage(variances), within, rounds, emitted)

    def mean_tokens_per_round(self, workload_class: str) -> float:
        """Return the class mean, for policies that ignore a request's own acceptance."""
        return self.tokens_per_round(workload_class, 0, 0).mean

    def tokens_left(
        self,
        workload_class: str,
        emitted: int,
        most: int,
        guess: float | None,
        by_worker: bool,
        tenant: str = "",
    ) -> TokensLeft:
        """Return the remaining output tokens of a request that emitted `emitted` of at most `most`; `guess`
        is of the total.
        """
        own = self._of(workload_class)
        if guess is None:
            return own.lengths.left(emitted, most, own.lengths.basis)
        if by_worker:
            return own.guessed.left(own.of_worker, guess, emitted, most, "the worker's prediction")
        calibration = self._calibration(tenant, workload_class, own)
        return own.guessed.left(calibration, guess, emitted, most, "the client's estimate")

    def _calibration(self, tenant: str, workload_class: str, own: ClassPriors) -> Calibration:
        key = (tenant, workload_class)
        found = self._calibrations.get(key)
        if found is None:
            if len(self._calibrations) >= MAX_CALIBRATIONS:
                self._calibrations.clear()
            weight = own.client_guesses.weight
            found = self._tenants.calibrated(tenant, workload_class, own.of_client, weight)
            self._calibrations[key] = found
        return found

    # Observations, from the scheduler.

    def publish(self) -> None:
        """Start a new version if that would change ranks."""
        share_s = self.cost.share_s(0)
        if self._tables_changed or abs(share_s - self._share_s) > COST_CHANGE * self._share_s:
            self._share_s = share_s
            self._tables_changed = False
            self.version += 1

    def observe_round(self, batch: float, tokens: float, context_tokens: float, seconds: float) -> None:
        """Learn from the cost of a round; see `CostModel`."""
        self.cost.observe_round(batch, tokens, context_tokens, seconds)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Learn from the cost of a prefill; see `CostModel`."""
        self.cost.observe_prefill(tokens, seconds)

    def observe_swap(self, tokens: int, seconds: float) -> None:
        """Learn from the cost of moving context between device and host; see `CostModel`."""
        self.cost.observe_swap(tokens, seconds)

    def observe_tokens(
        self,
        workload_class: str,
        tokens: int,
        drafted: int = 0,
        tested: tuple[int, ...] = (),
        accepted: tuple[int, ...] = (),
        tenant: str = "",
        rounds: int = 1,
    ) -> None:
        """Learn from `rounds` rounds of a request, which gained `tokens` tokens with `drafted` draft tokens;
        `tested` and `accepted` count by position.
        """
        for priors in self._touch(workload_class, tenant, ended=False):
            priors.acceptance.observe_round(tokens, drafted, rounds)
            if tested:
                priors.positions.observe(tested, accepted, rounds)
                if priors.positions.stale:
                    priors.rebuild_positions(None if priors is self._all else self._all.positions.rates)

    def observe_acceptance(
        self, workload_class: str, rounds: int, tokens: int, squares: int, tenant: str = ""
    ) -> None:
        """Learn from an ended request: its rounds, their tokens and squared tokens."""
        for priors in self._touch(workload_class, tenant, ended=True):
            priors.acceptance.observe_end(rounds, tokens, squares)
            priors.variances = priors.acceptance.variances()

    def observe_length(
        self,
        workload_class: str,
        length: int,
        client_guess: float | None,
        worker_guess: float | None,
        tenant: str = "",
    ) -> None:
        """Learn from a request that ran to its own end after `length` tokens."""
        if client_guess is not None:
            self._tenants.observe(tenant, workload_class, client_guess, length)
            self._calibrations.pop((tenant, workload_class), None)
        for priors in self._touch(workload_class, tenant, ended=True):
            priors.lengths.observe(length)
            if client_guess is not None:
                priors.client_guesses.observe(client_guess, length)
            if worker_guess is not None:
                priors.worker_guesses.observe(worker_guess, length)
            if priors.lengths.stale:
                priors.rebuild_lengths(None if priors is self._all else self._all.lengths)
                self._tables_changed = True
                self._calibrations.clear()
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
            own.rebuild_lengths(self._all.lengths)
        return [self._all, own]

    def _forget_class(self, newcomer: str) -> None:
        """Make room for a class that `newcomer` brings."""
        count = Counter([newcomer, *[priors.owner for priors in self._classes.values()]])
        most = max(count.values())
        for name, priors in self._classes.items():
            if count[priors.owner] == most:
                del self._classes[name]
                return

    # The record.

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, lists and dictionaries, for JSON."""
        return {
            "format": FORMAT,
            "version": self.version,
            "cost": asdict(self.cost),
            "all": _class_to_dict(self._all),
            "classes": {name: _class_to_dict(priors) for name, priors in self._classes.items()},
            "tenants": {
                tenant: list(astuple(history)) for tenant, history in self._tenants.by_tenant.items()
            },
            "tenants_by_class": [
                [*key, *astuple(history)] for key, history in self._tenants.by_class.items()
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Priors:
        """Return the priors that `to_dict` gave. With an unknown format return new ones: the core can work
        without any priors.
        """
        priors = cls()
        if data.get("format") not in READABLE_FORMATS:
            return priors
        priors.version = data["version"]
        priors.cost = CostModel(**{**data["cost"], "fit": tuple(data["cost"]["fit"])})
        priors._share_s = priors.cost.share_s(0)
        priors._all = everyone = _class_from_dict(data["all"], None)
        priors._classes = {name: _class_from_dict(own, everyone) for name, own in data["classes"].items()}
        tenants = priors._tenants
        for tenant, sums in data.get("tenants", {}).items():
            tenants.by_tenant[tenant] = GuessHistory(*sums)
        for tenant, workload_class, *sums in data.get("tenants_by_class", ()):
            tenants.by_class[tenant, workload_class] = GuessHistory(*sums)
        return priors


def _class_to_dict(priors: ClassPriors) -> dict[str, Any]:
    positions = priors.positions
    return {
        "acceptance": asdict(priors.acceptance),
        "positions": {
            "rounds": positions.rounds,
            "tested": [value / positions.unit for value in positions.tested],
            "accepted": [value / positions.unit for value in positions.accepted],
        },
        "length_counts": {str(i): count for i, count in enumerate(priors.lengths.counts) if count},
        "client_guesses": asdict(priors.client_guesses),
        "worker_guesses": asdict(priors.worker_guesses),
        "owner": priors.owner,
    }


def _class_from_dict(data: Mapping[str, Any], pool: ClassPriors | None) -> ClassPriors:
    priors = ClassPriors(
        acceptance=AcceptanceStatistics(**data["acceptance"]),
        client_guesses=GuessHistory(**data.get("client_guesses", {})),
        worker_guesses=GuessHistory(**data.get("worker_guesses", {})),
        owner=data.get("owner", ""),
    )
    lengths, positions = priors.lengths, priors.positions
    counts = data["length_counts"]
    lengths.counts = [counts.get(str(i), 0.0) for i in range(BINS)]
    priors.rebuild_lengths(None if pool is None else pool.lengths)
    seen = data["positions"]
    positions.rounds, positions.tested, positions.accepted = seen["rounds"], seen["tested"], seen["accepted"]
    priors.rebuild_positions(None if pool is None else pool.positions.rates)
    priors.variances = priors.acceptance.variances()
    return priors
