"""Check, in a separate process, whether an output format can be used at all.

A worker compiles the format against its vocabulary. A problem of the format itself is reported to the client
before the request is accepted. The check costs time and memory that depend only on the format, and the
library may end the process because of it (`laps_sd.contract.formats`): so a child process compiles, one
format at a time and tenants in rotation, with limits on time, memory and stack, and the gateway's event loop only waits for its
verdict. A format that ends the child is refused, and the next format gets a new child. A child that ended
before it took the format gives no verdict on it.

    formats = FormatJudge()
    problem = await formats.problem_of("regex", "(a")     # "cannot be used: …"; empty: no problem
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

from gateway.fair_turns import FairTurns
from gateway.model.format_child import CPU_S, MEMORY_BYTES
from laps_sd.errors import Unavailable

__all__ = ["FormatJudge"]

# All are our choice.
WALL_S = 30.0
"""Wall time after which a child is ended even if it used no processor time, as on an overloaded machine;
seconds."""
MAX_WAITING = 64
"""Maximum number of formats of one tenant that wait for their verdict."""
KEPT = 256
"""Number of verdicts kept, the most recently used."""
CHILDREN = 3
"""Number of children that may end in a row before they take a format; after that the caller gets Unavailable
and may retry."""

CHILD = "gateway.model.format_child"


class _ChildrenEnd(Exception):
    """Raised when `CHILDREN` children in a row ended before they took a format."""


class FormatJudge:
    """A checker of output formats; it checks each format once. For one event loop."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[tuple[str, str], asyncio.Task[str]] = OrderedDict()
        self._turns = FairTurns(1, most_waiting=MAX_WAITING, what="output formats")
        self._child: Process | None = None

    async def problem_of(self, kind: str, text: str, *, tenant: str = "") -> str:
        """Return the problem of a `json_schema`, `regex` or `grammar`, worded to follow the field's name;
        empty if there is none.

        Raises ResourceExhausted when too many formats of the tenant wait, Unavailable when the child gives no answer.
        """
        key = (kind, text)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = asyncio.create_task(self._judge(kind, text, tenant), name="judging a format")
            self._verdicts[key] = verdict
            verdict.add_done_callback(functools.partial(self._judged, key))
        self._verdicts.move_to_end(key)
        # The waiting caller may be cancelled; the child's answer is then kept for the next caller with this
        # format.
        return await asyncio.shield(verdict)

    def _judged(self, key: tuple[str, str], verdict: asyncio.Task[str]) -> None:
        if verdict.cancelled() or verdict.exception() is not None:
            self._verdicts.pop(key, None)
        elif len(self._verdicts) > KEPT:
            self._verdicts.popitem(last=False)

    async def close(self) -> None:
        """End the child and cancel all waiting callers."""
        tasks = list(self._verdicts.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._verdicts.clear()
        await self._end_child()

    async def _judge(self, kind: str, text: str, tenant: str) -> str:
        line = json.dumps([kind, text]).encode() + b"\n"
        async with self._turns.of(tenant):
            try:
                async with asyncio.timeout(WALL_S):
                    child = await self._hand_over(line)
                    assert child.stdout is not None
                    answer = await child.stdout.readline()
            except BaseException as error:
                await self._end_child()  # a late answer of this child could not be matched to a format
                if isinstance(error, TimeoutError | _ChildrenEnd):
                    raise Unavailable("no output format can be judged now", retry_after_s=1.0) from error
                raise
            if answer:
                return str(json.loads(answer))
            # The child is not killed here: asyncio would then not learn its exit status.
            return _fate(await child.wait())

    async def _hand_over(self, line: bytes) -> Process:
        """Send the format to a child and return the child that has taken it. Raises _ChildrenEnd."""
        for _ in range(CHILDREN):
            child = await self._living_child()
            if await self._taken(child, line):
                return child
            # The child ended while it was idle, or was killed: its end does not depend on this format.
            await self._end_child()
        raise _ChildrenEnd

    async def _living_child(self) -> Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "laps_sd.stack.child", str(os.getpid()), CHILD),
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,  # there the library repeats input of clients
            )
        return self._child

    async def _taken(self, child: Process, line: bytes) -> bool:
        """Send a format to a child; return False if the child ended before it had read all of it."""
        assert child.stdin is not None and child.stdout is not None
        # RuntimeError: uvloop's error for a closed pipe
        with contextlib.suppress(ConnectionError, RuntimeError):
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
    """Return the problem of a format from the exit status of the child that it ended."""
    match -status:
        case signal.SIGPROF:
            return f"cannot be used: it takes more than {CPU_S:g} s to compile"
        case signal.SIGABRT:
            return f"cannot be used: it takes more than {MEMORY_BYTES >> 20} MiB to compile"
        case signal.SIGSEGV:
            return "cannot be used: it is nested too deeply to compile"
        case _:
            return "cannot be used: the library for formats fails over it"
