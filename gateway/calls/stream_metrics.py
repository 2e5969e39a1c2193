"""The metrics of one client's stream."""

from __future__ import annotations

import asyncio

from gateway import metrics
from gateway.links.client_stream import Accepted
from laps_sd.errors import LapsSdError
from laps_sd.service.ends import reason_text
from laps_sd.v1 import inference_pb2

__all__ = ["CLIENT_DISCONNECTED", "StreamMetrics"]

CLIENT_DISCONNECTED = "client_disconnected"
"""Why a stream ended that has no other recorded reason."""
INTERNAL = "internal"
"""Why a stream ended by an error that should not happen."""


class StreamMetrics:
    """A context in which one attachment is counted: time to the first token, time per token, reason of the
    end."""

    def __init__(
        self, acceptance: Accepted, cursor: inference_pb2.Cursor | None, *, tenant: str, began: float
    ) -> None:
        """`cursor`: where the client resumes the request; None: it reads from the start. `tenant`: the label of the
        tenant. `began`: when the call began, in the loop's time."""
        self.acceptance = acceptance
        self.resumed = cursor is not None
        """The call attached to a request that it named: its tokens come again, and its times do not measure the model."""
        self.end = ""
        self.ended_message: inference_pb2.Ended | None = None
        """The end of the output; None if the stream ended before it."""
        self.count = 0
        """Output tokens that arrived, those that the client has already among them."""
        self._tenant = tenant
        self._began = began
        self._known_tokens = 0 if cursor is None else cursor.next_token
        self._first: float | None = None
        self._last = 0.0

    def __enter__(self) -> StreamMetrics:
        if not self.acceptance.attached:
            metrics.PROMPT_TOKENS.observe(self.acceptance.prompt_tokens)
            metrics.TENANT_REQUESTS.labels(self._tenant).inc()
            metrics.TENANT_PROMPT_TOKENS.labels(self._tenant).inc(self.acceptance.prompt_tokens)
        return self

    @property
    def first_token_s(self) -> float | None:
        """Time from the call to its first token, in seconds; None without a token."""
        return None if self._first is None else self._first - self._began

    @property
    def total_s(self) -> float:
        """Time since the call began, in seconds."""
        return asyncio.get_running_loop().time() - self._began

    def tokens(self, count: int, now: float) -> None:
        """Count `count` tokens that arrived now, in the loop's time."""
        if count == 0:
            return
        self._last = now
        self.count += count
        if self._first is None:
            self._first = self._last
            if not self.resumed:
                metrics.FIRST_TOKEN.observe(self._first - self._began)

    def ended(self, ended: inference_pb2.Ended) -> None:
        """Record the end of the output."""
        self.end = reason_text(ended.finish_reason)
        self.ended_message = ended
        if self.resumed or self.acceptance.attached:  # the attachment that made the request counts it
            return
        took_s = self.total_s
        metrics.REQUEST.observe(took_s)
        metrics.REQUEST_OUTPUT.observe(ended.usage.completion_tokens)
        # One absurd wait from a scheduler would be in the sum for as long as this process lives. In this order
        # of arguments NaN becomes 0.
        metrics.QUEUE_WAIT.observe(min(took_s, max(0.0, ended.timing.queued_s)))
        metrics.PREEMPTIONS.inc(ended.timing.preemptions)
        metrics.ROUNDS.inc(ended.speculation.rounds)
        metrics.DRAFTS.inc(ended.speculation.drafts)
        metrics.DRAFTED.inc(ended.speculation.drafted)
        metrics.ACCEPTED.inc(ended.speculation.accepted)

    def failed(self, error: BaseException | None) -> None:
        """Record why the stream ends without the end of the output; only the first reason counts."""
        if self.end:
            return
        if isinstance(error, LapsSdError):
            self.end = error.code.name.lower()
        elif isinstance(error, Exception) and not isinstance(error, ConnectionError):
            self.end = INTERNAL
        else:
            self.end = CLIENT_DISCONNECTED

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.failed(error)
        metrics.REQUESTS.labels(self.end).inc()
        passed = max(0, self.count - self._known_tokens)
        metrics.OUTPUT_TOKENS.inc(passed)
        metrics.TENANT_OUTPUT_TOKENS.labels(self._tenant).inc(passed)
        if not self.resumed and self._first is not None and self.count > 1:
            metrics.TOKEN_TIME.observe((self._last - self._first) / (self.count - 1))
