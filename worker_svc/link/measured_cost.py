"""The costs of rounds that a worker has measured, for the scheduler."""

from __future__ import annotations

from worker_svc.runner.messages import Round

MEMORY_ROUNDS = 500
"""Rounds over which a measurement fades: long against noise, short against a change of load."""
RIDGE = 1e-3
"""Keeps the fit defined while all rounds so far had the same shape."""


class MeasuredCost:
    """A fit of round time = base + per_sequence · requests + per_context_token · context, and two rates.

    Least squares with exponential forgetting. Zeros until enough rounds were seen.
    """

    def __init__(self) -> None:
        self._rounds = 0
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._prefill = [0.0, 0.0]
        self._swap = [0.0, 0.0]

    def observe(self, report: Round) -> None:
        """Take in one round."""
        result = report.result
        count = len(result.requests)
        if not count:
            return
        prefilled = 0
        decoding = True
        for _, step in report.progress:
            prefilled += step.prefilled
            decoding = decoding and bool(step.tokens)
        keep = 1 - 1 / MEMORY_ROUNDS
        if report.swapped_in_tokens:
            self._swap = [
                self._swap[0] * keep + result.swap_s,
                self._swap[1] * keep + report.swapped_in_tokens,
            ]
        if prefilled:
            self._prefill = [self._prefill[0] * keep + result.prefill_s, self._prefill[1] * keep + prefilled]
        if prefilled or not decoding:
            return  # the forward was shared with prefill; its split is an estimate already
        shape = (1.0, float(count), report.context_tokens / 1000)
        spent_s = result.draft_s + result.verify_s
        for i in range(3):
            row = self._squares[i]
            for j in range(3):
                row[j] = row[j] * keep + shape[i] * shape[j]
            self._products[i] = self._products[i] * keep + shape[i] * spent_s
        self._rounds += 1

    @property
    def round_s(self) -> tuple[float, float, float]:
        """(base, per sequence, per context token) seconds, none negative; zeros with fewer than 20 rounds."""
        if self._rounds < 20:
            return 0.0, 0.0, 0.0
        base, sequence, context = _solve(self._squares, self._products)
        if min(base, sequence, context) < 0:  # rounds too similar, or too noisy, to separate the parts
            base, sequence, context = self._products[0] / self._squares[0][0], 0.0, 0.0
        return base, sequence, context / 1000

    @property
    def prefill_per_token_s(self) -> float:
        """Seconds for one token of context."""
        return self._prefill[0] / self._prefill[1] if self._prefill[1] else 0.0

    @property
    def swap_per_token_s(self) -> float:
        """Seconds to bring one token's KV back from the host."""
        return self._swap[0] / self._swap[1] if self._swap[1] else 0.0


def _solve(squares: list[list[float]], products: list[float]) -> tuple[float, float, float]:
    """Return the three unknowns of the normal equations, by Cramer's rule."""
    matrix = [
        [squares[i][j] + (RIDGE * squares[i][i] + 1e-12 if i == j else 0.0) for j in range(3)]
        for i in range(3)
    ]

    def determinant(m: list[list[float]]) -> float:
        return (
            m[0][0] * (m[1][1] * m[2][2] - m[1][2] * m[2][1])
            - m[0][1] * (m[1][0] * m[2][2] - m[1][2] * m[2][0])
            + m[0][2] * (m[1][0] * m[2][1] - m[1][1] * m[2][0])
        )

    whole = determinant(matrix)
    first, second, third = (
        determinant([[products[i] if j == column else matrix[i][j] for j in range(3)] for i in range(3)])
        / whole
        for column in range(3)
    )
    return first, second, third
