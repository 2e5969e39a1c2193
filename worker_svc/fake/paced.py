"""An engine with a least duration of rounds, for measurements on a machine whose speed varies."""

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
    prefill_token_s: float = 0.0,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Engine:
    """Return `engine` with rounds that take at least `round_s` seconds, and `prefill_token_s` more for each context
    token that they compute.

    The rest of that time is slept, and added to the phases of the round in proportion, so that the costs
    measured by a scheduler are as steady as the rounds are. The tokens are the engine's own. A round that
    takes longer by itself is not changed.
    """
    return cast(Engine, _Paced(engine, round_s, prefill_token_s, clock, sleep))


class _Paced:
    def __init__(
        self,
        engine: Engine,
        round_s: float,
        prefill_token_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._engine = engine
        self._round_s = round_s
        self._prefill_token_s = prefill_token_s
        self._clock = clock
        self._sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def round(self, run: Sequence[str]) -> RoundResult:
        """Run a round of the engine, and then sleep for the rest of the time."""
        began = self._clock()
        result = self._engine.round(run)
        floor_s = self._prefill_token_s * sum(request.prefilled for request in result.requests)
        left = self._round_s + floor_s - (self._clock() - began)
        if left <= 0:
            return result
        self._sleep(left)
        took = self._clock() - began
        # The floor of the prefill is the prefill's, and the rest of the time is shared in proportion.
        paid_s = floor_s and result.prefill_s
        slower = (took - floor_s) / (result.total_s - paid_s) if result.total_s > paid_s else 1.0
        return dataclasses.replace(
            result,
            draft_s=result.draft_s * slower,
            verify_s=result.verify_s * slower,
            prefill_s=floor_s or result.prefill_s * slower,
            swap_s=result.swap_s * slower,
            total_s=took,
        )
