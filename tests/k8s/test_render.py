"""Every combination renders, with both Helms, to objects that Kubernetes accepts, also under its strictest
pod standard.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.k8s.conftest import EVERYTHING, MATRIX
from tests.k8s.gateway_api import DOORS
from tests.k8s.helm import CRDS
from tests.k8s.pod_security import breaches, pod_templates
from tests.k8s.schemas import Schemas

VERSIONS = [f"1.{minor}" for minor in range(27, 37)]
"""Versions of Kubernetes; the chart claims to work from the first on."""
CUSTOM = {"Certificate", "PodMonitor", "PrometheusRule", "ScaledObject", "SpeculativePool"} | set(DOORS)


@pytest.mark.parametrize("name", MATRIX)
def test_the_chart_lints_without_a_warning(helm: Any, name: str) -> None:
    values, _ = MATRIX[name]

    helm.lint(values)


@pytest.fixture(scope="module")
def rendered(helm3: Any) -> dict[str, list[dict[str, Any]]]:
    return {name: helm3.render(values, crds) for name, (values, crds) in MATRIX.items()}


@pytest.mark.parametrize("name", MATRIX)
def test_both_helms_render_the_same(rendered: Any, helm4: Any, name: str) -> None:
    values, crds = MATRIX[name]
    if crds and values is not EVERYTHING and "monitoring" not in values:
        pytest.skip("offline the library of Helm 4 cannot be told what a cluster has installed")

    ours = {f"{o['kind']}/{o['metadata']['name']}": o for o in without_chance(rendered[name])}
    theirs = {f"{o['kind']}/{o['metadata']['name']}": o for o in without_chance(helm4.render(values))}

    assert ours.keys() == theirs.keys()
    assert ours == theirs


def without_chance(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out a password that is generated again each time: it is not a difference of the charts."""
    found = copy.deepcopy(found)
    for one in found:
        if one["kind"] == "Secret":
            one["data"] = sorted(one["data"])
    return found


def test_only_a_password_of_the_chart_differs_between_two_renderings(helm3: Any) -> None:
    """A tool that renders again and again, such as Argo CD, sees a change only where the values have changed."""
    given = {"redis": {"bundled": {"existingSecret": "ours"}}, "operator": {"enabled": True}}

    assert helm3.render(given, CRDS) == helm3.render(given, CRDS)
    assert helm3.render({}, CRDS) != helm3.render({}, CRDS)
    assert without_chance(helm3.render({}, CRDS)) == without_chance(helm3.render({}, CRDS))


@pytest.fixture(scope="module")
def distinct(rendered: Any) -> list[dict[str, Any]]:
    everything = (found for some in rendered.values() for found in some)
    return list({json.dumps(found, sort_keys=True): found for found in everything}.values())


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_in_every_version_of_kubernetes(
    distinct: Any, kubernetes: None, version: str
) -> None:
    schemas = Schemas(version)
    own = [found for found in distinct if found["kind"] not in CUSTOM]
    if version not in (VERSIONS[0], VERSIONS[-1]):
        # All of them at both ends; in between the fullest of each kind, since a schema takes a while.
        own = list({found["kind"]: found for found in sorted(own, key=lambda o: len(json.dumps(o)))}.values())
    assert {"Deployment", "StatefulSet", "NetworkPolicy", "HorizontalPodAutoscaler", "Pod"} <= {
        found["kind"] for found in own
    }

    wrong = {
        f"{found['kind']}/{found['metadata']['name']}": problems
        for found in own
        if (problems := schemas.problems(found))
    }

    assert wrong == {}


def test_a_field_that_kubernetes_does_not_know_would_be_found(kubernetes: None) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "a"}, "unknown": 1}

    assert Schemas("1.30").problems(account) != []


@pytest.mark.parametrize("version", ["1.32", "1.34", "1.36"])
def test_claims_of_gpus_are_valid_where_kubernetes_has_them(
    helm3: Any, kubernetes: None, version: str
) -> None:
    claims = [{"name": "gpus", "resourceClaimTemplateName": "four"}]
    workers = {"engine": "vllm", "resourceClaims": claims, "claimedGpus": 4}
    pool = {"name": "a", "model": "m", "target": {"path": "t"}, "workers": workers}
    rendered = helm3.render({"pools": [pool]}, ("resource.k8s.io/v1beta1",), kubernetes=version)

    schemas = Schemas(version)
    assert [p for one in rendered if one["kind"] == "Deployment" for p in schemas.problems(one)] == []


@pytest.mark.parametrize("name", MATRIX)
def test_every_pod_keeps_to_the_standard_restricted(rendered: Any, name: str) -> None:
    pods = dict(pod_templates(rendered[name]))
    assert len(pods) >= 4

    found = {
        pod: [breach for breach in breaches(spec) if "'hostPath'" not in breach] for pod, spec in pods.items()
    }

    assert found == {pod: [] for pod in pods}


@pytest.mark.parametrize("name", MATRIX)
def test_every_container_has_a_read_only_root_and_says_what_it_needs(rendered: Any, name: str) -> None:
    for pod, spec in pod_templates(rendered[name]):
        assert spec.get("automountServiceAccountToken") is False or "operator" in pod
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, pod
            assert container["resources"]["limits"]["memory"], pod


@pytest.mark.parametrize("name", MATRIX)
def test_every_mount_has_its_volume_and_every_volume_a_mount(rendered: Any, name: str) -> None:
    for pod, spec in pod_templates(rendered[name]):
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        if pod.endswith("redis"):
            volumes.add("data")
        containers = [*spec.get("initContainers", []), *spec["containers"]]
        mounts = {mount["name"] for c in containers for mount in c.get("volumeMounts", [])}

        assert mounts == volumes, pod


@pytest.mark.parametrize("name", ["defaults", "everything"])
def test_names_are_short_enough_for_the_labels_that_kubernetes_makes_of_them(helm3: Any, name: str) -> None:
    values, crds = MATRIX[name]
    longest = copy.deepcopy(values) | {"fullnameOverride": "a" * 22}
    longest["pools"] = [
        pool | {"name": "p" * 15 + str(i), "shards": 10}
        for i, pool in enumerate(values.get("pools", [{"model": "laps-sd-demo"}]))
    ]

    for found in helm3.render(longest, crds):
        assert len(found["metadata"]["name"]) <= (52 if found["kind"] == "StatefulSet" else 63), found[
            "metadata"
        ]["name"]


@pytest.mark.parametrize("name", ["70", "0x1", "1e3", "on", "null"])
def test_a_name_that_yaml_could_take_for_something_else_is_a_text(
    helm3: Any, kubernetes: None, name: str
) -> None:
    pool = {"name": name, "model": "laps-sd-demo", "workers": {"autoscaling": {"hpa": True}}}
    found = helm3.render(
        {"fullnameOverride": "x", "pools": [pool], "operator": {"enabled": True}},
        release=name,
        namespace=name,
    )

    schemas = Schemas("1.30")
    own = [one for one in found if one["kind"] not in CUSTOM]
    assert [problem for one in own for problem in schemas.problems(one)] == []
    assert {one["metadata"]["labels"]["app.kubernetes.io/instance"] for one in found} == {name}


def test_what_a_cluster_lacks_is_left_out(helm3: Any) -> None:
    auto = {"monitoring": {"podMonitor": "auto", "rules": "auto"}}
    auto["poolDefaults"] = {"workers": {"autoscaling": {"keda": "auto"}}}

    without = {found["kind"] for found in helm3.render(auto)}
    having = {found["kind"] for found in helm3.render(auto, CRDS)}

    assert having - without == {"PodMonitor", "PrometheusRule", "ScaledObject"}


@pytest.mark.parametrize("name", MATRIX)
def test_services_and_policies_select_pods_that_exist(rendered: Any, name: str) -> None:
    """And every pod of the chart is under a network policy."""
    found = rendered[name]
    pods = {pod: labels for pod, (labels, _) in labelled_pods(found).items()}
    selected: set[str] = set()
    for one in found:
        if one["kind"] == "Service":
            selector = one["spec"]["selector"]
        elif one["kind"] in ("PodDisruptionBudget",):
            selector = one["spec"]["selector"]["matchLabels"]
        elif one["kind"] == "NetworkPolicy":
            selector = one["spec"]["podSelector"]["matchLabels"]
        else:
            continue
        hit = {pod for pod, labels in pods.items() if selector.items() <= labels.items()}
        assert hit, one["metadata"]["name"]
        if one["kind"] == "NetworkPolicy":
            selected |= hit
    policies = MATRIX[name][0].get("networkPolicy", {}).get("enabled", True)
    assert selected == (set(pods) if policies else set())


def labelled_pods(found: list[dict[str, Any]]) -> dict[str, tuple[dict[str, str], dict[str, int]]]:
    """Return labels and named ports of each pod."""
    pods = {}
    for one in found:
        pod = one if one["kind"] == "Pod" else one.get("spec", {}).get("template")
        if pod:
            ports = {
                port["name"]: port["containerPort"]
                for container in pod["spec"]["containers"]
                for port in container.get("ports", [])
            }
            pods[f"{one['kind']}/{one['metadata']['name']}"] = pod["metadata"]["labels"], ports
    return pods


def test_policies_let_through_the_designed_links_between_pods_and_no_other(helm3: Any) -> None:
    pools = [{"name": name, "model": "laps-sd-demo"} for name in ("a", "b")]
    found = helm3.render({"pools": pools, "operator": {"enabled": True}})
    pods = labelled_pods(found)
    policies = [one["spec"] for one in found if one["kind"] == "NetworkPolicy"]

    def passes(direction: str, side: str, own: str, other: str, port: set[Any]) -> bool:
        """Return whether traffic passes, as in
        https://kubernetes.io/docs/concepts/services-networking/network-policies/, within one namespace.
        """
        own_policies = [
            one for one in policies if one["podSelector"]["matchLabels"].items() <= pods[own][0].items()
        ]
        for policy in own_policies:
            for rule in policy[direction]:
                peers = [
                    one["podSelector"]["matchLabels"] for one in rule.get(side, []) if "podSelector" in one
                ]
                if side in rule and not any(peer.items() <= pods[other][0].items() for peer in peers):
                    continue
                if {one["port"] for one in rule["ports"]} & port:
                    return True
        return not own_policies

    def short(pod: str) -> str:
        return pod.split("/")[1].removeprefix("demo-laps-sd-")

    links = {
        (short(source), short(to), port)
        for source in pods
        for to in pods
        if source != to
        for port, number in pods[to][1].items()
        if passes("egress", "to", source, to, {port, number})
        and passes("ingress", "from", to, source, {port, number})
    }

    of_a_pool = {
        (f"{pool}-{source}", f"{pool}-{to}", "grpc")
        for pool in ("a", "b")
        for source, to in (("gateway", "scheduler"), ("worker", "scheduler"), ("test", "gateway"))
    }
    of_all = {("operator", f"{pool}-scheduler", "grpc") for pool in ("a", "b")}
    record = {(f"{pool}-scheduler", "redis", "redis") for pool in ("a", "b")}
    assert links == of_a_pool | of_all | record
