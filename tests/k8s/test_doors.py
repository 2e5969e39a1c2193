"""Ways into a release from outside, the pool for an endpoint picker, and what users add to every component."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from typing import Any

import pytest
import yaml

from tests.k8s.conftest import GPU_POOL, MATRIX, first_of
from tests.k8s.gateway_api import BACKEND_TLS_POLICY, DOORS
from tests.k8s.helm import ROOT
from tests.k8s.pod_security import pod_templates
from tests.k8s.schemas import Schemas

VALUES = MATRIX["doors, models by a Job, and what users add"][0]


@pytest.fixture(scope="module")
def rendered(helm3: Any) -> list[dict[str, Any]]:
    return helm3.render(VALUES)


def named(rendered: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {
        one["metadata"]["name"].removeprefix("demo-laps-sd-"): one for one in rendered if one["kind"] == kind
    }


@pytest.mark.parametrize("kind", DOORS)
def test_routes_and_pools_have_only_fields_that_gateway_api_has(
    rendered: Any, kubernetes: None, kind: str
) -> None:
    found = named(rendered, kind)
    schemas = Schemas("1.30")

    assert found
    assert {
        name: problems
        for name, one in found.items()
        if (problems := schemas.problems_of(one["spec"], DOORS[kind]))
    } == {}
    [one, *_] = found.values()
    assert schemas.problems_of(one["spec"] | {"unknown": 1}, DOORS[kind]) != []


def test_the_policy_of_the_guide_names_a_service_and_a_name_in_its_certificate(
    helm3: Any, kubernetes: None
) -> None:
    guide = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    blocks = [
        yaml.safe_load(one) for one in re.findall(r"```yaml\n(# values.yaml\n.*?)```", guide, re.DOTALL)
    ]
    [more] = [one for one in blocks if "extraObjects" in one]
    [base] = [one for one in blocks if "tls" in one]

    found = helm3.render(base | more, release="models")

    objects = {(one["kind"], one["metadata"]["name"]): one for one in found}
    policy = objects["BackendTLSPolicy", "qwen-gateway"]["spec"]
    certificate = objects["Certificate", "models-laps-sd-public-tls"]["spec"]
    assert Schemas("1.30").problems_of(policy, BACKEND_TLS_POLICY) == []
    assert ("Service", policy["targetRefs"][0]["name"]) in objects
    assert policy["validation"]["hostname"] in certificate["dnsNames"]


def test_each_host_leads_to_one_pool_by_one_protocol(rendered: Any) -> None:
    hosts = {
        (kind, name): one["spec"]["hostnames"]
        for kind in ("HTTPRoute", "GRPCRoute")
        for name, one in named(rendered, kind).items()
    }

    assert hosts == {
        ("HTTPRoute", "demo-gateway"): ["demo.example.com"],
        ("HTTPRoute", "llama-gateway"): ["a.example.com", "b.example.com"],
        ("GRPCRoute", "llama-gateway"): ["grpc.example.com"],
    }
    services = {
        name: {port["port"] for port in one["spec"]["ports"]}
        for name, one in named(rendered, "Service").items()
    }
    for kind in ("HTTPRoute", "GRPCRoute"):
        for one in named(rendered, kind).values():
            [backend] = one["spec"]["rules"][0]["backendRefs"]
            assert backend["port"] in services[backend["name"].removeprefix("demo-laps-sd-")]


def test_an_ingress_keeps_streams_open_and_does_not_collect_them(rendered: Any) -> None:
    found = named(rendered, "Ingress")
    nginx = "nginx.ingress.kubernetes.io/"

    assert found.keys() == {"demo-gateway", "llama-gateway", "llama-gateway-grpc"}
    for name, one in found.items():
        annotations = one["metadata"]["annotations"]
        assert annotations[nginx + "proxy-read-timeout"] == "3600"
        assert annotations[nginx + "proxy-buffering"] == "off"
        assert annotations[nginx + "backend-protocol"] == ("GRPC" if name.endswith("-grpc") else "HTTP")
        assert annotations["c"] == "d" and annotations["contact"] == "ai@example.com"
        assert one["spec"]["tls"][0]["secretName"] == "doors"


def test_every_object_has_the_common_labels_and_annotations(rendered: Any) -> None:
    ours = [one for one in rendered if one["metadata"]["name"] != "demo-more"]

    lacking = [
        f"{one['kind']}/{one['metadata']['name']}"
        for one in ours
        if one["metadata"]["labels"].get("department") != "ai"
        or one["metadata"].get("annotations", {}).get("contact") != "ai@example.com"
    ]

    assert lacking == []


def test_every_component_has_what_its_values_add(rendered: Any) -> None:
    templates = {
        one["metadata"]["name"].removeprefix("demo-laps-sd-"): one["spec"]["template"]
        for one in rendered
        if one["kind"] in ("Deployment", "StatefulSet", "SpeculativePool")
    }
    assert templates.keys() == {
        *("demo-gateway", "demo-scheduler", "demo-worker", "operator", "redis"),
        *("llama-gateway", "llama-scheduler", "llama-worker"),
    }
    del templates["demo-worker"]  # that pool has no values of its own for workers

    for name, template in templates.items():
        spec = template["spec"]
        [container] = spec["containers"]
        assert {"name": "A", "value": "b"} in container["env"], name
        assert {"name": "more", "mountPath": "/more"} in container["volumeMounts"], name
        assert {"name": "more", "emptyDir": {}} in spec["volumes"], name
        assert spec["initContainers"][0]["name"] == "first", name
        assert [one["topologyKey"] for one in spec["topologySpreadConstraints"]] == ["zone"], name
        assert spec["priorityClassName"] == "serving", name
        assert template["metadata"]["labels"]["team"] == "models", name
        assert template["metadata"]["annotations"]["a"] == "b", name


def test_ids_can_be_left_to_the_cluster(rendered: Any) -> None:
    for name, spec in pod_templates(rendered):
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & spec["securityContext"].keys(), name
        assert spec["securityContext"]["runAsNonRoot"] is True, name


def test_more_objects_are_templates(rendered: Any) -> None:
    [more] = [one for one in rendered if one["metadata"]["name"].endswith("-more")]

    assert more == {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "demo-more"}}


def test_a_job_fills_the_claim_and_nothing_else_reaches_the_hub(rendered: Any) -> None:
    [job] = named(rendered, "Job").values()
    spec = job["spec"]["template"]["spec"]
    revisions = [
        command[command.index("--revision") + 1]
        for command in (one["args"] for one in spec["initContainers"])
    ]
    waiting = {
        name: [one["name"] for one in template.get("initContainers", [])]
        for name, template in pod_templates(rendered)
        if name.endswith(("llama-gateway", "llama-worker"))
    }
    reaching = [
        name
        for name, policy in named(rendered, "NetworkPolicy").items()
        if any({"port": 443} in rule["ports"] for rule in policy["spec"]["egress"]) and name != "operator"
    ]

    assert revisions == ["a" * 40, "b" * 40]
    assert job["spec"]["backoffLimit"] == 2**31 - 1, "it never gives up: pods wait for it without end"
    assert spec["volumes"][-1] == {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
    assert len(waiting) == 2
    assert all(names == ["first", "await-models"] for names in waiting.values())
    assert reaching == ["llama-models"]


@pytest.mark.parametrize("name", ["await-models", "target-download"])
def test_a_pod_that_is_deleted_before_it_has_its_models_ends_at_once(
    rendered: Any, first: list[str], name: str
) -> None:
    containers = [one for _, spec in pod_templates(rendered) for one in spec.get("initContainers", [])]
    found = next(one for one in containers if one["name"] == name)
    program = ["sh", "-c", "echo downloads; exec sleep 600"] if "args" in found else []

    with subprocess.Popen([*first, *found["command"], *program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        os.kill(first_of(process), signal.SIGTERM)
        try:
            assert process.wait(10) == 143
        finally:
            process.kill()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"pools": [{"target": {"repo": "x/y", "revision": "c" * 40}}]},
        {"pools": [{"huggingFaceTokenSecret": "another"}]},
        {"pools": [{"huggingFaceEndpoint": "https://hub.internal"}]},
        {"pools": [{"modelVolume": {"persistentVolumeClaim": {"claimName": "another"}}}]},
        {"gateway": {"tolerations": [{"key": "spot", "operator": "Exists"}]}},
        {"gateway": {"nodeSelector": {"disk": "large"}}},
        {"gateway": {"extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}]}},
        {"gateway": {"replicas": 5}},
        {"image": {"pullPolicy": "Always"}},
        {"image": {"pullSecrets": [{"name": "registry"}]}},
        {"podSecurityContext": {"runAsUser": 7}},
    ],
    ids=str,
)
def test_a_job_with_another_pod_has_another_name(helm3: Any, change: Any) -> None:
    """Kubernetes refuses to change the pod of a Job, and Helm would stop in the middle of an upgrade."""
    pool = GPU_POOL | {"download": "job"}

    def job(values: Any) -> tuple[str, Any]:
        pools = [pool | one for one in values.get("pools", [{}])]
        [(name, found)] = named(helm3.render(values | {"pools": pools}), "Job").items()
        return name, found["spec"]["template"]

    (before, template), (after, changed) = job({}), job(change)

    assert (before == after) == (template == changed) == (change in ({}, {"gateway": {"replicas": 5}}))
