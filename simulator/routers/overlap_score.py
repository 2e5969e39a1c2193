"""The least sum of blocks to prefill and blocks in use: NVIDIA Dynamo's KV router with its defaults
(docs.nvidia.com/dynamo/latest/components/router, "Cost Function": overlap_score_weight · prefill_blocks +
decode_blocks, weight 1, temperature 0).

Blocks to prefill are those of the request that the worker lacks, and those of requests there that are still to be
computed. Blocks in use are those of the contexts of all requests there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.placement.routing import Router
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.shard import Shard
from scheduler_svc.core.state.worker import Worker


class OverlapScore(Router):
    """Blocks to prefill and blocks in use, counted in tokens."""

    def best(
        self,
        request: Request,
        workers: Iterable[Worker],
        able: Callable[[Worker], bool],
        shard: Shard,
        priors: Priors,
    ) -> Worker | None:
        """Return the able worker of the least cost."""
        cached = shard.caches.blocks_of(request)

        def cost(worker: Worker) -> float:
            to_compute = request.context_tokens - request.cached_in(cached.get(worker.worker_id, 0))
            to_compute += sum(other.missing_tokens for other in worker.computing.values())
            in_use = request.context_tokens + sum(other.context_tokens for other in worker.members.values())
            return to_compute + in_use

        return min(filter(able, workers), key=cost, default=None)
