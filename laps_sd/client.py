"""Clients of a gateway, blocking and asynchronous.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=50).text)
        for event in client.stream([{"role": "user", "content": "hi"}], temperature=0.7):
            if isinstance(event, Delta):
                print(event.text, end="")

A prompt is a text, chat messages, or token ids. Events are those of the public contract: `Accepted` first, then `Delta`s,
`Ended` last. What the server refuses is raised as the matching error of `laps_sd.errors`.

Until a request is accepted every failure is raised. From then on a lost connection is repaired: the stream goes on at the
cursor of the last event, at the next address if several were given, and the caller notices a pause. For that to work, a
request without an idempotency key gets one, and with it the server's grace; a stream that is left before its end
(`break`, `aclose`) is cancelled, unless the caller gave the key or asked to `keep` it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypedDict, Unpack

import grpc
import grpc.aio
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
from laps_sd.v1.inference_pb2 import (
    Accepted,
    CancelRequest,
    ChatMessage,
    ChatMessages,
    Cursor,
    Delta,
    Ended,
    ExplainRequest,
    Explanation,
    GenerateEvent,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    Model,
    ResumeRequest,
    SamplingParams,
    Speculation,
    TokenIds,
)
from laps_sd.v1.inference_pb2_grpc import InferenceStub
from laps_sd.wire import Tls, channel_options, make_channel

if TYPE_CHECKING:
    from laps_sd.v1.inference_pb2_grpc import InferenceAsyncStub

__all__ = [
    "Accepted",
    "AsyncClient",
    "Client",
    "Cursor",
    "Delta",
    "Ended",
    "Event",
    "Options",
    "Prompt",
    "error_of",
    "make_request",
]

Event: TypeAlias = Accepted | Delta | Ended
Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, str]]
Metadata: TypeAlias = Sequence[tuple[str, str]]

RECONNECT_S = 30.0
LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""How a call ends whose gateway died, or was stopped under it."""
LEAVING_S = 2.0  # what the last word of a client that leaves may take


class Options(TypedDict, total=False):
    """Everything about a request but its prompt; see `GenerateRequest` for the meaning."""

    model: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool
    idempotency_key: str
    priority: int
    time_limit_s: float
    speculation: Literal["auto", "off"] | int
    """How to speculate; a number is the longest draft."""
    expected_output_tokens: int
    workload_class: str
    keep: bool
    logprobs: int


def make_request(prompt: Prompt, **options: Unpack[Options]) -> GenerateRequest:
    """The message that a prompt and options make. Absent options stay absent."""
    stop = options.get("stop", ())
    sampling = SamplingParams(
        max_tokens=options.get("max_tokens"),
        temperature=options.get("temperature"),
        top_p=options.get("top_p"),
        top_k=options.get("top_k"),
        seed=options.get("seed"),
        stop=[stop] if isinstance(stop, str) else stop,
        ignore_eos=options.get("ignore_eos"),
    )
    time_limit_s = options.get("time_limit_s")
    request = GenerateRequest(
        model=options.get("model", ""),
        sampling=sampling if sampling.ByteSize() else None,
        idempotency_key=options.get("idempotency_key", ""),
        priority=options.get("priority"),
        time_limit_ms=None if time_limit_s is None else round(time_limit_s * 1000),
        expected_output_tokens=options.get("expected_output_tokens"),
        workload_class=options.get("workload_class", ""),
        keep=options.get("keep", False),
        logprobs=options.get("logprobs"),
    )
    speculation = options.get("speculation", "auto")
    if speculation == "off":
        request.speculation.mode = Speculation.MODE_OFF
    elif speculation != "auto":
        request.speculation.CopyFrom(Speculation(mode=Speculation.MODE_AUTO, max_draft_tokens=speculation))
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
    """A failed call as the error that the server raised."""
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


class _Progress:
    """How far one stream has come, and what to do when its connection is lost. Pure; time is an argument."""

    def __init__(
        self,
        request: GenerateRequest | ResumeRequest,
        *,
        timeout_s: float | None,
        reconnect_s: float,
        now: float,
    ) -> None:
        self._own_key = isinstance(request, GenerateRequest) and not request.idempotency_key
        if isinstance(request, GenerateRequest) and self._own_key:
            request.idempotency_key = secrets.token_hex(16)
        self._request = request
        self._deadline = None if timeout_s is None else now + timeout_s
        self._reconnect_s = reconnect_s
        self._heard_at = now
        self._attempts = 0
        self._cursor = Cursor()
        self.request_id = ""
        self.ended = False

    @property
    def to_cancel(self) -> bool:
        """Whether nobody can want the rest, when the caller leaves now."""
        keep = isinstance(self._request, GenerateRequest) and self._request.keep
        return bool(self.request_id) and not self.ended and self._own_key and not keep

    def request(self) -> GenerateRequest | ResumeRequest:
        """What to call with: as the caller asked at first, later from where the stream broke."""
        if not self.request_id:
            return self._request
        return ResumeRequest(request_id=self.request_id, cursor=self._cursor)

    def timeout_s(self, now: float) -> float | None:
        """What is left of the caller's time. Raises DeadlineExceeded when that is nothing."""
        if self._deadline is None:
            return None
        if now >= self._deadline:
            raise DeadlineExceeded("the deadline passed while the stream was being resumed")
        return self._deadline - now

    def take(self, message: GenerateEvent, now: float) -> Event | None:
        """The event for the caller; None for one that a resumed stream repeats."""
        self._heard_at = now
        self._attempts = 0
        match message.WhichOneof("event"):
            case "accepted":
                known, self.request_id = self.request_id, message.accepted.request_id
                if not known and isinstance(self._request, ResumeRequest):
                    self._cursor.CopyFrom(self._request.cursor)
                return None if known else message.accepted
            case "delta":
                self._cursor.CopyFrom(message.delta.cursor)
                return message.delta
            case "end":
                self.ended = True
                return message.end
            case _:
                return None

    def lost(self, error: grpc.RpcError | None, now: float) -> float:
        """Seconds to wait before the next call. Raises when there is to be none."""
        code = error.code() if error is not None and hasattr(error, "code") else None
        if (
            not self.request_id
            or (error is not None and code not in LOST)
            or now - self._heard_at > self._reconnect_s
        ):
            raise (error_of(error) if error is not None else Unavailable("the stream broke off")) from error
        self._attempts += 1
        return min(1.0, 0.02 * 2.0 ** min(self._attempts, 10)) * random.uniform(0.5, 1.0)


def _collect(events: Sequence[Event]) -> GenerateResponse:
    response = GenerateResponse()
    text = []
    for event in events:
        match event:
            case Accepted():
                response.accepted.CopyFrom(event)
            case Delta():
                text.append(event.text)
                response.token_ids.extend(event.token_ids)
                response.logprobs.extend(event.logprobs)
            case Ended():
                response.end.CopyFrom(event)
    response.text = "".join(text)
    return response


def _credentials(api_key: str | None, metadata: Metadata) -> tuple[tuple[str, str], ...]:
    return (*metadata, ("authorization", f"Bearer {api_key}")) if api_key else tuple(metadata)


def _addresses(address: str | Sequence[str]) -> list[str]:
    addresses = [address] if isinstance(address, str) else list(address)
    if not addresses:
        raise ValueError("a client needs the address of a gateway")
    return addresses


class Client:
    """Blocks. Safe to share between threads. Close it, or use it in `with`."""

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        metadata: Metadata = (),
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        options = channel_options()
        self._channels = [
            grpc.insecure_channel(one, options=options)
            if tls is None
            else grpc.secure_channel(one, tls.channel_credentials(), options=options)
            for one in _addresses(address)
        ]
        self._stubs = [InferenceStub(channel) for channel in self._channels]
        self._at = 0
        self._metadata = _credentials(api_key, metadata)
        self._reconnect_s = reconnect_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls."""
        for channel in self._channels:
            channel.close()

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> GenerateResponse:
        """The whole answer. `timeout_s` is the hard deadline, `time_limit_s` the soft one."""
        return _collect(list(self.stream(prompt, timeout_s=timeout_s, **options)))

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Iterator[Event]:
        """Events as they come."""
        return self._events(make_request(prompt, **options), timeout_s)

    def resume(
        self, request_id: str, cursor: Cursor | None = None, *, timeout_s: float | None = None
    ) -> Iterator[Event]:
        """Attaches to a request that exists."""
        return self._events(ResumeRequest(request_id=request_id, cursor=cursor), timeout_s)

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Ends a request; False if it had ended."""
        with _translated():
            response = self._stub.Cancel(
                CancelRequest(request_id=request_id), timeout=timeout_s, metadata=self._metadata
            )
        return response.cancelled

    def explain(self, request_id: str, *, timeout_s: float | None = None) -> Explanation:
        """Why a request is where it is."""
        with _translated():
            response = self._stub.Explain(
                ExplainRequest(request_id=request_id), timeout=timeout_s, metadata=self._metadata
            )
        return response.explanation

    def models(self, *, timeout_s: float | None = None) -> list[Model]:
        """What the gateway serves."""
        with _translated():
            response = self._stub.ListModels(ListModelsRequest(), timeout=timeout_s, metadata=self._metadata)
        return list(response.models)

    @property
    def _stub(self) -> InferenceStub:
        return self._stubs[self._at % len(self._stubs)]

    def _events(self, request: GenerateRequest | ResumeRequest, timeout_s: float | None) -> Iterator[Event]:
        progress = _Progress(
            request, timeout_s=timeout_s, reconnect_s=self._reconnect_s, now=time.monotonic()
        )
        try:
            while not progress.ended:
                call = self._open(progress)
                lost: grpc.RpcError | None = None
                try:
                    for message in call:
                        event = progress.take(message, time.monotonic())
                        if event is not None:
                            yield event
                except grpc.RpcError as error:
                    lost = error
                finally:
                    call.cancel()
                if not progress.ended:
                    pause_s = progress.lost(lost, time.monotonic())
                    self._at += 1
                    time.sleep(pause_s)
        finally:
            if progress.to_cancel:
                with contextlib.suppress(LapsSdError):
                    self.cancel(progress.request_id, timeout_s=LEAVING_S)

    def _open(self, progress: _Progress) -> Any:
        request = progress.request()
        timeout_s = progress.timeout_s(time.monotonic())
        if isinstance(request, ResumeRequest):
            return self._stub.Resume(request, timeout=timeout_s, metadata=self._metadata)
        return self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)


class AsyncClient:
    """For asyncio. Make it inside the loop that uses it. Close it, or use it in `async with`.

    Leave a stream early with `contextlib.aclosing`, so that its end does not wait for the garbage collector.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        metadata: Metadata = (),
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        self._channels = [make_channel(one, tls) for one in _addresses(address)]
        self._stubs: list[InferenceAsyncStub] = [InferenceStub(channel) for channel in self._channels]
        self._at = 0
        self._metadata = _credentials(api_key, metadata)
        self._reconnect_s = reconnect_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all calls."""
        for channel in self._channels:
            await channel.close()

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> GenerateResponse:
        """The whole answer. `timeout_s` is the hard deadline, `time_limit_s` the soft one."""
        return _collect([event async for event in self.stream(prompt, timeout_s=timeout_s, **options)])

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncIterator[Event]:
        """Events as they come."""
        return self._events(make_request(prompt, **options), timeout_s)

    def resume(
        self, request_id: str, cursor: Cursor | None = None, *, timeout_s: float | None = None
    ) -> AsyncIterator[Event]:
        """Attaches to a request that exists."""
        return self._events(ResumeRequest(request_id=request_id, cursor=cursor), timeout_s)

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Ends a request; False if it had ended."""
        with _translated():
            response = await self._stub.Cancel(
                CancelRequest(request_id=request_id), timeout=timeout_s, metadata=self._metadata
            )
        return response.cancelled

    async def explain(self, request_id: str, *, timeout_s: float | None = None) -> Explanation:
        """Why a request is where it is."""
        with _translated():
            response = await self._stub.Explain(
                ExplainRequest(request_id=request_id), timeout=timeout_s, metadata=self._metadata
            )
        return response.explanation

    async def models(self, *, timeout_s: float | None = None) -> list[Model]:
        """What the gateway serves."""
        with _translated():
            response = await self._stub.ListModels(
                ListModelsRequest(), timeout=timeout_s, metadata=self._metadata
            )
        return list(response.models)

    @property
    def _stub(self) -> InferenceAsyncStub:
        return self._stubs[self._at % len(self._stubs)]

    async def _events(
        self, request: GenerateRequest | ResumeRequest, timeout_s: float | None
    ) -> AsyncIterator[Event]:
        progress = _Progress(
            request, timeout_s=timeout_s, reconnect_s=self._reconnect_s, now=time.monotonic()
        )
        try:
            while not progress.ended:
                call = self._open(progress)
                lost: grpc.RpcError | None = None
                try:
                    async for message in call:
                        event = progress.take(message, time.monotonic())
                        if event is not None:
                            yield event
                except grpc.aio.AioRpcError as error:
                    lost = error
                finally:
                    call.cancel()
                if not progress.ended:
                    pause_s = progress.lost(lost, time.monotonic())
                    self._at += 1
                    await asyncio.sleep(pause_s)
        finally:
            if progress.to_cancel:
                with contextlib.suppress(LapsSdError):
                    await self.cancel(progress.request_id, timeout_s=LEAVING_S)

    def _open(self, progress: _Progress) -> Any:
        request = progress.request()
        timeout_s = progress.timeout_s(time.monotonic())
        if isinstance(request, ResumeRequest):
            return self._stub.Resume(request, timeout=timeout_s, metadata=self._metadata)
        return self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """What gRPC raises inside comes out as our errors."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error) from error
