"""What the chart uses of Gateway API 1.2 and its inference extension 1.0, as JSON schemas of `spec` that know no other field.

By https://gateway-api.sigs.k8s.io/reference/spec and https://gateway-api-inference-extension.sigs.k8s.io/reference/spec.
"""

from __future__ import annotations

from typing import Any


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def _list(items: Any, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


_NAME = {"type": "string", "minLength": 1, "maxLength": 253}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_HOST = {
    "type": "string",
    "minLength": 1,
    "maxLength": 253,
    "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}
_PARENT = _object(
    ["name"], group=_NAME, kind=_NAME, namespace=_NAME, name=_NAME, sectionName=_NAME, port=_PORT
)
_BACKEND = _object(["name", "port"], name=_NAME, port=_PORT)
_DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def _route(**of_rule: Any) -> dict[str, Any]:
    return _object(
        [],
        parentRefs=_list(_PARENT, 32),
        hostnames=_list(_HOST, 16),
        rules=_list(_object([], backendRefs=_list(_BACKEND, 16), **of_rule), 16),
    )


BACKEND_TLS_POLICY = _object(
    ["targetRefs", "validation"],
    targetRefs=_list(
        _object(["group", "kind", "name"], group={"const": ""}, kind={"const": "Service"}, name=_NAME), 16
    ),
    validation=_object(["hostname"], hostname=_HOST, wellKnownCACertificates={"const": "System"}),
)
"""Of Gateway API 1.4."""

DOORS: dict[str, dict[str, Any]] = {
    "HTTPRoute": _route(timeouts=_object([], request=_DURATION)),
    "GRPCRoute": _route(),
    "InferencePool": _object(
        ["endpointPickerRef", "selector", "targetPorts"],
        selector=_object(
            ["matchLabels"],
            matchLabels={
                "type": "object",
                "minProperties": 1,
                "maxProperties": 64,
                "additionalProperties": {
                    "type": "string",
                    "maxLength": 63,
                    "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
                },
            },
        ),
        targetPorts=_list(_object(["number"], number=_PORT), 8),
        endpointPickerRef=_object(["name", "port"], name=_NAME, port=_object(["number"], number=_PORT)),
    ),
}
