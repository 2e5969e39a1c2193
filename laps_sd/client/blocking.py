"""The blocking client."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from google.protobuf.message import Message

from laps_sd.client.aio import LEAVING_S, RECONNECT_S, RETRY_S
from laps_sd.client.failures import is_lost
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
from laps_sd.errors import LapsSdError
from laps_sd.service.wire import Tls, channel_options
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

__all__ = ["Client", "Stream"]


class Stream(Iterator[Event]):
    """Iterator over the events of a call as they arrive.

    Leaving its `with` block, or closing it, cancels the requests that no client can then wait for.
    """

    def __init__(self, events: Generator[Chosen, None, None]) -> None:
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
            else grpc.secure_channel(
                one, tls.channel_credentials(), options=[*options, *tls.channel_options()]
            )
            for one in addresses(address)
        ]
        self._use(self._channels, credentials(api_key, metadata), reconnect_s, retry_s)

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
        return collect([(events.choice, event) for event in events])

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
        request = make_tokenize_request(prompt)
        response: TokenizeResponse = self._ask("Tokenize", request, timeout_s, self._retry_s)
        return list(response.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """Return the text of output tokens."""
        request = DetokenizeRequest(token_ids=token_ids)
        response: DetokenizeResponse = self._ask("Detokenize", request, timeout_s, self._retry_s)
        return response.text

    def _ask(self, method: str, request: Message, timeout_s: float | None, retry_s: float) -> Any:
        """Make a call that may be repeated, and return its response."""
        patience = Patience(retry_s, timeout_s=timeout_s, now=time.monotonic())
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
    ) -> Generator[Chosen, None, None]:
        progress = Progress(
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
                    if is_lost(lost) and self._at == at:
                        self._at += 1  # once for all streams that were lost together
                    time.sleep(progress.lost(lost, time.monotonic()))
        finally:
            for request_id in progress.to_cancel:
                with contextlib.suppress(LapsSdError):
                    self._ask("Cancel", CancelRequest(request_id=request_id), LEAVING_S, retry_s=0.0)

    def _open(self, progress: Progress) -> Any:
        request = progress.request()
        timeout_s = progress.timeout_s(time.monotonic())
        if isinstance(request, ResumeRequest):
            return self._stub.Resume(request, timeout=timeout_s, metadata=self._metadata)
        return self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata)
