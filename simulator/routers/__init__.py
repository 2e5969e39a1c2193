"""Routers to compare the production router with: what other servers do, each in a small file with its source."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from scheduler_svc.core.placement.routing import PLACEMENTS, Router, router_named
from simulator.routers.overlap_score import OverlapScore
from simulator.routers.prefix_affinity import PrefixAffinity
from simulator.routers.round_robin import RoundRobin

ROUTERS: dict[str, Callable[[], Router]] = {
    **{name: partial(router_named, name) for name in PLACEMENTS},
    "round-robin": RoundRobin,
    "prefix-affinity": PrefixAffinity,
    "overlap-score": OverlapScore,
}
"""By name. A router may keep state, so each simulation has one of its own."""
