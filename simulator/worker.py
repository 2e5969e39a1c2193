"""The worker's side of the scheduling contract in virtual time, without a model.

A virtual worker holds leased requests, chooses those of each round with `laps_sd.contract.choose` as a real
worker does (`worker_svc.runner.runner`), and returns the report of the round with the seconds that it takes.
It has no clock: its owner delivers assignments, drops and acknowledgements, and decides when each round
begins and when its report arrives.

Invariants
  * Only requests run that the newest assignment lists under the lease epoch that is held.
  * An ended request stays held until its end is acknowledged or it is dropped, and never runs again.
  * The KV of all held requests fits the pool; RuntimeError otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from laps_sd.contract.choose import NEW_CLOCK, Candidate, Choice, Residency, WorkerState, choose
from scheduler_svc.core.commands import AssignEntry
from scheduler_svc.core.events import Held, ResidencyChange, RoundReported, WorkerFacts
from simulator.held import HeldRequest
from simulator.jobs import Job
from simulator.machine import Machine


class Specification(NamedTuple):
    """A request as a worker receives it with its lease."""

    job: Job
    rounds: int
    """Rounds whose tokens are committed."""
    emitted: int
    """Committed output tokens, from which the worker continues."""


class Round(NamedTuple):
    """One round: its report, and totals over its requests."""

    report: RoundReported
    prefilled_tokens: int
    swapped_tokens: int
    """Context tokens moved between device and host, both ways."""


class VirtualWorker:
    """One worker: its assignment, its requests, and the state that `choose` carries from round to round."""

    def __init__(self, facts: WorkerFacts, machine: Machine) -> None:
        self.facts = facts
        self.machine = machine
        self.entries: tuple[AssignEntry, ...] = ()
        self.held: dict[str, HeldRequest] = {}
        self.ran: frozenset[str] = frozenset()
        """Requests of the last round."""
        self.busy = False
        """True from the start of a round until its report is delivered; set by the owner."""
        self.busy_s = 0.0
        """Seconds in rounds so far, the current round included."""
        self.rounds = 0
        self.evictions = 0
        self.free_blocks = facts.target_blocks
        self._latched = False
        self._reserve_clock = NEW_CLOCK

    def assign(
        self, entries: tuple[AssignEntry, ...], specification: Callable[[str], Specification | None]
    ) -> None:
        """Replace the assignment, and hold the requests that it newly leases.

        `specification` returns None for a request that has ended: the assignment was sent before its end was
        received.
        """
        self.entries = entries
        for entry in entries:
            held = self.held.get(entry.request_id)
            if held is not None and held.lease_epoch >= entry.lease_epoch:
                continue
            found = specification(entry.request_id)
            if found is None:
                continue
            if held is not None:
                self._resize(held, 0)
            self.held[entry.request_id] = HeldRequest(
                found.job, entry.lease_epoch, found.rounds, found.emitted
            )

    def drop(self, request_id: str, lease_epoch: int) -> None:
        """Forget a request, unless it has been leased here again since."""
        held = self.held.get(request_id)
        if held is not None and held.lease_epoch <= lease_epoch:
            self._resize(held, 0)
            del self.held[request_id]

    def acknowledge(self, report: RoundReported) -> None:
        """Forget the requests that ended with a report, since the core has received it."""
        for progress in report.progress:
            if progress.end is not None:
                self.drop(progress.request_id, progress.lease_epoch)

    def held_now(self) -> tuple[Held, ...]:
        """Return the requests that a hello reports."""
        return tuple(
            Held(request_id, held.lease_epoch, held.residency)
            for request_id, held in self.held.items()
            if not held.ended
        )

    def run_round(self) -> Round | None:
        """Choose, make room, and run one round. Return None if no request can run."""
        choice = self._choose()
        changes, swapped = self._evict(choice.evict)
        self.ran = frozenset(choice.run)
        if not choice.run:
            return None
        machine = self.machine
        progress = []
        context = prefilled = decoding = verified = 0
        budget = machine.prefill_chunk or 1 << 62
        for request_id in choice.run:
            held = self.held[request_id]
            tokens = held.job.prompt_tokens + held.emitted
            if held.residency is Residency.NONE:
                held.missing = tokens
            elif held.residency is Residency.HOST:
                swapped += tokens
            held.residency = Residency.DEVICE
            computed = min(held.missing, budget)
            held.missing -= computed
            budget -= computed
            prefilled += computed
            self._grow(held, tokens)
            if held.missing:
                progress.append(held.prefilled(computed))
                continue
            decoded = held.decoded(computed, machine.draft_len)
            progress.append(decoded)
            decoding += 1
            context += tokens
            verified += decoded.drafted + 1
            if held.ended:
                self._resize(held, 0)
        if self.free_blocks < 0:
            raise RuntimeError(f"{self.facts.worker_id} holds more KV than it has")
        decode_s = machine.decode_s(decoding, context, verified)
        prefill_s = machine.prefill_token_s * prefilled
        swap_s = machine.swap_token_s * swapped
        total_s = decode_s + prefill_s + swap_s
        self.busy_s += total_s
        self.rounds += 1
        report = RoundReported(
            worker_id=self.facts.worker_id,
            progress=tuple(progress),
            residency=changes,
            draft_s=machine.draft_s,
            verify_s=decode_s - machine.draft_s,
            prefill_s=prefill_s,
            swap_s=swap_s,
            idle_s=0.0,
            total_s=total_s,
            free_target_blocks=self.free_blocks,
            free_draft_blocks=self.free_blocks if self.facts.draft_blocks else 0,
        )
        return Round(report, prefilled, swapped)

    def _choose(self) -> Choice:
        facts, ran = self.facts, self.ran
        has_draft_pool = facts.draft_blocks > 0
        candidates = []
        for entry in self.entries:
            held = self.held.get(entry.request_id)
            if held is None or held.ended or held.lease_epoch != entry.lease_epoch:
                continue
            candidates.append(
                Candidate(
                    entry.request_id,
                    entry.rank_class,
                    entry.index_s,
                    entry.resume_cost_s,
                    entry.reserved,
                    entry.pinned,
                    entry.request_id in ran,
                    held.residency,
                    held.job.prompt_tokens + held.emitted,
                    held.blocks,
                    held.blocks if has_draft_pool else 0,
                )
            )
        choice = choose(
            candidates,
            WorkerState(
                slots=facts.slots,
                block_size=facts.block_size,
                target_blocks=facts.target_blocks,
                draft_blocks=facts.draft_blocks,
                max_growth_tokens=facts.max_draft_len + 1,
                kv_latched=self._latched,
                reserve_clock=self._reserve_clock,
            ),
        )
        self._latched = choice.kv_latched
        self._reserve_clock = choice.reserve_clock
        return choice

    def _evict(self, request_ids: Sequence[str]) -> tuple[tuple[ResidencyChange, ...], int]:
        """Free the KV of requests; return the changes for the report, and the tokens moved to the host."""
        moved = 0
        changes = []
        residency = Residency.HOST if self.machine.host_memory else Residency.NONE
        for request_id in request_ids:
            held = self.held[request_id]
            self._resize(held, 0)
            held.residency = residency
            if residency is Residency.HOST:
                moved += held.job.prompt_tokens + held.emitted
            changes.append(ResidencyChange(request_id, held.lease_epoch, residency))
        self.evictions += len(changes)
        return tuple(changes), moved

    def _grow(self, held: HeldRequest, tokens: int) -> None:
        """Reserve blocks for its context and the tokens that a round may add."""
        needed = -(-(tokens + self.facts.max_draft_len) // self.facts.block_size)
        if needed > held.blocks:
            self._resize(held, needed)

    def _resize(self, held: HeldRequest, blocks: int) -> None:
        self.free_blocks += held.blocks - blocks
        held.blocks = blocks
