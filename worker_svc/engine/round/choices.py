"""The choice rows of a round: settings, noise and logits processors of every choice of the target.

Each request has one row for each token that it may get, and one more for the bonus token. The draft proposes
with the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from worker_svc.engine.cpu import kernels
from worker_svc.engine.interface import Sampling
from worker_svc.engine.round.logits_processors import Adjustments
from worker_svc.engine.round.request import RoundRequest
from worker_svc.engine.sampling.noise import Noise
from worker_svc.engine.sampling.sampling import Rows, choose_tokens, rows_for


@dataclass(frozen=True, slots=True)
class Choices:
    """The rows at which the target chooses, requests in order."""

    rows: Rows
    # [choice rows, vocab]; None if all are greedy.
    noise: torch.Tensor | None
    adjustments: Adjustments

    @property
    def by_kernels(self) -> bool:
        """True if `kernels` can choose: among all tokens, by the model's own logits."""
        return self.rows.whole and not self.adjustments.wanted

    @property
    def for_kernels(self) -> kernels.Choosing | None:
        """Settings for a choice by `kernels`; None if all rows are greedy."""
        rows, noise = self.rows, self.noise
        return None if noise is None else kernels.Choosing(rows.inverse_temperature, rows.noisy, noise)

    def choose(self, logits: torch.Tensor, choice_rows: SequenceOf[int]) -> torch.Tensor:
        """Return the token chosen at each of these rows, int64 [rows].

        `logits` [rows, vocabulary of the model, which may be smaller than the target's]; `choice_rows`: some
        of the rows, or all in their order.
        """
        rows, noise = self.rows, self.noise
        if noise is not None and len(choice_rows) < len(noise):
            rows, noise = rows.select(choice_rows), noise[choice_rows][:, : logits.shape[-1]]
        return choose_tokens(self.adjustments.apply(logits, choice_rows), rows, noise)


def choices_of(
    requests: SequenceOf[RoundRequest], noise: Noise, vocab_size: int, device: torch.device
) -> Choices:
    """Number the choice rows of the requests, and return these rows."""
    settings: list[Sampling] = []
    for request in requests:
        request.first_choice = len(settings)
        settings.extend([request.sequence.spec.sampling] * request.choices)
    rows = rows_for(settings, vocab_size, device)
    perturbation = None
    if not rows.plain:
        perturbation = noise.gumbel(
            [key for request in requests for key in request.sequence.row_keys(request.choices)]
        )
    adjustments = Adjustments(
        ((request.sequence, request.first_choice, request.choices) for request in requests),
        vocab_size,
        device,
    )
    return Choices(rows, perturbation, adjustments)
