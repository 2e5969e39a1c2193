"""The operator's objects: its reads from Kubernetes and writes to it, and its calls to a real scheduler."""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
from typing import Any

import pytest
from laps_sd_operator import checks, objects, scheduler
from laps_sd_operator.leadership import LEASE
from laps_sd_operator.reconcile import Create, Phase, reconcile

from scheduler_svc.store.embedded import EmbeddedServer
from tests.helpers import wait_until_async
from tests.k8s.conftest import missing
from tests.k8s.definition import definition, schema
from tests.k8s.helm import ROOT, find
from tests.k8s.pod_security import breaches
from tests.k8s.schemas import Schemas
from tests.services.scheduler.peers import gateway, start_scheduler, worker


@pytest.fixture(scope="module")
def pool(helm3: Any) -> dict[str, Any]:
    """Return a pool as the chart writes it, and as Kubernetes gives it back."""
    rendered = helm3.render({"operator": {"enabled": True}})
    found = copy.deepcopy(find(rendered, "SpeculativePool", "demo-worker"))
    found["metadata"] |= {"namespace": "models", "uid": "u-1", "generation": 3}
    return found


def pod(name: str, **status: Any) -> dict[str, Any]:
    ready = [{"type": "Ready", "status": "True"}]
    return {
        "metadata": {"name": name},
        "spec": {"nodeName": "n1"},
        "status": {"phase": "Running", "conditions": ready} | status,
    }


def test_the_deployment_is_the_one_that_the_chart_would_have_made(
    pool: dict[str, Any], helm3: Any, kubernetes: None
) -> None:
    by_chart = find(helm3.render({}), "Deployment", "demo-worker")

    made = objects.deployment_of(pool, 3)

    assert Schemas("1.30").problems(made) == []
    assert not list(breaches(made["spec"]["template"]["spec"]))
    assert made["spec"]["replicas"] == 3
    assert made["spec"]["strategy"] == by_chart["spec"]["strategy"]
    assert (
        made["spec"]["selector"]["matchLabels"].items()
        <= made["spec"]["template"]["metadata"]["labels"].items()
    )
    (own,), (charts,) = (one["spec"]["template"]["spec"]["containers"] for one in (made, by_chart))
    assert {one["name"]: one for one in own["env"]} == {one["name"]: one for one in charts["env"]}
    assert own["resources"] == charts["resources"]
    assert made["metadata"]["ownerReferences"][0]["uid"] == "u-1"


def test_what_the_pool_says_in_words_wins_over_its_template(pool: dict[str, Any]) -> None:
    said = copy.deepcopy(pool)
    said["spec"] |= {
        "drainSeconds": 90.5,
        "model": {"target": "/models/t", "draft": "/models/d"},
        "resources": {"limits": {"nvidia.com/gpu": 1}},
    }

    spec = objects.template_of(said)["spec"]

    environment = {one["name"]: one.get("value") for one in spec["containers"][0]["env"]}
    assert spec["terminationGracePeriodSeconds"] == 101
    assert environment["LAPS_SD_DRAIN_S"] == "90.5"
    assert (environment["LAPS_SD_TARGET"], environment["LAPS_SD_DRAFT"]) == ("/models/t", "/models/d")
    assert spec["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 1}}


def test_a_grace_period_that_is_longer_than_the_drain_stays(pool: dict[str, Any]) -> None:
    longer = copy.deepcopy(pool)
    longer["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 600

    assert objects.template_of(longer)["spec"]["terminationGracePeriodSeconds"] == 600


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("", ""),
        ("fcfs", ""),
        ("las", "the schedulers order by fcfs, not las: LAPS_SD_POLICY is a setting of theirs"),
    ],
)
def test_a_policy_that_the_schedulers_do_not_have_is_a_problem(
    pool: dict[str, Any], wanted: str, said: str
) -> None:
    shard = objects.Shard(
        workers=(), cheapest=None, queued=0, backlog_s=0.0, acceptance=0.0, tokens_per_s=0.0, policy="fcfs"
    )

    found = checks.other_policy({**pool, "spec": {**pool["spec"], "policy": wanted}}, shard)
    assert (str(found) if found else "") == said


def test_a_pool_without_a_deployment_is_seen_as_one_to_create(pool: dict[str, Any]) -> None:
    assert reconcile(objects.seen_of(pool, None, [], None, 0.0)) == [Create(1)]


def test_a_deployment_just_created_needs_nothing(pool: dict[str, Any]) -> None:
    made = objects.deployment_of(pool, 1)

    assert reconcile(objects.seen_of(pool, made, [pod("a")], None, 0.0)) == []


def test_a_changed_pool_makes_the_template_out_of_date(pool: dict[str, Any]) -> None:
    made = objects.deployment_of(pool, 1)
    changed = copy.deepcopy(pool)
    changed["spec"]["drainSeconds"] = 300

    slower = copy.deepcopy(pool)
    slower["spec"]["strategy"]["rollingUpdate"] = {"maxSurge": 0, "maxUnavailable": 1}

    assert objects.seen_of(pool, made, [], None, 0.0).up_to_date
    for one in (changed, slower):
        assert not objects.seen_of(one, made, [], None, 0.0).up_to_date


def test_pods_are_read_as_far_as_they_have_come() -> None:
    unscheduled = {"metadata": {"name": "a"}, "spec": {}, "status": {"phase": "Pending"}}
    not_ready = pod("c", conditions=[{"type": "Ready", "status": "False"}])
    marked = pod("d")
    marked["metadata"] |= objects.mark_patch(12.5)["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}

    read = [objects.pod_of(one) for one in (unscheduled, pod("b", phase="Pending"), not_ready, marked)]

    assert [one.phase for one in read] == list(Phase)
    assert (read[3].chosen_s, read[3].terminating) == (12.5, True)
    marked["metadata"]["labels"] = {"pod-template-hash": "5d59d67564"}
    assert objects.pod_of(marked).template == "5d59d67564"
    assert read[0].chosen_s is None


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf", "1e9", "9" * 400])
def test_a_mark_that_the_operator_did_not_write_is_none(text: str) -> None:
    odd = pod("a")
    odd["metadata"]["annotations"] = {objects.CHOSEN: text}

    assert objects.pod_of(odd).chosen_s is None


def test_a_mark_carries_the_deletion_cost_and_sparing_takes_both_away() -> None:
    cost = "controller.kubernetes.io/pod-deletion-cost"
    assert objects.mark_patch(1.0)["metadata"]["annotations"] == {
        "laps-sd.dev/chosen-at": "1.000",
        cost: "-1000",
    }
    assert objects.release_patch()["metadata"]["annotations"] == {cost: "-2000"}
    assert set(objects.spare_patch()["metadata"]["annotations"].values()) == {None}


def test_a_released_pod_is_read_as_one() -> None:
    found = pod("a")
    found["metadata"]["annotations"] = {
        **objects.mark_patch(1.0)["metadata"]["annotations"],
        **objects.release_patch()["metadata"]["annotations"],
    }

    assert objects.pod_of(found).released
    assert not objects.pod_of(pod("b")).released


def test_a_deployment_is_a_pools_by_its_owner_and_not_by_its_name(pool: dict[str, Any]) -> None:
    made = objects.deployment_of(pool, 1)
    again = {**pool, "metadata": {**pool["metadata"], "uid": "u-2"}}

    assert objects.owns(pool, made)
    assert not objects.owns(again, made), "it belongs to the pool before, and goes with it"
    assert not objects.owns(pool, {**made, "metadata": {"name": "helm-made-it"}})


def test_scaling_fails_where_somebody_was_faster(pool: dict[str, Any]) -> None:
    first, *_ = objects.scale_patch(objects.deployment_of(pool, 5), 4)

    assert first == {"op": "test", "path": "/spec/replicas", "value": 5}


def test_a_patch_makes_annotations_where_somebody_removed_all(pool: dict[str, Any]) -> None:
    made = objects.deployment_of(pool, 5)
    made["metadata"].pop("annotations")

    for patch in (objects.scale_patch(made, 4), objects.template_patch(pool, made)):
        assert patch[-1]["path"] == "/metadata/annotations"


def test_a_restart_by_kubectl_outlives_a_new_template(pool: dict[str, Any]) -> None:
    made = objects.deployment_of(pool, 1)
    made["spec"]["template"]["metadata"].setdefault("annotations", {})[objects.RESTARTED] = "now"

    template = objects.template_patch(pool, made)[0]["value"]

    assert template["metadata"]["annotations"][objects.RESTARTED] == "now"


@pytest.mark.parametrize("version", ["1.27", "1.36"])
def test_the_definition_is_valid(kubernetes: None, version: str) -> None:
    assert Schemas(version).problems(definition()) == []


def test_the_chart_gives_a_pool_nothing_that_its_definition_does_not_have(pool: dict[str, Any]) -> None:
    properties = schema()["properties"]["spec"]

    assert set(pool["spec"]) <= set(properties["properties"])
    assert set(properties["required"]) <= set(pool["spec"])


def test_its_account_has_one_lease_reads_no_secret_and_deletes_nothing(helm3: Any) -> None:
    """test_operating.py compares its rights with the calls that it makes."""
    role = find(helm3.render({"operator": {"enabled": True}}), "Role", "operator")
    allowed = {
        (resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }

    named = [rule.get("resourceNames") for rule in role["rules"] if set(rule["verbs"]) & {"get", "update"}]
    assert [LEASE] in named, "one Lease, and no other"
    assert not [one for one in allowed if one[1] in ("*", "delete") or one[0] in ("*", "secrets")]


def section(title: str) -> str:
    """Return one section of the guide."""
    text = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_guide_lists_the_rights_of_its_account(helm3: Any) -> None:
    role = find(helm3.render({"operator": {"enabled": True}}), "Role", "operator")
    rights = {
        (resource, *rule.get("resourceNames", []), *rule["verbs"])
        for rule in role["rules"]
        for resource in rule["resources"]
    }

    listed = re.findall(
        r"^\| `(\S+)`(?: named `(\S+)`)? \| ([a-z, ]+) \|", section("What the operator may do"), re.M
    )
    assert {
        (resource, *([name] if name else []), *verbs.split(", ")) for resource, name, verbs in listed
    } == rights


def test_the_guide_says_that_a_pools_template_is_not_bounded(pool: dict[str, Any]) -> None:
    """Keeps the guide true: a template of any account, volume and right becomes a Deployment as it is."""
    properties = schema()["properties"]["spec"]
    spec = properties["properties"]["template"]["properties"]["spec"]
    wide = copy.deepcopy(pool)
    wide["spec"]["template"]["spec"] |= {
        "serviceAccountName": "of-an-administrator",
        "hostNetwork": True,
        "volumes": [
            {"name": "node", "hostPath": {"path": "/"}},
            {"name": "s", "secret": {"secretName": "s"}},
        ],
    }
    wide["spec"]["template"]["spec"]["containers"][0]["securityContext"] = {"privileged": True}

    made = objects.deployment_of(wide, 1)["spec"]["template"]["spec"]

    for name in ("serviceAccountName", "hostNetwork", "volumes"):
        assert made[name] == wide["spec"]["template"]["spec"][name]
    assert made["containers"][0]["securityContext"] == {"privileged": True}
    assert set(spec["properties"]) == {"containers", "terminationGracePeriodSeconds"}
    assert spec["x-kubernetes-preserve-unknown-fields"] is True
    said = " ".join(section("What the operator may do").split())
    assert "**The pod template of a SpeculativePool is not bounded.**" in said
    assert f"at most {spec['properties']['containers']['maxItems']} containers" in said
    for name in ("serviceAccountName", "volumes", "hostPath", "hostNetwork", "privileged"):
        assert f"`{name}`" in said
    for account in ("operator", "worker"):
        assert f"models-laps-sd-{account}`" in said, "as the chart names it in the release of the guide"


async def test_a_scheduler_says_who_works_and_who_is_cheapest_to_lose(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with EmbeddedServer(tmp_path_factory.mktemp("valkey")).start() as server:
        leader = await start_scheduler(server.url, shard="op", silence_s=600.0)
        standby = await start_scheduler(server.url, shard="op", silence_s=600.0)
        try:
            await wait_until_async(
                lambda: leader.leadership.loop or standby.leadership.loop, description="one of them leads"
            )
            if leader.leadership.loop is None:
                leader, standby = standby, leader
            await wait_until_async(
                lambda: standby.leadership.leader_address, description="the standby knows who leads"
            )
            empty = await scheduler.shard(standby.address, None)
            assert (empty.workers, empty.cheapest) == ((), None)

            async with (
                gateway(leader.address) as client,
                worker(leader.address, "w1") as first,
                worker(leader.address, "w2"),
            ):
                await client.submit("r1")
                found = await scheduler.shard(standby.address, None)
                await wait_until_async(lambda: len(found.workers) == 2, description="both workers are there")
                busy = [one.name for one in found.workers if one.requests]
                assert found.cheapest is not None
                assert found.cheapest not in busy
                assert first is not None

                await scheduler.drain(standby.address, None, found.cheapest)
                await scheduler.drain(standby.address, None, "never-there")
                after = await scheduler.shard(leader.address, None)
                assert [one.name for one in after.workers if one.draining] == [found.cheapest]
        finally:
            await leader.crash()
            await standby.crash()


def test_a_namespace_that_is_not_named_is_a_sentence() -> None:
    pytest.importorskip("kubernetes_asyncio", reason="make setup")
    done = subprocess.run(
        [sys.executable, "-m", "laps_sd_operator"],
        capture_output=True,
        text=True,
        cwd=ROOT / "k8s" / "operator",
        env={"PYTHONPATH": ":".join([str(ROOT), *sys.path]), "PATH": ""},
    )

    assert done.returncode == 1
    assert done.stderr.startswith("LAPS_SD_OPERATOR_NAMESPACE must name")


async def test_nobody_who_leads_is_one_error() -> None:
    with pytest.raises(scheduler.NoScheduler):
        await scheduler.shard("127.0.0.1:1", None)


def test_the_operator_needs_no_torch_and_no_service() -> None:
    if importlib.util.find_spec("kubernetes_asyncio") is None:
        missing("kubernetes_asyncio")
    program = (
        "import sys, laps_sd_operator.__main__\n"
        "print([n for n in ('torch', 'gateway', 'scheduler_svc', 'worker_svc') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT / "k8s" / "operator",
        env={"PYTHONPATH": ":".join([str(ROOT), *sys.path]), "PATH": ""},
    )

    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
