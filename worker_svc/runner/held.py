"""The requests that a worker holds: from a specification to an acknowledged end, or to a drop."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from laps_sd.contract.choose import Residency
from laps_sd.contract.ends import End
from worker_svc.engine.interface import Engine, RequestRound, RoundResult, Specification
from worker_svc.runner.messages import HeldNow, HeldRequest, Listed, ResidencyChange

__all__ = ["Held", "HeldRequests", "Progress"]


@dataclass(slots=True, eq=False)
class Held:
    """A request whose specification this worker has."""

    spec: Specification
    lease_epoch: int
    output: list[int]
    acknowledged: int
    """Number of leading `output` tokens that are acknowledged."""
    residency: Residency = Residency.NONE
    ended: bool = False
    predicted_tokens: float | None = None
    """Output tokens in all, by the newest prediction of the engine."""

    @property
    def predicted_remaining(self) -> float | None:
        """Return what remains of the newest prediction, 1 token at least."""
        return None if self.predicted_tokens is None else max(1.0, self.predicted_tokens - len(self.output))


@dataclass(slots=True)
class _Unacknowledged:
    """The effect of acknowledging one report."""

    number: int
    reached: list[tuple[Held, int, bool]] = field(default_factory=list)
    """(request, output tokens after the report, whether it ended with it)"""


@dataclass(slots=True)
class Progress:
    """The content of one report about single requests."""

    number: int
    steps: list[tuple[int, RequestRound]]
    """(lease epoch, outcome) of the requests of the round, and of those that ended outside of one."""
    residency: list[ResidencyChange]


class HeldRequests:
    """The held requests and what is still to be reported of them. Used by the thread of the engine only."""

    def __init__(self, engine: Engine, *, max_unacknowledged_tokens: int) -> None:
        self.by_id: dict[str, Held] = {}
        self.running: tuple[str, ...] = ()
        """Requests of the last round that are still held and have not ended."""
        self.settled = False
        """True while nothing but the lengths of the running requests has changed since the last choice."""
        self._engine = engine
        self._max_tokens = max_unacknowledged_tokens
        self._unacknowledged: deque[_Unacknowledged] = deque()
        self._number = 0
        # Contents of the next report besides its round.
        self._ends: list[tuple[Held, RequestRound]] = []
        self._changes: list[ResidencyChange] = []

    @property
    def unacknowledged_reports(self) -> int:
        """Number of reports that are not acknowledged."""
        return len(self._unacknowledged)

    @property
    def must_report(self) -> bool:
        """True if something happened outside of a round that no report contains yet."""
        return bool(self._ends or self._changes)

    def at_bound(self, held: Held) -> bool:
        """Return whether the request pauses until a leader acknowledges some of its tokens."""
        return len(held.output) - held.acknowledged >= self._max_tokens

    def lacks(self, entry: Listed) -> bool:
        """Return whether the specification under the lease of this entry is missing."""
        held = self.by_id.get(entry.request_id)
        return held is None or held.lease_epoch < entry.lease_epoch

    def specify(self, spec: Specification, lease_epoch: int) -> None:
        """Hold a request, or an already held one under a newer lease."""
        held = self.by_id.get(spec.request_id)
        if held is not None:
            if lease_epoch <= held.lease_epoch:
                return  # the lease that is held already, or one that was overtaken
            if not held.ended and tuple(held.output) == spec.committed_ids:
                held.lease_epoch = lease_epoch
                held.acknowledged = len(held.output)
                self.settled = False
                return
            # Its tokens beyond the record's were reported under a lease that has ended: they are never
            # committed.
            self._forget(held)
        held = Held(spec, lease_epoch, list(spec.committed_ids), len(spec.committed_ids))
        self.by_id[spec.request_id] = held
        self.settled = False
        if len(spec.committed_ids) >= spec.max_tokens > 0:
            self._end(held, End.LENGTH)
            return
        try:
            self._engine.add(spec)
        except Exception as error:
            self.fail(spec.request_id, str(error) or type(error).__name__)

    def drop(self, request_id: str, lease_epoch: int) -> None:
        """Forget a request if it is held under this lease epoch or an older one."""
        held = self.by_id.get(request_id)
        if held is not None and held.lease_epoch <= lease_epoch:
            self._forget(held)

    def acknowledge(self, number: int) -> None:
        """Record that a leader has the report of this number and all before it."""
        while self._unacknowledged and self._unacknowledged[0].number <= number:
            for held, reached, ended in self._unacknowledged.popleft().reached:
                if self.at_bound(held):
                    self.settled = False  # it may run again
                held.acknowledged = max(held.acknowledged, reached)
                if ended and self.by_id.get(held.spec.request_id) is held:
                    self._forget(held)

    def fail(self, request_id: str, error: str) -> None:
        """End a request outside of a round with an error; the next report contains it."""
        self._end(self.by_id[request_id], End.ERROR, error)

    def _end(self, held: Held, finish: End, error: str | None = None) -> None:
        held.ended = True
        step = RequestRound(held.spec.request_id, len(held.output), (), 0, 0, finish=finish, error=error)
        self._ends.append((held, step))

    def _forget(self, held: Held) -> None:
        request_id = held.spec.request_id
        self._engine.drop(request_id)
        del self.by_id[request_id]
        self.running = tuple([name for name in self.running if name != request_id])
        self.settled = False

    def push_out(self, held: Held) -> None:
        """Take the KV of a request off the device: to the host if that has room."""
        request_id = held.spec.request_id
        if not self._engine.swap_out(request_id):
            self._engine.evict(request_id)
        self._note_residency(held)

    def _note_residency(self, held: Held) -> None:
        residency = self._engine.status(held.spec.request_id).residency
        if residency is not held.residency:
            held.residency = residency
            self._changes.append(ResidencyChange(held.spec.request_id, held.lease_epoch, residency))

    def apply(self, result: RoundResult) -> Progress:
        """Record the outcome of a round, and return what the next report contains of it."""
        self._number += 1
        steps: list[tuple[int, RequestRound]] = []
        reached: list[tuple[Held, int, bool]] = []
        any_ended = False
        for step in result.requests:
            held = self.by_id[step.request_id]
            held.output.extend(step.tokens)
            if step.predicted_remaining_tokens is not None:
                held.predicted_tokens = len(held.output) + step.predicted_remaining_tokens
            ended = step.finish is not None
            if ended:
                held.ended = any_ended = True
                held.residency = Residency.NONE
            elif held.residency is not Residency.DEVICE:
                self._note_residency(held)
            # A request that waits for blocks may find what was computed.
            if step.prefilled or self.at_bound(held):
                self.settled = False
            steps.append((held.lease_epoch, step))
            reached.append((held, len(held.output), ended))
        if any_ended:
            self.settled = False
            self.running = tuple([name for name in self.running if not self.by_id[name].ended])
        later = self._ends_after(result) if self._ends else []
        for held, step in self._ends:
            steps.append((held.lease_epoch, step))
            reached.append((held, len(held.output), True))
        self._unacknowledged.append(_Unacknowledged(self._number, reached))
        progress = Progress(self._number, steps, self._changes)
        self._ends, self._changes = later, []
        return progress

    def _ends_after(self, result: RoundResult) -> list[tuple[Held, RequestRound]]:
        """Take out the ends outside of a round of requests that were in flight then, and are in this result: a
        report names a request once. Return them for the next report, but for those that ended by themselves.
        """
        finishes = {step.request_id: step.finish for step in result.requests}
        now, later = [], []
        for held, end in self._ends:
            if end.request_id not in finishes:
                now.append((held, end))
            elif finishes[end.request_id] is None:
                later.append((held, end._replace(position=len(held.output))))
        self._ends = now
        return later

    def now(self) -> HeldNow:
        """Return all that a hello lists: held requests, and what is cached."""
        return HeldNow(
            tuple(
                HeldRequest(
                    held.spec,
                    held.lease_epoch,
                    held.residency,
                    tuple(held.output),
                    held.acknowledged,
                    held.predicted_remaining,
                )
                for held in self.by_id.values()
            ),
            self._number,
            self._engine.cached_blocks(),
        )
