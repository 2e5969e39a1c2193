"""The line of the log about a request that has ended: counts and times, never its text."""

from __future__ import annotations

from gateway.calls.stream_metrics import StreamMetrics
from laps_sd.service.log import REQUEST_ENDED, get_logger

__all__ = ["log_end"]

log = get_logger(__name__)


def log_end(metrics: StreamMetrics, *, tenant: str) -> None:
    """Log the end of one attachment to a request: usually the request's own end.

    The times of a call that attached to an earlier request are its own, and its tokens include those that were
    repeated.
    """
    acceptance = metrics.acceptance
    fields: dict[str, object] = {
        "request_id": acceptance.request_id,
        "tenant": tenant,
        "end": metrics.end,
        "prompt_tokens": acceptance.prompt_tokens,
        "output_tokens": metrics.count,
    }
    ended = metrics.ended_message
    if ended is not None:
        fields["queued_s"] = round(ended.timing.queued_s, 3)
    if metrics.first_token_s is not None:
        fields["first_token_s"] = round(metrics.first_token_s, 3)
    fields["total_s"] = round(metrics.total_s, 3)
    if ended is not None:
        fields["preemptions"] = ended.timing.preemptions
    if metrics.resumed or acceptance.attached:
        fields["resumed"] = True
    log.info(REQUEST_ENDED, **fields)
