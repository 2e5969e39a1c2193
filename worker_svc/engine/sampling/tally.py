"""Counts of the tokens of one request, for its penalties."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Tally:
    """Counts of each token in one request: on the device, following its tokens."""

    def __init__(self, prompt: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.output = torch.zeros(vocab_size, dtype=torch.float32, device=device)  # times in the output
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        self._counted = 0

    def follow(self, tokens: Sequence[int], prompt_length: int) -> None:
        """Count the output tokens that are new; `tokens` is prompt and output."""
        fresh = tokens[prompt_length + self._counted :]
        if fresh:
            ids = torch.tensor(fresh, dtype=torch.int64, device=self.output.device)
            self.output.index_add_(0, ids, torch.ones(len(fresh), device=self.output.device))
            self._counted += len(fresh)
