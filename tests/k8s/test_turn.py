"""One turn of the operator, over real HTTP: its reads, actions and reports. The scheduler is unreachable or scripted
here; test_operating.py has a real one, and test_cluster.py a real API server.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio", reason="make setup")

from kubernetes_asyncio import client
from kubernetes_asyncio.client.exceptions import ApiException
from laps_sd_operator import objects, scheduler
from laps_sd_operator import turn as turns_module
from laps_sd_operator.api import Api
from laps_sd_operator.events import LEAST_S, REPEAT_S, Events
from laps_sd_operator.kubernetes import Found, Kubernetes
from laps_sd_operator.problems import Problem, Reason
from laps_sd_operator.reconcile import Worker
from laps_sd_operator.turn import Ended, Turns, failure_of

from laps_sd.service.log import get_logger
from tests.k8s.api_server import NAMESPACE, ApiServer, Refusal

POOL: dict[str, Any] = {
    "apiVersion": "laps-sd.dev/v1alpha1",
    "kind": "SpeculativePool",
    "metadata": {"name": "p"},
    "spec": {
        "replicas": 2,
        "scheduler": "127.0.0.1:1",
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "worker",
                        "image": "w",
                        "resources": {"limits": {"cpu": "1000m", "memory": "1Gi"}},
                    }
                ]
            }
        },
    },
}
NOBODY = "no scheduler answers: 127.0.0.1:1"


@pytest.fixture(autouse=True)
def _schemas(kubernetes: None) -> None:
    """The API server refuses unknown fields by the schemas of Kubernetes."""


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer().serve() as found:
        yield found


class Bench:
    """A pool, and turns of it whose watches show the present state unless the test sets `watched`."""

    def __init__(self, server: ApiServer, api: Api) -> None:
        self.server = server
        self.watched: Callable[[], Found] = self._state
        self.acts = True
        self.kubernetes = Kubernetes(api, NAMESPACE, "p", lambda: self.watched())
        self.turns = Turns(self.kubernetes, None, get_logger("test"), lambda: self.acts)

    def _state(self) -> Found:
        def get(resource: str) -> dict[str, Any] | None:
            found = [one for one in self.server.all(resource) if one["metadata"]["name"] == "p"]
            return found[0] if found else None

        return Found(get("speculativepools"), get("deployments"), tuple(self.server.all("pods")))

    def freeze(self) -> None:
        """Show the present state from now on, as a watch that lags."""
        found = self._state()
        self.watched = lambda: copy.deepcopy(found)

    async def turn(self) -> Ended | None:
        return await self.turns.turn()

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get("speculativepools", "p").get("status", {})
        return found

    @property
    def condition(self) -> dict[str, Any]:
        (found,) = self.status["conditions"]
        assert isinstance(found, dict)
        return found

    @property
    def deployment(self) -> dict[str, Any]:
        return self.server.get("deployments", "p")

    def events(self, kind: str) -> list[tuple[str, str]]:
        return [(one["reason"], one["message"]) for one in self.server.all("events") if one["type"] == kind]

    def writes(self) -> list[str]:
        return [
            resource
            for resource, verb in self.server.calls
            if verb in ("create", "patch") and resource != "events"
        ]


@pytest.fixture
async def bench(server: ApiServer) -> AsyncIterator[Bench]:
    server.add("speculativepools", POOL)
    async with client.ApiClient(client.Configuration(host=server.url)) as connection:
        yield Bench(server, Api(connection))


class Shard:
    """A scheduler's part for two workers, "a" the cheaper one to lose: it names the one that is left when one
    drains.
    """

    def __init__(self, *names: str, policy: str = "fcfs") -> None:
        self.names = names
        self.policy = policy
        self.draining: list[str] = []
        self.requests = dict.fromkeys(names, 1)

    async def shard(self, address: str, tls: Any) -> objects.Shard:
        left = [name for name in self.names if name not in self.draining]
        return objects.Shard(
            workers=tuple(
                Worker(name=name, draining=name not in left, requests=self.requests[name])
                for name in self.names
            ),
            cheapest=next(iter(left), None),
            queued=0,
            backlog_s=0.0,
            acceptance=0.0,
            tokens_per_s=0.0,
            policy=self.policy,
        )

    async def drain(self, address: str, tls: Any, worker: str) -> None:
        self.draining.append(worker)


@pytest.fixture
def shard(monkeypatch: pytest.MonkeyPatch) -> Shard:
    """A scheduler that answers."""
    found = Shard()
    monkeypatch.setattr(scheduler, "shard", found.shard)
    monkeypatch.setattr(scheduler, "drain", found.drain)
    return found


# -- reports ---------------------------------------------------------------------------------------------------------------


async def test_a_new_pool_gets_a_deployment_even_while_no_scheduler_answers(bench: Bench) -> None:
    assert await bench.turn()

    assert bench.deployment["spec"]["replicas"] == 2
    assert bench.status["observedGeneration"] == 1
    assert bench.status["problem"].startswith(NOBODY)
    assert (bench.condition["status"], bench.condition["reason"]) == ("False", "SchedulerUnreachable")
    assert bench.events("Normal") == [("Created", "created the Deployment with 2 workers")]
    (warning,) = bench.events("Warning")
    assert warning == ("SchedulerUnreachable", bench.status["problem"])


async def test_a_pool_without_a_problem_becomes_ready(bench: Bench, shard: Shard) -> None:
    await bench.turn()
    await bench.turn()

    assert (bench.condition["status"], bench.condition["reason"]) == ("True", "AsWanted")
    assert "problem" not in bench.status
    assert bench.events("Warning") == []


async def test_what_is_told_already_is_not_told_again(bench: Bench) -> None:
    for _ in range(2):
        await bench.turn()
    before, events = len(bench.writes()), len(bench.server.all("events"))

    await bench.turn()

    assert (len(bench.writes()), len(bench.server.all("events"))) == (before, events)


async def test_figures_that_always_change_are_written_now_and_then(
    bench: Bench, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "FIGURES_S", 1e9)
    for _ in range(3):
        await bench.turn()
    before = len(bench.writes())
    answer = shard.shard

    async def busier(address: str, tls: Any) -> objects.Shard:
        found = await answer(address, tls)
        return objects.Shard(**{name: getattr(found, name) for name in found.__slots__} | {"queued": before})

    monkeypatch.setattr(scheduler, "shard", busier)
    await bench.turn()
    assert len(bench.writes()) == before
    monkeypatch.setattr(turns_module, "FIGURES_S", 0.0)
    await bench.turn()
    assert bench.status["queued"] == before


async def test_a_pool_that_is_gone_ends_its_turns_and_one_that_is_going_gets_nothing(bench: Bench) -> None:
    bench.server.change("speculativepools", "p", {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
    assert await bench.turn(), "it may have something to finish: what it owns goes first"
    bench.server.delete("speculativepools", "p")
    assert await bench.turn() is None
    assert bench.writes() == []


async def test_a_pool_that_is_gone_before_its_watch_shows_it_gets_nothing(bench: Bench) -> None:
    bench.freeze()
    bench.server.delete("speculativepools", "p")

    assert await bench.turn() is None
    assert bench.writes() == []


async def test_a_deployment_of_somebody_else_is_left_alone_and_told(bench: Bench) -> None:
    pool = {**POOL, "metadata": {"name": "p", "namespace": NAMESPACE, "uid": "u-0"}}
    bench.server.add("deployments", objects.deployment_of(pool, 9))

    await bench.turn()

    assert bench.deployment["spec"]["replicas"] == 9
    assert bench.status["problem"] == "there is a Deployment p that is not this pool's"
    assert bench.condition["reason"] == "DeploymentNotOwned"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            Refusal(422, "spec.template.spec.containers[0].image: Required", causes=[{}]),
            "spec.template.spec.containers[0].image: Required",
        ),
        (Refusal(403, "exceeded quota"), "exceeded quota"),
        (Refusal(500, "etcd is full"), "etcd is full"),
        (Refusal(422, "the server rejected our request"), NOBODY),
        (Refusal(409, "already exists"), NOBODY),
        (Refusal(404, "not found"), NOBODY),
    ],
    ids=["invalid", "forbidden", "failed", "test of a JSON patch", "conflict", "gone"],
)
async def test_what_kubernetes_refuses_is_told_unless_somebody_was_only_faster(
    bench: Bench, answer: Refusal, told: str
) -> None:
    bench.server.refusals["deployments", "create"] = answer

    assert await bench.turn()

    assert bench.status["problem"].startswith(told)


async def test_somebody_who_is_faster_again_and_again_is_told(bench: Bench) -> None:
    bench.server.refusals["deployments", "create"] = Refusal(409, "already exists")
    for _ in range(5):
        await bench.turn()

    assert bench.status["problem"].startswith("5 turns in a row: 409")
    del bench.server.refusals["deployments", "create"]
    await bench.turn()
    assert bench.status["problem"].startswith(NOBODY)


async def test_a_field_that_kubernetes_does_not_know_is_told_and_not_dropped(bench: Bench) -> None:
    bench.server.change(
        "speculativepools", "p", {"spec": {"template": {"spec": {"nodeSelectr": {"a": "b"}}}}}
    )

    await bench.turn()

    assert "nodeSelectr" in bench.status["problem"]
    assert bench.condition["reason"] == "RefusedByKubernetes"
    assert bench.server.all("deployments") == []


async def test_pods_that_kubernetes_does_not_make_are_told(bench: Bench) -> None:
    await bench.turn()
    conditions = [
        {"type": "Progressing", "status": "True", "message": "created new replica set"},
        {"type": "ReplicaFailure", "status": "True", "message": "pods is forbidden: exceeded quota"},
    ]
    found = Found(
        bench.server.get("speculativepools", "p"), bench.deployment | {"status": {"conditions": conditions}}
    )

    async def read() -> Found:
        return found

    bench.watched = lambda: found
    bench.kubernetes.read = read  # type: ignore[method-assign]
    await bench.turn()

    assert bench.status["problem"] == "pods is forbidden: exceeded quota", "more than that nobody answers"
    assert bench.condition["reason"] == "PodsNotCreated"


async def test_a_deployment_that_is_paused_is_told(bench: Bench, shard: Shard) -> None:
    await bench.turn()
    bench.server.change("deployments", "p", {"spec": {"paused": True}})

    await bench.turn()

    assert bench.condition["reason"] == "DeploymentPaused"
    assert "kubectl rollout resume deployment/p" in bench.status["problem"]


async def test_a_policy_that_is_not_the_schedulers_is_told(bench: Bench, shard: Shard) -> None:
    bench.server.change("speculativepools", "p", {"spec": {"policy": "las"}})

    await bench.turn()

    assert bench.status["problem"].startswith("the schedulers order by fcfs, not las")


async def test_gpus_without_a_rank_are_told(bench: Bench, shard: Shard) -> None:
    spec = {
        "engine": "vllm",
        "vllmArgs": {"tensor_parallel_size": 2},
        "resources": {"limits": {"nvidia.com/gpu": 4}},
    }
    bench.server.change("speculativepools", "p", {"spec": spec})

    await bench.turn()

    assert bench.status["problem"].startswith("workers have 4 GPUs, and vLLM makes 2 ranks")


async def test_an_error_that_nobody_expected_is_told_too(bench: Bench) -> None:
    bench.server.refusals["pods", "list"] = Refusal(500, "etcd is full")
    with pytest.raises(ApiException) as caught:
        await bench.turn()

    for error, words in (
        (caught.value, "etcd is full"),
        (TimeoutError(), "no answer"),
        (KeyError("x"), "'x'"),
    ):
        problem = failure_of(error)
        await bench.turns.report_failure(problem)
        assert problem.reason is Reason.TURN_FAILED
        assert words in bench.status["problem"]
        assert (bench.condition["status"], bench.condition["reason"]) == ("False", "TurnFailed")
    assert bench.events("Warning")[0] == ("TurnFailed", "a turn of the operator failed: etcd is full")


async def test_a_failure_is_an_event_even_if_its_status_is_refused(bench: Bench) -> None:
    """As for a pool that is older than the present definition."""
    bench.server.refusals["speculativepools/status", "patch"] = Refusal(422, "spec is invalid", causes=[{}])

    with pytest.raises(ApiException):
        await bench.turns.report_failure(failure_of(KeyError("name")))

    assert bench.events("Warning") == [("TurnFailed", "a turn of the operator failed: KeyError: 'name'")]


async def test_an_event_that_cannot_be_written_fails_no_turn(bench: Bench) -> None:
    bench.server.refusals["events", "create"] = Refusal(403, "may not create events")

    await bench.turn()

    assert bench.deployment["spec"]["replicas"] == 2
    assert bench.status["problem"].startswith(NOBODY)


async def test_a_warning_is_repeated_while_it_holds_and_does_not_flood(bench: Bench) -> None:
    now_s = 0.0
    events = Events(bench.kubernetes, lambda: now_s)
    pool = bench.server.get("speculativepools", "p")

    async def warn(after_s: float, message: str | None) -> int:
        nonlocal now_s
        now_s += after_s
        await events.warn(pool, message and Problem(Reason.REFUSED, message))
        return len(bench.events("Warning"))

    assert await warn(0, "a") == 1
    assert await warn(1, "a") == 1, "it is known"
    assert await warn(1, "b") == 1, "other words, too soon"
    assert await warn(LEAST_S, "b") == 2
    assert await warn(1, None) == 2
    assert await warn(1, "b") == 2, "it was over for a moment"
    assert await warn(LEAST_S, "b") == 3
    assert await warn(REPEAT_S, "b") == 4, "Kubernetes forgets"


# -- actions ---------------------------------------------------------------------------------------------------------------


async def test_a_turn_that_may_not_act_any_more_changes_nothing(bench: Bench) -> None:
    bench.acts = False
    await bench.turn()
    assert bench.writes() == []

    async def once(deployment: dict[str, Any]) -> None:
        bench.acts = False
        await create(deployment)

    create, bench.kubernetes.create = bench.kubernetes.create, once  # type: ignore[method-assign]
    bench.acts = True
    await bench.turn()
    assert bench.writes() == ["deployments"], "it may create the Deployment, and not report it"


async def test_while_there_is_nothing_to_do_nothing_is_read(bench: Bench, shard: Shard) -> None:
    for _ in range(2):
        await bench.turn()
    bench.server.calls.clear()

    for _ in range(3):
        await bench.turn()

    assert bench.server.calls == []


async def test_a_watch_that_lags_chooses_no_second_worker(bench: Bench, shard: Shard) -> None:
    await bench.turn()
    shard.names = tuple(pod["metadata"]["name"] for pod in bench.server.all("pods"))
    shard.requests = dict.fromkeys(shard.names, 1)
    bench.server.change("speculativepools", "p", {"spec": {"replicas": 1}})
    bench.freeze()

    for _ in range(3):
        await bench.turn()

    assert shard.draining == [shard.names[0]]
    marked = [
        pod["metadata"]["name"]
        for pod in bench.server.all("pods")
        if objects.CHOSEN in (pod["metadata"].get("annotations") or {})
    ]
    assert marked == [shard.names[0]]
    assert bench.deployment["spec"]["replicas"] == 2, "it has a request still"


@pytest.mark.parametrize("before", ["watched", "read", "shard", "patch_pod", "drain"])
async def test_another_operator_may_have_a_turn_at_any_point_and_one_worker_goes(
    before: str, bench: Bench, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.turn()
    shard.names = tuple(pod["metadata"]["name"] for pod in bench.server.all("pods"))
    shard.requests = dict.fromkeys(shard.names, 1)
    bench.server.change("speculativepools", "p", {"spec": {"replicas": 1}})
    overtaken = 0

    def interrupted(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        async def other_first(*arguments: Any) -> Any:
            nonlocal overtaken
            if not overtaken:
                overtaken += 1
                await bench.turn()
            return await call(*arguments)

        monkeypatch.setattr(owner, name, other_first)

    interrupted(bench.kubernetes if hasattr(bench.kubernetes, before) else scheduler, before)

    await bench.turn()

    assert overtaken == 1
    assert set(shard.draining) == {shard.names[0]}
    assert bench.deployment["spec"]["replicas"] == 2, "it has a request still"


async def test_each_victim_goes_when_it_is_free_and_kubernetes_takes_that_one(
    bench: Bench, shard: Shard
) -> None:
    bench.server.change("speculativepools", "p", {"spec": {"replicas": 4}})
    await bench.turn()
    first, second, third, fourth = names = tuple(pod["metadata"]["name"] for pod in bench.server.all("pods"))
    shard.names, shard.requests = names, dict.fromkeys(names, 1)
    bench.server.change("speculativepools", "p", {"spec": {"replicas": 1}})
    for _ in range(3):
        await bench.turn()
    assert shard.draining == [first, second, third]

    left = {*names}
    for free in (second, first, third):
        shard.requests[free] = 0
        await bench.turn()
        left.remove(free)
        assert {pod["metadata"]["name"] for pod in bench.server.all("pods")} == left
        shard.names = tuple(name for name in shard.names if name != free)
    assert left == {fourth}
    await bench.turn()
    await bench.turn()
    assert bench.condition["reason"] == "AsWanted"


# -- drift -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def rested(bench: Bench, shard: Shard) -> Bench:
    """A pool whose Deployment is there, compared with it and the same."""
    for _ in range(2):
        await bench.turn()
    assert bench.condition["reason"] == "AsWanted"
    return bench


def image(bench: Bench) -> str:
    found = bench.deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    assert isinstance(found, str)
    return found


def set_image(bench: Bench, name: str) -> None:
    containers = copy.deepcopy(bench.deployment["spec"]["template"]["spec"]["containers"])
    containers[0]["image"] = name
    bench.server.change("deployments", "p", {"spec": {"template": {"spec": {"containers": containers}}}})


async def test_what_kubernetes_makes_of_a_template_is_no_change(rested: Bench) -> None:
    """It adds defaults and rewrites quantities; the Deployment is compared once."""
    container = rested.deployment["spec"]["template"]["spec"]["containers"][0]
    assert (container["imagePullPolicy"], container["resources"]["limits"]["cpu"]) == ("IfNotPresent", "1")
    assert rested.writes().count("deployments") == 2, "the creation and one dry run"


async def test_a_template_that_somebody_changed_is_mended_and_told(rested: Bench) -> None:
    set_image(rested, "other")

    await rested.turn()

    assert image(rested) == "w"
    assert ("Mended", f"{CHANGED} by someone; the pool's template is back") in rested.events("Normal")
    await rested.turn()
    await rested.turn()
    assert rested.condition["reason"] == "AsWanted"


CHANGED = "spec.template.spec.containers[0].image of the Deployment was changed"


async def test_a_writer_that_insists_is_told_and_not_fought(rested: Bench) -> None:
    """Each mend would replace all workers."""
    set_image(rested, "other")
    await rested.turn()
    set_image(rested, "other")
    for _ in range(3):
        await rested.turn()

    assert image(rested) == "other"
    assert rested.status["problem"].startswith(CHANGED)
    assert rested.condition["reason"] == "DeploymentChanged"
    set_image(rested, "w")
    await rested.turn()
    assert "problem" not in rested.status


async def test_a_pool_that_changes_itself_ends_the_difference(rested: Bench) -> None:
    set_image(rested, "other")
    await rested.turn()
    set_image(rested, "other")
    await rested.turn()
    rested.server.change("speculativepools", "p", {"spec": {"drainSeconds": 90}})

    await rested.turn()
    await rested.turn()

    assert image(rested) == "w"
    assert "problem" not in rested.status


@pytest.mark.parametrize(
    "patch",
    [
        {"spec": {"strategy": {"type": "Recreate", "rollingUpdate": None}}},
        {"spec": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}},
        {"spec": {"template": {"metadata": {"labels": {"a": "b"}}}}},
        {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 1}}}},
    ],
    ids=["strategy", "an added field", "an added label", "grace"],
)
async def test_every_field_of_template_and_strategy_is_the_pools(
    rested: Bench, patch: dict[str, Any]
) -> None:
    before = rested.deployment["spec"]
    rested.server.change("deployments", "p", patch)

    await rested.turn()

    assert rested.deployment["spec"] == before


async def test_a_restart_by_kubectl_is_no_change(rested: Bench) -> None:
    annotations = {objects.RESTARTED: "2026-01-01T00:00:00Z"}
    rested.server.change(
        "deployments", "p", {"spec": {"template": {"metadata": {"annotations": annotations}}}}
    )

    await rested.turn()

    assert rested.deployment["spec"]["template"]["metadata"]["annotations"] == annotations
    assert not [reason for reason, _ in rested.events("Normal") if reason == "Mended"]


async def test_a_deployment_that_somebody_deleted_is_created_again(rested: Bench) -> None:
    rested.server.delete("deployments", "p")

    await rested.turn()

    assert rested.deployment["spec"]["replicas"] == 2
    assert [reason for reason, _ in rested.events("Normal")] == ["Created", "Created"]


async def test_a_template_that_kubernetes_refuses_stops_no_scaling(rested: Bench) -> None:
    template = {"spec": {"nodeSelectr": {"a": "b"}}}
    rested.server.change("speculativepools", "p", {"spec": {"template": template, "replicas": 3}})

    await rested.turn()

    assert rested.deployment["spec"]["replicas"] == 3
    assert "nodeSelectr" in rested.status["problem"]
    assert rested.condition["reason"] == "RefusedByKubernetes"


async def test_a_template_that_somebody_else_writes_at_the_same_time_ends_the_turn(rested: Bench) -> None:
    """The other actions were decided from what is out of date now."""
    rested.server.change("speculativepools", "p", {"spec": {"drainSeconds": 90, "replicas": 3}})
    rested.server.refusals["deployments", "patch"] = Refusal(409, "the object has been modified")
    rested.server.calls.clear()

    await rested.turn()

    assert rested.writes().count("deployments") == 1


async def test_a_scale_set_by_hand_becomes_the_pools_and_is_told(rested: Bench) -> None:
    rested.server.change("deployments", "p", {"spec": {"replicas": 3}})

    await rested.turn()

    assert rested.server.get("speculativepools", "p")["spec"]["replicas"] == 3
    assert [reason for reason, _ in rested.events("Normal")][-1] == "Adopted"
