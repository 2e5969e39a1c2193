"""How a request ended, in the words of other APIs. None: their word for it is an error."""

from __future__ import annotations

from laps_sd.contract.ends import CLIENT_WENT_AWAY, End
from laps_sd.errors import Cancelled, LapsSdError, Unavailable
from laps_sd.service.ends import end_of_reason
from laps_sd.v1 import inference_pb2

__all__ = ["OPENAI", "VLLM", "openai_reason"]

OPENAI: dict[End | None, str | None] = {
    None: None,  # an end of a later version
    End.STOP: "stop",
    End.LENGTH: "length",
    End.STOP_SEQUENCE: "stop",
    # The text is cut off at this point, as it is by a limit of tokens.
    End.TIME_LIMIT: "length",
    End.CANCELLED: None,
    End.DEADLINE: None,
    End.ERROR: None,
}
"""OpenAI's `finish_reason`."""

VLLM: dict[End, str | None] = {
    End.STOP: "stop",
    End.LENGTH: "length",
    End.STOP_SEQUENCE: "stop",
    End.TIME_LIMIT: "length",
    End.CANCELLED: "abort",
    End.DEADLINE: None,
    End.ERROR: None,
}
"""vLLM's `finished_reason`, the label of its metric of successes."""


def openai_reason(ended: inference_pb2.Ended) -> str:
    """Return OpenAI's `finish_reason` of an output. Raises its failure if it failed, Cancelled if a call cancelled it,
    and Unavailable if it ended because its gateway was away."""
    end = end_of_reason(ended.finish_reason)
    if end is End.CANCELLED and ended.error == CLIENT_WENT_AWAY:
        raise Unavailable(
            f"request {ended.request_id} has ended, because this gateway did not reach the scheduler for a while;"
            " send it again",
            retry_after_s=1.0,
        )
    if end is End.CANCELLED:
        raise Cancelled(f"request {ended.request_id} was cancelled")
    reason = OPENAI[end]
    if reason is None:
        raise LapsSdError(ended.error or "the request failed")
    return reason
