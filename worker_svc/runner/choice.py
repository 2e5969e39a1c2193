"""The choice of the requests that run in the next round, and of those that make room for them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from laps_sd.contract.choose import (
    LATCH_ON,
    NEW_CLOCK,
    Candidate,
    Choice,
    Residency,
    WorkerState,
    choose,
    held_runs,
    looked_up,
)
from worker_svc.engine.interface import Engine, blocks_needed
from worker_svc.runner.held import Held, HeldRequests
from worker_svc.runner.messages import Listed

__all__ = ["Chooser"]


class Chooser:
    """Calls `choose` on the newest assignment, and carries out its evictions."""

    def __init__(self, engine: Engine, requests: HeldRequests) -> None:
        self.assignment: tuple[Listed, ...] = ()
        self.free_blocks = (engine.capacity.target_blocks, engine.capacity.draft_blocks)
        """Free blocks of the two pools by the last report."""
        self._engine = engine
        self._requests = requests
        self._capacity = engine.capacity
        self._growth = engine.capacity.growth
        # The last choice is repeated where `choose` would return it again. With one slot the number of the
        # round matters.
        self._reuse_choices = engine.capacity.slots > 1
        self._reserve_clock = NEW_CLOCK
        """The clock of `laps_sd.contract.choose`."""
        self._reserve_clock_then = NEW_CLOCK
        """Its value once the last chosen round has run."""
        self._latched = False

    def choose(self, slots: int) -> tuple[tuple[str, ...], float]:
        """Return at most `slots` requests to run now, and the seconds spent on making room for them."""
        if self._requests.settled and self._still_holds():
            return self._requests.running, 0.0
        candidates = self._candidates()
        if not candidates:
            return (), 0.0
        capacity = self._capacity
        state = WorkerState(
            slots=slots,
            block_size=capacity.block_size,
            target_blocks=capacity.target_blocks,
            draft_blocks=capacity.draft_blocks,
            max_growth_tokens=self._growth,
            kv_latched=self._latched,
            reserve_clock=self._reserve_clock,
        )
        choice = choose(candidates, state)
        self._latched = choice.kv_latched
        self._reserve_clock_then = choice.reserve_clock
        self._requests.settled = (
            self._reuse_choices
            and not choice.kv_latched
            and not choice.evict
            and set(choice.run) == set(self._requests.running)
            and all(self._requests.by_id[name].residency is Residency.DEVICE for name in choice.run)
        )
        began_s = time.perf_counter()
        moved = len(choice.evict)
        for request_id in choice.evict:
            self._requests.push_out(self._requests.by_id[request_id])
        moved += self._push_out_hidden(choice, candidates)
        return choice.run, time.perf_counter() - began_s if moved else 0.0

    def round_ran(self) -> None:
        """Record that the last chosen requests ran, or some of them."""
        self._reserve_clock = self._reserve_clock_then

    def _still_holds(self) -> bool:
        """Return True if `choose` would repeat its last choice, when only tokens were added since.

        That choice kept all running requests, all on the device, evicted none and was not latched. It is the
        same again if the pools stay below the latch with all tokens that this round can add: then all fit,
        and a request that waited for blocks, or ranked too low to displace another one, has less room, not
        more, and finds no more in the prefix cache.
        """
        growth = len(self._requests.running) * (self._growth // self._capacity.block_size + 1)
        target, draft = self._capacity.target_blocks, self._capacity.draft_blocks
        return target - self.free_blocks[0] + growth <= LATCH_ON * target and (
            not draft or draft - self.free_blocks[1] + growth <= LATCH_ON * draft
        )

    def _candidates(self) -> list[Candidate]:
        """Return the entries of the assignment that can run now."""
        candidates = []
        running = set(self._requests.running)
        by_id, at_bound, status = self._requests.by_id, self._requests.at_bound, self._engine.status
        beyond = self._capacity.last_growth - self._growth
        listed = [
            (entry, held)
            for entry in self.assignment
            if (held := by_id.get(entry.request_id)) is not None
            and not held.ended
            and held.lease_epoch == entry.lease_epoch
            and not at_bound(held)
        ]
        waiting = self._to_look_up([held for _, held in listed if held.residency is not Residency.DEVICE])
        self._engine.expect([*waiting])
        for (request_id, _, rank_class, index_s, resume_cost_s, reserved, pinned), held in listed:
            prompt, emitted = len(held.spec.prompt_ids), len(held.output)
            runs = request_id in running
            if runs or held.residency is not Residency.NONE or request_id in waiting:
                residency, tokens, target_blocks, draft_blocks, shared = status(request_id)
            else:
                # KV comes from rounds only. Most of a long list waits, and the engine need not be called for it.
                # Its whole context counts, though it may find a part of it.
                residency, tokens, target_blocks, draft_blocks = Residency.NONE, prompt + emitted, 0, 0
                shared = ()
            # Near its end a request may need less room than for a whole draft.
            longest = prompt + held.spec.max_tokens + beyond
            if tokens > longest:
                tokens = max(1, longest)
            candidates.append(
                Candidate(
                    request_id,
                    rank_class,
                    index_s,
                    resume_cost_s,
                    reserved,
                    pinned,
                    runs,
                    residency,
                    tokens,
                    target_blocks,
                    draft_blocks,
                    shared,
                )
            )
        return candidates

    def _to_look_up(self, waiting: Sequence[Held]) -> frozenset[str]:
        """Return the first requests without KV on the device whose part in the prefix cache is looked up."""
        size, room = self._capacity.block_size, self.free_blocks[0]
        if self._capacity.draft_blocks:
            room = min(self.free_blocks)
        needed = (
            blocks_needed(len(held.spec.prompt_ids) + len(held.output), self._growth, size)
            for held in waiting[: self._capacity.slots]
        )
        return frozenset([held.spec.request_id for held in waiting[: looked_up(needed, room)]])

    def _push_out_hidden(self, choice: Choice, candidates: Iterable[Candidate]) -> int:
        """Free the room that `choose` cannot know to be taken: by requests not listed, or at their bound.

        Returns the number of requests that were pushed out.
        """
        shown = {candidate.request_id: candidate for candidate in candidates}
        hidden = [
            held
            for name, held in self._requests.by_id.items()
            if held.residency is Residency.DEVICE and not held.ended and name not in shown
        ]
        if not hidden:
            return 0
        stay = [
            c for name, c in shown.items() if c.residency is Residency.DEVICE and name not in choice.evict
        ]
        there = {run for candidate in stay for run in held_runs(candidate)}
        target = draft = 0  # blocks that the next round takes
        for name in choice.run:
            candidate = shown[name]
            needed = blocks_needed(candidate.tokens, self._growth, self._capacity.block_size)
            has_target, has_draft = candidate.target_blocks, candidate.draft_blocks
            found = [run for run in candidate.shared if run in there]
            has_target = has_target or sum([run.target_blocks for run in found])
            has_draft = has_draft or sum([run.draft_blocks for run in found])
            target += max(0, needed - has_target)
            draft += max(0, needed - has_draft) if self._capacity.draft_blocks else 0
        moved = 0
        for held in hidden:
            free_target, free_draft = self._engine.free_blocks
            if target <= free_target and draft <= free_draft:
                break
            self._requests.push_out(held)
            moved += 1
        return moved
