"""The choice rows of a round: settings, noise and logits processors of every choice of the target.

Each request has one row for each token that it may get, and one more for the bonus token. The draft proposes
with the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import torch

from worker_svc.engine.cpu import kernels
from worker_svc.engine.interface import Sampling
from worker_svc.engine.round.logits_processors import Adjustments
from worker_svc.engine.round.request import RoundRequest
from worker_svc.engine.sampling.noise import Noise, NoiseOfRows
from worker_svc.engine.sampling.sampling import Rows, choose_tokens, rows_for


class Choices:
    """The rows at which the target chooses, requests in order."""

    def __init__(
        self, rows: Rows, noise: NoiseOfRows | None, adjustments: Adjustments, wide: Iterable[int]
    ) -> None:
        """`noise`: None if all are greedy; `wide`: rows with a top_k that `kernels` does not support."""
        self.rows = rows
        self.noise = noise
        self.adjustments = adjustments
        # Rows that `kernels` cannot choose for: their logits are adjusted first, or their top_k is too great.
        self.apart = frozenset({*adjustments.rows, *wide})
        self._for_kernels: kernels.Choosing | None = None

    @property
    def for_kernels(self) -> kernels.Choosing | None:
        """Settings for a choice by `kernels`; None if all rows are greedy."""
        if self.noise is None:
            return None
        if self._for_kernels is None:
            rows, noise, truncation = self.rows, None, None
            if rows.free:
                noise = self.noise.of(None if rows.alike else rows.free)
            if not rows.whole:
                truncation = kernels.Truncation(rows.top_k, rows.top_p, rows.log_min_p, self.noise.keys)
            self._for_kernels = kernels.Choosing(rows.inverse_temperature, rows.noisy, noise, truncation)
        return self._for_kernels

    def choose(self, logits: torch.Tensor, choice_rows: SequenceOf[int]) -> torch.Tensor:
        """Return the token chosen at each of these rows, int64 [rows], by torch's operators.

        `logits` [rows, vocabulary of the model, which may be smaller than the target's]; `choice_rows`: some
        of the rows, or all in their order.
        """
        rows, noise = self.rows, None
        if self.noise is not None:
            noise = self.noise.of(choice_rows)
            if len(choice_rows) < len(noise):
                rows, noise = rows.select(choice_rows), noise[choice_rows]
            noise = noise[:, : logits.shape[-1]]
        return choose_tokens(self.adjustments.apply(logits, choice_rows), rows, noise)


def choices_of(
    requests: SequenceOf[RoundRequest], noise: Noise, vocab_size: int, device: torch.device
) -> Choices:
    """Number the choice rows of the requests, and return these rows."""
    settings: list[Sampling] = []
    wide: list[int] = []
    for request in requests:
        sampling = request.sequence.spec.sampling
        request.first_choice = len(settings)
        settings.extend([sampling] * request.choices)
        if sampling.temperature > 0 and kernels.MOST_TOP_K < sampling.top_k < vocab_size:
            wide.extend(range(request.first_choice, len(settings)))
    rows = rows_for(settings, vocab_size, device)
    perturbation = None
    if not rows.plain:
        perturbation = NoiseOfRows(
            noise, [key for request in requests for key in request.sequence.row_keys(request.choices)]
        )
    adjustments = Adjustments(
        ((request.sequence, request.first_choice, request.choices) for request in requests),
        vocab_size,
        device,
    )
    return Choices(rows, perturbation, adjustments, wide)
