"""The one task of a leader: collect what arrived, let the core decide, act. Record first, then the wire.

A turn:
  1. take everything in the inbox, and the timers that are due;
  2. write new requests to the record, and say accepted to those it took;
  3. `core.step(now, events)`;
  4. carry out the record commands in one pipeline, again and again until the record has answered;
  5. only then: acknowledge reports, owe committed tokens to clients, send drops, specifications, assignments.

One task owns all of it and nothing is awaited between looking and changing, so there is no lock. A refusal
of the record is news for the next turn. Every way out of a request (finished, cancelled, deadline, worker
lost) is the same path.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from laps_sd.errors import InvalidArgument
from laps_sd.log import get_logger
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from scheduler_svc import metrics, translate
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
from scheduler_svc.core.events import (
    Arrived,
    End,
    EndRequested,
    Event,
    Refused,
    RequestFacts,
    WorkerDraining,
    WorkerLost,
    WorkerUp,
)
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.links import GatewaySession, WorkerSession
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.errors import StoreUnavailable
from scheduler_svc.store.records import (
    NewRequest,
    StoredRequest,
    SubmitResult,
    SubmitStatus,
    TransitionStatus,
)
from scheduler_svc.store.store import Pending, Store
from scheduler_svc.working_copy import Attachment, Live, from_record, recovered

log = get_logger(__name__)

RecordCommand = Commit | Finish | Release | Lease | Rank
MAX_INBOX = 20_000
"""Items that may wait for a turn before streams are no longer read."""
GONE_DETAIL = "the record lost this request"


@dataclass(frozen=True, slots=True)
class FromGateway:
    """One message of a gateway."""

    session: GatewaySession
    message: gateway_pb.GatewayMessage


@dataclass(frozen=True, slots=True)
class GatewayClosed:
    """Its stream ended; its clients may come back through it or another gateway."""

    session: GatewaySession


@dataclass(frozen=True, slots=True)
class WorkerOpened:
    """A worker said hello and was found acceptable."""

    session: WorkerSession
    hello: worker_pb.WorkerHello


@dataclass(frozen=True, slots=True)
class FromWorker:
    """One message of a worker after its hello."""

    session: WorkerSession
    message: worker_pb.WorkerMessage


@dataclass(frozen=True, slots=True)
class WorkerClosed:
    """Its stream ended, or it fell silent."""

    session: WorkerSession
    silent: bool


@dataclass(frozen=True, slots=True)
class DrainOrdered:
    """An operator wants a worker to leave."""

    worker_id: str


Item = FromGateway | GatewayClosed | WorkerOpened | FromWorker | WorkerClosed | DrainOrdered


@dataclass(eq=False)
class WorkerEntry:
    """What the shell knows of a worker, connected or in its grace."""

    worker_id: str
    session: WorkerSession | None
    name: str = ""
    losses: int = 0
    """Counts disconnections, so that an old grace timer does not lose a worker that came back."""
    listed: int = 0
    last_report_s: float = 0.0


@dataclass
class Turn:
    """What one turn collects for the core and for the wire."""

    now_s: float
    events: list[Event] = field(default_factory=list)
    submits: list[FromGateway] = field(default_factory=list)
    chores: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    attaches: list[tuple[GatewaySession, gateway_pb.Attach]] = field(default_factory=list)
    known_keys: list[tuple[FromGateway, str]] = field(default_factory=list)
    """Submissions whose idempotency key belongs to a request that is not led here."""
    acknowledge: dict[WorkerSession, int] = field(default_factory=dict)
    cancelled: list[tuple[GatewaySession, gateway_pb.CancelReply]] = field(default_factory=list)
    respecify: list[tuple[WorkerSession, str]] = field(default_factory=list)


class Loop:
    """Leads one shard from `recover` until it is fenced."""

    def __init__(
        self, *, settings: SchedulerSettings, core: Scheduler, store: Store, clock: Callable[[], float]
    ) -> None:
        self.settings = settings
        self.core = core
        self.store = store
        self.clock = clock
        self.store_down = False
        """While True the links refuse submissions instead of queueing them behind the record."""
        self.fingerprint = ""
        self.live: dict[str, Live] = {}
        self.workers: dict[str, WorkerEntry] = {}
        self._epochs: dict[str, int] = {}
        self._inbox: deque[Item] = deque()
        self._arrived = asyncio.Event()
        self.room = asyncio.Event()
        """Cleared while the loop is far behind: streams are not read then, and flow control holds the peers back."""
        self.room.set()
        self._timers: list[tuple[float, int, Callable[[Turn], None]]] = []
        self._timer_numbers = itertools.count()
        self._next_events: list[Event] = []
        self._saved_priors = ""

    # -- the outside of the loop ------------------------------------------------------------------------------

    def put(self, item: Item) -> None:
        """Hand something to the next turn."""
        self._inbox.append(item)
        self._arrived.set()
        if len(self._inbox) > MAX_INBOX:
            self.room.clear()

    def agrees(self, fingerprint: str) -> bool:
        """Whether a worker's model pair is the pool's: that of the workers that are there, and of the outputs so far."""
        bound = any(entry.session is not None for entry in self.workers.values())
        if not self.fingerprint or not (bound or any(live.committed for live in self.live.values())):
            self.fingerprint = fingerprint
        return self.fingerprint == fingerprint

    async def recover(self) -> None:
        """Rebuild the working copy from the record. Runs once, before anything else."""
        now_s = self.clock()
        self.live.clear()
        self._timers.clear()
        events: list[Event] = []
        absent: set[str] = set()
        async for chunk in self.store.load_unfinished():
            for stored in chunk:
                live = from_record(stored)
                events.append(recovered(stored, live))
                self._adopt(live, stored.lease_epoch)
                self._start_grace(live, now_s, max(live.grace_s, self.settings.reattach_grace_s))
                if stored.worker_id is not None:
                    absent.add(stored.worker_id)
        for worker_id in absent:
            entry = self.workers[worker_id] = WorkerEntry(worker_id, session=None)
            self._start_worker_grace(entry, now_s)
        self._at(now_s + self.settings.priors_save_s, self._save_priors_soon)
        if events:
            log.info("recovered", requests=len(events), workers=len(absent))
            await self._carry_out(Turn(now_s), self.core.step(now_s, events))

    async def run(self) -> None:
        """Turn after turn, until `Fenced` is raised out of it."""
        while True:
            await self._wait()
            items, self._inbox = self._inbox, deque()
            self._arrived.clear()
            self.room.set()
            await self.turn(items)

    async def turn(self, items: Iterable[Item]) -> None:
        """One turn; see the top of the file."""
        turn = Turn(self.clock(), events=self._next_events)
        self._next_events = []
        for item in items:
            self._collect(turn, item)
        self._collect_timers(turn)
        if turn.submits:
            await self._admit(turn)
        commands = self.core.step(turn.now_s, turn.events) if turn.events else []
        await self._carry_out(turn, commands)
        if turn.attaches or turn.known_keys:
            await self._attach_from_record(turn)
        for chore in turn.chores:
            await chore()
        metrics.observe_turn(self.core, turn.events)

    async def _wait(self) -> None:
        if self._inbox or self._next_events:
            await asyncio.sleep(0)  # let the streams' handlers send what the last turn decided
            return
        timeout_s = max(0.0, self._timers[0][0] - self.clock()) if self._timers else None
        # Not wait_for: on Python 3.11 it can lose a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()

    # -- collect ----------------------------------------------------------------------------------------------

    def _collect(self, turn: Turn, item: Item) -> None:
        match item:
            case FromWorker(session, message):
                self._collect_worker(turn, session, message)
            case FromGateway(session, message):
                self._collect_gateway(turn, session, message)
            case WorkerOpened(session, hello):
                self._worker_opened(turn, session, hello)
            case WorkerClosed(session, silent):
                self._worker_closed(turn, session, silent=silent)
            case GatewayClosed(session):
                for attachment in list(session.attachments.values()):
                    self._detach(turn, attachment, self.settings.reattach_grace_s)
            case DrainOrdered(worker_id):
                entry = self.workers.get(worker_id)
                if entry is not None and entry.session is not None:
                    entry.session.drain()
                    turn.events.append(WorkerDraining(worker_id))

    def _collect_gateway(
        self, turn: Turn, session: GatewaySession, message: gateway_pb.GatewayMessage
    ) -> None:
        match message.WhichOneof("message"):
            case "submit":
                turn.submits.append(FromGateway(session, message))
            case "attach":
                attach = message.attach
                live = self.live.get(attach.request_id)
                if live is None:
                    turn.attaches.append((session, attach))
                elif live.facts.tenant != attach.tenant:
                    self._answer_attach(session, attach, None)
                else:
                    self._answer_attach(session, attach, live)
            case "detach":
                live = self.live.get(message.detach.request_id)
                attachment = live.attachments.get(message.detach.attachment_id) if live else None
                # Through another stream by now? Then this gateway's word on it is out of date.
                if attachment is not None and attachment.session is session:
                    self._detach(turn, attachment, 0.0)
                else:
                    session.forget(message.detach.attachment_id)
            case "cancel":
                cancel = message.cancel
                live = self.live.get(cancel.request_id)
                found = live is not None and live.facts.tenant == cancel.tenant
                if found:
                    turn.events.append(
                        EndRequested(cancel.request_id, End.CANCELLED, "cancelled by the client")
                    )
                turn.cancelled.append(
                    (
                        session,
                        gateway_pb.CancelReply(cancel_id=cancel.cancel_id, found=found, cancelled=found),
                    )
                )

    def _collect_worker(self, turn: Turn, session: WorkerSession, message: worker_pb.WorkerMessage) -> None:
        entry = self.workers.get(session.worker_id)
        if entry is None or entry.session is not session:
            return  # an older stream of a worker that has dialled again: it offers everything there
        match message.WhichOneof("message"):
            case "reports":
                entry.last_report_s = turn.now_s
                for report in message.reports.reports:
                    event = translate.round_reported(session.worker_id, report)
                    turn.events.append(event)
                    turn.acknowledge[session] = max(report.number, turn.acknowledge.get(session, 0))
                    for progress, wire in zip(event.progress, report.progress, strict=True):
                        live = self.live.get(progress.request_id)
                        if live is not None:
                            if live.started_s is None:
                                live.started_s = max(live.facts.arrival_s, turn.now_s - event.total_s)
                            live.cached_prompt_tokens = max(live.cached_prompt_tokens, wire.cached)
            case "missing":
                turn.respecify.extend((session, request_id) for request_id in message.missing.request_ids)
            case "drain":
                turn.events.append(WorkerDraining(session.worker_id))

    def _worker_opened(self, turn: Turn, session: WorkerSession, hello: worker_pb.WorkerHello) -> None:
        for other in list(self.workers.values()):
            # The same name under another id, and no stream left: that process is dead, nothing to wait for.
            if (
                other.name == session.worker_name
                and other.worker_id != session.worker_id
                and other.session is None
            ):
                self._lose(turn, other)
        entry = self.workers.setdefault(session.worker_id, WorkerEntry(session.worker_id, session=None))
        if entry.session is not None:
            entry.session.close("the worker has dialled again")
        entry.session = session
        entry.name = session.worker_name
        entry.losses += 1
        entry.last_report_s = turn.now_s
        session.known = {held.request_id: held.lease_epoch for held in hello.held}
        turn.events.append(WorkerUp(translate.worker_facts(hello), translate.held_requests(hello)))
        if hello.draining:
            turn.events.append(WorkerDraining(session.worker_id))
        log.info("worker up", worker_id=session.worker_id, slots=hello.slots, held=len(hello.held))

    def _worker_closed(self, turn: Turn, session: WorkerSession, *, silent: bool) -> None:
        entry = self.workers.get(session.worker_id)
        if entry is None or entry.session is not session:
            return
        entry.session = None
        log.warning("worker stream ended", worker_id=session.worker_id, silent=silent)
        if silent:
            self._lose(turn, entry)
        else:
            self._start_worker_grace(entry, turn.now_s)

    def _start_worker_grace(self, entry: WorkerEntry, now_s: float) -> None:
        losses = entry.losses

        def over(turn: Turn) -> None:
            if entry.session is None and entry.losses == losses:
                self._lose(turn, entry)

        self._at(now_s + self.settings.worker_grace_s, over)

    def _lose(self, turn: Turn, entry: WorkerEntry) -> None:
        entry.losses += 1
        if self.workers.pop(entry.worker_id, None) is not None:
            log.warning("worker lost", worker_id=entry.worker_id)
            turn.events.append(WorkerLost(entry.worker_id))

    # -- timers -----------------------------------------------------------------------------------------------

    def _at(self, when_s: float, action: Callable[[Turn], None]) -> None:
        heapq.heappush(self._timers, (when_s, next(self._timer_numbers), action))

    def _collect_timers(self, turn: Turn) -> None:
        while self._timers and self._timers[0][0] <= turn.now_s:
            heapq.heappop(self._timers)[2](turn)

    def _end_at(self, live: Live, when_s: float, end: End, detail: str) -> None:
        request_id = live.request_id

        def passed(turn: Turn) -> None:
            if request_id in self.live:
                turn.events.append(EndRequested(request_id, end, detail))

        self._at(when_s, passed)

    def _start_grace(self, live: Live, now_s: float, grace_s: float) -> None:
        if live.keep or live.attachments:
            return
        live.detached += 1
        detached = live.detached

        def over(turn: Turn) -> None:
            if self.live.get(live.request_id) is live and not live.attachments and live.detached == detached:
                turn.events.append(EndRequested(live.request_id, End.CANCELLED, "its client went away"))

        self._at(now_s + grace_s, over)

    def _save_priors_soon(self, turn: Turn) -> None:
        self._at(turn.now_s + self.settings.priors_save_s, self._save_priors_soon)
        turn.chores.append(self._save_priors)

    async def _save_priors(self) -> None:
        blob = json.dumps(self.core.priors.to_dict(), separators=(",", ":"))
        if blob == self._saved_priors:
            return
        try:
            await self.store.save_priors(blob.encode())
        except StoreUnavailable:
            return  # the next interval tries again; what was learnt is only a convenience
        self._saved_priors = blob

    # -- requests in and clients on them ----------------------------------------------------------------------

    def _adopt(self, live: Live, lease_epoch: int = 0) -> None:
        self.live[live.request_id] = live
        self._epochs[live.request_id] = lease_epoch
        if live.deadline_s is not None:
            self._end_at(live, live.deadline_s, End.DEADLINE, "the client's deadline passed")
        if live.time_limit_s is not None:
            self._end_at(live, live.time_limit_s, End.TIME_LIMIT, "the time limit passed")

    async def _admit(self, turn: Turn) -> None:
        """Record new requests; what the record takes is accepted, and only that."""
        unix_ms = round(turn.now_s * 1000)
        admitted: list[tuple[FromGateway, NewRequest]] = []
        for item in turn.submits:
            submit = item.message.submit
            try:
                translate.check_submission(submit, self.settings.max_context_tokens)
            except InvalidArgument as error:
                self._refuse(item, gateway_pb.SubmitRefused.REASON_INVALID, error.message)
                continue
            if submit.HasField("deadline_in_ms") and submit.deadline_in_ms == 0:
                self._refuse(
                    item, gateway_pb.SubmitRefused.REASON_EXPIRED, "the deadline passed before acceptance"
                )
                continue
            admitted.append((item, _new_request(submit, unix_ms)))
        if not admitted:
            return
        try:
            results = await self.store.submit([new for _, new in admitted])
        except StoreUnavailable as error:
            for item, _ in admitted:
                self._refuse(
                    item, gateway_pb.SubmitRefused.REASON_STORE_UNAVAILABLE, str(error), retry_after_ms=1000
                )
            return
        for (item, new), result in zip(admitted, results, strict=True):
            self._admitted(turn, item, new, result)

    def _admitted(self, turn: Turn, item: FromGateway, new: NewRequest, result: SubmitResult) -> None:
        submit = item.message.submit
        reasons = gateway_pb.SubmitRefused
        match result.status:
            case SubmitStatus.ACCEPTED:
                live = self.live.get(new.request_id)
                if live is None:  # else: a gateway repeats a Submit whose answer it never got
                    live = _live(new, result.sequence, submit)
                    self._adopt(live)
                    turn.events.append(Arrived(live.facts))
                self._accept(item, live, attached=False)
            case SubmitStatus.ATTACHED:
                known = self.live.get(result.request_id)
                if known is not None:
                    self._accept(item, known, attached=result.request_id != new.request_id)
                else:
                    turn.known_keys.append((item, result.request_id))
            case SubmitStatus.CONFLICT:
                self._refuse(
                    item, reasons.REASON_KEY_CONFLICT, "the idempotency key was used with another body"
                )
            case SubmitStatus.QUEUE_FULL:
                detail = f"the queue of shard {self.settings.shard} is full"
                self._refuse(item, reasons.REASON_QUEUE_FULL, detail, retry_after_ms=self._retry_after_ms())
            case SubmitStatus.TENANT_FULL:
                detail = (
                    f"the tenant has {self.settings.max_requests_per_tenant} unfinished requests, the limit"
                )
                self._refuse(item, reasons.REASON_TENANT_FULL, detail, retry_after_ms=self._retry_after_ms())

    def _retry_after_ms(self) -> int:
        """A guess at when there is room: the time the queue takes per request, bounded to 0.1 to 30 s."""
        workers = max(1, len(self.workers))
        return round(
            1000 * min(30.0, max(0.1, self.core.totals().backlog_s / max(1, len(self.live)) / workers))
        )

    def _refuse(
        self, item: FromGateway, reason: gateway_pb.SubmitRefused.Reason, detail: str, retry_after_ms: int = 0
    ) -> None:
        refused = gateway_pb.SubmitRefused(reason=reason, detail=detail, retry_after_ms=retry_after_ms)
        reply = gateway_pb.SubmitReply(submission_id=item.message.submit.submission_id, refused=refused)
        item.session.reply(gateway_pb.GatewayLinkReply(submit_reply=reply))
        metrics.SUBMISSIONS.labels("refused").inc()

    def _accept(self, item: FromGateway, live: Live, *, attached: bool) -> None:
        submit = item.message.submit
        accepted = gateway_pb.SubmitAccepted(
            request_id=live.request_id,
            attached_to_existing=attached,
            seed=live.specification.seed,
            prompt_tokens=live.facts.prompt_tokens,
        )
        reply = gateway_pb.SubmitReply(submission_id=submit.submission_id, accepted=accepted)
        item.session.reply(gateway_pb.GatewayLinkReply(submit_reply=reply))
        self._attach(item.session, live, submit.attachment_id, 0)
        metrics.SUBMISSIONS.labels("attached" if attached else "accepted").inc()

    def _attach(self, session: GatewaySession, live: Live, attachment_id: str, from_token: int) -> None:
        before = live.attachments.get(attachment_id)
        if before is not None:  # the gateway dialled again: this is the newer stream of the same client
            before.session.forget(attachment_id)
        attachment = Attachment(attachment_id, session, live, from_token)
        live.attachments[attachment_id] = attachment
        session.attachments[attachment_id] = attachment
        session.owe(attachment)

    def _answer_attach(self, session: GatewaySession, attach: gateway_pb.Attach, live: Live | None) -> None:
        if live is None:
            result = gateway_pb.AttachReply(
                attach_id=attach.attach_id, result=gateway_pb.AttachReply.RESULT_NOT_FOUND
            )
            session.reply(gateway_pb.GatewayLinkReply(attach_reply=result))
            return
        result = gateway_pb.AttachReply(
            attach_id=attach.attach_id,
            result=gateway_pb.AttachReply.RESULT_ATTACHED,
            prompt_tokens=live.facts.prompt_tokens,
            seed=live.specification.seed,
            model=live.model,
            stop=live.specification.stop,
        )
        session.reply(gateway_pb.GatewayLinkReply(attach_reply=result))
        self._attach(session, live, attach.attachment_id, attach.from_token)

    def _detach(self, turn: Turn, attachment: Attachment, at_least_s: float) -> None:
        live = attachment.live
        attachment.session.forget(attachment.attachment_id)
        if live.attachments.get(attachment.attachment_id) is attachment:
            del live.attachments[attachment.attachment_id]
        if self.live.get(live.request_id) is live:
            self._start_grace(live, turn.now_s, max(live.grace_s, at_least_s))
            if live.grace_s == 0 and at_least_s == 0:
                self._collect_timers(turn)

    async def _attach_from_record(self, turn: Turn) -> None:
        """Attach to requests that are not led here: ended ones, mostly."""
        for session, attach in turn.attaches:
            try:
                live = await self._ended_live(attach.request_id)
            except StoreUnavailable:
                reply = gateway_pb.AttachReply(
                    attach_id=attach.attach_id, result=gateway_pb.AttachReply.RESULT_UNAVAILABLE
                )
                session.reply(gateway_pb.GatewayLinkReply(attach_reply=reply))
                continue
            mine = live is not None and live.facts.tenant == attach.tenant
            self._answer_attach(session, attach, live if mine else None)
        for item, request_id in turn.known_keys:
            try:
                live = await self._ended_live(request_id)
            except StoreUnavailable as error:
                live, detail = None, str(error)
            else:
                detail = "the request of this idempotency key cannot be read now"
            if live is not None:
                self._accept(item, live, attached=True)
            else:
                unavailable = gateway_pb.SubmitRefused.REASON_STORE_UNAVAILABLE
                self._refuse(item, unavailable, detail, retry_after_ms=1000)

    async def _ended_live(self, request_id: str) -> Live | None:
        """A request that may have ended since, or before: from the table, else from the record."""
        live = self.live.get(request_id)
        if live is None:
            stored = await self.store.read(request_id)
            live = from_record(stored) if stored is not None and stored.end is not None else None
        return live

    # -- act --------------------------------------------------------------------------------------------------

    async def _carry_out(self, turn: Turn, commands: Sequence[Command]) -> None:
        record = [c for c in commands if isinstance(c, Commit | Finish | Release | Lease | Rank)]
        refused: set[str] = set()
        if record:
            statuses = await self._record(record)
            for command, status in zip(record, statuses, strict=True):
                if status is TransitionStatus.OK or status is TransitionStatus.ALREADY:
                    self._recorded(command, turn.now_s)
                elif not isinstance(command, Rank):
                    refused.add(command.request_id)
                    await self._refused(command, status, turn.now_s)
        for command in commands:
            match command:
                case Drop(worker_id, requests):
                    if (session := self.session(worker_id)) is not None:
                        session.drop(requests)
                case Assign():
                    self._assign(command, refused)
                case Drained(worker_id):
                    if (session := self.session(worker_id)) is not None:
                        session.drained()
        for session, request_id in turn.respecify:
            live = self.live.get(request_id)
            if live is not None and request_id in session.known:
                session.specify(live, session.known[request_id])
        for session, number in turn.acknowledge.items():
            session.acknowledge(number)
        for gateway, reply in turn.cancelled:
            gateway.reply(gateway_pb.GatewayLinkReply(cancel_reply=reply))

    def session(self, worker_id: str) -> WorkerSession | None:
        """The stream of a worker; None while it has none."""
        entry = self.workers.get(worker_id)
        return entry.session if entry is not None else None

    async def _record(self, commands: list[RecordCommand]) -> list[TransitionStatus]:
        """Write, and keep trying: while the record is away nothing is shown and nothing is decided.

        Sending the same batch again is safe (the record answers ALREADY). Raises Fenced.
        """
        pause_s = 0.02
        while True:
            try:
                statuses = await self._write(commands)
            except StoreUnavailable as error:
                if not self.store_down:
                    log.error(
                        "the record is unavailable; nothing is admitted or shown until it is back",
                        error=str(error),
                    )
                self.store_down = True
                metrics.STORE_DOWN.set(1)
                await asyncio.sleep(pause_s)
                pause_s = min(1.0, pause_s * 2)
                continue
            if self.store_down:
                log.info("the record is back")
                self.store_down = False
                metrics.STORE_DOWN.set(0)
            return statuses

    async def _write(self, commands: list[RecordCommand]) -> list[TransitionStatus]:
        """One pipeline; runs of one kind of command are one script call each."""
        batch = self.store.batch()
        queue: dict[type[RecordCommand], Callable[..., Pending[list[TransitionStatus]]]] = {
            Commit: batch.commit,
            Finish: batch.finish,
            Release: batch.release,
            Lease: batch.lease,
            Rank: batch.rank,
        }
        answers = [queue[kind](list(run)) for kind, run in itertools.groupby(commands, type)]
        await batch.execute()
        return [status for answer in answers for status in answer.result()]

    def _recorded(self, command: RecordCommand, now_s: float) -> None:
        live = self.live.get(command.request_id)
        if live is None:
            return
        match command:
            case Commit():
                live.standing = command.standing
                live.append(command.position, command.tokens, now_s)
                if command.end is not None:
                    self._ended(live, command.end, command.detail, command.cut_characters, now_s)
                for attachment in live.attachments.values():
                    attachment.session.owe(attachment)
            case Finish():
                live.standing = command.standing
                self._ended(live, command.end, command.detail, 0, now_s)
                for attachment in live.attachments.values():
                    attachment.session.owe(attachment)
            case Lease():
                self._epochs[live.request_id] = command.lease_epoch

    def _ended(self, live: Live, end: End, detail: str, cut_characters: int, now_s: float) -> None:
        live.finish(end, detail, cut_characters, now_s)
        del self.live[live.request_id]
        self._epochs.pop(live.request_id, None)
        metrics.observe_end(end, live.facts, live.started_s, live.first_token_s, len(live.committed), now_s)

    async def _refused(
        self, command: Commit | Finish | Release | Lease, status: TransitionStatus, now_s: float
    ) -> None:
        """The core's picture was wrong: it forgets the request, and hears again what the record says."""
        request_id = command.request_id
        metrics.REFUSED.labels(type(command).__name__.lower(), status.name.lower()).inc()
        log.warning(
            "the record refused", request_id=request_id, command=type(command).__name__, status=status.name
        )
        self._next_events.append(Refused(request_id, gone=status is TransitionStatus.GONE))
        live = self.live.get(request_id)
        if live is None:
            return
        stored: StoredRequest | None
        try:
            stored = await self.store.read(request_id)
        except StoreUnavailable:
            stored = None
        if stored is not None and stored.end is None:
            live.append(len(live.committed), tuple(stored.committed_ids[len(live.committed) :]), now_s)
            self._next_events.append(recovered(stored, live))
            return
        if stored is not None and stored.end is not None:
            live.append(len(live.committed), tuple(stored.committed_ids[len(live.committed) :]), now_s)
            live.standing = stored.standing
            self._ended(live, stored.end, stored.detail, stored.cut_characters, now_s)
        else:
            self._ended(live, End.ERROR, GONE_DETAIL, 0, now_s)
        for attachment in live.attachments.values():
            attachment.session.owe(attachment)

    def _assign(self, command: Assign, refused: set[str]) -> None:
        entry = self.workers.get(command.worker_id)
        if entry is None or entry.session is None:
            return
        entries = tuple(
            e for e in command.entries if e.request_id not in refused and e.request_id in self.live
        )
        entry.listed = len(entries)
        for listed in entries:
            if entry.session.known.get(listed.request_id) != listed.lease_epoch:
                entry.session.specify(self.live[listed.request_id], listed.lease_epoch)
        entry.session.assign(Assign(command.worker_id, entries))


def _new_request(submit: gateway_pb.Submit, unix_ms: int) -> NewRequest:
    specification = submit.specification
    settings = gateway_pb.Specification()
    settings.CopyFrom(specification)
    settings.ClearField("prompt_ids")
    settings.ClearField("committed_ids")
    return NewRequest(
        request_id=submit.request_id,
        tenant=submit.tenant,
        model=submit.model,
        priority=submit.priority,
        workload_class=submit.workload_class,
        arrival_unix_ms=unix_ms,
        prompt_ids=tuple(specification.prompt_ids),
        max_tokens=specification.max_tokens,
        expected_output_tokens=submit.expected_output_tokens
        if submit.HasField("expected_output_tokens")
        else None,
        deadline_unix_ms=unix_ms + submit.deadline_in_ms if submit.HasField("deadline_in_ms") else None,
        time_limit_ms=submit.time_limit_ms if submit.HasField("time_limit_ms") else None,
        keep=submit.keep,
        grace_ms=-1 if submit.keep else submit.grace_ms,
        idempotency_key=submit.idempotency_key,
        body_hash=submit.body_hash.hex(),
        seed=specification.seed,
        submission=settings.SerializeToString(deterministic=True),
    )


def _live(new: NewRequest, sequence: int, submit: gateway_pb.Submit) -> Live:
    arrival_s = new.arrival_unix_ms / 1000.0
    specification = gateway_pb.Specification()
    specification.CopyFrom(submit.specification)
    specification.ClearField("committed_ids")
    specification.request_id = new.request_id
    return Live(
        facts=RequestFacts(
            request_id=new.request_id,
            sequence=sequence,
            arrival_s=arrival_s,
            tenant=new.tenant,
            priority=new.priority,
            workload_class=new.workload_class,
            prompt_tokens=len(new.prompt_ids),
            max_tokens=new.max_tokens,
            expected_output_tokens=new.expected_output_tokens,
        ),
        model=new.model,
        specification=specification,
        keep=new.keep,
        grace_s=submit.grace_ms / 1000.0,
        deadline_s=None if new.deadline_unix_ms is None else new.deadline_unix_ms / 1000.0,
        time_limit_s=None if new.time_limit_ms is None else arrival_s + new.time_limit_ms / 1000.0,
    )
