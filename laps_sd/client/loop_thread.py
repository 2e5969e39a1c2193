"""An event loop on a thread of its own, and the coroutines that other threads run there.

loop = LoopThread(AsyncClient, "client")         # starts the thread and makes the client there
job = loop.run(lambda client: client.models())
job.result()                                     # waits; KeyboardInterrupt ends the coroutine
loop.close()                                     # cancels the jobs, closes the client, ends the thread
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent import futures
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["CLOSED", "Job", "LoopThread", "refuse_after_fork", "use_grpc"]

CLOSED = "the client is closed"
JOB_ENDS_S = 3.0
"""Most seconds to wait for the end of a cancelled job, which may send a call that cancels its request."""


class Closable(Protocol):
    """Resource that the thread makes at its start and closes at its end."""

    async def close(self) -> None:
        """Release everything."""


Resource = TypeVar("Resource", bound=Closable)
Result = TypeVar("Result")


class Job(Generic[Result]):
    """A coroutine that runs on the thread of a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[Result] | None = None
        self._cancelled = False
        self.outcome: futures.Future[Result] = futures.Future()
        """Result or error of the coroutine; ValueError if it was cancelled."""

    def result(self) -> Result:
        """Wait for the coroutine and return its result. An exception in this thread ends the coroutine."""
        try:
            return self.outcome.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Cancel the coroutine and wait for its end."""
        if not (self.outcome.done() or _forked):
            self.cancel()
            futures.wait([self.outcome], JOB_ENDS_S)

    def cancel(self) -> None:
        """Cancel the coroutine; do not wait."""
        self.call_soon(self.cancel_here)

    def call_soon(self, function: Callable[[], None]) -> None:
        """Call a function on the loop's thread. Nothing happens after the end of the loop."""
        if not _forked:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(function)

    # -- on the loop's thread ---

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start the coroutine."""
        self._task = self._loop.create_task(coroutine)
        self._task.add_done_callback(self._ended)
        return self._task

    def cancel_here(self) -> None:
        """Cancel the coroutine once: a second time would interrupt what it does at its end."""
        if self._task is not None and not self._cancelled:
            self._cancelled = True
            self._task.cancel()

    def _ended(self, task: asyncio.Task[Result]) -> None:
        self._task = None
        if task.cancelled():
            self.outcome.set_exception(ValueError(CLOSED))
        elif (error := task.exception()) is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


class LoopThread(Generic[Resource]):
    """A thread with an event loop and one resource that belongs to it.

    It is a daemon, so that a program can end without closing its clients.
    """

    def __init__(self, make: Callable[[], Resource], name: str) -> None:
        """Start the thread, and return when `make` has made the resource there; raise what it raised."""
        refuse_after_fork()
        self._make = make
        self._started: futures.Future[None] = futures.Future()
        self._jobs: dict[asyncio.Task[Any], Job[Any]] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._started.result()

    def run(self, start: Callable[[Resource], Coroutine[Any, Any, Result]]) -> Job[Result]:
        """Start a coroutine on the loop. Raise ValueError after `close`."""
        refuse_after_fork()
        job: Job[Result] = Job(self._loop)
        with self._lock:  # a job is either refused, or started before the end begins
            if self._closing:
                raise ValueError(CLOSED)
            self._loop.call_soon_threadsafe(self._start, job, start)
        return job

    def close(self) -> None:
        """Cancel the jobs, close the resource and end the thread. Idempotent."""
        if _forked:
            return  # the thread exists in the parent process only
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            self._loop.call_soon_threadsafe(self._end.set)
        if threading.current_thread() is not self._thread:  # a finalizer may run on any thread
            self._thread.join()

    # -- on the loop's thread ---

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        use_grpc()
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        try:
            self._resource = self._make()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        await self._end.wait()
        for job in self._jobs.values():
            job.cancel_here()
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=JOB_ENDS_S)
        try:
            await self._resource.close()
        finally:
            # gRPC ends its own thread for asyncio when the last of its objects is deleted.
            del self._resource

    def _start(self, job: Job[Result], start: Callable[[Resource], Coroutine[Any, Any, Result]]) -> None:
        async def run() -> Result:
            return await start(self._resource)

        task = job.start(run())
        self._jobs[task] = job
        task.add_done_callback(self._jobs.pop)


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop of uvloop where there is one: it costs 10 to 20 % less per message."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


_used = False
"""True once a client of this process, or of a parent that forked it, has used gRPC."""
_forked = False


def _note_fork() -> None:
    """Remember in a child process that gRPC does not work there because the parent has used it.

    The threads of the parent's loops and of gRPC do not exist in the child. gRPC ends its threads some time
    after the last client is closed. A fork before that leaves a lock of gRPC taken permanently: of 1,000
    children that made a client after the parent had closed its own, 3 waited without end.
    """
    global _forked
    _forked = _used


def refuse_after_fork() -> None:
    """Raise RuntimeError if no loop can run in this process; see `_note_fork`."""
    if _forked:
        raise RuntimeError(
            "this process was forked after a client of laps_sd in its parent had made a call, and gRPC "
            "does not work in it: fork before the first call, or start processes by spawn"
        )


def use_grpc() -> None:
    """Note that this process uses gRPC. Raise RuntimeError if it cannot; see `_note_fork`."""
    global _used
    refuse_after_fork()
    _used = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
