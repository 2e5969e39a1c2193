"""vLLM's scheduler for rounds: a step runs the requests that a round names, and keeps what it observed.

A request whose KV a connector has loaded (`kv_offloading_size`) also joins a round that does not name it: no
round counts its blocks, and it holds them until it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from laps_vllm.pausing import LOADS, RUNNING, Pausing, Row, schedules_ahead
from worker_svc.engine.round.prefill_time import Chunk
from worker_svc.engine.vllm.step_time import NONE, Decoding, StepTime

__all__ = ["OverlappedRoundScheduler", "Planned", "RoundScheduler", "Rounds", "round_scheduler"]


@dataclass(slots=True)
class Planned:
    """A round: its requests, and what became of them once it is over."""

    run: Sequence[Request] = ()
    # Those of them for which there are blocks.
    fitting: Sequence[Request] = ()
    # Others that join it if there is a place; see `Rounds.loaded`.
    joining: Sequence[Request] = ()
    # Requests whose context was computed when the round began.
    decoding: frozenset[str] = frozenset()
    # Context tokens that the prefix cache had for requests that began in it.
    found_cached: dict[str, int] = field(default_factory=dict)
    # Context that it computes, by request.
    chunks: dict[str, Chunk] = field(default_factory=dict)
    # The part of it that decodes.
    plain: Decoding = NONE
    # Longest time that it was to take, seconds, where because of it some context waits for a later one; otherwise 0.
    limit_s: float = 0.0
    # The outcome by request; one that vLLM left out is not in it.
    rows: dict[str, Row] = field(default_factory=dict)


class Rounds(Pausing):
    """Runs what `plan` named, best first. Mixed in before one of vLLM's schedulers."""

    # Of vLLM's scheduler.
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.over: Planned | None = None
        """The round that has ended since `plan`; None if none has."""
        self.times: StepTime | None = None
        """Bounds the time of steps; None: their tokens alone are bounded."""
        self._planned = Planned()
        self._in_order: list[Request] = []
        """The requests of the plan, in the order of `select`."""
        self._begun: deque[Planned] = deque()
        """Rounds that vLLM has scheduled and whose outcome it has not applied, the oldest first."""

    def plan(self, planned: Planned) -> None:
        """Set the round of the next step."""
        self._planned, self.over = planned, None
        decoding, chosen = planned.decoding, [*planned.fitting, *planned.joining]
        self._in_order = [one for one in chosen if one.request_id in decoding]
        self._in_order += [one for one in chosen if one.request_id not in decoding]

    @property
    def in_flight(self) -> int:
        """The rounds that have begun and are not over."""
        return len(self._begun)

    def residents_over(self, run: Sequence[Request]) -> int:
        """Return by how many requests the places of the model runner are too few for this run; 0 or less: none."""
        if len(self.running) + len(run) <= self.max_num_running_reqs:
            return 0
        names = {request.request_id for request in self.running}
        names.update(request.request_id for request in run)
        return len(names) - self.max_num_running_reqs

    def loaded(self, run: Sequence[Request]) -> list[Request]:
        """Return the requests besides these that wait with KV which a connector has loaded."""
        arrived = self.finished_recving_kv_req_ids
        return [
            one
            for one in self.kv_holding_waiting
            if (one.status is not LOADS or one.request_id in arrived) and one not in run
        ]

    def freed_by_steps(self, run: Sequence[Request]) -> int:
        """Return the blocks that requests besides these hold and that no eviction can free: their KV is being loaded
        or has been, and they have not run since. A step frees those of ended requests, after the load.
        """
        others = [one for one in self.requests.values() if one.status is not RUNNING and one not in run]
        return sum([self.held_blocks(one) for one in others])

    # Of `Pausing`.

    def select(self) -> list[Request]:
        """Return the planned requests: those that decode first, since context takes all of the budget that it
        finds."""
        return [request for request in self._in_order if not request.is_finished()]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule the planned requests, and note what the prefix cache had."""
        planned = self._planned
        fresh = [request for request in self._in_order if not request.num_computed_tokens]
        most = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens, limit_s = self._budget(planned, most)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = most
        counts = output.num_scheduled_tokens
        for request in self._in_order:
            name = request.request_id
            if name not in planned.decoding and not request.is_finished():
                if name in counts:
                    planned.chunks[name] = Chunk(request.num_computed_tokens - counts[name], counts[name])
                if request.num_computed_tokens < request.num_tokens - 1:
                    planned.limit_s = limit_s
        for request in fresh:
            if request.request_id in counts:
                planned.found_cached[request.request_id] = (
                    request.num_computed_tokens - counts[request.request_id]
                )
        self._begun.append(planned)
        return output

    def _budget(self, planned: Planned, most: int) -> tuple[int, float]:
        """Return the tokens of the next step, of `most` that vLLM allows, and the limit of its time that
        bounds them, or 0."""
        if self.times is None:
            return most, 0.0
        decoding: list[Request] = []
        lacking: list[Request] = []
        for request in self.select():
            (decoding if request.request_id in planned.decoding else lacking).append(request)
        rows = sum(
            [
                one.num_tokens_with_spec + one.num_output_placeholders - one.num_computed_tokens
                for one in decoding
            ]
        )
        planned.plain = Decoding(len(decoding), rows, sum([one.num_tokens for one in decoding]))
        if not lacking:
            return most, 0.0
        tokens, limit_s = self.times.fitting(
            planned.plain, lacking[0].num_computed_tokens, max(1, most - rows)
        )
        return min(most, rows + tokens), limit_s

    def observe(self, rows: list[Row], scheduler_output: Any) -> None:
        """Keep the rows of the step that is over: steps end in the order in which they began."""
        self.over = self._begun.popleft()
        self.over.rows = {row.request.request_id: row for row in rows}


class RoundScheduler(Rounds, Scheduler):
    """Without async scheduling: a round is over when its step returns."""


class OverlappedRoundScheduler(Rounds, AsyncScheduler):
    """With async scheduling: a round is prepared while the device works on the one before."""


def round_scheduler(*args: Any, **kwargs: Any) -> Rounds:
    """Return the scheduler for this configuration: what vLLM's `scheduler_cls` names."""
    cls = OverlappedRoundScheduler if schedules_ahead(*args, **kwargs) else RoundScheduler
    return cls(*args, **kwargs)
