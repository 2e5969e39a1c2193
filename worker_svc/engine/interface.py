"""The interface between an engine and the rest of the worker. Standard library only: no torch, no network.
One file, since the engine, the fake engine and the runner each need the whole contract.

Terms (see ARCHITECTURE.md):

* *context*   the existing tokens of a request: prompt, then output. Its length is the request's `tokens`.
* *position*  of an output token: 0 is the first token after the prompt. Noise is a function of (seed,
  position).
* *round*     one draft and verify step (an engine step) over the requests that are chosen to run.
* *KV*        the attention keys and values of the context, kept in blocks of `block_size` tokens, one pool for the
              target and one for the draft. Between rounds a request's KV covers all its tokens but the last.

Contract with the caller, in order:

1. `add` before `round` names the request. `add` allocates nothing on the device.
2. `round(run)` runs exactly the requests in `run`; a known request that is not in `run` is paused and keeps
   its KV. One that waits with KV which was loaded from elsewhere may run as well; the result then has it.
3. Before a round the caller makes sure that blocks suffice: `blocks_needed(tokens, growth, block_size)` in
   both pools for each request in `run`, growth being `Capacity.growth`; `SequenceStatus.shared` has those that
   count once. If they do not, `round` raises `OutOfBlocks` and nothing has changed; or it leaves out the last
   of `run` where no eviction frees what is missing, since KV is being loaded into it from elsewhere.
4. A request that finished stays known (its KV is freed at once) until `drop`.
5. One thread calls an engine. No method blocks on anything but arithmetic.
6. An engine may keep KV that no request needs any more (prefix cache), and use it for a request with the same
   start and the same `cache_salt`. Blocks with such KV count as free.
7. With `Capacity.lag` = 1 the engine prepares a round while the device works on the one before. `round(run)`
   then begins `run` and returns the outcome of the round before, without the requests that have ended or were
   dropped since that began; `round(())` begins nothing. A request whose end is not known yet may be in `run`:
   what is computed for it is discarded.

The text of a request never depends on its rounds, on the other requests in them, on preemption, or on the
draft tokens: the same specification gives the same tokens (exactly in deterministic mode, up to arithmetic
otherwise).
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from laps_sd.contract.acceptance import tested_of
from laps_sd.contract.choose import Residency, SharedBlocks
from laps_sd.contract.ends import End
from laps_sd.contract.length_probe import LearntProbe, ProbeKind
from laps_sd.contract.limits import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS_IDS,
    MAX_BIAS,
    MAX_FORMAT_CHARACTERS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    prompt_logprobs_in_all,
)
from laps_sd.contract.sampling import BOUNDS, LEAST_TEMPERATURE, Sampling

__all__ = [
    "NO_CHANGES",
    "CacheChanges",
    "Capacity",
    "ComputedBy",
    "DeviceFailed",
    "Drafter",
    "Engine",
    "FormatKind",
    "LengthLearner",
    "ModelError",
    "OutOfBlocks",
    "OutOfMemory",
    "OutputFormat",
    "PromptLogprobs",
    "RequestRound",
    "Residency",
    "RoundResult",
    "Sampling",
    "SequenceStatus",
    "SharedBlocks",
    "Specification",
    "TokenLogprobs",
    "UnknownRequest",
    "blocks_needed",
    "check_run",
    "check_specification",
]


class OutOfBlocks(RuntimeError):
    """The KV pool cannot hold this round. Raised before any state changes: run fewer requests, swap out or
    evict, and try again."""


class OutOfMemory(RuntimeError):
    """The device has no memory for a round of this size. Nothing has changed: run fewer requests, and try
    again."""


class DeviceFailed(RuntimeError):
    """The device cannot compute any more, for any request. The engine cannot be used any more."""


class ModelError(RuntimeError):
    """A model pair cannot be served. The message is one sentence that a person can act on."""


class UnknownRequest(KeyError):
    """A request id that `add` never saw, or that was dropped."""

    def __str__(self) -> str:
        return f"unknown request {self.args[0]!r}"


class FormatKind(enum.Enum):
    """The kind of an `OutputFormat`'s text."""

    JSON_OBJECT = "json_object"  # any JSON object; no text
    JSON_SCHEMA = "json_schema"  # a JSON schema, as JSON
    REGEX = "regex"  # a regular expression that the whole output matches
    GRAMMAR = "grammar"  # a context-free grammar in llguidance's form of Lark


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The required format of the output.

    Only tokens that can still lead to a complete output are chosen; it ends with an end-of-sequence token.
    """

    kind: FormatKind
    text: str = ""


class Drafter(enum.Enum):
    """Sources of draft tokens."""

    MODEL = "model"  # the draft model
    # prompt lookup: the tokens that followed the last ones when these occurred before in the context
    LOOKUP = "lookup"
    EITHER = "either"  # for each request and round the one that gains more


@dataclass(frozen=True, slots=True)
class Specification:
    """One request, with all that the engine needs. Token ids are those of the target's tokenizer."""

    request_id: str
    prompt_ids: tuple[int, ...]  # at least one
    # Output tokens that exist already (migration, restart); not reported again.
    committed_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int  # output tokens in all, committed ones included
    stop: tuple[str, ...] = ()  # stop strings; the text ends before the first that appears
    ignore_eos: bool = False
    # Tokens that end the output as an end-of-sequence token does, also with ignore_eos.
    stop_token_ids: tuple[int, ...] = ()
    # The text that ended the output stays: a stop string, or that of a token.
    include_stop_str_in_output: bool = False
    # Special tokens have no text. It matters for stop strings.
    skip_special_tokens: bool = True
    # None = the engine decides, 0 = no speculation, else a cap on tokens drafted per round.
    max_draft_len: int | None = None
    # None = the engine decides; one that it does not have is replaced by the one that it has.
    drafter: Drafter | None = None
    format: OutputFormat | None = None
    # None = off; else the log probability of each token, and this number of alternatives.
    logprobs: int | None = None
    # None = off; else the log probability of each token of the prompt, and this number of alternatives.
    # Without effect if there are committed tokens.
    prompt_logprobs: int | None = None
    origin: bytes = b""  # returned to the sender unchanged; has no meaning here
    # KV is shared between requests with equal salts only, and those of another adapter have another salt.
    cache_salt: str = ""
    # The adapter (LoRA) with which the target computes; empty: none.
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of an engine, fixed for its life."""

    slots: int  # requests in one round, at most
    target_blocks: int  # KV blocks of the target's pool
    # KV blocks of the draft's pool; 0 = there is no draft model, or its KV lies in the target's blocks
    draft_blocks: int
    block_size: int  # tokens in a block
    max_length: int  # longest context, prompt and output, tokens
    # tokens drafted per request and round, at most; a round grows KV by at most this + 1 + lookahead
    max_draft_len: int
    vocab_size: int  # token ids are 0 .. vocab_size - 1
    device: str  # "cpu", "cuda:0", "fake"
    lookahead: int = 0  # tokens beyond draft and bonus for which a round reserves KV as well
    # Rounds by which results are late: 0, or 1 if the device works on one round while the next is prepared.
    lag: int = 0
    vocabulary: bytes = b""  # laps_sd.service.tokenizer_match.vocabulary_digest of the target
    adapters: frozenset[str] = frozenset()  # names of the adapters that requests may have

    @property
    def growth(self) -> int:
        """Tokens that a request can grow in one round, at most, as blocks are counted."""
        return self.max_draft_len + 1 + self.lookahead

    @property
    def last_growth(self) -> int:
        """The same at the end of a request: a draft does not go beyond max_tokens, unless a round is in
        flight, whose tokens are not known when the draft is made.
        """
        return self.growth if self.lag else 1 + self.lookahead


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of the target at one position, before any setting of `Sampling` applies."""

    # Of the token that was chosen.
    logprob: float
    # (token id, log probability) of the most probable ones, best first.
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class PromptLogprobs:
    """Log probabilities of the target for the tokens of a prompt from its second on, in columns."""

    # Alternatives to each token: the most probable ones, of which the token may be one.
    alternatives: int
    # float32, and rank (1: no token is more probable), of each token.
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    ranks: array[int] = field(default_factory=lambda: array("I"))
    # Those to the first token, best first, then those to the next.
    alternative_ids: array[int] = field(default_factory=lambda: array("I"))
    alternative_logprobs: array[float] = field(default_factory=lambda: array("f"))

    def extend(self, more: PromptLogprobs) -> None:
        """Append those of the tokens that follow."""
        self.logprobs.extend(more.logprobs)
        self.ranks.extend(more.ranks)
        self.alternative_ids.extend(more.alternative_ids)
        self.alternative_logprobs.extend(more.alternative_logprobs)


class RequestRound(NamedTuple):
    """The outcome of one round for one request."""

    request_id: str
    position: int  # output tokens before this round, committed ones included
    tokens: tuple[int, ...]  # new output tokens; empty while its context is still being prefilled
    drafted: int  # tokens proposed
    accepted: int  # of these, the prefix that equals the target's choice, before cutting at an end
    prefilled: int = 0  # context tokens computed for it this round: prompt, or recompute after an eviction
    # Prompt tokens that needed no computing because KV of the same start was there: another request's, or its
    # own.
    cached: int = 0
    # An engine ends a request with STOP, LENGTH, STOP_SEQUENCE or ERROR.
    finish: End | None = None
    cut_characters: int = 0  # characters to cut from the end of the decoded output because of a stop string
    error: str | None = None  # with finish = ERROR
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of `tokens`, if the request wants them
    # New prediction of the output tokens that remain after this round.
    predicted_remaining_tokens: float | None = None
    # Its draft tokens were found by prompt lookup, and not proposed by the draft model.
    looked_up: bool = False
    # With the first output token, if the request wants them: of its whole prompt.
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def tested(self) -> int:
        """Return how many of the draft tokens were compared: those up to the first that is not accepted."""
        return 0 if self.error else tested_of(self.accepted, self.drafted)


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of one round: its requests in the order of `run`, then others that ran, and its times.

    Times are seconds of wall clock inside the engine.
    """

    requests: tuple[RequestRound, ...]
    # Proposing, the draft's own prefill included.
    draft_s: float = 0.0
    # The target's forward, choosing and accepting; the decode rows' share when chunks ride along.
    verify_s: float = 0.0
    # The prefill chunks' share of that forward, by their expected cost.
    prefill_s: float = 0.0
    # Bringing KV back from host memory.
    swap_s: float = 0.0
    # All of it, bookkeeping included.
    total_s: float = 0.0
    # Longest time that the round was to take, where because of it some context waits for a later round; 0: none does.
    limit_s: float = 0.0
    # Free blocks of the pools after the round.
    free_target_blocks: int = 0
    free_draft_blocks: int = 0


class ComputedBy(NamedTuple):
    """The code that computes the rounds of an engine, for metrics."""

    # all_in_c, attention_in_c or torch: of the target; vllm or fake.
    path: str
    dtype: str
    # That compute together; 0: not on the CPU, or not known.
    threads: int
    # Bytes of weights that a plain round of one request reads, by its measured time; 0: not known.
    weight_bytes_per_s: float = 0.0


class CacheChanges(NamedTuple):
    """Changes of what the prefix cache holds: names as of `laps_sd.contract.prompt_blocks`, 8 bytes each."""

    added: bytes = b""
    removed: bytes = b""


NO_CHANGES = CacheChanges()


class SequenceStatus(NamedTuple):
    """The progress of a known request between rounds."""

    residency: Residency
    tokens: int  # context length: prompt and output
    target_blocks: int  # held on the device
    draft_blocks: int
    # Those of these blocks that other requests hold as well, or will find, if `expect` named these. In a pool in
    # which the request has none: those that it will find and others hold.
    shared: tuple[SharedBlocks, ...] = ()


class LengthLearner(Protocol):
    """A predictor of output lengths inside an engine, which learns from its requests."""

    @property
    def kind(self) -> ProbeKind:
        """Properties that another one must share to use the learnt state of this one."""
        ...

    @property
    def requests(self) -> int:
        """Requests that it has learnt from, those of probes that it continues included."""
        ...

    def learnt(self) -> LearntProbe:
        """Return what it has learnt."""
        ...

    def adopt(self, learnt: LearntProbe) -> bool:
        """Continue from what another one has learnt, if that is more.

        Returns False, and changes nothing, if it is not, is damaged, or is of another kind.
        """
        ...


@runtime_checkable
class Engine(Protocol):
    """An engine; see the module's docstring for the contract."""

    @property
    def capacity(self) -> Capacity:
        """The limits of the engine."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identifier of weights, configuration, tokenizer and arithmetic.

        Engines with equal fingerprints generate equal tokens.
        """
        ...

    @property
    def facts(self) -> tuple[str, ...]:
        """The loaded models and how they are computed, for the log at the start of a worker."""
        ...

    @property
    def computed_by(self) -> ComputedBy:
        """The same for metrics."""
        ...

    @property
    def length_probe(self) -> LengthLearner | None:
        """The predictor of output lengths; None: there is none, or it has failed."""
        ...

    @property
    def free_blocks(self) -> tuple[int, int]:
        """The free blocks of the target's pool and of the draft's, as they are now."""
        ...

    def add(self, spec: Specification) -> None:
        """Add a request.

        Raises ValueError that names the field and its limit; a known id raises ValueError too.
        """
        ...

    def drop(self, request_id: str) -> None:
        """Forget a request and free everything it holds. An unknown id is fine."""
        ...

    def swap_out(self, request_id: str) -> bool:
        """Move the KV of a request to host memory, the target's at least.

        Returns False (and changes nothing) if the host budget is full or memory is short; True if nothing was
        on the device.
        """
        ...

    def evict(self, request_id: str) -> None:
        """Discard the KV of a request, on device and host.

        Its tokens stay known; it is prefilled again when it runs next.
        """
        ...

    def expect(self, waiting: Sequence[str]) -> None:
        """Look up what these requests, without KV on the device, will find in the prefix cache while others hold
        it: until the next call, each `status` names it as shared. Raises UnknownRequest.
        """
        ...

    def status(self, request_id: str) -> SequenceStatus:
        """Return the progress of a request. Raises UnknownRequest."""
        ...

    def known(self) -> frozenset[str]:
        """Return the ids of all requests added and not dropped, finished ones included."""
        ...

    def cached_blocks(self) -> bytes:
        """Return the names of all prompt blocks whose KV it has, the most recently used last.

        There are at most `prompt_blocks.most_cached` of the capacity. A request that begins with such blocks,
        all of them from the first on, does not compute them. An engine may leave out some of those that it
        has.
        """
        ...

    def cache_changes(self) -> CacheChanges:
        """Return the changes of `cached_blocks` since the last call, or since the start."""
        ...

    def round(self, run: Sequence[str]) -> RoundResult:
        """Run one draft and verify step over exactly these requests, best rank first.

        Requests without KV get a prefill chunk in the same forward (the first of `run` are served first from
        the round's budget of tokens and time); requests in host memory are brought back first. The result is
        that of this round, or of the one before (`Capacity.lag`). Raises OutOfBlocks, UnknownRequest, or
        ValueError (one id twice, a finished request, more than `capacity.slots`), in each case before any
        state changes. Raises OutOfMemory if the device has no memory for the round, also before any change
        that counts.
        """
        ...


def blocks_needed(tokens: int, growth: int, block_size: int) -> int:
    """Return the blocks that a request with a context of `tokens` holds in a round that may add `growth`
    tokens.

    KV covers all tokens but the last, and a round with a draft of g tokens writes g + 1 = `growth` entries.
    """
    return -(-(tokens - 1 + growth) // block_size)


def check_specification(spec: Specification, capacity: Capacity) -> None:
    """Raise ValueError naming the field and the limit unless `spec` can be served by an engine of this
    capacity."""
    if not spec.request_id:
        raise ValueError("request_id must not be empty")
    if not spec.prompt_ids:
        raise ValueError("prompt_ids must hold at least one token")
    for name, ids in (("prompt_ids", spec.prompt_ids), ("committed_ids", spec.committed_ids)):
        if ids and not 0 <= min(ids) <= max(ids) < capacity.vocab_size:
            raise ValueError(f"{name} must be token ids from 0 to {capacity.vocab_size - 1}")
    if spec.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {spec.max_tokens}")
    if len(spec.committed_ids) >= spec.max_tokens:
        raise ValueError(
            f"committed_ids holds {len(spec.committed_ids)} tokens, max_tokens allows {spec.max_tokens}: nothing is left to do"
        )
    context = len(spec.prompt_ids) + spec.max_tokens
    if context > capacity.max_length:
        raise ValueError(
            f"max_tokens: {len(spec.prompt_ids)} prompt tokens and {spec.max_tokens} output tokens exceed the longest context of "
            f"{capacity.max_length}"
        )
    needed = blocks_needed(context, capacity.last_growth, capacity.block_size)
    for pool, blocks in (("target", capacity.target_blocks), ("draft", capacity.draft_blocks)):
        if blocks and needed > blocks:
            raise ValueError(
                f"max_tokens: {context} tokens do not fit the {pool} KV pool of {blocks} blocks of "
                f"{capacity.block_size}"
            )
    _check_sampling(spec.sampling)
    _check_token_ids(spec, capacity)
    if spec.sampling.min_tokens > spec.max_tokens:
        raise ValueError(
            f"sampling.min_tokens must be at most max_tokens ({spec.max_tokens}), not {spec.sampling.min_tokens}"
        )
    if len(spec.stop) > MAX_STOP_STRINGS:
        raise ValueError(f"stop holds {len(spec.stop)} strings, at most {MAX_STOP_STRINGS} are allowed")
    if any(not 1 <= len(text) <= MAX_STOP_CHARACTERS for text in spec.stop):
        raise ValueError(f"stop strings must have 1 to {MAX_STOP_CHARACTERS} characters")
    if spec.adapter and spec.adapter not in capacity.adapters:
        names = ", ".join(sorted(capacity.adapters)) or "none"
        raise ValueError(f"adapter {spec.adapter!r} is not among this worker's (LAPS_SD_ADAPTERS): {names}")
    if spec.max_draft_len is not None and spec.max_draft_len < 0:
        raise ValueError(f"max_draft_len must be 0 or more, not {spec.max_draft_len}")
    if spec.logprobs is not None and not 0 <= spec.logprobs <= MAX_LOGPROBS:
        raise ValueError(f"logprobs must be from 0 to {MAX_LOGPROBS}, not {spec.logprobs}")
    if spec.prompt_logprobs is not None:
        _check_prompt_logprobs(spec.prompt_logprobs, len(spec.prompt_ids))
    if spec.format is not None:
        if len(spec.format.text) > MAX_FORMAT_CHARACTERS:
            raise ValueError(
                f"format must have at most {MAX_FORMAT_CHARACTERS} characters, not {len(spec.format.text)}"
            )
        if spec.ignore_eos:
            raise ValueError("format and ignore_eos exclude each other: a format ends with the end token")


def _check_prompt_logprobs(alternatives: int, prompt_tokens: int) -> None:
    if not 0 <= alternatives <= MAX_LOGPROBS:
        raise ValueError(f"prompt_logprobs must be from 0 to {MAX_LOGPROBS}, not {alternatives}")
    count = prompt_logprobs_in_all(prompt_tokens, alternatives)
    if count > MAX_PROMPT_LOGPROBS:
        raise ValueError(
            f"prompt_logprobs: {count} log probabilities of {prompt_tokens} tokens, at most {MAX_PROMPT_LOGPROBS} are allowed"
        )


def _check_token_ids(spec: Specification, capacity: Capacity) -> None:
    """Raise ValueError unless all token ids of the settings exist, and their lists have an allowed length."""
    sampling = spec.sampling
    words = sampling.bad_words_ids
    for name, ids, most in (
        ("stop_token_ids", spec.stop_token_ids, MAX_STOP_TOKENS),
        ("sampling.allowed_token_ids", sampling.allowed_token_ids, MAX_ALLOWED_TOKENS),
        ("sampling.bad_words_ids", words, MAX_BAD_WORDS_IDS),
    ):
        if len(ids) > most:
            raise ValueError(f"{name} holds {len(ids)} entries, at most {most} are allowed")
    if any(not 1 <= len(word) <= MAX_BAD_WORD_TOKENS for word in words):
        raise ValueError(f"sampling.bad_words_ids must hold lists of 1 to {MAX_BAD_WORD_TOKENS} token ids")
    for name, each in (
        ("sampling.logit_bias", [token for token, _ in sampling.logit_bias]),
        ("stop_token_ids", spec.stop_token_ids),
        ("sampling.allowed_token_ids", sampling.allowed_token_ids),
        ("sampling.bad_words_ids", [token for word in words for token in word]),
    ):
        if any(not 0 <= token < capacity.vocab_size for token in each):
            raise ValueError(f"{name} must name token ids from 0 to {capacity.vocab_size - 1}")


def _check_sampling(sampling: Sampling) -> None:
    for name, bounds in BOUNDS.items():
        if getattr(sampling, name) not in bounds:
            raise ValueError(f"sampling.{name} {bounds}, not {getattr(sampling, name)}")
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"sampling.temperature must be 0 or at least {LEAST_TEMPERATURE:g}, not {sampling.temperature}"
        )
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise ValueError(
            f"sampling.logit_bias holds {len(sampling.logit_bias)} tokens, at most {MAX_LOGIT_BIAS} are allowed"
        )
    if any(not abs(value) <= MAX_BIAS for _, value in sampling.logit_bias):
        raise ValueError(f"sampling.logit_bias must be from {-MAX_BIAS:g} to {MAX_BIAS:g}")


def check_run(run: Sequence[str], known: AbstractSet[str], finished: AbstractSet[str], slots: int) -> None:
    """Raise UnknownRequest or ValueError unless `run` is a list of distinct, known, unfinished requests that
    fit the slots."""
    if len(run) > slots:
        raise ValueError(f"run holds {len(run)} requests, the engine has {slots} slots")
    if len(set(run)) != len(run):
        raise ValueError("run names a request twice")
    for request_id in run:
        if request_id not in known:
            raise UnknownRequest(request_id)
        if request_id in finished:
            raise ValueError(f"request {request_id!r} has finished; drop it")
