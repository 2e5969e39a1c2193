"""The engine in a thread of this process: a queue is the inbox of its runner.

runner = EngineThread(engine, settings)
link = SchedulerLink(settings, runner)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from laps_sd.contract.length_probe import ProbeKind
from worker_svc.engine.interface import Capacity, ComputedBy, Engine
from worker_svc.runner.messages import Failed, Message, Outcome
from worker_svc.runner.runner import Runner
from worker_svc.settings import WorkerSettings

__all__ = ["STOP_S", "EngineThread", "QueueInbox"]

STOP_S = 5.0
"""Seconds that an engine gets to finish its round after a stop."""


class QueueInbox:
    """An inbox that another thread of this process fills."""

    def __init__(self) -> None:
        self.stopped = False
        self.holds_nothing = True
        """True if the runner waits and holds no request, and no message has arrived since."""
        self._messages: deque[Message] = deque()
        self._arrival = threading.Condition()

    def put(self, *messages: Message) -> None:
        """Add messages at the end. Thread-safe."""
        with self._arrival:
            self._messages.extend(messages)
            self.holds_nothing = False
            self._arrival.notify()

    def stop(self) -> None:
        """End the runner after its present round. Thread-safe."""
        with self._arrival:
            self.stopped = True
            self._arrival.notify()

    def take(self) -> Sequence[Message]:
        """Return the messages that have arrived, in order, without waiting."""
        messages = []
        while self._messages:
            messages.append(self._messages.popleft())
        return messages

    def wait(self, *, holds_nothing: bool) -> None:
        """Wait until a message has arrived, or the runner must end. `holds_nothing`: it holds no request."""
        with self._arrival:
            if not self._messages:
                self.holds_nothing = holds_nothing
            while not self._messages and not self.stopped:
                self._arrival.wait()


class EngineThread:
    """A runner in a thread of this process; the handle of its link."""

    def __init__(self, engine: Engine, settings: WorkerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._inbox = QueueInbox()
        self._thread: threading.Thread | None = None

    @property
    def capacity(self) -> Capacity:
        """Capacity of the engine."""
        return self._engine.capacity

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the engine's model pair."""
        return self._engine.fingerprint

    @property
    def facts(self) -> tuple[str, ...]:
        """Facts about the engine, for the log."""
        return self._engine.facts

    @property
    def computed_by(self) -> ComputedBy:
        """The same for metrics."""
        return self._engine.computed_by

    @property
    def probe_kind(self) -> ProbeKind | None:
        """Kind of the engine's probe of output lengths, if it has one."""
        probe = self._engine.length_probe
        return None if probe is None else probe.kind

    @property
    def holds_nothing(self) -> bool:
        """True if no request is held and no message is on its way. May be outdated at once."""
        return self._inbox.holds_nothing

    def start(self, deliver: Callable[[Outcome], None]) -> None:
        """Start the thread, which calls `deliver` with each outcome."""
        runner = Runner(
            self._engine,
            self._inbox,
            deliver,
            max_unacknowledged_tokens=self._settings.max_unacknowledged_tokens,
            max_unacknowledged_reports=self._settings.max_unacknowledged_reports,
        )

        def run() -> None:
            try:
                runner.run()
            except BaseException as error:
                deliver(Failed(error))

        self._thread = threading.Thread(target=run, name="engine", daemon=True)
        self._thread.start()

    def put(self, *messages: Message) -> None:
        """Hand over messages; they are taken in, in order, before the next round."""
        self._inbox.put(*messages)

    def stop(self) -> None:
        """End the thread after its present round.

        Returns when it has ended, or hangs: then it ends with the process.
        """
        self._inbox.stop()
        if self._thread is not None:
            self._thread.join(STOP_S)
