"""vLLM's scheduler for rounds: a step runs the requests that a round names, and keeps what it observed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from laps_vllm.pausing import Pausing, Row

__all__ = ["RoundScheduler"]


class RoundScheduler(Pausing, Scheduler):
    """Runs what `plan` named, best first, with at most so many draft tokens each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: dict[str, Row] = {}
        """The outcome of the last step by request; a request that it did not reach is not in it."""
        self.found_cached: dict[str, int] = {}
        """Context tokens that the prefix cache had for requests that began in the last step."""
        self._run: Sequence[Request] = ()
        self._draft_caps: Mapping[str, int] = {}

    def plan(self, run: Sequence[Request], draft_caps: Mapping[str, int]) -> None:
        """Name the requests of the next step, and the most draft tokens to verify of each."""
        self._run, self._draft_caps = run, draft_caps
        self.rows, self.found_cached = {}, {}

    def residents_over(self, run: Sequence[Request]) -> int:
        """Return by how many requests the places of the model runner are too few for this run."""
        names = {request.request_id for request in self.running}
        names.update(request.request_id for request in run)
        return len(names) - self.max_num_running_reqs

    # Of `Pausing`.

    def select(self) -> list[Request]:
        """Return the planned requests."""
        return [request for request in self._run if not request.is_finished()]

    def draft_cap(self, request: Request) -> int | None:
        """Return the planned limit."""
        return self._draft_caps.get(request.request_id)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule the planned requests, and note what the prefix cache had."""
        fresh = [request for request in self._run if not request.num_computed_tokens]
        output = super().schedule(*args, **kwargs)
        counts = output.num_scheduled_tokens
        for request in fresh:
            if request.request_id in counts:
                self.found_cached[request.request_id] = (
                    request.num_computed_tokens - counts[request.request_id]
                )
        return output

    def observe(self, rows: list[Row], scheduler_output: Any) -> None:
        """Keep the rows of the step."""
        self.rows = {row.request.request_id: row for row in rows}
