"""The least loaded worker, whatever it has in its cache: our own router before it knew of caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.placement.routing import Router
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.shard import Shard
from scheduler_svc.core.state.worker import Worker


class LeastLoaded(Router):
    """By the seconds until each of a worker's requests has had a round."""

    def best(
        self,
        request: Request,
        workers: Iterable[Worker],
        able: Callable[[Worker], bool],
        shard: Shard,
        priors: Priors,
    ) -> Worker | None:
        """Return the first able worker."""
        return next(filter(able, workers), None)
