"""The examples for vLLM. No GPU has run them; what can be checked without one is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from laps_sd.service import config
from laps_vllm.settings import VllmSettings
from tests.k8s.conftest import EXAMPLES, example
from tests.k8s.helm import ROOT, find
from tests.k8s.pod_security import breaches, pod_templates
from tests.k8s.schemas import Schemas

VALUES = ("values-vllm-8b", "values-vllm-70b")


@pytest.fixture(scope="module")
def serve() -> dict[str, dict[str, Any]]:
    """Return the objects of the plain server by their kinds."""
    text = (EXAMPLES / "vllm-serve.yaml").read_text(encoding="utf-8")
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def test_all_of_them_are_tested_here() -> None:
    assert {path.stem for path in EXAMPLES.iterdir()} == {*VALUES, "vllm-serve"}


@pytest.mark.parametrize("name", [*VALUES, "vllm-serve"])
def test_each_says_that_no_gpu_has_run_it(name: str) -> None:
    text = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")

    assert "\n# NOT TESTED: never run on a GPU by us." in text
    assert f" k8s/examples/{name}.yaml\n" in text


@pytest.mark.parametrize("name", VALUES)
def test_the_values_use_all_gpus_of_a_worker(helm3: Any, name: str) -> None:
    (pool,) = example(name)["pools"]
    worker = find(helm3.render(example(name)), "Deployment", "llama-worker")
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    environment = {one["name"]: one.get("value", "") for one in container["env"]}
    given = environment["LAPS_SD_VLLM_ARGS"]
    target, draft = (
        f"/models/{one['repo'].replace('/', '--')}-{one['revision']}"
        for one in (pool["target"], pool["draft"])
    )

    assert environment["LAPS_SD_DTYPE"] == "bfloat16", "the default is float32"
    assert environment["LAPS_SD_TARGET"] == target
    gpus = pool["workers"]["resources"]["limits"]["nvidia.com/gpu"]
    assert f'"tensor_parallel_size":{gpus}}}' in given
    assert f'"model":"{draft}"' in given


@pytest.mark.parametrize("version", ["1.27", "1.36"])
def test_the_plain_server_is_valid(serve: dict[str, Any], kubernetes: None, version: str) -> None:
    schemas = Schemas(version)

    assert [problem for one in serve.values() for problem in schemas.problems(one)] == []


def test_the_plain_server_keeps_to_the_standard_restricted(serve: dict[str, Any]) -> None:
    spec = serve["Deployment"]["spec"]["template"]["spec"]

    assert list(breaches(spec)) == []
    assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_objects_of_the_pages_are_valid_and_keep_to_the_standard_restricted(kubernetes: None) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    found = [
        yaml.safe_load(one) for text in texts for one in re.findall(r"<<'END'\n(.*?)\nEND\n", text, re.DOTALL)
    ]
    schemas = Schemas("1.30")

    assert {one["kind"] for one in found} == {"PersistentVolumeClaim", "Pod"}
    assert [problem for one in found for problem in schemas.problems(one)] == []
    assert [list(breaches(spec)) for _, spec in pod_templates(found)] == [[]]


def test_the_plain_server_is_reached_and_has_its_volumes(serve: dict[str, Any]) -> None:
    spec = serve["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    volumes = {one["name"]: one for one in spec["volumes"]}
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]

    assert {one["name"] for one in container["volumeMounts"]} == set(volumes)
    assert claim == serve["PersistentVolumeClaim"]["metadata"]["name"]
    labels = serve["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert serve["Service"]["spec"]["selector"].items() <= labels.items()
    assert serve["Service"]["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert serve["Service"]["metadata"]["name"] != "vllm", "its variables would be taken for vLLM's own"


def test_the_plain_server_runs_our_scheduler_with_settings_that_exist(serve: dict[str, Any]) -> None:
    (container,) = serve["Deployment"]["spec"]["template"]["spec"]["containers"]
    arguments = container["args"]
    flags = {one: arguments[i + 1] for i, one in enumerate(arguments) if one.startswith("--")}
    module, _, name = flags["--scheduler-cls"].rpartition(".")
    own = {one["name"]: one["value"] for one in container["env"] if one["name"].startswith(config.PREFIX)}

    assert container["command"] == ["vllm", "serve"]
    assert re.search(rf"^(class|def) {name}\b", (ROOT / (module.replace(".", "/") + ".py")).read_text(), re.M)
    assert int(flags["--max-num-seqs"]) > int(flags["--max-num-active-seqs"])
    assert own.keys() <= {config.variable(one) for one in VllmSettings.__dataclass_fields__}
    learnt = Path(own["LAPS_SD_LEARNT_FILE"])
    assert str(learnt.parent) in {one["mountPath"] for one in container["volumeMounts"]}
    folderless = {"LAPS_SD_LEARNT_FILE": "/tmp/learnt.json"}  # here there is no /cache
    assert config.load(VllmSettings, environ=own | folderless).policy == own["LAPS_SD_POLICY"]
