"""One worker after another, as every gateway can."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.placement.routing import Router
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.shard import Shard
from scheduler_svc.core.state.worker import Worker


class RoundRobin(Router):
    """By turns, in the order of the workers' names."""

    def __init__(self) -> None:
        self._turns = 0

    def best(
        self,
        request: Request,
        workers: Iterable[Worker],
        able: Callable[[Worker], bool],
        shard: Shard,
        priors: Priors,
    ) -> Worker | None:
        """Return the able worker whose turn it is."""
        candidates = sorted(filter(able, workers), key=lambda worker: worker.worker_id)
        if not candidates:
            return None
        self._turns += 1
        return candidates[self._turns % len(candidates)]
