"""A pool's status: its numbers, its problem, and the condition by which other programs wait for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from laps_sd_operator import objects
from laps_sd_operator.objects import Shard
from laps_sd_operator.problems import Problem, Reason
from laps_sd_operator.reconcile import Worker
from laps_sd_operator.status import failed_status, status_of

from tests.k8s import definition

NOW_S = 1_700_000_000.0
NOW = "2023-11-14T22:13:20Z"
POOL: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "models", "uid": "u-1", "generation": 3},
    "spec": {
        "replicas": 1,
        "scheduler": "s:50052",
        "template": {"spec": {"containers": [{"name": "worker", "image": "w"}]}},
    },
}
SHARD = Shard(
    workers=(Worker(name="a"),),
    cheapest=None,
    queued=4,
    backlog_s=12.3456,
    acceptance=0.68,
    tokens_per_s=812.0,
    policy="laps-sd",
)


def pod(name: str, *, ready: bool = True, **fields: Any) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {"name": name},
        "spec": {"nodeName": "n"},
        "status": {"phase": "Running", "conditions": conditions} | fields,
    }


def deployment(**status: Any) -> dict[str, Any]:
    made = objects.deployment_of(POOL, 1)
    made["metadata"]["generation"] = 7
    made["status"] = {"observedGeneration": 7, "updatedReplicas": 1} | status
    return made


def status(
    *pods: dict[str, Any],
    found: dict[str, Any] | None = None,
    pool: dict[str, Any] = POOL,
    problem: Problem | None = None,
    shard: Shard | None = SHARD,
    now_s: float = NOW_S,
) -> dict[str, Any]:
    made = found or deployment()
    return status_of(pool, objects.seen_of(pool, made, pods, shard, now_s), shard, problem, made, pods)


def condition(*pods: dict[str, Any], **given: Any) -> dict[str, Any]:
    (one,) = status(*pods, **given)["conditions"]
    assert isinstance(one, dict)
    return one


def test_a_pool_with_its_workers_is_ready() -> None:
    assert condition(pod("a")) == {
        "type": "Ready",
        "status": "True",
        "reason": "AsWanted",
        "message": "1 of 1 workers are ready",
        "lastTransitionTime": NOW,
        "observedGeneration": 3,
    }


def test_a_pool_of_no_workers_is_ready() -> None:
    empty = {**POOL, "spec": {**POOL["spec"], "replicas": 0}}
    made = objects.deployment_of(empty, 0)

    assert condition(pool=empty, found=made)["status"] == "True"


def test_a_worker_that_drains_leaves_the_pool_ready() -> None:
    leaving = pod("b")
    leaving["metadata"] |= objects.mark_patch(NOW_S)["metadata"]

    found = condition(pod("a"), leaving)

    assert (found["status"], found["message"]) == ("True", "2 of 1 workers are ready, 1 drain")


def waits(**waiting: str) -> dict[str, Any]:
    return {"containerStatuses": [{"state": {"waiting": waiting}}]}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        (waits(reason="ContainerCreating"), ""),
        (
            waits(reason="ImagePullBackOff", message='Back-off pulling image "w"'),
            ': b: ImagePullBackOff: Back-off pulling image "w"',
        ),
        (waits(reason="CrashLoopBackOff"), ": b: CrashLoopBackOff"),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes have a GPU"}]},
            ": b: 0/3 nodes have a GPU",
        ),
    ],
    ids=["silent", "it is being created", "no image", "it crashes", "no node"],
)
def test_a_worker_that_is_missing_is_told_with_its_cause(fields: dict[str, Any], why: str) -> None:
    found = condition(pod("b", ready=False, **fields))

    assert (found["status"], found["reason"]) == ("False", "WorkersNotReady")
    assert found["message"] == "0 of 1 workers are ready" + why


@pytest.mark.parametrize("behind", [{"observedGeneration": 6}, {"updatedReplicas": 0}])
def test_a_pool_is_not_ready_before_its_template_has_reached_its_workers(behind: dict[str, int]) -> None:
    found = condition(pod("a"), found=deployment(**behind))

    assert (found["status"], found["reason"]) == ("Unknown", "Updating")


def test_a_new_worker_that_cannot_start_is_told_while_the_old_one_is_there() -> None:
    stuck = pod("b", ready=False, **waits(reason="ImagePullBackOff"))

    found = condition(pod("a"), stuck, found=deployment(replicas=2, updatedReplicas=1))

    assert (found["status"], found["reason"]) == ("Unknown", "Updating")
    assert found["message"].endswith("not yet all have the pool's template: b: ImagePullBackOff")


def test_a_pool_is_not_ready_before_the_deployment_has_its_template() -> None:
    changed = copy.deepcopy(POOL)
    changed["spec"]["drainSeconds"] = 5

    assert condition(pod("a"), pool=changed)["reason"] == "Updating"


def test_a_problem_is_not_ready_with_its_reason_and_its_words() -> None:
    problem = Problem(Reason.NO_SCHEDULER, "no scheduler answers: " + 600 * "x")

    found = status(pod("a"), problem=problem)

    (one,) = found["conditions"]
    assert (one["status"], one["reason"]) == ("False", "SchedulerUnreachable")
    assert found["problem"] == one["message"] == str(problem)
    assert len(one["message"]) == 500


def test_a_turn_that_fails_leaves_the_numbers_alone() -> None:
    found = failed_status(POOL, Problem(Reason.TURN_FAILED, "m"), NOW_S)

    assert set(found) == {"observedGeneration", "problem", "conditions"}


def test_the_time_of_the_condition_changes_with_its_status_only() -> None:
    told = {**POOL, "status": {"conditions": [{**condition(pod("a")), "message": "other words"}]}}

    same = condition(pod("a"), pool=told, now_s=NOW_S + 60)
    other = condition(pod("a", ready=False), pool=told, now_s=NOW_S + 60)

    assert same["lastTransitionTime"] == NOW
    assert other["lastTransitionTime"] == "2023-11-14T22:14:20Z"


def test_what_is_not_known_any_more_is_taken_out_of_status() -> None:
    found = status(pod("a"), shard=None)

    assert [found[name] for name in ("queued", "backlogSeconds", "policy", "problem")] == [None] * 4


def test_the_status_is_what_the_definition_prints() -> None:
    found = status(pod("a"))

    (version,) = definition.definition()["spec"]["versions"]
    columns = [one["jsonPath"].partition("[")[0] for one in version["additionalPrinterColumns"]]
    printed = {path.removeprefix(".status.") for path in columns if path.startswith(".status.")}
    assert printed <= set(found) <= set(definition.schema()["properties"]["status"]["properties"])
    assert found["replicas"] == found["ready"] == 1
    assert found["selector"] == f"{objects.POOL_LABEL}=p"
    assert version["subresources"]["scale"]["statusReplicasPath"] == ".status.replicas"


@pytest.mark.parametrize("problem", [None, Problem(Reason.REFUSED, "m")])
def test_the_api_server_takes_the_status(kubernetes: None, problem: Problem | None) -> None:
    written = {name: value for name, value in status(pod("a"), problem=problem).items() if value is not None}

    assert definition.problems({**POOL, "status": written}) == []
