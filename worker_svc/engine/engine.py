"""The round (one engine step): draft, verify, commit. See `interface` for the contract.

    context      t_0 ... t_{n-2} | t_{n-1} | d_1 ... d_g |
    draft feeds    (what it lacks)  t_{n-1}  d_1 .. d_{g-1}      proposes d_1 ... d_g
    target feeds                    t_{n-1}  d_1 ...... d_g      chooses  c_1 ... c_{g+1}
    accepted     a = number of leading i with d_i = c_i
    new tokens   c_1 ... c_{a+1}                                 the last one is the bonus (or the correction)
    KV valid     [0, n + a)                                      all tokens but the last; entries of rejected
                                                                 draft tokens are overwritten later

All running requests share one target forward, each with its own g; prefill chunks ride along in it. The token
that the target chooses depends on (tokens before it, sampling, seed, position) and nothing else; draft, batch
and schedule only decide how many are found per round.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from laps_sd.contract.ends import End
from worker_svc.engine.cache.blocks import name_blocks
from worker_svc.engine.cache.kv import KV_TILE, BlockTable, KVPool
from worker_svc.engine.calibration import measure_draft_steps, measure_rounds
from worker_svc.engine.cpu import kernels
from worker_svc.engine.draft_lengths.drafting import (
    FIRST_STEP_ROWS,
    Acceptance,
    DraftLengths,
    Outlook,
    OutputLengths,
    Prior,
)
from worker_svc.engine.interface import (
    Capacity,
    DeviceFailed,
    Drafter,
    ModelError,
    OutOfBlocks,
    OutOfMemory,
    RequestRound,
    RoundResult,
    Sampling,
    SequenceStatus,
    Specification,
    TokenLogprobs,
    UnknownRequest,
    blocks_needed,
    check_run,
    check_specification,
)
from worker_svc.engine.models.attention import Piece, Plan
from worker_svc.engine.models.model import (
    PackedModel,
    Tokenizer,
    check_pair,
    end_of_sequence_ids,
    fingerprint,
    load_packed,
    load_tokenizer,
)
from worker_svc.engine.proposers.lookup import Lookup
from worker_svc.engine.sampling import counter
from worker_svc.engine.sampling.formats import Formats
from worker_svc.engine.sampling.logits_processors import Adjustments
from worker_svc.engine.sampling.noise import Noise
from worker_svc.engine.sampling.sampling import Rows, choose_tokens, rows_for
from worker_svc.engine.sampling.stopping import Cut, StopText, cut
from worker_svc.engine.sequence import Sequence

NOISE_VERSION = "gumbel-1"  # enters the fingerprint: change it with `counter`
# Wall clock, at most about this, that loading spends on measuring the cost of rows and draft steps.
CALIBRATION_S = 1.0
LEAST_CHUNK = 16  # prefill tokens of a round, at least, however short memory is
# Least ratio of all rows to prefill rows at which a round is a measurement of the cost of the other rows.
CHUNKS_ARE_FEW = 8
CHUNK_GROWS_AFTER = 256  # rounds without running out of memory


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Sizes and modes. Derived numbers are not stored here."""

    slots: int = 8  # requests per round, at most
    target_blocks: int = 1024  # KV blocks of the target's pool
    draft_blocks: int = 1024  # KV blocks of the draft's pool
    block_size: int = 16  # tokens per block
    max_length: int = 1024  # longest context, tokens
    max_draft_len: int = 8  # draft tokens per request and round, at most
    # Context tokens prefilled per round, all requests together: a larger value means fewer, longer rounds.
    prefill_chunk: int = 512
    draft_len: int | None = None  # fixed number of draft tokens; None = by goodput
    deterministic: bool = True  # equal seeds give equal text, whatever the batch
    host_bytes: int = 2 * 2**30  # swapped-out KV, at most
    drafter: Drafter | None = Drafter.MODEL  # for requests that name none; None = no speculation at all
    prefix_reuse_tokens: int = 0  # shortest equal context start, in tokens, whose KV is reused; 0 = never
    # For benchmarks of random weights: draft tokens are kept with this chance, whatever the target chooses.
    synthetic_acceptance: float | None = None

    def __post_init__(self) -> None:
        for name in ("slots", "target_blocks", "block_size", "max_length", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("draft_blocks", "max_draft_len", "host_bytes", "prefix_reuse_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if self.draft_len is not None and not 0 <= self.draft_len <= self.max_draft_len:
            raise ValueError(
                f"draft_len must be from 0 to max_draft_len ({self.max_draft_len}), not {self.draft_len}"
            )
        if self.synthetic_acceptance is not None and not 0 <= self.synthetic_acceptance <= 1:
            raise ValueError(f"synthetic_acceptance must be from 0 to 1, not {self.synthetic_acceptance}")


@dataclass(slots=True)
class _Step:
    """The work of one request in this round."""

    sequence: Sequence
    known: int  # valid entries of the target's KV before the round
    chunk: int  # context tokens to prefill; 0 for a request whose KV covers all tokens but the last
    draft_len: int  # tokens to propose
    catch_up: int  # context tokens the draft is fed before it can propose (its own prefill); 0 = the draft is not used
    # Tokens found by prompt lookup, of which `draft_len` are proposed; empty where the draft model proposes.
    found: list[int]

    @property
    def start(self) -> int:
        """Position of the first token that is fed to the target."""
        return self.known if self.chunk else len(self.sequence.tokens) - 1

    @property
    def fed(self) -> int:
        """Rows of the target's forward. 0: no prefill budget was left for it."""
        if self.chunk:
            return self.chunk
        return self.draft_len + 1 if self.known == len(self.sequence.tokens) - 1 else 0

    @property
    def choices(self) -> int:
        """Number of rows at which the target chooses a token: none while context is missing."""
        if self.chunk:
            return int(self.known + self.chunk == len(self.sequence.tokens))
        return self.fed


@dataclass(frozen=True, slots=True)
class _Choices:
    """The rows at which the target chooses, requests in order, and the first row of each request."""

    rows: Rows
    noise: torch.Tensor | None  # [choice rows, vocab]; None if all are greedy
    offsets: list[int]
    adjustments: Adjustments

    @property
    def by_kernels(self) -> bool:
        """True if `kernels` can choose: among all tokens, by the model's own logits."""
        return self.rows.whole and not self.adjustments.wanted

    @property
    def for_kernels(self) -> kernels.Choosing | None:
        """Settings for a choice by `kernels`; None if all rows are greedy."""
        rows, noise = self.rows, self.noise
        return None if noise is None else kernels.Choosing(rows.inverse_temperature, rows.noisy, noise)


@dataclass(slots=True)
class _Proposals:
    """Draft tokens by request: known on the host, or still on the device."""

    host: dict[int, list[int]]
    device: list[tuple[list[int], torch.Tensor]]  # per draft step, (requests, their draft tokens [requests])
    batches: list[int]  # requests of each draft step of the model
    steps_s: float  # time of these steps, by `_clock`; the work around them does not grow with their number


@dataclass(slots=True)
class _Verified:
    """The outcome of the target's forward."""

    chosen: dict[int, int]  # its choices, by row of `_choice_rows`
    proposed: dict[int, list[int]]  # the draft tokens by request
    sound: list[bool]  # True where logits are finite: at the choices, then at the end of other chunks
    logprobs: dict[int, TokenLogprobs]  # by row, for requests with log probabilities


class SpeculativeEngine:
    """Draft model, target model and the state of their requests. Implements `interface.Engine`."""

    def __init__(
        self,
        target: PackedModel,
        draft: PackedModel | None,
        options: EngineOptions,
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: frozenset[int] = frozenset(),
        fingerprint: str = "",
        formats: Formats | None = None,
    ) -> None:
        self.options = options
        self.fingerprint = fingerprint
        self._target, self._draft = target, draft
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._device = target.device
        # True if draft tokens are read as they are made. On an accelerator that takes longer than it saves.
        self._looks = self._device.type == "cpu"
        # A region holds a whole context where the pool is large enough for one per slot; then sequences stay in one piece.
        regions = options.target_blocks * options.block_size // KV_TILE
        region_tokens = KV_TILE if regions >= options.slots else options.block_size
        self._pools: list[KVPool] = []
        for model, blocks in ((target, options.target_blocks), (draft, options.draft_blocks)):
            if model is not None:
                pool = model.new_pool(
                    blocks=blocks, block_size=options.block_size, region_tokens=region_tokens
                )
                model.attach(pool)
                self._pools.append(pool)
        self.capacity = Capacity(
            slots=options.slots,
            target_blocks=options.target_blocks,
            draft_blocks=options.draft_blocks if draft else 0,
            block_size=options.block_size,
            max_length=options.max_length,
            max_draft_len=0 if options.drafter is None else options.max_draft_len,
            vocab_size=target.shape.vocab_size,
            device=str(self._device),
        )
        # Tokens that both models have.
        self._draft_vocab = 0 if draft is None else min(draft.shape.vocab_size, target.shape.vocab_size)
        self._formats = formats
        self.lengths = DraftLengths(self.capacity.max_draft_len, options.draft_len)
        if target.by_kernels:
            self.lengths.uneven = 0.0
        self._least_feed = 1 if draft is not None and draft.by_kernels else FIRST_STEP_ROWS
        self._lookup_prior = Prior()
        self._output_lengths = OutputLengths()
        self._prefill_chunk = options.prefill_chunk  # less while memory is short
        self._rounds_with_chunk = 0
        self._noise = Noise(target.shape.vocab_size, self._device)
        self._sequences: dict[str, Sequence] = {}

    # -- requests -----------------------------------------------------------------------------------------------------------

    def add(self, spec: Specification) -> None:
        """Make a request known. Raises ValueError naming the field and its limit."""
        if spec.request_id in self._sequences:
            raise ValueError(f"request_id {spec.request_id!r} is known already")
        check_specification(spec, self.capacity)
        if spec.stop and self._tokenizer is None:
            raise ValueError("stop needs a tokenizer, and this model has none")
        state = None
        if spec.format is not None:
            if self._formats is None:
                raise ValueError("format needs a tokenizer, and this model has none")
            state = self._formats.open(spec.format)
            state.follow(spec.committed_ids)
        looks_up = self._draft is None or (spec.drafter or self.options.drafter) is Drafter.LOOKUP
        self._sequences[spec.request_id] = Sequence(
            spec=spec,
            tokens=[*spec.prompt_ids, *spec.committed_ids],
            target=self._pools[0].new_table(),
            draft=self._pools[1].new_table() if self._draft else None,
            stop_text=StopText(spec.stop, self._tokenizer.decode) if spec.stop and self._tokenizer else None,
            acceptance=Acceptance(prior=self._lookup_prior, free=True) if looks_up else Acceptance(),
            seed_key=counter.mix64(spec.sampling.seed),
            lookup=Lookup() if looks_up and self.capacity.max_draft_len else None,
            format=state,
        )

    def drop(self, request_id: str) -> None:
        """Forget a request and free what it holds; an unknown id is fine."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._release(sequence)

    def swap_out(self, request_id: str) -> bool:
        """Move the KV of a request to host memory, the draft's only if that fits too.

        Returns False, and changes nothing, if the host budget is full.
        """
        sequence = self._get(request_id)
        places = self._places(sequence)
        if not any(place.blocks for place in places):
            return True
        room = self.options.host_bytes - sum(other.swapped_bytes for other in self._sequences.values())
        copies: list[torch.Tensor | None] = []
        for place, pool in zip(places, self._pools, strict=True):
            size = place.length * pool.bytes_per_token()
            if size > room and not copies:
                return False
            copies.append(pool.copy_out(place) if 0 < size <= room else None)
            room -= size
        self._release(sequence)
        # The draft's KV without the target's is useless, and the target's without the draft's is still HOST.
        sequence.swapped = [*copies, None][:2] if copies[0] is not None else []
        return True

    def evict(self, request_id: str) -> None:
        """Discard the KV of a request; its tokens stay known."""
        self._release(self._get(request_id))

    def status(self, request_id: str) -> SequenceStatus:
        """Return the progress of a request. Raises UnknownRequest."""
        sequence = self._get(request_id)
        draft_blocks = len(sequence.draft.blocks) if sequence.draft else 0
        return SequenceStatus(
            sequence.residency, len(sequence.tokens), len(sequence.target.blocks), draft_blocks
        )

    def known(self) -> frozenset[str]:
        """Return the ids of all requests that were added and not dropped."""
        return frozenset(self._sequences)

    def check(self) -> None:
        """Assert that every block is free, cached or held, and that a writable block has a single holder."""
        for at, pool in enumerate(self._pools):
            places = [self._places(sequence)[at] for sequence in self._sequences.values()]
            pool.allocator.check(place.blocks for place in places)
            for place in places:
                assert place.first_writable <= place.length
                assert [pool.allocator.is_named(block) for block in place.blocks] == [
                    number < place.named for number in range(len(place.blocks))
                ]

    # -- a round ------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def round(self, run: SequenceOf[str]) -> RoundResult:
        """Run one draft and verify step over exactly these requests.

        See `interface.Engine.round` for the errors.
        """
        started = time.perf_counter()
        finished = {name for name in run if name in self._sequences and self._sequences[name].finished}
        check_run(run, self._sequences.keys(), finished, self.options.slots)
        sequences = [self._sequences[name] for name in run]
        drafts = [(place, place.length) for place in (s.draft for s in sequences) if place is not None]
        while True:
            try:
                return self._round(sequences, started)
            except Exception as error:
                # Tokens and the target's lengths change in the last step only, and entries after a length do
                # not count, so that only the draft's lengths must be restored.
                for place, length in drafts:
                    place.length = length
                if not _is_out_of_memory(error):
                    if "CUDA error" in str(error):  # sticky: every later call fails too
                        raise DeviceFailed(str(error).splitlines()[0]) from error
                    raise
                shortage = str(error).strip().splitlines()[:1] or [type(error).__name__]
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            longest = max(len(s.tokens) - s.kv_length for s in sequences)
            chunk = min(self._prefill_chunk, longest) // 2
            self._rounds_with_chunk = 0
            if longest <= 1 or chunk < LEAST_CHUNK:
                raise OutOfMemory(
                    f"the device has no memory for a round of {len(run)} requests: {shortage[0]}"
                )
            self._prefill_chunk = chunk

    def _round(self, sequences: SequenceOf[Sequence], started: float) -> RoundResult:
        round_clock = self._clock()
        try:
            self._find_prefixes(sequences)
            keys = sum(len(sequence.tokens) for sequence in sequences)
            steps = self._steps(sequences, keys)
            self._hold(steps)
        finally:
            for sequence in sequences:
                sequence.target.found = []
        # The CPU clock is read only if there is swapping to measure: each reading is a system call.
        swap_started, swapping_s = time.perf_counter(), 0.0
        coming = [step.sequence for step in steps if step.sequence.swapped]
        if coming:
            swapping_s = -self._clock()
            for sequence in coming:
                self._swap_in(sequence)
            swapping_s += self._clock()
        swap_ended = time.perf_counter()
        choices = self._choices(steps)
        draft_started = time.perf_counter()
        try:
            proposals = self._propose(steps, choices)
        finally:
            choices.adjustments.close()
        self._synchronize()
        verify_started = time.perf_counter()
        verified = self._verify(steps, proposals, choices)
        failed = dict(choices.adjustments.failed)
        if not all(verified.sound):
            verified, broken = self._verify_one_by_one(steps, verified.proposed, choices)
            failed.update(dict.fromkeys(broken, "the target's logits are not finite"))
        ended = time.perf_counter()

        # Row counts are read before the commit, since `fed` is 0 for a finished request.
        fed, chunk_rows = [step.fed for step in steps], sum(step.chunk for step in steps)
        all_rows = sum(fed)
        reports = tuple(
            self._commit(
                step,
                [
                    verified.chosen[at + j]
                    for j in range(min(step.choices, choices.adjustments.usable.get(i, step.choices)))
                ],
                verified.proposed.get(i, []),
                failed.get(i),
                [verified.logprobs[row] for row in range(at, at + step.choices) if row in verified.logprobs],
            )
            for i, (step, at) in enumerate(zip(steps, choices.offsets, strict=True))
        )
        self._grow_chunk()
        forward_s, draft_s = ended - verify_started, verify_started - draft_started
        prefill_s = forward_s * chunk_rows / all_rows if all_rows else 0.0
        if chunk_rows * CHUNKS_ARE_FEW <= all_rows > 0:
            # Rows of a chunk have another cost than draft tokens. Under load nearly every round has a few of
            # them.
            self.lengths.observe_costs(
                all_rows,
                self._clock() - round_clock - swapping_s - proposals.steps_s,
                proposals.batches,
                proposals.steps_s,
                keys,
                sum(step.catch_up for step in steps),
                uneven=min(fed) < max(fed),
            )
        free = [pool.allocator.free_blocks for pool in self._pools]
        return RoundResult(
            requests=reports,
            draft_s=draft_s,
            verify_s=forward_s - prefill_s,
            prefill_s=prefill_s,
            swap_s=swap_ended - swap_started,
            total_s=time.perf_counter() - started,
            free_target_blocks=free[0],
            free_draft_blocks=free[1] if self._draft else 0,
        )

    def _find_prefixes(self, sequences: SequenceOf[Sequence]) -> None:
        """Look up cached KV of the context of each request that has none.

        The last token is left out, because its logits are needed. Only the target's KV is looked up: the
        draft's costs a small fraction of it to compute, and no first token waits for it.
        """
        if not self.options.prefix_reuse_tokens:
            return
        size = self.options.block_size
        for sequence in sequences:
            name_blocks(sequence.block_names, sequence.tokens, size)
            if sequence.kv_length == 0 and not sequence.target.blocks:
                names = sequence.block_names[: (len(sequence.tokens) - 1) // size]
                self._pools[0].find(sequence.target, names, self.options.prefix_reuse_tokens)

    def _chunks(self, sequences: SequenceOf[Sequence]) -> list[int]:
        """Return the context tokens to prefill for each request: first come, first served from the budget.

        A request without KV gets none while another one, ahead of it, computes the same tokens: it finds them in the next round.
        """
        left, size, least = self._prefill_chunk, self.options.block_size, self.options.prefix_reuse_tokens
        coming: set[bytes] = set()  # names of the blocks that this round fills
        chunks = []
        for sequence in sequences:
            known, missing = sequence.kv_length, len(sequence.tokens) - sequence.kv_length
            chunk = min(missing, left) if missing > 1 or known == 0 else 0
            if least and chunk:
                names = sequence.block_names
                if not sequence.target.blocks and not sequence.swapped:
                    after = known // size
                    while after < (len(sequence.tokens) - 1) // size and names[after] in coming:
                        after += 1
                    if after * size - known >= least:
                        chunk = 0
                coming.update(names[known // size : (known + chunk) // size])
            left -= chunk
            chunks.append(chunk)
        return chunks

    def _steps(self, sequences: SequenceOf[Sequence], keys: int) -> list[_Step]:
        """Decide the work of each request: prefill from the chunk budget, draft lengths by goodput.

        `keys`: tokens of all their contexts.
        """
        chunks = self._chunks(sequences)
        caps = [self._draft_cap(sequence, chunk) for sequence, chunk in zip(sequences, chunks, strict=True)]
        found: list[list[int]] = [[] for _ in sequences]
        for i, sequence in enumerate(sequences):
            if caps[i] and sequence.lookup is not None:
                found[i] = sequence.lookup.propose(sequence.tokens, caps[i])
                if sequence.format is not None:
                    found[i] = found[i][: sequence.format.valid(found[i])]
                end = cut(sequence.spec, sequence.output_length, found[i], self._eos_ids, None, ())
                found[i] = found[i][: end.tokens]
                caps[i] = len(found[i])
        drafting = [i for i, cap in enumerate(caps) if cap > 0]
        # Requests that cannot draft add rows, but have no draft length to choose. Prefill is due in any case.
        plain = sum(chunk == 0 for chunk in chunks) - len(drafting)
        lengths = self.lengths.lengths(
            [sequences[i].acceptance for i in drafting], [caps[i] for i in drafting], plain,
            lambda at: self._outlook(sequences[drafting[at]]), keys,
        )  # fmt: skip
        steps = [
            _Step(sequence, sequence.kv_length, chunk, 0, 0, [])
            for sequence, chunk in zip(sequences, chunks, strict=True)
        ]
        left = self._prefill_chunk
        for i, length in zip(drafting, lengths, strict=True):
            if found[i]:
                steps[i].found = found[i][:length]
                steps[i].draft_len = length
            elif length:
                lag = sequences[i].draft_lag
                # After full acceptance the draft lacks one entry more. Where that matters all requests read
                # the same number of tokens, so that they run as one batch.
                feed = min(max(lag, self._least_feed), len(sequences[i].tokens))
                if lag <= FIRST_STEP_ROWS or feed <= left:
                    steps[i].draft_len, steps[i].catch_up = length, feed
                else:  # its context does not fit this round's budget: the draft catches up first, and proposes later
                    steps[i].catch_up = left
                left -= steps[i].catch_up if lag > FIRST_STEP_ROWS else 0
        return steps

    def _outlook(self, sequence: Sequence) -> Outlook:
        said = sequence.output_length
        to_come = min(sequence.spec.max_tokens - said, self._output_lengths.to_come(said))
        return Outlook(to_come, max(0, sequence.draft_lag - FIRST_STEP_ROWS))

    def _draft_cap(self, sequence: Sequence, chunk: int) -> int:
        """Return the longest useful draft of a request.

        It is at most the request's own cap, and one less than its remaining tokens, because the target adds
        one.
        """
        if (
            (self._draft is None and sequence.lookup is None)
            or chunk
            or sequence.kv_length < len(sequence.tokens) - 1
        ):
            return 0
        cap = (
            self.capacity.max_draft_len
            if sequence.spec.max_draft_len is None
            else sequence.spec.max_draft_len
        )
        return max(
            0, min(cap, self.capacity.max_draft_len, sequence.spec.max_tokens - sequence.output_length - 1)
        )

    def _hold(self, steps: SequenceOf[_Step]) -> None:
        """Take the blocks that this round needs, or raise OutOfBlocks and take none."""
        size = self.options.block_size
        # By pool: (place, blocks needed, blocks that it may need later).
        wanted: list[list[tuple[BlockTable, int, int]]] = [[], []]
        for step in steps:
            sequence, tokens = step.sequence, len(step.sequence.tokens)
            expected = blocks_needed(len(sequence.spec.prompt_ids) + sequence.spec.max_tokens, 1, size)
            if step.fed or sequence.swapped:
                wanted[0].append((sequence.target, blocks_needed(tokens, step.draft_len + 1, size), expected))
            if sequence.draft is not None and (
                step.catch_up or (sequence.swapped and sequence.swapped[1] is not None)
            ):
                wanted[1].append((sequence.draft, blocks_needed(tokens, step.draft_len + 1, size), expected))
        for name, pool, places in zip(("target", "draft"), self._pools, wanted, strict=False):
            missing = sum(pool.missing(place, needed) for place, needed, _ in places)
            if missing > pool.allocator.free_blocks:
                raise OutOfBlocks(
                    f"the {name} pool has {pool.allocator.free_blocks} free KV blocks and this round needs {missing}"
                )
        for step in steps:
            if step.fed and step.sequence.target.found:
                step.sequence.reused = step.sequence.target.found_tokens
        for pool, places in zip(self._pools, wanted, strict=False):
            pool.hold(places)

    def _swap_in(self, sequence: Sequence) -> None:
        for pool, place, copy in zip(self._pools, self._places(sequence), sequence.swapped, strict=False):
            if copy is not None:
                pool.copy_in(place, copy)
        sequence.swapped = []

    def _choices(self, steps: SequenceOf[_Step]) -> _Choices:
        offsets: list[int] = []
        settings: list[Sampling] = []
        for step in steps:
            offsets.append(len(settings))
            settings.extend([step.sequence.spec.sampling] * step.choices)
        rows = rows_for(settings, self.capacity.vocab_size, self._device)
        noise = None
        if not rows.plain:
            noise = self._noise.gumbel(
                [key for step in steps for key in step.sequence.row_keys(step.choices)]
            )
        adjustments = Adjustments(
            (
                (i, step.sequence, at, step.choices)
                for i, (step, at) in enumerate(zip(steps, offsets, strict=True))
            ),
            self.capacity.vocab_size,
            self._device,
        )
        return _Choices(rows, noise, offsets, adjustments)

    # -- drafting -----------------------------------------------------------------------------------------------------------

    def _propose(self, steps: SequenceOf[_Step], choices: _Choices) -> _Proposals:
        """Return the draft tokens of the draft model and of prompt lookup."""
        found = {i: step.found for i, step in enumerate(steps) if step.found}
        if choices.adjustments.wanted:
            for j in range(max(map(len, found.values()), default=0)):
                members = [i for i, ids in found.items() if len(ids) > j]
                tokens = torch.tensor([found[i][j] for i in members], device=self._device)
                choices.adjustments.proposed(members, j, tokens)
        proposals = _Proposals(found, [], [], 0.0)
        self._propose_by_model(proposals, steps, choices)
        return proposals

    def _propose_by_model(self, proposals: _Proposals, steps: SequenceOf[_Step], choices: _Choices) -> None:
        """Run the draft model.

        The draft token of a request at draft step j is chosen with the noise and the adjustments of its
        choice row j, which are also the target's.
        """
        fed = [i for i, step in enumerate(steps) if step.catch_up]
        if not fed or self._draft is None:
            return
        draft, vocab = self._draft, self._draft_vocab
        pieces = []
        for i in fed:
            sequence, feed = steps[i].sequence, steps[i].catch_up
            assert sequence.draft is not None
            # The piece ends at the last token if the draft proposes, else at the end of the budget.
            start = len(sequence.tokens) - feed if steps[i].draft_len else sequence.draft.length
            pieces.append(Piece(sequence.draft, start, feed))
            sequence.draft.length = start + feed
        plan = draft.planner.plan(pieces)
        host_ids: list[int] = []
        for at in plan.order:
            _, start, count = pieces[at]
            host_ids.extend(steps[fed[at]].sequence.tokens[start : start + count])
        ids = self._draft_ids(kernels.int64s(host_ids).to(self._device))
        members = [fed[at] for at in plan.order if steps[fed[at]].draft_len]  # in packed order
        if members and draft.proposes and choices.by_kernels:
            self._propose_at_once(proposals, steps, choices, fed, ids, plan)
            return
        began = self._clock()
        last = [plan.first_row[at] + pieces[at].tokens - 1 for at in plan.order if steps[fed[at]].draft_len]
        logits = draft.forward(ids, plan, torch.tensor(last, dtype=torch.int64, device=self._device))
        depth = max((steps[i].draft_len for i in members), default=0)
        tokens = ids[:0]  # draft tokens of the previous step
        step_plan = None
        for j in range(depth):
            if j:
                going = [at for at, i in enumerate(members) if steps[i].draft_len > j]
                if not going:
                    break
                if len(going) < len(members):
                    members, tokens = [members[at] for at in going], tokens[going]
                    step_plan = None
                if step_plan is None or not draft.planner.advance(step_plan):
                    pieces = [
                        Piece(place, place.length, 1)
                        for place in (self._draft_place(steps[i]) for i in members)
                    ]
                    step_plan = draft.planner.plan(pieces, reserve=depth - j - 1)
                    if step_plan.order != list(range(len(members))):
                        members, tokens = [members[at] for at in step_plan.order], tokens[step_plan.order]
                for i in members:
                    self._draft_place(steps[i]).length += 1
                logits = draft.forward(self._draft_ids(tokens), step_plan, None)[: len(members)]
            choice_rows = [choices.offsets[i] + j for i in members]
            noise = None if choices.noise is None else choices.noise[choice_rows][:, :vocab]
            adjusted = choices.adjustments.apply(logits[:, :vocab], choice_rows)
            tokens = choose_tokens(adjusted, choices.rows.select(choice_rows), noise)
            choices.adjustments.proposed(members, j, tokens)
            proposals.batches.append(len(members))
            if not self._looks:
                proposals.device.append((members, tokens))
                continue
            for i, token in zip(members, tokens.tolist(), strict=True):
                proposals.host.setdefault(i, []).append(token)
                if token in self._eos_ids and not steps[i].sequence.spec.ignore_eos:
                    steps[i].draft_len = j + 1  # draft tokens after an end would be discarded
        self._synchronize()
        proposals.steps_s = self._clock() - began

    def _propose_at_once(
        self,
        proposals: _Proposals,
        steps: SequenceOf[_Step],
        choices: _Choices,
        fed: SequenceOf[int],
        ids: torch.Tensor,
        plan: Plan,
    ) -> None:
        """Run all draft steps in one call: at a few rows, calling takes as long as computing."""
        assert self._draft is not None
        drafts = [
            kernels.Draft(at, choices.offsets[i], step.draft_len, not step.sequence.spec.ignore_eos)
            for at, i in enumerate(fed)
            if (step := steps[i]).draft_len
        ]
        began = self._clock()
        told = self._draft.propose(
            ids, plan, drafts, choices.for_kernels, self._draft_vocab, list(self._eos_ids)
        )
        proposals.steps_s = self._clock() - began
        for draft, tokens in zip(drafts, told, strict=True):
            i = fed[draft.piece]
            proposals.host[i] = tokens
            steps[i].draft_len = len(tokens)
            self._draft_place(steps[i]).length += len(tokens) - 1
        depth = max(map(len, told))
        proposals.batches += [sum([len(tokens) > j for tokens in told]) for j in range(depth)]

    def _draft_place(self, step: _Step) -> BlockTable:
        assert step.sequence.draft is not None
        return step.sequence.draft

    def _draft_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Clamp the ids to the draft's rows: padded vocabularies of one tokenizer may differ in size."""
        limit = self._draft_vocab
        return ids if limit == self.capacity.vocab_size else ids.clamp(max=limit - 1)

    # -- verification -------------------------------------------------------------------------------------------------------

    def _verify(
        self,
        steps: SequenceOf[_Step],
        proposals: _Proposals,
        choices: _Choices,
    ) -> _Verified:
        """Run the target's forward, and return its choices."""
        fed = [i for i, step in enumerate(steps) if step.fed]
        if not fed:
            return _Verified({}, {}, [], {})
        pieces = [Piece(steps[i].sequence.target, steps[i].start, steps[i].fed) for i in fed]
        plan = self._target.planner.plan(pieces)
        first_row = dict(zip(fed, plan.first_row, strict=True))
        host_ids = [0] * plan.total
        logit_rows: list[int] = []
        # Rows without a choice. NaN and infinity must be detected there too, before another request reads the
        # KV.
        watched: list[int] = []
        for i, (_, start, count) in zip(fed, pieces, strict=True):
            step, row = steps[i], first_row[i]
            known = step.sequence.tokens[start : start + count]
            known += proposals.host.get(i, ())  # other draft tokens are on the device already
            host_ids[row : row + len(known)] = known
            logit_rows.extend(range(row + count - step.choices, row + count))
            if not step.choices:
                watched.append(row + count - 1)
        ids = kernels.int64s(host_ids).to(self._device)
        guesses = None
        if proposals.device:
            guesses = torch.cat([tokens for _, tokens in proposals.device])
            at = [first_row[i] + 1 + j for j, (indices, _) in enumerate(proposals.device) for i in indices]
            ids[at] = guesses
        logits = self._target.forward(
            ids, plan, kernels.int64s(logit_rows + watched).to(self._device)
        )  # [choice rows and watched rows, vocab]
        choice_rows = [
            at + j for step, at in zip(steps, choices.offsets, strict=True) for j in range(step.choices)
        ]
        count, sound = len(logit_rows), len(logit_rows) + len(watched)
        if guesses is None and choices.by_kernels and kernels.choose_of(logits):
            picked = kernels.choose(logits, choice_rows + [0] * len(watched), choices.for_kernels)
            values = [*picked[:count], *[token >= 0 for token in picked]]
        else:
            finite = logits.sum(-1, dtype=torch.float32).isfinite()
            rows, noise = choices.rows, choices.noise
            if noise is not None and count < len(noise):
                rows, noise = rows.select(choice_rows), noise[choice_rows]
            chosen = choose_tokens(choices.adjustments.apply(logits[:count], choice_rows), rows, noise)
            parts = [chosen, finite.long()] if guesses is None else [chosen, finite.long(), guesses]
            values = torch.cat(parts).tolist()  # the round's only transfer to the host
        by_request = proposals.host
        at_guess = count + sound
        for indices, _ in proposals.device:
            for i in indices:
                by_request.setdefault(i, []).append(values[at_guess])
                at_guess += 1
        told = [
            (at, offset + j, step.sequence.spec.logprobs)
            for at, (step, offset, j) in enumerate(
                (step, offset, j)
                for step, offset in zip(steps, choices.offsets, strict=True)
                for j in range(step.choices)
            )
            if step.sequence.spec.logprobs is not None
        ]
        return _Verified(
            dict(zip(choice_rows, values[:count], strict=True)),
            by_request,
            [bool(value) for value in values[count : count + sound]],
            _logprobs(logits, values[:count], told) if told else {},
        )

    def _verify_one_by_one(
        self,
        steps: SequenceOf[_Step],
        proposed: dict[int, list[int]],
        choices: _Choices,
    ) -> tuple[_Verified, set[int]]:
        """Repeat a verification with non-finite logits. Returns its outcome, and the failed requests.

        One request's inf or nan reaches others through the masked part of a slice of the pool (0 * nan). So a
        request fails if its own KV is not finite; then the pools are cleaned, and each other request is run
        alone: it fails if its logits are still not finite.
        """
        target = self._pools[0]
        broken = {
            i for i, step in enumerate(steps) if step.fed and not target.is_finite(step.sequence.target)
        }
        whole = _Verified({}, proposed, [], {})
        for i, step in enumerate(steps):
            for pool in self._pools:
                pool.zero_what_is_not_finite()
            rows_of_it = range(choices.offsets[i], choices.offsets[i] + step.choices)
            # The choices of a broken request are not read, so any numbers will do.
            whole.chosen.update(zip(rows_of_it, rows_of_it, strict=True))
            if step.fed and i not in broken:
                guesses = _Proposals({0: [*proposed.get(i, [])]}, [], [], 0.0)
                alone = self._verify([step], guesses, replace(choices, offsets=[choices.offsets[i]]))
                if not all(alone.sound):
                    broken.add(i)
                whole.chosen.update(alone.chosen)
                whole.logprobs.update(alone.logprobs)
        for pool in self._pools:
            pool.zero_what_is_not_finite()
        return whole, broken

    def _commit(
        self,
        step: _Step,
        chosen: SequenceOf[int],
        proposed: SequenceOf[int],
        problem: str | None,
        logprobs: SequenceOf[TokenLogprobs],
    ) -> RequestRound:
        """Commit the outcome of verification: tokens, lengths, acceptance, and the end if there is one.

        `chosen` may be shorter than the draft where the output format allowed no further token.
        """
        sequence, position = step.sequence, step.sequence.output_length
        request_id = sequence.spec.request_id
        cached, sequence.reused = min(sequence.reused, len(sequence.spec.prompt_ids)), 0
        accepted = 0
        if self.options.synthetic_acceptance is None:
            while accepted < min(len(proposed), len(chosen)) and proposed[accepted] == chosen[accepted]:
                accepted += 1
        else:
            accepted = self._accepted_by_coin(sequence, min(len(proposed), len(chosen)))
            # the context consists of the tokens that were fed
            chosen = [*proposed[:accepted], *chosen[accepted:]]
        block = chosen[: accepted + 1]
        accepted = min(accepted, max(0, len(block) - 1)) if len(chosen) <= len(proposed) else accepted
        end = Cut(len(block), None)
        if problem is None and block:
            output = sequence.output if sequence.stop_text else ()
            try:
                end = cut(sequence.spec, position, block, self._eos_ids, sequence.stop_text, output)
            except Exception as error:
                # A tokenizer that cannot decode its own tokens fails this request only.
                problem = f"the output cannot be decoded: {error}"
        if problem is not None:
            self._release(sequence)
            sequence.finished = True
            return RequestRound(
                request_id, position, (), len(proposed), 0, prefilled=step.chunk, cached=cached,
                finish=End.ERROR, error=problem,
            )  # fmt: skip
        if step.chunk:
            sequence.target.length += step.chunk
        if not chosen:
            self._remember(sequence)
            return RequestRound(request_id, position, (), 0, 0, prefilled=step.chunk, cached=cached)
        tested = min(accepted + 1, len(proposed))
        before = len(sequence.tokens)
        sequence.tokens.extend(block[: end.tokens])
        sequence.target.length = len(sequence.tokens) - 1
        self._remember(sequence)
        if sequence.format is not None:
            sequence.format.follow(block[: end.tokens])
        if proposed and step.catch_up and sequence.draft is not None:
            # The draft was fed the last token and all draft tokens but the last; the accepted ones are
            # context now.
            sequence.draft.length = before + min(accepted, len(proposed) - 1)
        if not step.chunk:
            self.lengths.observe_acceptance(sequence.acceptance, accepted, tested)
        if end.finish is not None:
            sequence.finished = True
            self._release(sequence)
            self._output_lengths.observe(sequence.output_length)
        return RequestRound(
            request_id=request_id,
            position=position,
            tokens=tuple(block[: end.tokens]),
            drafted=len(proposed),
            accepted=accepted,
            tested_by_position=(1,) * tested,
            accepted_by_position=(1,) * accepted + (0,) * (tested - accepted),
            prefilled=step.chunk,
            cached=cached,
            finish=end.finish,
            cut_characters=end.cut_characters,
            logprobs=tuple(logprobs[: end.tokens]),
        )

    # -- helpers ------------------------------------------------------------------------------------------------------------

    def _accepted_by_coin(self, sequence: Sequence, proposed: int) -> int:
        """Return the number of leading draft tokens that are kept if each has the same chance.

        It is a function of (seed, position), like the noise.
        """
        limit = int((self.options.synthetic_acceptance or 0.0) * 2**64)
        for accepted in range(proposed):
            position = sequence.output_length + accepted
            if counter.mix64((~sequence.seed_key + position * counter.GOLDEN) & counter.M64) >= limit:
                return accepted
        return proposed

    def _get(self, request_id: str) -> Sequence:
        try:
            return self._sequences[request_id]
        except KeyError:
            raise UnknownRequest(request_id) from None

    def _places(self, sequence: Sequence) -> list[BlockTable]:
        return [sequence.target] if sequence.draft is None else [sequence.target, sequence.draft]

    def _remember(self, sequence: Sequence) -> None:
        """Add the KV that is final to the prefix cache, for requests with the same context start."""
        if self.options.prefix_reuse_tokens:
            name_blocks(sequence.block_names, sequence.tokens, self.options.block_size)
            self._pools[0].remember(sequence.target, sequence.block_names)

    def _release(self, sequence: Sequence) -> None:
        for pool, place in zip(self._pools, self._places(sequence), strict=True):
            pool.release(place)
        sequence.swapped = []
        sequence.tally = None
        sequence.reused = 0

    def _grow_chunk(self) -> None:
        """Grow the prefill chunk towards its usual size again after a shortage of memory."""
        if self._prefill_chunk < self.options.prefill_chunk:
            self._rounds_with_chunk += 1
            if self._rounds_with_chunk >= CHUNK_GROWS_AFTER:
                self._prefill_chunk = min(2 * self._prefill_chunk, self.options.prefill_chunk)
                self._rounds_with_chunk = 0

    def _clock(self) -> float:
        """Return seconds of computing, for decisions.

        On the CPU they are this thread's own, so that other processes do not count.
        """
        if self._device.type == "cpu":
            return time.thread_time()
        return time.perf_counter()

    def _synchronize(self) -> None:
        """Wait for the device, so that the draft's time is not counted as verification.

        The CPU needs no waiting.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def calibrate(self, budget_s: float = CALIBRATION_S) -> None:
        """Measure forwards of every size that rounds have, before any `add`.

        The first request finds a warm device, and the first draft lengths rest on measured costs of verified
        rows and draft steps. Each size is measured at least twice, however small the budget.
        """
        slots, length, deadline = self.options.slots, self.options.max_length, time.monotonic() + budget_s
        if self._draft is not None:
            self.lengths.step = measure_draft_steps(
                self._draft,
                slots=slots,
                max_length=length,
                clock=self._clock,
                deadline=deadline - budget_s / 2,
            )
        deepest = 1 + self.capacity.max_draft_len
        self.lengths.set_plain(
            measure_rounds(
                self._target,
                slots=slots,
                deepest=deepest,
                max_length=length,
                clock=self._clock,
                deadline=deadline,
            )
        )


def _is_out_of_memory(error: Exception) -> bool:
    """Return True for a shortage of memory, which the CPU's allocator reports in its message only."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "t allocate memory" in str(error)
    )


def _logprobs(
    logits: torch.Tensor, chosen: SequenceOf[int], told: SequenceOf[tuple[int, int, int]]
) -> dict[int, TokenLogprobs]:
    """Return log probabilities by choice row.

    `logits` [rows, vocab], `chosen` [rows]; `told`: (row, choice row, alternatives).
    """
    index = torch.tensor([at for at, _, _ in told], device=logits.device)
    ids = torch.tensor([[max(0, chosen[at])] for at, _, _ in told], device=logits.device)  # -1: not finite
    all_logprobs = logits[index].float().log_softmax(-1)
    own = all_logprobs.gather(-1, ids)[:, 0].tolist()
    most = min(max(count for _, _, count in told), logits.shape[-1])
    best = all_logprobs.topk(most, dim=-1)
    values, tokens = best.values.tolist(), best.indices.tolist()
    return {
        row: TokenLogprobs(own[n], tuple(zip(tokens[n][:count], values[n][:count], strict=True)))
        for n, (_, row, count) in enumerate(told)
    }


def load_engine(
    target_dir: str | Path,
    draft_dir: str | Path | None = None,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    slots: int = 8,
    blocks: int | None = None,
    memory_bytes: int | None = None,
    block_size: int = 16,
    max_length: int = 1024,
    max_draft_len: int = 8,
    deterministic: bool | None = None,
    prefill_chunk: int = 512,
    draft_len: Literal["auto"] | int = "auto",
    host_bytes: int = 2 * 2**30,
    calibrate: bool = True,
    lean: bool = True,
    drafter: Literal["auto", "model", "lookup", "none"] = "auto",
    prefix_reuse_tokens: int = 0,
    trust_remote_code: bool = False,
    synthetic_acceptance: float | None = None,
) -> SpeculativeEngine:
    """Load a model pair and return its engine.

    Raises ModelError in one sentence, or ValueError for a bad option.

    `blocks` is the size of each KV pool; without it, as many as `memory_bytes` hold for target and draft
    together; without both, enough for every slot to hold a context of `max_length`. `deterministic` None
    means: in float32; in bfloat16 it needs `kernels`. `lean` False runs models of the Llama family through
    transformers too. `drafter` auto: the draft model, or prompt lookup without one. `synthetic_acceptance`
    makes the text nonsense; no setting of the worker sets it.
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, not {dtype!r}")
    torch_dtype: torch.dtype = getattr(torch, dtype)
    try:
        torch_device = torch.device(device)
        torch.empty(0, device=torch_device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    if drafter == "model" and draft_dir is None:
        raise ValueError("drafter model needs a draft model")
    if drafter in ("lookup", "none"):
        draft_dir = None  # it would not be used
    target_path, draft_path = Path(target_dir), Path(draft_dir) if draft_dir is not None else None
    if deterministic is None:
        deterministic = torch_dtype == torch.float32
    elif deterministic and torch_dtype == torch.float16:
        raise ValueError("deterministic needs dtype float32 or bfloat16, not float16")
    target = load_packed(
        target_path,
        role="target",
        dtype=torch_dtype,
        device=torch_device,
        max_length=max_length,
        deterministic=deterministic,
        lean=lean,
        trust_remote_code=trust_remote_code,
    )
    if deterministic and torch_dtype != torch.float32 and not (target.all_by_kernels and target.independent):
        raise ModelError(
            f"deterministic in {dtype} needs a target of the Llama family, of sizes that are multiples of {kernels.PANEL}, on one thread of an x86 CPU with AVX2 "
            "and without AMX; leave the setting out, or use float32"
        )
    draft = None
    tokenizer = load_tokenizer(target_path)
    if draft_path is not None:
        # The draft's tokens are only guesses: its arithmetic may differ from batch to batch.
        draft = load_packed(
            draft_path,
            role="draft",
            dtype=torch_dtype,
            device=torch_device,
            max_length=max_length,
            deterministic=False,
            lean=lean,
            trust_remote_code=trust_remote_code,
        )
        check_pair(target, draft, tokenizer, load_tokenizer(draft_path))
    if blocks is None:
        token_bytes = sum(_bytes_per_token(model) for model in (target, draft) if model is not None)
        if memory_bytes is not None:
            blocks = memory_bytes // (token_bytes * block_size)
        else:
            blocks = slots * -(-(max_length + max_draft_len) // block_size)
    eos_ids = end_of_sequence_ids(target.model)
    names = [
        NOISE_VERSION,
        dtype,
        str(deterministic),
        fingerprint(target_path),
        fingerprint(draft_path) if draft_path else "-",
        *(() if synthetic_acceptance is None else (f"synthetic-{synthetic_acceptance}",)),
    ]
    engine = SpeculativeEngine(
        target,
        draft,
        EngineOptions(
            slots=slots,
            target_blocks=blocks,
            draft_blocks=blocks if draft is not None else 0,
            block_size=block_size,
            max_length=max_length,
            max_draft_len=max_draft_len,
            prefill_chunk=prefill_chunk,
            draft_len=None if draft_len == "auto" else draft_len,
            deterministic=deterministic,
            host_bytes=host_bytes,
            drafter=None if drafter == "none" else Drafter.MODEL if draft is not None else Drafter.LOOKUP,
            prefix_reuse_tokens=prefix_reuse_tokens,
            synthetic_acceptance=synthetic_acceptance,
        ),
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        formats=Formats(target_path / "tokenizer.json", target.shape.vocab_size, eos_ids)
        if tokenizer is not None
        else None,
        fingerprint=hashlib.blake2b(":".join(names).encode(), digest_size=16).hexdigest(),
    )
    if calibrate:
        engine.calibrate(CALIBRATION_S if draft_len == "auto" else 0.0)
    return engine


def _bytes_per_token(model: PackedModel) -> int:
    shape = model.shape
    return 2 * shape.layers * shape.kv_heads * shape.head_size * model.dtype.itemsize
