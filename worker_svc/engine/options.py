"""Options: what a caller of `load_engine` may choose, and what an engine is made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from worker_svc.engine.interface import Drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The options of `load_engine`."""

    # cpu, cuda or cuda:N
    device: str = "cpu"
    # Threads of `kernels`, in this process; with `cores`, one of them for each thread to stay on.
    threads: int = 1
    cores: tuple[int, ...] = ()
    # float32, bfloat16, float16, or auto: `dtypes.dtype_for`
    dtype: str = "float32"
    # Weights that are not quantised in the checkpoint: none, int8 or int4.
    quantization: Literal["none", "int8", "int4"] = "none"
    # Requests per round, at most.
    slots: int = 8
    # Size of each KV pool. None: as many as `memory_bytes` hold for target and draft together; if that is
    # None too, enough for every slot to hold a context of `max_length`.
    blocks: int | None = None
    memory_bytes: int | None = None
    # Tokens per block.
    block_size: int = 16
    # Longest context, tokens.
    max_length: int = 1024
    # Draft tokens per request and round, at most.
    max_draft_len: int = 8
    # Fixed number of draft tokens; None: by goodput.
    draft_len: int | None = None
    # Equal seeds give equal text, whatever the batch. None: in float32, and in bfloat16 where `kernels` compute
    # all.
    deterministic: bool | None = None
    # Context tokens prefilled per round, all requests together, at most.
    prefill_chunk: int = 512
    # Seconds of a round that prefills, at most, or a few times a round without, whichever is longer; None: any.
    max_round_s: float | None = None
    # Swapped-out KV, at most.
    host_bytes: int = 2 * 2**30
    # Run models of the Llama family by `FusedLlama`; False: by transformers, as all others.
    fused: bool = True
    # auto: the draft model or prompt lookup, whichever gains more; without a draft model prompt lookup.
    drafter: Literal["auto", "model", "lookup", "none"] = "auto"
    # Shortest equal context start, in tokens, whose KV is reused; 0: never.
    prefix_reuse_tokens: int = 0
    # Run Python code that comes with a model directory.
    trust_remote_code: bool = False
    # Predict the output lengths that remain, by hidden states of the target.
    length_probe: bool = True


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Sizes and modes. Derived numbers are not stored here."""

    # Requests per round, at most.
    slots: int = 8
    # KV blocks of the target's pool, and of the draft's.
    target_blocks: int = 1024
    draft_blocks: int = 1024
    # Tokens per block.
    block_size: int = 16
    # Longest context, tokens.
    max_length: int = 1024
    # Draft tokens per request and round, at most.
    max_draft_len: int = 8
    # Context tokens prefilled per round, all requests together, at most: a larger value means fewer, longer rounds.
    prefill_chunk: int = 512
    # Seconds of a round that prefills, at most, or a few times a round without (`laps_sd.contract.round_time`),
    # whichever is longer; None: any.
    max_round_s: float | None = None
    # Fixed number of draft tokens; None: by goodput.
    draft_len: int | None = None
    # Swapped-out KV, at most.
    host_bytes: int = 2 * 2**30
    # Threads that compute a forward on the CPU.
    threads: int = 1
    # For requests that name none; None: no speculation at all.
    drafter: Drafter | None = Drafter.MODEL
    # Shortest equal context start, in tokens, whose KV is reused; 0: never.
    prefix_reuse_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("slots", "target_blocks", "block_size", "max_length", "prefill_chunk", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("draft_blocks", "max_draft_len", "host_bytes", "prefix_reuse_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if self.max_round_s is not None and not self.max_round_s >= 0:
            raise ValueError(f"max_round_s must be 0 or more, not {self.max_round_s}")
        if self.draft_len is not None and not 0 <= self.draft_len <= self.max_draft_len:
            raise ValueError(
                f"draft_len must be from 0 to max_draft_len ({self.max_draft_len}), not {self.draft_len}"
            )
