"""The errors of LAPS-SD, and the one table that maps them to gRPC statuses.

Raise these anywhere in a service. The interceptor of `laps_sd.serving` turns them into a status with `google.rpc`
details; whatever is not in the table becomes INTERNAL and is logged with its traceback. A message is a sentence for
the caller: it names what was wrong and, where there is one, the limit.

    raise InvalidArgument("sampling.max_tokens", "must be at most 4096, got 9000")
    raise ResourceExhausted("the queue of pool 'demo' is full (10000 requests)", retry_after_s=2.5)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

__all__ = [
    "DETAILS_KEY",
    "AlreadyExists",
    "Cancelled",
    "DeadlineExceeded",
    "FailedPrecondition",
    "InvalidArgument",
    "LapsSdError",
    "NotFound",
    "OutOfRange",
    "PermissionDenied",
    "ResourceExhausted",
    "StartupError",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "describe",
    "details_metadata",
    "retry_after_s",
    "rich_status",
]

DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata in which gRPC carries `google.rpc.Status`."""


class StartupError(Exception):
    """The process cannot start or go on, and one sentence says why (port taken, model missing). Exit code 1."""


class LapsSdError(Exception):
    """Expected: something a caller can understand and act upon."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def code(self) -> grpc.StatusCode:
        """The status that a caller sees."""
        for kind in type(self).__mro__:
            if kind in STATUS_CODES:
                return STATUS_CODES[kind]
        return grpc.StatusCode.UNKNOWN

    def details(self) -> Sequence[Message]:
        """What `google.rpc` can say beyond the message."""
        return ()


class InvalidArgument(LapsSdError):
    """A field of the request is wrong, whatever the state of the system."""

    def __init__(self, field: str, description: str, *more: tuple[str, str]) -> None:
        self.violations: tuple[tuple[str, str], ...] = ((field, description), *more)
        super().__init__("; ".join(f"{name} {text}" if name else text for name, text in self.violations))

    def details(self) -> Sequence[Message]:
        """Each wrong field with its limit."""
        return (
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(field=name, description=text)
                    for name, text in self.violations
                ]
            ),
        )


class OutOfRange(LapsSdError):
    """Past the end of what exists."""


class NotFound(LapsSdError):
    """Unknown, expired, or another tenant's."""


class AlreadyExists(LapsSdError):
    """The idempotency key belongs to another body."""


class FailedPrecondition(LapsSdError):
    """Right request, wrong state or wrong server."""


class Unauthenticated(LapsSdError):
    """Nobody we know."""


class PermissionDenied(LapsSdError):
    """Somebody we know, who may not do this."""


class DeadlineExceeded(LapsSdError):
    """The hard deadline passed."""


class Cancelled(LapsSdError):
    """Ended on request."""


class Unimplemented(LapsSdError):
    """Part of the contract that this server does not offer."""


class _Retryable(LapsSdError):
    """May work later; says when, if anybody knows."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def details(self) -> Sequence[Message]:
        """When to try again."""
        if self.retry_after_s is None:
            return ()
        delay = Duration()
        delay.FromNanoseconds(int(self.retry_after_s * 1e9))
        return (error_details_pb2.RetryInfo(retry_delay=delay),)


class ResourceExhausted(_Retryable):
    """A queue or a tenant's share is full."""


class Unavailable(_Retryable):
    """A part of the system cannot be reached; nothing was accepted."""


STATUS_CODES: dict[type[LapsSdError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    NotFound: grpc.StatusCode.NOT_FOUND,
    AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    Cancelled: grpc.StatusCode.CANCELLED,
    Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
}


def rich_status(error: LapsSdError) -> status_pb2.Status:
    """The error as `google.rpc.Status`, details included."""
    number: int = error.code.value[0]
    status = status_pb2.Status(code=number, message=error.message)
    for detail in error.details():
        status.details.add().Pack(detail)
    return status


def details_metadata(error: LapsSdError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata for `context.abort`; empty when there is nothing to add to the message."""
    if not error.details():
        return ()
    return ((DETAILS_KEY, rich_status(error).SerializeToString()),)


def _received_details(error: grpc.RpcError) -> Iterable[Message]:
    """The `google.rpc` details that came with a failed call, those that we know."""
    trailing = getattr(error, "trailing_metadata", lambda: None)() or ()
    for key, value in trailing:
        if key != DETAILS_KEY:
            continue
        for packed in status_pb2.Status.FromString(value).details:
            for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
                detail = kind()
                if packed.Unpack(detail):
                    yield detail


def retry_after_s(error: grpc.RpcError) -> float | None:
    """When the server advises to try again, seconds from now; None without advice."""
    for detail in _received_details(error):
        if isinstance(detail, error_details_pb2.RetryInfo):
            return float(detail.retry_delay.ToNanoseconds()) / 1e9
    return None


def describe(error: grpc.RpcError) -> str:
    """A failed call as one sentence for a person."""
    code = getattr(error, "code", lambda: None)()
    text = getattr(error, "details", lambda: None)() or "the call failed"
    sentence = f"{code.name}: {text}" if code is not None else str(text)
    advice = retry_after_s(error)
    return sentence if advice is None else f"{sentence} (try again in {advice:.3g} s)"
