"""What a round, a prefill and a swap cost the machine: regressions that learn online."""

from __future__ import annotations

from dataclasses import dataclass, field

ROUND_FORGET = 2000.0
BATCH_FORGET = 200.0
REFIT_EVERY = 16
"""Rounds between two fits: ranks use the fit, not the sums."""
ENOUGH_ROUNDS = 20.0
OUTLIER = 4.0
"""A round that took this many times what was expected (a compilation, a stall) counts as that many times."""
LEAST_ROUND_S = 1e-4
"""A round is never expected to be shorter, so that an estimate that fell to nothing can recover."""
BATCH_UNIT, TOKEN_UNIT, CONTEXT_UNIT = 8.0, 32.0, 4096.0
"""The regression counts sequences, verified tokens and context tokens in these, so that its terms have like sizes."""
ROUND_PRIOR = (0.03, 0.001, 0.003, 0.001)
"""Seconds: fixed, per `BATCH_UNIT` sequences, per `TOKEN_UNIT` verified tokens, per `CONTEXT_UNIT` tokens of context.
A GPU of today; our choice."""
ROUND_PRIOR_WEIGHT = (0.05, 0.2, 0.2, 0.5)
"""Rounds that each prior term counts for. Small: the first rounds overrule it; it only splits what the rounds
cannot tell apart (with one batch size only, fixed from per-sequence cost; with one draft length, sequences from
tokens)."""
TERMS = len(ROUND_PRIOR)
PREFILL_PRIOR_S = 1e-4
PREFILL_PRIOR_TOKENS = 200.0
PREFILL_FORGET = 500.0
SWAP_SHARE = 0.25
"""Moving a context between device and host costs this share of computing it again (0.02 against 0.09 ms a token),
until it was seen: our choice."""
SWAP_PRIOR_TOKENS = 500.0
SWAP_FORGET = 200.0
LEAST_TOKEN_S = 1e-12
"""No estimate of the cost of a token is smaller: nothing is free."""

_Vector = tuple[float, float, float, float]


@dataclass(slots=True)
class CostModel:
    """What a pair costs on the machines of its shard.

        round   = fixed + per_sequence · batch + per_token · verified tokens + per_context · context tokens
        prefill = per_token · tokens
        swap    = per_token · tokens, either way

    Verified tokens are the drafted ones and one more per sequence; their cost holds that of drafting them too.
    """

    rounds: float = 0.0
    since_fit: int = 0
    squares: list[float] = field(default_factory=lambda: [0.0] * 10)
    """Decayed sums of x·xᵀ, upper triangle, x = (1, batch, tokens, context) in their units."""
    products: list[float] = field(default_factory=lambda: [0.0] * TERMS)
    fit: _Vector = ROUND_PRIOR
    batch: float = 1.0
    """Typical batch of late."""
    tokens: float = 4.0
    """Typical verified tokens of a round of late."""
    prefill_s: float = PREFILL_PRIOR_S * PREFILL_PRIOR_TOKENS
    prefill_tokens: float = PREFILL_PRIOR_TOKENS
    swap_s: float = 0.0
    swap_tokens: float = 0.0

    def observe_round(self, batch: int, tokens: int, context_tokens: int, seconds: float) -> None:
        """A round that verified so many tokens of so many sequences, with so many context tokens in all, took so long
        (draft and verify). No time at all is no observation: that is what a time that makes no sense counts as.
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
        # The first rounds weigh more, or a start with one request would count for a long time.
        gain = 1 / min(self.rounds, BATCH_FORGET)
        self.batch += (batch - self.batch) * gain
        self.tokens += (tokens - self.tokens) * gain
        self.since_fit += 1
        if self.since_fit >= REFIT_EVERY or self.rounds < REFIT_EVERY:
            self.refit()

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Computing so many context tokens took so long; no time at all is no observation."""
        if seconds > 0:
            keep = 1 - 1 / PREFILL_FORGET
            self.prefill_tokens = self.prefill_tokens * keep + tokens
            self.prefill_s = self.prefill_s * keep + seconds

    def observe_swap(self, tokens: int, seconds: float) -> None:
        """Moving so many context tokens between device and host, in and out together, took so long."""
        if seconds > 0:
            keep = 1 - 1 / SWAP_FORGET
            self.swap_tokens = self.swap_tokens * keep + tokens
            self.swap_s = self.swap_s * keep + seconds

    def refit(self) -> None:
        """Least squares, drawn towards the prior; a term that comes out negative is left out and the rest fitted."""
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
        # Gaussian elimination. No pivot of a positive semidefinite matrix with a ridge is smaller than the ridge, so
        # no exchange of rows; rounding may say otherwise when terms move together, and is overruled.
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
        """Expected seconds of a round that verifies so many tokens of so many sequences."""
        fixed, per_sequence, per_token, per_context = self.fit
        seconds = (
            fixed
            + per_sequence * batch / BATCH_UNIT
            + per_token * tokens / TOKEN_UNIT
            + per_context * context_tokens / CONTEXT_UNIT
        )
        return max(seconds, LEAST_ROUND_S)

    def share_s(self, context_tokens: float) -> float:
        """Machine seconds that a round costs for one sequence: T(B)/B at the typical batch and the typical number of
        tokens (our choice)."""
        fixed, per_sequence, per_token, per_context = self.fit
        share = (
            (fixed + per_token * self.tokens / TOKEN_UNIT) / self.batch
            + per_sequence / BATCH_UNIT
            + per_context * context_tokens / CONTEXT_UNIT
        )
        return max(share, 1e-9)

    def full_share(self, slots: float) -> float:
        """What a sequence costs in a batch of `slots`, as a share of what it costs in the typical one; at most 1.

        Estimates rest on the typical batch, which is right for an order. A sum of them over-states the work of workers that
        are half empty, and an autoscaler that adds workers to it would empty them further.
        """
        if slots <= self.batch:
            return 1.0
        contexts = self.squares[3] * CONTEXT_UNIT
        sequences = self.squares[1] * BATCH_UNIT
        share_s = self.share_s(contexts / sequences if sequences else 0.0)
        return max(0.0, 1.0 - self.fit[0] * (1.0 / self.batch - 1.0 / slots) / share_s)

    def prefill_share_s(self, tokens: int) -> float:
        """Machine seconds to compute so many tokens of context; a prefill has the machine to itself."""
        return max(self.prefill_s / self.prefill_tokens, LEAST_TOKEN_S) * tokens

    def swap_in_s(self, tokens: int) -> float:
        """Machine seconds to take so many tokens back from the host; with little history a share of their prefill."""
        guess = SWAP_SHARE * self.prefill_share_s(1)
        per_token = (SWAP_PRIOR_TOKENS * guess + self.swap_s) / (SWAP_PRIOR_TOKENS + self.swap_tokens)
        return max(per_token, LEAST_TOKEN_S) * tokens
