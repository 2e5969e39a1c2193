"""The choice of the requests of one worker that run next: one pure function, the same in the worker and in
simulations.

The scheduler decides levels, ranks, priorities and placement; this function applies what is known only on the
worker at the moment of the round: slots, KV blocks, hysteresis, the reserved share and the KV latch.

Terms: a candidate is *resident* when its KV is on the device, *waiting* when it did not take part in the
previous round. Its *cost* is `index_s`, plus `resume_cost_s` if it is not resident; candidates are compared
by `(rank_class, cost, request_id)`, smaller first. KV blocks that several requests *share* count once: those that
residents hold, and those that others will find there.

Invariants
  * Standard library only: no clock, no I/O, no randomness. Equal arguments give equal results, in any order
    of the candidates.
  * Nothing is evicted while the KV of all running requests fits, and no running request is evicted.
  * The chosen requests always fit: slots, and blocks with their growth in this round.
  * Work conserving: no slot stays free while a candidate that would fit waits.

The paper covers none of this; every rule below is our choice.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final


class Residency(enum.IntEnum):
    """Place of the KV of a request on its worker."""

    NONE = 0
    HOST = 1
    DEVICE = 2


ON_HOST: Final = Residency.HOST
ON_DEVICE: Final = Residency.DEVICE
"""Compiled, such a name costs no look-up; so what compares them for each request of each round uses these."""


class SharedBlocks(NamedTuple):
    """KV blocks that follow one another in the contexts of several requests, each of which holds all of them or will
    find all of them in the prefix cache.
    """

    name: int
    """The same for each of these requests."""
    target_blocks: int
    draft_blocks: int


def shared_runs(
    blocks: int, holders: Callable[[int], int], ends: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """Return begin and end of each run of the first of `blocks` blocks of a context that have the same holders, two
    or more with those that will find them.

    `holders` returns how many requests hold a block. A request that holds a block holds all before it, so these
    numbers only fall. `ends`, ascending: how many of the blocks requests without any will find.
    """
    runs: list[tuple[int, int]] = []
    begin, found = 0, ends[-1] if ends else 0
    while begin < blocks and ((count := holders(begin)) > 1 or begin < found):
        end = begin + bisect_right(range(begin, blocks), -count, key=lambda at: -holders(at))
        if begin < found:
            end = min(end, ends[bisect_right(ends, begin)])
        runs.append((begin, end))
        begin = end
    return runs


@final
@dataclass(slots=True)
class Candidate:
    """One entry of the assignment, joined with the worker's own state of the request. Its constructor is written
    out, since one is made for each listed request of each round: compiled, it then costs a tenth.
    """

    request_id: Final[str]
    rank_class: Final[int]
    """Precedence above the index (priority, tenant deficit, level packed into one number); smaller runs
    first."""
    index_s: Final[float]
    """Position in the class: remaining machine seconds, or the sort key of the policy; smaller runs first."""
    resume_cost_s: Final[float]
    """Machine seconds to resume it (prefill, swap in) if it is not on the device."""
    reserved: Final[bool]
    """True for one of the oldest requests of the shard: it may use the reserved share."""
    pinned: Final[bool]
    """True if it is never paused once it runs (policies without preemption)."""
    running: Final[bool]
    """True if it took part in the previous round."""
    residency: Final[Residency]
    tokens: Final[int]
    """Present context length: prompt and outputs."""
    target_blocks: Final[int]
    """KV blocks of the target pool that it holds on the device."""
    draft_blocks: Final[int]
    shared: Final[tuple[SharedBlocks, ...]]
    """Those of its blocks that other requests hold as well. In a pool in which it has none: those that it will find and
    others hold."""

    def __init__(
        self,
        request_id: str,
        rank_class: int,
        index_s: float,
        resume_cost_s: float,
        reserved: bool,
        pinned: bool,
        running: bool,
        residency: Residency,
        tokens: int,
        target_blocks: int,
        draft_blocks: int,
        shared: tuple[SharedBlocks, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.rank_class = rank_class
        self.index_s = index_s
        self.resume_cost_s = resume_cost_s
        self.reserved = reserved
        self.pinned = pinned
        self.running = running
        self.residency = residency
        self.tokens = tokens
        self.target_blocks = target_blocks
        self.draft_blocks = draft_blocks
        self.shared = shared


def held_runs(candidate: Candidate) -> tuple[SharedBlocks, ...]:
    """Return the shared blocks of a resident that it holds: it may have none of the draft's yet."""
    if candidate.draft_blocks or not candidate.shared:
        return candidate.shared
    return tuple([run for run in candidate.shared if not run.draft_blocks])


class ReserveClock(NamedTuple):
    """State of the reserved share in the present cycle, on a one-slot worker."""

    request_id: str = ""
    """Oldest request on this worker."""
    rounds: int = 0
    """Rounds of the cycle so far; only those count in which an old request was here."""
    had: int = 0
    """Those of these rounds in which it ran, in the share or by its own rank."""


NEW_CLOCK = ReserveClock()


@dataclass(frozen=True, slots=True)
class WorkerState:
    """The worker at this round boundary."""

    slots: int
    block_size: int
    target_blocks: int
    """Blocks in the whole target pool."""
    draft_blocks: int
    max_growth_tokens: int
    """Most tokens that a request can grow in one round: the longest draft and the bonus token (γ + 1)."""
    kv_latched: bool = False
    """`Choice.kv_latched` of the last round."""
    reserve_clock: ReserveClock = NEW_CLOCK
    """`Choice.reserve_clock` of the last round."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Actions of the worker before its next round."""

    run: tuple[str, ...]
    """Requests of the next round, best first."""
    evict: tuple[str, ...]
    """Requests on the device whose blocks are needed, worst rank first.

    They are swapped out, or dropped if the host is full.
    """
    kv_latched: bool = False
    """True while KV pressure suspends preemption; passed back in at the next round."""
    reserve_clock: ReserveClock = NEW_CLOCK
    """Passed back in at the next round."""


HYSTERESIS: Final = 0.10
"""Fraction by which a waiting request must be shorter than the request it displaces.

Our choice, found by simulation.
"""
HYSTERESIS_EVICTING: Final = 0.25
"""The same fraction if the displaced request would lose its KV."""
LATCH_ON: Final = 0.85
"""Share of a KV pool above which preemption is suspended. 0.7 to 0.9 did well in simulation; our choice."""
LATCH_OFF: Final = 0.70
"""Share below which preemption is allowed again: the gap keeps the latch from oscillating."""
LOOKED_UP: Final = 16
"""Requests without KV on the device whose `Candidate.shared` is looked up, at most. Our choice: it takes 0.1 to 0.2 ms.
"""
RESERVED_SLICE_ROUNDS: Final = 32
"""Reserved rounds out of `RESERVED_CYCLE_ROUNDS` on a one-slot worker, where the reserved share is time."""
RESERVED_ONE_IN: Final = 32
RESERVED_CYCLE_ROUNDS: Final = RESERVED_SLICE_ROUNDS * RESERVED_ONE_IN


def looked_up(blocks: Iterable[int], free: int) -> int:
    """Return for how many of the best requests without KV on the device `Candidate.shared` is looked up: none if there is
    room for the whole contexts of as many as a round has. `blocks`: those that each of these needs.
    """
    for needed in blocks:
        free -= needed
        if free < 0:
            return LOOKED_UP
    return 0


def reserved_slots(slots: int, clock: ReserveClock = NEW_CLOCK) -> int:
    """Return how many slots of this round belong to the oldest requests of the shard, whatever their rank.

    With one slot the share is a floor: rounds of a cycle that the oldest had by its own rank are part of it,
    and the missing ones are taken at the end of the cycle. Why: docs/decisions/0018.
    """
    if slots >= 2:
        return max(1, slots // RESERVED_ONE_IN)
    return 1 if RESERVED_SLICE_ROUNDS - clock.had >= RESERVED_CYCLE_ROUNDS - clock.rounds else 0


@final
class _Entry:
    """A candidate with the KV blocks that it needs in this round. Compiled, attributes are read without the boxes
    that the members of a tuple have.
    """

    __slots__ = ("candidate", "chosen", "cost", "draft", "target")

    def __init__(self, candidate: Candidate, cost: float, target: int, draft: int) -> None:
        self.candidate: Final = candidate
        self.cost: Final = cost
        self.target: Final = target
        self.draft: Final = draft
        self.chosen = False


def choose(candidates: Sequence[Candidate], worker: WorkerState) -> Choice:
    """Return the requests of the next round and those whose KV is evicted first.

    Slots are filled in this order:
      1. running requests that are pinned;
      2. the reserved share, running requests first (so that it stays with one request until that ends);
      3. the other running requests, best first;
      4. waiting requests, best first. One that finds no room displaces the worst running ones, if it beats
         each of them by the hysteresis.
    A request that does not fit is passed over. Under the KV latch no request is displaced in step 4, and
    resident requests come before the others there.
    """
    # Request ids are unique, so a comparison never reaches the entry.
    ordered = [_ordered(candidate, worker) for candidate in candidates]
    ordered.sort()
    entries = [entry for _, _, _, entry in ordered]
    latched = _is_latched(entries, worker)
    selection = _Selection(worker, entries)

    for entry in entries:
        if entry.candidate.running and entry.candidate.pinned:
            selection.add_if_it_fits(entry)
    clock = _clock_now(worker, entries)
    _fill_reserved_share(entries, reserved_slots(worker.slots, clock), selection)
    for entry in entries:
        if entry.candidate.running and not entry.chosen and selection.add_if_it_fits(entry):
            selection.victims.append(entry)

    waiting = [entry for entry in entries if not entry.chosen]
    if latched:
        waiting.sort(key=_resident_first)
    displaced = False
    for entry in waiting:
        if not selection.add_if_it_fits(entry) and not latched:
            displaced = selection.displace_for(entry) or displaced
    if displaced:
        # A displaced big request may leave room for several small ones. It is itself not in `waiting`.
        for entry in entries:
            if not entry.chosen:
                selection.add_if_it_fits(entry)

    run = tuple([entry.candidate.request_id for entry in entries if entry.chosen])
    return Choice(run, tuple(selection.evictions()), latched, _clock_after(clock, worker, entries))


def _ordered(candidate: Candidate, worker: WorkerState) -> tuple[int, float, str, _Entry]:
    """Return the entry of a candidate after what it is ordered by."""
    # KV covers all tokens but the last; a round writes up to max_growth_tokens entries
    # (worker_svc.engine.interface).
    needed = -(-(candidate.tokens - 1 + worker.max_growth_tokens) // worker.block_size)
    target = needed if needed > candidate.target_blocks else candidate.target_blocks
    draft = 0
    if worker.draft_blocks:  # 0: there is no draft model
        draft = needed if needed > candidate.draft_blocks else candidate.draft_blocks
    cost = candidate.index_s
    if candidate.residency is not ON_DEVICE:
        cost += candidate.resume_cost_s
    return (candidate.rank_class, cost, candidate.request_id, _Entry(candidate, cost, target, draft))


def _resident_first(entry: _Entry) -> int:
    """Return the sort key under the latch: on the device, swapped out, nowhere.

    The sort is stable, so rank decides among equals.
    """
    return -entry.candidate.residency


def _is_latched(entries: Sequence[_Entry], worker: WorkerState) -> bool:
    """Return whether KV pressure suspends preemption in this round.

    Pressure is the KV on the device, with this round's growth of the running requests, as a share of the
    fuller pool.
    """
    room = _Room(worker.target_blocks, worker.draft_blocks)
    for entry in entries:
        if entry.candidate.running:
            room.take(entry)
        elif entry.candidate.residency is ON_DEVICE:
            room.keep(entry.candidate)
    threshold = LATCH_OFF if worker.kv_latched else LATCH_ON
    return (
        worker.target_blocks - room.target > threshold * worker.target_blocks
        or worker.draft_blocks - room.draft > threshold * worker.draft_blocks
    )


def _clock_now(worker: WorkerState, entries: Sequence[_Entry]) -> ReserveClock:
    """Return the clock before this round: of the same request as before, or of another one that is the oldest
    now.

    Each round that the request before had counts for `RESERVED_ONE_IN` rounds of the cycle, past ones only:
    so n rounds of the oldest requests, even if these change, come within `RESERVED_ONE_IN` · n rounds and two
    cycles.
    """
    clock = worker.reserve_clock
    if worker.slots > 1:
        return clock
    reserved = [entry.candidate.request_id for entry in entries if entry.candidate.reserved]
    if not reserved or clock.request_id in reserved:
        return clock
    return ReserveClock(reserved[0], max(0, clock.rounds - RESERVED_ONE_IN * clock.had), 0)


def _clock_after(clock: ReserveClock, worker: WorkerState, entries: Sequence[_Entry]) -> ReserveClock:
    if worker.slots > 1 or not any(entry.candidate.reserved for entry in entries):
        return clock
    ran = any(entry.candidate.reserved and entry.chosen for entry in entries)
    rounds, had = clock.rounds + 1, clock.had + ran
    if had >= RESERVED_SLICE_ROUNDS or rounds >= RESERVED_CYCLE_ROUNDS:
        return ReserveClock(clock.request_id, 0, 0)
    return ReserveClock(clock.request_id, rounds, had)


def _fill_reserved_share(entries: Sequence[_Entry], share: int, selection: _Selection) -> None:
    reserved = [entry for entry in entries if entry.candidate.reserved and not entry.chosen]
    reserved.sort(key=lambda entry: not entry.candidate.running)
    for entry in reserved:
        if share == 0:
            return
        if selection.add_if_it_fits(entry):
            share -= 1


@final
class _Room:
    """Blocks of both pools that are left. Blocks that several requests share are taken once, and left when the last
    of these gives them back.
    """

    def __init__(self, target: int, draft: int) -> None:
        self.target = target
        self.draft = draft
        self._holders: dict[SharedBlocks, int] = {}

    def take(self, entry: _Entry) -> None:
        """Take what a request needs in this round."""
        self.add(entry.candidate.shared, entry.target, entry.draft)

    def keep(self, candidate: Candidate) -> None:
        """Take what a request holds."""
        self.add(held_runs(candidate), candidate.target_blocks, candidate.draft_blocks)

    def take_if_it_fits(self, entry: _Entry) -> bool:
        """Take what a request needs in this round if that much is left; return whether it is."""
        if entry.candidate.shared:
            self.take(entry)
            if self.target >= 0 and self.draft >= 0:
                return True
            self.remove(entry.candidate.shared, entry.target, entry.draft)
            return False
        if entry.target > self.target or entry.draft > self.draft:
            return False
        self.target -= entry.target
        self.draft -= entry.draft
        return True

    def copy(self) -> _Room:
        """Return an independent copy."""
        room = _Room(self.target, self.draft)
        room._holders = self._holders.copy()
        return room

    def add(self, shared: tuple[SharedBlocks, ...], target: int, draft: int) -> None:
        """Take these blocks of a request, of which some are shared."""
        for run in shared:
            others = self._holders.get(run, 0)
            self._holders[run] = others + 1
            if others:
                target -= run.target_blocks
                draft -= run.draft_blocks
        self.target -= target
        self.draft -= draft

    def remove(self, shared: tuple[SharedBlocks, ...], target: int, draft: int) -> None:
        """Undo an `add`."""
        for run in shared:
            others = self._holders[run] - 1
            self._holders[run] = others
            if others:
                target -= run.target_blocks
                draft -= run.draft_blocks
        self.target += target
        self.draft += draft


@final
class _Selection:
    """Chosen entries (`_Entry.chosen`), and the slots and blocks of both pools that are left.

    Invariant: the chosen requests fit.
    """

    def __init__(self, worker: WorkerState, entries: list[_Entry]) -> None:
        self._entries = entries
        self._slots = worker.slots
        self._room = _Room(worker.target_blocks, worker.draft_blocks)
        self.victims: list[_Entry] = []
        """Chosen requests that may be displaced, worst last: they ran, are not pinned and not in the reserved
        share."""

    def add_if_it_fits(self, entry: _Entry) -> bool:
        if self._slots == 0 or not self._room.take_if_it_fits(entry):
            return False
        entry.chosen = True
        self._slots -= 1
        return True

    def displace_for(self, entry: _Entry) -> bool:
        """Replace the worst running requests by `entry`, if it beats each of them; return whether it did."""
        room, count = self._room, 0
        while self._slots + count == 0 or not room.take_if_it_fits(entry):
            if count < len(self.victims):
                count += 1
                victim = self.victims[-count]
                room.remove(victim.candidate.shared, victim.target, victim.draft)
                if self._beats(entry, victim):
                    continue
            for victim in self.victims[len(self.victims) - count :]:
                room.take(victim)
            return False
        for victim in self.victims[-count:]:
            victim.chosen = False
        del self.victims[-count:]
        entry.chosen = True
        self._slots += count - 1
        return True

    def _beats(self, entry: _Entry, victim: _Entry) -> bool:
        """Return whether `entry` may displace `victim`, whose blocks are given back."""
        waits, runs = entry.candidate, victim.candidate
        if waits.rank_class != runs.rank_class:
            return waits.rank_class < runs.rank_class
        setup = entry.cost - waits.index_s
        if waits.index_s * (1 + HYSTERESIS) + setup >= runs.index_s:
            return False
        # The costs of both: `entry` pays its set-up, and `victim` will pay for its KV if it loses it.
        with_eviction = waits.index_s * (1 + HYSTERESIS_EVICTING) + setup + runs.resume_cost_s
        return with_eviction < runs.index_s or not self._would_evict(entry, victim)

    def _would_evict(self, entry: _Entry, victim: _Entry) -> bool:
        """Return whether `victim` loses its KV once `entry` runs instead.

        Eviction is worst rank first, so only requests of better rank are certain to keep theirs.
        """
        room = self._room.copy()
        room.take(entry)
        for other in self._entries:
            if other is victim:
                break
            if not other.chosen and other is not entry and other.candidate.residency is ON_DEVICE:
                room.keep(other.candidate)
        room.keep(victim.candidate)
        return room.target < 0 or room.draft < 0

    def evictions(self) -> list[str]:
        """Return the requests to evict: only as many as the missing blocks need, worst rank first, never a
        running one.
        """
        room = self._room
        for entry in self._entries:
            if not entry.chosen and entry.candidate.residency is ON_DEVICE:
                room.keep(entry.candidate)
        evicted: list[str] = []
        for entry in reversed(self._entries):
            if room.target >= 0 and room.draft >= 0:
                break
            paused = entry.candidate
            # Evicting a request without blocks in the pool that is short would gain nothing.
            if not entry.chosen and (
                (room.target < 0 and paused.target_blocks) or (room.draft < 0 and paused.draft_blocks)
            ):
                room.remove(held_runs(paused), paused.target_blocks, paused.draft_blocks)
                evicted.append(paused.request_id)
        return evicted
