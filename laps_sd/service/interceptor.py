"""Layer between gRPC and a servicer.

Errors become statuses, unreadable bytes become INVALID_ARGUMENT, calls are counted.

For gRPC every handler takes a stream of requests, and a handler of one request gets the first. gRPC's own
unary handlers never answer a call that ends without a message, and decode outside of the handler, where an
error cannot be caught. They also decode before the handler runs. Here `authorize` runs first: the message of
a refused call is never received, let alone decoded. Few methods are open without identity; their messages are
small and few are received at a time.

Handlers raise `laps_sd.errors`; only this file defines how these look on the wire. `asyncio.CancelledError`
(the client disconnected, or its deadline passed) and a handler's own `context.abort` pass through untouched.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from laps_sd.errors import DeadlineExceeded, InvalidArgument, LapsSdError, ResourceExhausted, details_metadata
from laps_sd.service.field_count import check_fields
from laps_sd.service.log import get_logger

__all__ = ["MAX_OPEN_MESSAGE_BYTES", "OPEN_METHODS", "Authorize", "CallGuard", "MessageTurns"]

log = get_logger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Authorize: TypeAlias = Callable[[str, Context], Any]
"""Check of the method and the context of each call before any message is read.

It returns the caller, or raises the error that refuses the call. It is not called for methods that are open to
all.
"""
MessageTurns: TypeAlias = Callable[[Any], AbstractAsyncContextManager[None]]
"""Turn of a caller at sending the one message of a call."""

OPEN_METHODS = ("/grpc.health.v1.Health/",)
"""Prefixes of the methods that need no identity."""
MAX_OPEN_MESSAGE_BYTES = 4096
"""Largest message of such a method: it holds a name."""
MAX_OPEN_READS = 64
"""Most calls of such methods that wait for their message at the same time.

gRPC receives a whole message before its size is checked here, so strangers can make a server hold this number
times `grpc.max_receive_message_length`. One more call ends the longest waiting one: a small message comes
with its call, so strangers that send no message do not keep a probe from its answer.
"""
FIRST_MESSAGE_S = 10.0
"""Longest time from the beginning of a call that takes one message to the end of that message.

Our choice: a message of 4 MiB needs 3.4 Mbit/s.
"""

MAX_STATUS_CHARACTERS = 2000
"""Longest message of a status.

Headers carry a status, and clients accept some kilobytes of them. Longer messages quote a peer at length.
"""

UNCOUNTED = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Prefixes of the methods whose calls are not work in progress, and may last without end."""

ENDLESS = {"/grpc.health.v1.Health/Watch": 1000, "/grpc.reflection.": 16}
"""Prefixes of those of them that never end by themselves, and the most calls of each that are open at once;
further ones are refused. A watch takes 25 KB, and strangers may watch. A call of reflection may send messages of
the largest size, which are received as they come."""

GRPC_LOGGER = "grpc._cython.cygrpc"
"""Logger of gRPC's own errors after a handler has returned, which cannot be caught elsewhere."""


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The one interceptor of a server."""

    def __init__(
        self,
        authorize: Authorize | None = None,
        message_turns: MessageTurns | None = None,
        *,
        open_methods: Sequence[str] = OPEN_METHODS,
        max_fields: int | None = None,
    ) -> None:
        """Create a guard. Without `message_turns` all messages are received at once. `max_fields`: see
        `laps_sd.service.field_count`; None: fields are not counted."""
        self._authorize = authorize
        self._message_turns = message_turns or (lambda _: nullcontext())
        self._open_methods = tuple(open_methods)
        self._open_reads: dict[asyncio.Timeout, None] = {}
        """Calls of open methods that wait for their message, the longest waiting first."""
        self._max_fields = max_fields
        self.active = 0
        """Calls in progress, without health and reflection."""
        self._endless = Counter[str]()
        """Open calls that never end by themselves, by prefix."""
        self._idle = asyncio.Event()
        self._idle.set()
        logging.getLogger(GRPC_LOGGER).addFilter(_is_news)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a call of another protocol while it lasts."""
        self.active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if self.active == 0:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Return once no counted call is in progress."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler of a call."""
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method: gRPC answers UNIMPLEMENTED
            return None
        return self._wrap(handler, handler_call_details.method)

    def _wrap(self, handler: Any, method: str) -> Handler:
        behaviour = (
            handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
        )
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        guard = self._guard_generator if inspect.isasyncgenfunction(behaviour) else self._guard_coroutine
        made: Handler = make(
            guard(behaviour, method, one_request=not handler.request_streaming),
            request_deserializer=self._decoder(handler.request_deserializer, method),
            response_serializer=handler.response_serializer,
        )
        return made

    # A refused call is aborted outside of the `except`, in a frame without the request: gRPC keeps the
    # abort's exception, whose traceback would keep the request until Python collects cycles.

    def _guard_coroutine(self, behaviour: Any, method: str, *, one_request: bool) -> Any:
        async def call(requests: Any, context: Context) -> Any:
            caller = self._identify(method, context)
            request = await self._first_message(method, context, caller) if one_request else requests
            with self._work(method):
                return await behaviour(request, context)

        async def guarded(requests: Any, context: Context) -> Any:
            try:
                return await call(requests, context)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                failure = _failure_of(error, method)
            return await _abort(context, failure)

        return guarded

    def _guard_generator(self, behaviour: Any, method: str, *, one_request: bool) -> Any:
        async def call(requests: Any, context: Context) -> AsyncGenerator[Any, None]:
            caller = self._identify(method, context)
            request = await self._first_message(method, context, caller) if one_request else requests
            with self._work(method):
                items = behaviour(request, context)
                try:
                    async for item in items:
                        yield item
                finally:
                    # A cancelled call must run the handler's `finally` now, not at the next garbage
                    # collection.
                    await items.aclose()

        async def guarded(requests: Any, context: Context) -> AsyncIterator[Any]:
            items = call(requests, context)
            try:
                async for item in items:
                    yield item
                return
            except (asyncio.CancelledError, grpc.aio.AbortError, GeneratorExit):
                raise
            except Exception as error:
                failure = _failure_of(error, method)
            finally:
                await items.aclose()
            await _abort(context, failure)

        return guarded

    @contextmanager
    def _work(self, method: str) -> Iterator[None]:
        """Count a call while its handler runs. A stop does not wait for a call before its first message."""
        endless = next((prefix for prefix in ENDLESS if method.startswith(prefix)), None)
        if endless is not None:
            if self._endless[endless] >= ENDLESS[endless]:
                raise ResourceExhausted(
                    f"{ENDLESS[endless]} calls of this method are open, the most of this server",
                    retry_after_s=1.0,
                )
            self._endless[endless] += 1
            try:
                yield
            finally:
                self._endless[endless] -= 1
        elif method.startswith(UNCOUNTED):
            yield
        else:
            with self.counted():
                yield

    def _is_open(self, method: str) -> bool:
        return method.startswith(self._open_methods)

    def _identify(self, method: str, context: Context) -> Any:
        if self._authorize is None or self._is_open(method):
            return None
        return self._authorize(method, context)

    async def _first_message(self, method: str, context: Context, caller: Any) -> Any:
        """Return the one message of a call."""
        if not self._is_open(method):
            async with self._message_turns(caller):
                return await _read_first(context)
        turn = asyncio.timeout(None)
        try:
            async with turn:
                self._open_reads[turn] = None
                if len(self._open_reads) > MAX_OPEN_READS:
                    self._end_longest_read()
                return await _read_first(context)
        except TimeoutError:
            raise ResourceExhausted(
                f"the message of this call did not come, and {MAX_OPEN_READS} later calls without identity were waiting for theirs",
                retry_after_s=1.0,
            ) from None
        finally:
            self._open_reads.pop(turn, None)

    def _end_longest_read(self) -> None:
        longest = next(iter(self._open_reads))
        del self._open_reads[longest]
        longest.reschedule(0.0)

    def _decoder(self, deserialize: Any, method: str) -> Any:
        """Return a decoder of messages of bounded size. Its error is raised where the message is read."""
        if deserialize is None:
            return None
        max_bytes = MAX_OPEN_MESSAGE_BYTES if self._is_open(method) else None
        message_class = getattr(deserialize, "__self__", None)  # `FromString` is a class method
        descriptor: Any = getattr(message_class, "DESCRIPTOR", None)

        def decode(data: bytes) -> Any:
            if max_bytes is not None and len(data) > max_bytes:
                raise InvalidArgument("message", f"must be at most {max_bytes} bytes, got {len(data)}")
            try:
                if self._max_fields is not None and descriptor is not None:
                    check_fields(data, descriptor, self._max_fields)
                return deserialize(data)
            except DecodeError:
                raise InvalidArgument("", "the request bytes are no valid message of this method") from None

        return decode


async def _read_first(context: Context) -> Any:
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            request = await context.read()
    except TimeoutError:
        raise DeadlineExceeded(
            f"no message came within {FIRST_MESSAGE_S:g} s of the call's beginning"
        ) from None
    if request is grpc.aio.EOF:
        raise InvalidArgument("", "the call ended without a message")
    return request


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for a reply that gRPC could not send because its call has just ended.

    A client that disconnects is no error.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


Failure: TypeAlias = "tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]"
"""Status, message and trailing metadata of a call that failed."""


async def _abort(context: Context, failure: Failure) -> None:
    """Abort the call; never return normally.

    If gRPC refuses the abort, the call has just ended by itself, which is not an error of the server.
    """
    code, message, trailing_metadata = failure
    try:
        await context.abort(code, message, trailing_metadata=trailing_metadata)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def _failure_of(error: Exception, method: str) -> Failure:
    """Return the status and metadata with which a call ends after this error."""
    if isinstance(error, grpc.aio.InternalError):
        # gRPC refused a read or a write: the call has ended before the event loop noticed.
        log.debug("the client has left the call", method=method, reason=str(error))
        return grpc.StatusCode.CANCELLED, "the call has ended", ()
    if isinstance(error, LapsSdError):
        log.debug("call refused", method=method, code=error.code.name)
        if len(error.message) > MAX_STATUS_CHARACTERS:
            return error.code, error.message[:MAX_STATUS_CHARACTERS] + "…", ()
        return error.code, error.message, details_metadata(error)
    # The incident id links the caller's error to the traceback, which stays in the log.
    incident = secrets.token_hex(4)
    log.error("call failed", method=method, incident=incident, exc_info=error)
    return grpc.StatusCode.INTERNAL, f"internal error, incident {incident}", ()
