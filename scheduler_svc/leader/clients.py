"""Requests and their clients: submissions, attachments, cancels, grace periods, deadlines, ends.

All of it changes one table, the requests that this leader leads. A request enters it when the record has it,
and leaves it with its one end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from laps_sd.contract.ends import End
from laps_sd.errors import InvalidArgument
from laps_sd.service.advice import Turns
from laps_sd.service.log import get_logger
from scheduler_svc import metrics
from scheduler_svc.core.commands import Commit
from scheduler_svc.core.events import Arrived, EndRequested
from scheduler_svc.leader.live import Attachment, Live, from_record, from_submission, recovered
from scheduler_svc.leader.outage import Outage
from scheduler_svc.leader.sessions import GatewaySession
from scheduler_svc.leader.tracing import RequestTraces
from scheduler_svc.leader.turn import Restored, Timer, Timers, Turn
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.store.errors import Fenced, StoreUnavailable
from scheduler_svc.store.records import NewRequest, Shown, SubmitResult, SubmitStatus
from scheduler_svc.store.scripts import MAX_PROMPTS
from scheduler_svc.store.store import Store
from scheduler_svc.wire import checks, replies, requests
from scheduler_svc.wire.gateway_messages import (
    Attach,
    Cancel,
    Detach,
    GatewayMessage,
    Submission,
    from_gateway,
)
from scheduler_svc.wire.replies import AttachFailure, Refusal, Refused

log = get_logger(__name__)

T = TypeVar("T")

MOST_TENANT_TURNS = 1024
"""Number of tenants at their limit whose refused requests are remembered, to spread their retries."""
RETRY_STORE_MS = 1000
"""Milliseconds after which what the record did not answer to is tried again, by gateways and here."""
CANCEL_AGAIN_S = 0.25
"""Seconds after which a cancel is tried again whose request may still be restored."""
LEAST_REQUEST_TOKENS = 2
"""Tokens of the smallest request: one of its prompt, one of its output."""
STILL_COMING_S = 1.0
"""Seconds without a client that comes back after which those of a lost gateway or leader have all come. To
attach all of them may take longer than the grace.
"""
ENDS_KEPT_S = 10.0
MAX_ENDS_KEPT = 10_000
"""Seconds for which ended requests are kept, and the most that are kept, for a record that loses the last of
what was written: a server that syncs every second loses that much, an asynchronous replica its delay.
"""


@dataclass(frozen=True, slots=True)
class RecentEnd:
    """A request whose end is on the record, and that end as a commit that follows all of its tokens."""

    at_s: float
    live: Live
    commit: Commit


class ShardLead(Protocol):
    """The lead of the shard, as the clients' side needs it."""

    async def confirm_lead(self) -> None:
        """Return when the record holds what this leader committed. Raises Fenced when another process
        leads.
        """

    def capacity_tokens(self) -> int:
        """Return the longest context that some worker could hold, in tokens; 0 without any."""

    def retry_after_s(self) -> float:
        """Return the estimated seconds until a full queue has room."""


class Clients:
    """Table of the requests and their clients; see the top of the file."""

    def __init__(
        self,
        settings: SchedulerSettings,
        store: Store,
        timers: Timers,
        outage: Outage,
        *,
        lead: ShardLead,
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
        self.recent_ends: deque[RecentEnd] = deque(maxlen=MAX_ENDS_KEPT)
        """The ends that the record may still lose, oldest first."""
        self.doubtful: set[str] = set()
        """Ids of submissions that were refused because the record did not answer, and that it may hold all
        the same.
        """
        self.restoring: set[str] = set()
        """Ids of requests that are being submitted, and of those that a gateway or a worker has brought back
        and that are not led yet: the record did not answer, and may hold them all the same, or had no room.
        They come again, or are written without their gateway.
        """
        self._settings = settings
        self._store = store
        self._timers = timers
        self._outage = outage
        self._lead = lead
        self._traces = traces
        self._still_coming_until_s = 0.0
        """Time until which clients of a lost gateway or leader are expected to come back."""
        self._turns = Turns()
        """Turns of the requests that a full queue refused."""
        self._tenant_turns: dict[str, Turns] = {}
        """Turns, by tenant, of the requests that were refused because their tenant has too many."""

    # Begin and end of requests.

    def adopt(self, live: Live) -> None:
        """Lead this request from now on."""
        self.live[live.request_id] = live
        self.reserved_tokens += live.facts.prompt_tokens + live.facts.max_tokens
        live.trace = self._traces.begin(live.request_id, live.request.traceparent)
        if live.trace is not None:
            # The request may have been leased under an earlier leader; the record does not hold the time of
            # the lease.
            live.trace.leased(live.lease_epoch, live.worker_id, live.started_s or live.facts.arrival_s)
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
        if live.trace is not None:
            live.trace.leased(live.lease_epoch, None, now_s)
            self._traces.ended(
                live.trace,
                live.facts,
                standing=live.standing,
                started_s=live.started_s,
                output_tokens=len(live.committed),
                end=commit.end,
                detail=commit.detail,
                story=commit.story,
                now_s=now_s,
            )
        del self.live[live.request_id]
        self.reserved_tokens -= live.facts.prompt_tokens + live.facts.max_tokens
        live.mark_dirty()
        self.forget_old_ends(now_s)
        self.recent_ends.append(
            RecentEnd(now_s, live, replace(commit, position=len(live.committed), tokens=()))
        )
        metrics.observe_end(
            commit.end, live.facts, live.started_s, live.first_token_s, len(live.committed), now_s
        )

    def forget_old_ends(self, now_s: float) -> None:
        """Drop the ends that the record can no longer lose. Call it only while the record answers: an outage
        can outlast ENDS_KEPT_S, and what it lost is known afterwards.
        """
        while self.recent_ends and self.recent_ends[0].at_s < now_s - ENDS_KEPT_S:
            self.recent_ends.popleft()

    def ends_are_written_back(self, now_s: float) -> None:
        """Note that the record has the ends since now, and can lose them again."""
        written = [replace(ended, at_s=now_s) for ended in self.recent_ends]
        self.recent_ends.clear()
        self.recent_ends.extend(written)

    def refusal(self) -> Refused | None:
        """Return the reason for which any new request would be refused now; None where one within the limits
        would be accepted.

        Without a worker requests are accepted all the same: they wait for one.
        """
        outage = self._outage.report()
        if outage is not None:
            detail = f"the record of shard {self._settings.shard} cannot be written ({outage.fault})"
            return replies.refused(Refusal.STORE_UNAVAILABLE, detail, RETRY_STORE_MS)
        if (
            len(self.live) >= self._settings.max_requests
            or self.reserved_tokens + LEAST_REQUEST_TOKENS > self._settings.max_queued_tokens
        ):
            retry_ms = round(self._lead.retry_after_s() * 1000)
            return replies.refused(Refusal.QUEUE_FULL, self._queue_is_full(), retry_ms)
        return None

    def _queue_is_full(self) -> str:
        return f"the queue of shard {self._settings.shard} is full"

    def start_grace(self, live: Live, now_s: float, at_least_s: float) -> None:
        """Start the grace period of a request without an attached client: it ends unless a client attaches in
        time.
        """
        if live.request.keep or live.attachments:
            return
        live.stop_grace()

        def over(turn: Turn) -> None:
            if at_least_s and turn.now_s < self._still_coming_until_s:
                self.start_grace(live, turn.now_s, at_least_s)
            else:
                turn.events.append(EndRequested(live.request_id, End.CANCELLED, "its client went away"))

        live.grace = self._timers.at(now_s + max(live.request.grace_s, at_least_s), over)

    def still_coming(self, now_s: float) -> None:
        """Note that clients of a lost gateway or leader come back, or could not while the record did not
        answer: no grace of another one ends for a moment.
        """
        self._still_coming_until_s = now_s + STILL_COMING_S

    def _end_at(self, request_id: str, when_s: float, end: End, detail: str) -> Timer:
        return self._timers.at(when_s, lambda turn: turn.events.append(EndRequested(request_id, end, detail)))

    # Messages of gateways.

    def handle(self, turn: Turn, session: GatewaySession, message: GatewayMessage) -> None:
        """Handle one message of a gateway."""
        match from_gateway(message):
            case Submission() as submission:
                turn.submits.append((session, submission))
            case Attach() as attach:
                live = self.live.get(attach.request_id)
                if not checks.can_be_named(attach.request_id, attach.attachment_id):
                    session.reply(replies.not_attached(attach.attach_id, AttachFailure.NOT_FOUND))
                elif live is None:
                    turn.unknown_attaches.append((session, attach))
                else:
                    self._answer_attach(session, attach, live, turn.now_s)
            case (Detach() | Cancel()) as departure:
                turn.departures.append((session, departure))

    async def depart(self, turn: Turn) -> None:
        """Handle the detaches, cancels and closed streams of this turn, in the order in which they came."""
        cancels = [departure.request_id for _, departure in turn.departures if isinstance(departure, Cancel)]
        try:
            ended = await self._read_ended(cancels)
        except StoreUnavailable:
            ended = None
        for session, departure in turn.departures:
            match departure:
                case None:
                    # Its clients may come back, through it or through another gateway.
                    session.close("its stream has ended")
                    for attachment in list(session.attachments.values()):
                        self._detach(attachment, turn.now_s, self._settings.reattach_grace_s)
                case Detach(attachment_id):
                    # If it has attached through another stream by now, this gateway's detach is out of date.
                    left = session.attachments.get(attachment_id)
                    if left is not None:
                        self._detach(left, turn.now_s, 0.0)
                case Cancel():
                    self._cancel(turn, session, departure, ended)

    def _cancel(
        self,
        turn: Turn,
        session: GatewaySession,
        cancel: Cancel,
        ended: Mapping[str, Live] | None,
    ) -> None:
        """Cancel a request for its tenant.

        `ended`: requests that are not led here and have ended; None where the record cannot be read.
        """
        live = self.live.get(cancel.request_id)
        if live is None:
            live = (ended or {}).get(cancel.request_id)
            if live is None and checks.can_be_named(cancel.request_id):
                if self._may_come_back(cancel.request_id, turn.now_s):
                    self._timers.at(
                        turn.now_s + CANCEL_AGAIN_S, lambda later: later.departures.append((session, cancel))
                    )
                    return
                if ended is None:
                    return  # no answer: the gateway gives up after its own timeout
        if live is None or live.facts.tenant != cancel.tenant:
            session.reply(replies.cancel_reply(cancel.cancel_id, found=False, cancelled=False))
        elif live.end is not None:
            session.reply(replies.cancel_reply(cancel.cancel_id, found=True, cancelled=False))
        else:
            turn.events.append(EndRequested(cancel.request_id, End.CANCELLED, "cancelled by the client"))
            turn.cancelled.append((session, cancel, live))

    async def admit(self, turn: Turn) -> None:
        """Write this turn's submissions to the record; only those that it takes are accepted."""
        unix_ms = round(turn.now_s * 1000)
        admitted: list[tuple[GatewaySession, Submission, NewRequest]] = []
        for session, submission in turn.submits:
            try:
                checks.check_submission(submission.message, self._limit_tokens(submission))
                checks.check_attachment(submission.message)
            except InvalidArgument as error:
                field, _ = error.violations[0]
                _refuse(session, submission, Refusal.INVALID, error.message, field=field)
                continue
            new = self._new_request(submission, unix_ms)
            if new.request_id in self.doubtful:  # its withdrawal may be executed later
                _refuse(
                    session,
                    submission,
                    Refusal.STORE_UNAVAILABLE,
                    "an earlier submission of this request is not settled",
                    RETRY_STORE_MS,
                )
                continue
            if new.deadline_unix_ms is not None and new.deadline_unix_ms <= unix_ms:
                _refuse(session, submission, Refusal.EXPIRED, "the deadline passed before acceptance")
                continue
            admitted.append((session, submission, new))
        if not admitted:
            return
        # All earlier lease epochs of the request were smaller than the time in seconds. Of several streams of
        # one request, the one that was shown the most counts.
        shown = {
            submission.request_id: Shown(submission.shown_ids, lease_epoch=int(turn.now_s))
            for submission in sorted(
                (one for _, one, _ in admitted if one.restores), key=lambda one: len(one.shown_ids)
            )
        }
        try:
            results = await self._submit([new for _, _, new in admitted], shown)
            self._outage.wrote()
        except StoreUnavailable as error:
            self._outage.began(error)
            for session, submission, new in admitted:
                if new.request_id not in self.live:
                    if new.request_id in shown:
                        self._restore_later(turn, Restored("gateway", submission, new, shown[new.request_id]))
                    else:
                        self.doubtful.add(new.request_id)
                _refuse(session, submission, Refusal.STORE_UNAVAILABLE, str(error), RETRY_STORE_MS)
            return
        for (session, submission, new), result in zip(admitted, results, strict=True):
            self._admitted(turn, session, submission, new, result, shown.get(new.request_id))
        # Afterwards: a write-back ends what the record has and this table lacks.
        for (_, _, new), result in zip(admitted, results, strict=True):
            live = self.live.get(result.request_id)
            attached = result.status is SubmitStatus.ATTACHED
            if live is not None and attached and not _is_out_of_time(live, turn.now_s):
                await self._give_time(live, new.deadline_unix_ms)

    def _new_request(self, submission: Submission, unix_ms: int) -> NewRequest:
        """Return a checked submission as the record takes it: without the words of its prompt if nothing is
        predicted from them."""
        if not self._settings.predict_lengths:
            submission.message.ClearField("length_features")
        return requests.new_request(submission, unix_ms)

    async def _give_time(self, live: Live, deadline_unix_ms: int | None) -> None:
        """Give a request the deadline of a retry with the same idempotency key: the retry may have more time
        than the attempt before, and its caller gets the time that it requested.
        """
        if live.deadline_s is None:
            return
        if deadline_unix_ms is not None and deadline_unix_ms <= live.deadline_s * 1000:
            return
        try:
            extended = await self._write_as_leader(
                lambda: self._store.extend(live.request_id, deadline_unix_ms)
            )
        except StoreUnavailable as error:  # then the earlier deadline stays
            self._outage.began(error)
            return
        if extended:
            live.deadline_s = None if deadline_unix_ms is None else deadline_unix_ms / 1000.0
            self._set_limits(live)

    async def _submit(self, requests: Sequence[NewRequest], shown: Mapping[str, Shown]) -> list[SubmitResult]:
        submitted = {new.request_id for new in requests}
        added = submitted - self.restoring
        # Some may be written when the lead has to be confirmed: the write-back must not end those.
        self.restoring |= added
        try:
            results = await self._write_as_leader(lambda: self._store.submit(requests, shown))
        except StoreUnavailable:
            self.restoring -= added
            raise
        self.restoring -= submitted
        return results

    async def _write_as_leader(self, write: Callable[[], Awaitable[T]]) -> T:
        """Write to the record, a second time where the lead had to be confirmed first. Raises Fenced,
        StoreUnavailable.
        """
        while True:
            try:
                return await write()
            except Fenced:
                await self._lead.confirm_lead()

    @property
    def most_tokens_of_new(self) -> int:
        """Return the most tokens of a new request. Without a worker every request within the settings waits;
        with workers, one that none of them could hold would never run.
        """
        limit = self._settings.max_context_tokens
        return min(limit, self._lead.capacity_tokens() or limit)

    def _limit_tokens(self, submission: Submission) -> int:
        """Return the most tokens of a request. One that is restored was accepted, and may wait for a worker that
        has not come yet.
        """
        return self._settings.max_context_tokens if submission.restores else self.most_tokens_of_new

    def _admitted(
        self,
        turn: Turn,
        session: GatewaySession,
        submission: Submission,
        new: NewRequest,
        result: SubmitResult,
        shown: Shown | None,
    ) -> None:
        match result.status:
            case SubmitStatus.ACCEPTED | SubmitStatus.ATTACHED:
                live = self.live.get(result.request_id)
                own = result.status is SubmitStatus.ACCEPTED
                if live is not None and not own and _is_out_of_time(live, turn.now_s):
                    # Its end is not on the record yet, and lets the key go: then this is a new request.
                    self._timers.at(turn.now_s, _submit_again(session, submission))
                    return
                if live is None and own and result.sequence > self.newest_sequence:
                    live = self._enter(turn, submission, new, result.sequence, shown, "gateway")
                elif live is not None and shown is not None and len(shown.token_ids) > len(live.committed):
                    turn.seen_further.append((live, tuple(shown.token_ids)))
                if live is None:
                    # A known idempotency key, or a repeated Submit whose answer was lost; the request has
                    # ended since.
                    turn.unknown_submits.append((session, submission, result.request_id))
                else:
                    self._accept(session, submission, live, turn.now_s)
            case SubmitStatus.CONFLICT:
                _refuse(
                    session,
                    submission,
                    Refusal.KEY_CONFLICT,
                    "the idempotency key was used with another body",
                )
            case SubmitStatus.QUEUE_FULL:
                each_s = self._lead.retry_after_s()
                wait_s = self._turns.next_s(turn.now_s, each_s, each_s)
                _refuse(session, submission, Refusal.QUEUE_FULL, self._queue_is_full(), round(wait_s * 1000))
            case SubmitStatus.ELSEWHERE:
                detail = f"shard {result.shard} decides about the idempotency key"
                _refuse(session, submission, Refusal.KEY_ELSEWHERE, detail, shard=result.shard)
            case SubmitStatus.TENANT_FULL:
                limit = self._settings.max_requests_per_tenant
                detail = f"the tenant has {limit} unfinished requests, which is its limit"
                wait_s = self._tenant_turn_s(new.tenant, limit, turn.now_s)
                _refuse(session, submission, Refusal.TENANT_FULL, detail, round(wait_s * 1000))

    def _tenant_turn_s(self, tenant: str, limit: int, now_s: float) -> float:
        """Return when a tenant at its limit has room for this request, if its requests end as often as those
        of others.
        """
        if len(self._tenant_turns) >= MOST_TENANT_TURNS:
            self._tenant_turns.clear()
        each_s = self._lead.retry_after_s() * len(self.live) / limit
        return self._tenant_turns.setdefault(tenant, Turns()).next_s(now_s, each_s, each_s)

    def _enter(
        self,
        turn: Turn,
        submission: Submission,
        new: NewRequest,
        sequence: int,
        shown: Shown | None,
        source: str,
    ) -> Live:
        """Begin to lead a request that is on the record now: a new one, or a restored one with what was `shown` of it."""
        live = from_submission(new, requests.accepted(new, sequence))
        self.adopt(live)
        if shown is None:
            turn.events.append(Arrived(live.facts))
            return live
        live.append(0, tuple(shown.token_ids), turn.now_s)
        live.lease_epoch = shown.lease_epoch
        turn.events.append(recovered(live))
        metrics.WRITTEN_BACK.labels(source).inc()
        return live

    def take_offers(self, turn: Turn) -> None:
        """Have requests restored that workers hold, and that a record emptied under an earlier leader has
        lost.

        The worker that holds one drops it, and generation resumes after the acknowledged outputs; its gateway
        attaches by itself.
        """
        unix_ms = round(turn.now_s * 1000)
        for offer in turn.offers:
            live = self.live.get(offer.request_id)
            if live is not None:
                # Acknowledged outputs are committed: if the record has fewer, it has lost the rest.
                if len(offer.committed_ids) > len(live.committed):
                    turn.seen_further.append((live, tuple(offer.committed_ids)))
                continue
            submission = requests.offered(offer, self._store.incarnation or "", unix_ms)
            if submission is None:
                continue
            try:
                checks.check_submission(submission.message, self._settings.max_context_tokens)
            except InvalidArgument as error:
                log.warning(
                    "a worker sent an invalid request in its hello",
                    request_id=offer.request_id[:64],
                    error=str(error),
                )
                continue
            new = self._new_request(submission, unix_ms)
            shown = Shown(submission.shown_ids, lease_epoch=int(turn.now_s))
            self.restoring.add(new.request_id)
            turn.restores.append(Restored("worker", submission, new, shown))

    async def restore(self, turn: Turn) -> None:
        """Write requests again that were brought back and that no client waits for yet, and lead those that
        the record has lost. Raises Fenced.
        """
        lost: dict[str, Restored] = {}
        for restored in sorted(turn.restores, key=lambda one: len(one.shown.token_ids)):
            request_id, live = restored.new.request_id, self.live.get(restored.new.request_id)
            if live is not None:  # its gateway or another worker has brought it back since
                if len(restored.shown.token_ids) > len(live.committed):
                    turn.seen_further.append((live, tuple(restored.shown.token_ids)))
            elif request_id in self.restoring:  # otherwise it has ended since
                lost[request_id] = restored  # of several, the one with the most outputs
        waiting = list(lost.values())
        for start in range(0, len(waiting), MAX_PROMPTS):
            some = waiting[start : start + MAX_PROMPTS]
            try:
                again = await self._try_restore(turn, some)
            except StoreUnavailable as error:
                self._outage.began(error)
                again = waiting[start:]
            for restored in again:
                self._restore_after(turn.now_s + RETRY_STORE_MS / 1000, restored)
            if len(again) > len(some):
                return

    async def _try_restore(self, turn: Turn, some: Sequence[Restored]) -> list[Restored]:
        """Return those that have to be tried again: the queue has no room, or an earlier attempt is on the
        record, older than other requests, and goes first. Raises Fenced, StoreUnavailable.
        """
        results = await self._submit(
            [restored.new for restored in some],
            {restored.new.request_id: restored.shown for restored in some},
        )
        again: list[Restored] = []
        older: list[Restored] = []
        for restored, result in zip(some, results, strict=True):
            if result.status in (SubmitStatus.QUEUE_FULL, SubmitStatus.TENANT_FULL):
                again.append(restored)
            elif result.status is not SubmitStatus.ACCEPTED or restored.new.request_id in self.live:
                continue
            elif result.sequence > self.newest_sequence:
                live = self._enter(
                    turn, restored.submission, restored.new, result.sequence, restored.shown, restored.source
                )
                self.start_grace(live, turn.now_s, self._settings.reattach_grace_s)
            else:
                older.append(restored)
        ended = await self._read_ended([restored.new.request_id for restored in older])
        older = [restored for restored in older if restored.new.request_id not in ended]
        self.doubtful.update(restored.new.request_id for restored in older)
        return again + older

    def _restore_later(self, turn: Turn, restored: Restored) -> None:
        """Note that the record did not answer to a request that a gateway has brought back. If the gateway does not
        bring it again in time, it is written without it: the record may hold it, and only a request that is led
        ever ends.
        """
        if restored.new.request_id not in self.restoring:
            self._restore_after(turn.now_s + self._settings.reattach_grace_s, restored)

    def _restore_after(self, when_s: float, restored: Restored) -> None:
        self.restoring.add(restored.new.request_id)
        self._timers.at(when_s, lambda turn: turn.restores.append(restored))

    def _answer_attach(
        self, session: GatewaySession, attach: Attach, live: Live | None, now_s: float
    ) -> None:
        if live is None or live.facts.tenant != attach.tenant:
            session.reply(replies.not_attached(attach.attach_id, AttachFailure.NOT_FOUND))
            return
        submission = None
        if attach.wants_submission and live.end is None:
            submission = requests.submission_again(
                live.request, deadline_s=live.deadline_s, time_limit_s=live.time_limit_s, now_s=now_s
            )
        session.reply(replies.attached(attach.attach_id, live.request, submission))
        self._attach(session, live, attach.attachment_id, attach.from_token, now_s)

    def _accept(self, session: GatewaySession, submission: Submission, live: Live, now_s: float) -> None:
        existing = live.request_id != submission.request_id
        session.reply(replies.submission_accepted(submission.submission_id, live.request, existing=existing))
        self._attach(session, live, submission.attachment_id, len(submission.shown_ids), now_s)
        metrics.SUBMISSIONS.labels("attached" if existing else "accepted").inc()

    def _attach(
        self, session: GatewaySession, live: Live, attachment_id: str, from_token: int, now_s: float
    ) -> None:
        before = live.attachments.get(attachment_id)
        if before is not None:  # the gateway reconnected: this is the newer stream of the same client
            before.session.forget(attachment_id)
        if live.grace is not None:
            self.still_coming(now_s)
        live.stop_grace()
        attachment = Attachment(attachment_id, session, live, from_token)
        live.attachments[attachment_id] = attachment
        session.attachments[attachment_id] = attachment
        session.mark_dirty(attachment)

    def _detach(self, attachment: Attachment, now_s: float, at_least_s: float) -> None:
        live = attachment.live
        attachment.session.forget(attachment.attachment_id)
        del live.attachments[attachment.attachment_id]
        if self.live.get(live.request_id) is live:
            self.start_grace(live, now_s, at_least_s)

    # Requests that only the record has.

    async def answer_from_record(self, turn: Turn) -> None:
        """Attach clients to requests that are not led here: they have ended."""
        wanted = [attach.request_id for _, attach in turn.unknown_attaches]
        wanted += [request_id for _, _, request_id in turn.unknown_submits]
        ended: Mapping[str, Live] = {}
        unavailable: StoreUnavailable | None = None
        try:
            ended = await self._read_ended(wanted)
        except StoreUnavailable as error:
            unavailable = error
        for session, attach in turn.unknown_attaches:
            live = self.live.get(attach.request_id) or ended.get(attach.request_id)
            if live is None and unavailable is not None:
                session.reply(replies.not_attached(attach.attach_id, AttachFailure.UNAVAILABLE))
            elif live is None and self._may_come_back(attach.request_id, turn.now_s):
                session.reply(replies.not_attached(attach.attach_id, AttachFailure.NOT_FOUND_YET))
            else:
                self._answer_attach(session, attach, live, turn.now_s)
        for session, submission, request_id in turn.unknown_submits:
            live = self.live.get(request_id) or ended.get(request_id)
            if live is not None:
                self._accept(session, submission, live, turn.now_s)
            else:
                if unavailable is None and request_id not in self.restoring:
                    self.doubtful.add(request_id)  # refused earlier, and written after its withdrawal
                why = "" if unavailable is None else f": {unavailable}"
                detail = f"the request {request_id} of this key cannot be read now{why}"
                _refuse(session, submission, Refusal.STORE_UNAVAILABLE, detail, RETRY_STORE_MS)

    def _may_come_back(self, request_id: str, now_s: float) -> bool:
        """Return whether a request that is not led here may still be restored."""
        return now_s < self.brought_back_until_s or request_id in self.restoring

    def answer_cancelled(self, turn: Turn) -> None:
        """Answer the cancels of this turn, whose ends are on the record, or are decided again."""
        for session, cancel, live in turn.cancelled:
            by_cancel = live.end in (None, End.CANCELLED)
            session.reply(replies.cancel_reply(cancel.cancel_id, found=True, cancelled=by_cancel))

    async def _read_ended(self, request_ids: Iterable[str]) -> dict[str, Live]:
        """Return those of the requests that are not led here and have ended. Raises StoreUnavailable.

        All are read together: clients choose the ids, and a read for each would let them hold up the turn.
        """
        unknown = {
            request_id
            for request_id in request_ids
            if request_id not in self.live and checks.can_be_named(request_id)
        }
        stored = await self._store.read_all(sorted(unknown)) if unknown else {}
        return {
            request_id: from_record(request)
            for request_id, request in stored.items()
            if request.end is not None
        }

    async def withdraw_doubtful(self) -> None:
        """Remove requests from the record that were refused and that it holds all the same, so that their
        clients can submit them again. Raises Fenced.
        """
        doubtful = sorted(self.doubtful - self.live.keys())
        try:
            withdrawn = await self._write_as_leader(lambda: self._store.withdraw(doubtful))
        except StoreUnavailable as error:  # the next turn tries again
            self._outage.began(error)
            return
        self.doubtful.clear()
        if withdrawn:
            log.info("removed requests from the record that had been refused", requests=len(withdrawn))


def _is_out_of_time(live: Live, now_s: float) -> bool:
    return live.deadline_s is not None and live.deadline_s <= now_s


def _submit_again(session: GatewaySession, submission: Submission) -> Callable[[Turn], None]:
    def again(turn: Turn) -> None:
        if not session.closed:
            turn.submits.append((session, submission))

    return again


def _refuse(
    session: GatewaySession,
    submission: Submission,
    reason: Refusal,
    detail: str,
    retry_after_ms: int = 0,
    *,
    shard: str = "",
    field: str = "",
) -> None:
    refused = replies.refused(reason, detail, retry_after_ms, shard=shard, field=field)
    session.reply(replies.submission_refused(submission.submission_id, refused))
    metrics.SUBMISSIONS.labels("refused").inc()
