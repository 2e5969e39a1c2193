"""One setting has one name, from the dataclass to the environment to the chart's values."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

from laps_sd.service import config
from tests.k8s.conftest import missing
from tests.k8s.helm import ROOT, Refused, find
from worker_svc.engine.vllm.options import RESERVED

SERVICES = ("gateway", "scheduler", "worker")
WORKLOADS = {
    "gateway": ("Deployment", "demo-gateway"),
    "scheduler": ("StatefulSet", "demo-scheduler"),
    "worker": ("Deployment", "demo-worker"),
}


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    path = ROOT / "k8s" / "generate.py"
    spec = importlib.util.spec_from_file_location("k8s_generate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def another(cls: type[config.Settings], field: dataclasses.Field[Any]) -> Any:
    """Return a value that is not the default, and in bounds."""
    hint, _ = config.without_none(config.field_types(cls)[field.name])
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != field.default)
    if hint is bool:
        return not field.default
    if hint is int or hint is float:
        low = field.metadata.get("minimum")
        base = field.default if field.default is not None else max(low or 0, 8)
        candidates = (base * 2, base / 2, base + 1) if hint is float else (base * 2, base + 1, base - 1)
        for value in candidates:
            high = field.metadata.get("maximum")
            inside = (low is None or value >= low) and (high is None or value <= high)
            if inside and value != field.default:
                return value
    if get_origin(hint) is tuple:
        return ["a.example:1", "b.example:2"]
    return "/another/value" if hint is Path else "another"


def values_with(service: str, settings: dict[str, Any]) -> dict[str, Any]:
    if service == "worker":
        return {"poolDefaults": {"workers": {"settings": settings}}}
    return {service: {"settings": settings}}


def environment_of(rendered: list[dict[str, Any]], service: str) -> dict[str, str]:
    workload = find(rendered, *WORKLOADS[service])
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    names = [one["name"] for one in container["env"]]
    assert len(names) == len(set(names)), "a variable is given twice"
    pod = f"{workload['metadata']['name']}-0"  # Kubernetes puts it into values that refer to it
    return {one["name"]: one.get("value", "").replace("$(POD_NAME)", pod) for one in container["env"]}


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_is_either_a_value_or_decided_by_the_chart(generate: Any, service: str) -> None:
    fields = {field.name for field in dataclasses.fields(generate.SERVICES[service])}
    owned = set(generate.OWNED[service])
    offered = set(generate.schema()["definitions"][f"{service}Settings"]["properties"])

    assert owned <= fields
    assert offered == {generate.camel(name) for name in fields - owned}


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_arrives_under_its_name(generate: Any, helm: Any, service: str) -> None:
    """Dataclass field → values → variable → the service's own settings: the value that went in comes out."""
    cls = generate.SERVICES[service]
    given = {
        field.name: another(cls, field)
        for field in dataclasses.fields(cls)
        if field.name not in generate.OWNED[service]
    }
    # What no single field can check, and Helm refuses with a sentence (see cases.yaml).
    given.pop("device", None)
    for name, value in {
        "cors_origins": ["https://a.example", "https://b.example"],
        "heartbeat_s": 0.5,
        "silence_s": 7.0,
        "backoff_max_s": 3.0,
        "engine": "vllm",
        "vllm_args": '{"quantization": "fp8"}',
        "vllm_residents": 999,
        "deterministic": False,
    }.items():
        if name in given:
            given[name] = value
    given.pop("kv_memory_bytes", None)
    if "draft_len" in given:
        given |= {"draft_len": 3, "max_draft_len": 9}

    values = values_with(service, {generate.camel(name): value for name, value in given.items()})
    environment = environment_of(helm.render(values), service)
    environment.pop("LAPS_SD_REDIS_PASSWORD_FILE", None)  # a file of the pod
    loaded = config.load(cls, environ=environment)

    for name, value in given.items():
        expected = tuple(value) if isinstance(value, list) else value
        actual = getattr(loaded, name)
        assert (str(actual) if isinstance(actual, Path) else actual) == expected, name


@pytest.mark.parametrize("service", SERVICES)
def test_what_the_chart_sets_by_itself_is_a_setting_of_the_service(
    generate: Any, helm: Any, service: str
) -> None:
    known = {config.variable(field.name) for field in dataclasses.fields(generate.SERVICES[service])}

    environment = environment_of(helm.render({}), service)

    set_here = {name for name in environment if name.startswith(config.PREFIX)}
    assert set_here <= known
    owned = {config.variable(name) for name in generate.OWNED[service]}
    assert set_here <= owned


@pytest.mark.parametrize("service", SERVICES)
def test_a_setting_that_does_not_exist_is_refused(helm: Any, service: str) -> None:
    with pytest.raises(Refused, match="maxDraftLenght"):
        helm.render(values_with(service, {"maxDraftLenght": 3}))


def test_a_value_out_of_bounds_is_refused_before_anything_is_installed(helm: Any) -> None:
    with pytest.raises(Refused, match="slots"):
        helm.render(values_with("worker", {"slots": 0}))


def test_large_numbers_are_written_out(helm: Any) -> None:
    """YAML makes floats of whole numbers, and a service would refuse 2e+10."""
    environment = environment_of(
        helm.render(values_with("worker", {"kvMemoryBytes": 20_000_000_000})), "worker"
    )

    assert environment["LAPS_SD_KV_MEMORY_BYTES"] == "20000000000"


def test_what_is_generated_is_up_to_date(generate: Any) -> None:
    if importlib.util.find_spec("kubernetes_asyncio") is None:
        missing("kubernetes_asyncio")
    stale = [path.name for path, text in generate.files() if path.read_text(encoding="utf-8") != text]

    assert stale == [], "run make docs"


def test_the_chart_refuses_the_arguments_of_vllm_that_a_worker_refuses(helm3: Any) -> None:
    """Before anything is installed, and with the name of the value that has the same meaning."""
    options = pytest.importorskip("worker_svc.engine.vllm.options", reason="needs the engine over vLLM")
    pool = {"name": "a", "model": "m", "target": {"path": "t"}}

    for name in options.RESERVED:
        workers = {"engine": "vllm", "vllmArgs": {name: 1}}
        with pytest.raises(Refused, match=f"vllmArgs.{name} of the workers of"):
            helm3.render({"pools": [pool | {"workers": workers}]})


def test_the_chart_refuses_the_arguments_of_vllm_that_a_worker_refuses_and_names_the_same_settings() -> None:
    text = (ROOT / "k8s/chart/templates/worker/_vllm.tpl").read_text()
    block = re.search(r'define "laps-sd.vllmReserved" -}}\n(.*?){{- end', text, re.DOTALL)
    assert block is not None
    refused = yaml.safe_load(block[1])

    assert refused.keys() == {*RESERVED, "model"}
    for argument, instead in RESERVED.items():
        if setting := re.fullmatch("set LAPS_SD_([A-Z_]+)", instead):
            first, *others = setting[1].lower().split("_")
            name = first + "".join(other.capitalize() for other in others)
            assert re.search(rf"\b{name}\b", refused[argument])
