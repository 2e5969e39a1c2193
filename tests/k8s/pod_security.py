"""The Pod Security Standard "restricted" of Kubernetes, for pod specifications: what breaks it, as sentences.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def pod_templates(rendered: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every pod specification with the object's name."""
    for found in rendered:
        name = f"{found['kind']}/{found['metadata']['name']}"
        if found["kind"] == "Pod":
            yield name, found["spec"]
        elif "template" in found.get("spec", {}):
            yield name, found["spec"]["template"]["spec"]


def breaches(pod: dict[str, Any]) -> Iterator[str]:
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key):
            yield f"{key} is set"
    for volume in pod.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds <= VOLUMES:
            yield f"volume {volume['name']} is {kinds}"
    of_pod = pod.get("securityContext", {})
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        own = container.get("securityContext", {})
        name = container["name"]

        def either(key: str, own: dict[str, Any] = own) -> Any:
            return own.get(key, of_pod.get(key))

        if either("runAsNonRoot") is not True:
            yield f"{name}: runAsNonRoot is not true"
        if either("runAsUser") == 0:
            yield f"{name}: runAsUser is 0"
        if (either("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{name}: no seccomp profile"
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{name}: allowPrivilegeEscalation is not false"
        capabilities = own.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", []):
            yield f"{name}: capabilities are not dropped"
        if not set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"}:
            yield f"{name}: capabilities are added"
        if own.get("privileged"):
            yield f"{name}: privileged"
        if any("hostPort" in port for port in container.get("ports", [])):
            yield f"{name}: hostPort"
