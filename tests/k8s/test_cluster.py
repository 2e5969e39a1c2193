"""The chart and the operator on a real API server with Kubernetes' own controllers; see tests/k8s/cluster.py."""

from __future__ import annotations

import asyncio
import copy
import json
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio", reason="make setup")

from kubernetes_asyncio.client.exceptions import ApiException
from laps_sd_operator import objects, scheduler
from laps_sd_operator.api import Api
from laps_sd_operator.kubernetes import Found, Kubernetes
from laps_sd_operator.turn import Turns

from laps_sd.service.log import get_logger
from laps_sd.v1 import gateway_link_pb2 as pb
from scheduler_svc.store.embedded import EmbeddedServer
from tests.helpers import wait_until_async
from tests.k8s.cluster import (
    Cluster,
    Kubelet,
    apply,
    kubeconfig_of_test,
    kubeconfig_with,
    namespace_of_test,
    token_of,
)
from tests.k8s.conftest import EXAMPLES, MATRIX
from tests.k8s.helm import CHART, find, helm3_program
from tests.k8s.helm import objects as manifests
from tests.k8s.operator_process import OperatorProcess
from tests.services.scheduler.peers import SchedulerUnderTest, gateway, start_scheduler

NAME = "demo-laps-sd-demo-worker"


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with namespace_of_test() as found:
        yield found


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Any:
    kubeconfig_of_test()
    with EmbeddedServer(tmp_path_factory.mktemp("valkey")).start() as server:
        yield server.url


@pytest.fixture
async def leader(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[SchedulerUnderTest]:
    """Start a scheduler without connected peers; workers without heartbeats are not given up."""
    shard = f"s{abs(hash(request.node.name)) % 10**8}"
    found = await start_scheduler(redis_url, shard=shard, silence_s=600.0)
    await found.wait_leading()
    yield found
    await found.crash()


@pytest.fixture
async def kubelet(cluster: Cluster, leader: SchedulerUnderTest) -> AsyncIterator[Kubelet]:
    found = Kubelet(cluster, leader.address)
    yield found
    await found.close()


@pytest.fixture
async def deployed(cluster: Cluster, helm3: Any, tmp_path: Path) -> AsyncIterator[OperatorProcess]:
    """Start the operator as a process, with the account and the rights that the chart gives it."""
    rendered = helm3.render({"operator": {"enabled": True}})
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        made = find(rendered, kind, "operator")
        for subject in made.get("subjects", []):
            subject["namespace"] = cluster.namespace
        await apply(cluster, path_of(made, cluster.namespace), made)
    account = find(rendered, "ServiceAccount", "operator")["metadata"]["name"]
    kubeconfig = kubeconfig_with(await token_of(cluster, account), tmp_path / "kubeconfig")
    process = OperatorProcess(kubeconfig, cluster.namespace, tmp_path / "operator.log")
    process.start()
    try:
        yield process
    finally:
        process.stop()
    went_well(process)


def went_well(process: OperatorProcess) -> None:
    """Check that no turn failed, and that the process tried nothing that its account may not do."""
    said = process.log.read_text(encoding="utf-8")
    assert "Traceback" not in said, said
    assert "system:serviceaccount:" not in said, said  # whom Kubernetes names when it refuses


@pytest.fixture
async def pool(cluster: Cluster, helm3: Any, leader: SchedulerUnderTest) -> dict[str, Any]:
    """Create a pool as the chart writes it, with the test's scheduler; the account that its pods run as
    exists.
    """
    rendered = helm3.render({"operator": {"enabled": True}})
    account = find(rendered, "ServiceAccount", "worker")
    await apply(cluster, path_of(account, cluster.namespace), account)
    found = copy.deepcopy(find(rendered, "SpeculativePool", "demo-worker"))
    found["spec"]["scheduler"] = leader.address
    found["metadata"].pop("namespace", None)
    return found


def with_spec(pool: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {**pool, "spec": {**pool["spec"], **spec}}


def path_of(made: dict[str, Any], namespace: str) -> str:
    """Return the path of such an object at the API server."""
    version, kind = made["apiVersion"], made["kind"].lower()
    plural = {"networkpolicy": "networkpolicies", "ingress": "ingresses"}.get(kind, f"{kind}s")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}/namespaces/{namespace}/{plural}/{made['metadata']['name']}"


async def refusal(asked: Any) -> str:
    with pytest.raises(ApiException) as caught:
        await asked
    assert caught.value.status == 422, caught.value
    return str(caught.value.body)


def template(**fields: Any) -> dict[str, Any]:
    """Return a spec with a template of these fields."""
    return {"template": {"spec": {"containers": [{"name": "worker"}]}} | fields}


# -- the definition -------------------------------------------------------------------------------------------------------


async def test_the_api_server_takes_a_pool_as_the_chart_writes_it(
    cluster: Cluster, pool: dict[str, Any]
) -> None:
    created = await cluster.create_pool(pool, field_validation="Strict")

    assert created["spec"]["drainSeconds"] == pool["spec"]["drainSeconds"]
    assert created["spec"]["template"] == pool["spec"]["template"], "nothing is pruned"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"minReplicas": 3, "maxReplicas": 2}, "minReplicas must not be larger than maxReplicas"),
        ({"model": {"draft": "/models/d"}}, "a draft needs a target"),
        ({"vllmArgs": {"seed": 1}}, "engine must be vllm"),
        ({"engine": "auto", "vllmArgs": {}}, "engine must be vllm"),
        ({"engine": "fake", "model": {"target": "/models/t"}}, "serve no target"),
        ({"engine": "vllm", "vllmArgs": {"tensor_parallel_size": 0}}, "spec.vllmArgs.tensor_parallel_size"),
        ({"replicas": -1}, "spec.replicas"),
        ({"maxReplicas": 0}, "spec.maxReplicas"),
        ({"scheduler": "no-port"}, "spec.scheduler"),
        ({"scheduler": "s:65536"}, "spec.scheduler"),
        ({"drainSeconds": 0}, "spec.drainSeconds"),
        ({"template": {"spec": {"containers": [{"name": "other"}]}}}, 'a container named \\"worker\\"'),
        ({"template": {}}, "spec.template.spec"),
        ({"strategy": {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}}, "with the type Recreate"),
        (
            {
                "engine": "vllm",
                "model": {"target": "/t", "draft": "/d"},
                "vllmArgs": {"speculative_config": {"model": "/other"}},
            },
            "model.draft is the model of vllmArgs.speculative_config",
        ),
        (template(spec={"containers": [{"name": "worker"}, {"name": "worker"}]}), "containers[1]"),
        (template(metadata={"labels": {objects.POOL_LABEL: "other"}}), "the operator sets the label"),
        (template(spec={"containers": [{"name": "worker", "env": {"A": "b"}}]}), "containers[0].env"),
        (template(metadata={"labels": ["a"]}), "spec.template.metadata.labels"),
        (
            template(spec={"containers": [{"name": "worker"}], "terminationGracePeriodSeconds": "30"}),
            "spec.template.spec.terminationGracePeriodSeconds",
        ),
    ],
)
async def test_a_pool_that_makes_no_sense_is_refused_by_name(
    cluster: Cluster, pool: dict[str, Any], spec: dict[str, Any], said: str
) -> None:
    assert said in await refusal(cluster.create_pool(with_spec(pool, **spec)))


async def test_a_field_that_is_null_counts_as_left_out(cluster: Cluster, pool: dict[str, Any]) -> None:
    odd = with_spec(pool, replicas=None, **template(metadata={"labels": None}))

    created = await cluster.create_pool(odd, dry_run="All")

    assert created["spec"]["replicas"] == 1
    assert created["spec"]["template"]["metadata"] == {}


async def test_a_name_that_is_no_value_of_a_label_is_refused(cluster: Cluster, pool: dict[str, Any]) -> None:
    longest = {**pool, "metadata": {"name": 63 * "n"}}
    longer = {**pool, "metadata": {"name": 64 * "n"}}

    await cluster.create_pool(longest, dry_run="All")
    assert "a name has at most 63 characters" in await refusal(cluster.create_pool(longer))


async def test_without_a_number_there_is_one_worker(cluster: Cluster, pool: dict[str, Any]) -> None:
    bare = with_spec(pool)
    del bare["spec"]["replicas"], bare["spec"]["drainSeconds"]

    created = await cluster.create_pool(bare)

    assert (created["spec"]["replicas"], created["spec"]["drainSeconds"]) == (1, 60)


async def test_autoscalers_find_number_and_selector(
    cluster: Cluster, pool: dict[str, Any], deployed: OperatorProcess, kubelet: Kubelet
) -> None:
    await cluster.create_pool(with_spec(pool, replicas=2))
    await wait_until_async(lambda: ready(cluster, 2), description="two workers are ready")

    scale = await cluster.scale_pool(NAME, 3)

    assert scale["spec"]["replicas"] == 3
    assert scale["status"] == {"replicas": 2, "selector": f"{objects.POOL_LABEL}={NAME}"}
    await wait_until_async(lambda: ready(cluster, 3), description="three workers are ready")


async def ready(cluster: Cluster, count: int) -> bool:
    return (await cluster.status(NAME)).get("ready") == count


# -- the operator as a process ----------------------------------------------------------------------------------------------


async def test_a_pool_becomes_a_deployment_and_status_says_how_it_does(
    cluster: Cluster, pool: dict[str, Any], deployed: OperatorProcess, kubelet: Kubelet
) -> None:
    created = await cluster.create_pool(with_spec(pool, replicas=2))

    await wait_until_async(lambda: ready(cluster, 2), description="two workers are ready")
    made = await cluster.deployment(NAME)
    assert made is not None
    assert made["metadata"]["ownerReferences"][0]["uid"] == created["metadata"]["uid"]
    container = made["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == pool["spec"]["template"]["spec"]["containers"][0]["image"]

    async def knows_the_scheduler() -> bool:
        return (await cluster.status(NAME)).get("policy") == "fcfs"

    await wait_until_async(knows_the_scheduler, description="status says what the scheduler says")
    row = await printed(cluster)
    assert [row[name] for name in ("Wanted", "Ready", "Draining", "Queued")] == [2, 2, 0, 0]
    assert (row["Policy"], row["Problem"]) == ("fcfs", None)
    assert "finalizers" not in (await cluster.pool(NAME))["metadata"], "it can be deleted without an operator"
    assert await asyncio.to_thread(deployed.is_healthy)


async def printed(cluster: Cluster) -> dict[str, Any]:
    """Return the output of `kubectl get speculativepools -o wide`."""
    path = f"/apis/laps-sd.dev/v1alpha1/namespaces/{cluster.namespace}/speculativepools"
    table = await cluster.request(
        "GET", path, Accept="application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
    )
    names = [column["name"] for column in table["columnDefinitions"]]
    return dict(zip(names, table["rows"][0]["cells"], strict=True))


async def test_the_cheapest_to_lose_is_drained_and_only_then_the_number_falls(
    cluster: Cluster,
    pool: dict[str, Any],
    deployed: OperatorProcess,
    kubelet: Kubelet,
    leader: SchedulerUnderTest,
) -> None:
    prompts = {"long": 400, "short": 10, "middle": 100}
    async with one_too_many(cluster, pool, kubelet, leader, prompts=prompts) as busy:
        assert draining(leader) == [busy["short"]]
        assert await cluster.marked() == [busy["short"]]
        pod = (await cluster.pods())[busy["short"]]
        assert pod["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"] == "-1000"
        await turns(cluster, 2)
        assert await cluster.replicas(NAME) == 3, "it still has a request"
        assert (await cluster.status(NAME))["draining"] == 1

        await kubelet.workers[busy["short"]].run_round("short", 1, 1, [5])  # it moves at the end of a round

        await wait_until_async(lambda: has_pods(cluster, 2), description="the pod is gone", timeout_s=30)
        assert set(await cluster.pods()) == {busy["long"], busy["middle"]}
        assert await cluster.replicas(NAME) == 2


@asynccontextmanager
async def one_too_many(
    cluster: Cluster,
    pool: dict[str, Any],
    kubelet: Kubelet,
    leader: SchedulerUnderTest,
    *,
    prompts: dict[str, int],
) -> AsyncIterator[dict[str, str]]:
    """Start a pool with a worker for each request, and one worker that drains since the pool is to be
    smaller; yield the worker of each request.
    """
    count = len(prompts)
    await cluster.create_pool(with_spec(pool, replicas=count, drainSeconds=3600))
    await wait_until_async(lambda: len(kubelet.workers) == count, description=f"{count} workers")
    async with gateway(leader.address) as client:
        busy = await occupy(client, kubelet, prompts)
        await cluster.scale_pool(NAME, count - 1)
        await wait_until_async(lambda: draining(leader), description="a worker drains", timeout_s=30)
        yield busy


async def occupy(client: Any, kubelet: Kubelet, prompts: dict[str, int]) -> dict[str, str]:
    """Run a request on each worker, one round done; return the worker of each."""
    for number, (name, length) in enumerate(prompts.items(), start=1):
        await client.submit(name, prompt=tuple(range(length)), max_tokens=50, submission_id=number)
    where: dict[str, str] = {}
    for pod, peer in kubelet.workers.items():
        assignment = await peer.wait_for(
            lambda m: m.WhichOneof("message") == "assignment" and len(m.assignment.entries) == 1,
            f"{pod} has a request",
        )
        (entry,) = assignment.assignment.entries
        where[entry.request_id] = pod
        await peer.run_round(entry.request_id, entry.lease_epoch, 0, [4])
    assert set(where) == set(prompts)
    return where


def draining(leader: SchedulerUnderTest) -> list[str]:
    assert leader.leadership.loop is not None
    return [view.worker_id for view in leader.leadership.loop.core.workers() if view.draining]


async def has_pods(cluster: Cluster, count: int) -> bool:
    return len(await cluster.pods()) == count


async def turns(cluster: Cluster, count: int) -> None:
    """Wait until this many turns of the operator have begun and ended since the call: each has seen a change
    of the pool.
    """
    for number in range(count):
        await cluster.patch_pool(NAME, {"spec": {"maxReplicas": 100 + number}})
        generation = (await cluster.pool(NAME))["metadata"]["generation"]

        async def answered(generation: int = generation) -> bool:
            return (await cluster.status(NAME)).get("observedGeneration", 0) >= generation

        await wait_until_async(answered, description="the operator has had a turn")


async def test_a_number_set_by_hand_becomes_the_pools(
    cluster: Cluster, pool: dict[str, Any], deployed: OperatorProcess, kubelet: Kubelet
) -> None:
    await cluster.create_pool(with_spec(pool, replicas=1))
    await wait_until_async(lambda: ready(cluster, 1), description="a worker is ready")

    await cluster.scale_deployment(NAME, 3)

    async def adopted() -> bool:
        return int((await cluster.pool(NAME))["spec"]["replicas"]) == 3

    await wait_until_async(adopted, description="the pool says three")
    await turns(cluster, 2)
    assert await cluster.replicas(NAME) == 3


async def test_an_operator_that_was_killed_goes_on_where_it_was(
    cluster: Cluster,
    pool: dict[str, Any],
    deployed: OperatorProcess,
    kubelet: Kubelet,
    leader: SchedulerUnderTest,
) -> None:
    async with one_too_many(cluster, pool, kubelet, leader, prompts={"long": 400, "short": 10}) as busy:
        deployed.kill()
        await kubelet.workers[busy["short"]].run_round("short", 1, 1, [5])
        deployed.start()

        await wait_until_async(lambda: has_pods(cluster, 1), description="the pod is gone")
        assert set(await cluster.pods()) == {busy["long"]}


@pytest.fixture
async def standby(cluster: Cluster, deployed: OperatorProcess) -> AsyncIterator[OperatorProcess]:
    """Start a second operator, while the first one leads."""
    await wait_until_async(lambda: leads(cluster, deployed), description="the first one leads")
    found = deployed.twin()
    found.start()
    try:
        await wait_until_async(lambda: works(found), description="the second one is there")
        yield found
    finally:
        found.stop()
    went_well(found)


async def leads(cluster: Cluster, process: OperatorProcess) -> bool:
    return (await cluster.lease()).get("holderIdentity") == process.pod


async def test_of_two_operators_one_acts_and_the_other_takes_over_from_a_dead_one(
    cluster: Cluster,
    pool: dict[str, Any],
    deployed: OperatorProcess,
    standby: OperatorProcess,
    kubelet: Kubelet,
    leader: SchedulerUnderTest,
) -> None:
    prompts = {"long": 400, "short": 10, "middle": 100}
    async with one_too_many(cluster, pool, kubelet, leader, prompts=prompts) as busy:
        await turns(cluster, 3)
        assert draining(leader) == await cluster.marked() == [busy["short"]]
        assert "acts" in deployed.said() and "acts" not in standby.said()

        deployed.kill()
        await kubelet.workers[busy["short"]].run_round("short", 1, 1, [5])

        await wait_until_async(lambda: has_pods(cluster, 2), description="the pod is gone")
        assert set(await cluster.pods()) == {busy["long"], busy["middle"]}
        assert await cluster.replicas(NAME) == 2
        assert await leads(cluster, standby)
        assert (await cluster.lease())["leaseTransitions"] == 1


async def test_an_operator_that_wakes_up_after_another_took_over_does_nothing(
    cluster: Cluster,
    pool: dict[str, Any],
    deployed: OperatorProcess,
    standby: OperatorProcess,
    kubelet: Kubelet,
) -> None:
    deployed.signal(signal.SIGSTOP)
    try:
        await wait_until_async(lambda: leads(cluster, standby), description="the other one leads")
        await cluster.create_pool(pool)
        await wait_until_async(lambda: has_pods(cluster, 1), description="it works")
    finally:
        deployed.signal(signal.SIGCONT)
    await wait_until_async(lambda: "leads no more" in deployed.said(), description="it knows")
    await cluster.scale_pool(NAME, 2)
    await wait_until_async(lambda: has_pods(cluster, 2), description="the other one goes on")
    assert "acts" not in deployed.said()


async def test_an_operator_that_is_stopped_hands_over_at_once(
    cluster: Cluster, deployed: OperatorProcess, standby: OperatorProcess
) -> None:
    assert deployed.stop() == 0
    lease = await cluster.lease()
    assert lease.get("holderIdentity") in (None, standby.pod), "it did not keep the lease until it runs out"
    await wait_until_async(lambda: leads(cluster, standby), description="the other one leads", timeout_s=10)


async def works(process: OperatorProcess) -> bool:
    return await asyncio.to_thread(process.is_healthy)


async def test_a_changed_pool_changes_its_pods_and_not_their_number(
    cluster: Cluster, pool: dict[str, Any], deployed: OperatorProcess, kubelet: Kubelet
) -> None:
    await cluster.create_pool(with_spec(pool, replicas=2))
    await wait_until_async(lambda: ready(cluster, 2), description="two workers are ready")
    before = set(await cluster.pods())

    await cluster.patch_pool(NAME, {"spec": {"drainSeconds": 90}})

    async def replaced() -> bool:
        pods = await cluster.pods()
        return len(pods) == 2 and not before & set(pods) and await ready(cluster, 2)

    await wait_until_async(replaced, description="both pods are new")
    for found in (await cluster.pods()).values():
        assert found["spec"]["terminationGracePeriodSeconds"] == 100


async def test_a_pool_goes_with_all_it_has_and_without_its_operator(
    cluster: Cluster, pool: dict[str, Any], deployed: OperatorProcess, kubelet: Kubelet
) -> None:
    await cluster.create_pool(with_spec(pool, replicas=2))
    await wait_until_async(lambda: ready(cluster, 2), description="two workers are ready")
    deployed.kill()

    await cluster.delete_pool(NAME)

    await wait_until_async(lambda: has_pods(cluster, 0), description="its pods are gone")
    assert await cluster.pools() == []
    assert await cluster.deployment(NAME) is None


async def test_a_pool_that_is_being_deleted_gets_no_new_deployment(
    cluster: Cluster, pool: dict[str, Any], deployed: OperatorProcess, kubelet: Kubelet
) -> None:
    """In the foreground: the pool stays until what it owns is gone."""
    await cluster.create_pool(with_spec(pool, replicas=1))
    await wait_until_async(lambda: ready(cluster, 1), description="a worker is ready")

    await cluster.delete_pool(NAME, "Foreground")

    await wait_until_async(lambda: has_pools(cluster, 0), description="the pool is gone")
    assert await cluster.deployment(NAME) is None


async def test_a_pool_that_is_there_again_at_once_gets_a_deployment_of_its_own(
    cluster: Cluster, pool: dict[str, Any], deployed: OperatorProcess, kubelet: Kubelet
) -> None:
    await cluster.create_pool(with_spec(pool, replicas=1))
    await wait_until_async(lambda: ready(cluster, 1), description="a worker is ready")

    await cluster.delete_pool(NAME)
    again = await cluster.create_pool(with_spec(pool, replicas=2))

    await wait_until_async(lambda: ready(cluster, 2), description="two workers are ready")
    made = await cluster.deployment(NAME)
    assert made is not None
    assert [one["uid"] for one in made["metadata"]["ownerReferences"]] == [again["metadata"]["uid"]]
    await wait_until_async(lambda: no_problem(cluster), description="nothing is in its way any more")


async def test_what_kubernetes_refuses_is_told_in_status(
    cluster: Cluster, pool: dict[str, Any], deployed: OperatorProcess
) -> None:
    broken = copy.deepcopy(pool)
    broken["spec"]["template"]["spec"]["containers"][0]["ports"] = [{"containerPort": 70000}]
    await cluster.create_pool(broken)

    await wait_until_async(lambda: problem(cluster, "containerPort"), description="status names the field")

    mended = copy.deepcopy(pool["spec"]["template"]["spec"]["containers"])
    await cluster.patch_pool(NAME, {"spec": {"template": {"spec": {"containers": mended}}}})

    async def solved() -> bool:
        return await cluster.replicas(NAME) == 1 and "problem" not in await cluster.status(NAME)

    await wait_until_async(solved, description="the Deployment is there and the problem is not")


async def problem(cluster: Cluster, part: str) -> bool:
    return part in (await cluster.status(NAME)).get("problem", "")


async def test_a_field_that_kubernetes_does_not_know_is_told_in_status(
    cluster: Cluster, pool: dict[str, Any], deployed: OperatorProcess
) -> None:
    odd = copy.deepcopy(pool)
    odd["spec"]["template"]["spec"]["nodeSelectr"] = {"gpu": "h100"}
    await cluster.create_pool(odd)

    await wait_until_async(lambda: problem(cluster, "nodeSelectr"), description="status names the field")
    assert await cluster.deployment(NAME) is None


async def test_others_can_wait_for_the_condition_and_events_say_what_happened(
    cluster: Cluster, pool: dict[str, Any], deployed: OperatorProcess, kubelet: Kubelet
) -> None:
    await cluster.create_pool(with_spec(pool, scheduler="127.0.0.1:1", replicas=1))
    await wait_until_async(lambda: condition(cluster, "False"), description="it is not ready")

    await cluster.patch_pool(NAME, {"spec": {"scheduler": pool["spec"]["scheduler"]}})
    await wait_until_async(lambda: condition(cluster, "True"), description="it is ready")

    found = (await cluster.core.list_namespaced_event(cluster.namespace)).items
    own = {(one.type, one.reason) for one in found if one.involved_object.kind == "SpeculativePool"}
    assert {("Normal", "Created"), ("Warning", "SchedulerUnreachable")} <= own


async def condition(cluster: Cluster, status: str) -> bool:
    return any(one["status"] == status for one in (await cluster.status(NAME)).get("conditions", ()))


async def test_a_deployment_that_somebody_edits_is_mended_and_a_restart_stays(
    cluster: Cluster, pool: dict[str, Any], deployed: OperatorProcess, kubelet: Kubelet
) -> None:
    await cluster.create_pool(with_spec(pool, replicas=1))
    await wait_until_async(lambda: condition(cluster, "True"), description="it is ready")
    assert "Mended" not in deployed.said() and "because" not in deployed.said(), "defaults are no change"
    restarted = {"metadata": {"annotations": {objects.RESTARTED: "2026-01-01T00:00:00Z"}}}
    edited = {"containers": [{"name": "worker", "image": "other:1"}]}
    template = {**restarted, "spec": edited}
    await cluster.apps.patch_namespaced_deployment(NAME, cluster.namespace, {"spec": {"template": template}})

    async def mended() -> bool:
        made = await cluster.deployment(NAME)
        assert made is not None
        found = made["spec"]["template"]
        (container,) = found["spec"]["containers"]
        return (
            container["image"] == pool["spec"]["template"]["spec"]["containers"][0]["image"]
            and found["metadata"]["annotations"][objects.RESTARTED] == "2026-01-01T00:00:00Z"
        )

    await wait_until_async(mended, description="the image is the pool's", timeout_s=30)


async def test_pods_that_kubernetes_does_not_make_are_told_in_status(
    cluster: Cluster, pool: dict[str, Any], deployed: OperatorProcess, kubelet: Kubelet
) -> None:
    account = pool["spec"]["template"]["spec"]["serviceAccountName"]
    await cluster.core.delete_namespaced_service_account(account, cluster.namespace)

    await cluster.create_pool(with_spec(pool, replicas=1))
    await wait_until_async(lambda: problem(cluster, f'"{account}" not found'), description="status says so")

    await cluster.core.create_namespaced_service_account(cluster.namespace, {"metadata": {"name": account}})
    await wait_until_async(lambda: ready(cluster, 1), description="a worker is ready")
    await wait_until_async(lambda: no_problem(cluster), description="and status says no more")


async def no_problem(cluster: Cluster) -> bool:
    return "problem" not in await cluster.status(NAME)


async def test_a_deployment_of_somebody_else_is_left_alone(
    cluster: Cluster, pool: dict[str, Any], deployed: OperatorProcess, helm3: Any
) -> None:
    other = find(helm3.render({}), "Deployment", "demo-worker")
    await apply(cluster, path_of(other, cluster.namespace), other)
    before = await cluster.deployment(NAME)

    await cluster.create_pool(with_spec(pool, replicas=5))

    await wait_until_async(lambda: problem(cluster, "not this pool's"), description="status says so")
    after = await cluster.deployment(NAME)
    assert before is not None and after is not None
    assert after["spec"] == before["spec"]


async def test_a_scheduler_that_is_away_stops_no_growth_and_is_told(
    cluster: Cluster, pool: dict[str, Any], deployed: OperatorProcess, leader: SchedulerUnderTest
) -> None:
    kubelet = Kubelet(cluster)
    try:
        await cluster.create_pool(with_spec(pool, scheduler="127.0.0.1:1", replicas=1))
        await wait_until_async(lambda: problem(cluster, "no scheduler answers"), description="status says so")

        await cluster.scale_pool(NAME, 2)

        await wait_until_async(lambda: ready(cluster, 2), description="two workers are ready")
        assert "queued" not in await cluster.status(NAME)
    finally:
        await kubelet.close()


# -- every point at which it may die ----------------------------------------------------------------------------------------


class Died(Exception):
    """Death of the operator in the middle of a turn."""


class Mortal(Kubernetes):
    """A Kubernetes client that dies before its n-th write. It reads the present state in place of watches."""

    def __init__(self, cluster: Cluster, writes: int) -> None:
        super().__init__(Api(cluster.api), cluster.namespace, NAME, lambda: Found(None))
        self.left = writes

    async def watched(self) -> Found:
        return await self.read()

    def write(self) -> None:
        if not self.left:
            raise Died
        self.left -= 1

    async def create(self, deployment: dict[str, Any]) -> None:
        self.write()
        await super().create(deployment)

    async def patch_deployment(
        self, operations: list[dict[str, Any]], *, dry_run: bool = False
    ) -> dict[str, Any]:
        if not dry_run:
            self.write()
        return await super().patch_deployment(operations, dry_run=dry_run)

    async def patch_pod(self, name: str, patch: dict[str, Any]) -> None:
        self.write()
        await super().patch_pod(name, patch)

    async def patch_pool(self, patch: dict[str, Any]) -> None:
        self.write()
        await super().patch_pool(patch)

    async def patch_status(self, status: dict[str, Any]) -> None:
        self.write()
        await super().patch_status(status)


async def test_it_may_die_before_any_write_and_the_end_is_the_same(
    cluster: Cluster,
    pool: dict[str, Any],
    kubelet: Kubelet,
    leader: SchedulerUnderTest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From nothing to two workers, to four by hand, to one: a life in which each operator lives for one write
    longer than the one before, and never takes the worker that has a request."""
    mortal = Mortal(cluster, 0)
    ask = scheduler.drain

    async def drain(address: str, tls: Any, worker: str) -> None:
        mortal.write()
        await ask(address, tls, worker)

    monkeypatch.setattr(scheduler, "drain", drain)
    deaths = 0

    async def live(done: Any, description: str) -> None:
        nonlocal mortal, deaths
        writes = 0
        mortal = Mortal(cluster, writes)
        for _ in range(400):
            try:
                assert await Turns(mortal, None, get_logger("test")).turn()
            except Died:
                deaths += 1
                writes = (writes + 1) % 4
                mortal = Mortal(cluster, writes)
            if await done():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"never: {description}; {await cluster.pool(NAME)}")

    await cluster.create_pool(with_spec(pool, replicas=2))

    async def count(wanted: int) -> bool:
        status, found = await cluster.status(NAME), await cluster.pool(NAME)
        return (
            await cluster.replicas(NAME) == wanted
            and found["spec"]["replicas"] == wanted
            and status.get("ready") == wanted
            and len(kubelet.workers) == wanted
        )

    await live(lambda: count(2), "two workers")
    async with gateway(leader.address) as client:
        busy = await occupy(client, kubelet, prompts={"long": 400, "other": 10})
        await kubelet.workers[busy["other"]].run_round("other", 1, 1, [5], end=pb.RequestEnd.KIND_STOP)
        await cluster.scale_deployment(NAME, 4)
        await live(lambda: count(4), "four workers, in the pool too")
        await cluster.scale_pool(NAME, 1)
        await live(lambda: count(1), "one worker")
        assert list(kubelet.workers) == [busy["long"]]
    assert deaths > 10


# -- the chart --------------------------------------------------------------------------------------------------------------

ELSEWHERE = {
    "Certificate", "GRPCRoute", "HTTPRoute", "InferencePool", "PodMonitor", "PrometheusRule", "ScaledObject",
}  # fmt: skip
"""Kinds of other projects, which the API server does not have."""


@pytest.mark.parametrize("name", MATRIX)
async def test_the_api_server_takes_everything_that_the_chart_renders(
    cluster: Cluster, helm3: Any, name: str
) -> None:
    """Strictly: no field that it does not know; pods as the namespace's Pod Security level allows them."""
    values, crds = MATRIX[name]
    rendered = [made for made in helm3.render(values, crds) if made["kind"] not in ELSEWHERE]
    rendered.sort(key=lambda made: made["kind"] != "ServiceAccount")
    pods = 0
    for made in rendered:
        made["metadata"].pop("namespace", None)
        for subject in made.get("subjects", []):
            subject["namespace"] = cluster.namespace
        path = path_of(made, cluster.namespace)
        # Pods are only taken where their accounts are.
        query = {} if made["kind"] == "ServiceAccount" else {"dryRun": "All"}
        taken = await apply(cluster, path, made, fieldValidation="Strict", **query)
        assert taken["kind"] == made["kind"]
        if "template" in made.get("spec", {}):
            pods += 1
            await admits_its_pod(cluster, made["spec"]["template"])
    assert pods >= 3


async def test_the_api_server_takes_the_plain_server_of_vllm(cluster: Cluster) -> None:
    for made in manifests((EXAMPLES / "vllm-serve.yaml").read_text(encoding="utf-8")):
        taken = await apply(
            cluster, path_of(made, cluster.namespace), made, fieldValidation="Strict", dryRun="All"
        )
        assert taken["kind"] == made["kind"]
        if "template" in made["spec"]:
            await admits_its_pod(cluster, made["spec"]["template"])


async def test_workers_get_the_gpus_that_they_claim_or_are_refused(
    cluster: Cluster, helm3: Any, tmp_path: Path
) -> None:
    workers = {"resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "one"}]}
    pool = {"name": "demo", "model": "m", "target": {"path": "t"}, "workers": workers}
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps({"pools": [pool]}), encoding="utf-8")
    install = ("install", "demo", str(CHART), "--values", str(values))

    if not await cluster.serves("resource.k8s.io"):  # before 1.34, unless it is turned on
        assert "would start the workers without GPUs" in await helm(cluster, *install, succeeds=False)
        return
    await helm(cluster, *install)

    made = await cluster.deployment(NAME)
    assert made is not None
    assert made["spec"]["template"]["spec"]["resourceClaims"] == workers["resourceClaims"]


async def test_helm_installs_upgrades_and_removes_it(cluster: Cluster, helm3: Any) -> None:
    """A number of workers that was set by hand: an upgrade sets a Deployment's back, and leaves a
    SpeculativePool's."""

    await helm(cluster, "install", "demo", str(CHART))
    await cluster.scale_deployment(NAME, 3)
    await helm(cluster, "upgrade", "demo", str(CHART), "--set", "image.tag=0.2.0")
    made = await cluster.deployment(NAME)
    assert made is not None
    assert made["spec"]["replicas"] == 1
    assert made["spec"]["template"]["spec"]["containers"][0]["image"].endswith(":0.2.0")

    await helm(cluster, "upgrade", "demo", str(CHART), "--set", "operator.enabled=true")
    assert await cluster.pools() == [NAME]
    await cluster.scale_pool(NAME, 3)
    await helm(cluster, "upgrade", "demo", str(CHART), "--set", "operator.enabled=true,image.tag=0.3.0")
    changed = await cluster.pool(NAME)
    assert changed["spec"]["replicas"] == 3
    assert changed["spec"]["template"]["spec"]["containers"][0]["image"].endswith(":0.3.0")

    await helm(cluster, "rollback", "demo", "1")
    assert await cluster.pools() == []
    made = await cluster.deployment(NAME)
    assert made is not None
    assert made["spec"]["replicas"] == 1

    await helm(cluster, "uninstall", "demo")

    async def nothing_left() -> bool:
        return await cluster.deployment(NAME) is None and not await cluster.pods()

    await wait_until_async(nothing_left, description="everything is gone")


async def test_an_upgrade_that_turns_autoscaling_on_begins_with_what_is_there(
    cluster: Cluster, helm3: Any
) -> None:
    """A Deployment that loses its number has one pod, until a scaler sets another number."""
    await helm(cluster, "install", "demo", str(CHART), "--set", "gateway.replicas=3")
    await helm(cluster, "upgrade", "demo", str(CHART), "--set", "gateway.autoscaling.enabled=true")

    assert await cluster.replicas("demo-laps-sd-demo-gateway") == 3


async def test_another_number_of_schedulers_restarts_no_worker(cluster: Cluster, helm3: Any) -> None:
    await helm(cluster, "install", "demo", str(CHART))
    before = await cluster.deployment(NAME)
    await helm(cluster, "upgrade", "demo", str(CHART), "--set", "scheduler.replicas=3")

    after = await cluster.deployment(NAME)
    assert before is not None and after is not None
    assert after["metadata"]["generation"] == before["metadata"]["generation"]


async def test_an_upgrade_that_removes_a_pool_is_refused(cluster: Cluster, helm3: Any) -> None:
    pools = [f"pools[{i}].name={name},pools[{i}].model=laps-sd-demo" for i, name in enumerate("ab")]
    await helm(cluster, "install", "demo", str(CHART), "--set", ",".join(pools))

    refused = await helm(cluster, "upgrade", "demo", str(CHART), "--set", pools[0], succeeds=False)

    assert 'The pool "b" is in the release and not in the values' in refused
    assert await cluster.deployment("demo-laps-sd-b-worker") is not None


async def helm(cluster: Cluster, *arguments: str, succeeds: bool = True) -> str:
    """Return the output of helm, as an administrator of the cluster."""
    program = helm3_program()
    assert program is not None
    where = ("--namespace", cluster.namespace, "--kubeconfig", kubeconfig_of_test())
    done = await asyncio.to_thread(
        subprocess.run, [program, *arguments, *where], capture_output=True, text=True
    )
    assert (done.returncode == 0) is succeeds, done.stderr
    return done.stdout + done.stderr


async def test_a_release_changes_to_the_operator_and_back(
    cluster: Cluster, helm3: Any, tmp_path: Path
) -> None:
    """Its workers' Deployment is Helm's, the operator's, and Helm's again, which needs a hand: Helm takes
    over nothing."""
    await helm(cluster, "install", "demo", str(CHART))
    await helm(cluster, "upgrade", "demo", str(CHART), "--set", "operator.enabled=true")
    kubeconfig = kubeconfig_with(await token_of(cluster, "demo-laps-sd-operator"), tmp_path / "kubeconfig")
    process = OperatorProcess(kubeconfig, cluster.namespace, tmp_path / "operator.log")
    process.start()
    try:

        async def owners() -> list[str]:
            made = await cluster.deployment(NAME)
            return [one["kind"] for one in made["metadata"].get("ownerReferences", [])] if made else []

        await wait_until_async(owners, description="the Deployment is the operator's")
        back = ("upgrade", "demo", str(CHART), "--set", "operator.enabled=false")
        refused = await helm(cluster, *back, succeeds=False)
        assert f"delete speculativepool {NAME} --cascade=foreground" in refused
        assert await cluster.pools() == [NAME], "it is as it was"

        await cluster.delete_pool(NAME, "Foreground")
        await wait_until_async(lambda: has_pools(cluster, 0), description="the pool is gone")
        await helm(cluster, *back)

        made = await cluster.deployment(NAME)
        assert made is not None
        assert made["metadata"]["annotations"]["meta.helm.sh/release-name"] == "demo"
        assert await owners() == []
    finally:
        process.stop()


async def has_pools(cluster: Cluster, count: int) -> bool:
    return len(await cluster.pools()) == count


async def admits_its_pod(cluster: Cluster, template: dict[str, Any]) -> None:
    """Check that the pod is admitted. A Deployment is accepted with any pods; the namespace's rules apply to
    the pod itself.
    """
    template = copy.deepcopy(template)
    template["spec"].pop("priorityClassName", None)
    template["spec"].pop("runtimeClassName", None)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        **template,
        "metadata": {**template["metadata"], "name": "of-the-template"},
    }
    for volume in pod["spec"].get("volumes", []):
        if volume.pop("hostPath", None):  # the only field beyond "restricted" that values can set
            volume["emptyDir"] = {}
    volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
    for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:  # a claim of the StatefulSet's
                volumes.add(mount["name"])
                pod["spec"].setdefault("volumes", []).append({"name": mount["name"], "emptyDir": {}})
    await cluster.core.create_namespaced_pod(cluster.namespace, pod, dry_run="All")
