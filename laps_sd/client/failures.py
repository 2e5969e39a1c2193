"""The errors of failed calls, and which of them another attempt may mend. Pure."""

from __future__ import annotations

import random

import grpc
from google.rpc import error_details_pb2

from laps_sd.errors import (
    STATUS_CODES,
    InvalidArgument,
    LapsSdError,
    ResourceExhausted,
    Unavailable,
    received_details,
    retry_after_s,
)

__all__ = ["MAX_PAUSE_S", "error_of", "is_lost", "may_work_later", "next_pause_s"]

MAX_PAUSE_S = 1.0
LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Status codes of a call whose gateway died, or was stopped during the call."""
CUT = ("RST_STREAM", "Stream removed")
"""Parts of gRPC's messages about a stream that ended without a status: so proxies (nginx, HAProxy) end those of a gateway
that died. The codes are INTERNAL and UNKNOWN, as of a bug of a gateway, but no message of a gateway has these words.
"""


def error_of(error: grpc.RpcError | None, subject: str = "") -> LapsSdError:
    """Return the error that the server raised for a failed call. None: a stream closed without an end.

    The subject is added to the message.
    """
    about = f" ({subject})" if subject else ""
    if error is None:
        return Unavailable(f"the stream broke off{about}")
    code = error.code() if hasattr(error, "code") else None
    text = (error.details() if hasattr(error, "details") else None) or "the call failed"
    text += about
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
    return [
        (violation.field, violation.description)
        for detail in received_details(error)
        if isinstance(detail, error_details_pb2.BadRequest)
        for violation in detail.field_violations
    ]


def is_lost(error: grpc.RpcError | None) -> bool:
    """Return whether another address may answer although this one did not."""
    if error is None:
        return True
    code = error.code() if hasattr(error, "code") else None
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
        return any(words in (error.details() or "") for words in CUT)
    return code in LOST


def may_work_later(error: grpc.RpcError) -> bool:
    """Return whether no server answered, or the answer advises when to retry."""
    if is_lost(error):
        return True
    exhausted = hasattr(error, "code") and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return exhausted and retry_after_s(error) is not None


def next_pause_s(error: grpc.RpcError | None, attempts: int) -> float:
    """Return the seconds of the pause.

    It doubles with each attempt, and is at least as long as the server advises; part of it is random, so that
    clients do not all retry at once.
    """
    advice = retry_after_s(error) if error is not None else None
    return max(advice or 0.0, min(MAX_PAUSE_S, 0.02 * 2.0 ** min(attempts, 10)) * random.uniform(0.5, 1.0))
