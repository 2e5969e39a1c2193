"""Clients of a gateway, blocking and asynchronous.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=50).text)
        for event in client.stream([{"role": "user", "content": "hi"}], temperature=0.7):
            if isinstance(event, Delta):
                print(event.text, end="")

A prompt is a text, chat messages, or token ids. Events are those of the public contract: `Accepted` first, then `Delta`s,
`Ended` last. If the server refuses a call, the client raises the matching error of `laps_sd.errors`.

Leaving a stream before its end cancels its request, unless the caller gave an idempotency key or set `keep`:

    with client.stream("Once upon a time") as events:
        for event in events: ...                     # break, return, an error: the request is cancelled

A call that reaches no gateway, or whose error advises when to retry, is retried for `retry_s` with growing
pauses, at the next address if several were given. Every call may be repeated, since a request without an
idempotency key gets one. Once a request is accepted, a lost connection is repaired: the stream resumes at the
cursor of the last event, and the caller notices a pause.

With `n` outputs, their events arrive interleaved; `events.choice` is the index of the last event's output:

    events = client.stream("Once upon a time", n=3)
    for event in events:
        if isinstance(event, Delta):
            texts[events.choice] += event.text
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypedDict, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from laps_sd.errors import (
    DETAILS_KEY,
    STATUS_CODES,
    DeadlineExceeded,
    InvalidArgument,
    LapsSdError,
    ResourceExhausted,
    Unavailable,
    retry_after_s,
)
from laps_sd.service.wire import Tls, channel_options, make_channel
from laps_sd.v1.inference_pb2 import (
    Accepted,
    CancelRequest,
    CancelResponse,
    ChatMessage,
    ChatMessages,
    Cursor,
    Delta,
    DetokenizeRequest,
    DetokenizeResponse,
    Ended,
    ExplainRequest,
    ExplainResponse,
    Explanation,
    GenerateEvent,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    OutputFormat,
    ResumeRequest,
    SamplingParams,
    Speculation,
    TokenIds,
    TokenizeRequest,
    TokenizeResponse,
)
from laps_sd.v1.inference_pb2_grpc import InferenceStub

if TYPE_CHECKING:
    from laps_sd.v1.inference_pb2_grpc import InferenceAsyncStub

__all__ = [
    "Accepted",
    "AsyncClient",
    "AsyncStream",
    "ChannelClient",
    "Client",
    "Cursor",
    "Delta",
    "Ended",
    "Event",
    "Options",
    "OutputFormat",
    "Prompt",
    "Stream",
    "error_of",
    "make_request",
]

Event: TypeAlias = Accepted | Delta | Ended
_Chosen: TypeAlias = tuple[int, Event]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
Metadata: TypeAlias = Sequence[tuple[str, str]]

RECONNECT_S = 30.0
RETRY_S = 5.0
MAX_PAUSE_S = 1.0
LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Status codes of a call whose gateway died, or was stopped during the call."""
DRAFTERS = {"model": Speculation.DRAFTER_MODEL, "lookup": Speculation.DRAFTER_LOOKUP}
LEAVING_S = 2.0  # time limit of the cancel call of a client that leaves its stream early


class Options(TypedDict, total=False):
    """All fields of a request except its prompt; see `GenerateRequest` for the meaning."""

    model: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool
    idempotency_key: str
    priority: int
    time_limit_s: float
    deadline: datetime
    """Hard deadline by the gateway's clock, also while no client is connected.

    `timeout_s` limits the call.
    """
    speculation: Literal["auto", "off"] | int
    """Mode of speculation; a number is the longest draft in tokens."""
    drafter: Literal["model", "lookup"]
    """Source of the draft tokens."""
    output_format: OutputFormat
    expected_output_tokens: int
    workload_class: str
    keep: bool
    logprobs: int
    n: int
    """Number of outputs for the one prompt."""


def make_request(prompt: Prompt, **options: Unpack[Options]) -> GenerateRequest:
    """Return the message for a prompt and its options. Absent options stay absent."""
    stop = options.get("stop", ())
    sampling = SamplingParams(
        max_tokens=options.get("max_tokens"),
        temperature=options.get("temperature"),
        top_p=options.get("top_p"),
        top_k=options.get("top_k"),
        min_p=options.get("min_p"),
        repetition_penalty=options.get("repetition_penalty"),
        presence_penalty=options.get("presence_penalty"),
        frequency_penalty=options.get("frequency_penalty"),
        logit_bias=options.get("logit_bias"),
        seed=options.get("seed"),
        stop=[stop] if isinstance(stop, str) else stop,
        ignore_eos=options.get("ignore_eos"),
    )
    time_limit_s = options.get("time_limit_s")
    deadline = options.get("deadline")
    request = GenerateRequest(
        model=options.get("model", ""),
        sampling=sampling if sampling.ByteSize() else None,
        idempotency_key=options.get("idempotency_key", ""),
        priority=options.get("priority"),
        time_limit_ms=None if time_limit_s is None else round(time_limit_s * 1000),
        deadline_unix_ms=None if deadline is None else round(deadline.timestamp() * 1000),
        expected_output_tokens=options.get("expected_output_tokens"),
        workload_class=options.get("workload_class", ""),
        keep=options.get("keep", False),
        logprobs=options.get("logprobs"),
        n=options.get("n"),
        output_format=options.get("output_format"),
    )
    speculation = options.get("speculation", "auto")
    if speculation == "off":
        request.speculation.mode = Speculation.MODE_OFF
    elif speculation != "auto":
        request.speculation.CopyFrom(Speculation(mode=Speculation.MODE_AUTO, max_draft_tokens=speculation))
    if "drafter" in options:
        request.speculation.drafter = DRAFTERS[options["drafter"]]
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], int):
        request.token_ids.CopyFrom(TokenIds(ids=[token for token in prompt if isinstance(token, int)]))
    else:
        messages = [message for message in prompt if isinstance(message, Mapping)]
        request.messages.CopyFrom(
            ChatMessages(messages=[ChatMessage(role=m["role"], content=m["content"]) for m in messages])
        )
    return request


def error_of(error: grpc.RpcError) -> LapsSdError:
    """Return the error that the server raised for a failed call."""
    code = error.code() if hasattr(error, "code") else None
    text = (error.details() if hasattr(error, "details") else None) or "the call failed"
    advice = retry_after_s(error)
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            found = _violations(error)
            return InvalidArgument(*found[0], *found[1:]) if found else InvalidArgument("", text)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ResourceExhausted(text, retry_after_s=advice)
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(text, retry_after_s=advice)
    for kind, number in STATUS_CODES.items():
        if number == code:
            return kind(text)
    return LapsSdError(f"{code.name}: {text}" if code is not None else text)


def _violations(error: grpc.RpcError) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    trailing: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    for key, value in trailing or ():
        if key != DETAILS_KEY:
            continue
        for packed in status_pb2.Status.FromString(value).details:
            bad_request = error_details_pb2.BadRequest()
            if packed.Unpack(bad_request):
                found.extend(
                    (violation.field, violation.description) for violation in bad_request.field_violations
                )
    return found


class _Patience:
    """Time limit for repeating a call that has had no effect yet. Pure; time is an argument."""

    def __init__(self, retry_s: float, *, timeout_s: float | None, now: float) -> None:
        self._until = now + retry_s
        self._deadline = None if timeout_s is None else now + timeout_s
        self._attempts = 0

    def timeout_s(self, now: float) -> float | None:
        """Return the seconds left until the caller's deadline; None without a deadline."""
        return None if self._deadline is None else max(0.001, self._deadline - now)

    def pause_s(self, error: grpc.RpcError, now: float) -> float:
        """Return the seconds to wait before the next call. Raise the error if there is to be none."""
        self._attempts += 1
        pause_s = _pause_s(error, self._attempts)
        ends = self._until if self._deadline is None else min(self._until, self._deadline)
        if not _may_work_later(error) or now + pause_s >= ends:
            raise error_of(error) from error
        return pause_s


def _may_work_later(error: grpc.RpcError) -> bool:
    """Return whether no server answered, or the answer advises when to retry."""
    if _is_lost(error):
        return True
    exhausted = hasattr(error, "code") and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return exhausted and retry_after_s(error) is not None


def _pause_s(error: grpc.RpcError | None, attempts: int) -> float:
    """Return the seconds of the pause.

    It doubles with each attempt, and is at least as long as the server advises; part of it is random, so that
    clients do not all retry at once.
    """
    advice = retry_after_s(error) if error is not None else None
    return max(advice or 0.0, min(MAX_PAUSE_S, 0.02 * 2.0 ** min(attempts, 10)) * random.uniform(0.5, 1.0))


class _Progress:
    """Progress of the outputs of one call, and the repair of a lost connection. Pure; time is an argument."""

    def __init__(
        self,
        request: GenerateRequest | ResumeRequest,
        *,
        timeout_s: float | None,
        reconnect_s: float,
        retry_s: float,
        now: float,
    ) -> None:
        self._patience = _Patience(retry_s, timeout_s=timeout_s, now=now)
        self._own_key = isinstance(request, GenerateRequest) and not request.idempotency_key
        if isinstance(request, GenerateRequest) and self._own_key:
            request.idempotency_key = secrets.token_hex(16)
        self._request = request
        self._deadline = None if timeout_s is None else now + timeout_s
        self._reconnect_s = reconnect_s
        self._lost_at: float | None = None
        self._attempts = 0
        start = request.cursor if isinstance(request, ResumeRequest) else Cursor()
        count = max(1, request.n) if isinstance(request, GenerateRequest) else 1
        self._outputs = [_Reading(start) for _ in range(count)]

    @property
    def accepted(self) -> bool:
        """Return whether every output is on the record: then a lost connection can be repaired."""
        return all(output.request_id for output in self._outputs)

    @property
    def ended(self) -> bool:
        """Return whether every output has ended."""
        return all(output.ended for output in self._outputs)

    @property
    def to_cancel(self) -> list[str]:
        """Return the ids of the requests to cancel if the caller leaves now: no client can want the rest."""
        keep = isinstance(self._request, GenerateRequest) and self._request.keep
        if keep or not self._own_key:
            return []
        return [output.request_id for output in self._outputs if output.request_id and not output.ended]

    def request(self) -> GenerateRequest | ResumeRequest:
        """Return the next request: the caller's at first, later one that resumes where the stream broke.

        Several outputs are found again by their idempotency key, and are sent from the start; `take` drops
        the events that were read before.
        """
        if len(self._outputs) > 1 or not self.accepted:
            return self._request
        (output,) = self._outputs
        return ResumeRequest(request_id=output.request_id, cursor=output.cursor)

    def timeout_s(self, now: float) -> float | None:
        """Return the seconds left until the deadline; None without one.

        Raise DeadlineExceeded if none are left.
        """
        if self._deadline is None:
            return None
        if now >= self._deadline:
            raise DeadlineExceeded("the deadline passed while the stream was being resumed")
        return self._deadline - now

    def take(self, message: GenerateEvent, now: float) -> _Chosen | None:
        """Return the caller's event and its choice; None for an event that a repaired stream repeats."""
        self._lost_at = None
        self._attempts = 0
        if message.choice >= len(self._outputs):
            raise LapsSdError(f"the server sent output {message.choice} of {len(self._outputs)}")
        event = self._outputs[message.choice].take(message)
        return None if event is None else (message.choice, event)

    def lost(self, error: grpc.RpcError | None, now: float) -> float:
        """Return the seconds to wait before the next call. Raise the error if there is to be none."""
        if error is not None and not self.accepted:
            return self._patience.pause_s(error, now)
        if self._lost_at is None:
            self._lost_at = now  # not the time of the last message: a hanging gateway is noticed late
        may_go_on = self.accepted and (error is None or _may_work_later(error))
        if not may_go_on or now - self._lost_at > self._reconnect_s:
            raise (error_of(error) if error is not None else Unavailable("the stream broke off")) from error
        self._attempts += 1
        return _pause_s(error, self._attempts)


class _Reading:
    """Read position of one output."""

    def __init__(self, start: Cursor) -> None:
        self.request_id = ""
        self.cursor = Cursor()
        self.cursor.CopyFrom(start)
        self.ended = False

    def take(self, message: GenerateEvent) -> Event | None:
        """Return the new part of a message; None if nothing is new."""
        match message.WhichOneof("event"):
            case "accepted":
                known, self.request_id = self.request_id, message.accepted.request_id
                return None if known else message.accepted
            case "delta":
                unseen = _unseen(message.delta, self.cursor)
                if unseen is not None:
                    self.cursor.CopyFrom(unseen.cursor)
                return unseen
            case "end":
                known_end, self.ended = self.ended, True
                return None if known_end else message.end
            case _:
                return None


def _unseen(delta: Delta, cursor: Cursor) -> Delta | None:
    """Return the part of a delta after a cursor; None if there is none."""
    tokens = cursor.next_token - delta.first_token if delta.token_ids else 0
    characters = cursor.text_offset - (delta.cursor.text_offset - len(delta.text))
    if tokens <= 0 and characters <= 0:
        return delta
    rest = Delta(
        text=delta.text[max(0, characters) :],
        token_ids=delta.token_ids[max(0, tokens) :],
        first_token=max(delta.first_token, cursor.next_token),
        cursor=delta.cursor,
        logprobs=delta.logprobs[max(0, tokens) :],
    )
    return rest if rest.text or rest.token_ids else None


def _is_lost(error: grpc.RpcError | None) -> bool:
    """Return whether another address may answer although this one did not."""
    return error is None or (hasattr(error, "code") and error.code() in LOST)


def _collect(events: Sequence[_Chosen]) -> GenerateResponse:
    """Return the response of the unary call: choice 0, and the others in `more`."""
    responses = [GenerateResponse() for _ in range(1 + max((choice for choice, _ in events), default=0))]
    texts: list[list[str]] = [[] for _ in responses]
    for choice, event in events:
        match event:
            case Accepted():
                responses[choice].accepted.CopyFrom(event)
            case Delta():
                texts[choice].append(event.text)
                responses[choice].token_ids.extend(event.token_ids)
                responses[choice].logprobs.extend(event.logprobs)
            case Ended():
                responses[choice].end.CopyFrom(event)
    for response, text in zip(responses, texts, strict=True):
        response.text = "".join(text)
    responses[0].more.extend(responses[1:])
    return responses[0]


def _credentials(api_key: str | None, metadata: Metadata) -> tuple[tuple[str, str], ...]:
    return (*metadata, ("authorization", f"Bearer {api_key}")) if api_key else tuple(metadata)


def _addresses(address: str | Sequence[str]) -> list[str]:
    addresses = [address] if isinstance(address, str) else list(address)
    if not addresses:
        raise ValueError("a client needs the address of a gateway")
    return addresses


class Stream(Iterator[Event]):
    """Iterator over the events of a call as they arrive.

    Leaving its `with` block, or closing it, cancels the requests that no client can then wait for.
    """

    def __init__(self, events: Generator[_Chosen, None, None]) -> None:
        self._events = events
        self.choice = 0
        """Index of the last event's output among the `n`, from 0."""

    def __next__(self) -> Event:
        self.choice, event = next(self._events)
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the stream. Idempotent."""
        self._events.close()


class AsyncStream(AsyncIterator[Event]):
    """Asynchronous `Stream`, with `async with` and `aclose`."""

    def __init__(self, events: AsyncGenerator[_Chosen, None]) -> None:
        self._events = events
        self.choice = 0
        """Index of the last event's output among the `n`, from 0."""

    async def __anext__(self) -> Event:
        self.choice, event = await anext(self._events)
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the stream. Idempotent."""
        await self._events.aclose()


class Client:
    """Blocking client. Safe to share between threads. Close it, or use it in `with`."""

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        metadata: Metadata = (),
        reconnect_s: float = RECONNECT_S,
        retry_s: float = RETRY_S,
    ) -> None:
        options = channel_options()
        self._channels = [
            grpc.insecure_channel(one, options=options)
            if tls is None
            else grpc.secure_channel(one, tls.channel_credentials(), options=options)
            for one in _addresses(address)
        ]
        self._use(self._channels, _credentials(api_key, metadata), reconnect_s, retry_s)

    def _use(
        self, channels: Sequence[grpc.Channel], metadata: Metadata, reconnect_s: float, retry_s: float
    ) -> None:
        self._stubs = [InferenceStub(channel) for channel in channels]
        self._at = 0
        self._metadata = tuple(metadata)
        self._reconnect_s = reconnect_s
        self._retry_s = retry_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all calls."""
        for channel in self._channels:
            channel.close()

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> GenerateResponse:
        """Return the whole answer. `timeout_s` is the hard deadline, `time_limit_s` the soft one."""
        events = self.stream(prompt, timeout_s=timeout_s, **options)
        return _collect([(events.choice, event) for event in events])

    def stream(self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]) -> Stream:
        """Send a prompt and return its events as they arrive."""
        return self.send(make_request(prompt, **options), timeout_s=timeout_s)

    def send(self, request: GenerateRequest, *, timeout_s: float | None = None) -> Stream:
        """Send a ready request and return its events. It gets an idempotency key if it has none."""
        return Stream(self._events(request, timeout_s))

    def resume(
        self, request_id: str, cursor: Cursor | None = None, *, timeout_s: float | None = None
    ) -> Stream:
        """Attach to an existing request and return its events."""
        return Stream(self._events(ResumeRequest(request_id=request_id, cursor=cursor), timeout_s))

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """End a request; return False if it had already ended."""
        request = CancelRequest(request_id=request_id)
        response: CancelResponse = self._ask("Cancel", request, timeout_s, self._retry_s)
        return response.cancelled

    def explain(self, request_id: str, *, timeout_s: float | None = None) -> Explanation:
        """Return why a request is where it is."""
        request = ExplainRequest(request_id=request_id)
        response: ExplainResponse = self._ask("Explain", request, timeout_s, self._retry_s)
        return response.explanation

    def models(self, *, timeout_s: float | None = None) -> list[Model]:
        """Return the models that the gateway serves."""
        response: ListModelsResponse = self._ask("ListModels", ListModelsRequest(), timeout_s, self._retry_s)
        return list(response.models)

    def tokenize(
        self, prompt: str | Sequence[Mapping[str, str]], *, timeout_s: float | None = None
    ) -> list[int]:
        """Return the token ids of a text or of chat messages."""
        made = make_request(prompt)
        request = TokenizeRequest()
        if isinstance(prompt, str):
            request.text = made.text
        else:
            request.messages.CopyFrom(made.messages)
        response: TokenizeResponse = self._ask("Tokenize", request, timeout_s, self._retry_s)
        return list(response.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """Return the text of output tokens."""
        request = DetokenizeRequest(token_ids=token_ids)
        response: DetokenizeResponse = self._ask("Detokenize", request, timeout_s, self._retry_s)
        return response.text

    def _ask(self, method: str, request: Message, timeout_s: float | None, retry_s: float) -> Any:
        """Make a call that may be repeated, and return its response."""
        patience = _Patience(retry_s, timeout_s=timeout_s, now=time.monotonic())
        while True:
            left_s = patience.timeout_s(time.monotonic())
            try:
                return getattr(self._stub, method)(request, timeout=left_s, metadata=self._metadata)
            except grpc.RpcError as error:
                pause_s = patience.pause_s(error, time.monotonic())
            self._at += 1
            time.sleep(pause_s)

    @property
    def _stub(self) -> InferenceStub:
        return self._stubs[self._at % len(self._stubs)]

    def _events(
        self, request: GenerateRequest | ResumeRequest, timeout_s: float | None
    ) -> Generator[_Chosen, None, None]:
        progress = _Progress(
            request,
            timeout_s=timeout_s,
            reconnect_s=self._reconnect_s,
            retry_s=self._retry_s,
            now=time.monotonic(),
        )
        try:
            while not progress.ended:
                at = self._at
                call = self._open(progress)
                lost: grpc.RpcError | None = None
                try:
                    for message in call:
                        chosen = progress.take(message, time.monotonic())
                        if chosen is not None:
                            yield chosen
                except grpc.RpcError as error:
                    lost = error
                finally:
                    call.cancel()
                if not progress.ended:
                    if _is_lost(lost) and self._at == at:
                        self._at += 1  # once for all streams that were lost together
                    time.sleep(progress.lost(lost, time.monotonic()))
        finally:
            for request_id in progress.to_cancel:
                with contextlib.suppress(LapsSdError):
                    self._ask("Cancel", CancelRequest(request_id=request_id), LEAVING_S, retry_s=0.0)

    def _open(self, progress: _Progress) -> Any:
        request = progress.request()
        timeout_s = progress.timeout_s(time.monotonic())
        if isinstance(request, ResumeRequest):
            return self._stub.Resume(request, timeout=timeout_s, metadata=self._metadata)
        return self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)


class ChannelClient(Client):
    """`Client` over one channel that the caller creates and closes."""

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        metadata: Metadata = (),
        reconnect_s: float = RECONNECT_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._channels = []
        self._use([channel], metadata, reconnect_s, retry_s)


class AsyncClient:
    """Client for asyncio. Create it inside the loop that uses it. Close it, or use it in `async with`.

    Leave a stream early by its `async with`, so that its end does not wait for the garbage collector.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        metadata: Metadata = (),
        reconnect_s: float = RECONNECT_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._channels = [make_channel(one, tls) for one in _addresses(address)]
        self._stubs: list[InferenceAsyncStub] = [InferenceStub(channel) for channel in self._channels]
        self._at = 0
        self._metadata = _credentials(api_key, metadata)
        self._reconnect_s = reconnect_s
        self._retry_s = retry_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls."""
        for channel in self._channels:
            await channel.close()

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> GenerateResponse:
        """Return the whole answer. `timeout_s` is the hard deadline, `time_limit_s` the soft one."""
        events = self.stream(prompt, timeout_s=timeout_s, **options)
        return _collect([(events.choice, event) async for event in events])

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """Send a prompt and return its events as they arrive."""
        return self.send(make_request(prompt, **options), timeout_s=timeout_s)

    def send(self, request: GenerateRequest, *, timeout_s: float | None = None) -> AsyncStream:
        """Send a ready request and return its events. It gets an idempotency key if it has none."""
        return AsyncStream(self._events(request, timeout_s))

    def resume(
        self, request_id: str, cursor: Cursor | None = None, *, timeout_s: float | None = None
    ) -> AsyncStream:
        """Attach to an existing request and return its events."""
        return AsyncStream(self._events(ResumeRequest(request_id=request_id, cursor=cursor), timeout_s))

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """End a request; return False if it had already ended."""
        request = CancelRequest(request_id=request_id)
        response: CancelResponse = await self._ask("Cancel", request, timeout_s, self._retry_s)
        return response.cancelled

    async def explain(self, request_id: str, *, timeout_s: float | None = None) -> Explanation:
        """Return why a request is where it is."""
        request = ExplainRequest(request_id=request_id)
        response: ExplainResponse = await self._ask("Explain", request, timeout_s, self._retry_s)
        return response.explanation

    async def models(self, *, timeout_s: float | None = None) -> list[Model]:
        """Return the models that the gateway serves."""
        response: ListModelsResponse = await self._ask(
            "ListModels", ListModelsRequest(), timeout_s, self._retry_s
        )
        return list(response.models)

    async def tokenize(
        self, prompt: str | Sequence[Mapping[str, str]], *, timeout_s: float | None = None
    ) -> list[int]:
        """Return the token ids of a text or of chat messages."""
        made = make_request(prompt)
        request = TokenizeRequest()
        if isinstance(prompt, str):
            request.text = made.text
        else:
            request.messages.CopyFrom(made.messages)
        response: TokenizeResponse = await self._ask("Tokenize", request, timeout_s, self._retry_s)
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """Return the text of output tokens."""
        request = DetokenizeRequest(token_ids=token_ids)
        response: DetokenizeResponse = await self._ask("Detokenize", request, timeout_s, self._retry_s)
        return response.text

    async def _ask(self, method: str, request: Message, timeout_s: float | None, retry_s: float) -> Any:
        """Make a call that may be repeated, and return its response."""
        patience = _Patience(retry_s, timeout_s=timeout_s, now=time.monotonic())
        while True:
            left_s = patience.timeout_s(time.monotonic())
            try:
                return await getattr(self._stub, method)(request, timeout=left_s, metadata=self._metadata)
            except grpc.RpcError as error:
                pause_s = patience.pause_s(error, time.monotonic())
            self._at += 1
            await asyncio.sleep(pause_s)

    @property
    def _stub(self) -> InferenceAsyncStub:
        return self._stubs[self._at % len(self._stubs)]

    async def _events(
        self, request: GenerateRequest | ResumeRequest, timeout_s: float | None
    ) -> AsyncGenerator[_Chosen, None]:
        progress = _Progress(
            request,
            timeout_s=timeout_s,
            reconnect_s=self._reconnect_s,
            retry_s=self._retry_s,
            now=time.monotonic(),
        )
        try:
            while not progress.ended:
                at = self._at
                call = self._open(progress)
                lost: grpc.RpcError | None = None
                try:
                    async for message in call:
                        chosen = progress.take(message, time.monotonic())
                        if chosen is not None:
                            yield chosen
                except grpc.aio.AioRpcError as error:
                    lost = error
                finally:
                    call.cancel()
                if not progress.ended:
                    if _is_lost(lost) and self._at == at:
                        self._at += 1  # once for all streams that were lost together
                    await asyncio.sleep(progress.lost(lost, time.monotonic()))
        finally:
            for request_id in progress.to_cancel:
                with contextlib.suppress(LapsSdError):
                    await self._ask("Cancel", CancelRequest(request_id=request_id), LEAVING_S, retry_s=0.0)

    def _open(self, progress: _Progress) -> Any:
        request = progress.request()
        timeout_s = progress.timeout_s(time.monotonic())
        if isinstance(request, ResumeRequest):
            return self._stub.Resume(request, timeout=timeout_s, metadata=self._metadata)
        return self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
