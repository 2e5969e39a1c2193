"""The results of the templates, and their refusals: cases.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.helm import CHART, CRDS, ROOT, Refused, find

CASES = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))
ABSENT = object()


def at(found: Any, path: str) -> Any:
    """Return a.b[0].c["d.e"][name=x] of objects in objects; ABSENT where there is nothing."""
    for step in re.findall(r'\["[^"]+"\]|\[[^\]]+\]|[^.\[\]]+', path):
        if step.startswith('["'):
            found = found.get(step[2:-2], ABSENT)
        elif step.startswith("[name="):
            found = next((one for one in found if one["name"] == step[6:-1]), ABSENT)
        elif step.startswith("["):
            index = int(step[1:-1])
            found = found[index] if index < len(found) else ABSENT
        else:
            found = found.get(step, ABSENT)
        if found is ABSENT:
            return ABSENT
    return found


def of(case: dict[str, Any]) -> dict[str, str]:
    """Return the version of Kubernetes that the case names, if it names one."""
    return {"kubernetes": case["kubernetes"]} if "kubernetes" in case else {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["it"])
def test_the_chart(helm3: Any, case: dict[str, Any]) -> None:
    if "refused" in case:
        with pytest.raises(Refused, match=re.escape(case["refused"])):
            helm3.render(case["set"], **of(case))
        return
    kind, _, name = case["object"].partition("/")

    found = find(helm3.render(case.get("set", {}), **of(case)), kind, name)

    assert {path: at(found, path) for path in case.get("paths", {})} == case.get("paths", {})
    assert [path for path in case.get("absent", []) if at(found, path) is not ABSENT] == []


def test_a_gateway_downloads_of_a_model_what_it_reads_and_no_weights(helm3: Any) -> None:
    pool = {"name": "a", "model": "m", "target": {"repo": "x/y"}}
    source = (ROOT / "gateway" / "model" / "files.py").read_text(encoding="utf-8")
    named_in_an_error = {"tekken.json"}
    read = set(re.findall(r'"(\w+\.(?:json|jinja))"', source)) - named_in_an_error

    template = find(helm3.render({"pools": [pool]}), "Deployment", "a-gateway")["spec"]["template"]

    [download] = template["spec"]["initContainers"]
    assert download["args"][:3] == ["hf", "download", "x/y"]
    files, rest = download["args"][3:-2], download["args"][-2:]
    assert rest == ["--local-dir", "/models/x--y"]
    assert {Path(file).name for file in files} == read


def test_notes_name_the_next_command_and_what_is_only_good_for_a_trial(helm4: Any) -> None:
    notes = helm4.notes({"scheduler": {"replicas": 1}})

    assert "helm test demo -n models --logs" in notes
    assert "port-forward service/demo-laps-sd-demo-gateway 50051:50051" in notes
    assert "good for a trial" in notes
    assert "no standby" in notes


def test_notes_scale_by_hand_only_what_no_autoscaler_scales(helm4: Any) -> None:
    command = "kubectl -n models scale deployment/demo-laps-sd-demo-worker --replicas 3"

    assert command in helm4.notes({})
    assert command not in helm4.notes({"poolDefaults": {"workers": {"autoscaling": {"hpa": True}}}})


def test_notes_say_how_to_call_a_gateway_with_a_certificate_and_keys(helm4: Any) -> None:
    notes = helm4.notes(
        {
            "gateway": {"apiKeysSecret": "tenants"},
            "tls": {"public": {"mode": "secrets", "secret": "public", "dnsNames": ["models.example.com"]}},
        }
    )

    assert "--url grpcs://localhost:50051 --tls-name models.example.com --api-key YOUR_KEY" in notes
    assert "helm test" not in notes, "there is no key to test with"


@pytest.mark.parametrize("page", ["docs/kubernetes.md"])
def test_the_values_of_a_guide_are_taken(helm: Any, page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n# values.yaml\n(.*?)```", text, re.DOTALL)
    assert blocks

    for block in blocks:
        rendered = helm.render(yaml.safe_load(block), CRDS)
        assert {"Deployment", "StatefulSet"} <= {one["kind"] for one in rendered}


FREE = {
    "global",
    "modelVolume",
    "cacheVolume",
    "vllmArgs",
    "speculative_config",
    "nodeSelector",
    "affinity",
    "podAnnotations",
    "podLabels",
    "annotations",
    "requests",
    "limits",
} | {
    "podMonitorLabels",
    "dashboardLabels",
    "tolerations",
    "gatewayFrom",
    "metricsFrom",
    "schedulerFrom",
    "commonLabels",
    "commonAnnotations",
    "podSecurityContext",
    "containerSecurityContext",
    "extraObjects",
    "extraEnv",
    "extraVolumes",
    "extraVolumeMounts",
    "initContainers",
    "topologySpreadConstraints",
    "parentRefs",
    "extraTriggers",
    "strings",
    "labels",
    "environment",
    "adapters",
}
"""Maps whose keys are Kubernetes', vLLM's or the user's own."""


def test_a_name_that_is_mistyped_is_refused_at_every_level() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def lax(node: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
        open_ended = node.get("type") == "object" and node.get("additionalProperties") is not False
        if (
            open_ended and path[-1] not in FREE and path[0] != "volumeSource"
        ):  # Kubernetes checks what is in one
            yield ".".join(path)
        for name, inner in node.get("properties", {}).items():
            yield from lax(inner, (*path, name))
        if isinstance(node.get("items"), dict):
            yield from lax(node["items"], path)

    found = [*lax(schema, ("values",))]
    for name, definition in schema["definitions"].items():
        found += lax(definition, (name,))
    assert found == []


def test_every_value_has_its_place_in_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def unknown(values: Any, node: dict[str, Any], path: str) -> Iterator[str]:
        node = schema["definitions"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        if not isinstance(values, dict) or path.rpartition(".")[2] in FREE:
            return
        for name, inner in values.items():
            if name not in node.get("properties", {}):
                yield f"{path}.{name}"
            else:
                yield from unknown(inner, node["properties"][name], f"{path}.{name}")

    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert [*unknown(values, schema, "values")] == []


def test_every_value_is_used_by_a_template() -> None:
    templates = "".join(path.read_text(encoding="utf-8") for path in (CHART / "templates").rglob("*.*"))
    names = set(keys(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))))

    assert sorted(name for name in names if not re.search(rf"\b{name}\b", templates)) == []


def keys(values: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of all levels but those that Kubernetes reads unchanged."""
    for name, value in values.items():
        yield name
        if isinstance(value, dict) and name not in AS_THEY_ARE:
            yield from keys(value)


AS_THEY_ARE = {
    "resources",
    "modelVolume",
    "cacheVolume",
    "dashboardLabels",
    "podSecurityContext",
    "containerSecurityContext",
}
