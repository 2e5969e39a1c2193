"""The engine in a process of its own: a pipe is the inbox of its runner, and brings its outcomes back.

A round of a small model is hundreds of short operations, and between any two of them the link's asyncio could
take the interpreter; the engine then waits for it although the device is free (docs/decisions/0004). Two
interpreters do not compete.

    launch = EngineLaunch(settings)
    engine = launch.result()                     # returns when the model is loaded; raises StartupError
    link = SchedulerLink(settings, engine)       # as with an `EngineThread`

The child runs the same `Runner` class on its main thread; this side has a thread for each direction, so that
neither a long round nor a large specification blocks the event loop. The child ends with its pipe: whatever
happens to this process, the child ends at the next round boundary.
"""

from __future__ import annotations

import gc
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from laps_sd.contract.length_probe import ProbeKind
from laps_sd.errors import StartupError
from laps_sd.service.log import configure, get_logger
from worker_svc.engine.interface import Capacity, ComputedBy, Engine
from worker_svc.runner.messages import Failed, Message, Outcome
from worker_svc.runner.runner import Runner
from worker_svc.runner.thread import STOP_S
from worker_svc.settings import WorkerSettings

__all__ = ["EngineLaunch", "EngineProcess", "how_it_ended"]


@dataclass(frozen=True, slots=True)
class _Ready:
    capacity: Capacity
    fingerprint: str
    facts: tuple[str, ...]
    computed_by: ComputedBy
    probe_kind: ProbeKind | None


@dataclass(frozen=True, slots=True)
class _Refused:
    """A failed start, with its reason in one sentence."""

    sentence: str


@dataclass(frozen=True, slots=True)
class _Idle:
    """A report that nothing can run until a message arrives."""

    taken: int
    """Number of messages taken in so far."""
    holds_nothing: bool


class EngineLaunch:
    """A child that loads its model."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Start the child."""
        self._settings = settings
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "laps_sd.stack.child",
            str(os.getpid()),
            __name__,
            str(theirs.fileno()),
        ]
        self._child = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        theirs.close()
        self._connection = Connection(ours.detach())

    def result(self) -> EngineProcess:
        """Return the engine once its model is loaded.

        Raises StartupError with the child's message, or if the child has ended.
        """
        try:
            self._connection.send(self._settings)
            answer = self._connection.recv()
        except (EOFError, OSError):
            ended = how_it_ended(self._child.wait())
            raise StartupError(f"The engine's process {ended}, while it loaded the model.") from None
        if isinstance(answer, _Refused):
            self._child.wait()
            raise StartupError(answer.sentence)
        return EngineProcess(self._child, self._connection, answer)

    def abort(self) -> None:
        """End the child, so that `result` does not wait any longer in its thread."""
        self._child.kill()


class EngineProcess:
    """The parent's side of the pipe; see the module's docstring."""

    def __init__(self, child: subprocess.Popen[bytes], connection: Connection, ready: _Ready) -> None:
        self.capacity = ready.capacity
        self.fingerprint = ready.fingerprint
        self.facts = ready.facts
        self.computed_by = ready.computed_by
        self.probe_kind = ready.probe_kind
        self._deliver: Callable[[Outcome], None] = lambda _: None
        self._child = child
        self._connection = connection
        self._down: queue.SimpleQueue[tuple[Message, ...] | None] = queue.SimpleQueue()
        self._put = 0
        self._idle = _Idle(0, holds_nothing=True)
        self._stopping = False
        self._threads = (
            threading.Thread(target=self._send, name="to the engine", daemon=True),
            threading.Thread(target=self._receive, name="from the engine", daemon=True),
        )

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def start(self, deliver: Callable[[Outcome], None]) -> None:
        """Begin to deliver; `deliver` is called in a thread of this object with each outcome."""
        self._deliver = deliver
        for thread in self._threads:
            thread.start()

    def put(self, *messages: Message) -> None:
        """Hand over messages; they are taken in, in order, before the next round."""
        self._put += len(messages)
        self._down.put(messages)

    @property
    def holds_nothing(self) -> bool:
        """True if the child holds no request and no message is on its way to it."""
        return self._idle.holds_nothing and self._idle.taken == self._put

    def stop(self) -> None:
        """End the child after its present round. Returns when it has ended."""
        self._stopping = True
        if not self._threads[0].is_alive():
            self._connection.close()  # never started: the child ends with the pipe
        self._down.put(None)
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(STOP_S)

    def _send(self) -> None:
        while True:
            messages = self._down.get()
            try:
                self._connection.send(messages)
            except OSError:
                return  # `_receive` reports that the child has ended
            if messages is None:
                return

    def _receive(self) -> None:
        while True:
            try:
                outcome = self._connection.recv()
            except (EOFError, OSError):
                if not self._stopping:
                    ended = how_it_ended(self._child.wait())
                    self._deliver(Failed(RuntimeError(f"the engine's process {ended}")))
                return
            if isinstance(outcome, _Idle):
                self._idle = outcome
            else:
                self._deliver(outcome)


def how_it_ended(code: int) -> str:
    """Return how a process with this exit code, or minus the number of a signal, ended, to follow its name."""
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL, as the system does when memory is short"
    return f"ended with exit code {code}"


class _PipeInbox:
    """The inbox of the child's runner: the pipe."""

    def __init__(self, connection: Connection) -> None:
        self.stopped = False
        self._connection = connection
        # Connection.poll makes a selector for each call, and this is called in every round.
        self._readable = select.poll()
        self._readable.register(connection.fileno(), select.POLLIN)
        self._taken = 0

    def take(self) -> Sequence[Message]:
        """Return the messages that the pipe holds. Raises EOFError and ConnectionError."""
        taken: list[Message] = []
        while not self.stopped and self._readable.poll(0):
            messages = self._connection.recv()
            if messages is None:
                self.stopped = True
            else:
                taken.extend(messages)
        self._taken += len(taken)
        return taken

    def wait(self, *, holds_nothing: bool) -> None:
        """Report to the parent that nothing can run, and wait until the pipe holds something."""
        self._connection.send(_Idle(self._taken, holds_nothing))
        self._readable.poll()


def _work(engine: Engine, connection: Connection, settings: WorkerSettings) -> None:
    """Run rounds until stopped; an exception of the engine is delivered, one of the pipe is raised."""
    runner = Runner(
        engine,
        _PipeInbox(connection),
        connection.send,
        max_unacknowledged_tokens=settings.max_unacknowledged_tokens,
        max_unacknowledged_reports=settings.max_unacknowledged_reports,
    )
    try:
        runner.run()
    except (EOFError, ConnectionError):
        raise
    except Exception as error:
        get_logger(__name__).error("the engine failed", exc_info=error)
        # Not the error itself: its traceback cannot be pickled, and is logged.
        connection.send(Failed(RuntimeError(repr(error))))


def main() -> None:
    """Run the child: load the engine of the settings, then run rounds until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends them to all processes; the parent decides
    connection = Connection(int(sys.argv[1]))
    try:
        settings: WorkerSettings = connection.recv()
        configure("worker", level=settings.log_level, style=settings.log_style)
        # Here, so that the parent never imports torch.
        from worker_svc.loading import load

        try:
            engine = load(settings)
            gc.collect()
            gc.freeze()  # the model's objects stay; collecting through them repeatedly would pause rounds
        except StartupError as error:
            connection.send(_Refused(str(error)))
            return
        probe = engine.length_probe
        kind = None if probe is None else probe.kind
        connection.send(_Ready(engine.capacity, engine.fingerprint, engine.facts, engine.computed_by, kind))
        _work(engine, connection, settings)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone


if __name__ == "__main__":
    # Under its own name: pickled objects in the pipe are looked up by module, and here that is called
    # __main__.
    from worker_svc.runner import process as engine_process

    engine_process.main()
