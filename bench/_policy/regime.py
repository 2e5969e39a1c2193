"""Regimes: files of bench/regimes, and the policies that run in them."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler_svc.core.placement.routing import Router
from scheduler_svc.core.policies import Policy, policy_named
from scheduler_svc.core.settings import CoreSettings
from simulator.jobs import Job
from simulator.machine import Machine
from simulator.oracle import Oracle
from simulator.routers import ROUTERS
from simulator.workload import Workload, described

REGIMES = Path(__file__).parents[1] / "regimes"
ALWAYS = ("fcfs", "oracle", "srpt-length", "sd-index", "laps-sd")
"""Policies that run in every regime that names no others: the yardsticks, the strongest rival, and ours."""
OURS = "laps-sd"
LEVELS_COST = 1.02
"""Upper bound of the mean latency of `laps-sd` over that of its level-free limit, in every regime."""
RIVALS = (
    "fcfs", "sjf-length", "srpt-length", "mlfq", "las", "laps-sd-paper", "laps-sd-paper:perceived_levels=true",
    "sd-index", "laps-sd", "oracle",
)  # fmt: skip
"""Policies that are compared over all regimes, in the order of the tables of results."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """Bounds of `figure` of `policy` divided by that (or `of_figure`) of `of`, in this regime or in
    `of_regime`, mean over seeds. Regimes are paired by seed, so another regime should draw the same jobs.
    """

    policy: str = "laps-sd"
    figure: str = "mean_s"
    of: str = "fcfs"
    of_figure: str = ""
    of_regime: str = ""
    at_most: float = float("inf")
    at_least: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Workload, machines and settings of the core, with the expectations."""

    title: str
    workers: int = 1
    slowness: tuple[float, ...] = ()
    """Each of the first workers takes this many times as long for everything as `machine` does."""
    policies: tuple[str, ...] = ()
    machine: Machine = field(default_factory=Machine)
    workload: Workload = field(default_factory=Workload)
    settings: Mapping[str, Any] = field(default_factory=dict)
    expect: tuple[Expectation, ...] = ()
    yardstick: bool = False
    """What another regime is compared with, and no goal itself: levels need not be at work."""
    name: str = ""

    @property
    def capacity(self) -> float:
        """Return the number of workers; one that is n times as slow counts 1/n."""
        slower = self.slowness[: self.workers]
        return self.workers - len(slower) + sum(1 / times for times in slower)

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        """Return the expectations of the file, and the one that every regime has."""
        return (*self.expect, Expectation(of="sd-index", at_most=LEVELS_COST))

    @property
    def runs(self) -> tuple[str, ...]:
        """Return the policies that run, each once."""
        named = [*self.policies] or [*ALWAYS]
        for expected in self.expectations if not self.policies else self.expect:
            named += [expected.policy, expected.of]
        return tuple(dict.fromkeys(named))


def read_regime(path: Path) -> Regime:
    """Read a regime. Raise ValueError with the table and the key that is wrong."""
    with path.open("rb") as file:
        regime = described(Regime, tomllib.load(file), path.name)
    return dataclasses.replace(regime, name=path.stem)


def make_policy(spec: str, jobs: Mapping[str, Job], machine: Machine, settings: CoreSettings) -> Policy:
    """Return `oracle`, or a policy with the knowledge of production."""
    name = spec.partition(":")[0]
    return Oracle(settings, jobs, machine) if name == "oracle" else policy_named(name, settings)


REPORTS_PER_S = "reports_per_s"
"""What a policy's settings may name beside those of the core: reports that the core receives in a second; the rest wait
and are merged (`scheduler_svc/core/merged_rounds.py`)."""
ROUTER = "router"
"""Likewise: what chooses the worker of a request, one of `simulator.routers.ROUTERS`."""


def settings_of(spec: str, common: Mapping[str, Any]) -> CoreSettings:
    """Return the settings of a policy: `NAME:setting=value,setting=value` sets those that differ from the
    regime's.
    """
    own = _own_settings(spec)
    own.pop(REPORTS_PER_S, None)
    own.pop(ROUTER, None)
    return described(CoreSettings, {**common, **own}, spec)


def reports_per_s_of(spec: str) -> float | None:
    """Return how many reports a second the core receives; None: each of them."""
    found = _own_settings(spec).get(REPORTS_PER_S)
    return None if found is None else float(found)


def router_of(spec: str) -> Router | None:
    """Return what chooses the workers; None: what does in production."""
    name = _own_settings(spec).get(ROUTER)
    if name is None:
        return None
    if name not in ROUTERS:
        raise ValueError(f"{spec}: there is no router {name!r}; there are: {', '.join(ROUTERS)}")
    return ROUTERS[name]()


def _own_settings(spec: str) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for part in filter(None, spec.partition(":")[2].split(",")):
        key, _, value = part.partition("=")
        if key == ROUTER:
            own[key] = value
            continue
        try:
            own[key] = tomllib.loads(f"value = {value}")["value"]
        except ValueError:
            raise ValueError(f"{spec}: {key} must be true, false or a number, not {value!r}") from None
    return own
