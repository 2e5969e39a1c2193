"""The one task of a leader: collect messages, call the core, carry out its commands. The record comes first.

A turn:
  1. take what is in the inbox, up to a bound, and the timers that are due;
  2. write new requests to the record, and send "accepted" for those that it took;
  3. write the tokens that workers have reported, and the transitions that the core decided in the turn before, as
     one batch, again and again until the record has answered;
  4. while it works: `core.step(now, events)`, which decides the transitions of the next turn;
  5. only after the answer: mark committed tokens for delivery to clients, acknowledge reports, send drops,
     specifications, assignments of the turn before.

Tokens that continue a request under its lease need no decision (`Live.takes`): the core counts them. Everything
else that a worker reports waits for the core, and so does all that follows for the same request until the record
has it.

One task has all of it, so there is no lock: while it awaits the record, no other task changes the state. A
refusal of the record is an event of the next turn. Every end of a request (finished, cancelled, deadline,
worker lost) takes the same path.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from laps_sd.contract.ends import End
from laps_sd.contract.length_probe import LearntProbe
from laps_sd.service.log import SHARD_LOAD, get_logger
from scheduler_svc import metrics
from scheduler_svc.core.commands import (
    Assign,
    Command,
    Commit,
    Drained,
    Drop,
    Finish,
    Lease,
    Rank,
    Release,
)
from scheduler_svc.core.events import EndRequested, Recovered, WorkerDraining
from scheduler_svc.core.merged_rounds import MergedRounds
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.leader.chores import Chores
from scheduler_svc.leader.clients import Clients
from scheduler_svc.leader.live import Live, all_recorded, from_record, recovered, take_reported
from scheduler_svc.leader.load_log import LoadLog
from scheduler_svc.leader.outage import Outage
from scheduler_svc.leader.probes import Probes
from scheduler_svc.leader.queue_limits import QueueLimits
from scheduler_svc.leader.repair import Repair
from scheduler_svc.leader.retries import until_answered
from scheduler_svc.leader.roster import Roster
from scheduler_svc.leader.sessions import WorkerSession
from scheduler_svc.leader.tracing import RequestTraces
from scheduler_svc.leader.turn import (
    TRANSITIONS,
    CancelOrdered,
    DrainOrdered,
    FromGateway,
    FromWorker,
    GatewayClosed,
    Item,
    LeadInDoubt,
    Timers,
    Transition,
    Turn,
    WorkerClosed,
    WorkerOpened,
)
from scheduler_svc.leader.working_copy import WorkingCopy
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.batch import Batch, Pending
from scheduler_svc.store.records import ON_RECORD, PackedPromptLogprobs, TransitionStatus
from scheduler_svc.store.store import Store
from scheduler_svc.wire import replies, reports

log = get_logger(__name__)

MAX_INBOX = 20_000
"""Items that may wait for a turn; with more, streams are no longer read."""
MAX_TURN = 256
"""Items of one turn, and the timers of requests that it runs at most. A loop that is late gains nothing from longer
turns, while everything that a turn writes has to be on the record within the store's timeout: 256 reports of 64
requests take it about half a second.
"""
MAX_TURN_TOKENS = 1 << 20
"""Prompt tokens of one turn, or one request with more: checking and writing so many takes some tenths of a
second, in which no lease is renewed.
"""
MAX_INBOX_TOKENS = 4 * MAX_TURN_TOKENS
"""Prompt tokens of the submissions that may wait for a turn; with more, streams are no longer read either. The number
of items alone does not bound their memory: 20,000 prompts of 128,000 tokens take 20 GB.
"""
GRACES_TOGETHER = 1024
"""Requests of which a new leader starts the grace periods before it lets other tasks run."""
OBSERVE_S = 1.0
"""Seconds between two readings of the queue's gauges."""
BEGUN_KEPT_S = 1.0
"""Seconds for which the number of begun requests is kept: counting 100,000 takes 7 ms, and each worker with another
model pair dials about once a second."""


class Loop:
    """Leader of one shard, from `recover` until it is fenced."""

    def __init__(
        self,
        *,
        settings: SchedulerSettings,
        core: Scheduler,
        store: Store,
        clock: Callable[[], float],
        outage: Outage,
        traces: RequestTraces,
        probes: Probes,
    ) -> None:
        self.settings = settings
        self.core = core
        self.store = store
        self.clock = clock
        self.outage = outage
        self.probes = probes
        self.room = asyncio.Event()
        """Event that is cleared while the loop is far behind: streams are not read then, and flow control
        holds the peers back.
        """
        self.room.set()
        self.timers = Timers()
        self._client_timers = Timers()
        """Timers of requests and their clients, apart from the others: any number of them may be due at the same
        time, and a turn runs MAX_TURN at most.
        """
        self.roster = Roster(settings, self.timers)
        self.working_copy = WorkingCopy(self.roster, self._client_timers, traces)
        self._repair = Repair(store=store, working_copy=self.working_copy, outage=outage, clock=clock)
        self._limits = QueueLimits(
            settings=settings, core=core, roster=self.roster, working_copy=self.working_copy, outage=outage
        )
        self.clients = Clients(
            settings=settings,
            store=store,
            working_copy=self.working_copy,
            limits=self._limits,
            repair=self._repair,
            timers=self._client_timers,
            outage=outage,
        )
        self._chores = Chores(
            core=core,
            store=store,
            working_copy=self.working_copy,
            repair=self._repair,
            probes=probes,
            timers=self.timers,
            outage=outage,
            clock=clock,
            save_s=settings.priors_save_s,
            doubt_lead=lambda: self.put(LeadInDoubt()),
        )
        self._inbox: deque[Item] = deque()
        self._inbox_tokens = 0
        """Prompt tokens of the submissions in it."""
        self._arrived = asyncio.Event()
        self._rounds = MergedRounds()
        """Reports that the core has not received."""
        self._decided: Turn | None = None
        """The turn before, if the record must have its transitions before the rest of it is carried out."""
        self._load_log = LoadLog(clock())
        self._begun = 0
        self._begun_counted_s = 0.0
        self._kv_usage = 0.0
        """Share of KV blocks in use, as read last."""
        self._recovered_from: str | None = None
        """Incarnation of the record that the working copy was read from. While the record has this one, workers may hold
        what an emptied record has lost; a leader that outlived the loss has everything itself.
        """

    # Interface of the loop.

    def load(self, *, gateways: int) -> replies.ShardLoad:
        """Return the load by which gateways choose a shard; `gateways`: the number of gateways that receive
        it.
        """
        return replies.shard_load(
            backlog_s=self.core.totals().backlog_s,
            requests=len(self.working_copy.live),
            workers=self.roster.connected,
            gateways=gateways,
            kv_usage=self._kv_usage,
            refuses=self._limits.refusal_of_any(),
            capacity_tokens=self._limits.most_tokens,
            vocabulary=self.roster.vocabulary,
        )

    def put(self, item: Item) -> None:
        """Queue an item for the next turn."""
        self._inbox.append(item)
        self._inbox_tokens += _submitted_tokens(item)
        self._arrived.set()
        if self._is_behind():
            self.room.clear()

    def _is_behind(self) -> bool:
        return len(self._inbox) > MAX_INBOX or self._inbox_tokens > MAX_INBOX_TOKENS

    def agrees(self, fingerprint: str, *, has_accepted: bool) -> bool:
        """Return True if a worker's model pair is the pool's; see `Roster.agrees`."""
        return self.roster.agrees(fingerprint, begun=self.begun, has_accepted=has_accepted)

    def begun(self) -> int:
        """Return the number of unfinished requests that workers have begun. It may be `BEGUN_KEPT_S` old, but a
        0 is of now.
        """
        now_s = self.clock()
        if not self._begun or now_s - self._begun_counted_s >= BEGUN_KEPT_S:
            self._begun = sum(live.has_begun for live in self.working_copy.live.values())
            self._begun_counted_s = now_s
        return self._begun

    async def recover(self) -> None:
        """Rebuild the working copy from the record. Called once, before anything else. Raises
        StoreUnavailable, Fenced.
        """
        collects = gc.isenabled()
        gc.disable()  # all that is made here stays: the search for cycles would take a third of the time
        try:
            await self._recover()
            if collects:
                # Nor do the searches that follow look at it: the first one would hold up everything else at once.
                gc.freeze()
        finally:
            if collects:
                gc.enable()

    async def _recover(self) -> None:
        self._recovered_from = self.store.incarnation
        holders: set[str] = set()
        self.working_copy.newest_sequence = await self.store.last_sequence()
        async for chunk in self.store.load_unfinished():
            events: list[Recovered] = []
            for stored in chunk:
                if stored.length_features and not self.settings.predict_lengths:
                    stored = replace(stored, length_features=b"")  # an earlier leader had it on
                live = from_record(stored)
                events.append(recovered(live))
                self.working_copy.adopt(live)
                if stored.worker_id is not None:
                    holders.add(stored.worker_id)
            # Not all of them at the end: a core that ranks 100,000 requests in one go works for longer than the lease
            # lasts, and only between two chunks is it renewed.
            self.core.recover(self.clock(), events)
        begun = (live.pair for live in self.working_copy.live.values() if live.has_begun and live.pair)
        self.roster.fingerprint = next(begun, "")
        now_s = self.clock()  # peers may connect from now on, however long the reading took
        if self.store.record_was_empty:
            self.clients.brought_back_until_s = now_s + self.settings.reattach_grace_s
        for number, live in enumerate(self.working_copy.live.values(), start=1):
            self.clients.start_grace(live, now_s, self.settings.reattach_grace_s)
            if number % GRACES_TOGETHER == 0:
                await asyncio.sleep(0)  # the lease is renewed in between
        for worker_id in sorted(holders):
            self.roster.expect(worker_id, now_s)
        self._limits.workers_come_until_s = now_s + self.settings.worker_grace_s
        self._chores.start(now_s)
        self.timers.at(now_s, self._observe_queue)
        if self.settings.log_load_s:
            self.timers.at(now_s + self.settings.log_load_s, self._write_load)
        if self.working_copy.live:
            log.info("recovered", requests=len(self.working_copy.live), workers=len(self.roster.workers))
            self._decided = Turn(now_s)
            self._take(self._decided, self.core.step(now_s, ()))

    async def run(self) -> None:
        """Run turn after turn, until `Fenced` is raised out of it."""
        while True:
            await self._wait()
            items = self._next_items()
            self._arrived.clear()
            if not self._is_behind():
                self.room.set()
            await self._turn(items)

    def _next_items(self) -> list[Item]:
        items: list[Item] = []
        tokens = 0
        while self._inbox and len(items) < MAX_TURN and tokens < MAX_TURN_TOKENS:
            item = self._inbox.popleft()
            items.append(item)
            self._inbox_tokens -= _submitted_tokens(item)
            tokens += self._prompt_tokens(item)
        return items

    def _prompt_tokens(self, item: Item) -> int:
        """Return the number of prompt tokens that the turn of an item reads or sends because of it."""
        if not isinstance(item, FromGateway) or not item.message.attach.wants_submission:
            return _submitted_tokens(item)
        live = self.working_copy.live.get(item.message.attach.request_id)
        return 0 if live is None else live.facts.prompt_tokens

    async def _wait(self) -> None:
        if self._inbox or self._repair.events or self._decided is not None:
            await asyncio.sleep(0)  # let the streams' handlers send what the last turn decided
            return
        times_s = (self.timers.next_s, self._client_timers.next_s)
        next_s = min((time_s for time_s in times_s if time_s is not None), default=None)
        # Not wait_for: on Python 3.11 it can lose a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if next_s is None else max(0.0, next_s - self.clock())):
                await self._arrived.wait()

    async def _turn(self, items: Iterable[Item]) -> None:
        turn = Turn(self.clock(), events=self._repair.events)
        self._repair.events = []
        for event in turn.events:
            # The record may name a worker that was lost before, or that never dialled this leader.
            if isinstance(event, Recovered) and event.worker_id is not None:
                self.roster.expect(event.worker_id, turn.now_s)
        for item in items:
            self._collect(turn, item)
        self.timers.run_due(turn)
        self._client_timers.run_due(turn, MAX_TURN)
        if turn.lead_in_doubt:
            await self._repair.confirm_lead()
            for settled in turn.settled:
                settled.set()
        if self.working_copy.doubtful:  # before a submission with the same idempotency key finds one of them
            await self.clients.withdraw_doubtful()
        if turn.submits:
            await self.clients.admit(turn)
        if turn.offers:
            self.clients.take_offers(turn)
        if turn.restores:
            await self.clients.restore(turn)
        for live, shown in turn.seen_further:
            await self._repair.continue_after(turn, live, shown)
        if turn.unknown_attaches or turn.unknown_submits:
            await self.clients.answer_from_record(turn)
        if turn.departures:
            await self.clients.depart(turn)
        await self._write_and_decide(turn)
        for chore in turn.chores:
            await chore()
        if self.outage.stuck:  # this turn waited, and has written nothing since: nothing waits any more
            self._excuse()
            self.outage.stuck = False
        self._load_log.add(*metrics.observe_turn(turn.events))

    def _excuse(self) -> None:
        """Give no peer up because it could not report, or come back, while the record was unavailable."""
        now_s = self.clock()
        self.roster.excuse(now_s)
        self.clients.still_coming(now_s)

    # Collect.

    def _collect(self, turn: Turn, item: Item) -> None:
        match item:
            case FromWorker(session, message):
                self._handle_worker(turn, session, message)
            case FromGateway(session, message):
                self.clients.handle(turn, session, message)
            case WorkerOpened(session, message):
                hello = reports.hello_of(message)
                self.roster.opened(turn, session, hello)
                learnt = None if hello.probe is None else self.probes.of(hello.probe)
                if learnt is not None:
                    session.teach(learnt)
                if self.store.incarnation == self._recovered_from:
                    turn.offers.extend(hello.offers)
            case WorkerClosed(session, silent):
                self.roster.closed(turn, session, silent=silent)
            case GatewayClosed(session):
                turn.departures.append((session, None))
            case DrainOrdered(worker_id):
                self.roster.drain(turn, worker_id)
            case CancelOrdered(request_id):
                turn.events.append(EndRequested(request_id, End.CANCELLED, "cancelled by an operator"))
            case LeadInDoubt(settled):
                turn.lead_in_doubt = True
                if settled is not None:
                    turn.settled.append(settled)

    def _handle_worker(self, turn: Turn, session: WorkerSession, message: reports.WorkerMessage) -> None:
        entry = self.roster.workers.get(session.worker_id)
        if entry is None or entry.session is not session:
            return  # an older stream of a worker that has reconnected: the new stream carries everything
        match reports.from_worker(session.worker_id, message):
            case list() as rounds:
                entry.last_report_s = turn.now_s
                for report in rounds:
                    self._handle_report(turn, session, report)
            case reports.Missing(request_ids):
                turn.respecify.extend((session, request_id) for request_id in request_ids)
            case LearntProbe() as learnt:
                if problem := self.probes.take(learnt):
                    log.warning("a worker's probe is ignored", worker_id=session.worker_id, reason=problem)
            case reports.Leaving():
                turn.events.append(WorkerDraining(session.worker_id))

    def _handle_report(self, turn: Turn, session: WorkerSession, report: reports.Report) -> None:
        event = report.event
        if report.cache is not None:
            turn.events.append(report.cache)
        turn.events.append(event)
        turn.acknowledge[session] = max(report.number, turn.acknowledge.get(session, 0))
        for one in report.details:
            live = self.working_copy.live.get(one.request_id)
            if live is None:
                continue
            if live.started_s is None:
                # Later a worker also finds what this request itself has left in its cache.
                live.cached_prompt_tokens = one.cached_tokens
            if one.lease_epoch == live.lease_epoch:
                live.record_logprobs(one.position, one.logprobs)
                if packed := live.record_prompt_logprobs(one.prompt_logprobs):
                    found = PackedPromptLogprobs(one.request_id, one.lease_epoch, packed)
                    turn.prompt_logprobs.append(found)
        if not take_reported(self.working_copy.live, event, turn.now_s, turn.taken):
            turn.needs_core.add(session)

    def _observe_queue(self, turn: Turn) -> None:
        self._rounds.hurry_late(turn.now_s, OBSERVE_S)
        self._kv_usage = metrics.observe_queue(self.core, self.settings.pool, turn.now_s)
        self.timers.at(turn.now_s + OBSERVE_S, self._observe_queue)
        self._chores.each_second(turn)

    def _write_load(self, turn: Turn) -> None:
        self.timers.at(turn.now_s + self.settings.log_load_s, self._write_load)
        fields = self._load_log.fields(
            turn.now_s, self.core.totals(), workers=self.roster.connected, kv_usage=self._kv_usage
        )
        if fields is not None:
            log.info(SHARD_LOAD, shard=self.settings.shard, **fields)

    # Act.

    async def _write_and_decide(self, turn: Turn) -> None:
        """Write what the turn before has decided and the tokens of this turn. While the record works, the core
        decides about this turn.
        """
        before, self._decided = self._decided, None
        decided = before.transitions if before is not None else []
        for transition in decided:  # not later: this turn may decide about the same requests
            if (live := self.working_copy.live.get(transition.request_id)) is not None:
                live.settling = False
        if decided or turn.taken or turn.prompt_logprobs:
            writing = asyncio.create_task(self._record(decided, turn.taken, turn.prompt_logprobs))
            try:
                await asyncio.sleep(0)  # it is sent now
                self._decide(turn)
            except BaseException:
                writing.cancel()
                raise
            await self._recorded_or_refused(turn, decided, *await writing)
        else:
            self._decide(turn)
        if before is not None:
            before.refused |= turn.refused
            self._carry_out(before)
        for session in turn.acknowledge.keys() - turn.needs_core:
            session.acknowledge(turn.acknowledge.pop(session))
        if turn.transitions:
            self._decided = turn
        else:
            self._carry_out(turn)

    def _decide(self, turn: Turn) -> None:
        """Have the core decide about the events of a turn."""
        events = self._rounds.due(turn.events, turn.now_s, self._worker_of)
        if not events and not self.core.has_suspects:
            return
        self._take(turn, self.core.step(turn.now_s, events))
        if events:
            metrics.observe_estimates(self.core.estimate_errors.latest)

    def _take(self, turn: Turn, commands: list[Command]) -> None:
        """Make commands of the core those of a turn, without tokens that are on the record or being written."""
        turn.commands = commands
        for command in commands:
            if not isinstance(command, TRANSITIONS):
                continue
            live = self.working_copy.live.get(command.request_id)
            if live is not None:
                if isinstance(command, Commit):
                    if _is_known(command, live):
                        live.standing = command.standing
                        continue
                    command = _without_known(command, live)
                    live.taken = max(live.taken, command.position + len(command.tokens))
                elif isinstance(command, Lease | Release) and live.worker_id is not None:
                    self._rounds.hurry(live.worker_id)
                live.settling = True
            turn.transitions.append(command)

    def _worker_of(self, request_id: str) -> str | None:
        live = self.working_copy.live.get(request_id)
        return None if live is None else live.worker_id

    async def _recorded_or_refused(
        self,
        turn: Turn,
        decided: Sequence[Transition],
        statuses: Sequence[TransitionStatus],
        lost: Mapping[str, TransitionStatus],
    ) -> None:
        """Carry the answers of the record, to `decided` and to what this turn has taken, into the working copy. What
        this turn has decided about a request for which the record refused something goes: the core decided it in
        a wrong state.
        """
        await self._apply(turn, decided, statuses[: len(decided)])
        of_taken = statuses[len(decided) :]
        if of_taken.count(TransitionStatus.OK) == len(of_taken):  # enums have a slow hash
            all_recorded(self.working_copy.live, turn.taken, turn.now_s)
        else:
            await self._apply(turn, turn.taken, of_taken)
        refused = turn.refused
        unfoldable = {request_id: status for request_id, status in lost.items() if request_id not in refused}
        await self._repair.unfoldable(unfoldable, turn.now_s)
        refused.update(unfoldable)
        if not refused:
            return
        for transition in turn.transitions:
            if transition.request_id in refused:
                self._end_again(transition)
        turn.transitions = [one for one in turn.transitions if one.request_id not in refused]
        for request_id in refused:
            if (live := self.working_copy.live.get(request_id)) is not None:
                live.settling = False

    async def _apply(
        self, turn: Turn, transitions: Sequence[Transition], statuses: Sequence[TransitionStatus]
    ) -> None:
        """Apply transitions that the record has taken, and repair requests of which it refused one."""
        for transition, status in zip(transitions, statuses, strict=True):
            if status in ON_RECORD:
                self.working_copy.recorded(transition, turn.now_s)
            elif transition.request_id not in turn.refused:
                turn.refused.add(transition.request_id)
                kind = type(transition).__name__.lower()
                await self._repair.refused(transition.request_id, kind, status, turn.now_s)
                self._end_again(transition)

    def _end_again(self, transition: Transition) -> None:
        """Have the core end a request again if the record does not have its end, and no report brings it."""
        if isinstance(transition, Finish):
            self._repair.events.append(EndRequested(transition.request_id, transition.end, transition.detail))

    def _carry_out(self, turn: Turn) -> None:
        """Carry out what the record need not have, or has by now."""
        for command in turn.commands:
            match command:
                case Rank(request_id):
                    if (live := self.working_copy.live.get(request_id)) is not None:
                        live.standing = replace(
                            live.standing,
                            level=command.level,
                            score=command.score,
                            preemptions=command.preemptions,
                        )
                case Drop(worker_id, requests):
                    if (session := self.roster.session(worker_id)) is not None:
                        session.drop(requests)
                case Assign():
                    self._assign(command, turn.refused, turn.now_s)
                case Drained(worker_id):
                    self.roster.drained(worker_id)
        for session, request_id in turn.respecify:
            live = self.working_copy.live.get(request_id)
            if live is not None and request_id in session.known:
                self._specify(session, live, session.known[request_id], turn.now_s)
        for session, number in turn.acknowledge.items():
            session.acknowledge(number)
        self.clients.answer_cancelled(turn)

    async def _record(
        self,
        decided: Sequence[Transition],
        taken: Sequence[Commit],
        prompt_logprobs: Sequence[PackedPromptLogprobs],
    ) -> tuple[list[TransitionStatus], dict[str, TransitionStatus]]:
        """Write all, and retry: while the record is away nothing is shown and nothing is decided. Return the
        answers to the transitions, and requests that the record was found to have lost.

        Sending the same again is safe: the record answers ALREADY for what it has. Raises Fenced.
        """
        began_s = time.perf_counter()
        batch, answers = self._batch_of(decided, taken)
        if prompt_logprobs:
            batch.keep_prompt_logprobs(prompt_logprobs)  # if it is stale, so are the tokens
        await until_answered(self.outage, batch.execute, fenced=self._repair.confirm_lead)
        if self.outage.stuck:
            self._excuse()
        self.outage.wrote()
        metrics.COMMIT.observe(time.perf_counter() - began_s)
        return [status for answer in answers for status in answer.result()], batch.unfoldable

    def _batch_of(
        self, decided: Sequence[Transition], taken: Sequence[Commit]
    ) -> tuple[Batch, list[Pending[list[TransitionStatus]]]]:
        """Return both as one batch, a run of one kind together, and its answers."""
        batch = Batch(self.store)
        queue: dict[type[Transition], Callable[..., Pending[list[TransitionStatus]]]] = {
            Commit: batch.commit,
            Finish: batch.finish,
            Release: batch.release,
            Lease: lambda leases: batch.lease(leases, self.roster.fingerprint),
        }
        answers = [queue[kind](list(run)) for kind, run in itertools.groupby(decided, type)]
        if taken:
            answers.append(batch.commit(taken))
        return batch, answers

    def _specify(self, session: WorkerSession, live: Live, lease_epoch: int, now_s: float) -> None:
        session.specify(live, lease_epoch, now_s=now_s, incarnation=self.store.incarnation or "")

    def _assign(self, command: Assign, refused: set[str], now_s: float) -> None:
        entry = self.roster.workers.get(command.worker_id)
        if entry is None or entry.session is None:
            return
        live, known = self.working_copy.live, entry.session.known
        entries = []
        for listed in command.entries:
            request_id = listed.request_id
            copy = live.get(request_id)
            if copy is None or request_id in refused:
                continue
            entries.append(listed)
            if not known:
                entry.last_report_s = now_s  # the watchdog counts from the time when there is work
            if known.get(request_id) != listed.lease_epoch:
                self._specify(entry.session, copy, listed.lease_epoch, now_s)
        entry.session.assign(entries)


def _submitted_tokens(item: Item) -> int:
    """Return the number of prompt tokens that an item submits."""
    if isinstance(item, FromGateway) and item.message.HasField("submit"):
        return len(item.message.submit.specification.prompt_ids)
    return 0


def _is_known(commit: Commit, live: Live) -> bool:
    """Return whether a commit adds nothing to what is on the record or being written."""
    return commit.end is None and commit.position + len(commit.tokens) <= live.taken


def _without_known(commit: Commit, live: Live) -> Commit:
    """Return a commit without the tokens that are on the record or being written."""
    known = live.taken - commit.position
    return replace(commit, position=live.taken, tokens=commit.tokens[known:]) if known > 0 else commit
