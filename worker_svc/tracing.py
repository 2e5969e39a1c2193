"""The worker's spans of a request: its prefill and its rounds, many rounds in one span.
`laps_sd.service.tracing` shows the trace.

A group of rounds ends with the request, when the request is left out of a round, after `GROUP_ROUNDS` or
after `GROUP_S`, so that a worker that dies has emitted all groups but the last. Times are those at which a
report was taken from the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from laps_sd.service.tracing import Parent, Tracing, parent_of
from worker_svc.engine.interface import RequestRound
from worker_svc.runner.messages import Round

__all__ = ["RoundTraces"]

GROUP_ROUNDS = 64
GROUP_S = 2.0
"""Bounds of a group, in rounds and seconds.

Our choice: some spans per second of work, some dozens per long request.
"""


@dataclass(slots=True)
class _Group:
    """Consecutive rounds of one request, all with or all without prefill."""

    name: str
    began_s: float
    ended_s: float = 0.0
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    prefilled: int = 0
    cached: int = 0
    requests: int = 0
    """Requests of these rounds together."""


@dataclass(slots=True)
class _Traced:
    """A request whose trace is recorded, under one lease."""

    run: Parent
    lease_epoch: int
    group: _Group | None = None


class RoundTraces:
    """The spans of all requests that a worker holds. Called by one task only."""

    def __init__(self, tracing: Tracing, worker_id: str) -> None:
        self._tracing = tracing
        self._worker_id = worker_id
        self._traced: dict[str, _Traced] = {}

    def specified(self, request_id: str, lease_epoch: int, traceparent: str) -> None:
        """Begin to trace a request that may run here under this lease."""
        if not self._tracing.on:
            return
        self.forget(request_id, lease_epoch)
        run = parent_of(traceparent)
        if run is not None and request_id not in self._traced:
            self._traced[request_id] = _Traced(run, lease_epoch)

    def forget(self, request_id: str, lease_epoch: int) -> None:
        """End the trace of a request that runs here no more, under this lease or an older one."""
        traced = self._traced.get(request_id)
        if traced is not None and traced.lease_epoch <= lease_epoch:
            self._close(request_id, traced)
            del self._traced[request_id]

    def round(self, outcome: Round, now_s: float) -> None:
        """Take in one report, which arrived at `now_s` (Unix seconds)."""
        if not self._traced:
            return
        began_s = now_s - outcome.result.total_s
        requests = len(outcome.result.requests)
        ran = set()
        for lease_epoch, step in outcome.progress:
            traced = self._traced.get(step.request_id)
            if traced is None or traced.lease_epoch != lease_epoch:
                continue
            ran.add(step.request_id)
            self._add(traced, step, began_s, now_s, requests)
            if step.finish is not None:
                self.forget(step.request_id, lease_epoch)
        for request_id, traced in self._traced.items():
            if traced.group is not None and (request_id not in ran or _is_full(traced.group)):
                self._close(request_id, traced)

    def close(self) -> None:
        """End all groups, because the worker leaves."""
        for request_id, traced in self._traced.items():
            self._close(request_id, traced)
        self._traced.clear()

    def _add(self, traced: _Traced, step: RequestRound, began_s: float, now_s: float, requests: int) -> None:
        name = "prefill" if step.prefilled else "rounds"
        group = traced.group
        if group is None or group.name != name:
            self._close(step.request_id, traced)
            group = traced.group = _Group(name, began_s)
        group.ended_s = now_s
        group.rounds += 1
        group.tokens += len(step.tokens)
        group.drafted += step.drafted
        group.accepted += step.accepted
        group.prefilled += step.prefilled
        group.cached += step.cached
        group.requests += requests

    def _close(self, request_id: str, traced: _Traced) -> None:
        group, traced.group = traced.group, None
        if group is None:
            return
        attributes: dict[str, str | int | float] = {
            "laps_sd.request_id": request_id,
            "laps_sd.worker_id": self._worker_id,
            "laps_sd.rounds": group.rounds,
            "laps_sd.output_tokens": group.tokens,
            "laps_sd.drafted_tokens": group.drafted,
            "laps_sd.accepted_tokens": group.accepted,
            "laps_sd.mean_batch_requests": group.requests / group.rounds,
        }
        if group.name == "prefill":
            attributes |= {
                "laps_sd.prefilled_tokens": group.prefilled,
                "laps_sd.cached_tokens": group.cached,
            }
        self._tracing.emit(group.name, traced.run, group.began_s, group.ended_s, attributes)


def _is_full(group: _Group) -> bool:
    return group.name == "rounds" and (
        group.rounds >= GROUP_ROUNDS or group.ended_s - group.began_s >= GROUP_S
    )
