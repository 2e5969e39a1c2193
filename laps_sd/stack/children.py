"""One child process of the one-machine stack: its log, its signals, its end.

A child leads its own process group, so that a terminal's Ctrl-C reaches the parent alone, which then stops
the children in order; and it dies with the parent, however that one dies (`laps_sd.stack.child`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from laps_sd.errors import StartupError

__all__ = ["MAX_LOG_BYTES", "Child", "ChildDied", "safe_path"]

LOG_LINES = 15
"""Lines of a log that are shown when its process dies."""
LOG_TAIL_BYTES = 64 * 1024
"""Size of the end of a log that is searched for these lines."""

LINE_BYTES = 8 * 1024
"""Free space of a disk below which a line of a log may not be written: two blocks."""

MAX_LOG_BYTES = 32 * 1024 * 1024
"""Size at which a log begins again: about 100,000 requests of a gateway."""

_spawner = ThreadPoolExecutor(1, thread_name_prefix="laps-sd-spawner")
"""Thread that starts all children.

Linux counts the end of the *thread* that started a child as its parent's death.
"""


def safe_path() -> dict[str, str]:
    """Return the variables with which Python finds no module in the current directory. It would take a file
    redis.py, or a package gateway, of the user for ours. None for a checkout that is found only there.
    """
    root = Path(__file__).parents[2]
    try:
        found_there = root.samefile(".")
    except OSError:  # a directory that is gone
        found_there = False
    return {} if found_there else {"PYTHONSAFEPATH": "1"}


class ChildDied(StartupError):
    """Error for a child that ended by itself; the message shows the end of its log."""

    def __init__(self, child: Child, *, while_what: str) -> None:
        self.name = child.name
        self.returncode = child.returncode
        tail = child.log_tail()
        log_end = f" Its log ends:\n{tail}" if tail else f" Its log is empty{_full_disk(child.log.parent)}."
        super().__init__(f"{child.name} {child.how_it_ended} {while_what}.{log_end}")


def _full_disk(folder: Path) -> str:
    """Return the reason why a log there is empty, if the disk has no room for a line."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < LINE_BYTES:
            return f": no space is left on the disk of {folder}"
    return ""


class Child:
    """Module that runs as a process, and can be started again with the same arguments."""

    def __init__(
        self,
        name: str,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        log: Path,
        python: Path | None = None,
    ) -> None:
        self.name = name
        self.module = module
        self.arguments = arguments
        self.environment = dict(environment)
        self.log = log
        self.python = str(python or sys.executable)
        """The interpreter that runs it."""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; its output is appended to the log."""
        assert not self.alive, f"{self.name} runs already"
        command = [
            self.python,
            "-m",
            "laps_sd.stack.child",
            str(os.getpid()),
            self.module,
            *self.arguments,
        ]
        with self.log.open("ab") as log:
            self._process = _spawner.submit(
                subprocess.Popen,
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            ).result()

    @property
    def alive(self) -> bool:
        """Return whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id of the last start."""
        return self._process.pid if self._process is not None else None

    @property
    def returncode(self) -> int | None:
        """Exit code, or minus the number of the signal; None while it runs, or before it was started."""
        return self._process.poll() if self._process is not None else None

    @property
    def how_it_ended(self) -> str:
        """Description of its end, to follow its name: `was killed by SIGKILL`, `ended with exit code 1`."""
        code = self.returncode or 0
        if code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:  # a real-time signal
            return f"was killed by signal {-code}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all processes that it started; do nothing if it has ended."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def request_stop(self) -> None:
        """Send SIGTERM, then SIGCONT, since a paused process must continue to receive it."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for its end; return whether it has ended."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Send SIGKILL; the process has ended on return."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def log_text(self) -> str:
        """Return everything it has written."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def last_lines(self, count: int) -> list[str]:
        """Return its last lines, without reading more than the end of a log that may be long."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
                return log.read().decode(errors="replace").strip().splitlines()[-count:]
        except OSError:
            return []

    def begin_log_again(self) -> None:
        """Empty the log, and keep what it had in place of what was kept before. Raises OSError.

        The process writes on to the same file; lines that it writes during the call may be lost.
        """
        shutil.copyfile(self.log, self.log.with_suffix(".log.old"))
        os.truncate(self.log, 0)

    def log_tail(self) -> str:
        """Return the end of its log, indented."""
        return "\n".join("  " + line for line in self.last_lines(LOG_LINES))
