"""The runner of an engine: it runs rounds on the newest assignment, and never waits for the scheduler.

It owns the engine and runs in a thread or process of its own. Messages come from an inbox; outcomes go to the
given `deliver`. A *turn* is: take in the messages that arrived, choose, make room, run one round, deliver its
report. With an engine whose results are one round late (`Capacity.lag`) the report is that of the round
before, and the choice is made on what was known then.

Invariants
  * Reports are numbered 1, 2, 3 …; a round is delivered exactly once (offering it again is the link's work).
  * Only requests run that the newest assignment lists under the lease epoch their specification came with.
  * Every held request has its specification; an ended request stays held until its report is acknowledged, or
    it is dropped.
  * A request with `max_unacknowledged_tokens` tokens that no leader acknowledged pauses; others continue.
  * The tokens of a request do not depend on any of this; the engine guarantees that.

Requests enter by a specification and leave by an acknowledged end or by a drop. An error of one request is
its end, see `failures.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from laps_sd.service.log import get_logger
from worker_svc.engine.interface import Engine, RoundResult
from worker_svc.runner.choice import Chooser
from worker_svc.runner.failures import GuardedRounds
from worker_svc.runner.held import HeldRequests
from worker_svc.runner.messages import (
    Acknowledged,
    Assigned,
    Dropped,
    HeldRequested,
    Inbox,
    Learnt,
    Listed,
    Message,
    Missing,
    Outcome,
    Round,
    Specified,
    Taught,
)

__all__ = ["Runner"]

log = get_logger(__name__)

SHARE_S = 60.0
"""Least seconds between two times that what the probe has learnt goes out (our choice)."""

MOST_PROMPT_LOGPROBS = 2**19
"""Log probabilities of prompts in a report of several requests (our choice): about 5 MB."""


class Runner:
    """The runner of an engine; see the module's docstring. Tests may call `turn` instead of `run`."""

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        deliver: Callable[[Outcome], None],
        *,
        max_unacknowledged_tokens: int = 256,
        max_unacknowledged_reports: int = 1024,
        share_s: float = SHARE_S,
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._deliver = deliver
        self._max_reports = max_unacknowledged_reports
        self._requests = HeldRequests(engine, max_unacknowledged_tokens=max_unacknowledged_tokens)
        self._chooser = Chooser(engine, self._requests)
        self._rounds = GuardedRounds(engine, self._requests, self._report_part)
        self._lag = engine.capacity.lag
        self._cache_changes = engine.cache_changes
        self._share_s = share_s
        self._shared_requests = 0
        """Requests from which the probe had learnt when that last went out, or came in."""
        self._share_due_s = time.perf_counter() + share_s
        self._in_flight = False
        """True while the engine has begun a round whose outcome it has not returned."""
        self._round_ended_s: float | None = None
        self._waited_s = 0.0

    @property
    def holds_nothing(self) -> bool:
        """True if no request is held."""
        return not self._requests.by_id

    def run(self) -> None:
        """Run turns until the inbox is stopped. Raises the errors of a failed engine and of the inbox."""
        while not self._inbox.stopped:
            if not self.turn():
                began_s = time.perf_counter()
                self._inbox.wait(holds_nothing=self.holds_nothing)
                self._waited_s += time.perf_counter() - began_s

    def turn(self) -> bool:
        """Take in the messages that arrived and run at most one round.

        Returns False if nothing can run until a message arrives.
        """
        for message in self._inbox.take():
            self._handle(message)
        if self._inbox.stopped:
            return True
        before = self._requests.running
        run, swap_out_s = self._choose()
        if not run and not self._in_flight:
            # A drop may have freed blocks, and no round follows whose report would contain that.
            free = self._engine.free_blocks
            if self._requests.must_report or free != self._chooser.free_blocks:
                self._report(RoundResult((), free_target_blocks=free[0], free_draft_blocks=free[1]))
            return False
        started_s = time.perf_counter()
        run, result = self._rounds.run(run)
        if result is None:  # one of them failed; the next turn decides without it
            return True
        idle_s = (
            0.0 if self._round_ended_s is None else max(0.0, started_s - self._round_ended_s - swap_out_s)
        )
        self._round_ended_s = time.perf_counter()
        held = self._requests.by_id
        preempted = 0
        if run:
            self._chooser.round_ran()
            if before is not run:
                now = set(run)
                preempted = sum([name not in now and name in held for name in before])
            self._requests.running = run
        self._in_flight = bool(self._lag and run)
        if self._lag and not result.requests and not self._requests.must_report:
            return True
        self._report(result, swap_out_s, idle_s, preempted)
        if self._round_ended_s >= self._share_due_s:
            self._share(self._round_ended_s)
        return True

    def _share(self, now_s: float) -> None:
        """Deliver what the probe has learnt, if that is more than at the last time."""
        probe = self._engine.length_probe
        if probe is not None and probe.requests > self._shared_requests:
            self._shared_requests = probe.requests
            self._share_due_s = now_s + self._share_s
            self._deliver(Learnt(probe.learnt()))

    def _choose(self) -> tuple[tuple[str, ...], float]:
        """Return the requests to run now, and the seconds spent on making room for them."""
        if self._requests.unacknowledged_reports >= self._max_reports:
            return (), 0.0
        return self._chooser.choose(self._rounds.slots)

    def _handle(self, message: Message) -> None:
        match message:
            case Acknowledged(number):
                self._requests.acknowledge(number)
            case Assigned(entries):
                self._assign(entries)
            case Specified(spec, lease_epoch):
                self._requests.specify(spec, lease_epoch)
            case Dropped(requests):
                for request_id, lease_epoch in requests:
                    self._requests.drop(request_id, lease_epoch)
            case HeldRequested():
                self._deliver(self._requests.now())
            case Taught(learnt):
                probe = self._engine.length_probe
                if probe is not None and probe.adopt(learnt):
                    self._shared_requests = learnt.requests
                    log.info("the probe of output lengths continues another's", requests=learnt.requests)

    def _assign(self, entries: tuple[Listed, ...]) -> None:
        self._chooser.assignment = entries
        self._requests.settled = False
        missing = [entry.request_id for entry in entries if self._requests.lacks(entry)]
        if missing:
            self._deliver(Missing(tuple(missing)))

    def _report_part(self, result: RoundResult) -> None:
        """Report a round run by the search for the failing request; it counts like any other."""
        self._chooser.round_ran()
        self._report(result)
        self._round_ended_s = time.perf_counter()

    def _report(
        self,
        result: RoundResult,
        swap_out_s: float = 0.0,
        idle_s: float = 0.0,
        preempted: int = 0,
    ) -> None:
        """Record the outcome of a round and deliver its report, or several if one would be too large to be sent."""
        for part in parts(result):
            self._report_one(part, swap_out_s, idle_s, preempted)
            swap_out_s, idle_s, preempted = 0.0, 0.0, 0

    def _report_one(self, result: RoundResult, swap_out_s: float, idle_s: float, preempted: int) -> None:
        progress = self._requests.apply(result)
        waited_s = 0.0
        if result.requests:  # the next round reports what was waited before a report without one
            waited_s, self._waited_s = self._waited_s, 0.0
        self._chooser.free_blocks = (result.free_target_blocks, result.free_draft_blocks)
        report = Round(
            progress.number,
            result,
            progress.steps,
            progress.residency,
            swap_out_s,
            idle_s,
            waited_s,
            preempted,
            self._rounds.take_out_of_memory(),
            self._cache_changes(),
        )
        self._deliver(report)


def parts(result: RoundResult) -> Iterator[RoundResult]:
    """Yield a round as rounds of some of its requests each, with their share of the times, so that none has more
    than MOST_PROMPT_LOGPROBS.
    """
    begin, room = 0, MOST_PROMPT_LOGPROBS
    for at, step in enumerate(result.requests):
        if (found := step.prompt_logprobs) is None:
            continue
        count = len(found.logprobs) + len(found.alternative_logprobs)
        if count > room and at > begin:
            yield _part(result, begin, at)
            begin, room = at, MOST_PROMPT_LOGPROBS
        room -= count
    yield _part(result, begin, len(result.requests)) if begin else result


def _part(result: RoundResult, begin: int, end: int) -> RoundResult:
    share = (end - begin) / len(result.requests)
    return replace(
        result,
        requests=result.requests[begin:end],
        draft_s=result.draft_s * share,
        verify_s=result.verify_s * share,
        prefill_s=result.prefill_s * share,
        swap_s=result.swap_s * share,
        total_s=result.total_s * share,
    )
