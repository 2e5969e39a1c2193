"""The client for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message

from laps_sd.client.chat import Fields
from laps_sd.client.failures import is_lost
from laps_sd.client.loop_thread import CLOSED, use_grpc
from laps_sd.client.repair import Chosen, Event, Patience, Progress, collect
from laps_sd.client.request import (
    Metadata,
    Options,
    Prompt,
    addresses,
    credentials,
    make_request,
    make_tokenize_request,
)
from laps_sd.service.wire import Tls, make_channel
from laps_sd.v1.inference_pb2 import (
    CancelRequest,
    CancelResponse,
    Cursor,
    DetokenizeRequest,
    DetokenizeResponse,
    ExplainRequest,
    ExplainResponse,
    Explanation,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    ResumeRequest,
    TokenizeResponse,
)
from laps_sd.v1.inference_pb2_grpc import InferenceStub

if TYPE_CHECKING:
    from laps_sd.v1.inference_pb2_grpc import InferenceAsyncStub

__all__ = ["RECONNECT_S", "RETRY_S", "AsyncClient", "AsyncStream"]

RECONNECT_S = 30.0
RETRY_S = 5.0
LEAVING_S = 2.0  # time limit of the cancel call of a client that leaves its stream early


class AsyncStream(AsyncIterator[Event]):
    """Asynchronous `Stream`, with `async with` and `aclose`."""

    def __init__(self, events: AsyncGenerator[Chosen, None]) -> None:
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


class AsyncClient:
    """Client for asyncio, which belongs to the event loop of its first call. Close it, or use `async with`.

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
        self._addresses = addresses(address)
        if tls is not None:
            tls.channel_credentials()  # files that cannot be read are an error here, not of the first call
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels: list[grpc.aio.Channel] = []
        self._stubs: list[InferenceAsyncStub] = []
        self._at = 0
        self._reading: set[Progress] = set()
        """Progress of the streams that have begun and not ended."""
        self._closed = False
        self._metadata = credentials(api_key, metadata)
        self._reconnect_s = reconnect_s
        self._retry_s = retry_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel the requests of open streams, and end all calls, with ValueError in the tasks that wait for
        them. Idempotent.
        """
        left, self._closed = not self._closed, True
        if left:
            await self._cancel(*self._reading)
        for channel in self._channels:
            await channel.close()

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> GenerateResponse:
        """Return the whole answer. `timeout_s` is the hard deadline, `time_limit_s` the soft one."""
        events = self.stream(prompt, timeout_s=timeout_s, **options)
        return collect([(events.choice, event) async for event in events])

    def stream(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """Send a prompt and return its events as they arrive."""
        return self.send(make_request(prompt, **options), timeout_s=timeout_s)

    def send(self, request: GenerateRequest, *, timeout_s: float | None = None) -> AsyncStream:
        """Send a ready request and return its events. It is sent with an idempotency key if it has none; the
        message itself stays as it is, and may be sent again.
        """
        return AsyncStream(self._events(request, timeout_s))

    def resume(
        self, request_id: str, cursor: Cursor | None = None, *, timeout_s: float | None = None
    ) -> AsyncStream:
        """Attach to an existing request and return its events."""
        return AsyncStream(self._events(ResumeRequest(request_id=request_id, cursor=cursor), timeout_s))

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """End a request; return False if it had already ended."""
        request = CancelRequest(request_id=request_id)
        response: CancelResponse = await self._call("Cancel", request, timeout_s)
        return response.cancelled

    async def explain(self, request_id: str, *, timeout_s: float | None = None) -> Explanation:
        """Return why a request is where it is."""
        request = ExplainRequest(request_id=request_id)
        response: ExplainResponse = await self._call("Explain", request, timeout_s)
        return response.explanation

    async def models(self, *, timeout_s: float | None = None) -> list[Model]:
        """Return the models that the gateway serves."""
        response: ListModelsResponse = await self._call("ListModels", ListModelsRequest(), timeout_s)
        return list(response.models)

    async def tokenize(self, prompt: str | Sequence[Fields], *, timeout_s: float | None = None) -> list[int]:
        """Return the token ids of a text or of chat messages."""
        request = make_tokenize_request(prompt)
        response: TokenizeResponse = await self._call("Tokenize", request, timeout_s)
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """Return the text of output tokens."""
        request = DetokenizeRequest(token_ids=token_ids)
        response: DetokenizeResponse = await self._call("Detokenize", request, timeout_s)
        return response.text

    async def _call(self, method: str, request: Message, timeout_s: float | None) -> Any:
        """Make a call that may be repeated, and return its response."""
        patience = Patience(self._retry_s, timeout_s=timeout_s, now=time.monotonic())
        while True:
            left_s = patience.timeout_s(time.monotonic())
            at = self._at
            try:
                with self._until_closed():
                    return await getattr(self._stub, method)(request, timeout=left_s, metadata=self._metadata)
            except grpc.RpcError as error:
                if is_lost(error):
                    self._leave(at)
                pause_s = patience.pause_s(error, time.monotonic())
            await asyncio.sleep(pause_s)

    @property
    def _stub(self) -> InferenceAsyncStub:
        """Stub of the present gateway. The first call makes the channels, which belong to its loop."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            use_grpc()
            self._loop = loop
            self._channels = [make_channel(one, self._tls) for one in self._addresses]
            self._stubs = [InferenceStub(channel) for channel in self._channels]
        if self._loop is not loop:
            raise RuntimeError(
                "the client made its first call in another event loop: create one for each loop"
            )
        return self._stubs[self._at % len(self._stubs)]

    @contextlib.contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Raise ValueError for a call that `close` ended: gRPC cancels it, or refuses it."""
        if self._closed:
            raise ValueError(CLOSED)
        try:
            yield
        except (grpc.aio.UsageError, asyncio.CancelledError):
            if self._ended_by_close():
                raise ValueError(CLOSED) from None
            raise

    def _ended_by_close(self) -> bool:
        """Return whether a CancelledError comes from `close`, which ends calls, not from a cancelled task."""
        task = asyncio.current_task()
        return self._closed and not (task and task.cancelling())

    def _leave(self, at: int) -> None:
        """Go on at the next address, once for all calls that failed together at this one."""
        if self._at == at:
            self._at += 1

    async def _events(
        self, request: GenerateRequest | ResumeRequest, timeout_s: float | None
    ) -> AsyncGenerator[Chosen, None]:
        progress = Progress(
            request,
            timeout_s=timeout_s,
            reconnect_s=self._reconnect_s,
            retry_s=self._retry_s,
            now=time.monotonic(),
        )
        self._reading.add(progress)
        try:
            while not progress.ended:
                at = self._at
                lost: grpc.RpcError | None = None
                with self._until_closed():
                    call = self._open(progress)
                    try:
                        async for message in call:
                            if self._closed:  # it may say that the request was cancelled, by `close`
                                raise ValueError(CLOSED)
                            chosen = progress.take(message, time.monotonic())
                            if chosen is not None:
                                yield chosen
                    except grpc.aio.AioRpcError as error:
                        lost = error
                    finally:
                        call.cancel()
                if not progress.ended:
                    if is_lost(lost):
                        self._leave(at)
                    await asyncio.sleep(progress.lost(lost, time.monotonic()))
        finally:
            self._reading.discard(progress)
            if not self._closed:
                await self._cancel(progress)

    async def _cancel(self, *left: Progress) -> None:
        """Cancel the requests of calls that were left; that it fails is no error of the caller."""

        async def cancel(request_id: str) -> None:
            request = CancelRequest(request_id=request_id)
            try:
                with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError):
                    await self._stub.Cancel(request, timeout=LEAVING_S, metadata=self._metadata)
            except asyncio.CancelledError:
                if not self._ended_by_close():
                    raise

        await asyncio.gather(*(cancel(one) for progress in left for one in progress.to_cancel))

    def _open(self, progress: Progress) -> Any:
        request = progress.request()
        timeout_s = progress.timeout_s(time.monotonic())
        if isinstance(request, ResumeRequest):
            return self._stub.Resume(request, timeout=timeout_s, metadata=self._metadata)
        return self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
