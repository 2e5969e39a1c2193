"""Between gRPC and a servicer: errors become statuses, unreadable bytes become INVALID_ARGUMENT, calls are counted.

Handlers raise `laps_sd.errors`; this file alone knows how that looks on the wire. `asyncio.CancelledError` (the client
has gone, or its deadline passed) and a handler's own `context.abort` pass through untouched.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from laps_sd.errors import InvalidArgument, LapsSdError, details_metadata
from laps_sd.log import get_logger

__all__ = ["CallGuard"]

log = get_logger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

UNCOUNTED = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Calls that say nothing about work in progress, and that may last for ever."""


class _Undecodable:
    """Stands for a unary request that is no valid message, until the handler's wrapper refuses it."""


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The one interceptor of a server."""

    def __init__(self) -> None:
        self.active = 0
        """Calls in progress, without health and reflection."""
        self._idle = asyncio.Event()
        self._idle.set()

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
        if handler.request_streaming:
            decode = _raising(handler.request_deserializer)
        else:
            decode = _marking(handler.request_deserializer)
        behaviour = (
            handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
        )
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[bool(handler.request_streaming), bool(handler.response_streaming)]
        if inspect.isasyncgenfunction(behaviour):
            guarded: Any = self._guard_generator(behaviour, method)
        else:
            guarded = self._guard_coroutine(behaviour, method)
        made: Handler = make(
            guarded, request_deserializer=decode, response_serializer=handler.response_serializer
        )
        return made

    def _guard_coroutine(self, behaviour: Any, method: str) -> Any:
        counted = not method.startswith(UNCOUNTED)

        async def guarded(request: Any, context: Context) -> Any:
            self._enter(counted)
            try:
                _refuse_undecodable(request)
                return await behaviour(request, context)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except Exception as error:
                await _abort(context, error, method)
            finally:
                self._leave(counted)

        return guarded

    def _guard_generator(self, behaviour: Any, method: str) -> Any:
        counted = not method.startswith(UNCOUNTED)

        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            self._enter(counted)
            try:
                _refuse_undecodable(request)
                items = behaviour(request, context)
                try:
                    async for item in items:
                        yield item
                finally:
                    # A cancelled call must run the handler's `finally` now, not when the collector comes by.
                    await items.aclose()
            except (asyncio.CancelledError, grpc.aio.AbortError, GeneratorExit):
                raise
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


def _marking(deserialize: Any) -> Any:
    """For unary requests: gRPC decodes them outside of the handler, where nobody could catch."""
    if deserialize is None:
        return None

    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Undecodable()

    return decode


def _raising(deserialize: Any) -> Any:
    """For request streams: the error comes up where the handler reads the next message."""
    if deserialize is None:
        return None

    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise InvalidArgument(*UNREADABLE.violations[0]) from error

    return decode


def _refuse_undecodable(request: Any) -> None:
    if isinstance(request, _Undecodable):
        raise InvalidArgument(*UNREADABLE.violations[0])


async def _abort(context: Context, error: Exception, method: str) -> None:
    """Ends the call with the error's status; never returns normally."""
    if isinstance(error, LapsSdError):
        log.debug("call refused", method=method, code=error.code.name)
        await context.abort(error.code, error.message, trailing_metadata=details_metadata(error))
    # The incident ties what the caller saw to the traceback, which stays here.
    incident = secrets.token_hex(4)
    log.error("call failed", method=method, incident=incident, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error, incident {incident}")
