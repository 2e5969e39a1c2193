"""`laps-sd up` as a user runs it: a process, its terminal, and the process ids of its children as the
terminal shows them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.helpers import wait_until

ROOT = Path(__file__).parents[2]
FREE_PORTS = ("--gateway-port", "0", "--http-port", "0", "--scheduler-port", "0", "--metrics-port", "0")


class Up:
    """A process that runs from `with` on, on free ports, and is ready for requests then."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.lines: list[str] = []
        """Lines of its terminal, in order of arrival."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "laps_sd", "up", "--no-demo", *FREE_PORTS, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"} | dict(environment or {}),
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        wait_until(
            lambda: "Ctrl-C stops everything." in self.lines or self.process.poll() is not None,
            description="it serves",
        )
        assert self.process.poll() is None, self.terminal
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.send_signal(signal.SIGINT)
        self._reader.join()
        assert self.process.wait() == 0, self.terminal

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def terminal(self) -> str:
        """Return everything that was shown so far."""
        return "\n".join(self.lines)

    def pid(self, name: str) -> int:
        """Return the process of a component, as shown last."""
        shown = re.findall(
            rf"^  {name} +process (\d+)|{name} is ready again after .* \(process (\d+)\)", self.terminal, re.M
        )
        return int("".join(shown[-1]))

    def where(self, name: str) -> str:
        """Return the line of a component in the list of listening addresses."""
        [line] = [line for line in self.lines if line.startswith(f"  {name} ") and " process " in line]
        return line

    def grpc(self, name: str) -> str:
        """Return host:port of a component."""
        [address] = re.findall(r"gRPC ([\d.:]+)", self.where(name))
        return str(address)

    def kill(self, name: str) -> None:
        """Send SIGKILL to this one process, as `kill -9` does."""
        os.kill(self.pid(name), signal.SIGKILL)

    def said(self, pattern: str) -> list[str]:
        """Return the lines that begin with the time of day and continue with the pattern."""
        return [line for line in self.lines if re.match(rf"\d\d:\d\d:\d\d  {pattern}", line)]
