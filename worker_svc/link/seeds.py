"""The addresses of the shard's schedulers: from the settings, or from a file that may change while the worker runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from laps_sd.errors import StartupError
from laps_sd.service.files import read_bounded
from laps_sd.service.log import get_logger
from laps_sd.service.wire import seed_problems
from worker_svc.settings import WorkerSettings

MAX_FILE_BYTES = 65_536

log = get_logger(__name__)


class SchedulerSeeds:
    """The addresses to dial, as `host:port`.

    A file is read each time they are needed. One that cannot be used changes nothing, and is logged once.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        """Read the file, if the settings name one. Raises StartupError if it cannot be used."""
        self._path = settings.scheduler_seeds_file
        self._seeds: Sequence[str] = settings.scheduler_seeds
        self._problem = ""
        if self._path is not None:
            try:
                self._seeds = read_seeds(self._path)
            except (OSError, ValueError) as error:
                raise StartupError(f"The seeds file {self._path} cannot be used: {error}.") from error

    def __call__(self) -> Sequence[str]:
        """Return the addresses as they are now."""
        if self._path is None:
            return self._seeds
        try:
            seeds = read_seeds(self._path)
        except (OSError, ValueError) as error:
            if self._problem != str(error):
                self._problem = str(error)
                log.error(
                    "the seeds file cannot be used: the addresses stay",
                    path=str(self._path),
                    error=self._problem,
                )
            return self._seeds
        self._problem = ""
        if seeds != self._seeds:
            log.info("schedulers", seeds=seeds)
            self._seeds = seeds
        return seeds


def read_seeds(path: Path) -> tuple[str, ...]:
    """Return the addresses in a file: `host:port`, separated by commas or white space; `#` begins a comment.

    Raises OSError if it cannot be read, ValueError with the rest of a sentence if it does not hold addresses.
    """
    lines = read_bounded(path, MAX_FILE_BYTES).splitlines()
    seeds = tuple(" ".join(line.partition("#")[0] for line in lines).replace(",", " ").split())
    for problem in seed_problems(seeds):
        raise ValueError(f"it {problem}")
    return seeds
