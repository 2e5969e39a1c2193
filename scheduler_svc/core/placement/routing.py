"""The choice of a worker for a request, where several could take it.

The best worker is the one with which all requests together are done soonest (our choice): the time that the request
itself would take there, plus the time by which its prefill delays others there. Where a worker has the KV of the
beginning of the prompt, only the rest is computed. A worker whose queue is longer than that prefill loses to another
one, which has the beginning from then on as well: so a beginning that many requests share spreads by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Final, Literal, final, get_args

from scheduler_svc.core.estimates.priors import Priors
from scheduler_svc.core.native import mypyc_attr
from scheduler_svc.core.state.request import Request
from scheduler_svc.core.state.shard import Shard
from scheduler_svc.core.state.worker import Worker

PlacementName = Literal["soonest-done", "least-loaded"]
PLACEMENTS: tuple[PlacementName, ...] = get_args(PlacementName)
"""Names of the routers in the configuration."""
MOST_COMPARED: Final = 16
"""Workers that are compared: this many of the least loaded ones, and this many of those that have most of the prompt. Of
faster workers for a running request as many. Our choice; it bounds the cost of a placement, and the others are rarely
better."""


@final
class Eligible:
    """The workers to which a request may be leased, and the state by which a router compares them."""

    __slots__ = ("able", "by_load", "priors", "shard")

    def __init__(
        self, by_load: Iterable[Worker], able: Callable[[Worker], bool], shard: Shard, priors: Priors
    ) -> None:
        self.by_load: Final = by_load
        """Workers that take work, the least loaded first; not all of them are able."""
        self.able: Final = able
        """Whether a worker may get the request."""
        self.shard: Final = shard
        self.priors: Final = priors


@mypyc_attr(allow_interpreted_subclasses=True)
class Router(ABC):
    """Chooses workers. The simulator has routers of its own, to compare with."""

    @abstractmethod
    def best(self, request: Request, eligible: Eligible) -> Worker | None:
        """Return the worker to lease a queued request to, or None: no worker is able."""


class LeastLoaded(Router):
    """The least loaded worker, whatever it has computed."""

    def best(self, request: Request, eligible: Eligible) -> Worker | None:
        """Return the first able worker: the one that soonest has had a round of each of its requests."""
        for worker in eligible.by_load:
            if eligible.able(worker):
                return worker
        return None


class SoonestDone(Router):
    """The worker with which all requests together are done soonest."""

    def best(self, request: Request, eligible: Eligible) -> Worker | None:
        """Return the worker of the least cost among the able ones that are alike in load, and those that have a part of
        the prompt. A free slot comes before any place where a request waits, unless that worker has the prompt.
        """
        able, shard, priors = eligible.able, eligible.shard, eligible.priors
        orders = shard.worker_orders
        compared: list[Worker] = []
        for worker in eligible.by_load:
            if compared and orders.stage(worker) != orders.stage(compared[0]):
                break
            if able(worker):
                compared.append(worker)
                if len(compared) == MOST_COMPARED:
                    break
        if not compared:
            return None
        cached = shard.caches.blocks_of(request)
        having = list(cached)
        if len(having) > MOST_COMPARED:
            having = sorted(having, key=cached.__getitem__, reverse=True)[:MOST_COMPARED]
        for worker_id in having:
            found = shard.workers.get(worker_id)
            if found is not None and found.takes_work and found not in compared and able(found):
                compared.append(found)
        best, least_s = compared[0], 0.0
        if len(compared) > 1:
            rounds = request.rank.remaining.mean_s / priors.cost.typical_share_s
            for worker in compared:
                lacking = request.context_tokens - request.cached_in(cached.get(worker.worker_id, 0))
                cost_s = orders.turn_s(worker) * rounds + worker.slowness * priors.cost.prefill_share_s(
                    _delay_tokens(request, worker, lacking)
                )
                if worker is best or cost_s < least_s:
                    best, least_s = worker, cost_s
        return best


def _delay_tokens(request: Request, worker: Worker, lacking: int) -> int:
    """Return the context tokens that are computed there before the request generates its first token, and those that
    others there have to wait for because of it, once for each.
    """
    ahead = behind = 0
    for other in worker.computing.values():
        if other.order_key < request.order_key:
            ahead += other.missing_tokens
        else:
            behind += 1
    return ahead + lacking * (1 + len(worker.running) + behind)


def router_named(name: PlacementName) -> Router:
    """Return the router with this name in the configuration."""
    return LeastLoaded() if name == "least-loaded" else SoonestDone()
