"""The operator's next actions: a pure function, against a small world of pods, workers and Kubernetes' own
rules.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from laps_sd_operator.reconcile import (
    Action,
    Adopt,
    Create,
    Drain,
    Mark,
    Phase,
    Pod,
    Release,
    Scale,
    Seen,
    Spare,
    Update,
    Worker,
    reconcile,
)

DRAIN_S = 10.0


def pods(*names: str, phase: Phase = Phase.READY, **fields: float | bool | str) -> tuple[Pod, ...]:
    return tuple(Pod(name=name, phase=phase, **fields) for name in names)  # type: ignore[arg-type]


def seen(wanted: int, replicas: int | None, **fields: object) -> Seen:
    return Seen(now_s=100.0, wanted=wanted, replicas=replicas, last_set=replicas, drain_s=DRAIN_S, **fields)  # type: ignore[arg-type]


def test_a_new_pool_gets_its_deployment() -> None:
    assert reconcile(seen(3, None)) == [Create(3)]


def test_scaling_up_is_one_step() -> None:
    assert reconcile(seen(3, 1, pods=pods("a"))) == [Scale(3)]


def test_the_number_stays_within_its_bounds() -> None:
    assert reconcile(seen(9, 1, most=4, pods=pods("a"))) == [Scale(4)]
    assert reconcile(seen(0, 1, least=2, pods=pods("a"))) == [Scale(2)]


def test_another_template_changes_no_number() -> None:
    assert reconcile(seen(1, 1, pods=pods("a"), workers=(Worker(name="a"),), up_to_date=False)) == [Update()]


def test_the_cheapest_to_lose_is_marked_and_then_drained() -> None:
    busy = (Worker(name="a", requests=3), Worker(name="b", requests=1))

    actions = reconcile(seen(1, 2, pods=pods("a", "b"), workers=busy, cheapest="b"))

    assert actions == [Mark("b", 100.0), Drain("b")]


def test_while_it_drains_nothing_happens() -> None:
    found = (*pods("a"), *pods("b", chosen_s=95.0))
    workers = (Worker(name="a", requests=3), Worker(name="b", requests=1, draining=True))

    assert reconcile(seen(1, 2, pods=found, workers=workers, cheapest="a")) == []


def test_once_it_is_drained_the_number_falls() -> None:
    found = (*pods("a"), *pods("b", chosen_s=95.0))
    workers = (Worker(name="a", requests=3), Worker(name="b", requests=0, draining=True))

    assert reconcile(seen(1, 2, pods=found, workers=workers, cheapest="a")) == [Release("b"), Scale(1)]


def test_a_worker_that_ended_when_it_was_drained_counts_as_drained() -> None:
    found = (*pods("a"), *pods("b", chosen_s=95.0))

    workers = (Worker(name="a", requests=3),)

    assert reconcile(seen(1, 2, pods=found, workers=workers)) == [Release("b"), Scale(1)]


def test_a_pod_is_not_idle_while_a_worker_of_unknown_name_has_requests() -> None:
    """A new leader knows from the record that a worker has requests, and its name when it has connected."""
    unknown = (Worker(name="", requests=3), Worker(name="c"))
    found = pods("a", "b", "c")

    assert reconcile(seen(1, 3, pods=found, workers=unknown)) == [Mark("c", 100.0), Drain("c")]
    assert reconcile(seen(1, 3, pods=found, workers=(Worker(name=""), Worker(name="c")))) == [
        Mark("a", 100.0),
        Mark("b", 100.0),
    ]


def test_a_victim_goes_as_soon_as_it_is_free_and_not_when_all_are() -> None:
    found = (*pods("a"), *pods("b", "c", chosen_s=95.0))
    workers = (
        Worker(name="a", requests=3),
        Worker(name="b", requests=1, draining=True),
        Worker(name="c", draining=True),
    )

    assert reconcile(seen(1, 3, pods=found, workers=workers)) == [Release("c"), Scale(2)]


def test_a_busy_pod_after_its_drain_time_waits_for_an_idle_one() -> None:
    found = (*pods("a", "b"), *pods("c", chosen_s=100.0 - DRAIN_S))
    workers = (Worker(name="a", requests=3), Worker(name="b"), Worker(name="c", requests=1, draining=True))

    actions = reconcile(seen(1, 3, pods=found, workers=workers))

    assert actions == [Mark("b", 100.0), Drain("b")]


def test_a_released_pod_whose_worker_is_busy_again_is_only_marked() -> None:
    """Otherwise Kubernetes would take it in place of the next free one."""
    found = (*pods("a"), *pods("b", chosen_s=95.0, released=True), *pods("c", chosen_s=96.0))
    workers = (
        Worker(name="a", requests=3),
        Worker(name="b", requests=1, draining=True),
        Worker(name="c", draining=True),
    )

    actions = reconcile(seen(1, 3, pods=found, workers=workers))

    assert actions == [Mark("b", 95.0), Release("c"), Scale(2)]


def test_a_pod_that_is_released_already_only_has_to_go() -> None:
    found = (*pods("a"), *pods("b", chosen_s=95.0, released=True))

    assert reconcile(seen(1, 2, pods=found, workers=(Worker(name="a"),))) == [Scale(1)]


def test_a_drain_that_takes_too_long_is_cut_off() -> None:
    """Not its requests: they go on elsewhere from their last committed token."""
    found = (*pods("a"), *pods("b", chosen_s=100.0 - DRAIN_S))
    workers = (Worker(name="a", requests=3), Worker(name="b", requests=1, draining=True))

    assert reconcile(seen(1, 2, pods=found, workers=workers)) == [Release("b"), Scale(1)]


def test_a_worker_that_drains_and_is_no_longer_ready_goes_on_in_the_grace_period_of_its_pod() -> None:
    """Kubernetes removes a pod that is not ready first, whatever its deletion cost."""
    found = (*pods("a"), *pods("b", phase=Phase.RUNNING, chosen_s=95.0))
    workers = (Worker(name="a", requests=3), Worker(name="b", requests=1, draining=True))

    assert reconcile(seen(1, 2, pods=found, workers=workers)) == [Release("b"), Scale(1)]


def test_a_pod_that_never_served_goes_before_any_other() -> None:
    found = (*pods("a", "b"), *pods("new", phase=Phase.PENDING))
    workers = (Worker(name="a"), Worker(name="b", requests=1))

    assert reconcile(seen(2, 3, pods=found, workers=workers, cheapest="a")) == [Mark("new", 100.0)]


def test_what_does_not_exist_yet_is_not_drained() -> None:
    assert reconcile(seen(1, 4, pods=pods("a", "b"), workers=())) == [Scale(2)]


def test_a_mark_stays_until_kubernetes_has_taken_the_pod() -> None:
    """Taken back a moment too early it would make Kubernetes take another one."""
    found = (*pods("a"), *pods("b", chosen_s=95.0))

    assert reconcile(seen(1, 1, pods=found, workers=())) == []


@pytest.mark.parametrize("phase", [Phase.UNSCHEDULED, Phase.PENDING])
def test_a_new_pod_of_an_update_that_never_starts_does_not_keep_the_number_up(phase: Phase) -> None:
    """Its node may be the one that a smaller number frees."""
    found = (*pods("a", "b", "c", template="old"), *pods("d", phase=phase, template="new"))
    busy = tuple(Worker(name=name, requests=1) for name in "abc")

    assert reconcile(seen(1, 3, pods=found, workers=busy, cheapest="a")) == [Scale(1)]
    assert reconcile(seen(1, 3, pods=found, workers=None)) == []
    assert reconcile(seen(1, 1, pods=found, workers=busy, cheapest="a")) == []


def test_during_an_update_no_pod_is_chosen() -> None:
    """With maxSurge 0 the new pod is the one that is not ready, and Kubernetes takes one of the old pods: those are
    more.
    """
    found = (*pods("a", "b", template="old"), *pods("c", phase=Phase.RUNNING, template="new"))
    busy = tuple(Worker(name=name, requests=1) for name in "ab")

    assert reconcile(seen(2, 3, pods=found, workers=busy, cheapest="a")) == [Scale(2)]


def test_pods_of_an_earlier_template_that_terminate_are_no_update() -> None:
    found = (*pods("a", "b", template="new"), *pods("c", template="old", terminating=True))
    busy = tuple(Worker(name=name, requests=1) for name in "ab")

    assert reconcile(seen(1, 2, pods=found, workers=busy, cheapest="b")) == [Mark("b", 100.0), Drain("b")]


def test_scaling_up_again_spares_who_was_chosen() -> None:
    found = (*pods("a"), *pods("b", chosen_s=95.0))

    assert reconcile(seen(2, 2, pods=found, workers=())) == [Spare("b")]


def test_nobody_new_is_chosen_while_no_scheduler_answers() -> None:
    assert reconcile(seen(1, 2, pods=pods("a", "b"), workers=None, cheapest="a")) == []


def test_a_deployment_that_was_scaled_by_hand_is_not_fought() -> None:
    by_hand = Seen(now_s=100.0, wanted=2, replicas=5, last_set=2, pods=pods("a", "b"))

    assert reconcile(by_hand) == [Adopt(5)]


# -- the world


WORLD_DRAIN_S = 3.0
"""Short, so that drains are cut off often."""


@dataclass
class WorldPod:
    phase: Phase = Phase.UNSCHEDULED
    chosen_s: float | None = None
    released: bool = False
    requests: int = 0
    draining: bool = False


@dataclass
class World:
    """Kubernetes, its pods, and the workers in them."""

    wanted: int
    least: int = 0
    most: int | None = None
    now_s: float = 0.0
    replicas: int | None = None
    last_set: int | None = None
    pods: dict[str, WorldPod] = field(default_factory=dict)
    made: int = 0
    comes_back: bool = True
    """A drained worker's process is started again, and takes work until its pod goes."""
    busy_taken_while_idle: list[str] = field(default_factory=list)

    def see(self, *, scheduler: bool = True) -> Seen:
        up = {name: pod for name, pod in self.pods.items() if pod.phase is Phase.READY}
        staying = [name for name, pod in up.items() if not pod.draining]
        return Seen(
            now_s=self.now_s,
            wanted=self.wanted,
            least=self.least,
            most=self.most,
            drain_s=WORLD_DRAIN_S,
            replicas=self.replicas,
            last_set=self.last_set,
            pods=tuple(
                Pod(name=name, phase=pod.phase, chosen_s=pod.chosen_s, released=pod.released)
                for name, pod in self.pods.items()
            ),
            workers=tuple(
                Worker(name=name, draining=pod.draining, requests=pod.requests) for name, pod in up.items()
            )
            if scheduler
            else None,
            cheapest=min(staying, key=lambda name: (up[name].requests, name), default=None)
            if scheduler
            else None,
        )

    def carry_out(self, action: Action) -> None:
        match action:
            case Create(replicas) | Scale(replicas):
                self.replicas = self.last_set = replicas
            case Adopt(replicas):
                self.wanted = self.last_set = replicas
            case Mark(name, since_s):
                self.pods[name].chosen_s, self.pods[name].released = since_s, False
            case Release(name):
                self.pods[name].released = True
            case Spare(name):
                self.pods[name].chosen_s, self.pods[name].released = None, False
            case Drain(name):
                self.pods[name].draining = True

    def kubernetes(self) -> None:
        """Run the controllers of Deployment and ReplicaSet: by phase, then by deletion cost."""
        while len(self.pods) < (self.replicas or 0):
            self.made += 1
            self.pods[f"p{self.made}"] = WorldPod()
        gone = {}
        while len(self.pods) > (self.replicas or 0):
            name = min(self.pods, key=self._leaves_first)
            gone[name] = self.pods.pop(name)
        if any(pod.phase is Phase.READY and not pod.requests for pod in self.pods.values()):
            self.busy_taken_while_idle += [name for name, pod in gone.items() if pod.requests]

    def _leaves_first(self, name: str) -> tuple[Phase, int, str]:
        pod = self.pods[name]
        return pod.phase, 2 if pod.chosen_s is None else 0 if pod.released else 1, name

    def live(self, choices: list[int]) -> None:
        """Let time pass: pods come up, requests come and go, drained workers end and come back."""
        self.now_s += 1.0
        for (_name, pod), choice in zip(sorted(self.pods.items()), choices, strict=False):
            if pod.phase is not Phase.READY:
                pod.phase = Phase(pod.phase + 1)
            elif pod.draining and pod.requests:
                pod.requests -= choice % 2
            elif pod.draining:
                pod.draining = not self.comes_back or choice % 3 > 0
            else:
                pod.requests = max(0, pod.requests + (choice % 4) - 1)


small = st.integers(min_value=0, max_value=5)
starts = st.lists(st.integers(min_value=0, max_value=3), min_size=1, max_size=5)
moves = st.lists(
    st.tuples(
        st.sampled_from(
            ["live", "live", "live", "live", "scale", "scale", "late", "by hand", "crash", "no scheduler"]
        ),
        st.lists(st.integers(min_value=0, max_value=11), min_size=6, max_size=6),
    ),
    min_size=5,
    max_size=40,
)


def busy_world(requests: list[int], **fields: Any) -> World:
    """Return a world with one worker for each entry, which is up and has that number of requests."""
    count = len(requests)
    world = World(wanted=count, replicas=count, last_set=count, made=count, **fields)
    world.pods = {f"p{i + 1}": WorldPod(Phase.READY, requests=n) for i, n in enumerate(requests)}
    return world


def play(world: World, move: str, choices: list[int]) -> None:
    """Make one possible change, and run the operator's next turn after it."""
    match move:
        case "live":
            world.live(choices)
        case "scale":
            world.wanted = choices[0] % 6
        case "by hand" if world.replicas is not None:
            world.replicas = choices[0] % 6
    actions = reconcile(world.see(scheduler=move != "no scheduler"))
    if move == "crash":
        actions = actions[: choices[1] % (len(actions) + 1)]
    for action in actions:
        world.carry_out(action)
    if move != "late":  # its controllers may take a while
        world.kubernetes()


@given(start=starts, least=st.integers(0, 2), moves=moves)
@settings(max_examples=150, deadline=None)
def test_whatever_happened_it_converges_and_then_rests(start: list[int], least: int, moves: list) -> None:
    world = busy_world(start, least=least, most=5)
    for move, choices in moves:
        play(world, move, choices)

    for turn in range(80):
        play(world, "live", [turn] * 6)

    assert world.replicas == max(least, min(5, world.wanted)) == len(world.pods)
    assert all(pod.chosen_s is None for pod in world.pods.values())
    assert reconcile(world.see()) == []


@given(start=starts, moves=moves)
@settings(max_examples=150, deadline=None)
def test_doing_it_again_changes_nothing(start: list[int], moves: list) -> None:
    """While the world does not change, a few turns reach a stable state, and no action is requested twice."""
    world = busy_world(start)
    for move, choices in moves:
        play(world, move, choices)

    done: list[Action] = []
    for _ in range(8):
        actions = reconcile(world.see())
        assert not [one for one in actions if one in done], (actions, done)
        for action in actions:
            world.carry_out(action)
        world.kubernetes()
        done += actions

    assert reconcile(world.see()) == []


@given(start=starts, moves=moves)
@settings(max_examples=150, deadline=None)
def test_no_busy_worker_goes_while_an_idle_one_exists(start: list[int], moves: list) -> None:
    """The rule holds for the operator's decisions: not when another client scales the Deployment further, nor
    while no scheduler reports idle workers, nor when a drained worker was started again before its pod went
    (its SIGTERM drains it again).
    """
    world = busy_world(start, comes_back=False)
    for move, choices in moves:
        play(world, "live" if move in ("by hand", "no scheduler") else move, choices)

    assert world.busy_taken_while_idle == []


@given(start=starts, moves=moves, number=small)
@settings(max_examples=75, deadline=None)
def test_a_number_set_by_hand_stands(start: list[int], moves: list, number: int) -> None:
    world = busy_world(start)
    for move, choices in moves:
        play(world, move, choices)
    play(world, "live", [0] * 6)
    assume(number != world.replicas)  # otherwise nothing was set
    world.replicas = number

    for turn in range(80):
        play(world, "live", [turn] * 6)

    assert world.replicas == world.wanted == number


def test_the_world_notices_a_busy_worker_that_goes_while_another_is_idle() -> None:
    world = World(wanted=1, replicas=1, last_set=1)
    world.pods = {"idle": WorldPod(Phase.READY), "busy": WorldPod(Phase.READY, chosen_s=0.0, requests=2)}

    copy.deepcopy(world).kubernetes()
    world.kubernetes()

    assert world.busy_taken_while_idle == ["busy"]


@pytest.mark.parametrize("name", ["time", "asyncio", "kubernetes_asyncio", "grpc"])
def test_the_function_is_pure(name: str) -> None:
    import laps_sd_operator.reconcile as module

    assert not hasattr(module, name)
