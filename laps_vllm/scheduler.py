"""LAPS-SD inside one vLLM server: `vllm serve MODEL --scheduler-cls laps_vllm.LapsScheduler`.

The scheduling core and `choose` decide the requests of each step; `Pausing` makes vLLM's scheduler run them.
`--max-num-active-seqs` is the size of a step, `--max-num-seqs` the number of resident requests (running and
paused with their KV). Under async scheduling a decision is made while the device works on the step before, on
ranks that are one step old.
"""

# ruff: noqa: E402 -- another version of vLLM may lack what is imported: its number is checked before

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import vllm

from laps_vllm.versions import check_names, check_version

check_version(vllm.__version__)

from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from laps_sd import __version__
from laps_sd.contract.ends import End
from laps_sd.service.config import load, unknown_sentences
from laps_vllm import known_faults
from laps_vllm.hints import hints_of
from laps_vllm.learnt_file import LearntFile
from laps_vllm.merged_steps import Step
from laps_vllm.metrics import Publisher
from laps_vllm.one_worker import MOST_REPORT_STEPS, OneWorker, RequestNow
from laps_vllm.pausing import LOADS, RUNNING, Pausing, Row, schedules_ahead
from laps_vllm.prompt_features import PromptFeatures, PromptTokens, PromptWords
from laps_vllm.settings import VllmSettings
from scheduler_svc.core import COMPILED
from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.events import RequestFacts, WorkerFacts
from scheduler_svc.core.policies import policy_named
from scheduler_svc.core.scheduler import Scheduler as Core
from scheduler_svc.core.settings import CoreSettings

__all__ = ["Laps", "LapsAsyncScheduler", "LapsScheduler", "LapsSyncScheduler"]

logger = init_logger("vllm.laps_sd")

ENDS = {
    RequestStatus.FINISHED_STOPPED: End.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: End.LENGTH,
    RequestStatus.FINISHED_REPETITION: End.STOP,
    RequestStatus.FINISHED_ABORTED: End.CANCELLED,
}
COMPILES = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
IDLES = RequestStatus.WAITING_FOR_STREAMING_REQ
READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
OBSERVE_S = 1.0
"""Time between two looks at the queue for the metrics."""
IDLE_KEEP_S = 1.0
"""Time between two copies of what was learnt when no request is left: the process may end now."""

JOIN_ONE_IN = 16
"""Places of a full step for each request that joins it at a time (decision 0054): our choice."""


class Laps(Pausing):
    """The decisions; mixed in before one of vLLM's two schedulers."""

    clock = staticmethod(time.monotonic)
    """Seconds; a simulation has its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = load(VllmSettings)
        rank = self.vllm_config.parallel_config.data_parallel_index
        self._learnt = LearntFile(settings.learnt_file, rank=rank) if settings.learnt_file else None
        # vLLM loads it for structured output, unless it was started with --skip-tokenizer-init.
        tokenizer = getattr(self.structured_output_manager, "tokenizer", None)
        features: PromptFeatures = (
            PromptWords(tokenizer, settings.length_key)
            if tokenizer is not None
            else PromptTokens(self.vllm_config.model_config.get_vocab_size())
        )
        if self._learnt is not None:
            priors, learnt = self._learnt.load(features.predictor)
        else:
            priors, learnt = Priors(features.predictor()), "forgotten at the end"
        self._features = features if settings.predict_lengths else None
        self._keep_s = settings.learnt_save_s
        core_settings = CoreSettings(reserved_share=settings.reserved_share)
        core = Core(policy_named(settings.policy, core_settings), core_settings, priors)
        # With a step in flight a request may have grown by as much again when the next one begins.
        steps = 1 + isinstance(self, AsyncScheduler)
        growth = steps * (1 + self.num_spec_tokens) + self.num_lookahead_tokens
        facts = WorkerFacts(
            worker_id=f"vllm-{rank}",
            slots=self.max_num_active_reqs,
            # vLLM has checked that its pool holds the longest context. Counted by group of layers it can look smaller,
            # and the core lists no request that fits no worker.
            target_blocks=max(self.pool_blocks, -(-(self.max_model_len + growth) // self.block_size)),
            draft_blocks=0,
            block_size=self.block_size,
            max_length=self.max_model_len,
            max_draft_len=self.num_spec_tokens,
        )
        self.one_worker = OneWorker(core, facts, growth_tokens=growth)
        self._publisher = Publisher(rank, each_time=self._save)
        self._sequence = 0
        self._last_end_s = self._decided_s = self.clock()
        self._observed_s = self._kept_s = self._last_end_s
        self._seen_pauses = self._seen_evictions = 0
        self._held_steps = 0
        """Steps for which waiting requests have been held back."""
        self._compiling: dict[str, Request] = {}
        """Requests whose grammar compiles. The core lists as many requests as two steps have, so all must be able
        to run."""
        self._known: dict[str, tuple[RequestStatus, int, int, RequestNow]] = {}
        """What `_now` returned last, by request, with the status and the tokens then: in all, and computed."""
        logger.info(
            "LAPS-SD %s: policy %s, steps of %d requests, %d resident, %s core, lengths are %s; what is learnt: %s;"
            " %s scheduling, up to %d draft tokens",
            __version__,
            settings.policy,
            facts.slots,
            self.max_num_running_reqs,
            "compiled" if COMPILED else "interpreted",
            f"predicted from the {features.source}" if settings.predict_lengths else "not predicted",
            learnt,
            "async" if isinstance(self, AsyncScheduler) else "synchronous",
            self.num_spec_tokens,
        )
        for warning in (*unknown_sentences(), *known_faults.warnings(self.vllm_config, vllm.__version__)):
            logger.warning("LAPS-SD: %s", warning)
        if self.max_num_running_reqs <= facts.slots:
            logger.warning(
                "LAPS-SD: --max-num-seqs is not above --max-num-active-seqs, so a request that is preempted loses its KV."
                " Set --max-num-seqs to the requests that may be resident, for example %d, and --max-num-active-seqs to"
                " the size of a step",
                4 * facts.slots,
            )

    # Requests.

    def add_request(self, request: Request) -> None:
        """Take in a new request, or further input of a session. To the core each turn of a session is a request."""
        session = self.requests.get(request.request_id)
        idle = session is not None and session.status is IDLES
        super().add_request(request)
        if session is None:
            if request.status is COMPILES and not self._can_join(request):
                self._compiling[request.request_id] = request
            else:
                self._arrive(request)
        elif idle and session.status is not IDLES and not session.is_finished():
            self._arrive(session)

    def _arrive(self, request: Request) -> None:
        """Report a request, or a turn of a session, to the core."""
        params = request.sampling_params
        hints = hints_of(params.extra_args if params is not None else None)
        metrics = self._publisher.metrics
        for name in hints.invalid:
            metrics.ignored_hints.labels(metrics.engine, name).inc()
        self._sequence += 1
        # vLLM ends a request at the model's longest context, whatever its limit.
        max_tokens = max(1, min(request.max_tokens, self.max_model_len - request.num_prompt_tokens))
        self.one_worker.arrived(
            RequestFacts(
                request_id=request.request_id,
                sequence=self._sequence,
                arrival_s=self.clock(),
                tenant="",
                priority=-request.priority,  # vLLM serves the smaller one first
                workload_class=hints.workload_class,
                prompt_tokens=min(request.num_prompt_tokens, self.max_model_len - max_tokens),
                max_tokens=max_tokens,
                expected_output_tokens=hints.expected_output_tokens,
                length_features=self._length_features(request),
            )
        )

    def _length_features(self, request: Request) -> bytes:
        """Return what the length of the output is predicted from; empty for a prompt of embeddings, which has
        no tokens, and if predictions are switched off.
        """
        ids = request.prompt_token_ids
        if not ids or self._features is None:
            return b""
        limit = request.max_tokens if request.max_tokens < self.max_model_len - len(ids) else None
        try:
            return self._features.features_of(ids, limit, request.structured_output_request is not None)
        except Exception as error:  # of any tokenizer; a request can do without a prediction
            logger.warning_once(
                "LAPS-SD: a prompt cannot be read, and its output gets no prediction (%s)",
                type(error).__name__,
            )
            return b""

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        """End requests that no step ended: cancelled, or stopped by a string that the API server found."""
        gone = super().finish_requests(request_ids, finished_status)
        for request in gone:
            self._compiling.pop(request.request_id, None)
            self._known.pop(request.request_id, None)
            self.one_worker.ended(request.request_id, _end_of(request, finished_status))
        return gone

    # Steps.

    def select(self) -> list[Request]:
        """Return the requests of the next step; see `Pausing`."""
        if self._pause_state != PauseState.UNPAUSED or self.blocked:
            # vLLM drains, or those that were chosen need what others hold, such as room for encoded images:
            # nothing new starts, and all that run go on.
            with_kv = [request for request in self.kv_holding_waiting if self._can_join(request)]
            by_rank = sorted([*self.running, *with_kv], key=self.rank_key)
            by_rank.sort(key=lambda request: request.request_id in self.blocked)
            return by_rank[: self.max_num_active_reqs]
        began_s = time.perf_counter()
        for request in [request for request in self._compiling.values() if self._can_join(request)]:
            self._arrive(self._compiling.pop(request.request_id))
        choice = self.one_worker.choose(self.clock(), self._now)
        for name in choice.evict:
            request = self.requests[name]
            if request.status is RUNNING:
                self.evict(request)
        self._publisher.metrics.decision_s.observe(time.perf_counter() - began_s)
        self._decided_s = self.clock()
        return [self.requests[name] for name in choice.run]

    def others(self) -> Iterable[Request]:
        """Return the requests of the assignment, best first; see `Pausing`."""
        return (self.requests[name] for name in self.one_worker.ranked(self._now))

    def is_reserved(self, request: Request) -> bool:
        """Return whether the request is one of the oldest, which have places of their own."""
        return self.one_worker.is_reserved(request.request_id)

    def ran_instead(self, run: Sequence[Request]) -> None:
        """Take in that these requests run in place of the selected ones."""
        self.one_worker.ran_instead([request.request_id for request in run])

    def _admitted(self, chosen: Sequence[Request]) -> list[Request]:
        """Return the waiting requests that join the step. Few of them wait for more to join a full step with
        them, `MOST_REPORT_STEPS` steps at most: a step with a prompt in it takes longer for all of its requests.
        """
        admitted = super()._admitted(chosen)
        places = self.max_num_active_reqs
        few = 0 < len(admitted) < places // JOIN_ONE_IN
        if few and len(chosen) == places and self._held_steps < MOST_REPORT_STEPS:
            self._held_steps += 1
            return []
        self._held_steps = 0
        return admitted

    def rank_key(self, request: Request) -> Any:
        """Return the request's rank; one that the core does not know comes last."""
        rank = self.one_worker.core.rank_of(request.request_id)
        return (rank.rank_class, rank.index_s) if rank is not None else (1 << 62, 0.0)

    def _now(self, request_id: str) -> RequestNow | None:
        """Return the state of a request that can run; see `OneWorker.choose`. This is called for each listed
        request in each step: one that neither ran nor lost its KV is looked at, and not read again.
        """
        request = self.requests.get(request_id)
        if request is None:
            return None
        status, tokens, computed = request.status, request.num_tokens, request.num_computed_tokens
        known = self._known.get(request_id)
        if known is not None and known[0] is status and known[1] == tokens and known[2] == computed:
            return known[3]
        if status is not RUNNING and not self._can_join(request):
            return None
        now = RequestNow(tokens, *self.held_and_shared(request))
        # What it shares changes when others come or go, and whether its KV has arrived without a change of its own.
        if not now.shared and (status is RUNNING or status in READY):
            self._known[request_id] = (status, tokens, computed, now)
        return now

    def _can_join(self, request: Request) -> bool:
        """Return whether a request that is not in `running` can take a place of the next step: it waits, or its
        KV has arrived."""
        status = request.status
        if status is COMPILES:
            wanted = request.structured_output_request
            return wanted is None or wanted.grammar is not None  # vLLM ends one whose grammar is wrong
        return status in READY or (status is LOADS and request.request_id in self.finished_recving_kv_req_ids)

    def observe(self, rows: list[Row], scheduler_output: Any) -> None:
        """Report a step that is over to the core."""
        now_s = self.clock()
        began_s = max(self._last_end_s, min(self._decided_s, now_s))
        steps = [_step(row) for row in rows]
        for step in steps:
            if step.end is not None:
                self._known.pop(step.request_id, None)
        computed = sum(row.computed for row in rows)
        prefill_share = sum(step.prefilled for step in steps) / computed if computed > 0 else 0.0
        total_s = now_s - began_s
        on_device = {request.request_id for request in self.running if request.num_computed_tokens}
        self.one_worker.report(
            steps,
            on_device,
            decode_s=total_s * (1 - prefill_share),
            prefill_s=total_s * prefill_share,
            free_blocks=self.free_blocks(),
        )
        for row in rows:
            if _turn_is_over(row) and row.request.status is not IDLES and not row.request.is_finished():
                self._arrive(row.request)  # the next turn has begun
        self._last_end_s = now_s
        self._count(now_s)

    def _count(self, now_s: float) -> None:
        metrics, worker = self._publisher.metrics, self.one_worker
        if not self.get_num_unfinished_requests():
            worker.decide(now_s)
        for judged in worker.judged:
            labels = (metrics.engine, judged.moment.value, judged.basis.value)
            metrics.estimate_error.labels(*labels).observe(judged.ratio)
            metrics.estimates_covered.labels(*labels).inc(judged.covered)
        worker.judged.clear()
        if worker.paused > self._seen_pauses:
            metrics.pauses.inc(worker.paused - self._seen_pauses)
            self._seen_pauses = worker.paused
        if self.evictions > self._seen_evictions:
            metrics.evictions.inc(self.evictions - self._seen_evictions)
            self._seen_evictions = self.evictions
        if now_s - self._observed_s >= OBSERVE_S or not self.requests:
            self._observed_s = now_s
            for level, depth in enumerate(worker.core.depth_by_level()):
                metrics.queue_depth.labels(metrics.engine, str(level)).set(depth)
            metrics.paused_now.set(sum(request.request_id not in worker.ran for request in self.running))
        if self._learnt is not None and now_s - self._kept_s >= (
            self._keep_s if self.requests else IDLE_KEEP_S
        ):
            self._kept_s = now_s
            self._learnt.keep(worker.core.priors)

    def _save(self) -> None:
        if self._learnt is None:
            return
        try:
            self._learnt.save()
        except OSError as error:
            logger.warning("LAPS-SD: what was learnt cannot be written to %s: %s", self._learnt.path, error)

    def shutdown(self) -> None:
        """Save what was learnt, and stop. vLLM does not call this when it ends its processes by a signal."""
        if self._learnt is not None:
            self._learnt.keep(self.one_worker.core.priors)
        self._save()
        self._publisher.close()
        super().shutdown()


def _step(row: Row) -> Step:
    """Return a row as a step, with its tokens cut as vLLM cut them at an end."""
    request, computed, drafted, sampled, position, _ = row
    status, emitted, end = request.status, request.num_output_tokens, None
    if status is not RUNNING and request.is_finished():
        end = ENDS.get(status, End.ERROR)
    elif _turn_is_over(row):
        end = End.STOP
        if status is not IDLES:  # the output is a part of the next turn's prompt
            emitted = position + len(sampled)
        elif emitted >= request.max_tokens:
            end = End.LENGTH
    return Step(
        request.request_id,
        position,
        min(len(sampled), emitted - position),
        drafted,
        row.accepted if drafted else 0,
        max(0, computed - drafted - 1) if sampled else computed,
        end,
    )


def _turn_is_over(row: Row) -> bool:
    """Return whether a turn of a session ended in this step."""
    request = row.request
    return request.resumable and (request.status is IDLES or request.num_prompt_tokens != row.prompt)


def _end_of(request: Request, status: RequestStatus) -> End:
    """Return the end of a request that the API server ended. It searches the text for stop strings, and
    aborts the request at one: an abort of a request that has stop strings and output counts as that, though
    now and then a client left."""
    params = request.sampling_params
    if (
        status is RequestStatus.FINISHED_ABORTED
        and params is not None
        and params.stop
        and request.num_output_tokens
    ):
        return End.STOP_SEQUENCE
    return ENDS.get(status, End.ERROR)


class LapsSyncScheduler(Laps, Scheduler):
    """Without async scheduling."""


class LapsAsyncScheduler(Laps, AsyncScheduler):
    """With async scheduling."""


def LapsScheduler(*args: Any, **kwargs: Any) -> Laps:
    """Return the scheduler for this configuration: what `--scheduler-cls` names. Raises VersionError."""
    check_names(vllm.__version__, Scheduler, Request, SchedulerOutput, KVCacheManager, BlockPool)
    cls = LapsAsyncScheduler if schedules_ahead(*args, **kwargs) else LapsSyncScheduler
    return cls(*args, **kwargs)
