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

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from laps_sd.contract.choose import (
    NEW_CLOCK,
    Candidate,
    Choice,
    Residency,
    SharedBlocks,
    WorkerState,
    choose,
    looked_up,
    shared_runs,
)
from laps_sd.contract.prompt_blocks import BLOCK_TOKENS, numbers_of
from laps_sd.contract.round_time import prefill_time_s
from scheduler_svc.core.commands import AssignEntry
from scheduler_svc.core.events import (
    CacheChanged,
    Held,
    Progress,
    ResidencyChange,
    RoundReported,
    WorkerFacts,
)
from simulator.held import HeldRequest
from simulator.jobs import Job
from simulator.machine import Machine
from simulator.prefix_cache import PrefixCache


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
    cache: CacheChanged | None = None
    """Blocks of prompts that came into its prefix cache and left it."""


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
        self.cache = PrefixCache()
        self.found_tokens = 0
        """Prompt tokens that the prefix cache had, in all."""
        self._name_blocks = BLOCK_TOKENS // facts.block_size
        """KV blocks in a block of a prompt."""
        self._private_blocks = 0
        """KV blocks that are not in the prefix cache."""
        self._reported_blocks = facts.target_blocks
        """Free KV blocks in its last report, or when it came up."""
        self._latched = False
        self._reserve_clock = NEW_CLOCK

    @property
    def free_blocks(self) -> int:
        """Return the KV blocks that a request could get: what no request uses, the idle part of the prefix cache included."""
        return self.facts.target_blocks - self._private_blocks - self._name_blocks * len(self.cache.used)

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
                self._release(held)
            self.held[entry.request_id] = HeldRequest(
                found.job, entry.lease_epoch, found.rounds, found.emitted, names=numbers_of(found.job.blocks)
            )

    def drop(self, request_id: str, lease_epoch: int) -> None:
        """Forget a request, unless it has been leased here again since."""
        held = self.held.get(request_id)
        if held is not None and held.lease_epoch <= lease_epoch:
            self._release(held)
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
        """Choose, make room, and run one round. If no request can run, return an empty report where a drop has
        changed the free blocks since the last report, as a real worker sends it, otherwise None.
        """
        choice = self._choose()
        changes, swapped = self._evict(choice.evict)
        self.ran = frozenset(choice.run)
        if not choice.run:
            return None if self.free_blocks == self._reported_blocks else Round(self._report((), ()), 0, 0)
        machine = self.machine
        progress = []
        context = prefilled = decoding = verified = 0
        budget, limit_s = self._prefill_budget(choice.run)
        for request_id in choice.run:
            held = self.held[request_id]
            tokens = held.job.prompt_tokens + held.emitted
            if held.residency is Residency.NONE:
                held.missing = tokens - self._find(held, tokens)
            elif held.residency is Residency.HOST:
                swapped += tokens
            held.residency = Residency.DEVICE
            computed = min(held.missing, budget)
            held.missing -= computed
            budget -= computed
            prefilled += computed
            self._grow(held, tokens)
            self._name(held, tokens - held.missing)
            if held.missing:
                progress.append(held.prefilled(computed))
                continue
            decoded = held.decoded(computed, machine.draft_len)
            progress.append(decoded)
            decoding += 1
            context += tokens
            verified += decoded.drafted + 1
            if held.ended:
                self._name(held, tokens + len(decoded.tokens))
                self._release(held)
        if self.free_blocks < 0:
            raise RuntimeError(f"{self.facts.worker_id} holds more KV than it has")
        self._evict_idle()
        decode_s = machine.decode_s(decoding, context, verified)
        prefill_s = machine.prefill_token_s * prefilled
        swap_s = machine.swap_token_s * swapped
        total_s = decode_s + prefill_s + swap_s
        self.busy_s += total_s
        self.rounds += 1
        report = replace(
            self._report(tuple(progress), changes),
            draft_s=machine.draft_s,
            verify_s=decode_s - machine.draft_s,
            prefill_s=prefill_s,
            swap_s=swap_s,
            total_s=total_s,
            limit_s=limit_s if any(self.held[request_id].missing for request_id in choice.run) else 0.0,
        )
        return Round(report, prefilled, swapped, self._cache_changes())

    def _report(self, progress: tuple[Progress, ...], changes: tuple[ResidencyChange, ...]) -> RoundReported:
        """Return a report that took no time."""
        free = self._reported_blocks = self.free_blocks
        return RoundReported(
            worker_id=self.facts.worker_id,
            progress=progress,
            residency=changes,
            draft_s=0.0,
            verify_s=0.0,
            prefill_s=0.0,
            swap_s=0.0,
            idle_s=0.0,
            total_s=0.0,
            free_target_blocks=free,
            free_draft_blocks=free if self.facts.draft_blocks else 0,
        )

    def _prefill_budget(self, run: Sequence[str]) -> tuple[int, float]:
        """Return the context tokens that the next round may compute, and the limit of its time that bounds them, or 0."""
        machine = self.machine
        budget = machine.prefill_chunk or 1 << 62
        if machine.max_round_s is None:
            return budget, 0.0
        decoding = context = verified = 0
        for request_id in run:
            held = self.held[request_id]
            if held.residency is not Residency.NONE and not held.missing:
                decoding += 1
                context += held.job.prompt_tokens + held.emitted
                verified += held.job.drafted(held.rounds, machine.draft_len) + 1
        if decoding == len(run) or not machine.prefill_token_s:
            return budget, 0.0
        plain_s = machine.decode_s(decoding, context, verified)
        seconds = prefill_time_s(machine.max_round_s, plain_s, decoding)
        fitting = max(1, int(seconds / machine.prefill_token_s))
        return (fitting, plain_s + seconds) if fitting < budget else (budget, 0.0)

    def _choose(self) -> Choice:
        facts, ran = self.facts, self.ran
        has_draft_pool = facts.draft_blocks > 0
        listed = [
            (entry, held)
            for entry in self.entries
            if (held := self.held.get(entry.request_id)) is not None
            and not held.ended
            and held.lease_epoch == entry.lease_epoch
        ]
        found = self._look_up([held for _, held in listed if held.residency is not Residency.DEVICE])
        starts = {self.held[name].names[count - 1]: count for name, count in found.items()}
        candidates = []
        for entry, held in listed:
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
                    self._shared(held.names, found.get(entry.request_id, held.named), starts),
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

    def _look_up(self, waiting: Sequence[HeldRequest]) -> dict[str, int]:
        """Return how many blocks of prompts the first of these requests, without KV on the device, will find while
        others hold them.
        """
        growth, size = self.facts.max_draft_len, self.facts.block_size
        needed = (
            -(-(held.job.prompt_tokens + held.emitted + growth) // size)
            for held in waiting[: self.facts.slots]
        )
        most = looked_up(needed, self.free_blocks)
        found = [(held.job.request_id, self._will_find(held)) for held in waiting[:most]]
        return {request_id: count for request_id, count in found if count}

    def _will_find(self, held: HeldRequest) -> int:
        computed = held.job.prompt_tokens + held.emitted
        computed -= held.missing if held.residency is Residency.HOST else 1
        names = held.names[: computed // BLOCK_TOKENS]
        return bisect_left(names, True, key=lambda name: name not in self.cache.used)

    def _shared(
        self, names: Sequence[int], blocks: int, starts: Mapping[int, int]
    ) -> tuple[SharedBlocks, ...]:
        """Return those of the first `blocks` of these blocks that other requests hold as well, or will find: these are
        `starts`, numbers of blocks by the last of them.
        """
        used = self.cache.used
        ends = [end for last, end in starts.items() if end <= blocks and names[end - 1] == last]
        target = self._name_blocks
        draft = target if self.facts.draft_blocks else 0
        return tuple(
            [
                SharedBlocks(names[begin], (end - begin) * target, (end - begin) * draft)
                for begin, end in shared_runs(blocks, lambda at: used[names[at]], sorted(ends))
            ]
        )

    def _evict(self, request_ids: Sequence[str]) -> tuple[tuple[ResidencyChange, ...], int]:
        """Free the KV of requests; return the changes for the report, and the tokens moved to the host."""
        moved = 0
        changes = []
        residency = Residency.HOST if self.machine.host_memory else Residency.NONE
        for request_id in request_ids:
            held = self.held[request_id]
            self._release(held)
            held.residency = residency
            if residency is Residency.HOST:
                moved += held.job.prompt_tokens + held.emitted
            changes.append(ResidencyChange(request_id, held.lease_epoch, residency))
        self.evictions += len(changes)
        return tuple(changes), moved

    def _find(self, held: HeldRequest, tokens: int) -> int:
        """Use what the prefix cache has of a context; return its tokens. The last token is computed in any case."""
        if not held.names:
            return 0
        held.named = self.cache.find(held.names, (tokens - 1) // BLOCK_TOKENS)
        self.cache.use(held.names[: held.named])
        held.blocks = held.named * self._name_blocks
        held.found_tokens = held.named * BLOCK_TOKENS
        self.found_tokens += held.found_tokens
        return held.found_tokens

    def _name(self, held: HeldRequest, computed: int) -> None:
        """Move the full blocks of the first `computed` tokens to the prefix cache."""
        named = min(computed // BLOCK_TOKENS, len(held.names))
        if named > held.named:
            self.cache.use(held.names[held.named : named])
            self._private_blocks -= (named - held.named) * self._name_blocks
            held.named = named

    def _grow(self, held: HeldRequest, tokens: int) -> None:
        """Reserve blocks for its context and the tokens that a round may add."""
        needed = -(-(tokens + self.facts.max_draft_len) // self.facts.block_size)
        if needed > held.blocks:
            self._private_blocks += needed - held.blocks
            held.blocks = needed

    def _release(self, held: HeldRequest) -> None:
        """Free the blocks of a request; what is named stays in the prefix cache until its space is needed."""
        self._private_blocks -= held.blocks - held.named * self._name_blocks
        held.blocks = 0
        if held.named:
            self.cache.leave(held.names[: held.named])
            held.named = 0

    def _evict_idle(self) -> None:
        over = len(self.cache.idle) * self._name_blocks - self.free_blocks
        if over > 0:
            self.cache.evict(-(-over // self._name_blocks))

    def _cache_changes(self) -> CacheChanged | None:
        added, removed = self.cache.changes()
        if not (added or removed):
            return None
        return CacheChanged(self.facts.worker_id, array("Q", added).tobytes(), array("Q", removed).tobytes())
