"""The engine: the table of its requests, and rounds over them. See `interface` for the contract.

    context      t_0 ... t_{n-2} | t_{n-1} | d_1 ... d_g |
    draft feeds    (what it lacks)  t_{n-1}  d_1 .. d_{g-1}      proposes d_1 ... d_g
    target feeds                    t_{n-1}  d_1 ...... d_g      chooses  c_1 ... c_{g+1}
    accepted     a = number of leading i with d_i = c_i
    new tokens   c_1 ... c_{a+1}                                 the last one is the bonus (or the correction)
    KV valid     [0, n + a)                                      all tokens but the last; entries of rejected
                                                                 draft tokens are overwritten later

All running requests share one target forward, each with its own g; prefill chunks ride along in it. The token
that the target chooses depends on (tokens before it, sampling, seed, position) and nothing else; draft, batch
and schedule only decide how many are found per round. The phases of a round are in `round`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf

import torch

from worker_svc.engine.cache.prompts import ContextNames
from worker_svc.engine.calibration import measure_draft_steps, measure_prefill, measure_rounds
from worker_svc.engine.draft_lengths.acceptance import Acceptance
from worker_svc.engine.draft_lengths.chooser import DraftLengths
from worker_svc.engine.interface import (
    CacheChanges,
    Capacity,
    ComputedBy,
    DeviceFailed,
    Drafter,
    OutOfMemory,
    PromptLogprobs,
    RoundResult,
    SequenceStatus,
    Specification,
    UnknownRequest,
    check_run,
    check_specification,
)
from worker_svc.engine.length_probe.probe import LengthProbe
from worker_svc.engine.models.model import PackedModel
from worker_svc.engine.models.tokenizer import Tokenizer
from worker_svc.engine.options import EngineOptions
from worker_svc.engine.pair import ModelPair
from worker_svc.engine.proposers.lookup import Lookup
from worker_svc.engine.round.step import Rounds
from worker_svc.engine.sampling import counter
from worker_svc.engine.sampling.formats import Formats
from worker_svc.engine.sampling.restrictions import restrictions_of
from worker_svc.engine.sampling.stopping import StopText, stop_text_of
from worker_svc.engine.sequence import Sequence


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
        vocabulary: bytes = b"",
        formats: Formats | None = None,
        probe: LengthProbe | None = None,
    ) -> None:
        """`probe` predicts the output lengths that remain, by hidden states of the target; None: it is
        off."""
        self.options = options
        self.fingerprint = fingerprint
        self.facts: tuple[str, ...] = ()
        self.computed_by = ComputedBy(target.path, str(target.dtype).removeprefix("torch."), 0)
        self._tokenizer = tokenizer
        self._formats = formats
        self._pair = ModelPair(target, draft, options, eos_ids)
        self.capacity = Capacity(
            slots=options.slots,
            target_blocks=options.target_blocks,
            draft_blocks=options.draft_blocks,
            block_size=options.block_size,
            max_length=options.max_length,
            max_draft_len=0 if options.drafter is None else options.max_draft_len,
            vocab_size=self._pair.vocab_size,
            device=str(self._pair.device),
            vocabulary=vocabulary,
        )
        self.rounds = Rounds(self._pair, options, probe)
        self._sequences: dict[str, Sequence] = {}

    @property
    def length_probe(self) -> LengthProbe | None:
        """The predictor of output lengths; None: there is none, or it has failed."""
        return self.rounds.remaining.probe

    @property
    def all_by_kernels(self) -> bool:
        """True if both models are computed by `kernels`, from tokens to logits."""
        return all(
            model.all_by_kernels for model in (self._pair.target, self._pair.draft) if model is not None
        )

    @property
    def lengths(self) -> DraftLengths:
        """The choice of draft lengths, with what it has learnt."""
        return self.rounds.lengths

    @lengths.setter
    def lengths(self, lengths: DraftLengths) -> None:
        self.rounds.lengths = lengths

    @property
    def free_blocks(self) -> tuple[int, int]:
        """The free blocks of the target's pool and of the draft's."""
        return self._pair.free_blocks

    # -- requests --------------------------------------------------------------------------------------------

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
        pools, has_draft = self._pair.pools, self._pair.draft is not None
        drafter = spec.drafter or self.options.drafter
        by_model = has_draft and drafter is not Drafter.LOOKUP
        looks_up = not by_model or drafter is Drafter.EITHER
        self._sequences[spec.request_id] = Sequence(
            spec=spec,
            tokens=[*spec.prompt_ids, *spec.committed_ids],
            target=pools[0].new_table(),
            draft=pools[1].new_table() if has_draft else None,
            stop_text=self._stop_text(spec),
            acceptance=Acceptance(),
            found=Acceptance(),
            seed_key=counter.mix64(spec.sampling.seed),
            names=ContextNames(spec.cache_salt),
            by_model=by_model,
            lookup=Lookup() if looks_up and self.capacity.max_draft_len else None,
            format=state,
            restrictions=restrictions_of(spec, self._pair.eos_ids),
            # An output that may not end by itself has max_tokens tokens.
            watched=None
            if self.length_probe is None or spec.ignore_eos
            else self.length_probe.watch(len(spec.prompt_ids)),
            prompt_logprobs=None
            if spec.prompt_logprobs is None or spec.committed_ids
            else PromptLogprobs(min(spec.prompt_logprobs, self.capacity.vocab_size)),
        )

    def _stop_text(self, spec: Specification) -> StopText | None:
        if self._tokenizer is None:
            return None
        decode = self._tokenizer.decode if spec.skip_special_tokens else self._tokenizer.decode_all
        return stop_text_of(spec, decode)

    def drop(self, request_id: str) -> None:
        """Forget a request and free what it holds; an unknown id is fine."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._pair.release(sequence)

    def swap_out(self, request_id: str) -> bool:
        """Move the KV of a request to host memory, the draft's only if that fits too.

        Returns False, and changes nothing, if the host budget is full, or there is no memory for the copy.
        """
        sequence = self._get(request_id)
        room = self.options.host_bytes - sum(other.swapped_bytes for other in self._sequences.values())
        try:
            return self._pair.swap_out(sequence, room)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False

    def evict(self, request_id: str) -> None:
        """Discard the KV of a request; its tokens stay known."""
        self._pair.release(self._get(request_id))

    def status(self, request_id: str) -> SequenceStatus:
        """Return the progress of a request. Raises UnknownRequest."""
        sequence = self._get(request_id)
        draft_blocks = len(sequence.draft.blocks) if sequence.draft else 0
        return SequenceStatus(
            sequence.residency,
            len(sequence.tokens),
            len(sequence.target.blocks),
            draft_blocks,
            self.rounds.prefill.shared_blocks(sequence),
        )

    def expect(self, waiting: SequenceOf[str]) -> None:
        """Count as shared, in each `status`, what these requests will find and others hold."""
        self.rounds.prefill.expect([self._get(name) for name in waiting])

    def known(self) -> frozenset[str]:
        """Return the ids of all requests that were added and not dropped."""
        return frozenset(self._sequences)

    def cached_blocks(self) -> bytes:
        """Return the names of all prompt blocks whose KV it has, the most recently used last."""
        return self.rounds.prefill.prompts.held()

    def cache_changes(self) -> CacheChanges:
        """Return the changes of `cached_blocks` since the last call."""
        return self.rounds.prefill.prompts.changes()

    def check(self) -> None:
        """Assert that every block is free, cached or held, and that a writable block has a single holder."""
        self._pair.check([*self._sequences.values()])

    def _get(self, request_id: str) -> Sequence:
        try:
            return self._sequences[request_id]
        except KeyError:
            raise UnknownRequest(request_id) from None

    # -- rounds ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def round(self, run: SequenceOf[str]) -> RoundResult:
        """Run one draft and verify step over exactly these requests.

        See `interface.Engine.round` for the errors.
        """
        started = time.perf_counter()
        finished = {name for name in run if name in self._sequences and self._sequences[name].finished}
        check_run(run, self._sequences.keys(), finished, self.options.slots)
        sequences = [self._sequences[name] for name in run]
        # Those without blocks on the device, and their copies in host memory.
        absent = [(sequence, sequence.swapped) for sequence in sequences if not sequence.target.blocks]
        try:
            return self._run(sequences, started)
        except Exception:
            # Blocks that the round took for them would hold nothing, and no report of a round names them.
            for sequence, swapped in absent:
                self._pair.release(sequence)
                sequence.swapped = swapped
            raise

    def _run(self, sequences: SequenceOf[Sequence], started: float) -> RoundResult:
        """Run a round, with less prefill while the device has no memory for it. Raises as `round` does."""
        drafts = [(table, table.length) for table in (s.draft for s in sequences) if table is not None]
        while True:
            try:
                return self.rounds.run(sequences, started)
            except Exception as error:
                # Tokens and the target's lengths change in the last phase only, and entries after a length do
                # not count, so that only the draft's lengths must be restored.
                for table, length in drafts:
                    table.length = length
                    if length < table.first_writable:  # it found its start in this round
                        self._pair.pools[1].release(table)
                if not is_out_of_memory(error):
                    if "CUDA error" in str(error):  # sticky: every later call fails too
                        raise DeviceFailed(str(error).splitlines()[0]) from error
                    raise
                shortage = str(error).strip().splitlines()[:1] or [type(error).__name__]
            if self._pair.device.type == "cuda":
                torch.cuda.empty_cache()
            if not self.rounds.prefill.shrink(max(len(s.tokens) - s.kv_length for s in sequences)):
                raise OutOfMemory(
                    f"the device has no memory for a round of {len(sequences)} requests: {shortage[0]}"
                )

    def calibrate(self, budget_s: float) -> None:
        """Measure forwards of every size that rounds have, before any `add`.

        It takes about `budget_s` of wall clock, but each size is measured at least twice. The first request
        finds a warm device, and the first draft lengths and prefill chunks rest on measured costs.
        """
        pair, slots, length = self._pair, self.options.slots, self.options.max_length
        deadline = time.monotonic() + budget_s
        if pair.draft is not None:
            self.lengths.step = measure_draft_steps(
                pair.draft,
                slots=slots,
                max_length=length,
                clock=pair.clock,
                deadline=deadline - budget_s / 2,
            )
        deepest = 1 + self.capacity.max_draft_len
        self.lengths.set_plain(
            measure_rounds(
                pair.target,
                slots=slots,
                deepest=deepest,
                max_length=length,
                clock=pair.clock,
                deadline=deadline - budget_s / 4,
            )
        )
        self.rounds.prefill.time.token = measure_prefill(
            pair.target,
            self.lengths.round_s(1, 0, drafts=False),
            max_length=length,
            clock=pair.clock,
            deadline=deadline,
        )


def is_out_of_memory(error: Exception) -> bool:
    """Return True for a shortage of memory, which the allocators of the CPU and of pinned memory report in their
    messages only."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError)
        and any(words in str(error) for words in ("t allocate memory", "CUDA error: out of memory"))
    )
