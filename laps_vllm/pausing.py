"""A vLLM scheduler whose steps run exactly the requests that `select` names; others are paused and keep their KV.

Nothing of vLLM's `schedule` is copied. Before it runs, requests that pause are taken out of `running`, and of
the waiting ones it sees only those that `select` named; afterwards they are put back. This uses five names of
vLLM's scheduler (`running`, `waiting`, `schedule`, `_preempt_request`, `update_from_output`), its queue of
requests that wait with KV (`kv_holding_waiting`: loaded by a connector, or further input of a session; vLLM
admits these before the others), counters of `Request` and of the block pool, and the limits of a step;
`laps_vllm.versions` checks them at start.

vLLM itself may leave a running request out of a step: it only iterates `running`, and blocks are freed only
by a preemption and at the end. `max_num_seqs` bounds the resident requests (running and paused), and
`max_num_active_seqs` those of one step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from laps_sd.contract.choose import SharedBlocks, shared_runs

__all__ = ["LOADS", "RUNNING", "Pausing", "Row", "Window", "schedules_ahead"]

LOADS = RequestStatus.WAITING_FOR_REMOTE_KVS
RUNNING = RequestStatus.RUNNING
"""Looked up once: Python 3.11 calls a function for each member of an enum, which counts for each request of
each step."""


def schedules_ahead(*args: Any, **kwargs: Any) -> bool:
    """Return whether a scheduler with these arguments of vLLM's is for async scheduling. vLLM does not check
    its class: a plain Scheduler under async scheduling, the default on GPUs, never gets a draft token.
    """
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    return bool(config.scheduler_config.async_scheduling)


class Window(RequestQueue):
    """All waiting requests. vLLM's `schedule` sees those in the window only, in the window's order."""

    def __init__(self) -> None:
        self.all: dict[str, Request] = {}
        self._shown: deque[Request] = deque()

    def show(self, requests: Iterable[Request]) -> None:
        """Show these requests, best first."""
        self._shown = deque(requests)

    def those_of(self, requests: Iterable[Request]) -> list[Request]:
        """Return those of these requests that wait here, in the same order."""
        return [request for request in requests if request.request_id in self.all]

    def add_request(self, request: Request) -> None:
        """Add a request, not shown."""
        self.all[request.request_id] = request

    def prepend_request(self, request: Request) -> None:
        """Add a request, not shown."""
        self.all[request.request_id] = request

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Add requests, not shown."""
        for request in requests:
            self.all[request.request_id] = request

    def pop_request(self) -> Request:
        """Remove and return the first one shown."""
        request = self._shown.popleft()
        del self.all[request.request_id]
        return request

    def peek_request(self) -> Request:
        """Return the first one shown."""
        return self._shown[0]

    def remove_request(self, request: Request) -> None:
        """Remove a request."""
        self.all.pop(request.request_id, None)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove requests."""
        for request in list(requests):
            self.all.pop(request.request_id, None)

    def __bool__(self) -> bool:
        """Return whether a request is shown. vLLM's loop calls this."""
        return bool(self._shown)

    def __len__(self) -> int:
        """Return the number of all waiting requests: vLLM's metrics and its idle check use it."""
        return len(self.all)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self.all.values()))


class Row(NamedTuple):
    """One request of a step that is over."""

    request: Request
    computed: int
    """Tokens computed for it, the verified draft tokens included."""
    drafted: int
    """Draft tokens that were verified."""
    sampled: Sequence[int]
    """Tokens sampled, before the cut at an end."""
    position: int
    """Output tokens before the step."""
    prompt: int
    """Tokens of its prompt before the step: a session's becomes longer when its next turn begins."""

    @property
    def accepted(self) -> int:
        """Return how many of the draft tokens were accepted, before the cut at an end."""
        return min(max(0, len(self.sampled) - 1), self.drafted)


class Pausing:
    """Mix in before vLLM's Scheduler or AsyncScheduler; a subclass defines `select` and `observe`."""

    # Attributes of vLLM's scheduler.
    running: list[Request]
    requests: dict[str, Request]
    kv_cache_manager: Any
    kv_cache_config: Any
    scheduler_config: Any
    lora_config: Any
    block_size: int
    max_model_len: int
    max_num_running_reqs: int
    max_num_active_reqs: int
    num_waiting_for_streaming_input: int
    num_lookahead_tokens: int
    num_spec_tokens: int
    finished_recving_kv_req_ids: set[str]
    deferred_frees: Iterable[tuple[int, Sequence[Any]]]
    requires_kv_delivery: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waiting = Window()
        self.kv_holding_waiting = Window()
        self.evictions = 0
        """Requests whose KV was freed for others before they ended."""
        self.blocked: frozenset[str] = frozenset()
        """The requests of the newest step if vLLM could run none of them, and others hold KV."""

    # For subclasses.

    def select(self) -> list[Request]:
        """Return the requests of the next step, best first: some of `running` and of `waiting`."""
        raise NotImplementedError

    def others(self) -> Iterable[Request]:
        """Return requests that may take the places of selected ones that cannot run now, best first."""
        return ()

    def is_reserved(self, request: Request) -> bool:
        """Return whether a selected request has its place whatever its rank."""
        return False

    def ran_instead(self, run: Sequence[Request]) -> None:
        """Take in that these requests run in place of the selected ones."""

    def joining_with_kv(self, chosen: Sequence[Request]) -> list[Request]:
        """Return the requests that wait with KV and may join the step, best first."""
        return self.kv_holding_waiting.those_of(chosen)

    def rank_key(self, request: Request) -> Any:
        """Return the sort key for keeping KV: the largest loses its KV first."""
        return request.arrival_time

    def observe(self, rows: list[Row], scheduler_output: Any) -> None:
        """Take in a step that is over."""

    # Called by vLLM.

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule the selected requests; see the top of the file."""
        chosen = self._within_adapters(self.select())
        rank = {request.request_id: at for at, request in enumerate(chosen)}
        run = [request for request in self.running if request.request_id in rank]
        # A prompt takes all of the budget that it finds, so those that decode come before it.
        run.sort(key=lambda request: (request.is_prefill_chunk, rank[request.request_id]))
        paused = [request for request in self.running if request.request_id not in rank]
        admitted = self._admitted(chosen)
        if paused:
            for request in paused:
                self._forget_placeholders(request)
            paused = self._make_room(chosen, paused, admitted)
        places = self.max_num_active_reqs
        # vLLM counts sessions that wait for input as a part of the step, since they have places in the model runner.
        idle = self.num_waiting_for_streaming_input
        self.max_num_active_reqs = min(places + idle, self.max_num_running_reqs - len(paused))
        self.waiting.show(admitted)
        self.kv_holding_waiting.show(self.joining_with_kv(chosen))
        self.running = run
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_num_active_reqs = places
            self.running = [*self.running, *paused]
            self.waiting.show(())
            self.kv_holding_waiting.show(())
        self.blocked = frozenset()
        others_have_kv = bool(paused) or len(self.kv_holding_waiting) > 0
        if others_have_kv and not (
            output.num_scheduled_tokens or any(request.num_in_flight_tokens for request in chosen)
        ):
            self.blocked = frozenset(rank)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Apply the outcome of a step, and pass it to `observe`."""
        sampled = model_runner_output.sampled_token_ids
        # vLLM pads the first step of a request whose KV the prefix cache holds with placeholders. They look
        # like rejected draft tokens.
        first = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        first |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
        rows = []
        for request_id, computed in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None or (request.status is not RUNNING and request.is_finished()):
                continue
            if request.num_stale_output_tokens and request.drop_stale_output:
                continue  # vLLM drops what the step has brought
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request_id) or ()
            padding = len(drafts) if request_id in first else 0
            tokens = sampled[model_runner_output.req_id_to_index[request_id]] if sampled else ()
            rows.append(
                Row(
                    request,
                    computed - padding,
                    len(drafts) - padding,
                    tuple(tokens),
                    request.num_output_tokens,
                    request.num_prompt_tokens,
                )
            )
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.observe(rows, scheduler_output)
        return outputs

    # Parts.

    def evict(self, request: Request) -> None:
        """Preempt a running request as vLLM does: its blocks are freed, though the prefix cache may still
        have them, and it waits.
        """
        self.running.remove(request)
        # A connector that hands KV over at the end of a request cannot do so once it is freed: vLLM then drops
        # an end that is in flight.
        self._preempt_request(request, time.monotonic(), drop_stale_output=self.requires_kv_delivery)
        self.evictions += 1

    def held_blocks(self, request: Request) -> int:
        """Return the KV blocks that a request holds, of one KV cache group."""
        return max(map(len, self._blocks_of(request)), default=0)

    def held_and_shared(self, request: Request) -> tuple[int, tuple[SharedBlocks, ...]]:
        """Return the same, and those of these blocks that others hold as well, where there is one group."""
        groups = self._blocks_of(request)
        if len(groups) != 1:
            return max(map(len, groups), default=0), ()
        [blocks] = groups
        held = len(blocks)
        if not held or blocks[0].ref_cnt <= 1:  # the usual case, without two more calls
            return held, ()
        runs = shared_runs(held, lambda at: blocks[at].ref_cnt)
        return held, tuple([SharedBlocks(blocks[begin].block_id, end - begin, 0) for begin, end in runs])

    def _blocks_of(self, request: Request) -> tuple[Sequence[Any], ...]:
        """Return the KV blocks that a request holds, by KV cache group."""
        if not request.num_computed_tokens:
            return ()
        groups: tuple[Sequence[Any], ...] = self.kv_cache_manager.get_blocks(request.request_id).blocks
        return groups

    def free_blocks(self) -> int:
        """Return the free KV blocks for each KV cache group, and those that are free once the steps in flight are
        over: with a connector that loads KV, vLLM frees the blocks of requests in these steps late.
        """
        if not self.kv_cache_config.kv_cache_groups:
            return self.pool_blocks
        free: int = self.kv_cache_manager.block_pool.get_num_free_blocks()
        free += sum([block.ref_cnt == 1 for _, blocks in self.deferred_frees for block in blocks])
        return free // self._groups

    @property
    def pool_blocks(self) -> int:
        """The KV blocks for each KV cache group, without vLLM's null block. A model that keeps no KV, such as an
        encoder, never has too few.
        """
        if not self.kv_cache_config.kv_cache_groups:
            return self.max_num_running_reqs * -(-self.max_model_len // self.block_size)
        blocks: int = self.kv_cache_config.num_blocks
        return (blocks - 1) // self._groups

    @property
    def _groups(self) -> int:
        return max(1, len(self.kv_cache_config.kv_cache_groups))

    def blocks_short(self, chosen: Sequence[Request]) -> int:
        """Return how many more blocks a step of these requests needs than are free; negative: fewer."""
        needed = 0
        for request in chosen:
            if request.num_computed_tokens:
                tokens = max(request.num_tokens_with_spec, request.num_tokens)
                tokens += request.num_output_placeholders + self.num_lookahead_tokens
            else:
                tokens = request.num_tokens + self.num_lookahead_tokens
            tokens = min(tokens, self.max_model_len)
            needed += max(0, -(-tokens // self.block_size) - self.held_blocks(request))
        return needed - self.free_blocks()

    def surely_fits(self, chosen: Sequence[Request]) -> bool:
        """Return whether there are free blocks for all that these requests could need, without looking at
        those that they hold: the usual case, and much cheaper than `blocks_short`.
        """
        ahead = self.num_spec_tokens + self.num_lookahead_tokens
        needed = 0
        for request in chosen:
            tokens = request.num_tokens + request.num_output_placeholders + ahead
            needed += (tokens - request.num_computed_tokens) // self.block_size + 1
        return needed <= self.free_blocks()

    def _within_adapters(self, chosen: list[Request]) -> list[Request]:
        """Leave out requests whose LoRA adapter does not fit the step: vLLM checks this only when it admits
        a request, and asserts it afterwards. Others with an adapter that fits take their places.
        """
        if not self.lora_config:
            return chosen
        loaded: set[int] = set()

        def fits(request: Request) -> bool:
            adapter = request.lora_request.lora_int_id if request.lora_request else 0
            if adapter and adapter not in loaded:
                if len(loaded) == self.lora_config.max_loras:
                    return False
                loaded.add(adapter)
            return True

        # A reserved request has the worst rank, and would never have its adapter.
        by_claim = sorted(chosen, key=lambda request: not self.is_reserved(request))
        kept = {request.request_id for request in by_claim if fits(request)}
        if len(kept) == len(chosen):
            return chosen
        run = [request for request in chosen if request.request_id in kept]
        named = {request.request_id for request in chosen}
        for request in self.others():
            if len(run) == len(chosen):
                break
            if request.request_id not in named and fits(request):
                run.append(request)
        self.ran_instead(run)
        return run

    def _admitted(self, chosen: Sequence[Request]) -> list[Request]:
        """Return the requests that join the step, in the order in which vLLM admits them: the waiting ones of `chosen`.

        Without chunked prefill vLLM admits none after one whose prompt does not fit the step. So a reserved one is
        the first: better ones that join while others decode would never leave it the room.
        """
        admitted = self.waiting.those_of(chosen)
        if not self.scheduler_config.enable_chunked_prefill:
            admitted.sort(key=lambda request: not self.is_reserved(request))
        return admitted

    def _make_room(
        self, chosen: Sequence[Request], paused: list[Request], admitted: Sequence[Request]
    ) -> list[Request]:
        """Evict paused requests, worst first, until the step has the blocks and the places in the model
        runner that it needs; return those that stay.

        Otherwise vLLM preempts the worst request of the step itself.
        """
        # A session keeps its place in the model runner while it waits, and who waits with KV takes one next.
        residents = len(self.running) + len(admitted) + len(self.kv_holding_waiting)
        most = self.max_num_running_reqs
        if residents <= most and self.surely_fits(chosen):
            return paused
        paused = sorted(paused, key=self.rank_key)
        while paused and (residents > most or self.blocks_short(chosen) > 0):
            self.evict(paused.pop())
            residents -= 1
        return paused

    def _forget_placeholders(self, request: Request) -> None:
        """Drop the draft placeholders of a request that pauses, where the model runner needs that.

        Runner V1 fills placeholders of async scheduling in from the step before; a request that was not in
        that step would compute on token -1. Runner V2 keeps draft tokens by request.
        """
        tokens = request.spec_token_ids
        if tokens and tokens[0] == -1 and not getattr(self, "use_v2_model_runner", False):
            request.spec_token_ids = []
