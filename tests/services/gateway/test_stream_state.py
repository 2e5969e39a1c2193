"""The whole table of a stream's states: every state is reached by messages, and every event sent to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from gateway.links.client_stream import ClientStream
from gateway.links.stream_state import STEPS, StreamEvent, StreamState
from gateway.links.streams import RETRY_S, Streams
from laps_sd.errors import AlreadyExists, NotFound, ResourceExhausted, Unavailable
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1.inference_pb2 import SamplingParams

S, E = StreamState, StreamEvent
Refused = link_pb2.SubmitRefused
Result = link_pb2.AttachReply
BUFFER = 10
RESTORE_S = 5.0
LOST = Unavailable, "request 's0.a' was lost"
SUBMISSION = (E.ACCEPTED, E.ACCEPTED_ELSEWHERE, E.REFUSED, E.NO_ROOM, E.LOST)
"""Events of streams that have a submission."""
ATTACHMENT = (E.MISSING, E.MISSING_YET, E.GIVEN_UP)
"""Events of streams that have none."""

TABLE = """
.                   SUBMITTING  ATTACHING  OPEN       PAUSED            RESTORING         RESTORING_PAUSED
ACCEPTED            OPEN        -          =          =                 OPEN              PAUSED
ACCEPTED_ELSEWHERE  OPEN        -          FAILED     FAILED            FAILED            FAILED
REFUSED             FAILED      -          FAILED     FAILED            FAILED            FAILED
NO_ROOM             FAILED      -          =RETRY     =RETRY            =RETRY            =RETRY
ATTACHED            -           OPEN       =          =                 =                 =
UNAVAILABLE         -           =RETRY     =RETRY     =RETRY            =RETRY            =RETRY
LOST                -           -          RESTORING  RESTORING_PAUSED  =                 =
MISSING             -           FAILED     =RETRY     =RETRY            -                 -
MISSING_YET         -           =RETRY     =RETRY     =RETRY            -                 -
GIVEN_UP            -           -          FAILED     FAILED            -                 -
OVERFLOWED          -           -          PAUSED     -                 RESTORING_PAUSED  -
ENDED               -           -          ENDED      -                 ENDED             -
READ                -           -          -          OPEN              -                 RESTORING
"""
"""The state that follows. =: the same; RETRY: the question is sent again after a pause; -: nothing changes,
as in the states that are not here."""
HEAD, *LINES = (line.split() for line in TABLE.strip().splitlines())
CELLS = {
    (S[state], E[line[0]]): cell for line in LINES for state, cell in zip(HEAD[1:], line[1:], strict=True)
}


@dataclass
class Driven:
    """Streams with one stream, and the messages that its last event made."""

    streams: Streams = field(default_factory=lambda: Streams(buffer_tokens=BUFFER, restore_s=RESTORE_S))
    now: float = 0.0
    sent: list[link_pb2.GatewayMessage] = field(default_factory=list)
    stream: ClientStream = field(init=False)

    def submit(self) -> None:
        submit = link_pb2.Submit(
            request_id="s0.a", specification=link_pb2.Specification(sampling=SamplingParams(seed=3))
        )
        self.stream, _ = self.streams.submit(submit, attachment_id="g/1", deadline=None, now=self.now)

    def attach(self) -> None:
        self.stream, _ = self.streams.attach("s0.a", tenant="t", attachment_id="g/1", now=self.now)

    def happens(self, event: StreamEvent) -> None:
        """Make the event happen by a message of the scheduler, or by what the client does."""
        self.sent = EVENTS[event](self)

    def submit_reply(self, reply: link_pb2.SubmitReply) -> list[link_pb2.GatewayMessage]:
        assert self.stream.submit is not None
        reply.submission_id = self.stream.submit.submission_id
        return self.streams.on_submit_reply(reply, self.now)

    def attach_reply(self, result: Result.Result.ValueType) -> list[link_pb2.GatewayMessage]:
        reply = Result(attach_id=self.stream.attach_id or 999, result=result)
        return self.streams.on_attach_reply(reply, self.now)

    def delivery(self, count: int, *, ends: bool = False) -> list[link_pb2.GatewayMessage]:
        delivery = link_pb2.Delivery(
            attachment_id="g/1", first_token=self.stream.next_token, token_ids=range(count)
        )
        if ends:
            delivery.end.kind = link_pb2.RequestEnd.KIND_STOP
        return self.streams.on_delivery(delivery, self.now)

    def read(self) -> list[link_pb2.GatewayMessage]:
        try:
            return self.streams.take(self.stream, self.now)[1]
        except Exception as error:
            assert error is self.stream.failure
            return []

    def given_up(self) -> list[link_pb2.GatewayMessage]:
        self.attach_reply(Result.RESULT_NOT_FOUND)
        self.now += RESTORE_S
        self.streams.tick(self.now)
        return self.attach_reply(Result.RESULT_NOT_FOUND)


def accepted(request_id: str) -> link_pb2.SubmitReply:
    return link_pb2.SubmitReply(accepted=link_pb2.SubmitAccepted(request_id=request_id))


def refused(reason: Refused.Reason.ValueType) -> link_pb2.SubmitReply:
    return link_pb2.SubmitReply(refused=Refused(reason=reason))


EVENTS: dict[StreamEvent, Callable[[Driven], list[link_pb2.GatewayMessage]]] = {
    E.ACCEPTED: lambda it: it.submit_reply(accepted("s0.a")),
    E.ACCEPTED_ELSEWHERE: lambda it: it.submit_reply(accepted("s0.other")),
    E.REFUSED: lambda it: it.submit_reply(refused(Refused.REASON_KEY_CONFLICT)),
    E.NO_ROOM: lambda it: it.submit_reply(refused(Refused.REASON_QUEUE_FULL)),
    E.ATTACHED: lambda it: it.attach_reply(Result.RESULT_ATTACHED),
    E.UNAVAILABLE: lambda it: it.attach_reply(Result.RESULT_UNAVAILABLE),
    E.LOST: lambda it: it.attach_reply(Result.RESULT_NOT_FOUND),
    E.MISSING: lambda it: it.attach_reply(Result.RESULT_NOT_FOUND),
    E.MISSING_YET: lambda it: it.attach_reply(Result.RESULT_NOT_FOUND_YET),
    E.GIVEN_UP: Driven.given_up,
    E.OVERFLOWED: lambda it: it.delivery(BUFFER + 1),
    E.ENDED: lambda it: it.delivery(0, ends=True),
    E.READ: Driven.read,
}

OWN: dict[StreamState, tuple[StreamEvent, ...]] = {
    S.SUBMITTING: (),
    S.OPEN: (E.ACCEPTED,),
    S.PAUSED: (E.ACCEPTED, E.OVERFLOWED),
    S.RESTORING_PAUSED: (E.ACCEPTED, E.OVERFLOWED, E.LOST, E.READ, E.OVERFLOWED),
    S.RESTORING: (E.ACCEPTED, E.OVERFLOWED, E.LOST, E.READ),
    S.ENDED: (E.ACCEPTED, E.ENDED),
    S.FAILED: (E.REFUSED,),
}
"""How a stream that submitted its request gets into each state. The events leave an Attach unanswered where
there can be one."""
OTHERS: dict[StreamState, tuple[StreamEvent, ...]] = {
    S.ATTACHING: (),
    S.OPEN: (E.ATTACHED,),
    S.PAUSED: (E.ATTACHED, E.OVERFLOWED),
    S.ENDED: (E.ATTACHED, E.ENDED),
    S.FAILED: (E.MISSING,),
}
"""The same for a stream that attached to a request of another call."""


def reach(state: StreamState, *, own: bool) -> Driven:
    """Return a stream in this state, with an Attach that is not answered if it is accepted."""
    it = Driven()
    it.submit() if own else it.attach()
    for event in (OWN if own else OTHERS)[state]:
        it.happens(event)
        if event in (E.ACCEPTED, E.ATTACHED):
            it.streams.reconnected(it.now)
    assert it.stream.state is state
    return it


REACHED = [(state, True) for state in OWN] + [(state, False) for state in OTHERS]
ALL = [
    (state, own, event)
    for state, own in REACHED
    for event in StreamEvent
    if event not in (ATTACHMENT if own else SUBMISSION)
    # By definition: it follows MISSING.
    if event is not E.GIVEN_UP or state in (S.OPEN, S.PAUSED)
]
FAILURES = {
    (S.SUBMITTING, E.REFUSED): (AlreadyExists, "the idempotency key"),
    (S.SUBMITTING, E.NO_ROOM): (ResourceExhausted, "the queue is full"),
    (S.ATTACHING, E.MISSING): (NotFound, "there is no request 's0.a'"),
    **{
        (state, event): LOST
        for state in (S.OPEN, S.PAUSED, S.RESTORING, S.RESTORING_PAUSED)
        for event in (E.ACCEPTED_ELSEWHERE, E.GIVEN_UP)
    },
    **{
        (state, E.REFUSED): (AlreadyExists, "the idempotency key")
        for state in (S.OPEN, S.PAUSED, S.RESTORING, S.RESTORING_PAUSED)
    },
}


@pytest.mark.parametrize(("state", "own", "event"), ALL)
def test_each_event_of_each_state_leads_where_the_table_says(
    state: StreamState, own: bool, event: StreamEvent
) -> None:
    it = reach(state, own=own)
    submission = it.stream.submit
    cell = CELLS.get((state, event), "-")
    following = state if cell[0] in "-=" else S[cell]
    it.happens(event)
    stream = it.stream

    assert stream.state is following
    assert stream.over == (following in (S.ENDED, S.FAILED))
    assert (stream.end is not None) == (following is S.ENDED)
    assert (stream.failure is not None) == (following is S.FAILED)
    assert stream.retry_at == (it.now + RETRY_S if cell == "=RETRY" else None)
    kinds = [message.WhichOneof("message") for message in it.sent]
    if event is E.LOST and cell != "-":
        assert kinds == ["submit"]
        assert submission is not None
        assert it.sent[0].submit.submission_id == submission.submission_id
        assert it.sent[0].submit.restores
        assert list(it.sent[0].submit.shown_ids) == list(stream.received)
    elif event is E.READ and cell != "-":
        assert kinds == ["attach"]
        assert it.sent[0].attach.attach_id == stream.attach_id
        assert it.sent[0].attach.from_token == stream.next_token > 0
    else:
        assert kinds == []
    if state in (S.SUBMITTING, S.ATTACHING) and following is S.OPEN:
        assert stream.acceptance is not None
        assert stream.acceptance.request_id == ("s0.other" if event is E.ACCEPTED_ELSEWHERE else "s0.a")
    if following is S.FAILED and state is not S.FAILED:
        kind, said = FAILURES[state, event]
        assert type(stream.failure) is kind
        assert str(stream.failure).startswith(said)


def test_every_step_of_the_table_was_made() -> None:
    listed = {(state, event) for state, row in STEPS.items() for event in row}

    assert listed == {step for step, cell in CELLS.items() if cell != "-"}
    assert listed <= {(state, event) for state, _, event in ALL}


@pytest.mark.parametrize("state", StreamState)
def test_a_new_link_gets_the_question_of_each_state(state: StreamState) -> None:
    it = reach(state, own=state in OWN)
    kinds = [message.WhichOneof("message") for message in it.streams.reconnected(it.now)]

    assert kinds == {
        S.SUBMITTING: ["submit"],
        S.RESTORING: ["submit"],
        S.RESTORING_PAUSED: ["submit"],
        S.ATTACHING: ["attach"],
        S.OPEN: ["attach"],
        S.PAUSED: ["attach"],
    }.get(state, [])
