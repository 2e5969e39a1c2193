"""What the definition of SpeculativePool refuses, and that the operator can work with all that it accepts.

test_cluster.py has the rules in CEL, which need a real API server.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_sd_operator import checks, objects

from tests.k8s import definition
from tests.k8s.conftest import MATRIX

POOL: dict[str, Any] = {
    "apiVersion": "laps-sd.dev/v1alpha1",
    "kind": "SpeculativePool",
    "metadata": {"name": "p", "namespace": "models", "uid": "u-1", "generation": 1, "labels": {"a": "b"}},
    "spec": {
        "scheduler": "s.models:50052",
        "replicas": 2,
        "drainSeconds": 60,
        "engine": "vllm",
        "model": {"target": "/models/t", "draft": "/models/d"},
        "vllmArgs": {"tensor_parallel_size": 1, "speculative_config": {"method": "eagle3"}},
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "gpuResource": "nvidia.com/gpu",
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": "25%"}},
        "template": {
            "metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}},
            "spec": {
                "terminationGracePeriodSeconds": 30,
                "containers": [
                    {
                        "name": "worker",
                        "image": "i",
                        "env": [{"name": "A", "value": "b"}],
                        "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "1.5Gi"}},
                    }
                ],
            },
        },
    },
}
TEMPLATE = ("spec", "template")
POD = (*TEMPLATE, "spec")
WORKER = (*POD, "containers", 0)


@pytest.fixture(autouse=True)
def _schemas(kubernetes: None) -> None:
    """The validator of JSON schemas comes with the schemas of Kubernetes."""


def changed(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    found: Any = copy.deepcopy(POOL)
    place = found
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    assert isinstance(found, dict)
    return found


def work_with(pool: dict[str, Any]) -> None:
    """Compute all that the operator computes of a pool alone."""
    made = objects.deployment_of(pool, 1)
    objects.template_patch(pool, made)
    objects.seen_of(pool, made, [], None, 0.0)
    checks.unequal_ranks(pool)
    checks.not_owned(pool, made)


def test_a_pool_with_every_field_is_accepted() -> None:
    assert definition.problems(POOL) == []
    work_with(POOL)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*WORKER, "env"), {"A": "b"}),
        ((*WORKER, "env"), "A=b"),
        ((*WORKER, "env"), None),
        ((*WORKER, "env"), [None]),
        ((*WORKER, "env"), [{"value": "b"}]),
        ((*WORKER, "env"), [{"name": ""}]),
        ((*WORKER, "env"), [{"name": "A", "value": 1}]),
        ((*TEMPLATE, "metadata"), None),
        ((*TEMPLATE, "metadata"), "a=b"),
        ((*TEMPLATE, "metadata", "labels"), None),
        ((*TEMPLATE, "metadata", "labels"), ["a"]),
        ((*TEMPLATE, "metadata", "labels"), {"a": 1}),
        ((*TEMPLATE, "metadata", "labels"), {"a": 64 * "b"}),
        ((*TEMPLATE, "metadata", "annotations"), {"a": True}),
        ((*POD, "terminationGracePeriodSeconds"), "30"),
        ((*POD, "terminationGracePeriodSeconds"), -1),
        ((*POD, "terminationGracePeriodSeconds"), 1.5),
        ((*POD, "containers"), {"worker": {}}),
        ((*POD, "containers"), [{"image": "i"}]),
        ((*WORKER, "resources"), "1 GPU"),
        ((*WORKER, "resources"), {"limits": ["nvidia.com/gpu"]}),
        ((*WORKER, "resources"), {"limits": {"nvidia.com/gpu": "many"}}),
        (("spec", "resources"), {"requests": {"memory": "1 Gi"}}),
        (("spec", "resources"), {"claims": ["gpu"]}),
        (("spec", "gpuResource"), "gpu"),
        (("spec", "gpuResource"), 1),
        (("spec", "strategy"), {"type": "Blue"}),
        (("spec", "strategy"), {"rollingUpdate": {"maxSurge": "some"}}),
        (("spec", "scheduler"), "s.models"),
        (("spec", "scheduler"), "http://s.models:50052"),
        (("spec", "scheduler"), "s models:50052"),
        (("spec", "scheduler"), 300 * "s" + ":50052"),
        (("spec", "scheduler"), "s:0"),
        (("spec", "scheduler"), "s:65536"),
        (("spec", "scheduler"), "s:70000"),
        (("spec", "model"), {"target": ""}),
        (("spec", "vllmArgs"), {"pipeline_parallel_size": "2"}),
        (("spec", "engine"), "tgi"),
        (("spec", "drainSeconds"), "60"),
        (("spec", "replicas"), None),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_field_that_the_operator_reads_has_a_type(path: tuple[str | int, ...], value: Any) -> None:
    problems = definition.problems(changed(path, value))

    assert problems
    assert "$.spec" in problems[0]


@pytest.mark.parametrize(
    "address", ["s:1", "10.0.0.7:50052", "s-0.s.models.svc:50052", "[fd00::1]:50052", "s:65535"]
)
def test_an_address_of_a_scheduler_is_accepted(address: str) -> None:
    assert definition.problems(changed(("spec", "scheduler"), address)) == []


@pytest.mark.parametrize("name", MATRIX)
def test_every_pool_of_the_chart_is_accepted(helm3: Any, name: str) -> None:
    values, crds = MATRIX[name]
    operated = {**values, "operator": {"enabled": True}}
    if "tls" in values:
        operated["tls"] = {"links": {"mode": "off"}, "public": {"mode": "off"}}

    pools = [made for made in helm3.render(operated, crds) if made["kind"] == "SpeculativePool"]

    assert pools
    for pool in pools:
        assert definition.problems(pool) == []


odd = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70000) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "value", "limits", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(found: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the path of every value in the pool's spec."""
    inner: Any = (
        found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    )
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


@given(path=st.sampled_from([("spec", *place) for place in places(POOL["spec"]) if place]), value=odd)
@settings(max_examples=400, deadline=None)
def test_the_operator_works_with_whatever_is_accepted(path: tuple[str | int, ...], value: Any) -> None:
    pool = changed(path, value)
    if not definition.problems(pool) and "worker" in [
        one["name"] for one in pool["spec"]["template"]["spec"]["containers"]
    ]:
        work_with(pool)
