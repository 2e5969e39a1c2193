"""Times of the forwards of both models."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

DRAFT, VERIFY = "laps_sd draft", "laps_sd verify"


@dataclass
class Stopwatch:
    """Timer of the forwards of both models, by events where the device has them; it also
    counts their rows.
    """

    cuda: bool
    spans: list[tuple[str, int, Any, Any]] = field(default_factory=list)

    def watch(self, model: Any, name: str) -> None:
        """Record every later forward of this model."""
        from torch.profiler import record_function

        forward = model.forward

        def timed(ids: Any, plan: Any, logit_rows: Any, hidden: Any = None) -> Any:
            began = self._mark()
            with record_function(name):
                logits = forward(ids, plan, logit_rows, hidden)
            self.spans.append((name, plan.total - plan.padding, began, self._mark()))
            return logits

        model.forward = timed

    def take(self) -> list[tuple[str, int, float]]:
        """Return (name, rows, seconds) of every forward since the last call; the device has finished them."""
        spans, self.spans = self.spans, []
        return [
            (name, rows, began.elapsed_time(ended) / 1000 if self.cuda else ended - began)
            for name, rows, began, ended in spans
        ]

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
