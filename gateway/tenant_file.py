"""The file of tenants: their names, keys and limits (TOML; `laps-sd key` writes an entry).

    [tenants.acme]
    keys = ["sha256:…"]            # 64 hexadecimal digits
    requests_per_minute = 600      # in the long run; a sixth of it at once
    concurrent_requests = 50       # open at once
    max_priority = 10              # highest priority of its requests
    operator = true                # its console shows all tenants' requests, and the workers

All entries except the keys are optional; a missing entry means no limit of the tenant's own.
`[tenants.anonymous]` limits calls without a key. Keys are 256 random bits, so that one round of SHA-256 hides
them; the file holds no credentials.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from laps_sd.service.files import read_bounded
from laps_sd.service.keys import ANONYMOUS, tenant_name_problem

__all__ = ["MAX_FILE_BYTES", "KeyFile", "Quota", "TenantFileError"]

MAX_FILE_BYTES = 4 * 1024 * 1024
BURST_SHARE = 1 / 6  # share of a minute's requests that may come at once
HASH = re.compile(r"sha256:[0-9a-f]{64}")


class TenantFileError(ValueError):
    """Raised when the file of tenants cannot be used. The message is a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one tenant at one gateway; None: no limit of its own."""

    requests_per_minute: float | None = None
    concurrent_requests: int | None = None
    max_priority: int | None = None

    @property
    def burst(self) -> float:
        """Return the number of requests that may come at once."""
        return max(1.0, (self.requests_per_minute or 0.0) * BURST_SHARE)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The content of the file of tenants. Pure; only `read` does I/O."""

    tenants: Mapping[str, str]
    """Tenant by the digest of a key."""
    quotas: Mapping[str, Quota]
    operators: frozenset[str] = frozenset()
    """Tenants that may see the requests of all tenants, and the workers."""

    @classmethod
    def read(cls, path: Path) -> KeyFile:
        """Read the file. Raises TenantFileError."""
        try:
            return cls.parse(read_bounded(path, MAX_FILE_BYTES, errors="strict"))
        except OSError as error:
            raise TenantFileError(f"{path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:  # errors of TOML, of UTF-8, and our own
            raise TenantFileError(f"{path}: {error}") from error

    @classmethod
    def parse(cls, text: str) -> KeyFile:
        """Parse the text of the file. Raises ValueError with a sentence that names the entry."""
        body = tomllib.loads(text)
        unknown = sorted(body.keys() - {"tenants"})
        if unknown:
            raise ValueError(f"{unknown[0]} is not known; tenants are tables [tenants.NAME]")
        entries = body.get("tenants", {})
        if not isinstance(entries, dict):
            raise ValueError("tenants must be tables [tenants.NAME]")
        tenants: dict[str, str] = {}
        quotas: dict[str, Quota] = {}
        operators: set[str] = set()
        for name, entry in entries.items():
            if problem := tenant_name_problem(name):
                raise ValueError(f"tenant {name[:80]!r} {problem}")
            if not isinstance(entry, dict):
                raise ValueError(f"tenants.{name} must be a table")
            for digest in _digests(name, entry.pop("keys", [])):
                if tenants.setdefault(digest, name) != name:
                    raise ValueError(f"tenants {tenants[digest]} and {name} have the same key")
            if _is_operator(name, entry.pop("operator", False)):
                operators.add(name)
            quotas[name] = _quota(name, entry)
        return cls(tenants, quotas, frozenset(operators))


def _is_operator(name: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise ValueError(f"tenants.{name}.operator must be true or false, got {given!r}")
    if given and name == ANONYMOUS:
        raise ValueError(
            f"tenants.{ANONYMOUS}.operator must be absent: this tenant is for calls without a key"
        )
    return given


def _digests(name: str, keys: Any) -> list[str]:
    if not isinstance(keys, list):
        raise ValueError(f"tenants.{name}.keys must be a list")
    if keys and name == ANONYMOUS:
        raise ValueError(f"tenants.{ANONYMOUS}.keys must be absent: this tenant is for calls without a key")
    for index, key in enumerate(keys):
        if not isinstance(key, str) or not HASH.fullmatch(key):
            # The invalid value may be a key that was entered by mistake: the message does not repeat it.
            raise ValueError(f"tenants.{name}.keys[{index}] must be sha256: and 64 hexadecimal digits")
    return keys


def _quota(name: str, entry: Mapping[str, Any]) -> Quota:
    known = {field.name for field in fields(Quota)}
    for field, value in entry.items():
        if field not in known:
            raise ValueError(
                f"tenants.{name}.{field} is not known; there are keys, {', '.join(sorted({*known, 'operator'}))}"
            )
        kinds = (int, float) if field == "requests_per_minute" else (int,)
        least = 0 if field == "max_priority" else 1
        if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= 2**31 - 1:
            raise ValueError(f"tenants.{name}.{field} must be a number from {least}, got {value!r}")
    return Quota(**entry)
