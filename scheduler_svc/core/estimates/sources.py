"""Guesses of the length of a request, by their sources, and what a worker's predictions are worth.

A client's hint and the prediction from the prompt are known at arrival and are guesses of the whole output
(`calibration.GuessSource` has what they are worth). A worker predicts what remains while the request runs, and
predicts better the more of the output exists. So its predictions are judged by stage, and one is used only
where such predictions were closer than the estimate without them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from scheduler_svc.core.estimates.calibration import SUMS, GuessHistory
from scheduler_svc.core.native import mypyc_attr

STAGES: Final = 7
"""Stages of a request: before its first token, from 1, 4, 16, 64, 256 and 1024 tokens on. Our choice."""
ENOUGH_PREDICTIONS: Final = 8.0
"""Ended requests with a prediction of a stage before predictions of that stage are used. Our choice."""
ERROR_KEEP: Final = 1 - 1 / 300


def stage_of(emitted: int) -> int:
    """Return the stage of a request that has emitted this many tokens."""
    return min((emitted.bit_length() + 1) // 2, STAGES - 1)


@mypyc_attr(acyclic=True)
@final
class Prediction:
    """A worker's prediction of what remains, and the estimates with and without it at that moment."""

    __slots__ = ("emitted", "remaining", "with_it", "without_it")

    def __init__(self, remaining: float, emitted: int) -> None:
        self.remaining: Final = remaining
        """Predicted tokens (above 0) after `emitted` tokens."""
        self.emitted: Final = emitted
        self.with_it = 0.0
        self.without_it = 0.0
        """Expected tokens that remain; 0 until they are known."""


@mypyc_attr(acyclic=True)
@final
@dataclass(slots=True)
class Guesses:
    """All guesses of the length of one request, above 0; None for those that do not exist."""

    client: float | None = None
    """Output tokens in all, by the client's hint."""
    prompt: float | None = None
    """Output tokens in all, predicted from the prompt."""
    predicted_again_at: float = math.inf
    """Ended requests that the predictor must have learned from for the prompt to be predicted again; infinite without a
    prompt, and once it has learned from this request while it runs.
    """
    worker: Prediction | None = None
    """The worker's newest prediction."""
    by_stage: list[Prediction] = field(default_factory=list)
    """The worker's first prediction in each stage, to be judged at the end."""

    def predicted(self, prediction: Prediction) -> bool:
        """Take in a worker's prediction; return whether it is the first of its stage."""
        self.worker = prediction
        before = self.by_stage
        if before and stage_of(before[-1].emitted) >= stage_of(prediction.emitted):
            return False
        before.append(prediction)
        return True


@final
@dataclass(slots=True)
class StageHistory:
    """Predictions of one stage: what they were worth, and the squared errors of ln(remaining) with and without
    them (decayed sums over ended requests)."""

    guesses: GuessHistory = field(default_factory=GuessHistory)
    with_them: float = 0.0
    without_them: float = 0.0

    @property
    def is_used(self) -> bool:
        """Return whether estimates were closer with such predictions."""
        return self.guesses.weight >= ENOUGH_PREDICTIONS and self.with_them < self.without_them

    def observe(self, prediction: Prediction, length: int) -> None:
        """Take in a request with this prediction that ended by itself after `length` tokens."""
        actual = length - prediction.emitted
        if actual < 1:
            return
        self.guesses.observe(prediction.remaining, actual)
        self.with_them = self.with_them * ERROR_KEEP + math.log(actual / prediction.with_it) ** 2
        self.without_them = self.without_them * ERROR_KEEP + math.log(actual / prediction.without_it) ** 2

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, for JSON."""
        guesses = dict(zip(SUMS, self.guesses.sums(), strict=True))
        return {"guesses": guesses, "with_them": self.with_them, "without_them": self.without_them}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StageHistory:
        """Return the history that `to_dict` gave."""
        return cls(GuessHistory(**data["guesses"]), data["with_them"], data["without_them"])
