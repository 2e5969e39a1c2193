"""Restarts of the children of a one-machine stack that end by themselves.

    with LocalStack(workers=2) as stack, Supervisor(stack, report=print):
        ...                                              # kill -9 any child: it comes back on the same ports

`laps-sd up` uses it. A stack alone does not restart anything: tests and benchmarks kill children on purpose
and restart them when they choose.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from laps_sd.stack.children import Child
from laps_sd.stack.local import LocalStack
from laps_sd.stack.polling import Polling

__all__ = ["Pauses", "Supervisor"]

FIRST_PAUSE_S = 0.2
"""Pause before the first restart.

Our choice: short enough that a client hardly notices, long enough that a port is free again.
"""
LONGEST_PAUSE_S = 30.0
"""Longest pause between restarts of a child that dies at once each time.

Our choice: costs nothing, and is tolerable after a repair.
"""
STEADY_S = 60.0
"""Run time after which a child counts as working: the next pause is the first one again.

Our choice: twice the longest pause.
"""
LOOK_EVERY_S = 0.1
LAST_LINE_CHARACTERS = 200


class Pauses:
    """Pauses before the restarts of one child: each twice the one before, up to a bound."""

    def __init__(
        self,
        first_s: float = FIRST_PAUSE_S,
        longest_s: float = LONGEST_PAUSE_S,
        steady_s: float = STEADY_S,
    ) -> None:
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s
        self._steady_s = steady_s

    def after(self, ran_s: float) -> float:
        """Return the pause that follows a run of `ran_s`."""
        if ran_s >= self._steady_s:
            self._next_s = self._first_s
        pause_s = self._next_s
        self._next_s = min(self._longest_s, 2 * pause_s)
        return pause_s


class _Watch:
    """State of the supervisor for one child."""

    def __init__(self, pauses: Pauses, now_s: float) -> None:
        self.pauses = pauses
        self.started_s = now_s
        self.due_s: float | None = None
        """Time of its next start; None while it runs."""
        self.ready = True
        """True if it has become ready since its last start."""
        self.left = False
        """True if it ended on request, and is not started again."""


class Supervisor(Polling):
    """Supervisor of a stack; see the top of this file. Nothing is restarted after `stop`: call it before the stack is
    stopped.
    """

    def __init__(
        self,
        stack: LocalStack,
        *,
        report: Callable[[str], None],
        pauses: Callable[[], Pauses] = Pauses,
    ) -> None:
        """Prepare a supervisor; `with` starts it.

        `report` gets one line for each death and one when the child is ready again, from the supervisor's
        thread. `pauses` makes the pauses of each child.
        """
        super().__init__("laps-sd-supervisor", LOOK_EVERY_S)
        self.failure: BaseException | None = None
        """Error that ended the supervisor itself; None while it works."""
        self._stack = stack
        self._report = report
        self._pauses = pauses
        self._watches: dict[str, _Watch] = {}

    def look(self) -> None:
        """Check each child once. An error ends the supervisor, as its `failure`."""
        try:
            for child in list(self._stack.children.values()):
                if not self.stopping.is_set():
                    self._look_at(child, time.monotonic())
        except BaseException as error:
            self.failure = error
            self.stopping.set()

    def _look_at(self, child: Child, now_s: float) -> None:
        watch = self._watches.setdefault(child.name, _Watch(self._pauses(), now_s))
        if watch.left:
            return
        if watch.due_s is not None:
            if now_s >= watch.due_s:
                self._start(child, watch, now_s)
        elif not child.alive:
            self._report_end(child, watch, now_s)
        elif not watch.ready and self._stack.is_ready(child.name):
            watch.ready = True
            took_s = time.monotonic() - watch.started_s
            self._report(f"{child.name} is ready again after {took_s:.1f} s (process {child.pid})")

    def _report_end(self, child: Child, watch: _Watch, now_s: float) -> None:
        who = f"{child.name} (process {child.pid}) {child.how_it_ended}"
        if child.name.startswith("worker-") and child.returncode == 0:
            watch.left = True
            self._report(f"{who}: it was drained or asked to stop, and is not started again")
            return
        pause_s = watch.pauses.after(now_s - watch.started_s)
        watch.due_s, watch.ready = now_s + pause_s, False
        killed = (child.returncode or 0) < 0  # its log then contains no reason
        lines = [] if killed else child.last_lines(1)
        reason = "".join(f" ({line.strip()[:LAST_LINE_CHARACTERS]})" for line in lines)
        self._report(f"{who}{reason}: starting it again in {pause_s:g} s")

    def _start(self, child: Child, watch: _Watch, now_s: float) -> None:
        watch.started_s = now_s
        try:
            child.start()
        except OSError as error:  # no memory, no process ids, no room for its log
            pause_s = watch.pauses.after(0.0)
            watch.due_s = now_s + pause_s
            self._report(f"{child.name} cannot be started ({error}): trying again in {pause_s:g} s")
        else:
            watch.due_s = None
