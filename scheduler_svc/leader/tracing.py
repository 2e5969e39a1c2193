"""Spans that a scheduler emits for a request: the whole of it, its wait, its leases, its preemptions.
`laps_sd.service.tracing` shows the trace.

The span of a lease is emitted when the lease is over, all others when the request has ended, from its
timeline. The ids follow from request and lease epoch, so a leader that takes over continues the trace of its
predecessor; spans that it has not seen are missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from laps_sd.contract.ends import End
from laps_sd.service.tracing import Happened, Parent, Tracing, parent_of, span_id_of
from scheduler_svc.core.commands import Standing, StoryLine
from scheduler_svc.core.events import RequestFacts
from scheduler_svc.core.state.request import LEFT_OUT

__all__ = ["RequestTrace", "RequestTraces"]


@dataclass(slots=True)
class _Lease:
    """Lease of a request to one worker."""

    epoch: int
    worker_id: str
    began_s: float
    ended_s: float | None = None


class RequestTrace:
    """Trace of one request, if it is recorded."""

    def __init__(self, tracing: Tracing, request_id: str, call: Parent) -> None:
        self.call = call
        """Span that the submission came with."""
        self.leases: list[_Lease] = []
        self._tracing = tracing
        self._request_id = request_id

    @property
    def request(self) -> Parent:
        """Return the request's own span."""
        return Parent(self.call.trace_id, span_id_of("request", self._request_id))

    def run(self, lease_epoch: int) -> Parent:
        """Return the span of a lease, which is the parent of its worker's spans."""
        return Parent(self.call.trace_id, span_id_of("run", self._request_id, lease_epoch))

    def leased(self, lease_epoch: int, worker_id: str | None, now_s: float) -> None:
        """Note that the request is on the list of this worker from now on, or on none."""
        last = self.leases[-1] if self.leases else None
        if last is not None and last.ended_s is None:
            if (last.epoch, last.worker_id) == (lease_epoch, worker_id):
                return
            last.ended_s = now_s
            self._tracing.emit(
                "run",
                self.request,
                last.began_s,
                now_s,
                {
                    "laps_sd.request_id": self._request_id,
                    "laps_sd.worker_id": last.worker_id,
                    "laps_sd.lease_epoch": last.epoch,
                },
                span_id=self.run(last.epoch).span_id,
            )
        if worker_id is not None:
            self.leases.append(_Lease(lease_epoch, worker_id, now_s))


class RequestTraces:
    """Traces of all requests that a scheduler leads."""

    def __init__(self, tracing: Tracing, *, shard: str, policy: str) -> None:
        self._tracing = tracing
        self._shard = shard
        self._policy = policy

    def begin(self, request_id: str, traceparent: str) -> RequestTrace | None:
        """Return the trace of a request that is led here from now on; None if it is not recorded."""
        if not self._tracing.on:
            return None
        call = parent_of(traceparent)
        return None if call is None else RequestTrace(self._tracing, request_id, call)

    def ended(
        self,
        trace: RequestTrace,
        facts: RequestFacts,
        *,
        standing: Standing,
        started_s: float | None,
        output_tokens: int,
        end: End,
        detail: str,
        story: Sequence[StoryLine],
        now_s: float,
    ) -> None:
        """Emit the remaining spans of the request, whose last lease is over."""
        arrived_s = facts.arrival_s
        named = {"laps_sd.request_id": facts.request_id}
        self._tracing.emit(
            "request",
            trace.call,
            arrived_s,
            now_s,
            {
                **named,
                "laps_sd.shard": self._shard,
                "laps_sd.policy": self._policy,
                "laps_sd.end": end.value,
                "laps_sd.level": standing.level,
                "laps_sd.attained_s": standing.attained_s,
                "laps_sd.preemptions": standing.preemptions,
                "laps_sd.rounds": standing.rounds,
                "laps_sd.drafted_tokens": standing.drafted,
                "laps_sd.accepted_tokens": standing.accepted,
                "laps_sd.prompt_tokens": facts.prompt_tokens,
                "laps_sd.output_tokens": output_tokens,
            },
            span_id=trace.request.span_id,
            events=[Happened(line.at_s, line.what, line.detail) for line in story],
            error=detail if end is End.ERROR else None,
        )
        queued_until_s = now_s if started_s is None else started_s
        self._tracing.emit("queue", trace.request, arrived_s, queued_until_s, named)
        for lease in trace.leases:
            for began_s, ended_s, why in pauses(story, lease.began_s, lease.ended_s or now_s):
                attributes = {**named, "laps_sd.reason": why}
                self._tracing.emit("paused", trace.run(lease.epoch), began_s, ended_s, attributes)


def pauses(story: Sequence[StoryLine], began_s: float, ended_s: float) -> Iterator[tuple[float, float, str]]:
    """Yield the begin, the end and the reason of each preemption during this lease."""
    paused: StoryLine | None = None
    for line in story:
        if not began_s <= line.at_s <= ended_s:
            continue
        if line.what == "paused":
            paused = line
        elif line.what == "resumed" and paused is not None:
            yield paused.at_s, line.at_s, paused.detail
            paused = None
        elif line.what == LEFT_OUT:  # the time of its resumption is not known
            paused = None
    if paused is not None:
        yield paused.at_s, ended_s, paused.detail
