"""Files that other programs write while a service runs."""

from __future__ import annotations

from pathlib import Path

__all__ = ["read_bounded"]


def read_bounded(path: Path, most_bytes: int) -> str:
    """Return a file's text; octets that are not UTF-8 are replaced. Raises OSError, also if it is larger."""
    with path.open("rb") as file:
        octets = file.read(most_bytes + 1)
    if len(octets) > most_bytes:
        raise OSError(f"it is larger than {most_bytes} bytes")
    return octets.decode(errors="replace")
