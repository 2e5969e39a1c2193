"""Rounds that survive the errors of the engine: an error of one request is its end, and only its.

When a round raises, its requests run in halves until the one that raises alone is found, and that one ends
with the error; when all of them raise, or `FAILURES_IN_A_ROW` one after another, the engine has failed: that
is raised. When a round is too large for the device's memory, fewer requests run for a while.
"""

from __future__ import annotations

from collections.abc import Callable

from laps_sd.contract.choose import Residency
from laps_sd.service.log import get_logger
from worker_svc.engine.interface import (
    DeviceFailed,
    Engine,
    OutOfBlocks,
    OutOfMemory,
    RoundResult,
    UnknownRequest,
)
from worker_svc.runner.held import HeldRequests

__all__ = ["FAILURES_IN_A_ROW", "ROUNDS_WITH_FEWER", "GuardedRounds"]

log = get_logger(__name__)

FAILURES_IN_A_ROW = 3
"""Requests failing alone, with no successful round between them, after which the engine counts as failed."""
ROUNDS_WITH_FEWER = 256
"""Rounds after the device ran out of memory, before twice as many requests run again."""


class GuardedRounds:
    """Runs rounds; see the module's docstring. `report_part` gets each round run by the search for a failing
    request.
    """

    def __init__(
        self, engine: Engine, requests: HeldRequests, report_part: Callable[[RoundResult], None]
    ) -> None:
        self.slots = engine.capacity.slots
        """Requests in one round at most: fewer than the engine's for a while after it ran out of memory."""
        self._engine = engine
        self._requests = requests
        self._report_part = report_part
        self._rounds_with_fewer = 0
        self._out_of_memory = 0
        self._failed_in_a_row = 0

    def take_out_of_memory(self) -> int:
        """Return the rounds since the last call for which the device had no memory."""
        count, self._out_of_memory = self._out_of_memory, 0
        return count

    def run(self, run: tuple[str, ...]) -> tuple[tuple[str, ...], RoundResult | None]:
        """Run a round of these requests, or of the best that the engine has room for.

        The result is None if one of them has failed.
        """
        while True:
            try:
                result = self._engine.round(run)
                self._failed_in_a_row = 0
                self._regain_slots()
                return run, result
            except OutOfBlocks as error:
                # The engine counts blocks otherwise than `choose`, and changed nothing. The least needed
                # request makes room.
                self._requests.settled = False
                rest = self._relieve(run)
                if rest is None:
                    self._requests.fail(
                        run[0],
                        f"its context does not fit the KV pools: {error}",
                    )
                    return run, None
                run = rest
            except UnknownRequest as error:
                self._requests.settled = False
                held = self._requests.by_id.get(error.args[0])
                if held is None or held.ended:
                    raise
                self._requests.fail(held.spec.request_id, "the engine lost this request")
                return run, None
            except OutOfMemory as error:
                self._requests.settled = False
                self._out_of_memory += 1
                if len(run) == 1:
                    self._requests.fail(run[0], str(error))
                    return run, None
                self.slots = len(run) // 2
                self._rounds_with_fewer = 0
                log.warning(
                    "the device is out of memory: fewer requests run", slots=self.slots, reason=str(error)
                )
                run = run[: self.slots]
            except DeviceFailed:
                raise
            except Exception as error:
                self._requests.settled = False
                self._fail_alone(run, error)
                return run, None

    def _fail_alone(self, run: tuple[str, ...], error: Exception) -> None:
        """End the requests of a round that raise alone. Raises if all of them do: the engine has failed."""
        log.warning("a round failed", requests=len(run), exc_info=error)
        halves = [run[: len(run) // 2], run[len(run) // 2 :]] if len(run) > 1 else []
        guilty: dict[str, Exception] = {run[0]: error} if len(run) == 1 else {}
        innocent = 0
        while halves:
            part = halves.pop()
            try:
                self._report_part(self._engine.round(part))
                innocent += len(part)
            except DeviceFailed:
                raise
            except (OutOfBlocks, OutOfMemory, UnknownRequest):
                innocent += len(part)  # another error, which the next round handles
            except Exception as alone:
                if len(part) == 1:
                    guilty[part[0]] = alone
                else:
                    halves += [part[: len(part) // 2], part[len(part) // 2 :]]
        self._failed_in_a_row = 0 if innocent else self._failed_in_a_row + len(guilty)
        if not innocent and (len(run) > 1 or self._failed_in_a_row >= FAILURES_IN_A_ROW):
            raise error
        for name, cause in guilty.items():
            reason = (str(cause).strip().splitlines() or [""])[0]
            self._requests.fail(
                name,
                f"the engine failed on this request: {type(cause).__name__}{': ' + reason if reason else ''}",
            )

    def _regain_slots(self) -> None:
        if self.slots < self._engine.capacity.slots:
            self._rounds_with_fewer += 1
            if self._rounds_with_fewer >= ROUNDS_WITH_FEWER:
                self.slots = min(2 * self.slots, self._engine.capacity.slots)
                self._rounds_with_fewer = 0
                self._requests.settled = False

    def _relieve(self, run: tuple[str, ...]) -> tuple[str, ...] | None:
        """Push out a request that does not run, else leave out the last of `run`.

        Returns the requests to run. None: only the first is left, and there is no other request to push out.
        """
        # By the engine: what a round in flight has changed is in no report yet, and not in `Held.residency`.
        others = self._engine.known() - set(run)
        for name, held in self._requests.by_id.items():
            if name in others and self._engine.status(name).residency is Residency.DEVICE:
                self._requests.push_out(held)
                return run
        if len(run) == 1:
            return None
        if self._requests.by_id[run[-1]].residency is Residency.DEVICE:
            self._requests.push_out(self._requests.by_id[run[-1]])
        return run[:-1]
