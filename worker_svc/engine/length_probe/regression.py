"""Least squares with a ridge and forgetting, learnt row by row: of ln(remaining tokens) on features.

The sums of products are kept, and the weights are solved from them again and again. That is recursive least squares
in its information form: rows that are all alike cannot make it unstable, features can be put on one scale when it is
solved, and the sums are what another worker continues from.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Singles = NDArray[np.float32]

RIDGE_ROWS = 100.0
"""Rows that the ridge weighs as much as, with each feature on the scale 1 (our choice): of 1 to 300, this had the
smallest error in the first hundred requests and no larger one later."""
LEAST_ROWS = 10.0
"""Rows before the first weights (our choice)."""
LEAST_SCALE = 1e-6
"""Standard deviation below which a feature counts as constant."""
LARGEST = 20.0
"""Bound of predictions, against weights that are wrong; the least is 0."""
FIRST_SIGMA = 1.0
SMALLEST_SIGMA, LARGEST_SIGMA = 0.05, 10.0
"""Bounds of the spread of the residuals."""
LARGEST_LOG_ROWS = 20.0
"""Bound of the logarithm of the number of rows in a compact form."""
FAR = 6.0
"""Standard deviations above the mean."""
CONSTANT_WITHIN = 1e-3
"""How far the constant feature may be from 1 in a compact form."""
RECENT_ROWS = 100.0
"""Rows over which the spread of the residuals is averaged (our choice)."""


class Regression:
    """A linear prediction; the first of its `count` features is the constant 1."""

    def __init__(self, count: int) -> None:
        self.sigma = FIRST_SIGMA
        """Standard deviation of recent residuals."""
        self._count = count
        self._squares = np.zeros((count, count))
        self._products = np.zeros(count)
        self._weights: Singles | None = None

    @property
    def rows(self) -> float:
        """Number of rows that it has learnt from, forgotten ones left out."""
        return float(self._squares[0, 0])

    @property
    def weights(self) -> Singles | None:
        """The weights [count], the product of which with a row is the prediction; None: too little was learnt."""
        return self._weights

    def forget(self, share: float) -> None:
        """Let all that was learnt weigh less by this share."""
        self._squares *= 1.0 - share
        self._products *= 1.0 - share

    def learn(self, rows: Singles, targets: Numbers, above: NDArray[np.bool_]) -> None:
        """Take in `rows` [n, count] with their targets [n], and compute new weights.

        Where `above` [n] is true, only that the target is larger is known. Such a row counts with the mean of what it
        can be, by the weights so far (J. Buckley and I. James, "Linear regression with censored data", 1979); before
        there are weights it does not count.
        """
        if self._weights is None:
            rows, targets = rows[~above], targets[~above]
        else:
            expected = np.nan_to_num(rows @ self._weights).clip(0.0, LARGEST).astype(np.float64)
            self._observe_residuals((targets - expected)[~above])
            targets = np.where(above, _means_above(targets, expected, self.sigma), targets)
        wide = rows.astype(np.float64)
        self._squares += wide.T @ wide
        self._products += wide.T @ targets
        self._solve()

    def _observe_residuals(self, residuals: Numbers) -> None:
        """Take in residuals of rows that are not learnt yet."""
        if not len(residuals):
            return
        share = min(1.0, len(residuals) / RECENT_ROWS)
        recent = math.sqrt((1.0 - share) * self.sigma**2 + share * float((residuals**2).mean()))
        self.sigma = min(LARGEST_SIGMA, max(SMALLEST_SIGMA, recent))

    def _solve(self) -> None:
        """Compute the weights from all that was learnt."""
        if self.rows < LEAST_ROWS:
            return
        means, scales, correlations = self._moments()
        target_mean = self._products[0] / self.rows
        covariances = (self._products / self.rows - means * target_mean) / scales
        matrix = correlations + RIDGE_ROWS / self.rows * np.eye(self._count)
        try:
            weights = np.linalg.solve(matrix, covariances) / scales
        except np.linalg.LinAlgError:  # only of numbers that another worker sent
            weights = np.zeros(self._count)
        weights[0] = target_mean - weights[1:] @ means[1:]
        self._weights = weights.astype(np.float32) if np.isfinite(weights).all() else None

    def _moments(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return means [count], scales [count] and correlations [count, count] of the features; the constant's
        correlations are zero."""
        means = self._squares[0] / self.rows
        variances = np.diag(self._squares) / self.rows - means**2
        scales = np.sqrt(np.maximum(variances, LEAST_SCALE**2))
        return means, scales, (self._squares / self.rows - np.outer(means, means)) / np.outer(scales, scales)

    # -- its compact form ------------------------------------------------------------------------------------

    def pack(self) -> Numbers:
        """Return all that it has learnt as numbers of a moderate size: float16 has room for them."""
        if not self.rows:
            return np.zeros(self.packed(self._count))
        means, scales, correlations = self._moments()
        target_mean = self._products[0] / self.rows
        covariances = (self._products / self.rows - means * target_mean) / scales
        upper = np.triu_indices(self._count, 1)
        return np.concatenate(
            [
                [math.log1p(self.rows), self.sigma, target_mean],
                means,
                scales,
                covariances,
                correlations[upper],
            ]
        )

    @staticmethod
    def packed(count: int) -> int:
        """Return how many numbers `pack` gives for this number of features."""
        return 3 + 3 * count + count * (count - 1) // 2

    def unpack(self, numbers: Numbers) -> bool:
        """Continue from what another one has learnt; `numbers` are finite.

        Returns False, and changes nothing, if they cannot come from `pack`.
        """
        count = self._count
        (log_rows, sigma, target_mean), rest = numbers[:3], numbers[3:]
        if not 0.0 <= log_rows <= LARGEST_LOG_ROWS:
            return False
        rows = math.expm1(log_rows)
        means, scales, covariances = rest[: 3 * count].reshape(3, count)
        correlations = np.zeros((count, count))
        correlations[np.triu_indices(count, 1)] = rest[3 * count :]
        correlations += correlations.T + np.eye(count)
        correlations[0, 0] = 0.0
        squares = rows * (correlations * np.outer(scales, scales) + np.outer(means, means))
        if rows and abs(squares[0, 0] / rows - 1.0) > CONSTANT_WITHIN:
            return False
        self.sigma = min(LARGEST_SIGMA, max(SMALLEST_SIGMA, float(sigma)))
        self._squares = squares
        self._products = rows * (covariances * scales + means * target_mean)
        self._solve()
        return True


def _means_above(bounds: Numbers, expected: Numbers, sigma: float) -> Numbers:
    """Return the means of normal numbers around `expected`, given that they are larger than `bounds`; all [n]."""
    found = []
    for bound, middle in zip(bounds.tolist(), expected.tolist(), strict=True):
        above = (bound - middle) / sigma
        # Far above, both parts of the quotient vanish, and it approaches this distance.
        hazard = above
        if above < FAR:
            tail = math.erfc(above / math.sqrt(2)) / 2
            hazard = math.exp(-above * above / 2) / math.sqrt(2 * math.pi) / tail
        found.append(middle + sigma * hazard)
    return np.array(found)
