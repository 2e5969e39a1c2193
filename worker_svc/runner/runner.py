"""The thread that owns the engine: it runs rounds on the newest assignment, and never waits for other
threads.

asyncio sends it messages through `put` (thread-safe, returns at once); outcomes go to the given `deliver`,
which is called in this thread. A *turn* is: take in the messages that arrived, choose, make room, run one
round, deliver its report.

Invariants
  * Reports are numbered 1, 2, 3 …; a round is delivered exactly once (offering it again is the link's work).
  * Only requests run that the newest assignment lists under the lease epoch their specification came with.
  * Every held request has its specification; an ended request stays held until its report is acknowledged, or
    it is dropped.
  * A request with `max_unacknowledged_tokens` tokens that no leader acknowledged pauses; others continue.
  * The tokens of a request do not depend on any of this; the engine guarantees that.

Requests enter by a specification and leave by an acknowledged end or by a drop. An error of one request is
its end. When a round raises, its requests run in halves until the one that raises alone is found, and that
one ends with the error; when all of them raise, or `FAILURES_IN_A_ROW` one after another, the engine has
failed: that is delivered as `Failed`, and the thread ends. When a round is too large for the device's memory,
fewer requests run for a while.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from laps_sd.contract.choose import LATCH_ON, NEW_CLOCK, Candidate, Residency, WorkerState, choose
from laps_sd.contract.ends import End
from laps_sd.service.log import get_logger
from worker_svc.engine.interface import (
    DeviceFailed,
    Engine,
    OutOfBlocks,
    OutOfMemory,
    RequestRound,
    RoundResult,
    Specification,
    UnknownRequest,
    blocks_needed,
)

__all__ = [
    "Acknowledged",
    "Assigned",
    "Dropped",
    "Failed",
    "HeldAsked",
    "HeldNow",
    "HeldRequest",
    "Listed",
    "Missing",
    "ResidencyChange",
    "Round",
    "Runner",
    "Specified",
]


log = get_logger(__name__)

# -- what comes in -------------------------------------------------------------------------------------------


class Listed(NamedTuple):
    """One entry of an assignment; `laps_sd.contract.choose.Candidate` documents the fields."""

    request_id: str
    lease_epoch: int
    rank_class: int
    index_s: float
    resume_cost_s: float
    reserved: bool
    pinned: bool


@dataclass(frozen=True, slots=True)
class Specified:
    """A request that may be listed from now on. Replaces one of an older lease."""

    spec: Specification
    lease_epoch: int


@dataclass(frozen=True, slots=True)
class Assigned:
    """An assignment that replaces the previous one from the next round on."""

    entries: tuple[Listed, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Requests to forget if they are held under the named lease epoch or an older one."""

    requests: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Number of the last report that need not be offered again, like all before it."""

    number: int


@dataclass(frozen=True, slots=True)
class HeldAsked:
    """A request for a `HeldNow`."""


Message = Specified | Assigned | Dropped | Acknowledged | HeldAsked


# -- what goes out -------------------------------------------------------------------------------------------


class ResidencyChange(NamedTuple):
    """A new location of the KV of a request that has not ended."""

    request_id: str
    lease_epoch: int
    residency: Residency


@dataclass(slots=True)
class Round:
    """One report. Cheap to make; its wire message is built elsewhere. Never changed once it is delivered."""

    number: int
    result: RoundResult
    """Result of the round; without requests and times in a report that only contains errors."""
    progress: list[tuple[int, RequestRound]]
    """(lease epoch, outcome) of the requests of the round, and of those that failed outside of one."""
    residency: list[ResidencyChange]
    swap_out_s: float
    """Seconds spent on making room before the round; not part of `result`."""
    idle_s: float
    """Seconds from the end of the round before to the start of this one, without making room."""
    waited_s: float
    """The part of `idle_s` in which there was nothing to run."""
    context_tokens: int
    """Context tokens of the requests that ran, before the round."""
    swapped_in_tokens: int
    """Context tokens whose KV the round brought back from host memory."""
    preempted: int
    """Requests of the round before that have not ended and were not in this one."""
    out_of_memory: int = 0
    """Rounds since the report before for which the device had no memory."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Requests that are listed, but without a specification of that lease."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A held request as reported in a hello."""

    spec: Specification
    lease_epoch: int
    residency: Residency
    output_ids: tuple[int, ...]
    acknowledged: int
    """Number of leading `output_ids` that are acknowledged."""


@dataclass(frozen=True, slots=True)
class HeldNow:
    """All held requests, after the report `last_report` and before the next."""

    requests: tuple[HeldRequest, ...]
    last_report: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of the thread, because the engine cannot be used any more."""

    error: BaseException


Outcome = Round | Missing | HeldNow | Failed


FAILURES_IN_A_ROW = 3
"""Requests failing alone, with no successful round between them, after which the engine counts as failed."""
STOP_S = 5.0
"""Seconds that an engine gets to finish its round after a stop."""
ROUNDS_WITH_FEWER = 256
"""Rounds after the device ran out of memory, before twice as many requests run again."""


# -- the runner ----------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Held:
    """A request whose specification this worker has."""

    spec: Specification
    lease_epoch: int
    output: list[int]
    acknowledged: int
    residency: Residency = Residency.NONE
    ended: bool = False

    @property
    def tokens(self) -> int:
        return len(self.spec.prompt_ids) + len(self.output)


@dataclass(slots=True)
class _Unacknowledged:
    """The effect of acknowledging one report."""

    number: int
    reached: list[tuple[_Held, int, bool]] = field(default_factory=list)
    """(request, output tokens after the report, whether it ended with it)"""


class Runner:
    """The runner of an engine; see the module's docstring.

    `start` and `stop` run it as a thread; tests may call `turn` instead. With `reuse_choices` off, `choose`
    is called in every round; its results are the same.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[Outcome], None],
        *,
        max_unacknowledged_tokens: int = 256,
        max_unacknowledged_reports: int = 1024,
        reuse_choices: bool = True,
    ) -> None:
        self.engine = engine
        self._deliver = deliver
        self._max_tokens = max_unacknowledged_tokens
        self._max_reports = max_unacknowledged_reports
        self._capacity = engine.capacity
        self._growth = engine.capacity.max_draft_len + 1
        self._reuse_choices = (
            reuse_choices and engine.capacity.slots > 1
        )  # one slot: the round number matters

        self._inbox: deque[Message] = deque()
        self._arrival = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

        self._held: dict[str, _Held] = {}
        self._assignment: tuple[Listed, ...] = ()
        self._unacknowledged: deque[_Unacknowledged] = deque()
        self._number = 0
        self._reserve_clock = NEW_CLOCK
        """The clock of `laps_sd.contract.choose`; `_reserve_clock_then`: its value after the last chosen round."""
        self._reserve_clock_then = NEW_CLOCK
        self._slots = engine.capacity.slots
        """Requests in one round at most: fewer than the engine's for a while after it ran out of memory."""
        self._rounds_with_fewer = 0
        self._out_of_memory = 0
        self._failed_in_a_row = 0
        self._run: tuple[str, ...] = ()
        """Requests of the last round that are still held and have not ended."""
        self._latched = False
        self._settled = False
        """True while nothing but the lengths of the running requests has changed; see `_still_holds`."""
        self._free = (engine.capacity.target_blocks, engine.capacity.draft_blocks)
        # Contents of the next report besides its round.
        self._failures: list[tuple[_Held, RequestRound]] = []
        self._changes: list[ResidencyChange] = []
        self._round_ended_s: float | None = None
        self._waited_s = 0.0

    # -- from other threads ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    def put(self, *messages: Message) -> None:
        """Hand over messages; they are taken in, in order, before the next round."""
        with self._arrival:
            self._inbox.extend(messages)
            self._arrival.notify()

    def stop(self) -> None:
        """End the thread after its present round.

        Returns when it has ended, or hangs: then it ends with the process.
        """
        with self._arrival:
            self._stopping = True
            self._arrival.notify()
        if self._thread is not None:
            self._thread.join(STOP_S)

    @property
    def holds_nothing(self) -> bool:
        """True if no request is held. May be outdated at once, since another thread reads it."""
        return not self._held and not self._inbox

    # -- the thread ------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stopping:
                if not self.turn():
                    self._wait()
        except BaseException as error:
            self._deliver(Failed(error))

    def _wait(self) -> None:
        began_s = time.perf_counter()
        self._await_message()
        self._waited_s += time.perf_counter() - began_s

    def _await_message(self) -> None:
        with self._arrival:
            while not self._inbox and not self._stopping:
                self._arrival.wait()

    def turn(self) -> bool:
        """Take in the messages that arrived and run at most one round.

        Returns False if nothing can run until a message arrives.
        """
        while self._inbox:
            self._take(self._inbox.popleft())
        before = self._run
        run, swap_out_s = self._decide()
        if not run:
            if self._failures or self._changes:
                self._report(
                    RoundResult((), free_target_blocks=self._free[0], free_draft_blocks=self._free[1])
                )
            return False
        started_s = time.perf_counter()
        run, result = self._round(run)
        if result is None:  # one of them failed; the next turn decides without it
            return True
        idle_s = (
            0.0 if self._round_ended_s is None else max(0.0, started_s - self._round_ended_s - swap_out_s)
        )
        self._round_ended_s = time.perf_counter()
        self._reserve_clock = self._reserve_clock_then
        preempted = 0
        if before is not run:
            now = set(run)
            preempted = sum([name not in now and name in self._held for name in before])
        self._run = run
        context_tokens = sum([self._held[name].tokens for name in run])
        self._report(result, swap_out_s, idle_s, context_tokens, preempted)
        return True

    # -- messages --------------------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        match message:
            case Acknowledged(number):
                self._acknowledge(number)
            case Assigned(entries):
                self._assign(entries)
            case Specified(spec, lease_epoch):
                self._specify(spec, lease_epoch)
            case Dropped(requests):
                for request_id, lease_epoch in requests:
                    held = self._held.get(request_id)
                    if held is not None and held.lease_epoch <= lease_epoch:
                        self._forget(held)
            case HeldAsked():
                self._deliver(self._held_now())

    def _specify(self, spec: Specification, lease_epoch: int) -> None:
        held = self._held.get(spec.request_id)
        if held is not None:
            if lease_epoch <= held.lease_epoch:
                return  # the lease that is held already, or one that was overtaken
            if not held.ended and tuple(held.output) == spec.committed_ids:
                held.lease_epoch = lease_epoch
                held.acknowledged = len(held.output)
                self._settled = False
                return
            # Its tokens beyond the record's were reported under a lease that has ended: they are never
            # committed.
            self._forget(held)
        held = _Held(spec, lease_epoch, list(spec.committed_ids), len(spec.committed_ids))
        self._held[spec.request_id] = held
        self._settled = False
        if len(spec.committed_ids) >= spec.max_tokens > 0:
            self._end(held, End.LENGTH, None)
            return
        try:
            self.engine.add(spec)
        except Exception as error:
            self._end(held, End.ERROR, str(error) or type(error).__name__)

    def _end(self, held: _Held, finish: End, error: str | None) -> None:
        """End a request outside of a round; the next report contains it."""
        held.ended = True
        progress = RequestRound(held.spec.request_id, len(held.output), (), 0, 0, finish=finish, error=error)
        self._failures.append((held, progress))

    def _assign(self, entries: tuple[Listed, ...]) -> None:
        self._assignment = entries
        self._settled = False
        missing = [entry.request_id for entry in entries if self._lacks(entry)]
        if missing:
            self._deliver(Missing(tuple(missing)))

    def _lacks(self, entry: Listed) -> bool:
        held = self._held.get(entry.request_id)
        return held is None or held.lease_epoch < entry.lease_epoch

    def _acknowledge(self, number: int) -> None:
        while self._unacknowledged and self._unacknowledged[0].number <= number:
            for held, reached, ended in self._unacknowledged.popleft().reached:
                if len(held.output) - held.acknowledged >= self._max_tokens:
                    self._settled = False  # it may run again
                held.acknowledged = max(held.acknowledged, reached)
                if ended and self._held.get(held.spec.request_id) is held:
                    self._forget(held)

    def _forget(self, held: _Held) -> None:
        request_id = held.spec.request_id
        self.engine.drop(request_id)
        del self._held[request_id]
        self._run = tuple([name for name in self._run if name != request_id])
        self._settled = False

    def _held_now(self) -> HeldNow:
        return HeldNow(
            tuple(
                HeldRequest(
                    held.spec, held.lease_epoch, held.residency, tuple(held.output), held.acknowledged
                )
                for held in self._held.values()
            ),
            self._number,
        )

    # -- deciding --------------------------------------------------------------------------------------------

    def _decide(self) -> tuple[tuple[str, ...], float]:
        """Return the requests to run now, and the seconds spent on making room for them."""
        if len(self._unacknowledged) >= self._max_reports:
            return (), 0.0
        if self._settled and self._still_holds():
            return self._run, 0.0
        candidates = self._candidates()
        if not candidates:
            return (), 0.0
        capacity = self._capacity
        place = WorkerState(
            slots=self._slots,
            block_size=capacity.block_size,
            target_blocks=capacity.target_blocks,
            draft_blocks=capacity.draft_blocks,
            max_growth_tokens=self._growth,
            kv_latched=self._latched,
            reserve_clock=self._reserve_clock,
        )
        choice = choose(candidates, place)
        self._latched = choice.kv_latched
        self._reserve_clock_then = choice.reserve_clock
        self._settled = (
            self._reuse_choices
            and not choice.kv_latched
            and not choice.evict
            and set(choice.run) == set(self._run)
            and all(self._held[name].residency is Residency.DEVICE for name in choice.run)
        )
        began_s = time.perf_counter()
        moved = len(choice.evict)
        for request_id in choice.evict:
            self._push_out(self._held[request_id])
        moved += self._push_out_hidden(choice.run, candidates)
        return choice.run, time.perf_counter() - began_s if moved else 0.0

    def _still_holds(self) -> bool:
        """Return True if `choose` would repeat its last choice, when only tokens were added since.

        That choice kept all running requests, all on the device, evicted none and was not latched. It is the
        same again if the pools stay below the latch with all tokens that this round can add: then all fit,
        and a request that waited for blocks, or ranked too low to displace another one, has less room, not
        more.
        """
        growth = len(self._run) * (self._growth // self._capacity.block_size + 1)
        target, draft = self._capacity.target_blocks, self._capacity.draft_blocks
        return target - self._free[0] + growth <= LATCH_ON * target and (
            not draft or draft - self._free[1] + growth <= LATCH_ON * draft
        )

    def _candidates(self) -> list[Candidate]:
        """Return the entries of the assignment that can run now."""
        candidates = []
        running = set(self._run)
        for request_id, lease_epoch, rank_class, index_s, resume_cost_s, reserved, pinned in self._assignment:
            held = self._held.get(request_id)
            if held is None or held.ended or held.lease_epoch != lease_epoch:
                continue
            if len(held.output) - held.acknowledged >= self._max_tokens:
                continue
            status = self.engine.status(request_id)
            # No round goes beyond max_tokens, so near its end a request needs less room than a whole draft.
            longest = len(held.spec.prompt_ids) + held.spec.max_tokens
            tokens = max(1, min(status.tokens, longest + 1 - self._growth))
            candidates.append(
                Candidate(
                    request_id,
                    rank_class,
                    index_s,
                    resume_cost_s,
                    reserved,
                    pinned,
                    request_id in running,
                    status.residency,
                    tokens,
                    status.target_blocks,
                    status.draft_blocks,
                )
            )
        return candidates

    def _push_out_hidden(self, run: Sequence[str], candidates: Iterable[Candidate]) -> int:
        """Free the room that `choose` cannot know to be taken: by requests not listed, or at their bound.

        Returns the number of requests that were pushed out.
        """
        shown = {candidate.request_id: candidate for candidate in candidates}
        hidden = [
            held
            for name, held in self._held.items()
            if held.residency is Residency.DEVICE and not held.ended and name not in shown
        ]
        if not hidden:
            return 0
        target, draft = self._capacity.target_blocks, self._capacity.draft_blocks
        runs = set(run)
        for name, candidate in shown.items():
            needed = 0
            if name in runs:
                needed = blocks_needed(candidate.tokens, self._growth, self._capacity.block_size)
            elif self._held[name].residency is not Residency.DEVICE:
                continue  # pushed out just now
            target -= max(needed, candidate.target_blocks)
            draft -= max(needed, candidate.draft_blocks) if self._capacity.draft_blocks else 0
        statuses = [(held, self.engine.status(held.spec.request_id)) for held in hidden]
        target -= sum([status.target_blocks for _, status in statuses])
        draft -= sum([status.draft_blocks for _, status in statuses])
        moved = 0
        for held, status in statuses:
            if target >= 0 and draft >= 0:
                break
            target += status.target_blocks
            draft += status.draft_blocks
            self._push_out(held)
            moved += 1
        return moved

    def _push_out(self, held: _Held) -> None:
        """Take the KV of a request off the device: to the host if that has room."""
        request_id = held.spec.request_id
        if not self.engine.swap_out(request_id):
            self.engine.evict(request_id)
        self._note_residency(held)

    def _note_residency(self, held: _Held) -> None:
        residency = self.engine.status(held.spec.request_id).residency
        if residency is not held.residency:
            held.residency = residency
            self._changes.append(ResidencyChange(held.spec.request_id, held.lease_epoch, residency))

    # -- running ---------------------------------------------------------------------------------------------

    def _round(self, run: tuple[str, ...]) -> tuple[tuple[str, ...], RoundResult | None]:
        """Run a round of these requests, or of the best that the engine has room for.

        The result is None if one of them has failed.
        """
        while True:
            try:
                result = self.engine.round(run)
                self._failed_in_a_row = 0
                self._regain_slots()
                return run, result
            except OutOfBlocks as error:
                # The engine counts blocks otherwise than `choose`, and changed nothing. The least needed
                # request makes room.
                self._settled = False
                rest = self._relieve(run)
                if rest is None:
                    self._end(
                        self._held[run[0]],
                        End.ERROR,
                        f"its context does not fit the KV pools: {error}",
                    )
                    return run, None
                run = rest
            except UnknownRequest as error:
                self._settled = False
                held = self._held.get(error.args[0])
                if held is None or held.ended:
                    raise
                self._end(held, End.ERROR, "the engine lost this request")
                return run, None
            except OutOfMemory as error:
                self._settled = False
                self._out_of_memory += 1
                if len(run) == 1:
                    self._end(self._held[run[0]], End.ERROR, str(error))
                    return run, None
                self._slots = len(run) // 2
                self._rounds_with_fewer = 0
                log.warning(
                    "the device is out of memory: fewer requests run", slots=self._slots, reason=str(error)
                )
                run = run[: self._slots]
            except DeviceFailed:
                raise
            except Exception as error:
                self._settled = False
                self._fail_alone(run, error)
                return run, None

    def _fail_alone(self, run: tuple[str, ...], error: Exception) -> None:
        """End the requests of a round that raise alone. Raises if all of them do: the engine has failed."""
        log.warning("a round failed", requests=len(run), exc_info=error)
        halves = [run[: len(run) // 2], run[len(run) // 2 :]] if len(run) > 1 else [run]
        guilty: dict[str, Exception] = {run[0]: error} if len(run) == 1 else {}
        innocent = 0
        while halves and len(run) > 1:
            part = halves.pop()
            try:
                self._report_part(self.engine.round(part))
                innocent += len(part)
            except DeviceFailed:
                raise
            except (OutOfBlocks, OutOfMemory, UnknownRequest):
                innocent += len(part)  # another error, which the next round handles
            except Exception as alone:
                if len(part) == 1:
                    guilty[part[0]] = alone
                else:
                    halves += [part[: len(part) // 2], part[len(part) // 2 :]]
        self._failed_in_a_row = 0 if innocent else self._failed_in_a_row + len(guilty)
        if not innocent and (len(run) > 1 or self._failed_in_a_row >= FAILURES_IN_A_ROW):
            raise error
        for name, cause in guilty.items():
            reason = (str(cause).strip().splitlines() or [""])[0]
            self._end(
                self._held[name],
                End.ERROR,
                f"the engine failed on this request: {type(cause).__name__}{': ' + reason if reason else ''}",
            )

    def _report_part(self, result: RoundResult) -> None:
        """Report a round run by the search for the failing request; it counts like any other."""
        self._reserve_clock = self._reserve_clock_then
        self._report(result)

    def _regain_slots(self) -> None:
        if self._slots < self._capacity.slots:
            self._rounds_with_fewer += 1
            if self._rounds_with_fewer >= ROUNDS_WITH_FEWER:
                self._slots = min(2 * self._slots, self._capacity.slots)
                self._rounds_with_fewer = 0
                self._settled = False

    def _relieve(self, run: tuple[str, ...]) -> tuple[str, ...] | None:
        """Push out a request that does not run, else leave out the last of `run`.

        Returns the requests to run. None: only the first is left, and there is no other request to push out.
        """
        runs = set(run)
        for name, held in self._held.items():
            if name not in runs and held.residency is Residency.DEVICE:
                self._push_out(held)
                return run
        if len(run) == 1:
            return None
        if self._held[run[-1]].residency is Residency.DEVICE:
            self._push_out(self._held[run[-1]])
        return run[:-1]

    def _report(
        self,
        result: RoundResult,
        swap_out_s: float = 0.0,
        idle_s: float = 0.0,
        context_tokens: int = 0,
        preempted: int = 0,
    ) -> None:
        """Record the outcome of a round and deliver its report."""
        self._number += 1
        progress: list[tuple[int, RequestRound]] = []
        reached: list[tuple[_Held, int, bool]] = []
        any_ended = False
        swapped_in = 0
        for step in result.requests:
            held = self._held[step.request_id]
            held.output.extend(step.tokens)
            ended = step.finish is not None
            if ended:
                held.ended = any_ended = True
                held.residency = Residency.NONE
            elif held.residency is not Residency.DEVICE:
                swapped_in += held.tokens if held.residency is Residency.HOST else 0
                self._note_residency(held)
            emitted = len(held.output)
            if emitted - held.acknowledged >= self._max_tokens:
                self._settled = False
            progress.append((held.lease_epoch, step))
            reached.append((held, emitted, ended))
        if any_ended:
            self._settled = False
            self._run = tuple([name for name in self._run if not self._held[name].ended])
        for held, step in self._failures:
            progress.append((held.lease_epoch, step))
            reached.append((held, len(held.output), True))
        self._free = (result.free_target_blocks, result.free_draft_blocks)
        self._unacknowledged.append(_Unacknowledged(self._number, reached))
        report = Round(
            self._number,
            result,
            progress,
            self._changes,
            swap_out_s,
            idle_s,
            self._waited_s,
            context_tokens,
            swapped_in,
            preempted,
            self._out_of_memory,
        )
        self._failures = []
        self._out_of_memory = 0
        self._changes = []
        self._waited_s = 0.0
        self._deliver(report)
