"""Next actions for one pool: from an observation to actions, without memory.

Standard library only, no clock, no I/O. All state is in Kubernetes (the replica count, a mark on each pod
that is to leave) and in the scheduler (the draining workers), so the operator may stop between any two
actions and continue from its next observation.

Scaling up is one action. Scaling down takes several, over many calls:

1. **Choose** the pods to remove. First the pods that are not ready: Kubernetes removes those first too,
   whatever their deletion cost. Then the pods that were chosen before. Then idle
   workers. Then the worker that is cheapest to remove by the scheduler's estimate, one at a time.
2. **Mark** the pod (deletion cost and time), then have the scheduler **drain** its worker: in this order, so
   that the choice survives a restart.
3. As soon as a chosen pod has no requests, is not ready or its drain time is over, **release** it (a deletion cost
   below that of the other chosen pods) and **lower the replica count** by the number of released pods. Kubernetes
   deletes by deletion cost. A worker that drains is not ready after a few seconds; it continues to drain while its
   pod terminates, within the grace period.

While an update replaces the pods, the number is lowered at once: Kubernetes decides then which pods go, and each
drains while it terminates.

A marked pod that may stay is spared; its worker, whose process ends after the drain, restarts by itself. A
manual change of the Deployment's scale is not reverted: its number becomes the pool's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """Progress of a pod, in the order in which Kubernetes removes pods."""

    UNSCHEDULED = 0
    PENDING = 1
    RUNNING = 2
    """Not ready yet, or no longer ready."""
    READY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod of the pool's Deployment."""

    name: str
    phase: Phase
    template: str = ""
    """Kubernetes' hash of the template that it was made from."""
    terminating: bool = False
    chosen_s: float | None = None
    """Unix time at which it was marked for removal; None: not marked."""
    released: bool = False
    """Whether its deletion cost is below that of the pods that are only marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker in the scheduler's view."""

    name: str
    """Name of its pod; empty: a new leader knows of it from the record, and it has not connected yet."""
    draining: bool = False
    requests: int = 0
    """Number of requests on its list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """All inputs of the decision."""

    now_s: float
    wanted: int
    """Replica count in the pool's spec (`spec.replicas`)."""
    least: int = 0
    most: int | None = None
    drain_s: float = 60.0
    """Seconds in which a worker may hand over its requests."""
    replicas: int | None = None
    """Replica count of the Deployment; None: there is no Deployment."""
    last_set: int | None = None
    """Replica count that this operator last gave the Deployment, as written in its annotation."""
    up_to_date: bool = True
    """Whether the Deployment has the pool's template."""
    pods: tuple[Pod, ...] = ()
    workers: tuple[Worker, ...] | None = ()
    """Workers of the pool; None: no scheduler answers."""
    cheapest: str | None = None
    """Name of the cheapest worker to remove, by the scheduler's estimate."""


@dataclass(frozen=True, slots=True)
class Create:
    """Creation of the Deployment."""

    replicas: int


@dataclass(frozen=True, slots=True)
class Update:
    """Replacement of the Deployment's template, without its replica count."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Change of the Deployment's replica count, with the annotation of the last set count, in one write."""

    replicas: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Adoption of a manual change of the Deployment's scale: the number is written into the pool and into the
    annotation with the last set count.
    """

    replicas: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Mark on a pod for removal: lowest deletion cost, and the time of the choice."""

    pod: str
    since_s: float


@dataclass(frozen=True, slots=True)
class Release:
    """Deletion cost of a marked pod below that of the other marked ones: it goes next."""

    pod: str


@dataclass(frozen=True, slots=True)
class Spare:
    """Removal of the mark from a pod."""

    pod: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Drain of a worker by the scheduler."""

    worker: str


Action = Create | Update | Scale | Adopt | Mark | Release | Spare | Drain


def reconcile(seen: Seen) -> list[Action]:
    """Return the next actions in their order of execution; empty if there is nothing to do now."""
    wanted = wanted_of(seen)
    if seen.replicas is None:
        return [Create(wanted)]
    if seen.last_set is not None and seen.replicas != seen.last_set:
        return [Adopt(seen.replicas)]
    actions: list[Action] = [] if seen.up_to_date else [Update()]
    alive = [pod for pod in seen.pods if not pod.terminating]
    if seen.replicas < wanted:
        actions.append(Scale(wanted))
    elif seen.replicas > wanted and len({pod.template for pod in alive}) > 1:
        # During an update Kubernetes divides the difference between the old and the new pods, whatever their
        # costs. It is not waited for: an update may never end, for want of the node that a smaller number frees.
        if seen.workers is not None:
            actions.append(Scale(wanted))
    elif len(alive) > seen.replicas:
        # Kubernetes has not yet removed all surplus pods, or is in the middle of an update. If a mark were
        # removed now, Kubernetes would delete another pod.
        return actions
    elif seen.replicas == wanted:
        actions += [Spare(pod.name) for pod in alive if pod.chosen_s is not None]
    elif len(alive) < seen.replicas:
        # Pods that do not exist yet need no drain.
        actions.append(Scale(max(wanted, len(alive))))
    else:
        actions += _shrink(seen, alive, wanted)
    return actions


def wanted_of(seen: Seen) -> int:
    """Return the replica count in the pool's spec, within its bounds."""
    bounded = max(seen.least, seen.wanted)
    return bounded if seen.most is None else min(seen.most, bounded)


def _shrink(seen: Seen, alive: list[Pod], wanted: int) -> Iterator[Action]:
    workers = None if seen.workers is None else {worker.name: worker for worker in seen.workers}
    chosen = _choose(seen, alive, len(alive) - wanted)
    going = {pod.name for pod in chosen}
    for pod in alive:
        if pod.chosen_s is not None and pod.name not in going:
            yield Spare(pod.name)
    # A busy pod after its drain time waits for an idle pod that is marked only now.
    idle_first = any(pod.chosen_s is None and _is_free(pod, seen) for pod in chosen)
    leaving = {
        pod.name
        for pod in chosen
        if pod.chosen_s is not None and (_is_free(pod, seen) or (_is_overdue(pod, seen) and not idle_first))
    }
    for pod in chosen:
        if pod.chosen_s is None:
            yield Mark(pod.name, seen.now_s)
        elif pod.released and pod.name not in leaving:  # its worker was started again and has requests
            yield Mark(pod.name, pod.chosen_s)
    for pod in chosen:
        worker = (workers or {}).get(pod.name)
        if worker is not None and not worker.draining:
            yield Drain(pod.name)
    for pod in chosen:
        if pod.name in leaving and not pod.released:
            yield Release(pod.name)
    if leaving:
        yield Scale(len(alive) - len(leaving))


def _choose(seen: Seen, alive: list[Pod], count: int) -> list[Pod]:
    """Return at most `count` pods to remove: fewer while the cheapest worker is unknown."""

    def place(pod: Pod) -> tuple[int, bool, str]:
        marked = pod.chosen_s is not None
        if pod.phase < Phase.READY:
            group = int(pod.phase)
        elif marked and (_is_free(pod, seen) or not _is_overdue(pod, seen)):
            group = 3
        elif _is_free(pod, seen):
            group = 4
        else:
            # A busy pod after its drain time is removed only if no pod is idle.
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
    """Return whether the pod may go: it is not ready, or certainly has no requests."""
    if pod.phase < Phase.READY:
        return True
    if seen.workers is None:
        return False
    named = [worker for worker in seen.workers if worker.name == pod.name]
    # A worker of unknown name may be that of any pod whose own is not listed.
    possible = named or [worker for worker in seen.workers if not worker.name]
    return not any(worker.requests for worker in possible)


def _is_overdue(pod: Pod, seen: Seen) -> bool:
    return pod.chosen_s is not None and seen.now_s >= pod.chosen_s + seen.drain_s
