"""Costs of a round, a prefill and a swap on the machines of a shard, by regressions that learn online."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

ROUND_FORGET: Final = 2000.0
BATCH_FORGET: Final = 200.0
REFIT_EVERY: Final = 16
"""Rounds between two fits. Ranks use the fit, not the sums."""
ENOUGH_ROUNDS: Final = 20.0
OUTLIER: Final = 4.0
"""A round that took this many times what was expected (a compilation, a stall) counts as that many times."""
LEAST_ROUND_S: Final = 1e-4
"""Lower bound of an expected round, in seconds, so that an estimate that fell to 0 can recover."""
BATCH_UNIT: Final = 8.0
TOKEN_UNIT: Final = 32.0
CONTEXT_UNIT: Final = 4096.0
"""Units of sequences, verified tokens and context tokens in the regression, which give its terms similar
sizes."""
ROUND_PRIOR = (0.03, 0.001, 0.003, 0.001)
"""Seconds: fixed, per `BATCH_UNIT` sequences, per `TOKEN_UNIT` verified tokens, per `CONTEXT_UNIT` tokens of
context. Like a current GPU; our choice."""
ROUND_PRIOR_WEIGHT = (0.05, 0.2, 0.2, 0.5)
"""Weight of each prior term, in rounds. Small, so that the first rounds overrule it. It only divides costs
that the rounds do not separate: fixed and per-sequence cost with a single batch size, sequences and tokens
with a single draft length."""
TERMS = len(ROUND_PRIOR)
PREFILL_PRIOR_S: Final = 1e-4
PREFILL_PRIOR_TOKENS: Final = 200.0
PREFILL_FORGET: Final = 500.0
SWAP_SHARE: Final = 0.25
"""Assumed cost of moving a context between device and host, as a share of computing it again (0.02 and 0.09
ms a token), until swaps were observed. Our choice."""
SWAP_PRIOR_TOKENS: Final = 500.0
SWAP_FORGET: Final = 200.0
LEAST_TOKEN_S: Final = 1e-12
"""Lower bound of the estimated cost of a token, in seconds."""

_Vector = tuple[float, float, float, float]


@dataclass(slots=True)
class CostModel:
    """Costs of a model pair on the machines of its shard, in seconds.

        round   = fixed + per_sequence · batch + per_token · verified tokens + per_context · context tokens
        prefill = per_token · tokens
        swap    = per_token · tokens, either way

    Verified tokens are the draft tokens and one more per sequence; their cost includes that of drafting them.
    """

    rounds: float = 0.0
    since_fit: int = 0
    squares: list[float] = field(default_factory=lambda: [0.0] * 10)
    """Decayed sums of x·xᵀ, upper triangle, x = (1, batch, tokens, context) in their units."""
    products: list[float] = field(default_factory=lambda: [0.0] * TERMS)
    fit: _Vector = ROUND_PRIOR
    batch: float = 1.0
    """Typical batch of recent rounds."""
    tokens: float = 4.0
    """Typical number of verified tokens in recent rounds."""
    prefill_s: float = PREFILL_PRIOR_S * PREFILL_PRIOR_TOKENS
    prefill_tokens: float = PREFILL_PRIOR_TOKENS
    swap_s: float = 0.0
    swap_tokens: float = 0.0

    def observe_round(self, batch: float, tokens: float, context_tokens: float, seconds: float) -> None:
        """Learn from a round of `batch` sequences that verified `tokens` tokens with `context_tokens` of
        context in all and took `seconds` for draft and verification. A time of 0 is ignored: invalid times
        are reported as 0.
        """
        if seconds <= 0:
            return
        b, t, c = batch / BATCH_UNIT, tokens / TOKEN_UNIT, context_tokens / CONTEXT_UNIT
        if self.rounds > ENOUGH_ROUNDS:
            seconds = min(seconds, OUTLIER * self.round_s(batch, tokens, context_tokens))
        keep = 1 - 1 / ROUND_FORGET
        self.rounds = self.rounds * keep + 1
        s, p = self.squares, self.products
        # Written out: this runs once per round of every worker.
        self.squares = [
            s[0] * keep + 1.0,
            s[1] * keep + b,
            s[2] * keep + t,
            s[3] * keep + c,
            s[4] * keep + b * b,
            s[5] * keep + b * t,
            s[6] * keep + b * c,
            s[7] * keep + t * t,
            s[8] * keep + t * c,
            s[9] * keep + c * c,
        ]
        self.products = [
            p[0] * keep + seconds,
            p[1] * keep + b * seconds,
            p[2] * keep + t * seconds,
            p[3] * keep + c * seconds,
        ]
        # The first rounds weigh more; otherwise a start with a single request would count for long.
        gain = 1 / min(self.rounds, BATCH_FORGET)
        self.batch += (batch - self.batch) * gain
        self.tokens += (tokens - self.tokens) * gain
        self.since_fit += 1
        if self.since_fit >= REFIT_EVERY or self.rounds < REFIT_EVERY:
            self.refit()

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Learn from `tokens` context tokens that were computed in `seconds`. A time of 0 is ignored."""
        if seconds > 0:
            keep = 1 - 1 / PREFILL_FORGET
            self.prefill_tokens = self.prefill_tokens * keep + tokens
            self.prefill_s = self.prefill_s * keep + seconds

    def observe_swap(self, tokens: int, seconds: float) -> None:
        """Learn from `tokens` context tokens that were moved between device and host, both ways, in
        `seconds`."""
        if seconds > 0:
            keep = 1 - 1 / SWAP_FORGET
            self.swap_tokens = self.swap_tokens * keep + tokens
            self.swap_s = self.swap_s * keep + seconds

    def refit(self) -> None:
        """Fit by least squares, shrunk to the prior. A term with a negative coefficient is left out, and the
        rest fitted again."""
        self.since_fit = 0
        terms = list(range(TERMS))
        while True:
            solution = self._solve(terms)
            negative = [term for term, value in zip(terms, solution, strict=True) if value < 0]
            if not negative:
                break
            terms.remove(negative[-1])
        values = dict(zip(terms, solution, strict=True))
        self.fit = (values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0), values.get(3, 0.0))

    def _solve(self, terms: list[int]) -> list[float]:
        a, b, c, d, e, f, g, h, i, j = self.squares
        matrix = [[a, b, c, d], [b, e, f, g], [c, f, h, i], [d, g, i, j]]
        ridge = [ROUND_PRIOR_WEIGHT[term] for term in terms]
        rows = [[matrix[m][n] + (ROUND_PRIOR_WEIGHT[m] if m == n else 0.0) for n in terms] for m in terms]
        right = [self.products[m] + ROUND_PRIOR_WEIGHT[m] * ROUND_PRIOR[m] for m in terms]
        # Gaussian elimination. No pivot of a positive semidefinite matrix with a ridge is smaller than the
        # ridge, so rows are not exchanged. Rounding can make one smaller when terms are correlated, so the
        # pivot is bounded.
        size = len(terms)
        for k in range(size):
            rows[k][k] = max(rows[k][k], ridge[k])
            for m in range(k + 1, size):
                factor = rows[m][k] / rows[k][k]
                rows[m] = [value - factor * pivot for value, pivot in zip(rows[m], rows[k], strict=True)]
                right[m] -= factor * right[k]
        solution = [0.0] * size
        for m in reversed(range(size)):
            known = sum(rows[m][n] * solution[n] for n in range(m + 1, size))
            solution[m] = (right[m] - known) / rows[m][m]
        return solution

    def round_s(self, batch: float, tokens: float, context_tokens: float) -> float:
        """Return the expected seconds of a round that verifies `tokens` tokens of `batch` sequences."""
        fixed, per_sequence, per_token, per_context = self.fit
        seconds = (
            fixed
            + per_sequence * batch / BATCH_UNIT
            + per_token * tokens / TOKEN_UNIT
            + per_context * context_tokens / CONTEXT_UNIT
        )
        return max(seconds, LEAST_ROUND_S)

    def share_s(self, context_tokens: float) -> float:
        """Return the machine seconds of a round for one sequence: T(B)/B at the typical batch and number of
        tokens (our choice)."""
        fixed, per_sequence, per_token, per_context = self.fit
        share = (
            (fixed + per_token * self.tokens / TOKEN_UNIT) / self.batch
            + per_sequence / BATCH_UNIT
            + per_context * context_tokens / CONTEXT_UNIT
        )
        return max(share, 1e-9)

    def full_share(self, slots: float) -> float:
        """Return the cost of a sequence in a batch of `slots`, as a share of its cost in the typical batch;
        at most 1.

        Estimates use the typical batch, which is right for an order. A sum of them overstates the work of
        half-empty workers, and an autoscaler that adds workers for it would leave them emptier still.
        """
        if slots <= self.batch:
            return 1.0
        return max(0.0, 1.0 - self.fit[0] * (1.0 / self.batch - 1.0 / slots) / self.typical_share_s)

    @property
    def by_batch_s(self) -> tuple[float, float]:
        """Return the seconds of a round without sequences, and those that each sequence adds, with the
        typical number of tokens and context.
        """
        fixed = self.fit[0]
        return fixed, self.typical_share_s - fixed / self.batch

    @property
    def typical_share_s(self) -> float:
        """Return the machine seconds of a round for one sequence, with the typical context, too."""
        contexts = self.squares[3] * CONTEXT_UNIT
        sequences = self.squares[1] * BATCH_UNIT
        return self.share_s(contexts / sequences if sequences else 0.0)

    def prefill_share_s(self, tokens: int) -> float:
        """Return the machine seconds to compute `tokens` tokens of context. Nothing else runs during a
        prefill."""
        return max(self.prefill_s / self.prefill_tokens, LEAST_TOKEN_S) * tokens

    def swap_in_s(self, tokens: int) -> float:
        """Return the machine seconds to move `tokens` tokens back from the host; with little history a share
        of their prefill."""
        guess = SWAP_SHARE * self.prefill_share_s(1)
        per_token = (SWAP_PRIOR_TOKENS * guess + self.swap_s) / (SWAP_PRIOR_TOKENS + self.swap_tokens)
        return max(per_token, LEAST_TOKEN_S) * tokens
