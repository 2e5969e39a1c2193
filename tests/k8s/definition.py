"""The definition of SpeculativePool as a JSON schema. Its rules in CEL are for a real API server."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import yaml

from tests.k8s.helm import CHART, TOOLS

FILE = CHART / "crds" / "speculativepools.yaml"


def definition() -> dict[str, Any]:
    found = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def schema() -> dict[str, Any]:
    """Return the schema of a pool."""
    (version,) = definition()["spec"]["versions"]
    found: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return found


def problems(pool: dict[str, Any]) -> list[str]:
    """Return the fields that the API server refuses, each with the reason."""
    return [f"{error.json_path}: {error.message}" for error in _validator().iter_errors(pool)]


@cache
def _validator() -> Any:
    sys.path.append(str(TOOLS / "python"))
    try:
        from jsonschema.validators import Draft202012Validator
    finally:
        sys.path.remove(str(TOOLS / "python"))
    return Draft202012Validator(_plain(schema()))


def _plain(found: Any) -> Any:
    """Return the schema without Kubernetes' own words, of which none but int-or-string refuses a value."""
    if isinstance(found, list):
        return [_plain(one) for one in found]
    if not isinstance(found, dict):
        return found
    return {name: _plain(value) for name, value in found.items() if not name.startswith("x-kubernetes-")}
