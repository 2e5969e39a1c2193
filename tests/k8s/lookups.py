"""An API server that has objects and takes none: enough for Helm to look them up while it renders an upgrade.

What Helm has rendered it then cannot make: the server has no schemas.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

NOT_FOUND = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound"}
RESOURCES = {
    "v1": [
        ("configmaps", "ConfigMap"),
        ("secrets", "Secret"),
        ("services", "Service"),
        ("namespaces", "Namespace"),
    ],
    "apps/v1": [("deployments", "Deployment"), ("statefulsets", "StatefulSet")],
}


@contextmanager
def api_server(objects: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Serve these objects on loopback; yields the server's URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(objects))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def kubeconfig(url: str, namespace: str) -> str:
    """Return the text of a file with which clients reach the server."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
            "current-context": "c",
        }
    )


def _handler(objects: Sequence[dict[str, Any]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            selector = parse_qs(url.query).get("labelSelector", [""])[0]
            found = _get(url.path, [one for one in objects if _selects(selector, one)])
            self._reply(404 if found is None else 200, found or NOT_FOUND)

        def _reply(self, code: int, body: dict[str, Any]) -> None:
            octets = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(octets)))
            self.end_headers()
            self.wfile.write(octets)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def _selects(selector: str, one: dict[str, Any]) -> bool:
    labels = one["metadata"].get("labels", {})
    return all(
        labels.get(name) == value
        for name, _, value in (part.partition("=") for part in selector.split(","))
        if name
    )


def _get(path: str, objects: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    match path.strip("/").split("/"):
        case ["version"]:
            return {"major": "1", "minor": "30", "gitVersion": "v1.30.0"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            version = {"groupVersion": "apps/v1", "version": "v1"}
            group = {"name": "apps", "versions": [version], "preferredVersion": version}
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
        case ["api", "v1"]:
            return _resources("v1")
        case ["apis", "apps", "v1"]:
            return _resources("apps/v1")
        case ["api", "v1", "namespaces", _, *rest]:
            return _objects("v1", rest, objects)
        case ["apis", "apps", "v1", "namespaces", _, *rest]:
            return _objects("apps/v1", rest, objects)
    return None


def _resources(version: str) -> dict[str, Any]:
    verbs = ["get", "list", "create"]
    found = [
        {"name": plural, "singularName": "", "namespaced": kind != "Namespace", "kind": kind, "verbs": verbs}
        for plural, kind in RESOURCES[version]
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": found}


def _objects(version: str, rest: list[str], objects: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    if not rest:
        return {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "models"}}
    kind = dict(RESOURCES[version])[rest[0]]
    found = [one for one in objects if one["kind"] == kind]
    if len(rest) == 1:
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": {}, "items": found}
    return next((one for one in found if one["metadata"]["name"] == rest[1]), None)
