"""One worker after another, as every gateway can."""

from __future__ import annotations

from scheduler_svc.core.placement.routing import Eligible, Router
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.worker import Worker


class RoundRobin(Router):
    """By turns, in the order of the workers' names."""

    def __init__(self) -> None:
        self._turns = 0

    def best(self, request: Request, eligible: Eligible) -> Worker | None:
        """Return the able worker whose turn it is."""
        candidates = sorted(filter(eligible.able, eligible.by_load), key=lambda worker: worker.worker_id)
        if not candidates:
            return None
        self._turns += 1
        return candidates[self._turns % len(candidates)]
