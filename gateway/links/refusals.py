"""A scheduler's refusal of a submission, as the error that its client gets."""

from __future__ import annotations

from laps_sd.errors import (
    AlreadyExists,
    DeadlineExceeded,
    InvalidArgument,
    LapsSdError,
    ResourceExhausted,
    Unavailable,
)
from laps_sd.v1.gateway_link_pb2 import SubmitRefused

__all__ = ["PASSING_REASONS", "refusal_error"]

PASSING_REASONS = (
    SubmitRefused.REASON_QUEUE_FULL,
    SubmitRefused.REASON_TENANT_FULL,
    SubmitRefused.REASON_STORE_UNAVAILABLE,
)
"""Reasons for which a request that was accepted once waits for room instead of being refused."""
SPECIFICATION = "specification."
"""Beginning of the names of fields in a refusal that are also, except the prompt, those of a client's request."""


def refusal_error(refused: SubmitRefused) -> LapsSdError:
    """Return the error that the client of a refused submission gets."""
    retry_after_s = refused.retry_after_ms / 1000 if refused.retry_after_ms else None
    match refused.reason:
        case SubmitRefused.REASON_QUEUE_FULL:
            return ResourceExhausted(
                refused.detail or "the queue is full", retry_after_s=retry_after_s or 1.0
            )
        case SubmitRefused.REASON_TENANT_FULL:
            return ResourceExhausted(
                refused.detail or "the tenant has too many requests", retry_after_s=retry_after_s or 1.0
            )
        case SubmitRefused.REASON_KEY_CONFLICT:
            return AlreadyExists(refused.detail or "the idempotency key was used with another body")
        case SubmitRefused.REASON_EXPIRED:
            return DeadlineExceeded(refused.detail or "the deadline passed before the request was accepted")
        case SubmitRefused.REASON_INVALID:
            return _invalid(refused)
        case _:
            return Unavailable(
                refused.detail or "the record cannot be reached", retry_after_s=retry_after_s or 1.0
            )


def _invalid(refused: SubmitRefused) -> InvalidArgument:
    """Return the error for a field out of bounds, by the client's name of it if it has one."""
    if not refused.field.startswith(SPECIFICATION):
        return InvalidArgument("", refused.detail or "the request is out of the shard's bounds")
    field = refused.field.removeprefix(SPECIFICATION)
    problem = refused.detail.removeprefix(f"{refused.field} ")
    return InvalidArgument("prompt" if field == "prompt_ids" else field, problem)
