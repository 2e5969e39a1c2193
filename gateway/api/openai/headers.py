"""Values of request headers."""

from __future__ import annotations

import re

from gateway.api.openai.values import shown
from laps_sd.errors import InvalidArgument

__all__ = ["read_ttl_s"]

DURATION = re.compile(r"(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h)")
UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def read_ttl_s(name: str, value: str, max_s: float) -> float | None:
    """Return the seconds of a header that holds a duration in Go's notation ("1500ms", "1m30s"); None without
    the header. Raises InvalidArgument."""
    if not value:
        return None
    parts = DURATION.findall(value[:64])
    if "".join(parts) != value:
        raise InvalidArgument(name, f"must be a duration such as 1500ms or 2s, got {shown(value)}")
    seconds = sum(float(number) * UNIT_S[unit] for number, unit in (_split(part) for part in parts))
    if not 0 < seconds <= max_s:
        raise InvalidArgument(name, f"must be above 0 and at most {max_s:g} s, got {value}")
    return seconds


def _split(part: str) -> tuple[str, str]:
    number = part.rstrip("nuµmsh")
    return number, part[len(number) :]
