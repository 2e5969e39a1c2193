"""The scheduling core and `choose` for one engine in the same process: no network, no record.

The caller reports arrivals, ends and steps, and gets the requests of each step. One step of the engine is one
round of the only worker that the core knows. With many slots, or where all requests fit in a step, the core
receives steps merged (`MergedSteps`), and arrivals and ends with them; at once where a place is free. A choice
is repeated while nothing that it depends on has changed. Why: docs/decisions/0032.

Invariants
  * Standard library only, and no clock: equal calls at equal times give equal choices.
  * Whenever the core decides, it has all steps that are over.
  * Residency that the core believes is corrected with each report, so an eviction that the engine decided
    itself is known to the core with the next report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from laps_sd.contract.choose import (
    NEW_CLOCK,
    Candidate,
    Choice,
    Residency,
    SharedBlocks,
    WorkerState,
    choose,
)
from laps_sd.contract.ends import End
from laps_vllm.merged_steps import MergedSteps, Step
from scheduler_svc.core.commands import Assign, AssignEntry, Drop
from scheduler_svc.core.estimates.errors import Judged
from scheduler_svc.core.events import (
    Arrived,
    EndRequested,
    Event,
    RequestFacts,
    ResidencyChange,
    RoundReported,
    WorkerFacts,
    WorkerUp,
)
from scheduler_svc.core.scheduler import Scheduler

__all__ = ["MOST_REPORT_STEPS", "OneWorker", "RequestNow"]

MOST_REPORT_STEPS = 4
"""Most steps in one report to the core (decision 0032). Our choice, like the next one."""
ROWS_PER_STEP = 8
"""Slots for each step in a report: small steps cost little, and are reported one by one."""


class RequestNow(NamedTuple):
    """State of a request at a step boundary, as the engine knows it."""

    tokens: int
    """Context length: prompt and outputs."""
    blocks: int
    """KV blocks that it holds on the device."""
    shared: tuple[SharedBlocks, ...] = ()
    """Those of these that other requests hold as well."""


class OneWorker:
    """The core with one worker; see the top of the file. Not thread-safe."""

    def __init__(self, core: Scheduler, facts: WorkerFacts, *, growth_tokens: int) -> None:
        """`growth_tokens`: most tokens that a request can grow in one step, as the engine reserves KV."""
        self.core = core
        self.facts = facts
        self.ran: frozenset[str] = frozenset()
        """Requests of the newest choice, or those that the engine runs in their place."""
        self._ran_before: frozenset[str] = frozenset()
        """Those of the choice before."""
        self.paused = 0
        """Requests paused so far: in one choice, unfinished, and not in the next."""
        self.judged: list[Judged] = []
        """Estimates of requests that have ended, judged since the caller cleared this."""
        self._growth_tokens = growth_tokens
        self._blocks_per_step = -(-growth_tokens // facts.block_size)
        """Most KV blocks that a request takes in one step."""
        self._report_steps = max(1, min(MOST_REPORT_STEPS, facts.slots // ROWS_PER_STEP))
        self._events: list[Event] = [WorkerUp(facts, ())]
        self._entries: tuple[AssignEntry, ...] = ()
        self._reserved: set[str] = set()
        """Those of the entries for which a place is set aside."""
        self._epochs: dict[str, int] = {}
        self._unfinished: set[str] = set()
        self._unreported = MergedSteps()
        self._on_device: set[str] = set()
        """Requests whose KV the core believes to be on the device."""
        self._now_on_device: set[str] = set()
        """Those that hold KV, as of the newest step; and the free blocks then."""
        self._free_blocks = facts.target_blocks
        self._choice = Choice((), ())
        self._candidates: list[Candidate] = []
        """Those of the newest choice."""
        self._nothing_new = False
        """True while nothing that it depends on has changed since, except the sizes of requests."""
        self._plentiful = False
        """True if the states of requests need not be read in each step; see `_kv_is_plentiful`."""
        self._unread_steps = 0
        """Steps that were chosen since these states were read."""
        self._latched = False
        self._clock = NEW_CLOCK

    def arrived(self, facts: RequestFacts) -> None:
        """Take in a new request. It may have the id of one that has ended."""
        if facts.request_id in self._epochs:
            self._report()  # its end comes first
        self._events.append(Arrived(facts))
        self._unfinished.add(facts.request_id)

    def ended(self, request_id: str, end: End) -> None:
        """Take in an end that no step brought: a cancellation, a stop string. The core learns from an end of
        the request's own."""
        self._report()
        self._events.append(EndRequested(request_id, end, ""))
        self._epochs.pop(request_id, None)
        self._unfinished.discard(request_id)
        self._nothing_new = False

    def choose(self, now_s: float, state: Callable[[str], RequestNow | None]) -> Choice:
        """Return the requests of the next step and those whose KV has to go.

        `state` returns None for a request that cannot run now (it has ended, or waits for something else). While
        KV is plentiful it is not called in each step.
        """
        if self._is_due():
            self.decide(now_s)
        if self._plentiful and self._unread_steps < self._report_steps:
            self._unread_steps += 1
            if self._nothing_new and (len(self.ran) == self.facts.slots or not self._events):
                return self._choice
            candidates = self._unfinished_candidates()
        else:
            candidates = self._read(state)
        if len(candidates) < min(self.facts.slots, len(self._unfinished)):
            # The core may have others to list, once it knows of ends and arrivals.
            self.decide(now_s)
            candidates = self._read(state)
        return self._chosen(candidates, state)

    def _is_due(self) -> bool:
        """Return whether the core decides before the next choice. Where all requests fit in a step, no rank
        decides who runs, so newer ranks change nothing.
        """
        if len(self._unfinished) <= self.facts.slots:
            return bool(self._events) or self._unreported.count >= MOST_REPORT_STEPS
        return self._report_steps == 1 or self._unreported.count >= self._report_steps

    def decide(self, now_s: float) -> None:
        """Let the core take in all that has happened, and decide."""
        self._report()
        if not self._events:
            return
        events, self._events = self._events, []
        for command in self.core.step(now_s, events):
            if isinstance(command, Assign):
                self._entries = command.entries
                self._reserved = {entry.request_id for entry in command.entries if entry.reserved}
                self._plentiful = False
                for entry in command.entries:
                    self._epochs[entry.request_id] = entry.lease_epoch
            elif isinstance(command, Drop):
                # They are off the list, and a new one need not follow. They keep their KV here, but the core
                # believes that they have none: the next report corrects that.
                dropped = {name for name, _ in command.requests}
                self._entries = tuple(entry for entry in self._entries if entry.request_id not in dropped)
                self._on_device -= dropped
                self._plentiful = self._nothing_new = False
        # The core keeps those of one step, and there may be several between two steps of the engine.
        self.judged += self.core.estimate_errors.latest

    def _read(self, state: Callable[[str], RequestNow | None]) -> list[Candidate]:
        """Return the listed requests that can run, by their present states."""
        self._unread_steps = 0
        return [
            _candidate(entry, now, entry.request_id in self.ran)
            for entry in self._entries
            if (now := state(entry.request_id)) is not None
        ]

    def _unfinished_candidates(self) -> list[Candidate]:
        """Return the candidates of the newest choice that have not ended, by the states that they had."""
        return [
            one if one.running == (one.request_id in self.ran) else _with_running(one, not one.running)
            for one in self._candidates
            if one.request_id in self._unfinished
        ]

    def _chosen(self, candidates: list[Candidate], state: Callable[[str], RequestNow | None]) -> Choice:
        facts = self.facts
        unread_blocks = self._unread_steps * facts.slots * self._blocks_per_step
        choice = choose(
            candidates,
            WorkerState(
                slots=facts.slots,
                block_size=facts.block_size,
                target_blocks=facts.target_blocks - unread_blocks,
                draft_blocks=0,
                max_growth_tokens=self._growth_tokens,
                kv_latched=self._latched,
                reserve_clock=self._clock,
            ),
        )
        self._choice, self._candidates, self._nothing_new = choice, candidates, True
        self._latched, self._clock = choice.kv_latched, choice.reserve_clock
        run = frozenset(choice.run)
        self.paused += sum([state(name) is not None for name in self.ran - run])
        self._ran_before, self.ran = self.ran, run
        if not self._unread_steps:
            self._plentiful = self._kv_is_plentiful(candidates, choice)
        return choice

    def _kv_is_plentiful(self, candidates: list[Candidate], choice: Choice) -> bool:
        """Return whether only ranks decide until the next assignment, so that the states of requests need not
        be read in each step: all that are listed can run, and whatever they do in these steps, blocks remain.
        """
        listed = sum([entry.request_id in self._unfinished for entry in self._entries])
        if choice.kv_latched or choice.evict or len(candidates) < listed or self.facts.slots == 1:
            return False
        growth, size = self._growth_tokens, self.facts.block_size
        spare = self._free_blocks
        for one in candidates:
            spare -= max(0, -(-(one.tokens - 1 + growth) // size) - one.target_blocks)
        # One step may be on the device already, with blocks that the newest report does not count.
        return spare >= (self._report_steps + 1) * self.facts.slots * self._blocks_per_step

    def ran_instead(self, run: Sequence[str]) -> None:
        """Take in that the engine runs these requests, and not those of the newest choice: some cannot run
        together."""
        now = frozenset(run)
        self.paused += len(self._ran_before & (self.ran - now)) - len(self._ran_before & (now - self.ran))
        self.ran = now

    def is_reserved(self, request_id: str) -> bool:
        """Return whether the core has set a place aside for the request."""
        return request_id in self._reserved

    def ranked(self, state: Callable[[str], RequestNow | None]) -> list[str]:
        """Return the requests of the newest assignment that can run, best first."""
        return [entry.request_id for entry in self._entries if state(entry.request_id) is not None]

    def report(
        self,
        steps: Sequence[Step],
        on_device: set[str],
        *,
        decode_s: float,
        prefill_s: float,
        free_blocks: int,
    ) -> None:
        """Take in a step that is over. `on_device`: all unfinished requests that hold KV now."""
        if not self._unreported.can_take(steps):
            self._report()
        self._unreported.add(steps, decode_s=decode_s, prefill_s=prefill_s)
        self._now_on_device, self._free_blocks = on_device, free_blocks
        for step in steps:
            if step.end is not None:
                self._unfinished.discard(step.request_id)
                self._nothing_new = False

    def _report(self) -> None:
        """Report the steps since the last report."""
        merged = self._unreported
        if not merged.count:
            return
        self._unreported = MergedSteps()
        progress = merged.progress(self._epochs)
        for one in progress:
            if one.end is not None:
                self._epochs.pop(one.request_id, None)
        before, now = self._on_device, self._now_on_device
        moved = [(name, Residency.DEVICE) for name in now - before]
        moved += [(name, Residency.NONE) for name in before - now]
        changes = tuple(
            ResidencyChange(name, self._epochs[name], residency)
            for name, residency in sorted(moved)
            if name in self._epochs
        )
        self._on_device = set(now)
        self._events.append(
            RoundReported(
                self.facts.worker_id,
                progress,
                changes,
                draft_s=0.0,
                verify_s=merged.decode_s,
                prefill_s=merged.prefill_s,
                swap_s=0.0,
                idle_s=0.0,
                total_s=merged.decode_s + merged.prefill_s,
                free_target_blocks=self._free_blocks,
                free_draft_blocks=self._free_blocks,
                rounds=merged.count,
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
        now.shared,
    )


def _with_running(one: Candidate, running: bool) -> Candidate:
    """Return a candidate that runs now, or does not any more. One that runs has its KV on the device."""
    return Candidate(
        one.request_id,
        one.rank_class,
        one.index_s,
        one.resume_cost_s,
        one.reserved,
        one.pinned,
        running,
        Residency.DEVICE if running else one.residency,
        one.tokens,
        one.target_blocks,
        one.draft_blocks,
        one.shared,
    )
