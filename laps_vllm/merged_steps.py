"""Steps of the engine, merged into one report to the core.

Merged, the rounds cost the core a fraction of what they cost one by one; the order of requests is as good
while the core sees the newest rounds a few steps late (decision 0032).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

from laps_sd.contract.ends import End
from scheduler_svc.core.events import Merged, Progress

__all__ = ["MergedSteps", "Step"]


class Step(NamedTuple):
    """Outcome of one step for one request."""

    request_id: str
    position: int
    """Output tokens before the step."""
    tokens: int
    """New output tokens, after the cut at an end."""
    drafted: int
    """Draft tokens that were verified."""
    accepted: int
    """Those of them that were accepted, before the cut at an end."""
    prefilled: int
    """Context tokens computed, without draft tokens and the last token."""
    end: End | None


@final
class _Sums:
    """Sums over the steps of one request."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.tokens = self.drafted = self.accepted = self.prefilled = 0
        self.rounds = self.drafts = self.squares = 0
        self.end: End | None = None


class MergedSteps:
    """Steps since the last report."""

    def __init__(self) -> None:
        self.count = 0
        self.decode_s = self.prefill_s = 0.0
        self._sums: dict[str, _Sums] = {}
        self._unfinished: set[str] = set()
        self._verified_always = True

    def can_take(self, steps: Sequence[Step]) -> bool:
        """Return whether a step can be merged with those before, by the rule of `RoundReported`."""
        if not self.count:
            return True
        return (
            self._verified_always
            and any(step.tokens for step in steps)
            and self._unfinished <= {step.request_id for step in steps}
        )

    def add(self, steps: Sequence[Step], *, decode_s: float, prefill_s: float) -> None:
        """Add a step."""
        self.count += 1
        self.decode_s += decode_s
        self.prefill_s += prefill_s
        all_sums, verified = self._sums, False
        for request_id, position, tokens, drafted, accepted, prefilled, end in steps:
            sums = all_sums.get(request_id)
            if sums is None:
                sums = all_sums[request_id] = _Sums(position)
                self._unfinished.add(request_id)
            if tokens:
                verified = True
                sums.tokens += tokens
                sums.rounds += 1
                sums.squares += tokens * tokens
            if drafted:
                sums.drafts += 1
                sums.drafted += drafted
                sums.accepted += accepted
            sums.prefilled += prefilled
            if end is not None:
                sums.end = end
                self._unfinished.discard(request_id)
        self._verified_always = self._verified_always and verified

    def progress(self, epochs: Mapping[str, int]) -> tuple[Progress, ...]:
        """Return the progress of all requests that took part, under their lease epochs; 0 without one."""
        return tuple(
            Progress(
                request_id,
                epochs.get(request_id, 0),
                sums.position,
                (0,) * sums.tokens,
                sums.drafted,
                sums.accepted,
                sums.prefilled,
                sums.end,
                0,
                "",
                None,
                Merged(sums.rounds, sums.drafts, sums.squares),
                sums.end is None,  # there is no record, so no command has to write the tokens
            )
            for request_id, sums in self._sums.items()
        )
