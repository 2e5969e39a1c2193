"""The errors of LAPS-SD, and the one table that maps them to gRPC statuses.

Raise these anywhere in a service. The interceptor of `laps_sd.service.serving` turns them into a status with
`google.rpc` details; any other exception becomes INTERNAL and is logged with its traceback. A message is a
sentence for the caller: it names the problem and, if there is one, the limit.

    raise InvalidArgument("sampling.max_tokens", "must be at most 4096, got 9000")
    raise ResourceExhausted("the queue of pool 'demo' is full (10000 requests)", retry_after_s=2.5)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

__all__ = [
    "DETAILS_KEY",
    "STATUS_CODES",
    "AlreadyExists",
    "Cancelled",
    "DeadlineExceeded",
    "FailedPrecondition",
    "InvalidArgument",
    "LapsSdError",
    "NotFound",
    "PermissionDenied",
    "ResourceExhausted",
    "StartupError",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "describe",
    "details_metadata",
    "received_details",
    "retry_after_s",
    "rich_status",
]

DETAILS_KEY = "grpc-status-details-bin"
"""Key of the trailing metadata in which gRPC carries `google.rpc.Status`."""


class StartupError(Exception):
    """Error for a process that cannot start or continue. Exit code 1.

    The message is one sentence with the reason (port taken, model missing).
    """


class LapsSdError(Exception):
    """Expected error: one that a caller can understand and act upon."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def code(self) -> grpc.StatusCode:
        """Status that a caller receives."""
        for kind in type(self).__mro__:
            if kind in STATUS_CODES:
                return STATUS_CODES[kind]
        return grpc.StatusCode.UNKNOWN

    def details(self) -> Sequence[Message]:
        """Return the `google.rpc` details that go beyond the message."""
        return ()


class InvalidArgument(LapsSdError):
    """Error for a wrong field of the request, whatever the state of the system."""

    def __init__(self, field: str, description: str, *more: tuple[str, str]) -> None:
        self.violations: tuple[tuple[str, str], ...] = ((field, description), *more)
        super().__init__("; ".join(f"{name} {text}" if name else text for name, text in self.violations))

    def __reduce__(self) -> tuple[type[InvalidArgument], tuple[object, ...]]:
        """Make a copy or a pickle by the arguments of the constructor, not by the message."""
        (field, description), *more = self.violations
        return type(self), (field, description, *more)

    def details(self) -> Sequence[Message]:
        """Return each wrong field with its limit."""
        return (
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(field=name, description=text)
                    for name, text in self.violations
                ]
            ),
        )


class NotFound(LapsSdError):
    """Error for an object that is unknown, expired, or another tenant's."""


class AlreadyExists(LapsSdError):
    """Error for an idempotency key that belongs to another body."""


class FailedPrecondition(LapsSdError):
    """Error for a right request in the wrong state or at the wrong server."""


class Unauthenticated(LapsSdError):
    """Error for a caller without a known identity."""


class PermissionDenied(LapsSdError):
    """Error for a known caller without the permission for this call."""


class DeadlineExceeded(LapsSdError):
    """Error for a hard deadline that has passed."""


class Cancelled(LapsSdError):
    """Error for a call that ended on request."""


class Unimplemented(LapsSdError):
    """Error for a part of the contract that this server does not offer."""


class _Retryable(LapsSdError):
    """Error for a call that may work later; with the time, if it is known."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def details(self) -> Sequence[Message]:
        """Return the time until a retry, if it is known."""
        if self.retry_after_s is None:
            return ()
        delay = Duration()
        delay.FromNanoseconds(int(self.retry_after_s * 1e9))
        return (error_details_pb2.RetryInfo(retry_delay=delay),)


class ResourceExhausted(_Retryable):
    """Error for a queue or a tenant's share that is full."""


class Unavailable(_Retryable):
    """Error for a part of the system that cannot be reached; nothing was accepted."""


STATUS_CODES: dict[type[LapsSdError], grpc.StatusCode] = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
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
    """Return the error as `google.rpc.Status`, details included."""
    number: int = error.code.value[0]
    status = status_pb2.Status(code=number, message=error.message)
    for detail in error.details():
        status.details.add().Pack(detail)
    return status


def details_metadata(error: LapsSdError) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata for `context.abort`; empty if there is nothing to add to the message."""
    if not error.details():
        return ()
    return ((DETAILS_KEY, rich_status(error).SerializeToString()),)


def received_details(error: grpc.RpcError) -> Iterable[Message]:
    """Yield the `google.rpc` details of a failed call that are of a known type. Bytes that are no details count as
    none.
    """
    trailing = getattr(error, "trailing_metadata", lambda: None)() or ()
    for key, value in trailing:
        if key != DETAILS_KEY:
            continue
        with contextlib.suppress(DecodeError):
            for packed in status_pb2.Status.FromString(value).details:
                for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
                    detail = kind()
                    if packed.Unpack(detail):
                        yield detail


def retry_after_s(error: grpc.RpcError) -> float | None:
    """Return the seconds from now after which the server advises to retry; None without advice."""
    for detail in received_details(error):
        if isinstance(detail, error_details_pb2.RetryInfo):
            return float(detail.retry_delay.ToNanoseconds()) / 1e9
    return None


def describe(error: grpc.RpcError | LapsSdError) -> str:
    """Return a failed call as one sentence for a person."""
    if isinstance(error, LapsSdError):
        # A client puts the code of an unknown error into its message.
        code = None if error.code is grpc.StatusCode.UNKNOWN else error.code
        text, advice = error.message, getattr(error, "retry_after_s", None)
    else:
        code = getattr(error, "code", lambda: None)()
        text = getattr(error, "details", lambda: None)() or "the call failed"
        advice = retry_after_s(error)
    sentence = f"{code.name}: {text}" if code is not None else str(text)
    return sentence if advice is None else f"{sentence} (try again in {advice:.3g} s)"
