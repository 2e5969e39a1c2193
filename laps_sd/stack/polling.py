"""A thread that looks at a running stack at intervals, as the supervisor and the watches of `laps-sd up` do."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

__all__ = ["Polling"]


class Polling(ABC):
    """Calls `look` every `every_s` seconds, on a thread of its own, from `start` to `stop`; or while `with` lasts."""

    def __init__(self, name: str, every_s: float) -> None:
        """`name`: of the thread."""
        self.stopping = threading.Event()
        """Event that `stop` sets; a `look` that takes long may check it."""
        self._every_s = every_s
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def look(self) -> None:
        """Look once. An exception ends the thread."""

    def start(self) -> Self:
        """Begin to look."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Return when the last look is over; no other one follows."""
        self.stopping.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        while not self.stopping.wait(self._every_s):
            self.look()
