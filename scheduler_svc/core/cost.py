"""What a round and a prefill cost the machine: regressions that learn online."""

from __future__ import annotations

from dataclasses import dataclass, field

ROUND_FORGET = 2000.0
BATCH_FORGET = 200.0
REFIT_EVERY = 16
"""Rounds between two fits: ranks use the fit, not the sums."""
ENOUGH_ROUNDS = 20.0
OUTLIER = 4.0
"""A round that took this many times what was expected (a compilation, a stall) counts as that many times."""
BATCH_UNIT, CONTEXT_UNIT = 8.0, 4096.0
"""The regression counts sequences and context tokens in these, so that its terms have like sizes."""
ROUND_PRIOR = (0.03, 0.004, 0.001)
"""Seconds: fixed, per `BATCH_UNIT` sequences, per `CONTEXT_UNIT` tokens of context. A GPU of today; our choice."""
ROUND_PRIOR_WEIGHT = (0.05, 0.2, 0.5)
"""Rounds that each prior term counts for. Small: the first rounds overrule it; it only splits what the rounds
cannot tell apart (with one batch size only, fixed from per-sequence cost)."""
PREFILL_PRIOR_S = 1e-4
PREFILL_PRIOR_TOKENS = 200.0
PREFILL_FORGET = 500.0
SWAP_SHARE = 0.25
"""Swapping a context in costs this share of computing it again (0.02 against 0.09 ms a token): our choice."""

_Vector = tuple[float, float, float]


@dataclass(slots=True)
class CostModel:
    """`round = fixed + per_sequence · batch + per_context · context tokens`, `prefill = per_token · tokens`."""

    rounds: float = 0.0
    since_fit: int = 0
    squares: list[float] = field(default_factory=lambda: [0.0] * 6)
    """Decayed sums of x·xᵀ, upper triangle, x = (1, batch, context) in their units."""
    products: list[float] = field(default_factory=lambda: [0.0] * 3)
    fit: _Vector = ROUND_PRIOR
    batch: float = 1.0
    """Typical batch of late."""
    prefill_s: float = PREFILL_PRIOR_S * PREFILL_PRIOR_TOKENS
    prefill_tokens: float = PREFILL_PRIOR_TOKENS

    def observe_round(self, batch: int, context_tokens: int, seconds: float) -> None:
        """A round with so many sequences, of so many context tokens in all, took so long (draft and verify)."""
        x = (1.0, batch / BATCH_UNIT, context_tokens / CONTEXT_UNIT)
        if self.rounds > ENOUGH_ROUNDS:
            seconds = min(seconds, OUTLIER * self._predict(x))
        keep = 1 - 1 / ROUND_FORGET
        self.rounds = self.rounds * keep + 1
        at = 0
        for i in range(3):
            for j in range(i, 3):
                self.squares[at] = self.squares[at] * keep + x[i] * x[j]
                at += 1
            self.products[i] = self.products[i] * keep + x[i] * seconds
        # The first rounds weigh more, or a start with one request would count for a long time.
        self.batch += (batch - self.batch) / min(self.rounds, BATCH_FORGET)
        self.since_fit += 1
        if self.since_fit >= REFIT_EVERY or self.rounds < REFIT_EVERY:
            self.refit()

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Computing so many context tokens took so long."""
        keep = 1 - 1 / PREFILL_FORGET
        self.prefill_tokens = self.prefill_tokens * keep + tokens
        self.prefill_s = self.prefill_s * keep + seconds

    def refit(self) -> None:
        """Least squares, drawn towards the prior; a term that comes out negative is left out and the rest fitted."""
        self.since_fit = 0
        terms = [0, 1, 2]
        while True:
            solution = self._solve(terms)
            negative = [term for term, value in zip(terms, solution, strict=True) if value < 0]
            if not negative:
                break
            terms.remove(negative[-1])
        values = dict(zip(terms, solution, strict=True))
        self.fit = (values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0))

    def _solve(self, terms: list[int]) -> list[float]:
        a, b, c, d, e, f = self.squares
        matrix = [[a, b, c], [b, d, e], [c, e, f]]
        rows = [[matrix[i][j] + (ROUND_PRIOR_WEIGHT[i] if i == j else 0.0) for j in terms] for i in terms]
        right = [self.products[i] + ROUND_PRIOR_WEIGHT[i] * ROUND_PRIOR[i] for i in terms]
        # Gaussian elimination; the ridge keeps the matrix positive definite, so no pivoting.
        size = len(terms)
        for k in range(size):
            for i in range(k + 1, size):
                factor = rows[i][k] / rows[k][k]
                rows[i] = [value - factor * pivot for value, pivot in zip(rows[i], rows[k], strict=True)]
                right[i] -= factor * right[k]
        solution = [0.0] * size
        for i in reversed(range(size)):
            known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
            solution[i] = (right[i] - known) / rows[i][i]
        return solution

    def _predict(self, x: _Vector) -> float:
        return sum(term * value for term, value in zip(self.fit, x, strict=True))

    def round_s(self, batch: float, context_tokens: float) -> float:
        """Expected seconds of a round."""
        return self._predict((1.0, batch / BATCH_UNIT, context_tokens / CONTEXT_UNIT))

    def share_s(self, context_tokens: float) -> float:
        """Machine seconds that a round costs for one sequence: T(B)/B at the typical batch (our choice)."""
        fixed, per_sequence, per_context = self.fit
        share = fixed / self.batch + per_sequence / BATCH_UNIT + per_context * context_tokens / CONTEXT_UNIT
        return max(share, 1e-9)

    def prefill_share_s(self, tokens: int) -> float:
        """Machine seconds to compute so many tokens of context; a prefill has the machine to itself."""
        return self.prefill_s / self.prefill_tokens * tokens

    def swap_in_s(self, tokens: int) -> float:
        """Machine seconds to take so many tokens back from the host."""
        return SWAP_SHARE * self.prefill_share_s(tokens)
