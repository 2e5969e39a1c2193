"""Brings the scheduler's metrics to `/metrics` of vLLM's API server, which is another process.

`register` is a general plugin of vLLM (entry point `vllm.general_plugins`): vLLM calls it in each of its
processes. It adds one collector, which reads the files of the engines that this process, or its parent, has
started. Without such a file it adds nothing to the page.

The folder is private to the user: a file in it that somebody else could write is not read.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

__all__ = ["EngineFiles", "file_of", "folder", "register", "remove_dead"]

MAX_FILE_BYTES = 2**20
_registered = False


def folder() -> Path:
    """Return the folder of this user."""
    return Path(tempfile.gettempdir()) / f"laps-sd-vllm-{os.getuid()}"


def file_of(where: Path, parent: int, engine: int, rank: int) -> Path:
    """Return the file of an engine process and its data-parallel rank."""
    return where / f"{parent}-{engine}-{rank}.prom"


def remove_dead(where: Path) -> None:
    """Remove the files of engines that are gone. Raises OSError."""
    for file in where.iterdir():
        if not _lives(_owners(file)[1]):
            file.unlink(missing_ok=True)


def register() -> None:
    """Add the collector, once for each process."""
    global _registered
    if not _registered:
        _registered = True
        REGISTRY.register(EngineFiles(folder()))


class EngineFiles(Collector):
    """Metrics in the files of the engines of this server."""

    def __init__(self, where: Path) -> None:
        self._where = where

    def describe(self) -> Iterator[Metric]:
        """Return nothing: the names are known at a scrape only."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of all living engines, those of one name together."""
        families: dict[str, Metric] = {}
        for text in self._texts():
            for family in text_string_to_metric_families(text):
                if family.name.endswith("_created"):
                    continue  # times of the first observation, which no page of vLLM has
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        return iter(families.values())

    def _texts(self) -> Iterator[str]:
        try:
            private = os.lstat(self._where)
            if not stat.S_ISDIR(private.st_mode) or private.st_uid != os.getuid() or private.st_mode & 0o022:
                return
            remove_dead(self._where)
            files = sorted(self._where.glob("*.prom"))
        except OSError:
            return
        for file in files:
            if _owners(file)[0] in (os.getpid(), os.getppid()):
                try:
                    if file.stat().st_size <= MAX_FILE_BYTES:
                        yield file.read_text(encoding="utf-8")
                except OSError:
                    continue


def _owners(file: Path) -> tuple[int, int]:
    """Return the process ids in the name of a file: of the engine's parent and of the engine; 0 for none."""
    parts = file.name.partition(".")[0].split("-")
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        return 0, 0
    return int(parts[0]), int(parts[1])


def _lives(pid: int) -> bool:
    if pid == 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
