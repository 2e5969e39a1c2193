"""How a request ended, from and to protobuf."""

from __future__ import annotations

from laps_sd.contract.ends import End
from laps_sd.v1 import gateway_link_pb2, inference_pb2

__all__ = ["FINISH_REASONS", "KINDS", "end_of_kind", "end_of_reason", "reason_text"]

Kind = gateway_link_pb2.RequestEnd.Kind
FinishReason = inference_pb2.FinishReason

KINDS: dict[End | None, Kind.ValueType] = {
    None: Kind.KIND_UNSPECIFIED,
    End.STOP: Kind.KIND_STOP,
    End.LENGTH: Kind.KIND_LENGTH,
    End.STOP_SEQUENCE: Kind.KIND_STOP_SEQUENCE,
    End.TIME_LIMIT: Kind.KIND_TIME_LIMIT,
    End.CANCELLED: Kind.KIND_CANCELLED,
    End.DEADLINE: Kind.KIND_DEADLINE,
    End.ERROR: Kind.KIND_ERROR,
}
"""The words of the links between the services, one for each end. None: it has not ended."""

FINISH_REASONS: dict[End | None, FinishReason.ValueType] = {
    None: FinishReason.FINISH_REASON_UNSPECIFIED,
    End.STOP: FinishReason.FINISH_REASON_STOP,
    End.LENGTH: FinishReason.FINISH_REASON_LENGTH,
    End.STOP_SEQUENCE: FinishReason.FINISH_REASON_STOP_SEQUENCE,
    End.TIME_LIMIT: FinishReason.FINISH_REASON_TIME_LIMIT,
    End.CANCELLED: FinishReason.FINISH_REASON_CANCELLED,
    # A stream ends with DEADLINE_EXCEEDED instead; only an explanation contains this one.
    End.DEADLINE: FinishReason.FINISH_REASON_ERROR,
    End.ERROR: FinishReason.FINISH_REASON_ERROR,
}
"""The words of the public API; None as above."""

_OF_KIND = {kind: end for end, kind in KINDS.items()}
_OF_REASON = {reason: end for end, reason in FINISH_REASONS.items() if end is not End.DEADLINE}


def end_of_kind(kind: Kind.ValueType) -> End | None:
    """Return the end that `kind` means; None for "unspecified", and for a value of a later version."""
    return _OF_KIND.get(kind)


def end_of_reason(reason: FinishReason.ValueType) -> End | None:
    """Return the end that a public finish reason means; None as in `end_of_kind`. An explanation's deadline
    reads as ERROR."""
    return _OF_REASON.get(reason)


def reason_text(reason: FinishReason.ValueType) -> str:
    """Return a public finish reason as metrics, traces and people read it: "stop", "time_limit" …;
    "unspecified" for a reason that this version does not know."""
    end = end_of_reason(reason)
    return "unspecified" if end is None else end.value
