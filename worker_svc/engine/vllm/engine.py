"""The engine over vLLM's engine core, in this process; ranks of tensor parallelism are vLLM's own processes.

A round is one step of the core, and vLLM's scheduler (`scheduler.Rounds`) runs the requests that the round
names. With async scheduling `round` returns the outcome of the round before (`Capacity.lag`), and the
device does not wait for the choice of the next one.

    EngineCore                     vLLM: scheduler, KV blocks, model runner
      Rounds                       the requests of a round; the others are paused and keep their KV
      coupling, coupled_noise      the choice of tokens, so that equal seeds give equal text

An exception of a step leaves vLLM's scheduler and its model runner in different states, so that every one is
`DeviceFailed`: the process ends, and a new one continues from committed tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from laps_sd.contract.ends import End
from worker_svc.engine.facts import facts
from worker_svc.engine.interface import (
    NO_CHANGES,
    CacheChanges,
    Capacity,
    ComputedBy,
    DeviceFailed,
    OutOfBlocks,
    RequestRound,
    Residency,
    RoundResult,
    SequenceStatus,
    Specification,
    UnknownRequest,
    check_run,
    check_specification,
)
from worker_svc.engine.length_probe.outcome import with_prediction
from worker_svc.engine.length_probe.probe import LengthProbe
from worker_svc.engine.models.errors import first_line
from worker_svc.engine.sampling.restrictions import restrictions_of
from worker_svc.engine.sampling.stopping import Decode, stop_text_of
from worker_svc.engine.vllm.cached import follow_cache
from worker_svc.engine.vllm.coupling import couple
from worker_svc.engine.vllm.grammars import follow_grammar, wait_for_a_grammar
from worker_svc.engine.vllm.known import Known
from worker_svc.engine.vllm.outcome import Step, report
from worker_svc.engine.vllm.parameters import Rules, TokenChooser
from worker_svc.engine.vllm.scheduler import OverlappedRoundScheduler, Planned, Rounds
from worker_svc.engine.vllm.step_time import StepTime

__all__ = ["VllmEngine"]

GRAMMAR_WAIT_S = 0.01
"""Longest time that a round with nothing to compute waits for a grammar: the caller would begin the next one at
once."""


class VllmEngine:
    """An `interface.Engine` over an engine core; see the top of this file.

    `share_prefixes`: KV of the same beginning is shared between requests of equal salt; a request always finds
    its own again. `decode` makes stop strings work, `decode_all` those of requests whose special tokens have
    text; `formats`: vLLM has a tokenizer for output formats. `probe` predicts
    output lengths by hidden states after the last layer; only where `coupling` replaces the sampler.
    `max_round_s` bounds the time of rounds that compute context (`StepTime`); `adapters` are loaded.
    """

    def __init__(
        self,
        core: EngineCore,
        rules: Rules,
        *,
        slots: int,
        fingerprint: str,
        vocabulary: bytes = b"",
        decode: Decode | None = None,
        decode_all: Decode | None = None,
        formats: bool = True,
        share_prefixes: bool = True,
        max_round_s: float | None = None,
        probe: LengthProbe | None = None,
        adapters: Mapping[str, LoRARequest] | None = None,
        models: str = "",
    ) -> None:
        self.fingerprint = fingerprint
        self.length_probe = probe
        self._core = core
        self._rules = rules
        self._decode = decode
        self._decode_all = decode_all if decode_all is not None else decode
        self._formats = formats
        self._share_prefixes = share_prefixes
        self._adapters = adapters or {}
        self._known: dict[str, Known] = {}
        self._names: dict[str, str] = {}
        """Ids of unfinished requests by those that vLLM has for them."""
        self._added = 0
        self._busy_since_s = 0.0
        self._failure = ""
        config, scheduler = core.vllm_config, self._scheduler
        lag = int(isinstance(scheduler, OverlappedRoundScheduler))
        self.capacity = Capacity(
            slots=slots,
            target_blocks=scheduler.pool_blocks,
            draft_blocks=0,
            block_size=scheduler.block_size,
            max_length=config.model_config.max_model_len,
            max_draft_len=scheduler.num_spec_tokens,
            vocab_size=config.model_config.get_vocab_size(),
            device=str(config.device_config.device_type),
            # With a round in flight a request may have grown by as much again when the next one begins.
            lookahead=scheduler.num_lookahead_tokens + lag * (1 + scheduler.num_spec_tokens),
            lag=lag,
            vocabulary=vocabulary,
            adapters=frozenset(self._adapters),
        )
        words = (
            f"vLLM on {self.capacity.device}, because LAPS_SD_ENGINE=vllm; tokens are chosen by "
            + ("vLLM's sampler" if rules.chooser is TokenChooser.VLLM else "seed and position")
            + (
                f"; up to {self.capacity.max_draft_len} draft tokens a round"
                if rules.speculates
                else "; no draft tokens"
            )
            + (f"; adapters {', '.join(sorted(self._adapters))}" if self._adapters else "")
        )
        self.facts = facts(models, words, self.capacity)
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        self.computed_by = ComputedBy("vllm", dtype, 0)
        if max_round_s is not None:
            growth = 1 + self.capacity.max_draft_len
            scheduler.times = StepTime(max_round_s, rows=slots * growth, max_length=self.capacity.max_length)
        self._cached = follow_cache(scheduler) if share_prefixes else None
        if rules.chooser is TokenChooser.REPLACED:
            couple(core.model_executor.driver_worker.worker.model_runner, self._known)

    @property
    def free_blocks(self) -> tuple[int, int]:
        """The free blocks of the pool, and 0: KV of a draft lies in the same blocks."""
        return self._scheduler.free_blocks(), 0

    @property
    def _scheduler(self) -> Rounds:
        scheduler: Rounds = self._core.scheduler
        return scheduler

    # -- requests --------------------------------------------------------------------------------------------

    def add(self, spec: Specification) -> None:
        """Make a request known. Raises ValueError naming the field and its limit."""
        if spec.request_id in self._known:
            raise ValueError(f"request_id {spec.request_id!r} is known already")
        check_specification(spec, self.capacity)
        if spec.stop and self._decode is None:
            raise ValueError("stop needs a tokenizer, and this model has none")
        if spec.format is not None and not self._formats:
            raise ValueError("format needs a tokenizer, and this model has none")
        self._rules.check(spec)
        committed = list(spec.committed_ids)
        as_prompt = [] if self._rules.second_runner else committed
        request, _ = self._core.preprocess_add_request(
            EngineCoreRequest(
                request_id=self._new_name(spec.request_id),
                prompt_token_ids=[*spec.prompt_ids, *as_prompt],
                mm_features=None,
                sampling_params=self._rules.parameters(spec),
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=self._adapters.get(spec.adapter),
                cache_salt=(spec.cache_salt or None) if self._share_prefixes else spec.request_id,
                data_parallel_rank=None,
            )
        )
        if committed and not as_prompt:
            request.append_output_token_ids(committed)
        follow_grammar(request, committed)
        self._core.add_request(request)
        self._names[request.request_id] = spec.request_id
        decode = self._decode if spec.skip_special_tokens else self._decode_all
        stop_text = stop_text_of(spec, decode) if decode is not None else None
        self._known[spec.request_id] = Known(
            spec,
            committed,
            stop_text,
            request,
            taken=request.num_output_tokens,
            restrictions=restrictions_of(spec, self._rules.eos_ids),
            watched=None
            if self.length_probe is None or spec.ignore_eos
            else self.length_probe.watch(len(spec.prompt_ids)),
        )

    def _new_name(self, request_id: str) -> str:
        """Return vLLM's id for a request. What a step in flight brings for a dropped request must not count
        for one that is added again under the same id, and vLLM keeps a dropped one until its KV is loaded.
        """
        if self._rules.chooser is TokenChooser.REPLACED:
            return request_id  # the coupling finds requests by it
        self._added += 1
        return f"{request_id}~{self._added}"

    def drop(self, request_id: str) -> None:
        """Forget a request and free what it holds; an unknown id is fine."""
        known = self._known.pop(request_id, None)
        if known is not None and known.request is not None:
            self._core.abort_requests([known.request.request_id])
            del self._names[known.request.request_id]

    def swap_out(self, request_id: str) -> bool:
        """Return whether the KV of a request is off the device; it stays where it is.

        vLLM moves KV to host memory by itself, after an eviction, where its `kv_offloading_size` is set.
        """
        return self.status(request_id).residency is not Residency.DEVICE

    def evict(self, request_id: str) -> None:
        """Discard the KV of a request; vLLM's prefix cache may still have it when it runs again."""
        request = self._get(request_id).request
        if request is not None and request.status == RequestStatus.RUNNING:
            self._scheduler.evict(request)

    def expect(self, waiting: Sequence[str]) -> None:
        """Look up nothing: a request without KV counts as a whole (docs/decisions/0059)."""

    def status(self, request_id: str) -> SequenceStatus:
        """Return the progress of a request. Raises UnknownRequest."""
        known = self._get(request_id)
        request = known.request
        if request is None or request.status != RequestStatus.RUNNING:
            return SequenceStatus(Residency.NONE, known.tokens, 0, 0)
        blocks, shared = self._scheduler.held_and_shared(request)
        return SequenceStatus(Residency.DEVICE, known.tokens, blocks, 0, shared)

    def known(self) -> frozenset[str]:
        """Return the ids of all requests that were added and not dropped."""
        return frozenset(self._known)

    def check(self) -> None:
        """Assert that blocks are free, are freed after a step in flight, or are held by requests; a shared one
        counts once.
        """
        scheduler = self._scheduler
        groups = [blocks for _, blocks in scheduler.deferred_frees]
        for name in scheduler.requests:
            groups += scheduler.kv_cache_manager.get_blocks(name).blocks
        held = {block.block_id for group in groups for block in group if not block.is_null}
        pool = scheduler.kv_cache_manager.block_pool
        assert len(held) + pool.get_num_free_blocks() == scheduler.kv_cache_config.num_blocks - 1

    def cached_blocks(self) -> bytes:
        """Return the names of all prompt blocks whose KV it has, the most recently used last; see `cached`."""
        return b"" if self._cached is None else self._cached.prompts.held()

    def cache_changes(self) -> CacheChanges:
        """Return the changes of `cached_blocks` since the last call."""
        return NO_CHANGES if self._cached is None else self._cached.prompts.changes()

    def _get(self, request_id: str) -> Known:
        try:
            return self._known[request_id]
        except KeyError:
            raise UnknownRequest(request_id) from None

    # -- a round ---------------------------------------------------------------------------------------------

    def round(self, run: Sequence[str]) -> RoundResult:
        """Begin one step over exactly these requests, and return the oldest one that is over.

        See `interface.Engine.round` for the errors; every exception of vLLM is `DeviceFailed`.
        """
        now_s = time.perf_counter()
        if self._failure:
            raise DeviceFailed(self._failure)
        finished = {name for name in run if name in self._known and self._known[name].request is None}
        check_run(run, self._known.keys(), finished, self.capacity.slots)
        scheduler = self._scheduler
        if not scheduler.in_flight:
            self._busy_since_s = now_s
            if not run:
                return RoundResult((), free_target_blocks=scheduler.free_blocks())
        scheduler.plan(self._planned(run))
        outputs = self._step(len(run))
        return self._result(scheduler.over, outputs)

    def _planned(self, run: Sequence[str]) -> Planned:
        """Return the plan of a round. Raises OutOfBlocks if requests must be evicted for it."""
        requests = [request for name in run if (request := self._known[name].request) is not None]
        if not self.capacity.lag:
            # With async scheduling draft tokens stay on the device, and how many there are is vLLM's choice.
            for name, request in zip(run, requests, strict=True):
                request.spec_token_ids = request.spec_token_ids[: self._known[name].draft_room]
        fitting, joining = self._fitting(requests), self._scheduler.loaded(requests)
        chosen = [*fitting, *joining]
        decoding = (r.request_id for r in chosen if r.num_computed_tokens >= r.num_tokens - 1)
        return Planned(requests, fitting, joining, frozenset(decoding))

    def _result(self, over: Planned | None, outputs: dict[str, Any]) -> RoundResult:
        """Return the outcome of a round that is over, without requests that ended before it did, or were
        dropped.
        """
        if over is None:
            return RoundResult((), free_target_blocks=self._scheduler.free_blocks())
        reports = []
        for request in [*over.run, *(one for one in over.joining if one.request_id in over.rows)]:
            name = self._names.get(request.request_id)
            if name is None:
                continue
            found_cached = over.found_cached.get(request.request_id, 0)
            if found_cached and self._cached is not None:
                self._cached.used(request, found_cached)
            made = outputs.get(request.request_id)
            step = Step(
                over.rows.get(request.request_id),
                request.request_id in over.decoding,
                found_cached,
                None if made is None else made.new_logprobs,
                None if made is None else made.new_prompt_logprobs_tensors,
                not self._rules.speculates,
            )
            reports.append(self._report(name, step))
        if over.run and not over.rows:
            wait_for_a_grammar(over.run, GRAMMAR_WAIT_S)
        now_s = time.perf_counter()
        total_s, self._busy_since_s = now_s - self._busy_since_s, now_s
        prefill_s = total_s * self._prefill_share(over, total_s)
        return RoundResult(
            tuple(reports),
            verify_s=total_s - prefill_s,
            prefill_s=prefill_s,
            total_s=total_s,
            limit_s=over.limit_s,
            # After the reports: those that end a request free its blocks.
            free_target_blocks=self._scheduler.free_blocks(),
        )

    def _prefill_share(self, over: Planned, total_s: float) -> float:
        """Return the share of a round that its context took, and learn from the time of the round."""
        times = self._scheduler.times
        computed = sum(row.computed for row in over.rows.values())
        chunks = [over.chunks[name] for name in over.rows if name in over.chunks]
        if times is None:
            return sum(chunk.tokens for chunk in chunks) / (computed or 1)
        times.observe(over.plain, chunks, total_s)
        return times.prefill_share(over.plain, chunks)

    def _fitting(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return those of these requests that the next step has blocks for. The others wait for steps that free
        some.

        Raises OutOfBlocks if these are too few: vLLM would preempt a request of the step.
        """
        scheduler, fitting = self._scheduler, requests
        short = 0 if scheduler.surely_fits(requests) else scheduler.blocks_short(requests)
        if short > 0 and short > scheduler.freed_by_steps(requests):
            raise OutOfBlocks(
                f"the KV pool has {scheduler.free_blocks()} free blocks and this round needs {short} more"
            )
        while short > 0:
            fitting = fitting[:-1]
            short = scheduler.blocks_short(fitting)
        if scheduler.residents_over(fitting) > 0:
            raise OutOfBlocks(
                f"vLLM has {scheduler.max_num_running_reqs} places for requests with KV"
                " (LAPS_SD_VLLM_RESIDENTS), and this round needs more"
            )
        return fitting

    def _step(self, count: int) -> dict[str, Any]:
        """Run one step of vLLM and return its outputs by request."""
        try:
            core = self._core
            outputs, executed = core.step_with_batch_queue() if self.capacity.lag else core.step()
            core.post_step(executed)
        except Exception as error:
            self._failure = f"a step of vLLM failed: {first_line(error)}"
            if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
                self._failure = (
                    f"the device has no memory for a step of {count} requests: {first_line(error)}; lower"
                    " LAPS_SD_SLOTS, LAPS_SD_PREFILL_CHUNK, or gpu_memory_utilization in LAPS_SD_VLLM_ARGS"
                )
            raise DeviceFailed(self._failure) from error
        return {one.request_id: one for made in (outputs or {}).values() for one in made.outputs}

    def _with_prediction(
        self, probe: LengthProbe, known: Known, result: RequestRound, step: Step
    ) -> RequestRound:
        """Return the report with a prediction, if there is one. A failure ends predictions, and nothing else."""
        hidden, known.hidden = known.hidden, None
        sampled = step.row is not None and bool(step.row.sampled)  # its context is complete
        if known.watched is None:
            return result
        try:
            return with_prediction(
                probe, known.watched, result, hidden if sampled else None, known.spec.max_tokens
            )
        except Exception:
            logging.getLogger(__name__).exception(
                "the probe failed: no output lengths are predicted any more"
            )
            self.length_probe = None
            return result

    def _report(self, name: str, step: Step) -> RequestRound:
        known = self._known[name]
        request = known.request
        assert request is not None
        result = report(known, request, step)
        if self.length_probe is not None:
            result = self._with_prediction(self.length_probe, known, result, step)
        if result.finish is not None:
            if not request.is_finished():
                self._core.abort_requests([request.request_id])
            del self._names[request.request_id]
            known.request = known.tally = None
            if result.finish is End.ERROR:
                known.logprobs = []
        return result
