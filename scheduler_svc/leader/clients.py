"""Requests and their clients: submissions, attachments, cancels, grace periods, deadlines, ends.

This module holds the table of the requests that this leader leads. A request enters it when the record has
it, and leaves it with its one end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from laps_sd.contract.ends import End
from laps_sd.errors import InvalidArgument
from laps_sd.service.advice import Turns
from laps_sd.service.log import get_logger
from laps_sd.v1 import gateway_link_pb2 as gateway_pb
from laps_sd.v1 import worker_link_pb2 as worker_pb
from scheduler_svc import metrics
from scheduler_svc.core.commands import Commit
from scheduler_svc.core.events import Arrived, EndRequested
from scheduler_svc.leader.live import Attachment, Live, from_record, from_submission, recovered
from scheduler_svc.leader.outage import Outage
from scheduler_svc.leader.sessions import GatewaySession
from scheduler_svc.leader.tracing import RequestTraces
from scheduler_svc.leader.turn import FromGateway, GatewayClosed, Timer, Timers, Turn
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.errors import Fenced, StoreUnavailable
from scheduler_svc.store.records import NewRequest, Shown, SubmitResult, SubmitStatus
from scheduler_svc.store.store import Store
from scheduler_svc.wire import translate

log = get_logger(__name__)

T = TypeVar("T")

MOST_TENANT_TURNS = 1024
"""Number of tenants at their limit whose refused requests are remembered, to spread their retries."""
RETRY_STORE_MS = 1000
LEAST_REQUEST_TOKENS = 2
"""Tokens of the smallest request: one of its prompt, one of its output."""
ENDS_KEPT_S = 10.0
MAX_ENDS_KEPT = 10_000
"""Seconds for which ended requests are kept, and the most that are kept, for a record that loses the last of
what was written: a server that syncs every second loses that much, an asynchronous replica its delay.
"""
Refused = gateway_pb.SubmitRefused


@dataclass(frozen=True, slots=True)
class EndedLately:
    """A request whose end is on the record, and that end as a commit that follows all of its tokens."""

    at_s: float
    live: Live
    commit: Commit


class Clients:
    """Table of the requests and their clients; see the top of the file.

    `confirm_lead` returns when the record holds what this leader committed, or raises Fenced.
    `capacity_tokens` returns the capacity from the core; `retry_after_s` estimates when a full queue has
    room.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        store: Store,
        timers: Timers,
        outage: Outage,
        *,
        confirm_lead: Callable[[], Awaitable[None]],
        capacity_tokens: Callable[[], int],
        retry_after_s: Callable[[], float],
        traces: RequestTraces,
    ) -> None:
        self.live: dict[str, Live] = {}
        self.reserved_tokens = 0
        """Prompt and output tokens that the requests may need in all, as the record counts them against its
        limit.
        """
        self.newest_sequence = 0
        """Largest sequence number of all requests the record has ever accepted, as far as this leader
        knows.
        """
        self.brought_back_until_s = 0.0
        """Time until which gateways and workers bring back lost requests, if the record was empty when this
        leader took over.
        """
        self.ended_lately: deque[EndedLately] = deque(maxlen=MAX_ENDS_KEPT)
        """The ends that the record may still lose, oldest first."""
        self.doubtful: set[str] = set()
        """Ids of submissions that were refused because the record did not answer, and that it may hold all
        the same.
        """
        self._settings = settings
        self._store = store
        self._timers = timers
        self._outage = outage
        self._confirm_lead = confirm_lead
        self._capacity_tokens = capacity_tokens
        self._retry_after_s = retry_after_s
        self._traces = traces
        self._turns = Turns()
        """Turns of the requests that a full queue refused."""
        self._tenant_turns: dict[str, Turns] = {}
        """Turns, by tenant, of the requests that were refused because their tenant has too many."""

    # Begin and end of requests.

    def adopt(self, live: Live) -> None:
        """Lead this request from now on."""
        self.live[live.request_id] = live
        self.reserved_tokens += live.facts.prompt_tokens + live.facts.max_tokens
        self._traces.begin(live)
        self.newest_sequence = max(self.newest_sequence, live.facts.sequence)
        self._set_limits(live)

    def _set_limits(self, live: Live) -> None:
        for timer in live.limits:
            timer.cancel()
        limits = (
            (live.deadline_s, End.DEADLINE, "the client's deadline passed"),
            (live.time_limit_s, End.TIME_LIMIT, "the time limit passed"),
        )
        live.limits = tuple(
            self._end_at(live.request_id, when_s, end, detail)
            for when_s, end, detail in limits
            if when_s is not None
        )

    def ended(self, live: Live, commit: Commit, now_s: float) -> None:
        """Send the end of a request, which is on the record, to its attached clients, and stop leading the
        request.
        """
        assert commit.end is not None, "this is the commit that ended it"
        live.finish(commit.end, commit.detail, commit.cut_characters, now_s)
        live.stop_timers()
        self._traces.ended(live, commit.end, commit.detail, commit.story, now_s)
        del self.live[live.request_id]
        self.reserved_tokens -= live.facts.prompt_tokens + live.facts.max_tokens
        self.owe(live)
        self.forget_old_ends(now_s)
        self.ended_lately.append(
            EndedLately(now_s, live, replace(commit, position=len(live.committed), tokens=()))
        )
        metrics.observe_end(
            commit.end, live.facts, live.started_s, live.first_token_s, len(live.committed), now_s
        )

    def forget_old_ends(self, now_s: float) -> None:
        """Drop the ends that the record can no longer lose. Call it only while the record answers: an outage
        can outlast ENDS_KEPT_S, and what it lost is known afterwards.
        """
        while self.ended_lately and self.ended_lately[0].at_s < now_s - ENDS_KEPT_S:
            self.ended_lately.popleft()

    def ends_are_written_back(self, now_s: float) -> None:
        """Note that the record has the ends since now, and can lose them again."""
        written = [replace(ended, at_s=now_s) for ended in self.ended_lately]
        self.ended_lately.clear()
        self.ended_lately.extend(written)

    def owe(self, live: Live) -> None:
        """Mark a request that has tokens or an end that its attachments have not been sent."""
        for attachment in live.attachments.values():
            attachment.session.owe(attachment)

    def refusal(self) -> Refused | None:
        """Return the reason for which any new request would be refused now; None where one within the limits
        would be accepted.

        Without a worker requests are accepted all the same: they wait for one.
        """
        outage = self._outage.report()
        if outage is not None:
            detail = f"the record of shard {self._settings.shard} cannot be written ({outage.fault})"
            return Refused(
                reason=Refused.REASON_STORE_UNAVAILABLE, detail=detail, retry_after_ms=RETRY_STORE_MS
            )
        if (
            len(self.live) >= self._settings.max_requests
            or self.reserved_tokens + LEAST_REQUEST_TOKENS > self._settings.max_queued_tokens
        ):
            return Refused(
                reason=Refused.REASON_QUEUE_FULL,
                detail=self._queue_is_full(),
                retry_after_ms=round(self._retry_after_s() * 1000),
            )
        return None

    def _queue_is_full(self) -> str:
        return f"the queue of shard {self._settings.shard} is full"

    def start_grace(self, live: Live, now_s: float, at_least_s: float) -> None:
        """Start the grace period of a request without an attached client: it ends unless a client attaches in
        time.
        """
        if live.keep or live.attachments:
            return
        live.stop_grace()
        live.grace = self._end_at(
            live.request_id, now_s + max(live.grace_s, at_least_s), End.CANCELLED, "its client went away"
        )

    def _end_at(self, request_id: str, when_s: float, end: End, detail: str) -> Timer:
        return self._timers.at(when_s, lambda turn: turn.events.append(EndRequested(request_id, end, detail)))

    # Messages of gateways.

    def heard(self, turn: Turn, session: GatewaySession, message: gateway_pb.GatewayMessage) -> None:
        """Handle one message of a gateway."""
        match message.WhichOneof("message"):
            case "submit":
                turn.submits.append(FromGateway(session, message))
            case "attach":
                attach = message.attach
                live = self.live.get(attach.request_id)
                if not translate.can_be_named(attach.request_id, attach.attachment_id):
                    _reply_attach(session, attach, gateway_pb.AttachReply.RESULT_NOT_FOUND)
                elif live is None:
                    turn.unknown_attaches.append((session, attach))
                else:
                    self._answer_attach(session, attach, live, turn.now_s)
            case "detach" | "cancel":
                turn.departures.append(FromGateway(session, message))

    async def depart(self, turn: Turn) -> None:
        """Handle the detaches, cancels and closed streams of this turn, in the order in which they came."""
        cancels = [
            item.message.cancel.request_id
            for item in turn.departures
            if isinstance(item, FromGateway) and item.message.HasField("cancel")
        ]
        try:
            ended = await self._read_ended(cancels)
        except StoreUnavailable:
            ended = None
        for item in turn.departures:
            session = item.session
            if isinstance(item, GatewayClosed):
                # Its clients may come back, through it or through another gateway.
                for attachment in list(session.attachments.values()):
                    self._detach(attachment, turn.now_s, self._settings.reattach_grace_s)
            elif item.message.HasField("detach"):
                # If it has attached through another stream by now, this gateway's detach is out of date.
                left = session.attachments.get(item.message.detach.attachment_id)
                if left is not None:
                    self._detach(left, turn.now_s, 0.0)
            else:
                self._cancel(turn, session, item.message.cancel, ended)

    def _cancel(
        self,
        turn: Turn,
        session: GatewaySession,
        cancel: gateway_pb.CancelRequested,
        ended: Mapping[str, Live] | None,
    ) -> None:
        """Cancel a request for its tenant.

        `ended`: requests that are not led here and have ended; None where the record cannot be read.
        """
        live = self.live.get(cancel.request_id)
        if live is None:
            if ended is None and translate.can_be_named(cancel.request_id):
                return  # no answer: the gateway gives up after its own timeout
            live = (ended or {}).get(cancel.request_id)
        if live is None or live.facts.tenant != cancel.tenant:
            _reply_cancel(session, cancel, found=False, cancelled=False)
        elif live.end is not None:
            _reply_cancel(session, cancel, found=True, cancelled=False)
        else:
            turn.events.append(EndRequested(cancel.request_id, End.CANCELLED, "cancelled by the client"))
            turn.cancelled.append((session, cancel, live))

    async def admit(self, turn: Turn) -> None:
        """Write this turn's submissions to the record; only those that it takes are accepted."""
        unix_ms = round(turn.now_s * 1000)
        admitted: list[tuple[FromGateway, NewRequest]] = []
        for item in turn.submits:
            submit = item.message.submit
            try:
                translate.check_submission(submit, self._limit_tokens())
                translate.check_attachment(submit)
            except InvalidArgument as error:
                _refuse(item, Refused.REASON_INVALID, error.message)
                continue
            if submit.HasField("deadline_in_ms") and submit.deadline_in_ms == 0:
                _refuse(item, Refused.REASON_EXPIRED, "the deadline passed before acceptance")
                continue
            if submit.traceparent:
                submit.specification.traceparent = submit.traceparent
            admitted.append((item, translate.new_request(submit, unix_ms)))
        if not admitted:
            return
        # All earlier lease epochs of the request were smaller than the time in seconds.
        shown = {
            new.request_id: Shown(tuple(item.message.submit.shown_ids), lease_epoch=int(turn.now_s))
            for item, new in admitted
            if item.message.submit.restores
        }
        try:
            results = await self._submit([new for _, new in admitted], shown)
            self._outage.wrote()
        except StoreUnavailable as error:
            self._outage.began(error)
            for item, new in admitted:
                if new.request_id not in self.live and new.request_id not in shown:
                    self.doubtful.add(new.request_id)
                _refuse(item, Refused.REASON_STORE_UNAVAILABLE, str(error), RETRY_STORE_MS)
            return
        for (item, new), result in zip(admitted, results, strict=True):
            live = self.live.get(result.request_id)
            if live is not None and result.status is SubmitStatus.ATTACHED:
                await self._give_time(live, new.deadline_unix_ms)
            self._admitted(turn, item, new, result, shown.get(new.request_id))

    async def _give_time(self, live: Live, deadline_unix_ms: int | None) -> None:
        """Give a request the deadline of a retry with the same idempotency key: the retry may have more time
        than the attempt before, and its caller gets the time that it requested.
        """
        if live.deadline_s is None:
            return
        if deadline_unix_ms is not None and deadline_unix_ms <= live.deadline_s * 1000:
            return
        try:
            extended = await self._leading(lambda: self._store.extend(live.request_id, deadline_unix_ms))
        except StoreUnavailable as error:  # then the earlier deadline stays
            self._outage.began(error)
            return
        if extended:
            live.deadline_s = None if deadline_unix_ms is None else deadline_unix_ms / 1000.0
            self._set_limits(live)

    async def _submit(self, requests: Sequence[NewRequest], shown: Mapping[str, Shown]) -> list[SubmitResult]:
        return await self._leading(lambda: self._store.submit(requests, shown))

    async def _leading(self, write: Callable[[], Awaitable[T]]) -> T:
        """Write to the record, a second time where the lead had to be confirmed first. Raises Fenced,
        StoreUnavailable.
        """
        while True:
            try:
                return await write()
            except Fenced:
                await self._confirm_lead()

    def _limit_tokens(self) -> int:
        """Return the most tokens of a request. Without a worker every request within the settings waits; with
        workers, a request that none of them could hold would never run.
        """
        limit = self._settings.max_context_tokens
        return min(limit, self._capacity_tokens() or limit)

    def _admitted(
        self, turn: Turn, item: FromGateway, new: NewRequest, result: SubmitResult, shown: Shown | None
    ) -> None:
        match result.status:
            case SubmitStatus.ACCEPTED | SubmitStatus.ATTACHED:
                live = self.live.get(result.request_id)
                if live is None and result.sequence > self.newest_sequence:
                    live = from_submission(new, result.sequence, item.message.submit.specification)
                    self._enter(turn, live, shown, "gateway")
                elif live is not None and shown is not None and len(shown.token_ids) > len(live.committed):
                    turn.seen_further.append((live, tuple(shown.token_ids)))
                if live is None:
                    # A known idempotency key, or a repeated Submit whose answer was lost; the request has
                    # ended since.
                    turn.unknown_submits.append((item, result.request_id))
                else:
                    self._accept(item, live)
            case SubmitStatus.CONFLICT:
                _refuse(item, Refused.REASON_KEY_CONFLICT, "the idempotency key was used with another body")
            case SubmitStatus.QUEUE_FULL:
                each_s = self._retry_after_s()
                wait_s = self._turns.next_s(turn.now_s, each_s, each_s)
                _refuse(item, Refused.REASON_QUEUE_FULL, self._queue_is_full(), round(wait_s * 1000))
            case SubmitStatus.ELSEWHERE:
                detail = f"shard {result.shard} decides about the idempotency key"
                _refuse(item, Refused.REASON_KEY_ELSEWHERE, detail, shard=result.shard)
            case SubmitStatus.TENANT_FULL:
                limit = self._settings.max_requests_per_tenant
                detail = f"the tenant has {limit} unfinished requests, which is its limit"
                wait_s = self._tenant_turn_s(new.tenant, limit, turn.now_s)
                _refuse(item, Refused.REASON_TENANT_FULL, detail, round(wait_s * 1000))

    def _tenant_turn_s(self, tenant: str, limit: int, now_s: float) -> float:
        """Return when a tenant at its limit has room for this request, if its requests end as often as those
        of others.
        """
        if len(self._tenant_turns) >= MOST_TENANT_TURNS:
            self._tenant_turns.clear()
        each_s = self._retry_after_s() * len(self.live) / limit
        return self._tenant_turns.setdefault(tenant, Turns()).next_s(now_s, each_s, each_s)

    def _enter(self, turn: Turn, live: Live, shown: Shown | None, source: str) -> None:
        """Begin to lead a request that is on the record now, new or restored."""
        self.adopt(live)
        if shown is None:
            turn.events.append(Arrived(live.facts))
            return
        live.append(0, tuple(shown.token_ids), turn.now_s)
        live.lease_epoch = shown.lease_epoch
        turn.events.append(recovered(live))
        metrics.WRITTEN_BACK.labels(source).inc()

    async def take_offers(self, turn: Turn) -> None:
        """Write requests that workers hold, and that a record emptied under an earlier leader has lost, to
        the record again.

        The worker that holds one drops it, and generation resumes after the acknowledged outputs; its gateway
        attaches by itself.
        """
        unix_ms = round(turn.now_s * 1000)
        for held in turn.offers:
            live = self.live.get(held.request_id)
            if live is not None:
                # Acknowledged outputs are committed: if the record has fewer, it has lost the rest.
                if len(held.specification.committed_ids) > len(live.committed):
                    turn.seen_further.append((live, tuple(held.specification.committed_ids)))
                continue
            submit = translate.offered(held, self._store.incarnation or "", unix_ms)
            if submit is None:
                continue
            try:
                translate.check_submission(submit, self._settings.max_context_tokens)
            except InvalidArgument as error:
                log.warning(
                    "a worker offers what cannot be", request_id=held.request_id[:64], error=str(error)
                )
                continue
            new = translate.new_request(submit, unix_ms)
            shown = Shown(tuple(submit.shown_ids), lease_epoch=int(turn.now_s))
            try:
                [result] = await self._submit([new], {new.request_id: shown})
            except StoreUnavailable as error:
                self._outage.began(error)
                self._timers.at(turn.now_s + RETRY_STORE_MS / 1000, _offer_again(held))
                continue
            if result.status is SubmitStatus.ACCEPTED and result.sequence > self.newest_sequence:
                live = from_submission(new, result.sequence, submit.specification)
                self._enter(turn, live, shown, "worker")
                self.start_grace(live, turn.now_s, self._settings.reattach_grace_s)

    def _accept(self, item: FromGateway, live: Live) -> None:
        submit = item.message.submit
        attached = live.request_id != submit.request_id
        accepted = gateway_pb.SubmitAccepted(
            request_id=live.request_id,
            attached_to_existing=attached,
            seed=live.specification.seed,
            prompt_tokens=live.facts.prompt_tokens,
        )
        reply = gateway_pb.SubmitReply(submission_id=submit.submission_id, accepted=accepted)
        item.session.reply(gateway_pb.GatewayLinkReply(submit_reply=reply))
        _attach(item.session, live, submit.attachment_id, len(submit.shown_ids))
        metrics.SUBMISSIONS.labels("attached" if attached else "accepted").inc()

    def _answer_attach(
        self, session: GatewaySession, attach: gateway_pb.Attach, live: Live | None, now_s: float
    ) -> None:
        if live is None or live.facts.tenant != attach.tenant:
            _reply_attach(session, attach, gateway_pb.AttachReply.RESULT_NOT_FOUND)
            return
        reply = gateway_pb.AttachReply(
            attach_id=attach.attach_id,
            result=gateway_pb.AttachReply.RESULT_ATTACHED,
            prompt_tokens=live.facts.prompt_tokens,
            seed=live.specification.seed,
            model=live.model,
            stop=live.specification.stop,
            submission=live.submission(now_s) if attach.wants_submission and live.end is None else None,
        )
        session.reply(gateway_pb.GatewayLinkReply(attach_reply=reply))
        _attach(session, live, attach.attachment_id, attach.from_token)

    def _detach(self, attachment: Attachment, now_s: float, at_least_s: float) -> None:
        live = attachment.live
        attachment.session.forget(attachment.attachment_id)
        del live.attachments[attachment.attachment_id]
        if self.live.get(live.request_id) is live:
            self.start_grace(live, now_s, at_least_s)

    # Requests that only the record has.

    async def ask_record(self, turn: Turn) -> None:
        """Attach clients to requests that are not led here: they have ended."""
        wanted = [attach.request_id for _, attach in turn.unknown_attaches]
        wanted += [request_id for _, request_id in turn.unknown_submits]
        ended: Mapping[str, Live] = {}
        unavailable: StoreUnavailable | None = None
        try:
            ended = await self._read_ended(wanted)
        except StoreUnavailable as error:
            unavailable = error
        for session, attach in turn.unknown_attaches:
            live = self.live.get(attach.request_id) or ended.get(attach.request_id)
            if live is None and unavailable is not None:
                _reply_attach(session, attach, gateway_pb.AttachReply.RESULT_UNAVAILABLE)
            elif live is None and turn.now_s < self.brought_back_until_s:
                _reply_attach(session, attach, gateway_pb.AttachReply.RESULT_NOT_FOUND_YET)
            else:
                self._answer_attach(session, attach, live, turn.now_s)
        for item, request_id in turn.unknown_submits:
            live = self.live.get(request_id) or ended.get(request_id)
            if live is not None:
                self._accept(item, live)
            else:
                why = "" if unavailable is None else f": {unavailable}"
                detail = f"the request {request_id} of this key cannot be read now{why}"
                _refuse(item, Refused.REASON_STORE_UNAVAILABLE, detail, RETRY_STORE_MS)

    def answer_cancelled(self, turn: Turn) -> None:
        """Answer the cancels of this turn, whose ends are on the record."""
        for session, cancel, live in turn.cancelled:
            by_cancel = live.end is not None and live.end.kind == gateway_pb.RequestEnd.KIND_CANCELLED
            _reply_cancel(session, cancel, found=True, cancelled=by_cancel)

    async def _read_ended(self, request_ids: Iterable[str]) -> dict[str, Live]:
        """Return those of the requests that are not led here and have ended. Raises StoreUnavailable.

        All are read together: clients choose the ids, and a read for each would let them hold up the turn.
        """
        unknown = {
            request_id
            for request_id in request_ids
            if request_id not in self.live and translate.can_be_named(request_id)
        }
        stored = await self._store.read_all(sorted(unknown)) if unknown else {}
        return {
            request_id: from_record(request)
            for request_id, request in stored.items()
            if request.end is not None
        }

    async def settle_doubtful(self) -> list[Live]:
        """Return requests that were refused and that the record holds all the same; the caller ends them.
        Raises StoreUnavailable.
        """
        found: list[Live] = []
        for request_id in list(self.doubtful):
            stored = await self._store.read(request_id)
            self.doubtful.discard(request_id)
            if stored is not None and stored.end is None and request_id not in self.live:
                found.append(from_record(stored))
        return found


def _offer_again(held: worker_pb.HeldRequest) -> Callable[[Turn], None]:
    return lambda turn: turn.offers.append(held)


def _attach(session: GatewaySession, live: Live, attachment_id: str, from_token: int) -> None:
    before = live.attachments.get(attachment_id)
    if before is not None:  # the gateway reconnected: this is the newer stream of the same client
        before.session.forget(attachment_id)
    live.stop_grace()
    attachment = Attachment(attachment_id, session, live, from_token)
    live.attachments[attachment_id] = attachment
    session.attachments[attachment_id] = attachment
    session.owe(attachment)


def _refuse(
    item: FromGateway,
    reason: Refused.Reason.ValueType,
    detail: str,
    retry_after_ms: int = 0,
    *,
    shard: str = "",
) -> None:
    refused = Refused(reason=reason, detail=detail, retry_after_ms=retry_after_ms, shard=shard)
    reply = gateway_pb.SubmitReply(submission_id=item.message.submit.submission_id, refused=refused)
    item.session.reply(gateway_pb.GatewayLinkReply(submit_reply=reply))
    metrics.SUBMISSIONS.labels("refused").inc()


def _reply_attach(
    session: GatewaySession, attach: gateway_pb.Attach, result: gateway_pb.AttachReply.Result.ValueType
) -> None:
    reply = gateway_pb.AttachReply(attach_id=attach.attach_id, result=result)
    session.reply(gateway_pb.GatewayLinkReply(attach_reply=reply))


def _reply_cancel(
    session: GatewaySession, cancel: gateway_pb.CancelRequested, *, found: bool, cancelled: bool
) -> None:
    reply = gateway_pb.CancelReply(cancel_id=cancel.cancel_id, found=found, cancelled=cancelled)
    session.reply(gateway_pb.GatewayLinkReply(cancel_reply=reply))
