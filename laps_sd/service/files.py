"""Files that other programs write while a service runs."""

from __future__ import annotations

from pathlib import Path

__all__ = ["read_bounded"]


def read_bounded(path: Path, most_bytes: int, *, errors: str = "replace") -> str:
    """Return a file's text, without the mark that some editors put before UTF-8. Octets that are not UTF-8 are
    replaced, with `errors="strict"` refused.

    Raises OSError, also if the file is larger; UnicodeDecodeError.
    """
    with path.open("rb") as file:
        octets = file.read(most_bytes + 1)
    if len(octets) > most_bytes:
        raise OSError(f"it is larger than {most_bytes} bytes")
    return octets.decode("utf-8-sig", errors)
