"""An engine that keeps time: for measurements on a machine whose speed varies."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from worker_svc.engine.interface import Engine, RoundResult

__all__ = ["paced"]


def paced(
    engine: Engine,
    round_s: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Engine:
    """`engine`, but no round takes less than `round_s` seconds.

    The rest of that time is slept, and belongs to the phases of the round in proportion, so that what a scheduler learns of their
    cost is as steady as the rounds are. The tokens are the engine's own. A round that takes longer by itself is left alone.
    """
    return cast(Engine, _Paced(engine, round_s, clock, sleep))


class _Paced:
    def __init__(
        self, engine: Engine, round_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._engine = engine
        self._round_s = round_s
        self._clock = clock
        self._sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def round(self, run: Sequence[str]) -> RoundResult:
        """As the engine's, and then what is left of the time."""
        began = self._clock()
        result = self._engine.round(run)
        left = self._round_s - (self._clock() - began)
        if left <= 0:
            return result
        self._sleep(left)
        took = self._clock() - began
        slower = took / result.total_s if result.total_s > 0 else 1.0
        return dataclasses.replace(
            result,
            draft_s=result.draft_s * slower,
            verify_s=result.verify_s * slower,
            prefill_s=result.prefill_s * slower,
            swap_s=result.swap_s * slower,
            total_s=took,
        )
