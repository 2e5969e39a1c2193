"""The record of one request in one round; every phase of the round adds its part."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from worker_svc.engine.interface import PromptLogprobs, TokenLogprobs
from worker_svc.engine.proposers.lookup import Found
from worker_svc.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class RoundRequest:
    """A request in this round: what is fed for it, its draft tokens, its choice rows and the verdict."""

    sequence: Sequence
    # Tokens of its context before the round: prompt and output.
    context: int
    # Valid entries of the target's KV before the round.
    known: int

    # -- planned
    # Context tokens to prefill; 0 for a request whose KV covers all tokens but the last.
    chunk: int = 0
    # Tokens to propose; drafting lowers it where a draft token ends the text.
    draft_len: int = 0
    # Context tokens the draft model is fed before it can propose (its own prefill); 0: the model is not used.
    catch_up: int = 0
    # Its first choice row among those of all requests, which are in the order of the round.
    first_choice: int = 0
    # The hidden state of the last token of its context is wanted.
    looked_at: bool = False
    # Rows of its prompt whose log probabilities are wanted, by position in the context.
    prompt_rows: range = range(0)

    # -- drafted
    # Tokens found in its context, whether they are drafted or not.
    found: Found | None = None
    # Draft tokens: found by prompt lookup while the round is planned, or proposed by the draft model; empty
    # until verification where they stay on the device.
    draft_tokens: list[int] = field(default_factory=list)
    # Choice rows before the one at which its output format allows no token; None: all of them.
    allowed: int | None = None
    # The reason why the request fails in this round.
    problem: str | None = None

    # -- verified
    # The target's choices at its choice rows; fewer where the output format allowed no further token.
    chosen: list[int] = field(default_factory=list)
    # Log probabilities at its choice rows, if the request wants them.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Of its prompt rows, if it has any.
    prompt_logprobs: PromptLogprobs | None = None
    # float32 [hidden], if it is looked at.
    hidden: NDArray[np.float32] | None = None

    @property
    def decodes(self) -> bool:
        """Return True if its KV covers all tokens but the last; otherwise its context is prefilled."""
        return 0 < self.known >= self.context - 1

    @property
    def start(self) -> int:
        """Position of the first token that is fed to the target."""
        return self.known if self.chunk else self.context - 1

    @property
    def fed(self) -> int:
        """Rows of the target's forward. 0: no prefill budget was left for it."""
        if self.chunk:
            return self.chunk
        return self.draft_len + 1 if self.known == self.context - 1 else 0

    @property
    def choices(self) -> int:
        """Number of rows at which the target chooses a token: none while context is missing."""
        if self.chunk:
            return int(self.known + self.chunk == self.context)
        return self.fed
