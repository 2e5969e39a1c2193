"""Addresses of the `laps-sd up` that run on this machine, so that its other commands need none.

Each `laps-sd up` writes one file, readable by its user only, and keeps it locked while it runs. The kernel releases
the lock when the process ends, however it ends: a file that is not locked is stale, and the next reader removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Running", "directory", "published", "running"]

MAX_FILE_BYTES = 64 * 1024
MAX_FILES = 64
"""Files that are read at most; a user has a handful."""


@dataclass(frozen=True, slots=True)
class Running:
    """One `laps-sd up`."""

    process: int
    gateway: str
    """host:port of its first gateway."""
    schedulers: dict[str, list[str]]
    """host:port of the schedulers of each shard."""
    model: str
    folder: str
    """Directory in which it was started."""
    redis: str = ""
    """URL of its record."""
    host: str = ""
    """Name of its machine: a home directory may be shared by several."""


def directory() -> Path:
    """Return the directory of the files: in XDG_RUNTIME_DIR, without that in ~/.local/state.

    Raises OSError for a user without a home directory.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    try:
        return (Path(runtime) if runtime else Path.home() / ".local" / "state") / "laps-sd"
    except RuntimeError as error:
        raise OSError(str(error)) from None


@contextlib.contextmanager
def published(one: Running) -> Iterator[None]:
    """Publish the addresses inside the context. Raises OSError if the file cannot be written."""
    folder = directory()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"up-{one.process}.json"
    written = path.with_suffix(".new")
    written.unlink(missing_ok=True)
    body = json.dumps(asdict(one) | {"host": socket.gethostname()})
    with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # before it has its name, so that it is never taken for stale
        file.write(body)
        file.flush()
        written.replace(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def running() -> list[Running]:
    """Return every `laps-sd up` of this user that runs on this machine, in the order of their process ids.

    Removes stale files. Files of other users or machines, and files of another form, are ignored.
    """
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(directory().glob("up-*.json"))[:MAX_FILES]:
            with contextlib.suppress(OSError, ValueError, TypeError):
                one = _read(path)
                if one is not None and one.host == socket.gethostname():
                    found.append(one)
    return sorted(found, key=lambda one: one.process)


def _read(path: Path) -> Running | None:
    """Return the content of a file; None if it is stale, and was removed. Raises OSError, ValueError, TypeError."""
    with path.open() as file:
        if os.fstat(file.fileno()).st_uid != os.getuid():
            return None
        body: Any = json.loads(file.read(MAX_FILE_BYTES))
        one = Running(**body)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return one
        if one.host == socket.gethostname():  # the lock of another machine may not be visible here
            path.unlink(missing_ok=True)
        return None
