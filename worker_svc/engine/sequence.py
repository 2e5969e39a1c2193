"""The engine's state of one request between rounds: ids, lengths, its KV, and data derived from its tokens.

tokens     | prompt ............... | output ............... |
target KV  [0, target.length)           all tokens but the last, once prefilled
draft KV   [0, draft.length)            the same, or less: it may lag behind and catches up when the draft is used
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from worker_svc.engine.cache.kv import BlockTable
from worker_svc.engine.cache.prompts import ContextNames
from worker_svc.engine.draft_lengths.acceptance import Acceptance
from worker_svc.engine.interface import PromptLogprobs, Residency, Specification
from worker_svc.engine.length_probe.probe import Watched
from worker_svc.engine.proposers.lookup import Lookup
from worker_svc.engine.sampling import counter
from worker_svc.engine.sampling.formats import FormatState
from worker_svc.engine.sampling.restrictions import Restrictions
from worker_svc.engine.sampling.stopping import StopText
from worker_svc.engine.sampling.tally import Tally


@dataclass(slots=True)
class Sequence:
    """One known request."""

    spec: Specification
    # Prompt, then output.
    tokens: list[int]
    target: BlockTable
    draft: BlockTable | None
    stop_text: StopText | None
    # Evidence about the draft model's tokens, and about those that are found in the context.
    acceptance: Acceptance
    found: Acceptance
    # mix64(seed): the part of a row key that does not change.
    seed_key: int
    # Names of the blocks of its context.
    names: ContextNames
    # Host copies of (target, draft) KV; empty = not swapped out.
    swapped: list[torch.Tensor | None] = field(default_factory=list)
    finished: bool = False
    # The draft model may propose.
    by_model: bool = False
    # Prompt lookup; None: it may not propose.
    lookup: Lookup | None = None
    # Follows the output.
    format: FormatState | None = None
    # None: it has none.
    restrictions: Restrictions | None = None
    # Made when a round needs it.
    tally: Tally | None = None
    # Tokens of its context found in the prefix cache; reported with its next round.
    reused: int = 0
    # None: no probe predicts its length.
    watched: Watched | None = None
    # Those found so far; None: none are wanted, or the request's rounds have reported them.
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def output_length(self) -> int:
        """Number of existing output tokens, committed ones included: the position of the next one."""
        return len(self.tokens) - len(self.spec.prompt_ids)

    @property
    def output(self) -> list[int]:
        """The output tokens."""
        return self.tokens[len(self.spec.prompt_ids) :]

    @property
    def scores_prompt(self) -> bool:
        """Return True while log probabilities of its prompt are missing: then it computes the prompt itself."""
        found = self.prompt_logprobs
        return found is not None and len(found.logprobs) < len(self.spec.prompt_ids) - 1

    @property
    def residency(self) -> Residency:
        """Location of its KV."""
        if self.swapped:
            return Residency.HOST
        return Residency.DEVICE if self.target.blocks else Residency.NONE

    @property
    def kv_length(self) -> int:
        """Number of valid entries of the target's KV, on the device or in host memory."""
        if self.swapped and self.swapped[0] is not None:
            return int(self.swapped[0].shape[1])
        return self.target.length or self.target.found_tokens

    @property
    def draft_kv_length(self) -> int:
        """Number of valid entries of the draft's KV, on the device or in host memory."""
        if self.swapped:
            return 0 if self.swapped[1] is None else int(self.swapped[1].shape[1])
        return 0 if self.draft is None else self.draft.length or self.draft.found_tokens

    @property
    def draft_lag(self) -> int:
        """Number of context tokens that the draft has not read; 1 or 2 while it proposes in every round."""
        return len(self.tokens) - self.draft_kv_length

    @property
    def swapped_bytes(self) -> int:
        """Bytes of host memory that its copies take."""
        return sum(copy.untyped_storage().nbytes() for copy in self.swapped if copy is not None)

    def row_keys(self, count: int) -> list[int]:
        """Return the noise keys of the next `count` output positions."""
        first = self.output_length
        return [
            counter.mix64((self.seed_key + p * counter.GOLDEN) & counter.M64)
            for p in range(first, first + count)
        ]
