"""Pools of workers over vLLM: what the operator makes of their fields, and of the chart's own."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from laps_sd_operator import checks, objects

from tests.k8s.conftest import example
from tests.k8s.helm import find
from tests.k8s.schemas import Schemas

POOL: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "models", "uid": "u-1"},
    "spec": {
        "scheduler": "s:50052",
        "engine": "vllm",
        "template": {"spec": {"containers": [{"name": "worker", "image": "i"}]}},
    },
}


def pool(**spec: Any) -> dict[str, Any]:
    changed = copy.deepcopy(POOL)
    changed["spec"] |= spec
    return changed


def environment_of(made: dict[str, Any]) -> dict[str, str]:
    (container,) = made["spec"]["containers"]
    names = [one["name"] for one in container["env"]]
    assert len(names) == len(set(names)), "a variable is given twice"
    return {one["name"]: one.get("value", "") for one in container["env"]}


def args_of(made: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(environment_of(made)["LAPS_SD_VLLM_ARGS"])
    return found


def test_the_engine_its_models_and_its_arguments_arrive() -> None:
    made = objects.template_of(
        pool(
            model={"target": "/models/t", "draft": "/models/d"},
            vllmArgs={"seed": 0, "speculative_config": {"method": "eagle3", "num_speculative_tokens": 3}},
        )
    )

    assert environment_of(made)["LAPS_SD_ENGINE"] == "vllm"
    assert environment_of(made)["LAPS_SD_TARGET"] == "/models/t"
    assert environment_of(made)["LAPS_SD_DRAFT"] == "/models/d"
    assert args_of(made) == {
        "seed": 0,
        "speculative_config": {"method": "eagle3", "model": "/models/d", "num_speculative_tokens": 3},
    }


def test_a_pool_without_arguments_gives_none() -> None:
    made = objects.template_of(pool(model={"target": "/models/t", "draft": "/models/d"}))

    assert "LAPS_SD_VLLM_ARGS" not in environment_of(made)


@pytest.mark.parametrize(
    ("args", "ranks"),
    [({}, 8), ({"tensor_parallel_size": 4}, 4), ({"pipeline_parallel_size": 2}, 4)],
)
def test_there_is_a_rank_for_each_gpu_unless_it_is_given(args: dict[str, Any], ranks: int) -> None:
    made = objects.template_of(pool(vllmArgs=args, resources={"limits": {"nvidia.com/gpu": "8"}}))

    assert args_of(made)["tensor_parallel_size"] == ranks


def test_the_gpus_of_the_template_count_where_the_pool_has_none() -> None:
    changed = pool()
    (container,) = changed["spec"]["template"]["spec"]["containers"]
    container["resources"] = {"limits": {"nvidia.com/gpu": 2}}

    assert args_of(objects.template_of(changed)) == {"tensor_parallel_size": 2}


def test_a_pool_without_an_engine_leaves_it_to_its_template() -> None:
    changed = pool(model={"target": "/models/t"})
    del changed["spec"]["engine"]

    assert set(environment_of(objects.template_of(changed))) == {"LAPS_SD_DRAIN_S", "LAPS_SD_TARGET"}


def test_nothing_of_the_pool_itself_is_changed() -> None:
    given = pool(model={"target": "t", "draft": "d"}, vllmArgs={"speculative_config": {"method": "eagle3"}})
    before = copy.deepcopy(given)

    objects.template_of(given)

    assert given == before


def test_the_deployment_of_the_charts_pool_is_the_one_that_the_chart_makes(
    helm3: Any, kubernetes: None
) -> None:
    values = example("values-vllm-70b")
    by_chart = find(helm3.render(values), "Deployment", "llama-worker")["spec"]["template"]["spec"]
    written = find(helm3.render(values | {"operator": {"enabled": True}}), "SpeculativePool", "llama-worker")
    written["metadata"] |= {"namespace": "models", "uid": "u-1"}

    made = objects.deployment_of(written, 1)

    assert Schemas("1.30").problems(made) == []
    own = made["spec"]["template"]["spec"]
    assert environment_of({"spec": own}) == environment_of({"spec": by_chart})
    for name in ("volumes", "initContainers", "securityContext"):
        assert own[name] == by_chart[name]
    for name in ("image", "startupProbe", "volumeMounts", "resources"):
        assert own["containers"][0][name] == by_chart["containers"][0][name]
    assert checks.unequal_ranks(written) is None


@pytest.mark.parametrize(
    ("gpus", "args", "said"),
    [
        (4, {}, ""),
        (4, {"tensor_parallel_size": 2}, "workers have 4 GPUs, and vLLM makes 2 ranks"),
        (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, ""),
        (0, {"tensor_parallel_size": 2}, "workers have 0 GPUs, and vLLM makes 2 ranks"),
        (0, {}, ""),
        (3, {"pipeline_parallel_size": 2}, "workers have 3 GPUs, and vLLM makes 2 ranks"),
    ],
)
def test_another_number_of_ranks_than_of_gpus_is_a_problem(
    gpus: int, args: dict[str, Any], said: str
) -> None:
    resources = {"limits": {"nvidia.com/gpu": gpus}} if gpus else {"limits": {"memory": "1Gi"}}

    found = checks.unequal_ranks(pool(vllmArgs=args, resources=resources))

    assert (found is not None) == bool(said)
    assert str(found or "").startswith(said)


@pytest.mark.parametrize("name", ["example.com/gpu", "gpu.intel.com/xe"])
def test_gpus_of_an_unknown_device_plugin_are_left_to_the_worker(name: str) -> None:
    changed = pool(vllmArgs={"tensor_parallel_size": 4}, resources={"limits": {name: 4, "memory": "1Gi"}})

    assert checks.unequal_ranks(changed) is None


def test_gpus_count_under_the_name_that_the_pool_gives_them() -> None:
    limits = {"example.com/slice": 4, "nvidia.com/gpu": 1, "rdma/hca": 1}
    changed = pool(gpuResource="example.com/slice", resources={"limits": limits})

    assert args_of(objects.template_of(changed)) == {"tensor_parallel_size": 4}
    assert checks.unequal_ranks(changed) is None

    changed["spec"]["vllmArgs"] = {"tensor_parallel_size": 2}
    assert str(checks.unequal_ranks(changed)).startswith("workers have 4 GPUs, and vLLM makes 2 ranks")


def test_a_name_of_gpus_that_workers_do_not_ask_for_is_a_problem() -> None:
    changed = pool(gpuResource="example.com/slice", resources={"limits": {"nvidia.com/gpu": 1}})

    problem = "gpuResource is example.com/slice, and resources.limits of the workers does not have it"
    assert str(checks.unequal_ranks(changed)) == problem


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"tensor_parallel_size": "many"}'])
def test_arguments_that_cannot_be_read_are_left_to_the_worker(text: str) -> None:
    changed = pool()
    del changed["spec"]["engine"]
    (container,) = changed["spec"]["template"]["spec"]["containers"]
    container["env"] = [{"name": "LAPS_SD_VLLM_ARGS", "value": text}]

    assert checks.unequal_ranks(changed) is None
