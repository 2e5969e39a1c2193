"""What a round costs on a virtual worker, and what the worker can hold."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.events import WorkerFacts
from scheduler_svc.sim.jobs import Job

ENDLESS_BLOCKS = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Times in seconds. The defaults are a 7B-like target with a small draft on one GPU; see docs/evidence.md.

    A round of B sequences that verifies V tokens (drafted ones, and one more per sequence) with C tokens of context in
    all takes `round_s + sequence_s · B + verified_token_s · V + context_token_s · C`, and what is prefilled or moved in
    it more. V is `(draft_len + 1) · B` unless the jobs say what was drafted for them.
    """

    slots: int = 1
    draft_len: int = 5
    round_s: float = 0.030
    """Fixed part: drafting and one pass of the target."""
    sequence_s: float = 0.0
    verified_token_s: float = 0.09e-3
    context_token_s: float = 3e-7
    prefill_token_s: float = 0.09e-3
    prefill_chunk: int | None = None
    """Context tokens that a round computes at most, all requests together; who is not done gains no token in it. None:
    a context is computed whole in one round."""
    swap_token_s: float = 0.02e-3
    """One way, between device and host."""
    host_memory: bool = True
    """Whether an evicted KV goes to the host. Otherwise it is computed again."""
    kv_tokens: int | None = None
    """Room of the KV pool; None: never short."""
    block_size: int = 16
    max_length: int = 1 << 20
    message_s: float = 0.0
    """How long a message between worker and scheduler takes, one way. Above 0 a worker goes on meanwhile."""

    def __post_init__(self) -> None:
        if self.slots < 1 or self.draft_len < 0 or self.block_size < 1 or self.prefill_chunk == 0:
            raise ValueError("slots, block_size and prefill_chunk must be at least 1, draft_len at least 0")

    def decode_s(self, batch: int, context_tokens: float, verified: float | None = None) -> float:
        """Draft and verify of one round; `verified` None: of `draft_len` tokens for each."""
        if verified is None:
            verified = (self.draft_len + 1) * batch
        return (
            self.round_s
            + self.sequence_s * batch
            + self.verified_token_s * verified
            + self.context_token_s * context_tokens
        )

    def share_s(self, context_tokens: float) -> float:
        """A round's cost for one sequence when all slots are taken, but for the tokens that it verifies: T(B)/B."""
        return self.round_s / self.slots + self.sequence_s + self.context_token_s * context_tokens

    def service_s(self, job: Job) -> float:
        """Machine seconds of a whole request with all slots taken: its share of each round, and its prefill."""
        return self.left_s(job, 0, 0) + self.prefill_token_s * job.prompt_tokens

    def left_s(self, job: Job, rounds: int, emitted: int) -> float:
        """Machine seconds of decoding that remain after so many rounds and tokens, with all slots taken."""
        middle = job.prompt_tokens + (emitted + job.output_tokens) / 2
        left = len(job.paces) - rounds
        return left * self.share_s(middle) + self.verified_token_s * self._verified(job, rounds)

    def alone_s(self, job: Job) -> float:
        """Latency with the machine to itself."""
        middle = job.prompt_tokens + job.output_tokens // 2
        rounds = len(job.paces)
        per_round_s = self.decode_s(1, middle, self._verified(job, 0) / rounds)
        return self.prefill_token_s * job.prompt_tokens + rounds * per_round_s

    def _verified(self, job: Job, rounds: int) -> int:
        """Tokens that it verifies after so many rounds."""
        left = len(job.paces) - rounds
        return left + (sum(job.drafts[rounds:]) if job.drafts else left * self.draft_len)

    def facts(self, worker_id: str) -> WorkerFacts:
        """What such a worker says of itself."""
        blocks = ENDLESS_BLOCKS if self.kv_tokens is None else max(1, self.kv_tokens // self.block_size)
        return WorkerFacts(
            worker_id, self.slots, blocks, blocks, self.block_size, self.max_length, self.draft_len
        )
