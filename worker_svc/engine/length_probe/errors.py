"""Errors of the predictions by stage, next to those of a constant: the mean of ln(remaining tokens) at that stage."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

STAGES = 8
"""Stages: 0 after the prompt, then by output tokens: below 4, 16, 64, 256, 1024, 4096, and the rest."""
RECENT_ROWS = 300.0
"""Rows over which errors are averaged (our choice)."""
LEAST_ROWS = 30.0
"""Rows of a stage before it can be good (our choice)."""
LARGEST_SHARE = 0.9
"""Mean square of the errors at a good stage, as a share of the constant's, at most (our choice)."""


def stage_of(output_tokens: int) -> int:
    """Return the stage at which a request has this many output tokens."""
    return 0 if output_tokens == 0 else min(STAGES - 1, 1 + int(math.log2(output_tokens)) // 2)


class StageErrors:
    """Mean squares of ln(true/predicted) by stage, of predictions that were made before the truth was known."""

    def __init__(self) -> None:
        self._rows = np.zeros(STAGES)
        self._squares = np.zeros(STAGES)
        self._constant_squares = np.zeros(STAGES)
        self._mean_rows = np.zeros(STAGES)
        self._means = np.zeros(STAGES)

    def observe(self, stage: int, truth: float, predicted: float | None) -> None:
        """Take in the truth at a stage and what was predicted, both as ln(remaining tokens)."""
        if predicted is not None and self._mean_rows[stage]:
            constant = self._means[stage]
            self._rows[stage] = min(RECENT_ROWS, self._rows[stage] + 1)
            share = 1 / self._rows[stage]
            self._squares[stage] += share * ((truth - predicted) ** 2 - self._squares[stage])
            self._constant_squares[stage] += share * ((truth - constant) ** 2 - self._constant_squares[stage])
        self._mean_rows[stage] = min(RECENT_ROWS, self._mean_rows[stage] + 1)
        self._means[stage] += (truth - self._means[stage]) / self._mean_rows[stage]

    def good(self, stage: int) -> bool:
        """Return whether predictions at this stage have proved better than the constant."""
        return bool(
            self._rows[stage] >= LEAST_ROWS
            and self._squares[stage] < LARGEST_SHARE * self._constant_squares[stage]
        )

    def rms(self, stage: int) -> tuple[float, float]:
        """Return the root mean squares of the predictions and of the constant at a stage; 0 before the first."""
        return math.sqrt(self._squares[stage]), math.sqrt(self._constant_squares[stage])

    # -- its compact form ------------------------------------------------------------------------------------

    PACKED = 5 * STAGES

    def pack(self) -> Numbers:
        """Return all that it has observed, as PACKED numbers of a moderate size."""
        return np.concatenate(
            [self._rows, self._squares, self._constant_squares, self._mean_rows, self._means]
        )

    def unpack(self, numbers: Numbers) -> None:
        """Continue from what another one has observed."""
        rows = numbers.reshape(5, STAGES).copy()
        rows[:4] = rows[:4].clip(0.0)
        self._rows, self._squares, self._constant_squares, self._mean_rows, self._means = rows
        self._rows = self._rows.clip(max=RECENT_ROWS)
        self._mean_rows = self._mean_rows.clip(max=RECENT_ROWS)
