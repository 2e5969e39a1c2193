"""Runs the collected tests once without any mistake, and then once for each mistake, each time in a child that is
forked off pytest: so a mistake costs milliseconds, no file is written, and the working tree may change during
the run.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import pytest

from .mistakes import Mutant, watch

PATIENCE = 4.0
LEAST_S = 5.0
"""A test may take that many times the processor time it usually takes, and that much in any case."""
MEMORY_BYTES = 4 << 30
"""Address space that a test with a mistake may take."""
FAILED, PASSED, FELL_OVER = 1, 0, 3


class Trials:
    """A pytest plugin: instead of one run of the collected tests, it runs them once for each mutant."""

    def __init__(self, chosen: Sequence[Mutant], jobs: int) -> None:
        self.chosen = chosen
        self.jobs = jobs
        self.failed: list[str] | None = None
        """Tests that fail without a mistake; None before they ran."""
        self.survivors: list[Mutant] = []
        self.too_slow: list[Mutant] = []
        self._progress = Progress()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try all mutants."""
        gc.freeze()
        output, told = os.pipe()
        child = fork(lambda: self._usual(session, told))
        os.close(told)
        with os.fdopen(output, "rb") as stream:
            usual: list[tuple[float, list[int], bool]] = json.loads(stream.read() or b"[]")
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != PASSED:
            return True
        self.failed = [session.items[at].nodeid for at, (_, _, passes) in enumerate(usual) if not passes]
        if self.failed:
            return True
        self._progress = Progress()
        running: dict[int, Mutant] = {}
        for number, mutant in enumerate(self.chosen):
            # Quick ones first: most are of one part of the core, and most mistakes fail one of them.
            tests = sorted((took_s, at) for at, (took_s, reached, _) in enumerate(usual) if number in reached)
            if len(running) == self.jobs:
                self._await_one(running)
            running[fork(lambda mutant=mutant, tests=tests: self._try(session, mutant, tests))] = mutant  # type: ignore[misc]
        while running:
            self._await_one(running)
        return True

    def _usual(self, session: pytest.Session, told: int) -> int:
        """Send, for each test, the processor time it takes, s, the numbers of the mutants it reaches, and whether
        it passes.
        """
        show = os.dup(sys.stderr.fileno())
        silence()
        reached = watch(self.chosen)
        usual = []
        for done, item in enumerate(session.items):
            self._progress.show(f"without a mistake: {done} of {len(session.items)} tests done", show)
            reached.clear()
            began_s, failed = time.process_time(), session.testsfailed
            run(session, item)
            usual.append((time.process_time() - began_s, sorted(reached), session.testsfailed == failed))
        with os.fdopen(told, "wb") as stream:
            stream.write(json.dumps(usual).encode())
        return PASSED

    def _try(self, session: pytest.Session, mutant: Mutant, tests: Sequence[tuple[float, int]]) -> int:
        """Return whether the first of these tests failed, or all passed, with the mistake; a test that takes
        too long ends the process with SIGPROF.
        """
        silence()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        mutant.plant()
        for took_s, at in tests:
            signal.setitimer(signal.ITIMER_PROF, LEAST_S + PATIENCE * took_s)
            run(session, session.items[at])
            if session.testsfailed:
                return FAILED
        return PASSED

    def _await_one(self, running: dict[int, Mutant]) -> None:
        """Wait until one of the running mutants was found or has survived."""
        child, status = os.wait()
        mutant = running.pop(child)
        match os.waitstatus_to_exitcode(status):
            case code if code == FAILED:
                pass
            case code if code == -signal.SIGPROF:
                self.too_slow.append(mutant)
                print(f"too slow: {mutant}", flush=True)
            case code:
                self.survivors.append(mutant)
                print(f"survived{'' if code == PASSED else f' ({code})'}: {mutant}", flush=True)
        done = self._progress.step()
        left_s = self._progress.passed_s() / done * (len(self.chosen) - done)
        found = done - len(self.survivors)
        self._progress.show(
            f"{done} of {len(self.chosen)} done, {found} found, about {left_s / 60:.0f} min left",
            sys.stderr.fileno(),
        )


class Progress:
    """One line on the terminal that changes; in a file, a line every half minute."""

    def __init__(self) -> None:
        self._began_s = self._shown_s = time.monotonic()
        self._done = 0

    def passed_s(self) -> float:
        return time.monotonic() - self._began_s

    def step(self) -> int:
        self._done += 1
        return self._done

    def show(self, text: str, stream: int) -> None:
        if os.isatty(stream):
            os.write(stream, f"\r\x1b[K{text}\r".encode())
        elif time.monotonic() > self._shown_s + 30:
            self._shown_s = time.monotonic()
            os.write(stream, f"{text}\n".encode())


def fork(work: Callable[[], int]) -> int:
    """Start a child that ends with the status that `work` returns; return its process id."""
    child = os.fork()
    if child:
        return child
    terminal, status = os.dup(sys.stderr.fileno()), FELL_OVER
    try:
        status = work()
    except BaseException:
        os.write(terminal, traceback.format_exc().encode())
    finally:
        os._exit(status)


def run(session: pytest.Session, item: pytest.Item) -> None:
    session.config.hook.pytest_runtest_protocol(item=item, nextitem=None)


def silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
