"""One client's attachment to one request: what it has received, and what the scheduler still has to answer."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.links.stream_state import StreamAction, StreamEvent, StreamState, step
from laps_sd.errors import LapsSdError
from laps_sd.v1 import gateway_link_pb2 as link_pb2
from laps_sd.v1 import inference_pb2

Message = link_pb2.GatewayMessage


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first information that a client gets about its request."""

    request_id: str
    prompt_tokens: int
    seed: int
    stop: tuple[str, ...]
    attached: bool  # True if the request existed before
    model: str
    # The parameters, besides `stop`, that decide how tokens become text; None: all at their default.
    text: inference_pb2.SamplingParams | None = None


@dataclass(slots=True)
class Batch:
    """Everything that arrived since the last batch."""

    first_token: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    end: link_pb2.RequestEnd | None = None  # arrives together with the last tokens
    prompt_logprobs: inference_pb2.PromptLogprobs | None = None  # arrive together with the first token


@dataclass(slots=True, eq=False)
class ClientStream:
    """One attachment. Only `Streams` changes it; of what is derived from its state, that which is read for every
    delivery is kept."""

    attachment_id: str
    tenant: str
    request_id: str
    submit: link_pb2.Submit | None
    """None: attached to a request of another call, whose submission is unknown here."""
    deadline: float | None  # deadline of the client's call, in the caller's clock
    state: StreamState
    acceptance: Accepted | None = None
    accepted_at: float = 0.0  # when the acceptance arrived; a time limit counts from it
    failure: LapsSdError | None = None
    refused: link_pb2.SubmitRefused | None = None  # the scheduler's reason why the submission failed
    end: link_pb2.RequestEnd | None = None
    next_token: int = 0  # index of the first token that has not arrived
    attach_id: int = 0  # id of the unanswered Attach; 0: none
    attach_sent_at: float = 0.0
    retry_at: float | None = None
    lost_since: float | None = None  # time since which the scheduler has not known the request
    received: array[int] = field(default_factory=lambda: array("I"))
    """All tokens, if the request may have to be restored."""
    waiting: Batch = field(default_factory=lambda: Batch(0))
    has_news: bool = False  # something waits for the call
    on_news: Callable[[], object] = lambda: None  # called when `has_news` becomes true; must not raise
    over: bool = False
    """Nothing more will arrive."""
    paused: bool = False
    """Deliveries are discarded until the client has read."""
    receives: bool = False
    """Tokens are taken as they arrive. Before acceptance a stream cannot know its stop strings; tokens
    that arrive too early are requested again."""

    @property
    def restoring(self) -> bool:
        """Return whether the request was submitted again, because the record lost it."""
        return self.state in (StreamState.RESTORING, StreamState.RESTORING_PAUSED)

    @property
    def submits(self) -> bool:
        """Return whether a submission is not answered yet, so that it must be sent again to a new leader."""
        return self.state is StreamState.SUBMITTING or self.restoring

    def notify(self) -> None:
        """Let the call know that something waits for it."""
        if not self.has_news:
            self.has_news = True
            self.on_news()

    def step(self, event: StreamEvent) -> StreamAction:
        """Enter the state that follows; return what to do."""
        self.state, action = step(self.state, event)
        self.over = self.state in (StreamState.ENDED, StreamState.FAILED)
        self.paused = self.state in (StreamState.PAUSED, StreamState.RESTORING_PAUSED)
        self.receives = self.state in (StreamState.OPEN, StreamState.RESTORING)
        return action

    def submission(self, now: float) -> Message:
        """Return the message that submits the request, for the first time or to restore it."""
        assert self.submit is not None, "an attachment has nothing to submit"
        message = Message()
        message.submit.CopyFrom(self.submit)
        if self.deadline is not None:
            message.submit.deadline_in_ms = max(1, round((self.deadline - now) * 1000))
        if self.restoring and self.acceptance is not None:
            # Use the accepted id and seed: an idempotency key may have led to an earlier request with its own
            # seed.
            message.submit.request_id = self.request_id
            specification = message.submit.specification
            specification.request_id = self.request_id
            specification.sampling.seed = self.acceptance.seed
            message.submit.shown_ids.extend(self.received)
            message.submit.restores = True
            if self.submit.HasField("time_limit_ms"):
                elapsed_ms = round((now - self.accepted_at) * 1000)
                message.submit.time_limit_ms = max(1, self.submit.time_limit_ms - elapsed_ms)
        return message

    def attachment(self) -> Message:
        """Return the message that attaches to the request from the next token, under `attach_id`."""
        return Message(
            attach=link_pb2.Attach(
                attach_id=self.attach_id,
                request_id=self.request_id,
                tenant=self.tenant,
                from_token=self.next_token,
                attachment_id=self.attachment_id,
                wants_submission=self.acceptance is None,
            )
        )
