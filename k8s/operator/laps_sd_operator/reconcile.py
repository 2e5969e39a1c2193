"""What to do next about one pool: what is seen goes in, actions come out, nothing is remembered.

Standard library only, no clock, no I/O. All state lives in Kubernetes (the replica count, a mark on each pod that is to go) and in
the scheduler (who drains), so the operator may die between any two actions and begin again from what it sees.

Scaling up is one action. Scaling down takes several, over many calls:

1. **Choose** who goes. Pods that serve nobody first: Kubernetes takes those first too, whatever their deletion cost. Then who was
   chosen before. Then idle workers. Then the one that the scheduler calls cheapest to lose, one at a time.
2. **Mark** the pod (deletion cost, and since when), then have the scheduler **drain** its worker: in this order, so that a restart
   finds the choice.
3. When all who were chosen are drained, or had their time, **lower the replica count**. Kubernetes deletes by deletion cost.

A pod that was marked and is no longer to go is spared; its worker, which ends its process when drained, comes back by itself.
A Deployment that somebody scaled by hand is not fought: its number becomes the pool's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """How far a pod has come, in the order in which Kubernetes takes pods away."""

    UNSCHEDULED = 0
    PENDING = 1
    RUNNING = 2
    """Not ready yet, or no longer."""
    READY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod of the pool's Deployment."""

    name: str
    phase: Phase
    terminating: bool = False
    chosen_s: float | None = None
    """Unix time at which it was marked to go; None: it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker as the scheduler has it; its name is its pod's."""

    name: str
    draining: bool = False
    requests: int = 0
    """On its list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Everything that the decision rests on."""

    now_s: float
    wanted: int
    """spec.replicas of the pool."""
    least: int = 0
    most: int | None = None
    drain_s: float = 60.0
    """How long a worker may take to hand over its requests."""
    replicas: int | None = None
    """Of the Deployment; None: there is none."""
    last_set: int | None = None
    """The replica count that this operator last gave the Deployment, as written beside it."""
    up_to_date: bool = True
    """The Deployment's template is the pool's."""
    pods: tuple[Pod, ...] = ()
    workers: tuple[Worker, ...] | None = ()
    """None: no scheduler answers."""
    cheapest: str | None = None
    """Who is cheapest to lose, by the scheduler."""


@dataclass(frozen=True, slots=True)
class Create:
    """The Deployment."""

    replicas: int


@dataclass(frozen=True, slots=True)
class Update:
    """The Deployment's template; not its replica count."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The Deployment, and what was last set, in one write."""

    replicas: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Somebody scaled the Deployment: write the number into the pool and into what was last set."""

    replicas: int


@dataclass(frozen=True, slots=True)
class Mark:
    """The pod as one to go: lowest deletion cost, and since when."""

    pod: str
    since_s: float


@dataclass(frozen=True, slots=True)
class Spare:
    """A pod that was marked: take the mark away."""

    pod: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask the scheduler to."""

    worker: str


Action = Create | Update | Scale | Adopt | Mark | Spare | Drain


def reconcile(seen: Seen) -> list[Action]:
    """The next actions, in the order in which to carry them out; empty: nothing to do but wait, or nothing at all."""
    wanted = _within(seen.wanted, seen)
    if seen.replicas is None:
        return [Create(wanted)]
    if seen.last_set is not None and seen.replicas != seen.last_set:
        return [Adopt(seen.replicas)]
    actions: list[Action] = [] if seen.up_to_date else [Update()]
    alive = [pod for pod in seen.pods if not pod.terminating]
    if seen.replicas < wanted:
        actions.append(Scale(wanted))
    elif len(alive) > seen.replicas:
        # Kubernetes has not yet taken away what it was told to, or is in the middle of an update. A mark that is taken back
        # now would make it take another pod.
        return actions
    elif seen.replicas == wanted:
        actions += [Spare(pod.name) for pod in alive if pod.chosen_s is not None]
    elif len(alive) < seen.replicas:
        actions.append(Scale(max(wanted, len(alive))))  # of those that do not exist yet nobody has to leave
    else:
        actions += _shrink(seen, alive, wanted)
    return actions


def _within(replicas: int, seen: Seen) -> int:
    bounded = max(seen.least, replicas)
    return bounded if seen.most is None else min(seen.most, bounded)


def _shrink(seen: Seen, alive: list[Pod], wanted: int) -> Iterator[Action]:
    workers = None if seen.workers is None else {worker.name: worker for worker in seen.workers}
    chosen = _choose(seen, alive, len(alive) - wanted)
    going = {pod.name for pod in chosen}
    for pod in alive:
        if pod.chosen_s is not None and pod.name not in going:
            yield Spare(pod.name)
    for pod in chosen:
        if pod.chosen_s is None:
            yield Mark(pod.name, seen.now_s)
    for pod in chosen:
        worker = (workers or {}).get(pod.name)
        if worker is not None and not worker.draining:
            yield Drain(pod.name)
    if len(chosen) == len(alive) - wanted and all(
        pod.chosen_s is not None and (_is_free(pod, seen) or _is_overdue(pod, seen)) for pod in chosen
    ):
        yield Scale(wanted)


def _choose(seen: Seen, alive: list[Pod], count: int) -> list[Pod]:
    """At most `count`: fewer while nobody can say who is cheapest to lose."""

    def place(pod: Pod) -> tuple[int, bool, str]:
        marked = pod.chosen_s is not None
        if pod.phase < Phase.READY:
            group = int(pod.phase)
        elif marked and (_is_free(pod, seen) or not _is_overdue(pod, seen)):
            group = 3
        elif _is_free(pod, seen):
            group = 4
        else:
            # One that had its time and is still busy goes only where nobody is idle.
            group = 5 if marked else 6
        return group, not marked, pod.name

    candidates = [
        pod
        for pod in alive
        if pod.phase < Phase.READY
        or pod.chosen_s is not None
        or _is_free(pod, seen)
        or (pod.name == seen.cheapest and seen.workers is not None)
    ]
    return sorted(candidates, key=place)[:count]


def _is_free(pod: Pod, seen: Seen) -> bool:
    """It serves nobody, and this is known."""
    if pod.phase < Phase.READY:
        return True
    if seen.workers is None:
        return False
    return all(worker.requests == 0 for worker in seen.workers if worker.name == pod.name)


def _is_overdue(pod: Pod, seen: Seen) -> bool:
    return pod.chosen_s is not None and seen.now_s >= pod.chosen_s + seen.drain_s
