"""Lines of the children's logs that belong on the terminal of `laps-sd up`; logs that have become long begin again.

These are warnings and errors of every child, what a worker is (at its start), the requests that end, and the load of
each shard. The rest stays in the logs.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from laps_sd.service.log import FACTS, REQUEST_ENDED, SHARD_LOAD
from laps_sd.stack.children import MAX_LOG_BYTES, Child
from laps_sd.stack.local import LocalStack
from laps_sd.stack.polling import Polling

__all__ = ["LogWatch", "lines_to_show"]

LOOK_EVERY_S = 0.25
MAX_READ_BYTES = 256 * 1024
"""Bytes of a log that are read at once; a log that grows faster is skipped up to its end, and a line reports that."""
MAX_SHOWN = 20
"""Lines of one child that are shown at once (our choice): more would hide the others."""
ENTRY = re.compile(r"\S+ \[(?P<level>\w+) *\] (?P<rest>.*)")
"""An entry of a log in the console style (`laps_sd.service.log.configure`); other lines continue one."""
ORIGIN = re.compile(r"\s(?:module|service)=\S+")
PROBLEMS = {"warning": "warning: ", "error": "error: ", "critical": "error: "}
UNKNOWN_VARIABLES = "unknown LAPS_SD variables"
"""Beginning of a warning that each child gives and `laps-sd up` has given before."""


class LogWatch(Polling):
    """Watch of the logs of a stack; see the top of this file. `start` may come before that of the stack."""

    def __init__(self, stack: LocalStack, *, report: Callable[[str], None]) -> None:
        """Prepare a watch; `report` gets the lines, from its thread."""
        super().__init__("laps-sd-log-watch", LOOK_EVERY_S)
        self._stack = stack
        self._report = report
        self._read_up_to: dict[Path, int] = {}
        self._facts: deque[str] = deque(maxlen=64)
        """Facts about workers that were shown: equal workers are described once."""
        self._lock = threading.Lock()

    def look(self) -> None:
        """Report what was logged since the last look. Thread-safe."""
        with self._lock:
            self._look()

    def _look(self) -> None:
        for child in list(self._stack.children.values()):
            found = list(lines_to_show(self._new_text(child)))
            for line in found[:MAX_SHOWN]:
                if line.startswith(FACTS):
                    if line in self._facts:
                        continue
                    self._facts.append(line)
                self._report(f"{child.name}  {line}")
            if len(found) > MAX_SHOWN:
                self._report(f"{child.name}  {len(found) - MAX_SHOWN} further lines, see {child.log}")
            if self._read_up_to.get(child.log, 0) >= MAX_LOG_BYTES:
                with contextlib.suppress(OSError):
                    child.begin_log_again()
                    self._read_up_to[child.log] = 0

    def _new_text(self, child: Child) -> str:
        """Return the whole lines of a log that were not read before."""
        try:
            with child.log.open("rb") as log:
                log.seek(self._read_up_to.get(child.log, 0))
                new = log.read(MAX_READ_BYTES)
                whole = new[: new.rfind(b"\n") + 1]
                if len(new) == MAX_READ_BYTES:
                    self._report(f"{child.name}  logs faster than it can be shown, see {child.log}")
                    self._read_up_to[child.log] = log.seek(0, 2)
                else:
                    self._read_up_to[child.log] = self._read_up_to.get(child.log, 0) + len(whole)
                return whole.decode(errors="replace")
        except OSError:
            return ""  # it has not started, or the stack was stopped and its folder deleted


def lines_to_show(text: str) -> Iterator[str]:
    """Yield the lines of a log, in the console style, that belong on the terminal. Pure.

    An error comes with the last line of its traceback.
    """
    shown, last, problem = "", "", False
    for line in text.splitlines():
        entry = ENTRY.match(line)
        if entry is None:
            last = (
                (line.strip() or last) if problem else ""
            )  # a library's own line is no part of other entries
            continue
        if shown:
            yield f"{shown} ({last})" if last else shown
        problem = entry["level"] in PROBLEMS
        shown, last = _shown(entry["level"], entry["rest"]), ""
    if shown:
        yield f"{shown} ({last})" if last else shown


def _shown(level: str, rest: str) -> str:
    """Return an entry as it is shown; empty: it is not."""
    if rest.startswith(UNKNOWN_VARIABLES):
        return ""
    rest = re.sub(r"  +", "  ", ORIGIN.sub("", rest)).rstrip()
    if level in PROBLEMS:
        return PROBLEMS[level] + rest
    event = rest.partition("  ")[0]
    return (
        rest if level == "info" and (event in (REQUEST_ENDED, SHARD_LOAD) or rest.startswith(FACTS)) else ""
    )
