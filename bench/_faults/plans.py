"""The plan: kinds of faults with their weights, and the sequence of faults that a seed decides."""

from __future__ import annotations

import random
from dataclasses import dataclass

LONGEST_S = 8.0
"""Upper bound of a pause or a silence, in seconds: longer than the lease, the links' silence and a worker's
grace, so that both sides of each bound occur."""
DOWN_S = 2.0
"""Upper bound of the time from a process's kill to its restart, in seconds."""

WEIGHTS = {
    "kill worker": 10, "pause worker": 8, "drain worker": 5, "scale down": 4, "scale up": 3,
    "cut worker": 6, "silence worker": 4, "half-silence worker": 4,
    "kill leader": 5, "pause leader": 5, "stop leader": 3, "kill standby": 1,
    "cut leader from record": 4, "silence leader from record": 3, "half-silence leader from record": 3,
    "kill gateway": 6, "pause gateway": 5, "stop gateway": 3,
    "cut gateway": 4, "silence gateway": 3, "half-silence gateway": 3,
    "cut clients": 5, "silence clients": 2, "half-silence clients": 2,
    "pause record": 4, "restart record": 3, "kill record": 3, "empty record": 4,
    "kill leader and record": 2, "kill leader while a worker drains": 2, "kill gateway and worker": 3,
    "empty record and kill leader": 1,
    "lose tail of record": 5, "fill disk of record": 3, "fill memory of record": 3, "flush scripts of record": 2,
    "delay worker": 3, "delay gateway": 3, "delay clients": 2, "delay leader from record": 3,
    "half-open worker": 3, "half-open gateway": 2,
    "kill schedulers": 2, "pause schedulers": 2, "kill gateways": 2, "pause gateways": 2, "kill everything": 2,
    "deadly request": 3,
    "kill engine": 5, "pause engine": 4,
}  # fmt: skip
ENGINE_KINDS = frozenset({"kill engine", "pause engine"})
"""Kinds of faults that hit the process of a worker's engine alone."""
DOUBLE = frozenset(
    {
        "kill leader and record",
        "kill leader while a worker drains",
        "kill gateway and worker",
        "empty record and kill leader",
        "lose tail of record",
        "kill schedulers",
        "pause schedulers",
        "kill gateways",
        "pause gateways",
        "kill everything",
        "deadly request",
    }
)
"""Kinds of faults that need several components up at once."""
KINDS = tuple(WEIGHTS)


@dataclass(frozen=True, slots=True)
class Fault:
    """One line of the plan."""

    number: int
    after_s: float
    """Seconds since the previous fault."""
    kind: str
    lasts_s: float
    draw: float
    """Choice among the possible victims, 0 to 1."""

    @property
    def down_s(self) -> float:
        """Return the time from a process's kill to its restart, in seconds."""
        return DOWN_S * self.lasts_s / LONGEST_S


@dataclass(slots=True)
class InjectedFault:
    """A fault that was injected, with its victims."""

    fault: Fault
    victims: tuple[str, ...]
    at_s: float
    carried: bool
    """True if at least one victim carried requests."""
    loses: bool = False
    """True if the record may have lost data, so that the losses in docs/guarantees.md may occur."""
    over_s: float | None = None


def plan(seed: int, count: int, *, every_s: float, kinds: tuple[str, ...] = KINDS) -> list[Fault]:
    """Return the plan of a seed; equal arguments give equal plans."""
    rng = random.Random(seed)
    weights = [WEIGHTS[kind] for kind in kinds]
    faults = []
    for number in range(count):
        after_s = every_s * rng.uniform(0.5, 1.5)
        [kind] = rng.choices(kinds, weights)
        # Short ones are the more interesting half: components come back while the others still react to their
        # absence.
        lasts_s = LONGEST_S * rng.random() ** 2
        faults.append(Fault(number, after_s, kind, lasts_s, rng.random()))
    return faults
