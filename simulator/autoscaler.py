"""HorizontalPodAutoscaler over a virtual cluster: its pod counts, and pods with a start time.

The formula is that of Kubernetes (`kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale`,
"Algorithm details" and "Configurable scaling behavior", v1.30): a target, a tolerance, a window over which
the highest computed count holds before pods are removed, a limit to the rate at which pods are added. KEDA
passes its metrics to the same formula, so the signals here differ in their metric alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scheduler_svc.core.events import Event, WorkerDraining, WorkerUp
from simulator.cluster import Cluster, Outside
from simulator.machine import Machine

Signal = Literal["load", "backlog", "requests", "queue", "utilisation", "fixed"]
SIGNALS: tuple[Signal, ...] = ("load", "backlog", "requests", "queue", "utilisation", "fixed")


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Signal and parameters of the scaling. Times in seconds; the defaults are Kubernetes' own.

    `signal`, with `target` per pod: `load`, the workers that the arriving work keeps busy
    (`laps_sd_arriving_load`), and beside it the backlog with `backlog_target_s`: two metrics, of which Kubernetes takes the
    one that asks for more pods; `backlog`, machine seconds that all unfinished requests still need by the
    core's estimates, the value of `laps_sd_backlog_seconds` and of the external scaler; `requests`, the
    number of unfinished requests; `queue`, the number of unfinished requests that do not run; `utilisation`,
    the share of the time since the last look that ready pods spent in rounds. `fixed`: always `target` pods.
    """

    signal: Signal
    target: float
    backlog_target_s: float = 20.0
    """Target of the backlog beside `load`."""
    least: int = 1
    most: int = 16
    start_s: float = 60.0
    """Time from the decision until a new pod accepts work; its device is held all that time."""
    sync_s: float = 15.0
    tolerance: float = 0.10
    down_window_s: float = 300.0
    up_pods: int = 4
    up_factor: float = 2.0
    """Limit of growth in one look: `up_pods` more pods or `up_factor` times as many, the larger one."""

    def __post_init__(self) -> None:
        if self.signal not in SIGNALS:
            raise ValueError(f"signal must be one of {', '.join(SIGNALS)}, not {self.signal!r}")
        if not 0 < self.target < math.inf:
            raise ValueError(f"target must be more than 0, not {self.target}")
        if not 0 < self.backlog_target_s < math.inf:
            raise ValueError(f"backlog_target_s must be more than 0, not {self.backlog_target_s}")
        if not 1 <= self.least <= self.most:
            raise ValueError("least must be from 1 to most")


@dataclass(frozen=True, slots=True)
class Look:
    """Observation of the autoscaler at one time."""

    wanted: int
    """Last requested number of pods."""
    ready: int
    """Number of these pods that accept work."""
    value: float
    """Value of the metric: of the whole pool; for `utilisation`, the mean over ready pods."""
    backlog_s: float = 0.0
    """Value of the second metric, of the signal `load`."""


def desired_by_average(scaling: Scaling, look: Look) -> int:
    """Return the pod count by metrics of the whole pool (type External or Object, AverageValue): the largest one."""
    metrics = [(look.value, scaling.target)]
    if scaling.signal == "load":
        metrics.append((look.backlog_s, scaling.backlog_target_s))
    return max(_by_average(value, target, scaling, look) for value, target in metrics)


def _by_average(value: float, target: float, scaling: Scaling, look: Look) -> int:
    usage_ratio = value / (target * look.wanted)
    if abs(1.0 - usage_ratio) <= scaling.tolerance:
        return look.wanted
    return math.ceil(value / target)


def desired_by_utilisation(scaling: Scaling, look: Look) -> int:
    """Return the pod count by a metric of each pod (type Resource or Pods). Pods that are not ready count as
    idle if the count would grow.
    """
    if not look.ready:
        return look.wanted
    ratio = look.value / scaling.target
    starting = look.wanted - look.ready
    if abs(1.0 - ratio) <= scaling.tolerance:
        return look.wanted
    if not starting or ratio < 1.0:
        return math.ceil(ratio * look.ready)
    with_starting = look.value * look.ready / look.wanted / scaling.target
    if with_starting < 1.0 or abs(1.0 - with_starting) <= scaling.tolerance:
        return look.wanted
    return math.ceil(with_starting * look.wanted)


class Autoscaler:
    """Pod counts from looks, with the computed counts of the window."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._desired: deque[tuple[float, int]] = deque()

    def pods(self, now_s: float, look: Look) -> int:
        """Return the number of pods that should exist now."""
        scaling = self._scaling
        if scaling.signal == "fixed":
            return int(scaling.target)
        by = desired_by_utilisation if scaling.signal == "utilisation" else desired_by_average
        desired = by(scaling, look)
        if not self._desired:
            self._desired.append((now_s, look.wanted))  # no removal before a whole window has passed
        self._desired.append((now_s, desired))
        while self._desired[0][0] <= now_s - scaling.down_window_s:
            self._desired.popleft()
        if desired < look.wanted:
            highest = max(desired for _, desired in self._desired)
            desired = min(look.wanted, highest)
        fastest = max(look.wanted + scaling.up_pods, math.ceil(look.wanted * scaling.up_factor))
        return min(max(desired, scaling.least), scaling.most, fastest)


@dataclass(slots=True)
class _Pod:
    created_s: float
    up: bool = False
    leaves: bool = False
    gone_s: float = math.inf
    seen_busy_s: float = 0.0


class Pods:
    """Pods of a `Cluster` that was created without workers. Create it before `run`; read it afterwards."""

    def __init__(self, cluster: Cluster, machine: Machine, scaling: Scaling, first: int) -> None:
        """Create `first` pods that are ready at 0."""
        self._cluster = cluster
        self._machine = machine
        self._scaling = scaling
        self._autoscaler = Autoscaler(scaling)
        self._pods: dict[str, _Pod] = {}
        self._wanted = first
        self.changes: list[tuple[float, int]] = [(0.0, first)]
        """(time, requested number of pods) at each change."""
        for _ in range(first):
            cluster.at(0.0, self._starter(self._create(0.0)))
        cluster.at(scaling.sync_s, self._sync)

    def device_s(self, end_s: float) -> float:
        """Return the device seconds held by pods until `end_s`: from a pod's creation until its removal."""
        return sum(max(0.0, min(pod.gone_s, end_s) - pod.created_s) for pod in self._pods.values())

    def _create(self, now_s: float) -> str:
        name = f"w{len(self._pods):04d}"
        self._pods[name] = _Pod(now_s)
        return name

    def _starter(self, name: str) -> Outside:
        """Return the call by which a pod becomes ready, unless it was removed before."""
        pod, up = self._pods[name], WorkerUp(self._machine.facts(name), ())

        def start(now_s: float) -> Sequence[Event]:
            if pod.leaves:
                return ()
            pod.up = True
            return (up,)

        return start

    def _sync(self, now_s: float) -> Sequence[Event]:
        if not self._cluster.unfinished:
            return ()
        self._cluster.at(now_s + self._scaling.sync_s, self._sync)
        self._note_removed(now_s)
        pods = self._autoscaler.pods(now_s, self._look(now_s))
        if pods != self._wanted:
            self.changes.append((now_s, pods))
        self._wanted = pods
        present = [name for name, pod in self._pods.items() if not pod.leaves]
        for _ in range(pods - len(present)):
            name = self._create(now_s)
            self._cluster.at(now_s + self._scaling.start_s, self._starter(name))
        return self._shrink(now_s, present, len(present) - pods)

    def _look(self, now_s: float) -> Look:
        ready = {name: pod for name, pod in self._pods.items() if pod.up and not pod.leaves}
        totals = self._cluster.scheduler.totals()
        value = 0.0
        match self._scaling.signal:
            case "load":
                value = self._cluster.scheduler.arriving_load(now_s)
            case "backlog":
                value = totals.backlog_s
            case "requests":
                value = totals.queued + totals.listed
            case "queue":
                value = totals.queued + totals.listed - totals.running
            case "utilisation" if ready:
                value = sum(self._busy_share(name, pod) for name, pod in ready.items()) / len(ready)
        return Look(self._wanted, len(ready), value, totals.backlog_s)

    def _busy_share(self, name: str, pod: _Pod) -> float:
        busy_s = self._cluster.busy_s(name)
        share = min(1.0, (busy_s - pod.seen_busy_s) / self._scaling.sync_s)
        pod.seen_busy_s = busy_s
        return share

    def _shrink(self, now_s: float, present: Sequence[str], count: int) -> Sequence[Event]:
        """Remove `count` pods: first those that still start, the youngest first; then the cheapest to remove,
        by the operator's order.
        """
        events: list[Event] = []
        starting = [name for name in present if not self._pods[name].up]
        for name in reversed(starting[-count:] if count > 0 else ()):
            self._pods[name].leaves = True
            self._pods[name].gone_s = now_s
            count -= 1
        views = {view.worker_id: view for view in self._cluster.scheduler.workers()}
        up = [views[name] for name in present if self._pods[name].up and name in views]
        up.sort(key=lambda view: (view.moving_cost_s, view.listed, view.worker_id))
        for view in up[: max(0, count)]:
            self._pods[view.worker_id].leaves = True
            events.append(WorkerDraining(view.worker_id))
        return events

    def _note_removed(self, now_s: float) -> None:
        """Record the removal of drained pods: the scheduler no longer lists their workers. A pod counts until
        this look.
        """
        here = {view.worker_id for view in self._cluster.scheduler.workers()}
        for name, pod in self._pods.items():
            if pod.up and pod.leaves and name not in here:
                pod.gone_s = min(pod.gone_s, now_s)
