"""The scheduling core and `choose` for one engine in the same process: no network, no record.

The caller reports arrivals, ends and steps, and asks for the requests of each step. One step of the engine is
one round of the only worker that the core knows.

Invariants
  * Standard library only, and no clock: equal calls at equal times give equal choices.
  * Residency that the core believes is corrected with each report, so an eviction that the engine decided
    itself is known to the core one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from laps_sd.contract.acceptance import by_position
from laps_sd.contract.choose import NEW_CLOCK, Candidate, Choice, Residency, WorkerState, choose
from laps_sd.contract.ends import End
from scheduler_svc.core.commands import Assign, AssignEntry, Drop
from scheduler_svc.core.events import (
    Arrived,
    EndRequested,
    Event,
    Progress,
    RequestFacts,
    ResidencyChange,
    RoundReported,
    WorkerFacts,
    WorkerUp,
)
from scheduler_svc.core.scheduler import Scheduler

__all__ = ["NO_LEASE", "OneWorker", "RequestNow", "Step"]

NO_LEASE = 0
"""Lease epoch of a request that the core has not assigned yet; its reports change nothing there."""


class RequestNow(NamedTuple):
    """State of a request at a step boundary, as the engine knows it."""

    tokens: int
    """Context length: prompt and outputs."""
    blocks: int
    """KV blocks that it holds on the device."""


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


class OneWorker:
    """The core with one worker; see the top of the file. Not thread-safe."""

    def __init__(self, core: Scheduler, facts: WorkerFacts, *, growth_tokens: int) -> None:
        """`growth_tokens`: most tokens that a request can grow in one step, as the engine reserves KV."""
        self.core = core
        self.facts = facts
        self.ran: frozenset[str] = frozenset()
        """Requests of the newest choice."""
        self.paused = 0
        """Requests paused so far: in one choice, unfinished, and not in the next."""
        self._growth_tokens = growth_tokens
        self._events: list[Event] = [WorkerUp(facts, ())]
        self._entries: tuple[AssignEntry, ...] = ()
        self._epochs: dict[str, int] = {}
        self._candidates: dict[str, tuple[AssignEntry, RequestNow, bool, Candidate]] = {}
        """The newest candidates by request, and what they were made from."""
        self._on_device: set[str] = set()
        """Requests whose KV the core believes to be on the device."""
        self._latched = False
        self._clock = NEW_CLOCK

    def arrived(self, facts: RequestFacts) -> None:
        """Take in a new request."""
        self._events.append(Arrived(facts))

    def ended(self, request_id: str, end: End) -> None:
        """Take in an end that no step brought: a cancellation, a stop string."""
        self._events.append(EndRequested(request_id, end, ""))
        self._forget(request_id)

    def choose(self, now_s: float, state: Callable[[str], RequestNow | None]) -> Choice:
        """Return the requests of the next step and those whose KV has to go.

        `state` returns None for a request that cannot run now (it has ended, or waits for something else), and
        the same object as before for one whose state is the same: its candidate is then used again.
        """
        events, self._events = self._events, []
        for command in self.core.step(now_s, events):
            if isinstance(command, Assign):
                self._entries = command.entries
                for entry in command.entries:
                    self._epochs[entry.request_id] = entry.lease_epoch
            elif isinstance(command, Drop):
                # It keeps its KV here, but the core believes that it has none: the next report says so.
                self._on_device.difference_update(name for name, _ in command.requests)
        candidates = []
        ran, made = self.ran, self._candidates
        for entry in self._entries:
            name = entry.request_id
            now = state(name)
            if now is None:
                continue
            before = made.get(name)
            if before is not None and before[0] is entry and before[1] is now and before[2] == (name in ran):
                candidates.append(before[3])
                continue
            candidate = _candidate(entry, now, name in ran)
            made[name] = (entry, now, name in ran, candidate)
            candidates.append(candidate)
        facts = self.facts
        choice = choose(
            candidates,
            WorkerState(
                slots=facts.slots,
                block_size=facts.block_size,
                target_blocks=facts.target_blocks,
                draft_blocks=0,
                max_growth_tokens=self._growth_tokens,
                kv_latched=self._latched,
                reserve_clock=self._clock,
            ),
        )
        self._latched, self._clock = choice.kv_latched, choice.reserve_clock
        run = frozenset(choice.run)
        self.paused += sum(state(name) is not None for name in self.ran - run)
        self.ran = run
        return choice

    def ranked(self, state: Callable[[str], RequestNow | None]) -> list[str]:
        """Return the requests of the newest assignment that can run, best first."""
        return [entry.request_id for entry in self._entries if state(entry.request_id) is not None]

    def _forget(self, request_id: str) -> None:
        self._epochs.pop(request_id, None)
        self._candidates.pop(request_id, None)

    def report(
        self,
        steps: Iterable[Step],
        on_device: set[str],
        *,
        decode_s: float,
        prefill_s: float,
        free_blocks: int,
    ) -> None:
        """Take in a step that is over. `on_device`: all unfinished requests that hold KV now."""
        progress = []
        for step in steps:
            progress.append(
                Progress(
                    step.request_id,
                    self._epochs.get(step.request_id, NO_LEASE),
                    step.position,
                    (0,) * step.tokens,
                    step.drafted,
                    step.accepted,
                    step.prefilled,
                    step.end,
                    0,
                    "",
                    *by_position(step.accepted, step.drafted),
                )
            )
            if step.end is not None:
                self._forget(step.request_id)
        moved = [(name, Residency.DEVICE) for name in on_device - self._on_device]
        moved += [(name, Residency.NONE) for name in self._on_device - on_device]
        changes = tuple(
            ResidencyChange(name, self._epochs[name], residency)
            for name, residency in sorted(moved)
            if name in self._epochs
        )
        self._on_device = set(on_device)
        total_s = decode_s + prefill_s
        self._events.append(
            RoundReported(
                self.facts.worker_id,
                tuple(progress),
                changes,
                0.0,
                decode_s,
                prefill_s,
                0.0,
                0.0,
                total_s,
                free_blocks,
                free_blocks,
            )
        )


def _candidate(entry: AssignEntry, now: RequestNow, ran: bool) -> Candidate:
    """Return an entry of the assignment joined with the state of its request."""
    return Candidate(
        entry.request_id,
        entry.rank_class,
        entry.index_s,
        entry.resume_cost_s,
        entry.reserved,
        entry.pinned,
        ran,
        Residency.DEVICE if now.blocks else Residency.NONE,
        now.tokens,
        now.blocks,
        0,
    )
