"""Between gRPC and a servicer: errors become statuses, unreadable bytes become INVALID_ARGUMENT, calls are counted.

Towards gRPC every handler takes a stream of requests, and those that want one request get the first. gRPC's own unary
handlers never answer a call that ends without a message, and decode outside of the handler, where nobody could catch.

Handlers raise `laps_sd.errors`; this file alone knows how that looks on the wire. `asyncio.CancelledError` (the client
has gone, or its deadline passed) and a handler's own `context.abort` pass through untouched.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from laps_sd.errors import InvalidArgument, LapsSdError, details_metadata
from laps_sd.log import get_logger

__all__ = ["Authorize", "CallGuard"]

log = get_logger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Authorize: TypeAlias = Callable[[str, Context], None]
"""Asked with the method and the context of each call before anything of it is read; raises what it is refused with."""

MAX_STATUS_CHARACTERS = 2000
"""A status travels in headers, of which clients take some kilobytes. What is longer quotes a peer at length."""

UNCOUNTED = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Calls that say nothing about work in progress, and that may last for ever."""

GRPC_LOGGER = "grpc._cython.cygrpc"
"""Where gRPC tells of what it met after a handler had returned, where nobody else can catch it."""


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The one interceptor of a server."""

    def __init__(self, authorize: Authorize | None = None) -> None:
        self._authorize = authorize
        self.active = 0
        """Calls in progress, without health and reflection."""
        self._idle = asyncio.Event()
        self._idle.set()
        logging.getLogger(GRPC_LOGGER).addFilter(_is_news)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a call that came by another protocol while it lasts."""
        self._enter(True)
        try:
            yield
        finally:
            self._leave(True)

    async def wait_idle(self) -> None:
        """Returns once no counted call is in progress."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wraps the handler of a call. Nothing is kept: inner interceptors judge each call anew."""
        method: str = handler_call_details.method
        try:
            handler = await continuation(handler_call_details)
        except LapsSdError as error:
            return _refusing(error, method)
        if handler is None:  # unknown method: gRPC answers UNIMPLEMENTED
            return None
        return self._wrap(handler, method)

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
            request_deserializer=_raising(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )
        return made

    def _guard_coroutine(self, behaviour: Any, method: str, *, one_request: bool) -> Any:
        counted = not method.startswith(UNCOUNTED)

        async def guarded(requests: Any, context: Context) -> Any:
            self._enter(counted)
            try:
                if self._authorize is not None:
                    self._authorize(method, context)
                request = await _first(context) if one_request else requests
                return await behaviour(request, context)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except grpc.aio.InternalError as error:
                await _leave_gone(context, error, method)
            except Exception as error:
                await _abort(context, error, method)
            finally:
                self._leave(counted)

        return guarded

    def _guard_generator(self, behaviour: Any, method: str, *, one_request: bool) -> Any:
        counted = not method.startswith(UNCOUNTED)

        async def guarded(requests: Any, context: Context) -> AsyncIterator[Any]:
            self._enter(counted)
            try:
                if self._authorize is not None:
                    self._authorize(method, context)
                request = await _first(context) if one_request else requests
                items = behaviour(request, context)
                try:
                    async for item in items:
                        yield item
                finally:
                    # A cancelled call must run the handler's `finally` now, not when the collector comes by.
                    await items.aclose()
            except (asyncio.CancelledError, grpc.aio.AbortError, GeneratorExit):
                raise
            except grpc.aio.InternalError as error:
                await _leave_gone(context, error, method)
            except Exception as error:
                await _abort(context, error, method)
            finally:
                self._leave(counted)

        return guarded

    def _enter(self, counted: bool) -> None:
        if counted:
            self.active += 1
            self._idle.clear()

    def _leave(self, counted: bool) -> None:
        if counted:
            self.active -= 1
            if self.active == 0:
                self._idle.set()


def _refusing(refusal: LapsSdError, method: str) -> Handler:
    """A handler that ends the call with this error, of whatever shape the method is."""

    async def refuse(requests: Any, context: Context) -> None:
        await _abort(context, refusal, method)

    return grpc.stream_stream_rpc_method_handler(refuse)


UNREADABLE = InvalidArgument("", "the request bytes are no valid message of this method")


def _raising(deserialize: Any) -> Any:
    """The error comes up where a message is read."""
    if deserialize is None:
        return None

    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise InvalidArgument(*UNREADABLE.violations[0]) from error

    return decode


async def _first(context: Context) -> Any:
    request = await context.read()
    if request is grpc.aio.EOF:
        raise InvalidArgument("", "the call ended without a message")
    return request


def _is_news(record: logging.LogRecord) -> bool:
    """False for a reply that gRPC could not send since its call has just ended: a client that leaves is no error."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


async def _leave_gone(context: Context, error: grpc.aio.InternalError, method: str) -> None:
    """gRPC refused a read or a write: the call has ended before the event loop heard of it. Never returns normally."""
    log.debug("call gone", method=method, reason=str(error))
    await _end(context, grpc.StatusCode.CANCELLED, "the call has ended")


async def _end(context: Context, code: grpc.StatusCode, message: str, trailing_metadata: Any = ()) -> None:
    """Aborts the call. Where that is refused the call has just ended by itself, which is no error of the server."""
    try:
        await context.abort(code, message, trailing_metadata=trailing_metadata)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


async def _abort(context: Context, error: Exception, method: str) -> None:
    """Ends the call with the error's status; never returns normally."""
    if isinstance(error, LapsSdError):
        log.debug("call refused", method=method, code=error.code.name)
        if len(error.message) > MAX_STATUS_CHARACTERS:
            await _end(context, error.code, error.message[:MAX_STATUS_CHARACTERS] + "…")
        await _end(context, error.code, error.message, details_metadata(error))
    # The incident ties what the caller saw to the traceback, which stays here.
    incident = secrets.token_hex(4)
    log.error("call failed", method=method, incident=incident, exc_info=error)
    await _end(context, grpc.StatusCode.INTERNAL, f"internal error, incident {incident}")
