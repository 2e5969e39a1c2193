"""A request that the engine knows: its specification, its output, and vLLM's request while it is not over."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.request import Request

from worker_svc.engine.interface import PromptLogprobs, Specification, TokenLogprobs
from worker_svc.engine.length_probe.features import Features
from worker_svc.engine.length_probe.probe import Watched
from worker_svc.engine.sampling.restrictions import Restrictions
from worker_svc.engine.sampling.stopping import StopText
from worker_svc.engine.sampling.tally import Tally

__all__ = ["Known"]


@dataclass(slots=True)
class Known:
    """One known request."""

    spec: Specification
    # All output tokens, committed ones included.
    output: list[int]
    stop_text: StopText | None
    # None once the request has finished.
    request: Request | None
    # Output tokens of vLLM's request that are in `output`: committed ones may be in vLLM's prompt instead.
    taken: int
    # Log probabilities and a reason to end it that the coupling found in the last step.
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    problem: str = ""
    # Counts for penalties; made when needed.
    tally: Tally | None = None
    # Applied by the coupling; None: it has none.
    restrictions: Restrictions | None = None
    # None: no probe predicts its length.
    watched: Watched | None = None
    # Log probabilities of its prompt, if they are wanted, from the step that made them to the report of the
    # first token.
    prompt_logprobs: PromptLogprobs | None = None
    # Hidden state of the last token of its context before the last step, float32 [hidden], if a look was due.
    hidden: Features | None = None

    @property
    def tokens(self) -> int:
        """Length of its context."""
        return len(self.spec.prompt_ids) + len(self.output)

    @property
    def awaits_prompt(self) -> bool:
        """Return True until the first report, if log probabilities of the prompt are wanted."""
        return self.spec.prompt_logprobs is not None and not self.output

    @property
    def draft_room(self) -> int:
        """The most draft tokens that its own limits allow now."""
        left = max(0, self.spec.max_tokens - len(self.output) - 1)
        return left if self.spec.max_draft_len is None else min(left, self.spec.max_draft_len)
