"""A change of values, or of the chart's version, restarts the pods whose template it changes. It changes no template
that it need not change.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.conftest import EVERYTHING
from tests.k8s.helm import CHART

TWO_POOLS: dict[str, Any] = {"pools": [{"name": name, "model": "laps-sd-demo"} for name in ("a", "b")]}
OPERATED: dict[str, Any] = {**TWO_POOLS, "operator": {"enabled": True}}
TLS = {"links": {"mode": "certManager", "issuer": {"name": "ca"}}}
SERVICES = {f"{pool}-{service}" for pool in "ab" for service in ("gateway", "scheduler", "worker")}


def of_all(service: str) -> set[str]:
    return {f"a-{service}", f"b-{service}"}


def both_workers(**workers: Any) -> dict[str, Any]:
    return {"poolDefaults": {"workers": workers}}


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    # name: values before, what changes, the pods that restart
    "a scheduler more": (TWO_POOLS, {"scheduler": {"replicas": 3}}, set()),
    "a gateway more": (TWO_POOLS, {"gateway": {"replicas": 5}}, set()),
    "workers more": (TWO_POOLS, both_workers(replicas=7), set()),
    "a shard more": (TWO_POOLS, {"poolDefaults": {"shards": 2}}, set()),
    "a shard that drains": (
        {**TWO_POOLS, "poolDefaults": {"shards": 2}},
        {"poolDefaults": {"shards": 2, "drainingShards": [1]}},
        set(),
    ),
    "a pool more": (
        TWO_POOLS,
        {"pools": [*TWO_POOLS["pools"], {"name": "c", "model": "laps-sd-demo"}]},
        set(),
    ),
    "autoscaling of workers": (TWO_POOLS, both_workers(autoscaling={"keda": "on"}), set()),
    "autoscaling of gateways": (TWO_POOLS, {"gateway": {"autoscaling": {"enabled": True}}}, set()),
    "another way to roll": (TWO_POOLS, both_workers(maxSurge=0, maxUnavailable=1), set()),
    "monitoring": (TWO_POOLS, {"monitoring": {"podMonitor": "on", "rules": "on", "dashboard": True}}, set()),
    "network policies": (TWO_POOLS, {"networkPolicy": {"enabled": False}}, set()),
    "disruption budgets": (TWO_POOLS, {"podDisruptionBudget": {"enabled": False}}, set()),
    "a door": (TWO_POOLS, {"gateway": {"service": {"type": "LoadBalancer", "port": 443}}}, set()),
    "labels and annotations of all objects": (
        TWO_POOLS,
        {"commonLabels": {"a": "b"}, "commonAnnotations": {"c": "d"}},
        set(),
    ),
    "hosts and an Ingress": (
        TWO_POOLS,
        {
            "pools": [TWO_POOLS["pools"][0] | {"hosts": ["a.example"]}, TWO_POOLS["pools"][1]],
            "gateway": {"ingress": {"enabled": True}},
        },
        set(),
    ),
    "annotations of accounts": (TWO_POOLS, {"serviceAccount": {"annotations": {"a": "b"}}}, set()),
    "the operator's size": (
        OPERATED,
        {"operator": {"enabled": True, "resources": {"limits": {"memory": "1Gi"}}}},
        {"operator"},
    ),
    "a setting of gateways": (TWO_POOLS, {"gateway": {"settings": {"maxStreams": 10}}}, of_all("gateway")),
    "keys of tenants": (TWO_POOLS, {"gateway": {"apiKeysSecret": "keys"}}, of_all("gateway")),
    "a certificate for clients": (
        TWO_POOLS,
        {"tls": {"public": {"mode": "secrets", "secret": "s"}}},
        of_all("gateway"),
    ),
    "a setting of schedulers": (
        TWO_POOLS,
        {"scheduler": {"settings": {"policy": "fcfs"}}},
        of_all("scheduler"),
    ),
    "the policy of one pool": (
        TWO_POOLS,
        {"pools": [TWO_POOLS["pools"][0] | {"policy": "fcfs"}, TWO_POOLS["pools"][1]]},
        {"a-scheduler"},
    ),
    "a setting of one pool's workers": (
        TWO_POOLS,
        {"pools": [TWO_POOLS["pools"][0] | {"workers": {"settings": {"slots": 4}}}, TWO_POOLS["pools"][1]]},
        {"a-worker"},
    ),
    "the context of one pool": (
        TWO_POOLS,
        {"pools": [TWO_POOLS["pools"][0] | {"contextTokens": 512}, TWO_POOLS["pools"][1]]},
        {"a-worker", "a-gateway"},
    ),
    "the key of words": (
        TWO_POOLS,
        {"lengths": {"keySecret": "words"}},
        of_all("gateway") | of_all("scheduler"),
    ),
    "the record's size": (
        TWO_POOLS,
        {"redis": {"bundled": {"resources": {"limits": {"memory": "2Gi"}}}}},
        {"redis"},
    ),
    "a collector of spans": (TWO_POOLS, {"monitoring": {"otlpEndpoint": "http://c:4317"}}, SERVICES),
    "certificates of the links": (TWO_POOLS, {"tls": TLS}, SERVICES),
    "the operator, which dials schedulers with a name of its own": (
        {**TWO_POOLS, "tls": TLS},
        {"operator": {"enabled": True}},
        of_all("scheduler"),
    ),
}


def templates(rendered: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the template of each kind of pod by the name without the release's prefix."""
    return {
        one["metadata"]["name"].removeprefix("demo-laps-sd-"): one["spec"]["template"]
        for one in rendered
        if one["kind"] in ("Deployment", "StatefulSet", "SpeculativePool")
    }


def restarted(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> set[str]:
    old, new = templates(before), templates(after)
    return {name for name in old.keys() & new.keys() if old[name] != new[name]}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_values_restarts_what_it_must(helm3: Any, name: str) -> None:
    before, change, expected = CHANGES[name]

    assert restarted(helm3.render(before), helm3.render(before | change)) == expected


def test_the_operators_pools_restart_as_deployments_do(helm3: Any) -> None:
    """A worker's template is the same in both, so that each line above holds for both."""
    values = copy.deepcopy(EVERYTHING)
    deployments = templates(helm3.render(values))
    pools = templates(helm3.render(values | {"operator": {"enabled": True}}))

    workers = [name for name in deployments if name.endswith("worker")]
    assert workers
    assert {name: deployments[name] for name in workers} == {name: pools[name] for name in workers}


@pytest.fixture
def next_chart(tmp_path: Path) -> Any:
    def copy_with(**fields: str) -> Path:
        chart = tmp_path / "chart"
        shutil.copytree(CHART, chart)
        about = yaml.safe_load((chart / "Chart.yaml").read_text(encoding="utf-8")) | fields
        (chart / "Chart.yaml").write_text(yaml.safe_dump(about), encoding="utf-8")
        return chart

    return copy_with


def test_a_new_version_of_the_chart_restarts_nothing(helm3: Any, next_chart: Any) -> None:
    newer = next_chart(version="0.1.1")

    assert restarted(helm3.render(OPERATED), helm3.render(OPERATED, chart=newer)) == set()


def test_new_images_restart_what_runs_them(helm3: Any, next_chart: Any) -> None:
    newer = next_chart(version="0.2.0", appVersion="0.2.0")
    own_record = {"redis": {"bundled": {"image": "docker.io/valkey/valkey:8.1"}}}

    found = restarted(helm3.render(OPERATED), helm3.render(OPERATED, chart=newer))
    kept = restarted(helm3.render(OPERATED | own_record), helm3.render(OPERATED | own_record, chart=newer))
    pinned = OPERATED | {"image": {"tag": "0.1.0"}}

    assert found == SERVICES | {"operator", "redis"}
    assert kept == SERVICES | {"operator"}
    assert restarted(helm3.render(pinned), helm3.render(pinned, chart=newer)) == set()


def test_a_version_with_build_metadata_is_a_label_and_a_tag(helm3: Any, next_chart: Any) -> None:
    newer = next_chart(version="0.2.0+build.5", appVersion="0.2.0+build.5")

    rendered = helm3.render({}, chart=newer)

    labels = {(one["metadata"]["labels"]["helm.sh/chart"]) for one in rendered if "labels" in one["metadata"]}
    assert labels == {"laps-sd-0.2.0_build.5"}
    images = {c["image"] for t in templates(rendered).values() for c in t["spec"]["containers"]}
    assert {image.rpartition(":")[2] for image in images} == {"0.2.0_build.5"}
