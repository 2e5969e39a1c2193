"""The span of a call, with the semantic conventions of generative AI; `laps_sd.service.tracing` describes the
whole trace."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gateway.usage import cached_tokens
from laps_sd.errors import LapsSdError
from laps_sd.service.ends import reason_text
from laps_sd.service.tracing import Tracing
from laps_sd.v1 import inference_pb2

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["CallSpan", "call_span"]

NS = 10**9
PROVIDER = "laps-sd"


class CallSpan:
    """The span of one call. Without tracing it records nothing."""

    def __init__(self, span: Span | None, traceparent: str, *, choices_per_prompt: int = 1) -> None:
        self._choices_per_prompt = choices_per_prompt
        self.traceparent = traceparent
        """The parent passed to the services called: this span, or the caller's if this gateway does not
        trace."""
        self._span = span
        self._began_ns = time.time_ns()
        self._first = True
        self._reasons: list[str] = []
        self._output_tokens = 0
        self._ends: dict[str, inference_pb2.Ended | None] = {}
        """The end of each choice by its request id, in the order of the choices."""
        self._failed = ""
        self._error: Exception | None = None

    @property
    def records(self) -> bool:
        """Return whether there is a span, so that what is passed here is recorded."""
        return self._span is not None

    def accepted(self, accepted: Sequence[inference_pb2.Accepted]) -> None:
        """Record that all choices are in the store."""
        if self._span is None:
            return
        self._ends = dict.fromkeys(one.request_id for one in accepted)
        self._span.add_event("accepted")
        self._span.set_attribute("gen_ai.response.id", accepted[0].request_id)
        self._span.set_attribute("gen_ai.response.model", accepted[0].model)
        prompts = accepted[:: self._choices_per_prompt]
        self._span.set_attribute("gen_ai.usage.input_tokens", sum(one.prompt_tokens for one in prompts))

    def tokens(self, count: int) -> None:
        """Count `count` new tokens; the first ones set the time to the first chunk."""
        if self._span is None or count == 0:
            return
        self._output_tokens += count
        if self._first:
            self._first = False
            after_s = (time.time_ns() - self._began_ns) / NS
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", after_s)

    def ended(self, ended: inference_pb2.Ended) -> None:
        """Record the end of a choice."""
        if self._span is None:
            return
        reason = reason_text(ended.finish_reason)
        self._reasons.append(reason)
        self._ends[ended.request_id] = ended
        if ended.finish_reason == inference_pb2.FINISH_REASON_ERROR:
            self._failed = ended.error
        timing, speculation = ended.timing, ended.speculation
        self._span.add_event(
            "ended",
            {
                "laps_sd.request_id": ended.request_id,
                "laps_sd.finish_reason": reason,
                "laps_sd.queued_s": timing.queued_s,
                "laps_sd.first_token_s": timing.first_token_s,
                "laps_sd.total_s": timing.total_s,
                "laps_sd.preemptions": timing.preemptions,
                "laps_sd.rounds": speculation.rounds,
                "laps_sd.drafted_tokens": speculation.drafted,
                "laps_sd.accepted_tokens": speculation.accepted,
                "laps_sd.cached_prompt_tokens": ended.usage.cached_prompt_tokens,
            },
        )

    def failed(self, error: Exception) -> None:
        """Record an error that the call returns in place of raising it."""
        self._error = self._error or error

    def over(self, error: BaseException | None) -> None:
        """End the span; nothing follows."""
        error = self._error or error
        if self._span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("gen_ai.usage.output_tokens", self._output_tokens)
        if self._reasons:
            self._span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
            cached = cached_tokens(list(self._ends.values()), self._choices_per_prompt)
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", cached)
        if self._failed:
            self._span.set_attribute("error.type", "request_failed")
            self._span.set_status(Status(StatusCode.ERROR, self._failed))
        if error is not None:
            known = isinstance(error, LapsSdError)
            self._span.set_attribute("error.type", error.code.name if known else type(error).__name__)  # type: ignore[attr-defined]
            # A client that disconnects is not a failure.
            if isinstance(error, Exception):
                self._span.set_status(Status(StatusCode.ERROR, error.message if known else ""))  # type: ignore[attr-defined]
        self._span.end()


@contextmanager
def call_span(
    tracing: Tracing, requests: Sequence[inference_pb2.GenerateRequest], traceparent: str, *, model: str
) -> Iterator[CallSpan]:
    """Start the span of a call, as a child of its caller's."""
    span = _start(tracing, requests, traceparent, model)
    try:
        yield span
    except BaseException as error:
        span.over(error)
        raise
    else:
        span.over(None)


def _start(
    tracing: Tracing, requests: Sequence[inference_pb2.GenerateRequest], traceparent: str, model: str
) -> CallSpan:
    if tracing.tracer is None:
        return CallSpan(None, traceparent)
    from opentelemetry.trace import SpanKind, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()
    operation = "chat" if requests[0].WhichOneof("prompt") == "messages" else "text_completion"
    span = tracing.tracer.start_span(
        f"{operation} {model}",
        context=propagator.extract({"traceparent": traceparent}),
        kind=SpanKind.SERVER,
        attributes=_request_attributes(requests[0], operation, model, prompts=len(requests)),
    )
    carrier: dict[str, str] = {}
    propagator.inject(carrier, set_span_in_context(span))
    return CallSpan(span, carrier.get("traceparent", traceparent), choices_per_prompt=_choices(requests[0]))


def _request_attributes(
    request: inference_pb2.GenerateRequest, operation: str, model: str, *, prompts: int
) -> dict[str, Any]:
    """Return the attributes of a request that contain nothing of the prompt; the request is checked later, so
    values may have any size here."""
    sampling = request.sampling
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
    }
    for name in ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty"):
        if sampling.HasField(name):  # type: ignore[arg-type]
            attributes[f"gen_ai.request.{name}"] = getattr(sampling, name)
    if sampling.HasField("seed"):
        # An attribute is signed, as OpenAI's seeds are.
        attributes["gen_ai.request.seed"] = sampling.seed - 2**64 * (sampling.seed >= 2**63)
    if (form := request.output_format.WhichOneof("format")) is not None:
        attributes["gen_ai.output.type"] = "json" if form.startswith("json") else "text"
    choices = prompts * _choices(request)
    if choices != 1:
        attributes["gen_ai.request.choice.count"] = choices
    if request.HasField("priority"):
        attributes["laps_sd.priority"] = request.priority
    return attributes


def _choices(request: inference_pb2.GenerateRequest) -> int:
    return max(1, request.n)  # the unchecked value: an invalid one is refused later
