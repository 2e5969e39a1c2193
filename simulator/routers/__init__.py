"""Routers to compare the production router with: what other servers do, each in a small file with its source."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core.placement.routing import LeastLoaded, Router, SoonestDone
from simulator.routers.overlap_score import OverlapScore
from simulator.routers.prefix_affinity import PrefixAffinity
from simulator.routers.round_robin import RoundRobin

ROUTERS: dict[str, Callable[[], Router]] = {
    "least-loaded": LeastLoaded,
    "round-robin": RoundRobin,
    "prefix-affinity": PrefixAffinity,
    "overlap-score": OverlapScore,
    "soonest-done": SoonestDone,
}
"""By name. A router may keep state, so each simulation has one of its own."""
