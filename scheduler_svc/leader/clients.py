"""The clients of requests, through their gateways: submissions, attachments, cancels, grace periods; and
requests that gateways and workers bring back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from typing import TypeVar

from laps_sd.contract.ends import CLIENT_WENT_AWAY, End
from laps_sd.errors import InvalidArgument
from laps_sd.service.log import get_logger
from scheduler_svc import metrics
from scheduler_svc.core.events import Arrived, EndRequested
from scheduler_svc.leader.live import Attachment, Live, from_record, from_submission, recovered
from scheduler_svc.leader.outage import Outage
from scheduler_svc.leader.queue_limits import RETRY_STORE_MS, QueueLimits
from scheduler_svc.leader.repair import Repair
from scheduler_svc.leader.sessions import GatewaySession
from scheduler_svc.leader.turn import Restored, Timers, Turn
from scheduler_svc.leader.working_copy import WorkingCopy
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
from scheduler_svc.wire.replies import AttachFailure, Refusal, SubmitRefused

log = get_logger(__name__)

T = TypeVar("T")
Admissible = tuple[GatewaySession, Submission, NewRequest]
"""A checked submission, and the request as the record takes it."""

NOT_NOW = (SubmitStatus.QUEUE_FULL, SubmitStatus.TENANT_FULL, SubmitStatus.UNCLAIMED)
"""Answers after which a request that is brought back is tried again."""
CANCEL_AGAIN_S = 0.25
"""Seconds after which a cancel is tried again whose request may still be restored."""
STILL_COMING_S = 1.0
"""Seconds without a client that comes back after which those of a lost gateway or leader have all come. To
attach all of them may take longer than the grace.
"""


class Clients:
    """Answers the messages of gateways, by the working copy and the record."""

    def __init__(
        self,
        *,
        settings: SchedulerSettings,
        store: Store,
        working_copy: WorkingCopy,
        limits: QueueLimits,
        repair: Repair,
        timers: Timers,
        outage: Outage,
    ) -> None:
        self.brought_back_until_s = 0.0
        """Time until which gateways and workers bring back lost requests, if the record was empty when this
        leader took over.
        """
        self._settings = settings
        self._store = store
        self._working_copy = working_copy
        self._limits = limits
        self._repair = repair
        self._timers = timers
        self._outage = outage
        self._still_coming_until_s = 0.0
        """Time until which clients of a lost gateway or leader are expected to come back."""

    # The grace of requests without a client.

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
                turn.events.append(EndRequested(live.request_id, End.CANCELLED, CLIENT_WENT_AWAY))

        live.grace = self._timers.at(now_s + max(live.request.grace_s, at_least_s), over)

    def still_coming(self, now_s: float) -> None:
        """Note that clients of a lost gateway or leader come back, or could not while the record did not
        answer: no grace of another one ends for a moment.
        """
        self._still_coming_until_s = now_s + STILL_COMING_S

    # Messages of gateways.

    def handle(self, turn: Turn, session: GatewaySession, message: GatewayMessage) -> None:
        """Handle one message of a gateway."""
        match from_gateway(message):
            case Submission() as submission:
                turn.submits.append((session, submission))
            case Attach() as attach:
                live = self._working_copy.live.get(attach.request_id)
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
        live = self._working_copy.live.get(cancel.request_id)
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
        too_long: dict[str, InvalidArgument] = {}
        admissible = self._admissible(turn, too_long)
        if not admissible:
            return
        # All earlier lease epochs of the request were smaller than the time in seconds. Of several streams of
        # one request, the one that was shown the most counts.
        shown = {
            submission.request_id: Shown(submission.shown_ids, lease_epoch=int(turn.now_s))
            for submission in sorted(
                (one for _, one, _ in admissible if one.restores), key=lambda one: len(one.shown_ids)
            )
        }
        try:
            results = await self._submit([new for _, _, new in admissible], shown, too_long)
            self._outage.wrote()
        except StoreUnavailable as error:
            self._outage.began(error)
            self._refuse_unanswered(turn, admissible, shown, str(error))
            return
        for (session, submission, new), result in zip(admissible, results, strict=True):
            if result.status is SubmitStatus.UNKNOWN:
                _refuse_invalid(session, submission, too_long[new.request_id])
                continue
            self._admitted(turn, session, submission, new, result, shown.get(new.request_id))
        # Afterwards: a write-back ends what the record has and the working copy lacks.
        for (_, _, new), result in zip(admissible, results, strict=True):
            live = self._working_copy.live.get(result.request_id)
            attached = result.status is SubmitStatus.ATTACHED
            if live is not None and attached and not _is_out_of_time(live, turn.now_s):
                await self._give_time(live, new.deadline_unix_ms)

    def _admissible(self, turn: Turn, too_long: dict[str, InvalidArgument]) -> list[Admissible]:
        """Return the submissions of a turn that can be written to the record, and refuse the others.

        Adds to `too_long`, by id, those that no worker could hold: the record may know them all the same, from
        before a large worker left.
        """
        unix_ms = round(turn.now_s * 1000)
        admissible: list[Admissible] = []
        for session, submission in turn.submits:
            try:
                checks.check_submission(submission.message, self._settings.max_context_tokens)
                checks.check_attachment(submission.message)
                try:
                    checks.check_fits(submission.message, self._limit_tokens(submission, turn.now_s))
                except InvalidArgument as error:
                    known = submission.request_id in self._working_copy.live
                    if not known and not submission.message.idempotency_key:
                        raise
                    too_long[submission.request_id] = error
            except InvalidArgument as error:
                _refuse_invalid(session, submission, error)
                continue
            new = self._new_request(submission, unix_ms)
            if new.request_id in self._working_copy.doubtful:  # its withdrawal may be executed later
                detail = "an earlier submission of this request is not settled"
                _refuse(session, submission, Refusal.STORE_UNAVAILABLE, detail, RETRY_STORE_MS)
            elif new.deadline_unix_ms is not None and new.deadline_unix_ms <= unix_ms:
                _refuse(session, submission, Refusal.EXPIRED, "the deadline passed before acceptance")
            else:
                admissible.append((session, submission, new))
        return admissible

    def _refuse_unanswered(
        self, turn: Turn, unanswered: Sequence[Admissible], shown: Mapping[str, Shown], detail: str
    ) -> None:
        """Refuse submissions to which the record did not answer. It may hold them all the same."""
        for session, submission, new in unanswered:
            if new.request_id not in self._working_copy.live:
                if new.request_id in shown:
                    self._restore_later(turn, Restored("gateway", submission, new, shown[new.request_id]))
                else:
                    self._working_copy.doubtful.add(new.request_id)
            _refuse(session, submission, Refusal.STORE_UNAVAILABLE, detail, RETRY_STORE_MS)

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
            self._working_copy.extend(live, None if deadline_unix_ms is None else deadline_unix_ms / 1000.0)

    async def _submit(
        self, requests: Sequence[NewRequest], shown: Mapping[str, Shown], only_known: Container[str] = ()
    ) -> list[SubmitResult]:
        submitted = {new.request_id for new in requests}
        added = submitted - self._working_copy.restoring
        # Some may be written when the lead has to be confirmed: the write-back must not end those.
        self._working_copy.restoring |= added
        try:
            results = await self._write_as_leader(lambda: self._store.submit(requests, shown, only_known))
        except StoreUnavailable:
            self._working_copy.restoring -= added
            raise
        # One that the record did not take now, and that was brought back before, is tried again at its time.
        later = {
            new.request_id for new, result in zip(requests, results, strict=True) if result.status in NOT_NOW
        }
        self._working_copy.restoring -= added | (submitted - later)
        return results

    async def _write_as_leader(self, write: Callable[[], Awaitable[T]]) -> T:
        """Write to the record, a second time where the lead had to be confirmed first. Raises Fenced,
        StoreUnavailable.
        """
        while True:
            try:
                return await write()
            except Fenced:
                await self._repair.confirm_lead()

    def _limit_tokens(self, submission: Submission, now_s: float) -> int:
        """Return the most tokens of a request. One that is restored was accepted, and may wait for a worker that
        has not come yet.
        """
        if submission.restores:
            return self._settings.max_context_tokens
        return self._limits.admitted_tokens(now_s)

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
                live = self._working_copy.live.get(result.request_id)
                own = result.status is SubmitStatus.ACCEPTED
                if live is not None and not own and _is_out_of_time(live, turn.now_s):
                    # Its end is not on the record yet, and lets the key go: then this is a new request.
                    self._timers.at(turn.now_s, _submit_again(session, submission))
                    return
                if live is None and own and result.sequence > self._working_copy.newest_sequence:
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
                _send_refusal(session, submission, self._limits.queue_full(turn.now_s))
            case SubmitStatus.ELSEWHERE:
                detail = f"shard {result.shard} decides about the idempotency key"
                _refuse(session, submission, Refusal.KEY_ELSEWHERE, detail, shard=result.shard)
            case SubmitStatus.UNCLAIMED:
                if shown is not None and new.request_id not in self._working_copy.live:
                    self._restore_later(turn, Restored("gateway", submission, new, shown))
                detail = f"the idempotency key cannot be claimed now: {result.error}"
                _refuse(session, submission, Refusal.STORE_UNAVAILABLE, detail, RETRY_STORE_MS)
            case SubmitStatus.TENANT_FULL:
                _send_refusal(session, submission, self._limits.tenant_full(new.tenant, turn.now_s))

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
        self._working_copy.adopt(live)
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
            live = self._working_copy.live.get(offer.request_id)
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
            self._working_copy.restoring.add(new.request_id)
            turn.restores.append(Restored("worker", submission, new, shown))

    async def restore(self, turn: Turn) -> None:
        """Write requests again that were brought back and that no client waits for yet, and lead those that
        the record has lost. Raises Fenced.
        """
        lost: dict[str, Restored] = {}
        for restored in sorted(turn.restores, key=lambda one: len(one.shown.token_ids)):
            request_id, live = restored.new.request_id, self._working_copy.live.get(restored.new.request_id)
            if live is not None:  # its gateway or another worker has brought it back since
                if len(restored.shown.token_ids) > len(live.committed):
                    turn.seen_further.append((live, tuple(restored.shown.token_ids)))
            elif request_id in self._working_copy.restoring:  # otherwise it has ended since
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
        """Return those that have to be tried again: the queue has no room, the key cannot be claimed now, or
        an earlier attempt is on the record, older than other requests, and goes first. Raises Fenced,
        StoreUnavailable.
        """
        results = await self._submit(
            [restored.new for restored in some],
            {restored.new.request_id: restored.shown for restored in some},
        )
        again: list[Restored] = []
        older: list[Restored] = []
        for restored, result in zip(some, results, strict=True):
            if result.status in NOT_NOW:
                again.append(restored)
            elif (
                result.status is not SubmitStatus.ACCEPTED
                or restored.new.request_id in self._working_copy.live
            ):
                continue
            elif result.sequence > self._working_copy.newest_sequence:
                live = self._enter(
                    turn, restored.submission, restored.new, result.sequence, restored.shown, restored.source
                )
                self.start_grace(live, turn.now_s, self._settings.reattach_grace_s)
            else:
                older.append(restored)
        ended = await self._read_ended([restored.new.request_id for restored in older])
        older = [restored for restored in older if restored.new.request_id not in ended]
        self._working_copy.doubtful.update(restored.new.request_id for restored in older)
        return again + older

    def _restore_later(self, turn: Turn, restored: Restored) -> None:
        """Note that the record did not answer to a request that a gateway has brought back. If the gateway does not
        bring it again in time, it is written without it: the record may hold it, and only a request that is led
        ever ends.
        """
        if restored.new.request_id not in self._working_copy.restoring:
            self._restore_after(turn.now_s + self._settings.reattach_grace_s, restored)

    def _restore_after(self, when_s: float, restored: Restored) -> None:
        self._working_copy.restoring.add(restored.new.request_id)
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
        if self._working_copy.live.get(live.request_id) is live:
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
            live = self._working_copy.live.get(attach.request_id) or ended.get(attach.request_id)
            if live is None and unavailable is not None:
                session.reply(replies.not_attached(attach.attach_id, AttachFailure.UNAVAILABLE))
            elif live is None and self._may_come_back(attach.request_id, turn.now_s):
                session.reply(replies.not_attached(attach.attach_id, AttachFailure.NOT_FOUND_YET))
            else:
                self._answer_attach(session, attach, live, turn.now_s)
        for session, submission, request_id in turn.unknown_submits:
            live = self._working_copy.live.get(request_id) or ended.get(request_id)
            if live is not None:
                self._accept(session, submission, live, turn.now_s)
            else:
                if unavailable is None and request_id not in self._working_copy.restoring:
                    # It was refused earlier, and written after its withdrawal.
                    self._working_copy.doubtful.add(request_id)
                why = "" if unavailable is None else f": {unavailable}"
                detail = f"the request {request_id} of this key cannot be read now{why}"
                _refuse(session, submission, Refusal.STORE_UNAVAILABLE, detail, RETRY_STORE_MS)

    def _may_come_back(self, request_id: str, now_s: float) -> bool:
        """Return whether a request that is not led here may still be restored."""
        return now_s < self.brought_back_until_s or request_id in self._working_copy.restoring

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
            if request_id not in self._working_copy.live and checks.can_be_named(request_id)
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
        doubtful = sorted(self._working_copy.doubtful - self._working_copy.live.keys())
        try:
            withdrawn = await self._write_as_leader(lambda: self._store.withdraw(doubtful))
        except StoreUnavailable as error:  # the next turn tries again
            self._outage.began(error)
            return
        self._working_copy.doubtful.clear()
        if withdrawn:
            log.info("removed requests from the record that had been refused", requests=len(withdrawn))


def _is_out_of_time(live: Live, now_s: float) -> bool:
    return live.deadline_s is not None and live.deadline_s <= now_s


def _submit_again(session: GatewaySession, submission: Submission) -> Callable[[Turn], None]:
    def again(turn: Turn) -> None:
        if not session.closed:
            turn.submits.append((session, submission))

    return again


def _refuse_invalid(session: GatewaySession, submission: Submission, error: InvalidArgument) -> None:
    field, _ = error.violations[0]
    _refuse(session, submission, Refusal.INVALID, error.message, field=field)


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
    _send_refusal(session, submission, refused)


def _send_refusal(session: GatewaySession, submission: Submission, refused: SubmitRefused) -> None:
    session.reply(replies.submission_refused(submission.submission_id, refused))
    metrics.SUBMISSIONS.labels("refused").inc()
