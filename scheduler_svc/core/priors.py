"""What is learnt online, per workload class and of the machine; survives a restart on the record.

The scheduler feeds it, policies read it. Ranks are computed when their request is touched, so a change here reaches
a waiting request with its next event, never by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from scheduler_svc.core.acceptance import (
    DEFAULT_TOKENS_PER_ROUND,
    DEFAULT_WEIGHT_ROUNDS,
    POOL_WEIGHT_ROUNDS,
    AcceptanceStatistics,
    PositionStatistics,
    TokensPerRound,
    shrinkage,
    tokens_per_round,
)
from scheduler_svc.core.cost import CostModel
from scheduler_svc.core.guesses import GuessedLengths, GuessError
from scheduler_svc.core.lengths import BINS, LengthTable, TokensLeft

FORMAT = 3
READABLE_FORMATS = (2, 3)
"""What an earlier build learnt is taken on: format 2 has more than is read."""
COST_CHANGE = 0.05
ENOUGH_ROUNDS = 50.0
"""Rounds of a class before its means are carried from one draft length to another."""
MAX_CLASSES = 256
"""Classes beyond this share the statistics of all: the client's hint must not grow the memory."""


@dataclass(slots=True)
class ClassPriors:
    """What one workload class was like."""

    acceptance: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    positions: PositionStatistics = field(default_factory=PositionStatistics)
    lengths: LengthTable = field(default_factory=LengthTable)
    client_guess: GuessError = field(default_factory=GuessError)
    worker_guess: GuessError = field(default_factory=GuessError)
    by_client: GuessedLengths = field(init=False)
    by_worker: GuessedLengths = field(init=False)
    variances: tuple[float, float] | None = None
    """Of its acceptance, as of the newest end: what a rank asks for is not worked out for each rank."""
    draft_length_factor: float = 1.0
    """Tokens per round at the present draft length, over those at the draft lengths of the class's history."""

    def __post_init__(self) -> None:
        self._take_up_guesses()

    def rebuild_lengths(self, pool: LengthTable | None) -> None:
        """Take up what was observed of lengths and guesses."""
        self.lengths.rebuild(pool)
        self._take_up_guesses()

    def _take_up_guesses(self) -> None:
        self.by_client = GuessedLengths(self.lengths, self.client_guess)
        self.by_worker = GuessedLengths(self.lengths, self.worker_guess)

    def rebuild_positions(self, pool: list[float] | None) -> None:
        """Take up what was observed of draft positions and lengths."""
        self.positions.rebuild(pool)
        acceptance = self.acceptance
        if self.positions.rounds >= ENOUGH_ROUNDS:
            usual = self.positions.tokens(acceptance.drafted / acceptance.rounds)
            self.draft_length_factor = self.positions.tokens(acceptance.drafted_of_late) / usual


class Priors:
    """All that was learnt.

    What a rank asks for is always the newest. `version` says when ranks made before should be made again: it grows at
    intervals (`publish`), and only if a length table was built anew or the cost of a round moved by more than
    `COST_CHANGE`.
    """

    def __init__(self) -> None:
        self.version = 0
        self.cost = CostModel()
        self._all = ClassPriors()
        self._classes: dict[str, ClassPriors] = {}
        self._share_s = self.cost.share_s(0)
        """Cost of a round as of this version."""
        self._tables_changed = False

    # What policies ask.

    def tokens_per_round(self, workload_class: str, rounds: int, emitted: int) -> TokensPerRound:
        """Tokens that a request of this class will gain per round, after so many rounds and tokens of its own.

        The means of the class and of all are carried to the draft length of late, by what each draft position was
        worth: where workers draft less than they used to (a fuller batch, another setting), the estimate follows in a
        few hundred rounds and not in the 20,000 that a mean takes to forget. A request's own rounds are taken as they
        are: workers choose the draft length for each request, and go on doing so.
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

    def tokens_by_draft_length(self, workload_class: str, draft_length: float) -> float:
        """Tokens per round of this class if so many tokens were drafted, whatever its history drafted; at 0 exactly 1."""
        return self._of(workload_class).positions.tokens(draft_length)

    def mean_tokens_per_round(self, workload_class: str) -> float:
        """The class mean, for policies that ignore a request's own acceptance."""
        return self.tokens_per_round(workload_class, 0, 0).mean

    def tokens_left(
        self, workload_class: str, emitted: int, most: int, guess: float | None, by_worker: bool
    ) -> TokensLeft:
        """Output tokens left of a request that emitted so many of at most `most`; `guess` is of the total."""
        own = self._of(workload_class)
        if guess is None:
            return own.lengths.left(emitted, most, own.lengths.basis)
        if by_worker:
            return own.by_worker.left(guess, emitted, most, "the worker's prediction")
        return own.by_client.left(guess, emitted, most, "the client's estimate")

    # What the scheduler tells.

    def publish(self) -> None:
        """Start a new version if that would change ranks."""
        share_s = self.cost.share_s(0)
        if self._tables_changed or abs(share_s - self._share_s) > COST_CHANGE * self._share_s:
            self._share_s = share_s
            self._tables_changed = False
            self.version += 1

    def observe_round(self, batch: int, tokens: int, context_tokens: int, seconds: float) -> None:
        """What a round cost; see `CostModel`."""
        self.cost.observe_round(batch, tokens, context_tokens, seconds)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """What a prefill cost; see `CostModel`."""
        self.cost.observe_prefill(tokens, seconds)

    def observe_swap(self, tokens: int, seconds: float) -> None:
        """What moving context between device and host cost; see `CostModel`."""
        self.cost.observe_swap(tokens, seconds)

    def observe_tokens(
        self,
        workload_class: str,
        tokens: int,
        drafted: int = 0,
        tested: tuple[int, ...] = (),
        accepted: tuple[int, ...] = (),
    ) -> None:
        """A request gained so many tokens in one round, of so many drafted; `tested` and `accepted` by position."""
        for priors in self._touch(workload_class):
            priors.acceptance.observe_round(tokens, drafted)
            if tested:
                priors.positions.observe(tested, accepted)
                if priors.positions.stale:
                    priors.rebuild_positions(None if priors is self._all else self._all.positions.rates)

    def observe_acceptance(self, workload_class: str, rounds: int, tokens: int, squares: int) -> None:
        """A request ended: its rounds, their tokens and squared tokens."""
        for priors in self._touch(workload_class):
            priors.acceptance.observe_end(rounds, tokens, squares)
            priors.variances = priors.acceptance.variances()

    def observe_length(
        self, workload_class: str, length: int, client_guess: float | None, worker_guess: float | None
    ) -> None:
        """A request ran to its own end after so many tokens."""
        for priors in self._touch(workload_class):
            priors.lengths.observe(length)
            if client_guess is not None:
                priors.client_guess.observe(client_guess, length)
            if worker_guess is not None:
                priors.worker_guess.observe(worker_guess, length)
            if priors.lengths.stale:
                priors.rebuild_lengths(None if priors is self._all else self._all.lengths)
                self._tables_changed = True

    def _of(self, workload_class: str) -> ClassPriors:
        return self._classes.get(workload_class, self._all)

    def _touch(self, workload_class: str) -> list[ClassPriors]:
        """Everything that learns from a request of this class; the sum over all classes first."""
        if workload_class not in self._classes and len(self._classes) < MAX_CLASSES:
            self._classes[workload_class] = new = ClassPriors()
            new.rebuild_lengths(self._all.lengths)
        own = self._classes.get(workload_class)
        return [self._all] if own is None else [self._all, own]

    # The record.

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and dictionaries, for JSON."""
        return {
            "format": FORMAT,
            "version": self.version,
            "cost": asdict(self.cost),
            "all": _class_to_dict(self._all),
            "classes": {name: _class_to_dict(priors) for name, priors in self._classes.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Priors:
        """What `to_dict` gave; another format starts afresh: priors are a help, never a need."""
        priors = cls()
        if data.get("format") not in READABLE_FORMATS:
            return priors
        priors.version = data["version"]
        priors.cost = CostModel(**{**data["cost"], "fit": tuple(data["cost"]["fit"])})
        priors._share_s = priors.cost.share_s(0)
        priors._all = everyone = _class_from_dict(data["all"], None)
        priors._classes = {name: _class_from_dict(own, everyone) for name, own in data["classes"].items()}
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
        "client_guess": asdict(priors.client_guess),
        "worker_guess": asdict(priors.worker_guess),
    }


def _class_from_dict(data: Mapping[str, Any], pool: ClassPriors | None) -> ClassPriors:
    priors = ClassPriors(
        acceptance=AcceptanceStatistics(**data["acceptance"]),
        client_guess=GuessError(**data["client_guess"]),
        worker_guess=GuessError(**data["worker_guess"]),
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
