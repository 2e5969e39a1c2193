"""Cost of a round on a virtual worker, and the worker's capacity."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_svc.core.events import WorkerFacts
from simulator.jobs import Job

ENDLESS_BLOCKS = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Costs and capacity of a worker. Times in seconds. The defaults are a 7B-like target with a small draft
    on one GPU; see docs/evidence/simulation.md.

    A round of B sequences that verifies V tokens (draft tokens, and one more per sequence) with C tokens of
    context in total takes `round_s + sequence_s · B + verified_token_s · V + context_token_s · C`, plus the
    time of its prefill and its KV moves. V is `(draft_len + 1) · B` unless the jobs define their numbers of
    draft tokens.
    """

    slots: int = 1
    draft_len: int = 5
    round_s: float = 0.030
    """Fixed part of a round: drafting and one pass of the target."""
    draft_s: float = 0.0
    """The part of `round_s` that a report counts as drafting."""
    sequence_s: float = 0.0
    verified_token_s: float = 0.09e-3
    context_token_s: float = 3e-7
    prefill_token_s: float = 0.09e-3
    prefill_chunk: int | None = None
    """Largest number of context tokens that a round computes, all requests together; an unfinished request
    generates no token in it. None: as many as there are."""
    max_round_s: float | None = None
    """Longest time of a round that computes context, or a few times the round without if that is longer, as for a worker
    (`laps_sd.contract.round_time`). None: any time."""
    swap_token_s: float = 0.02e-3
    """Time per token, one way, between device and host."""
    host_memory: bool = True
    """Storage of an evicted KV on the host. Otherwise it is computed again."""
    kv_tokens: int | None = None
    """Capacity of the KV pool in tokens; None: without limit."""
    block_size: int = 16
    max_length: int = 1 << 20
    message_s: float = 0.0
    """Time of a message between worker and scheduler, one way. If it is above 0, a worker continues with its
    next round before the reply."""

    def __post_init__(self) -> None:
        if self.slots < 1 or self.draft_len < 0 or self.block_size < 1 or self.prefill_chunk == 0:
            raise ValueError("slots, block_size and prefill_chunk must be at least 1, draft_len at least 0")
        if self.max_round_s is not None and self.max_round_s < 0:
            raise ValueError(f"max_round_s must be 0 or more, not {self.max_round_s}")

    def slower(self, times: float) -> Machine:
        """Return the same machine with each of its times `times` as long; messages take as long as before."""
        return replace(
            self,
            round_s=self.round_s * times,
            draft_s=self.draft_s * times,
            sequence_s=self.sequence_s * times,
            verified_token_s=self.verified_token_s * times,
            context_token_s=self.context_token_s * times,
            prefill_token_s=self.prefill_token_s * times,
            swap_token_s=self.swap_token_s * times,
        )

    def decode_s(self, batch: int, context_tokens: float, verified: float | None = None) -> float:
        """Return the time of draft and verify in one round; `verified` None: `draft_len` draft tokens for
        each sequence.
        """
        if verified is None:
            verified = (self.draft_len + 1) * batch
        return (
            self.round_s
            + self.sequence_s * batch
            + self.verified_token_s * verified
            + self.context_token_s * context_tokens
        )

    def share_s(self, context_tokens: float) -> float:
        """Return one sequence's share of a round's cost with all slots taken, T(B)/B, without its verified
        tokens.
        """
        return self.round_s / self.slots + self.sequence_s + self.context_token_s * context_tokens

    def service_s(self, job: Job) -> float:
        """Return the machine seconds of a whole request with all slots taken: its share of each round, and
        its prefill.
        """
        return self.left_s(job, 0, 0) + self.prefill_token_s * job.prompt_tokens

    def left_s(self, job: Job, rounds: int, emitted: int) -> float:
        """Return the machine seconds of decoding that remain after `rounds` and `emitted` tokens, with all
        slots taken.
        """
        middle = job.prompt_tokens + (emitted + job.output_tokens) / 2
        left = len(job.paces) - rounds
        return left * self.share_s(middle) + self.verified_token_s * self._verified(job, rounds)

    def alone_s(self, job: Job) -> float:
        """Return the latency of a request that is alone on the machine."""
        middle = job.prompt_tokens + job.output_tokens // 2
        rounds = len(job.paces)
        per_round_s = self.decode_s(1, middle, self._verified(job, 0) / rounds)
        return self.prefill_token_s * job.prompt_tokens + rounds * per_round_s

    def _verified(self, job: Job, rounds: int) -> int:
        """Return the number of tokens that the job verifies after its first `rounds` rounds."""
        left = len(job.paces) - rounds
        return left + (sum(job.drafts[rounds:]) if job.drafts else left * self.draft_len)

    def facts(self, worker_id: str) -> WorkerFacts:
        """Return the facts of such a worker. It has no draft pool: the draft's cache is cheap to drop, so
        only the target's counts.
        """
        blocks = ENDLESS_BLOCKS if self.kv_tokens is None else max(1, self.kv_tokens // self.block_size)
        return WorkerFacts(worker_id, self.slots, blocks, 0, self.block_size, self.max_length, self.draft_len)
