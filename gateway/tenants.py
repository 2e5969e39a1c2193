"""Whose call this is. The one place that decides it, for every protocol."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.settings import GatewaySettings
from laps_sd.errors import InvalidArgument

__all__ = ["ANONYMOUS", "FAIRNESS_KEY", "TENANT_KEY", "Tenants"]

ANONYMOUS = "anonymous"
TENANT_KEY = "laps-sd-tenant"
FAIRNESS_KEY = "x-llm-d-inference-fairness-id"
MAX_TENANT_CHARACTERS = 64


class Tenants:
    """Reads the headers of HTTP and the metadata of gRPC alike; their names are in lower case."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._trust_metadata = settings.trust_tenant_metadata

    def of(self, headers: Mapping[str, str]) -> str:
        """The tenant of a call. Raises InvalidArgument."""
        if not self._trust_metadata:
            return ANONYMOUS
        for key in (TENANT_KEY, FAIRNESS_KEY):
            tenant = headers.get(key, "")
            if len(tenant) > MAX_TENANT_CHARACTERS:
                raise InvalidArgument(
                    key, f"must be at most {MAX_TENANT_CHARACTERS} characters, got {len(tenant)}"
                )
            if tenant:
                return tenant
        return ANONYMOUS
