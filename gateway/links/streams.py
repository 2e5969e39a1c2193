"""The client streams of one shard, and the messages about them that the scheduler needs. Pure: no I/O, time
is an argument.

A stream is one client's attachment to one request. It lives from `submit` or `attach` to `close`. Whatever
happens on the link, each of its tokens is returned once and in order:

* a delivery that repeats known tokens is cut down to the new ones;
* a delivery that leaves a gap is discarded; the stream sends another Attach from its next token;
* a delivery that does not fit the buffer is taken as far as it fits; the rest is requested after the client
  has read on. Until then the stream is paused: it stays attached, and what arrives for it is discarded;
* after a broken link `reconnected` sends everything again: unanswered submissions, then attachments at their
  next token;
* a request that the scheduler does not know any more is submitted again with the tokens that were shown.

Methods return the messages to send. A message returned while no link is up may be dropped: `reconnected`
repeats it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from gateway import metrics
from gateway.links.client_stream import Accepted, Batch, ClientStream, Message
from gateway.links.refusals import PASSING_REASONS, refusal_error
from gateway.links.stream_state import StreamAction, StreamEvent, StreamState
from laps_sd.contract.limits import TEN_YEARS_S
from laps_sd.errors import LapsSdError, NotFound, Unavailable
from laps_sd.service.text_parameters import text_parameters
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1 import inference_pb2

ASK_AGAIN_S = 5.0  # an Attach that is not answered for this long is sent again
LONGEST_MS = TEN_YEARS_S * 1000  # a scheduler accepts no longer deadline
RETRY_S = 0.25  # pause before an operation is retried that the scheduler could not do


class Streams:
    """The registry of one shard's streams."""

    def __init__(self, *, buffer_tokens: int, restore_s: float) -> None:
        self._buffer_tokens = buffer_tokens
        self._restore_s = restore_s
        self._by_attachment: dict[str, ClientStream] = {}
        self._submissions: dict[int, ClientStream] = {}
        self._attaches: dict[int, ClientStream] = {}
        self._retries: set[ClientStream] = set()
        # Questions of clients that left before the answer, with their Detach: the scheduler may have received
        # the Detach before it made the attachment, and the attachment may belong to another request than the
        # one in the Detach.
        self._left: dict[int, link_pb2.Detach] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._by_attachment)

    def __iter__(self) -> Iterator[ClientStream]:
        return iter(list(self._by_attachment.values()))

    def new_id(self) -> int:
        """Return a number that identifies one question on the link."""
        self._last_id += 1
        return self._last_id

    # ---- client operations

    def submit(
        self, submit: link_pb2.Submit, *, attachment_id: str, deadline: float | None, now: float
    ) -> tuple[ClientStream, Message]:
        """Return the stream of a new request, and the message that submits it."""
        submit.submission_id = self.new_id()
        submit.attachment_id = attachment_id
        stream = ClientStream(
            attachment_id, submit.tenant, submit.request_id, submit, deadline, StreamState.SUBMITTING
        )
        self._add(stream)
        self._submissions[submit.submission_id] = stream
        return stream, self._submission(stream, now)

    def attach(
        self, request_id: str, *, tenant: str, attachment_id: str, now: float
    ) -> tuple[ClientStream, Message]:
        """Return a stream of an existing request, from its first token."""
        stream = ClientStream(attachment_id, tenant, request_id, None, None, StreamState.ATTACHING)
        self._add(stream)
        return stream, self._attachment(stream, now)

    def take(self, stream: ClientStream, now: float) -> tuple[Batch, list[Message]]:
        """Return the output that waits for the client, without blocking. Raises the stream's failure once all
        earlier output is taken."""
        batch = stream.waiting
        stream.waiting = Batch(stream.next_token)
        stream.has_news = False
        if stream.over:
            stream.notify()
        if not batch.token_ids and stream.failure is not None:
            raise stream.failure
        if stream.paused and stream.step(StreamEvent.READ) is StreamAction.ATTACH:
            return batch, [self._attachment(stream, now)]
        if stream.failure is None:
            batch.end = stream.end
        return batch, []

    def close(self, stream: ClientStream) -> list[Message]:
        """Close a stream: the client is gone, or has everything."""
        if self._by_attachment.pop(stream.attachment_id, None) is None:
            return []
        detach = link_pb2.Detach(request_id=stream.request_id, attachment_id=stream.attachment_id)
        if not stream.over:
            if stream.submits and stream.submit is not None:
                self._left[stream.submit.submission_id] = detach
            if stream.attach_id:
                self._left[stream.attach_id] = detach
        self._forget_questions(stream)
        metrics.STREAMS.dec()
        if stream.over:  # the scheduler dropped the attachment when it sent the end, or never made it
            return []
        return [Message(detach=detach)]

    # ---- events of the link

    def reconnected(self, now: float) -> list[Message]:
        """Return all messages that a leader needs after its greeting, oldest stream first.

        Paused streams are among them: a leader ends a request that no client is attached to.
        """
        self._left.clear()
        return [self._question(stream, now) for stream in self if not stream.over]

    def tick(self, now: float) -> list[Message]:
        """Return the messages that are due to be sent again. Call it about once a second while the link is
        up."""
        for stream in list(self._attaches.values()):
            if now - stream.attach_sent_at >= ASK_AGAIN_S:
                stream.retry_at = now
                self._retries.add(stream)
        due = [stream for stream in self._retries if stream.retry_at is not None and stream.retry_at <= now]
        return [
            self._question(stream, now) for stream in sorted(due, key=lambda stream: stream.attachment_id)
        ]

    def on_submit_reply(self, reply: link_pb2.SubmitReply, now: float) -> list[Message]:
        """Handle the acceptance or refusal of a submission."""
        left = self._left.pop(reply.submission_id, None)
        if left is not None:
            left.request_id = reply.accepted.request_id or left.request_id
            return [Message(detach=left)] if reply.HasField("accepted") else []
        stream = self._submissions.get(reply.submission_id)
        if stream is None:
            return []
        if reply.WhichOneof("result") == "accepted":
            self._on_accepted(stream, reply.accepted, now)
        else:
            self._on_refused(stream, reply.refused, now)
        return []

    def _on_accepted(self, stream: ClientStream, accepted: link_pb2.SubmitAccepted, now: float) -> None:
        same = accepted.request_id in ("", stream.request_id)
        match stream.step(StreamEvent.ACCEPTED if same else StreamEvent.ACCEPTED_ELSEWHERE):
            case StreamAction.ACCEPT:
                self._accept_submission(stream, accepted, now)
            case StreamAction.FAIL:
                self._fail(stream, Unavailable(f"request {stream.request_id!r} was lost"))

    def _on_refused(self, stream: ClientStream, refused: link_pb2.SubmitRefused, now: float) -> None:
        passes = refused.reason in PASSING_REASONS
        match stream.step(StreamEvent.NO_ROOM if passes else StreamEvent.REFUSED):
            case StreamAction.RETRY:
                self._retry(stream, now)
            case StreamAction.FAIL:
                stream.refused = refused
                self._fail(stream, refusal_error(refused))

    def on_attach_reply(self, reply: link_pb2.AttachReply, now: float) -> list[Message]:
        """Handle the answer to an Attach. Only the newest Attach of a stream counts."""
        left = self._left.pop(reply.attach_id, None)
        if left is not None:
            return [Message(detach=left)] if reply.result == link_pb2.AttachReply.RESULT_ATTACHED else []
        stream = self._attaches.pop(reply.attach_id, None)
        if stream is None:
            return []
        stream.attach_id = 0
        event = _attach_event(reply, can_restore=stream.submit is not None)
        if event is StreamEvent.ATTACHED:
            stream.lost_since = None
        match stream.step(event):
            case StreamAction.ACCEPT:
                self._accept_attachment(stream, reply, now)
            case StreamAction.RESUBMIT:
                return [self._submission(stream, now)]
            case StreamAction.RETRY:
                self._retry(stream, now)
            case StreamAction.AWAIT:
                self._await_others(stream, now)
            case StreamAction.FAIL:
                self._fail(stream, NotFound(f"there is no request {stream.request_id!r}"))
        return []

    def on_delivery(self, delivery: link_pb2.Delivery, now: float) -> list[Message]:
        """Handle committed tokens, an end, or both."""
        stream = self._by_attachment.get(delivery.attachment_id)
        if stream is None:
            return []
        end = delivery.end if delivery.HasField("end") else None
        of_prompt = delivery.prompt_logprobs if delivery.HasField("prompt_logprobs") else None
        return self._receive(
            stream, delivery.first_token, delivery.token_ids, now, delivery.logprobs, end, of_prompt
        )

    def on_plain_deliveries(self, plain: link_pb2.PlainDeliveries, now: float) -> list[Message]:
        """Handle committed tokens in columns. Columns that do not fit together are discarded; what was in them
        is requested again when later tokens show the gap.
        """
        attachment_ids, firsts = plain.attachment_ids, plain.first_tokens
        counts, token_ids = plain.token_counts[:], plain.token_ids[:]
        if not len(attachment_ids) == len(firsts) == len(counts) or sum(counts) != len(token_ids):
            return []
        messages = []
        rows = zip(attachment_ids, firsts, counts, accumulate(counts), strict=True)
        for attachment_id, first_token, count, end in rows:
            stream = self._by_attachment.get(attachment_id)
            if stream is not None:
                messages += self._receive(stream, first_token, token_ids[end - count : end], now)
        return messages

    # ---- internals

    def _receive(
        self,
        stream: ClientStream,
        first_token: int,
        token_ids: Sequence[int],
        now: float,
        logprobs: Sequence[inference_pb2.TokenLogprobs] = (),
        end: link_pb2.RequestEnd | None = None,
        prompt_logprobs: inference_pb2.PromptLogprobs | None = None,
    ) -> list[Message]:
        if not stream.receives:
            return []
        known = stream.next_token - first_token
        if known < 0:
            if stream.attach_id or stream.retry_at is not None:
                return []
            metrics.REATTACHED.inc()
            return [self._attachment(stream, now)]
        token_ids = token_ids[known:]
        count = len(token_ids)
        waiting = stream.waiting
        room = self._buffer_tokens - len(waiting.token_ids)
        fits = count <= room
        if not fits:
            count = room
            token_ids = token_ids[:room]
            stream.step(StreamEvent.OVERFLOWED)
            metrics.PAUSES.inc()
        waiting.token_ids += token_ids
        if logprobs:
            waiting.logprobs += logprobs[known : known + count]
        if prompt_logprobs is not None and stream.next_token == 0 and count:
            waiting.prompt_logprobs = prompt_logprobs
        stream.next_token += count
        if stream.submit is not None:
            stream.received.extend(token_ids)
        if fits and end is not None:
            stream.end = end
            stream.step(StreamEvent.ENDED)
            self._forget_questions(stream)
        if waiting.token_ids or stream.over:
            stream.notify()
        return []

    def _accept_submission(self, stream: ClientStream, accepted: link_pb2.SubmitAccepted, now: float) -> None:
        submit = stream.submit
        assert submit is not None, "only submissions have a submission id"
        # Of an earlier request, if its idempotency key belongs to one.
        stream.request_id = accepted.request_id or submit.request_id
        # A submission that was sent twice finds itself; that is not an earlier request.
        existing = accepted.attached_to_existing and stream.request_id != submit.request_id
        sampling = submit.specification.sampling
        stream.acceptance = Accepted(
            request_id=stream.request_id,
            prompt_tokens=accepted.prompt_tokens if existing else len(submit.specification.prompt_ids),
            seed=accepted.seed if existing else sampling.seed,
            stop=tuple(sampling.stop),
            attached=existing,
            model=submit.model,
            text=_text_of(sampling),
        )
        stream.accepted_at = now
        stream.notify()

    def _accept_attachment(self, stream: ClientStream, reply: link_pb2.AttachReply, now: float) -> None:
        if reply.HasField("submission"):
            self._can_restore(stream, reply.submission, now)
        stream.acceptance = Accepted(
            request_id=stream.request_id,
            prompt_tokens=reply.prompt_tokens,
            seed=reply.seed,
            stop=tuple(filter(None, reply.stop)),
            attached=True,
            model=reply.model,
            text=_text_of(reply.text),
        )
        stream.accepted_at = now
        stream.notify()

    def _await_others(self, stream: ClientStream, now: float) -> None:
        """Wait until the process submits the request again that can: its worker, or the gateway that
        submitted it."""
        if stream.lost_since is None:
            stream.lost_since = now
        if now - stream.lost_since < self._restore_s:
            self._retry(stream, now)
        elif stream.step(StreamEvent.GIVEN_UP) is StreamAction.FAIL:
            self._fail(stream, Unavailable(f"request {stream.request_id!r} was lost"))

    def _can_restore(self, stream: ClientStream, submit: link_pb2.Submit, now: float) -> None:
        """Make the stream able to submit a request again that another gateway submitted. The stream must have
        all tokens from the first on."""
        submit.submission_id = self.new_id()
        submit.attachment_id = stream.attachment_id
        if submit.HasField("deadline_in_ms"):
            stream.deadline = now + min(submit.deadline_in_ms, LONGEST_MS) / 1000
        stream.submit = submit
        self._submissions[submit.submission_id] = stream

    def _question(self, stream: ClientStream, now: float) -> Message:
        """Return the message whose answer brings the stream on."""
        return self._submission(stream, now) if stream.submits else self._attachment(stream, now)

    def _submission(self, stream: ClientStream, now: float) -> Message:
        self._no_retry(stream)
        return stream.submission(now)

    def _attachment(self, stream: ClientStream, now: float) -> Message:
        self._no_retry(stream)
        self._attaches.pop(stream.attach_id, None)
        stream.attach_id = self.new_id()
        stream.attach_sent_at = now
        self._attaches[stream.attach_id] = stream
        return stream.attachment()

    def _retry(self, stream: ClientStream, now: float) -> None:
        stream.retry_at = now + RETRY_S
        self._retries.add(stream)

    def _no_retry(self, stream: ClientStream) -> None:
        stream.retry_at = None
        self._retries.discard(stream)

    def _fail(self, stream: ClientStream, failure: LapsSdError) -> None:
        stream.failure = failure
        self._forget_questions(stream)
        stream.notify()

    def _forget_questions(self, stream: ClientStream) -> None:
        self._no_retry(stream)
        self._attaches.pop(stream.attach_id, None)
        stream.attach_id = 0
        if stream.submit is not None:
            self._submissions.pop(stream.submit.submission_id, None)

    def _add(self, stream: ClientStream) -> None:
        assert stream.attachment_id not in self._by_attachment, "attachment ids are unique"
        self._by_attachment[stream.attachment_id] = stream
        metrics.STREAMS.inc()


def _attach_event(reply: link_pb2.AttachReply, *, can_restore: bool) -> StreamEvent:
    match reply.result:
        case link_pb2.AttachReply.RESULT_ATTACHED:
            return StreamEvent.ATTACHED
        case link_pb2.AttachReply.RESULT_NOT_FOUND:
            return StreamEvent.LOST if can_restore else StreamEvent.MISSING
        case link_pb2.AttachReply.RESULT_NOT_FOUND_YET:
            return StreamEvent.LOST if can_restore else StreamEvent.MISSING_YET
        case _:
            return StreamEvent.UNAVAILABLE


_DEFAULT_TEXT = text_parameters(inference_pb2.SamplingParams())


def _text_of(sampling: inference_pb2.SamplingParams) -> inference_pb2.SamplingParams | None:
    """Return the parameters that decide how tokens become text; None if all are at their default."""
    text = text_parameters(sampling)
    return None if text == _DEFAULT_TEXT else text
