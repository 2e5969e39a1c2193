"""The operator as a whole: watches, election, turns, probes and metrics, over real HTTP to the tests' API server, and
with a real scheduler. test_cluster.py has a real API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes_asyncio", reason="make setup")

from kubernetes_asyncio import client
from laps_sd_operator import health, objects
from laps_sd_operator import operator as operator_module
from laps_sd_operator.api import Api
from laps_sd_operator.leadership import Leadership
from laps_sd_operator.operator import HEALTHY_S, Operator
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from laps_sd.service import metrics
from scheduler_svc.store.embedded import EmbeddedServer
from tests.helpers import wait_until, wait_until_async
from tests.k8s.api_server import NAMESPACE, ApiServer, Refusal
from tests.k8s.helm import find
from tests.k8s.operator_process import OperatorProcess, kubeconfig_of
from tests.services.scheduler.peers import SchedulerUnderTest, start_scheduler, worker


def pool(name: str = "p", **spec: Any) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "worker", "image": "w"}]}}
    return {
        "apiVersion": "laps-sd.dev/v1alpha1",
        "kind": "SpeculativePool",
        "metadata": {"name": name},
        "spec": {"replicas": 1, "scheduler": "127.0.0.1:1", "template": template} | spec,
    }


@pytest.fixture(autouse=True)
def _schemas(kubernetes: None) -> None:
    """The API server refuses unknown fields by the schemas of Kubernetes."""


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer().serve() as found:
        yield found


@contextlib.asynccontextmanager
async def operating(
    server: ApiServer, *, identity: str = "o-0", turn_s: float = 0.05, turn_limit_s: float = 60.0
) -> AsyncIterator[Operator]:
    """Run an operator, and release its Lease at the end."""
    async with client.ApiClient(client.Configuration(host=server.url)) as connection:
        leadership = Leadership(connection, NAMESPACE, identity, retry_s=0.05)
        found = Operator(
            Api(connection), NAMESPACE, None, leadership, turn_s=turn_s, turn_limit_s=turn_limit_s
        )
        running = asyncio.create_task(found.run())
        try:
            yield found
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await leadership.release()


def ready(server: ApiServer, name: str = "p") -> dict[str, Any]:
    """Return the condition of a pool; empty: it has none."""
    conditions = server.get("speculativepools", name).get("status", {}).get("conditions", [{}])
    found = conditions[0]
    assert isinstance(found, dict)
    return found


async def has(server: ApiServer, reason: str, name: str = "p") -> None:
    await wait_until_async(
        lambda: ready(server, name).get("reason") == reason, description=f"{name} is {reason}"
    )


# -- turns ------------------------------------------------------------------------------------------------------------------


async def test_a_pool_has_turns_from_its_creation_to_its_end(server: ApiServer) -> None:
    async with operating(server) as running:
        await wait_until_async(lambda: running.leads, description="it leads")
        server.add("speculativepools", pool())
        await has(server, "SchedulerUnreachable")
        assert server.get("deployments", "p")["spec"]["replicas"] == 1
        server.delete("speculativepools", "p")
        await wait_until_async(lambda: not running.turn_ages_s(), description="its turns end")
        server.add("speculativepools", pool(replicas=3))
        await wait_until_async(lambda: len(server.all("pods")) == 3, description="it has turns again")


async def test_a_pool_that_was_there_before_the_operator_has_turns(server: ApiServer) -> None:
    server.add("speculativepools", pool("a"))
    server.add("speculativepools", pool("b"))
    async with operating(server):
        await has(server, "SchedulerUnreachable", "a")
        await has(server, "SchedulerUnreachable", "b")


@pytest.mark.parametrize("resource", ["speculativepools", "deployments", "pods"])
async def test_a_change_of_its_objects_wakes_a_pool(server: ApiServer, resource: str) -> None:
    """Its next turn would be an hour away."""
    server.add("speculativepools", pool())
    async with operating(server, turn_s=3600.0):
        await has(server, "SchedulerUnreachable")
        await wait_until_async(lambda: server.all("pods"), description="it has a pod")
        if resource == "speculativepools":
            server.change(resource, "p", {"spec": {"replicas": 2}})
        elif resource == "deployments":
            server.delete(resource, "p")
        else:
            (name,) = (pod["metadata"]["name"] for pod in server.all("pods"))
            marked = objects.mark_patch(0.0)
            server.change(resource, name, marked)

        def answered() -> bool:
            found = [pod["metadata"].get("annotations") for pod in server.all("pods")]
            count = 2 if resource == "speculativepools" else 1
            return len(found) == count and not any(found)

        await wait_until_async(answered, description="the turn has answered the change")


async def test_its_own_report_wakes_no_pool(server: ApiServer) -> None:
    server.add("speculativepools", pool())
    async with operating(server, turn_s=3600.0) as running:
        await has(server, "SchedulerUnreachable")
        await wait_until_async(lambda: running.turn_ages_s(), description="it has had a turn")
        wakes = running._wake["p"]
        wakes.clear()
        server.change("speculativepools", "p", {"status": {"queued": 7}})
        await wait_until_async(
            lambda: running._pools.objects["p"]["status"].get("queued") == 7, description="the watch shows it"
        )
        assert not wakes.is_set()


async def test_a_failed_turn_stands_in_status_event_and_condition_until_one_succeeds(
    server: ApiServer,
) -> None:
    server.add("speculativepools", pool())
    server.refusals["pods", "list"] = Refusal(500, "etcd is full")
    with capture_logs() as said:
        async with operating(server, turn_s=0.01):
            # The watch of pods cannot begin without its list.
            await wait_until_async(lambda: ("pods", "list") in server.calls, description="it begins")
            del server.refusals["pods", "list"]
            await has(server, "SchedulerUnreachable")
            server.refusals["pods", "list"] = Refusal(500, "etcd is full")
            server.change("speculativepools", "p", {"spec": {"replicas": 2}})
            await has(server, "TurnFailed")
            assert "etcd is full" in server.get("speculativepools", "p")["status"]["problem"]
            warnings = [one["reason"] for one in server.all("events") if one["type"] == "Warning"]
            assert "TurnFailed" in warnings
            del server.refusals["pods", "list"]
            await has(server, "SchedulerUnreachable")
    events = [one["event"] for one in said if one["event"].startswith("a turn")]
    assert events == ["a turn failed; the next one begins anew", "a turn succeeded again"], "once each"


async def test_an_answer_that_never_comes_is_a_failed_turn(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(address: str, tls: Any) -> objects.Shard:
        return await asyncio.get_running_loop().create_future()

    monkeypatch.setattr("laps_sd_operator.scheduler.shard", never)
    server.add("speculativepools", pool())
    async with operating(server, turn_limit_s=0.2):
        await has(server, "TurnFailed")
    assert "no answer in time" in server.get("speculativepools", "p")["status"]["problem"]


# -- several operators -------------------------------------------------------------------------------------------------------


async def test_only_the_elected_operator_has_turns_and_the_next_goes_on(server: ApiServer) -> None:
    server.add("speculativepools", pool())
    async with contextlib.AsyncExitStack() as first:
        one = await first.enter_async_context(operating(server, identity="o-0"))
        await wait_until_async(lambda: one.leads, description="the first leads")
        async with operating(server, identity="o-1") as other:
            await wait_until_async(lambda: None not in other.ages_s().values(), description="it watches")
            await has(server, "SchedulerUnreachable")
            assert not other.leads and not other.turn_ages_s()
            await first.aclose()
            await wait_until_async(lambda: other.leads, description="the other takes over")
            server.change("speculativepools", "p", {"spec": {"replicas": 2}})
            await wait_until_async(lambda: len(server.all("pods")) == 2, description="and acts")


async def test_an_operator_that_cannot_watch_does_not_take_the_lease(server: ApiServer) -> None:
    server.refusals["pods", "list"] = Refusal(403, "may not list pods")
    async with operating(server) as running:
        await wait_until_async(
            lambda: [kind for kind, age_s in running.ages_s().items() if age_s is None] == ["pods"],
            description="it watches all else",
        )
        assert server.all("leases") == []
        assert health.health_of(running)["problem"] == "pods were never listed"


# -- rights ------------------------------------------------------------------------------------------------------------------


async def test_its_rights_are_exactly_what_it_uses(
    server: ApiServer, helm3: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Through all that it does: create, change, scale up and down, adopt, report, hand over."""
    role = find(helm3.render({"operator": {"enabled": True}}), "Role", "operator")
    server.rights = role["rules"]
    async with scheduler_of(tmp_path_factory) as leader, operating(server):
        server.add("speculativepools", pool(replicas=2, scheduler=leader.address))
        await has(server, "AsWanted")
        server.change("speculativepools", "p", {"spec": {"drainSeconds": 5}})
        await wait_until_async(
            lambda: '"LAPS_SD_DRAIN_S", "value": "5"' in json.dumps(server.get("deployments", "p")["spec"]),
            description="it is changed",
        )
        server.change("deployments", "p", {"spec": {"replicas": 3}})
        await wait_until_async(
            lambda: server.get("speculativepools", "p")["spec"]["replicas"] == 3, description="it is adopted"
        )
        server.change("speculativepools", "p", {"spec": {"replicas": 1}})
        await wait_until_async(lambda: len(server.all("pods")) == 1, description="two pods are gone")
        await has(server, "AsWanted")

    granted = {
        (resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }
    # Kubernetes requires this right for an object that gets an owner.
    assert server.used | {("speculativepools/finalizers", "update")} == granted
    assert server.denied == set()


@contextlib.asynccontextmanager
async def scheduler_of(factory: pytest.TempPathFactory) -> AsyncIterator[SchedulerUnderTest]:
    with EmbeddedServer(factory.mktemp("valkey")).start() as record:
        found = await start_scheduler(record.url, shard="op", silence_s=600.0)
        await found.wait_leading()
        try:
            yield found
        finally:
            await found.crash()


async def test_a_worker_is_drained_by_the_scheduler_before_its_pod_goes(
    server: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with scheduler_of(tmp_path_factory) as leader, operating(server):
        server.add("speculativepools", pool(replicas=2, scheduler=leader.address))
        await wait_until_async(lambda: len(server.all("pods")) == 2, description="two pods")
        first, second = (pod["metadata"]["name"] for pod in server.all("pods"))
        async with worker(leader.address, first) as one, worker(leader.address, second) as other:
            server.change("speculativepools", "p", {"spec": {"replicas": 1}})
            await wait_until_async(lambda: len(server.all("pods")) == 1, description="one is gone")
            (left,) = (pod["metadata"]["name"] for pod in server.all("pods"))
            gone = other if left == first else one
            await gone.wait_for(lambda m: m.WhichOneof("message") == "drain", "its worker was drained")
        events = [one["reason"] for one in server.all("events") if one["type"] == "Normal"]
        assert [one for one in events if one in ("Chosen", "Draining", "Released")] == [
            "Chosen",
            "Draining",
            "Released",
        ]


# -- health and metrics -------------------------------------------------------------------------------------------------------


async def test_health_names_the_watch_that_shows_no_sign(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operating(server) as running:
        await wait_until_async(lambda: running.leads, description="it leads")
        assert health.health_of(running)["problem"] == ""
        for watched in running._watched:
            monkeypatch.setattr(watched, "age_s", lambda: HEALTHY_S + 1)
        found = health.health_of(running)
    assert "no sign of the watch of pods for 181 s" in found["problem"]
    assert found["watch_age_s"]["speculativepools"] == 181.0


async def test_health_names_the_pool_whose_turn_does_not_end(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add("speculativepools", pool())
    async with operating(server) as running:
        await has(server, "SchedulerUnreachable")
        monkeypatch.setattr(running, "turn_ages_s", lambda: {"p": HEALTHY_S + 1})
        assert health.health_of(running)["problem"] == "no turn of p ended for 181 s"


async def test_metrics_show_the_pool_while_it_exists(server: ApiServer) -> None:
    def shown(name: str, **labels: str) -> float:
        return metrics.value(f"laps_sd_operator_{name}", {"pool": "metered", **labels})

    async with operating(server) as running:
        server.add("speculativepools", pool("metered", replicas=2))
        await wait_until_async(lambda: shown("workers", state="ready") == 2, description="two are ready")
        assert shown("workers", state="wanted") == 2
        assert shown("workers", state="draining") == 0
        assert shown("problem", reason="SchedulerUnreachable") == 1
        assert shown("problem", reason="TurnFailed") == 0
        assert shown("turns_total") >= shown("turn_failures_total", reason="SchedulerUnreachable") > 0
        assert metrics.value("laps_sd_operator_leading") == 1
        ages = [
            metrics.value("laps_sd_operator_watch_age_seconds", {"resource": one}) for one in running.ages_s()
        ]
        assert len(ages) == 3 and all(0 <= age_s < HEALTHY_S for age_s in ages)
        server.delete("speculativepools", "metered")
        await wait_until_async(lambda: not shown("turns_total"), description="nothing is shown of it")
    assert metrics.value("laps_sd_operator_leading") == 0


# -- the process --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def beside() -> Iterator[ApiServer]:
    with ApiServer().serve_beside() as found:
        yield found


@pytest.fixture
def process(beside: ApiServer, tmp_path: Path) -> Iterator[OperatorProcess]:
    found = OperatorProcess(kubeconfig_of(beside.url, tmp_path / "kubeconfig"), NAMESPACE, tmp_path / "log")
    try:
        yield found
    finally:
        found.kill()


def test_without_the_definition_it_ends_with_a_sentence_and_does_not_hold_the_lease(
    beside: ApiServer, process: OperatorProcess
) -> None:
    beside.defined = False
    process.start()

    assert process.wait() == 1
    assert process.said().splitlines()[-1].startswith("The API server does not serve SpeculativePools")
    assert "kubectl apply --server-side -f k8s/chart/crds" in process.said()
    assert "Traceback" not in process.said()
    assert beside.all("leases") == []


def test_a_definition_that_is_deleted_ends_it_and_frees_the_lease(
    beside: ApiServer, process: OperatorProcess
) -> None:
    process.start()
    wait_until(lambda: holder(beside), description="it leads")
    beside.defined = False
    beside.run(beside.end_watches)

    assert process.wait() == 1
    assert holder(beside) is None


def holder(server: ApiServer) -> str | None:
    return next((one["spec"]["holderIdentity"] for one in server.all("leases")), None)


def test_the_process_serves_probes_and_metrics_and_stops_by_a_signal(
    beside: ApiServer, process: OperatorProcess
) -> None:
    process.start()
    wait_until(process.is_healthy, description="it is ready")
    wait_until(lambda: holder(beside) == process.pod, description="it leads")

    status, text = process.health()
    assert (status, json.loads(text)["problem"]) == (200, "")
    assert process.health("/livez") == (200, "ok\n")
    names = {family.name for family in text_string_to_metric_families(process.metrics())}
    assert {"laps_sd_operator_leading", "laps_sd_operator_watch_age_seconds"} <= names
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert holder(beside) is None
    assert "Traceback" not in process.said()


def test_a_port_that_is_taken_is_a_sentence(
    beside: ApiServer, process: OperatorProcess, tmp_path: Path
) -> None:
    process.start()
    wait_until(process.is_healthy, description="it is ready")
    for variable in ("LAPS_SD_OPERATOR_HEALTH_PORT", "LAPS_SD_OPERATOR_METRICS_PORT"):
        twin = process.twin(**{variable: process.environment[variable]})
        twin.start()
        assert twin.wait() == 1
        assert variable in twin.said().splitlines()[-1]
        assert "Traceback" not in twin.said()


def test_the_alert_of_a_silent_watch_is_the_limit_of_its_health() -> None:
    rules = (
        Path(operator_module.__file__).parents[2] / "chart" / "rules" / "laps-sd-operator.yaml"
    ).read_text()

    assert f'laps_sd_operator_watch_age_seconds{{namespace="NAMESPACE"}}) > {HEALTHY_S:.0f}' in rules
