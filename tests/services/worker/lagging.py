"""An engine whose results are one round late, over one whose results are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from worker_svc.engine.interface import RoundResult, Specification, check_run
from worker_svc.fake.engine import FakeEngine


class LaggingEngine(FakeEngine):
    """The fake engine, with its results held back by a round, as `Capacity.lag` describes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"slots": 2, "max_length": 512, **options})
        self.begun: list[tuple[str, ...]] = []
        """The requests of each round."""
        self._late: RoundResult | None = None
        self._ended: set[str] = set()
        self._growth = self.capacity.max_draft_len + 1
        self.capacity = replace(self.capacity, lag=1, lookahead=self.capacity.lookahead + self._growth)

    def add(self, spec: Specification) -> None:
        super().add(spec)
        self._ended.discard(spec.request_id)

    def drop(self, request_id: str) -> None:
        super().drop(request_id)
        if self._late is not None:
            left = tuple(one for one in self._late.requests if one.request_id != request_id)
            self._late = replace(self._late, requests=left)

    def round(self, run: Sequence[str]) -> RoundResult:
        check_run(run, self.known(), self._returned(), self.capacity.slots)
        late, self._late = self._late, None
        if run:
            self.begun.append(tuple(run))
            self._late = super().round([name for name in run if name not in self._ended])
            self._ended |= {one.request_id for one in self._late.requests if one.finish is not None}
        target, draft = self.free_blocks
        return replace(late or RoundResult(()), free_target_blocks=target, free_draft_blocks=draft)

    def _returned(self) -> set[str]:
        """Return the requests whose ends were returned."""
        waiting = self._late.requests if self._late is not None else ()
        return self._ended - {one.request_id for one in waiting}
