"""The schemas of one version of Kubernetes, read once: the package's own `validate` reads them again for
every object.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.k8s.helm import TOOLS

INSTALLED = TOOLS / "python" / "kubernetes_validate" / "kubernetes-json-schema"


class Schemas:
    """Strict schemas: an unknown field is an error, as for `kubectl apply --validate=strict`."""

    def __init__(self, version: str) -> None:
        sys.path.append(str(TOOLS / "python"))
        try:
            from jsonschema.validators import Draft202012Validator
            from referencing import Registry, Resource
        finally:
            sys.path.remove(str(TOOLS / "python"))
        self._folder: Path = INSTALLED / f"v{version}.0-local-strict"
        definitions = Resource.from_contents(self._read("_definitions"))
        # Crawled once: a registry is immutable, and otherwise each object has the definitions crawled again.
        self._registry = Registry().with_resource("/api/_definitions.json", definitions).crawl()
        self._validator = Draft202012Validator
        self._of_kind: dict[str, Any] = {}

    def _read(self, name: str) -> Any:
        return json.loads((self._folder / f"{name}.json").read_text(encoding="utf-8"))

    def problems(self, found: dict[str, Any]) -> list[str]:
        """Return sentences with the path of each error."""
        api = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", found["apiVersion"])
        kind = f"{found['kind'].lower()}-{api}"
        if kind not in self._of_kind:
            self._of_kind[kind] = self._validator(self._read(kind), registry=self._registry)
        return _sentences(self._of_kind[kind], found)

    def problems_of(self, found: Any, schema: dict[str, Any]) -> list[str]:
        """Return sentences with the path of each error by a schema that is not one of Kubernetes."""
        return _sentences(self._validator(schema), found)


def _sentences(validator: Any, found: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(found)]
