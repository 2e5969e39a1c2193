"""Whether an output format can be used at all, found out in a process of its own.

A worker compiles the format against its vocabulary; what is wrong with it by itself is told to the client before the request is
accepted. That costs time and memory that only the format decides, and the library may end the process over it
(`laps_sd.formats`): so a child compiles, one format at a time, with a bound on all of them, and the gateway's event loop only waits for its
verdict. A format that ends the child is refused, and the next one gets a new child; a child that ended before it took the format
says nothing of it.

    formats = FormatJudge()
    problem = await formats.problem_of("regex", "(a")     # "cannot be used: …"; empty: nothing is wrong
    await formats.close()
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict

from gateway.format_child import CPU_S, MEMORY_BYTES
from laps_sd.errors import ResourceExhausted, Unavailable

__all__ = ["FormatJudge"]

# All our choice.
WALL_S = 30.0
"""After which a child is given up that takes no time at all, on a machine that has none left."""
MAX_WAITING = 64
"""Formats that wait for their turn, of all callers together."""
KEPT = 256
"""Verdicts that are remembered, the most recently used."""
CHILDREN = 3
"""That may end one after the other before they take a format, until the caller is told to come again."""

CHILD = "gateway.format_child"


class _ChildrenEnd(Exception):
    """One after the other, before they take a format."""


class FormatJudge:
    """Judges formats, each once. For one event loop."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[tuple[str, str], asyncio.Task[str]] = OrderedDict()
        self._turn = asyncio.Lock()
        self._child: Process | None = None

    async def problem_of(self, kind: str, text: str) -> str:
        """What is wrong with a `json_schema`, `regex` or `grammar`, in words that go behind the field's name; empty: nothing.

        Raises ResourceExhausted when too many formats wait, Unavailable when the child gives no answer.
        """
        key = (kind, text)
        verdict = self._verdicts.get(key)
        if verdict is None:
            if sum(not other.done() for other in self._verdicts.values()) >= MAX_WAITING:
                raise ResourceExhausted(
                    f"{MAX_WAITING} output formats wait to be compiled, the most of this gateway",
                    retry_after_s=1.0,
                )
            verdict = asyncio.create_task(self._judge(kind, text), name="judging a format")
            self._verdicts[key] = verdict
            verdict.add_done_callback(functools.partial(self._judged, key))
        self._verdicts.move_to_end(key)
        # Whoever waits may be cancelled; the child's answer then is for the next who asks.
        return await asyncio.shield(verdict)

    def _judged(self, key: tuple[str, str], verdict: asyncio.Task[str]) -> None:
        if verdict.cancelled() or verdict.exception() is not None:
            self._verdicts.pop(key, None)
        elif len(self._verdicts) > KEPT:
            self._verdicts.popitem(last=False)

    async def close(self) -> None:
        """Ends the child, and whoever waits for it."""
        tasks = list(self._verdicts.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._verdicts.clear()
        await self._end_child()

    async def _judge(self, kind: str, text: str) -> str:
        line = json.dumps([kind, text]).encode() + b"\n"
        async with self._turn:
            try:
                async with asyncio.timeout(WALL_S):
                    child = await self._hand_over(line)
                    assert child.stdout is not None
                    answer = await child.stdout.readline()
            except BaseException as error:
                await self._end_child()  # it may still answer, and nobody would know whom
                if isinstance(error, TimeoutError | _ChildrenEnd):
                    raise Unavailable("no output format can be judged now", retry_after_s=1.0) from error
                raise
            if answer:
                return str(json.loads(answer))
            # Not killed: asyncio then would not learn what it died of.
            return _fate(await child.wait())

    async def _hand_over(self, line: bytes) -> Process:
        """The child that has taken a format."""
        for _ in range(CHILDREN):
            child = await self._living_child()
            if await self._taken(child, line):
                return child
            # It ended while it had nothing to do, or was killed: its end says nothing of this format.
            await self._end_child()
        raise _ChildrenEnd

    async def _living_child(self) -> Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "laps_sd.child", str(os.getpid()), CHILD),
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,  # where the library repeats what clients sent
            )
        return self._child

    async def _taken(self, child: Process, line: bytes) -> bool:
        """Gives a child a format; false: it has ended before it read the whole."""
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(ConnectionError, RuntimeError):  # uvloop's for a pipe that is closed already
            child.stdin.write(line)
            await child.stdin.drain()
        return bool(await child.stdout.readline())

    async def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def _fate(status: int) -> str:
    """What a child that ended says of its format."""
    match -status:
        case signal.SIGPROF:
            return f"cannot be used: it takes more than {CPU_S:g} s to compile"
        case signal.SIGABRT:
            return f"cannot be used: it takes more than {MEMORY_BYTES >> 20} MiB to compile"
        case signal.SIGSEGV:
            return "cannot be used: it is nested too deeply to compile"
        case _:
            return "cannot be used: the library for formats fails over it"
