"""The least sum of blocks to prefill and blocks in use: NVIDIA Dynamo's KV router with its defaults
(docs.nvidia.com/dynamo/latest/components/router, "Cost Function": overlap_score_weight · prefill_blocks +
decode_blocks, weight 1, temperature 0).

Blocks to prefill are those of the request that the worker lacks, and those of requests there that are still to be
computed. Blocks in use are those of the contexts of all requests there.
"""

from __future__ import annotations

from scheduler_svc.core.placement.routing import Eligible, Router
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.worker import Worker


class OverlapScore(Router):
    """Blocks to prefill and blocks in use, counted in tokens."""

    def best(self, request: Request, eligible: Eligible) -> Worker | None:
        """Return the able worker of the least cost."""
        cached = eligible.shard.caches.blocks_of(request)

        def cost(worker: Worker) -> float:
            to_compute = request.context_tokens - request.cached_in(cached.get(worker.worker_id, 0))
            to_compute += sum(other.missing_tokens for other in worker.computing.values())
            in_use = request.context_tokens + sum(other.context_tokens for other in worker.members.values())
            return to_compute + in_use

        return min(filter(eligible.able, eligible.by_load), key=cost, default=None)
