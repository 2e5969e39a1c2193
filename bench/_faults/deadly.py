"""Deadly requests: each ends the process of every worker that runs it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Sequence

from bench._clients import Outcome
from bench._faults.plans import InjectedFault
from bench._faults.state import ASK_S

DEADLY_S = 180.0
"""Seconds within which a deadly request has ended, whatever else breaks."""
MOST_DEATHS = 12
"""Upper bound of the workers that one deadly request may end: five if nothing else breaks; more if a worker
is given up and comes back, or is hit by another fault, which the scheduler cannot distinguish."""


class DeadlyRequests:
    """Deadly requests, one at a time, and the workers that each of them ended."""

    def __init__(self, request: Callable[[int], Awaitable[Outcome]], problems: list[str]) -> None:
        """`request` runs one; `problems` receives what goes wrong."""
        self._request = request
        self._problems = problems
        self._deaths: list[str] | None = None
        """Workers that died while a deadly request was open; None while none is open."""

    @property
    def open(self) -> bool:
        """Return whether a deadly request is open."""
        return self._deaths is not None

    def count_death(self, name: str, returncode: int | None) -> bool:
        """Count the end of a worker that a deadly request ended. Return whether it is one."""
        if self._deaths is None or not name.startswith("worker-") or returncode != -signal.SIGKILL:
            return False
        self._deaths.append(name)
        return True

    async def run(self, done: InjectedFault, injected: Sequence[InjectedFault]) -> None:
        """Run a deadly request, which must end with an error that names the deaths, after a bounded number of
        them.
        """
        deaths: list[str] = []
        self._deaths = deaths
        try:
            async with asyncio.timeout(DEADLY_S):
                outcome = await self._request(done.fault.number)
        except TimeoutError:
            self._problems.append(
                f"a deadly request has not ended in {DEADLY_S:g} s; it ended {len(deaths)} workers"
            )
            return
        finally:
            await asyncio.sleep(2 * ASK_S)  # a death just before its end is still to be seen
            self._deaths = None
        lost = any(other.loses and done.at_s <= other.at_s for other in injected)
        if "died in a row" not in outcome.error and not lost:
            end = outcome.end and outcome.end.finish_reason
            self._problems.append(
                f"a deadly request, {outcome.request_id}, ended with {end} {outcome.error!r}"
            )
        if len(deaths) > MOST_DEATHS:
            self._problems.append(
                f"a deadly request, {outcome.request_id}, ended {len(deaths)} workers: {deaths}"
            )
