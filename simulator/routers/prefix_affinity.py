"""Affinity to the worker that was sent the longest part of a prompt, with a load threshold: `cache_aware` of SGLang's
router and of vLLM's (docs.gpustack.ai/gpustack-operator/main/docs/modules/model-deployment/routing, gateway 0.3.1 and
router 0.1.15), with their defaults.

The router remembers what it sent and not what a worker has. It goes by load alone while the loads are far apart.
"""

from __future__ import annotations

from laps_sd.contract.prompt_blocks import BLOCK_TOKENS
from scheduler_svc.core.placement.routing import Eligible, Router
from scheduler_svc.core.state.block_index import BlockIndex
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.worker import Worker

CACHE_THRESHOLD = 0.3
"""Share of the prompt from which on affinity decides."""
BALANCE_ABS, BALANCE_REL = 64, 1.5
"""The loads are far apart when the largest is this many requests above the smallest, and this many times it."""


class PrefixAffinity(Router):
    """Longest prefix sent before, unless the loads are far apart."""

    def __init__(self) -> None:
        self._sent = BlockIndex()

    def best(self, request: Request, eligible: Eligible) -> Worker | None:
        """Return the able worker with the longest prefix, the smallest record or the least load."""
        candidates = list(filter(eligible.able, eligible.by_load))
        if not candidates:
            return None
        loads = [len(worker.members) for worker in candidates]
        names = request.facts.prompt_blocks
        if max(loads) - min(loads) > BALANCE_ABS and max(loads) > BALANCE_REL * min(loads):
            chosen = min(candidates, key=lambda worker: len(worker.members))
        else:
            sent = self._sent.cached(names)
            longest = max(candidates, key=lambda worker: sent.get(worker.worker_id, 0))
            tokens = sent.get(longest.worker_id, 0) * BLOCK_TOKENS
            if tokens > CACHE_THRESHOLD * request.facts.prompt_tokens:
                chosen = longest
            else:
                chosen = min(candidates, key=lambda worker: self._sent.blocks_of(worker.worker_id))
        self._sent.add(chosen.worker_id, names)
        return chosen
