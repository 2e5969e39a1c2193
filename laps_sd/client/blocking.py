"""The blocking client: the asyncio client on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar, Unpack

from laps_sd.client.aio import RECONNECT_S, RETRY_S, AsyncClient, AsyncStream
from laps_sd.client.chat import Fields
from laps_sd.client.loop_thread import CLOSED, Job, LoopThread, refuse_after_fork
from laps_sd.client.repair import Chosen, Event
from laps_sd.client.request import Metadata, Options, Prompt, addresses, make_request
from laps_sd.service.wire import Tls
from laps_sd.v1.inference_pb2 import Cursor, Explanation, GenerateRequest, GenerateResponse, Model

__all__ = ["Client", "Stream"]

AHEAD = 64
"""Most events that are read before the caller takes them; then the gateway has to wait."""
BATCH_S = 0.001
"""Shortest time between two wake-ups of a caller; tried 0 to 2 ms."""

Result = TypeVar("Result")


class _Reader:
    """The events of a stream on their way from the loop's thread to the caller's, in batches.

    To wake a thread costs as much as to read a message. So the first event is passed on at once, and those
    that follow within BATCH_S together.
    """

    def __init__(self) -> None:
        self.batches: SimpleQueue[list[Chosen] | None] = SimpleQueue()
        """Events with their choices, at least one in each batch; None after the last."""
        self.full = False
        self._room = asyncio.Event()
        self._put = self._taken = 0
        self._batch: list[Chosen] = []
        self._passed_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # -- on the loop's thread ---

    async def read(self, events: AsyncStream) -> None:
        """Pass the events on until they end. Leave the stream if this is cancelled."""
        loop = asyncio.get_running_loop()
        async with events:
            async for event in events:
                self._batch.append((events.choice, event))
                self._put += 1
                if self._timer is None:
                    if loop.time() >= self._passed_at + BATCH_S:
                        self._pass_on()
                    else:
                        self._timer = loop.call_at(self._passed_at + BATCH_S, self._pass_on)
                if self._put - self._taken >= AHEAD:
                    await self._wait_for_room()

    def end(self) -> None:
        """Pass on the rest and the end."""
        self._pass_on()
        self.batches.put(None)

    def resume(self) -> None:
        """Let `read` go on."""
        self._room.set()

    def _pass_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._batch:
            self._passed_at = asyncio.get_running_loop().time()
            self.batches.put(self._batch)
            self._batch = []

    async def _wait_for_room(self) -> None:
        self._pass_on()
        self._room.clear()
        self.full = True
        # Counted again: a caller that took events before `full` was set did not call `resume`.
        if self._put - self._taken >= AHEAD:
            await self._room.wait()
        self.full = False

    # -- on the caller's thread ---

    def take(self) -> list[Chosen] | None:
        """Wait for a batch and return it; None after the last."""
        batch = self.batches.get()
        if batch is not None:
            self._taken += len(batch)
        return batch


def _end(reader: _Reader, outcome: Future[None]) -> None:
    reader.end()


class Stream(Iterator[Event]):
    """Iterator over the events of a call as they arrive.

    Leaving its `with` block, or closing it, cancels the requests that no client can then wait for. So does
    an exception while an event is awaited (KeyboardInterrupt).
    """

    def __init__(self, start: Callable[[_Reader], Job[None]]) -> None:
        self._start = start
        self._reader = _Reader()
        self._job: Job[None] | None = None
        self._batch: list[Chosen] = []
        """Events that have crossed the border, the next one last."""
        self._over = False
        self.choice = 0
        """Index of the last event's output among the `n`, from 0."""

    def __next__(self) -> Event:
        if self._over:
            raise StopIteration
        refuse_after_fork()
        if self._job is None:  # nothing is sent before the caller wants the first event
            self._job = self._start(self._reader)
            self._job.outcome.add_done_callback(partial(_end, self._reader))
        if not self._batch:
            try:
                batch = self._reader.take()
            except BaseException:
                self.close()
                raise
            if batch is None:
                self._end(self._job)
            if self._reader.full:
                self._job.call_soon(self._reader.resume)
            batch.reverse()
            self._batch = batch
        self.choice, event = self._batch.pop()
        return event

    def _end(self, job: Job[None]) -> NoReturn:
        """Raise what ended the stream: StopIteration if it is complete, or closed by its owner."""
        if not self._over:
            self._over = True
            job.outcome.result()
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._job is not None:
            self._job.cancel()

    def close(self) -> None:
        """End the stream. Idempotent."""
        self._over = True
        if self._job is not None:
            self._job.stop()


class Client:
    """Blocking client. Safe to share between threads. Close it, or use it in `with`.

    Its calls run on one event-loop thread, which starts with the first call and ends with `close`. A process
    that is forked after the first call of any client cannot use a client (RuntimeError): fork before it, or
    start processes by spawn.
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
        found = addresses(address)
        if tls is not None:
            tls.channel_credentials()  # files that cannot be read are an error here, not of the first call
        self._make = partial(
            AsyncClient,
            found,
            api_key=api_key,
            tls=tls,
            metadata=tuple(metadata),
            reconnect_s=reconnect_s,
            retry_s=retry_s,
        )
        self._lock = threading.Lock()
        self._loop: LoopThread[AsyncClient] | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all calls, with ValueError in the threads that wait for them. Idempotent."""
        with self._lock:
            self._closed = True
        if self._loop is not None:
            self._loop.close()

    def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> GenerateResponse:
        """Return the whole answer. `timeout_s` is the hard deadline, `time_limit_s` the soft one."""
        return self._run(lambda client: client.generate(prompt, timeout_s=timeout_s, **options))

    def stream(self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]) -> Stream:
        """Send a prompt and return its events as they arrive."""
        return self.send(make_request(prompt, **options), timeout_s=timeout_s)

    def send(self, request: GenerateRequest, *, timeout_s: float | None = None) -> Stream:
        """Send a ready request and return its events. It is sent with an idempotency key if it has none; the
        message itself stays as it is, and may be sent again.
        """
        return self._stream(lambda client: client.send(request, timeout_s=timeout_s))

    def resume(
        self, request_id: str, cursor: Cursor | None = None, *, timeout_s: float | None = None
    ) -> Stream:
        """Attach to an existing request and return its events."""
        return self._stream(lambda client: client.resume(request_id, cursor, timeout_s=timeout_s))

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """End a request; return False if it had already ended."""
        return self._run(lambda client: client.cancel(request_id, timeout_s=timeout_s))

    def explain(self, request_id: str, *, timeout_s: float | None = None) -> Explanation:
        """Return why a request is where it is."""
        return self._run(lambda client: client.explain(request_id, timeout_s=timeout_s))

    def models(self, *, timeout_s: float | None = None) -> list[Model]:
        """Return the models that the gateway serves."""
        return self._run(lambda client: client.models(timeout_s=timeout_s))

    def tokenize(self, prompt: str | Sequence[Fields], *, timeout_s: float | None = None) -> list[int]:
        """Return the token ids of a text or of chat messages."""
        return self._run(lambda client: client.tokenize(prompt, timeout_s=timeout_s))

    def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """Return the text of output tokens."""
        return self._run(lambda client: client.detokenize(token_ids, timeout_s=timeout_s))

    def _run(self, call: Callable[[AsyncClient], Coroutine[Any, Any, Result]]) -> Result:
        return self._running().run(call).result()

    def _stream(self, open_: Callable[[AsyncClient], AsyncStream]) -> Stream:
        # The stream refers to this client and keeps it open.
        return Stream(lambda reader: self._running().run(lambda client: reader.read(open_(client))))

    def _running(self) -> LoopThread[AsyncClient]:
        with self._lock:
            if self._closed:
                raise ValueError(CLOSED)
            if self._loop is None:
                self._loop = LoopThread(self._make, "laps-sd-client")
                # Closes a client that was forgotten, and at the latest at the end of the program.
                weakref.finalize(self, self._loop.close)
            return self._loop
