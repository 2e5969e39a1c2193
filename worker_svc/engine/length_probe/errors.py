"""Errors of the predictions by stage, next to those of a constant: the mean of ln(remaining tokens) at that stage."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

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


@dataclass(slots=True)
class _Stage:
    """Means over the recent rows of one stage."""

    rows: float = 0.0
    square: float = 0.0
    constant_square: float = 0.0
    mean_rows: float = 0.0
    mean: float = 0.0


class StageErrors:
    """Mean squares of ln(true/predicted) by stage, of predictions that were made before the truth was known."""

    def __init__(self) -> None:
        self._stages = [_Stage() for _ in range(STAGES)]

    def observe(self, stage: int, truth: float, predicted: float | None) -> None:
        """Take in the truth at a stage and what was predicted, both as ln(remaining tokens)."""
        own = self._stages[stage]
        if predicted is not None and own.mean_rows:
            own.rows = min(RECENT_ROWS, own.rows + 1)
            own.square += ((truth - predicted) ** 2 - own.square) / own.rows
            own.constant_square += ((truth - own.mean) ** 2 - own.constant_square) / own.rows
        own.mean_rows = min(RECENT_ROWS, own.mean_rows + 1)
        own.mean += (truth - own.mean) / own.mean_rows

    def good(self, stage: int) -> bool:
        """Return whether predictions at this stage have proved better than the constant."""
        own = self._stages[stage]
        return own.rows >= LEAST_ROWS and own.square < LARGEST_SHARE * own.constant_square

    def rms(self, stage: int) -> tuple[float, float]:
        """Return the root mean squares of the predictions and of the constant at a stage; 0 before the first."""
        own = self._stages[stage]
        return math.sqrt(own.square), math.sqrt(own.constant_square)

    # -- its compact form ------------------------------------------------------------------------------------

    PACKED = 5 * STAGES

    def pack(self) -> Numbers:
        """Return all that it has observed, as PACKED numbers of a moderate size."""
        return np.array([astuple(stage) for stage in self._stages]).ravel()

    def unpack(self, numbers: Numbers) -> None:
        """Continue from what another one has observed; `numbers` [PACKED] are finite."""
        for stage, own in enumerate(numbers.reshape(STAGES, -1).tolist()):
            rows, square, constant_square, mean_rows, mean = own
            self._stages[stage] = _Stage(
                min(RECENT_ROWS, max(0.0, rows)),
                max(0.0, square),
                max(0.0, constant_square),
                min(RECENT_ROWS, max(0.0, mean_rows)),
                mean,
            )
