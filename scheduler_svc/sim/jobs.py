"""What a request turns out to be. The core sees only what a real one would: length limit, class, prediction."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.events import RequestFacts


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One request with its future."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    paces: bytes
    """Output tokens of each round until the end (1 … 255): what the target accepted, and the one it adds itself."""
    max_tokens: int
    """The client's limit; the output is never longer."""
    predicted_tokens: int | None = None
    """What a predictor says of the output length at arrival."""
    workload_class: str = ""
    tenant: str = ""
    priority: int = 0
    uncut_last: int | None = None
    """What the last round gained before it was cut at the end of the output; None: as much as `paces` says."""
    drafts: bytes = b""
    """Tokens drafted in each round, as recorded; empty: the machine's `draft_len` in all of them."""
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
        """Tokens drafted in round `number`, on a machine that drafts `draft_len` unless it was recorded."""
        return self.drafts[number] if self.drafts else draft_len

    def facts(self, sequence: int) -> RequestFacts:
        """What the core is told of it."""
        return RequestFacts(
            request_id=self.request_id,
            sequence=sequence,
            arrival_s=self.arrival_s,
            tenant=self.tenant,
            priority=self.priority,
            workload_class=self.workload_class,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            expected_output_tokens=self.predicted_tokens,
        )
