"""What an API server answers about itself: its version, its groups, and the resources of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def answer(path: str, namespace: str, resources: Mapping[str, tuple[str, str]]) -> dict[str, Any] | None:
    """Return the answer to a GET of this path, None if the path is of no such kind.

    `resources`: path of the group's version, and kind, by the plural.
    """
    roots = sorted({root for root, _ in resources.values()})
    if path == "/version":
        return {"major": "1", "minor": "30", "gitVersion": "v1.30.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [_group(root.removeprefix("/apis/")) for root in roots if root.startswith("/apis/")]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path in roots:
        version = path.removeprefix("/apis/").removeprefix("/api/")
        found = [_resource(name, kind) for name, (root, kind) in resources.items() if root == path]
        if version == "v1":
            found.append(_resource("namespaces", "Namespace") | {"namespaced": False})
        return {"kind": "APIResourceList", "groupVersion": version, "resources": found}
    if path == f"/api/v1/namespaces/{namespace}":
        return {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": namespace}}
    return None


def _group(version: str) -> dict[str, Any]:
    served = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [served], "preferredVersion": served}


def _resource(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": VERBS}
