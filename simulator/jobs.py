"""Requests with their future outputs. The core sees only what it sees of a real one: length limit, class,
prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, NAME_BYTES
from scheduler_svc.core.events import RequestFacts


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One request with its future."""

    request_id: str
    arrival_s: float
    """With `after`: seconds after the end of that request."""
    prompt_tokens: int
    paces: bytes
    """Output tokens of each round until the end (1 … 255): the accepted draft tokens and the bonus token."""
    max_tokens: int
    """Length limit of the client; the output is never longer."""
    predicted_tokens: int | None = None
    """Predicted output length at arrival."""
    workload_class: str = ""
    tenant: str = ""
    priority: int = 0
    uncut_last: int | None = None
    """Tokens of the last round before it was cut at the end of the output; None: as in `paces`."""
    drafts: bytes = b""
    """Draft tokens of each round, as recorded; empty: the machine's `draft_len` in every round."""
    length_features: bytes = b""
    """Packed hashed words of its prompt."""
    blocks: bytes = b""
    """Names of the blocks of its prompt and output (`laps_sd.contract.prompt_blocks`), as far as they are known. Empty:
    nothing of it is kept or found in a prefix cache."""
    after: str = ""
    """The request, arriving before it, that must have ended before it arrives; empty: none."""
    output_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_tokens", sum(self.paces))
        if not 1 <= self.output_tokens <= self.max_tokens:
            raise ValueError(
                f"{self.request_id}: output of {self.output_tokens} tokens is not within 1 … {self.max_tokens}"
            )
        if self.drafts and len(self.drafts) != len(self.paces):
            raise ValueError(
                f"{self.request_id}: {len(self.drafts)} draft lengths for {len(self.paces)} rounds"
            )

    def drafted(self, number: int, draft_len: int) -> int:
        """Return the number of draft tokens of round `number`: the recorded one, otherwise `draft_len`."""
        return self.drafts[number] if self.drafts else draft_len

    def facts(self, sequence: int, arrival_s: float | None = None) -> RequestFacts:
        """Return the request's facts for the core; `arrival_s`: if it is not that of the job."""
        return RequestFacts(
            request_id=self.request_id,
            sequence=sequence,
            arrival_s=self.arrival_s if arrival_s is None else arrival_s,
            tenant=self.tenant,
            priority=self.priority,
            workload_class=self.workload_class,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            expected_output_tokens=self.predicted_tokens,
            length_features=self.length_features,
            prompt_blocks=self.blocks[: self.prompt_tokens // BLOCK_TOKENS * NAME_BYTES],
        )
