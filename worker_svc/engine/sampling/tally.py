"""Counts of the tokens of one request, for its penalties."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker_svc.engine.interface import Sampling


class Tally:
    """Counts of each token in one request: on the device, following its tokens."""

    def __init__(self, prompt: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.output = torch.zeros(vocab_size, dtype=torch.float32, device=device)  # times in the output
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        self._counted = 0

    def penalised(self, logits: torch.Tensor, counts: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """Return `logits` of one row after the penalties; `counts`: times of each token in the output before it.

        Both are [width], at most the vocabulary.
        """
        present = counts > 0
        if sampling.repetition_penalty != 1:
            factor = sampling.repetition_penalty
            seen = present | self.in_prompt[: logits.shape[-1]]
            logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * present

    def follow(self, tokens: Sequence[int], prompt_length: int) -> None:
        """Count the output tokens that are new; `tokens` is prompt and output."""
        fresh = tokens[prompt_length + self._counted :]
        if fresh:
            ids = torch.tensor(fresh, dtype=torch.int64, device=self.output.device)
            self.output.index_add_(0, ids, torch.ones(len(fresh), device=self.output.device))
            self._counted += len(fresh)
