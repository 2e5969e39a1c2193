"""OpenTelemetry: one span per call with the semantic conventions of generative AI, and its phases below it.

    chat laps-sd-demo                     the call, from its arrival to its last message
      queue                               acceptance until the first round
      prefill                             until the first committed token
      generate                            until the end, with what speculation did

The phases are drawn when a request ends, from the times that its scheduler counted. Prompts and outputs never go into a span. The
libraries are needed only where an endpoint is configured (`pip install laps-sd[otel]`), and OTEL_* variables hold as they do everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import laps_sd
from gateway.settings import GatewaySettings
from laps_sd.errors import LapsSdError, StartupError
from laps_sd.v1 import inference_pb2

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

__all__ = ["CallSpan", "Tracing"]

NS = 10**9
PROVIDER = "laps-sd"


class CallSpan:
    """What one call tells of itself. Without tracing it keeps quiet."""

    def __init__(self, tracer: Tracer | None, span: Span | None, traceparent: str) -> None:
        self.traceparent = traceparent
        """What the services behind are told: this span, or the caller's where nobody traces here."""
        self._tracer = tracer
        self._span = span
        self._began_ns = time.time_ns()
        self._accepted_ns = self._began_ns
        self._first = True
        self._reasons: list[str] = []
        self._output_tokens = 0

    def accepted(self, accepted: Sequence[inference_pb2.Accepted]) -> None:
        """All choices are on the record."""
        if self._span is None:
            return
        self._accepted_ns = time.time_ns()
        self._span.add_event("accepted")
        self._span.set_attribute("gen_ai.response.id", accepted[0].request_id)
        self._span.set_attribute("gen_ai.response.model", accepted[0].model)
        self._span.set_attribute("gen_ai.usage.input_tokens", accepted[0].prompt_tokens)

    def tokens(self, count: int) -> None:
        """So many came."""
        if self._span is None or count == 0:
            return
        self._output_tokens += count
        if self._first:
            self._first = False
            after_s = (time.time_ns() - self._began_ns) / NS
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", after_s)

    def ended(self, ended: inference_pb2.Ended) -> None:
        """A choice is over."""
        if self._span is None or self._tracer is None:
            return
        from opentelemetry.trace import set_span_in_context

        reason = inference_pb2.FinishReason.Name(ended.finish_reason).removeprefix("FINISH_REASON_").lower()
        self._reasons.append(reason)
        timing, speculation = ended.timing, ended.speculation
        within = set_span_in_context(self._span)
        edges = [0.0, timing.queued_s, max(timing.queued_s, timing.first_token_s), timing.total_s]
        of_phase: dict[str, dict[str, Any]] = {
            "queue": {},
            "prefill": {"laps_sd.cached_prompt_tokens": ended.usage.cached_prompt_tokens},
            "generate": {
                "laps_sd.rounds": speculation.rounds,
                "laps_sd.drafted_tokens": speculation.drafted,
                "laps_sd.accepted_tokens": speculation.accepted,
                "laps_sd.preemptions": timing.preemptions,
            },
        }
        for number, (name, attributes) in enumerate(of_phase.items()):
            if edges[number + 1] < edges[number] or not timing.total_s:
                continue  # it ended before this phase began, or was answered from the record
            phase = self._tracer.start_span(
                name,
                context=within,
                start_time=self._accepted_ns + int(edges[number] * NS),
                attributes={"laps_sd.request_id": ended.request_id, **attributes},
            )
            phase.end(self._accepted_ns + int(edges[number + 1] * NS))

    def over(self, error: BaseException | None) -> None:
        """Nothing follows."""
        if self._span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("gen_ai.usage.output_tokens", self._output_tokens)
        if self._reasons:
            self._span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
        if error is not None:
            known = isinstance(error, LapsSdError)
            self._span.set_attribute("error.type", error.code.name if known else type(error).__name__)  # type: ignore[attr-defined]
            # A client that leaves has not failed.
            if isinstance(error, Exception):
                self._span.set_status(Status(StatusCode.ERROR, error.message if known else ""))  # type: ignore[attr-defined]
        self._span.end()


class Tracing:
    """The process's traces, or nothing where no endpoint is set."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raises StartupError when the libraries are missing."""
        self._provider: Any = None
        self._tracer: Tracer | None = None
        if not settings.otlp_endpoint:
            return
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise StartupError(
                f"LAPS_SD_OTLP_ENDPOINT needs OpenTelemetry ({error.name} is missing): pip install 'laps-sd[otel]'."
            ) from error
        resource = Resource.create(
            {"service.name": "laps-sd-gateway", "service.version": laps_sd.__version__}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(
            endpoint=settings.otlp_endpoint, insecure=not settings.otlp_endpoint.startswith("https://")
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("laps_sd.gateway", laps_sd.__version__)

    @contextmanager
    def call(
        self, requests: Sequence[inference_pb2.GenerateRequest], traceparent: str, *, model: str
    ) -> Iterator[CallSpan]:
        """The span of a call, below its caller's."""
        span = self._start(requests, traceparent, model)
        try:
            yield span
        except BaseException as error:
            span.over(error)
            raise
        else:
            span.over(None)

    def _start(
        self, requests: Sequence[inference_pb2.GenerateRequest], traceparent: str, model: str
    ) -> CallSpan:
        if self._tracer is None:
            return CallSpan(None, None, traceparent)
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator = TraceContextTextMapPropagator()
        operation = "chat" if requests[0].WhichOneof("prompt") == "messages" else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=propagator.extract({"traceparent": traceparent}),
            kind=SpanKind.SERVER,
            attributes=_asked(requests[0], operation, model, prompts=len(requests)),
        )
        carrier: dict[str, str] = {}
        propagator.inject(carrier, set_span_in_context(span))
        return CallSpan(self._tracer, span, carrier.get("traceparent", traceparent))

    def close(self) -> None:
        """Sends what is left. Blocks."""
        if self._provider is not None:
            self._provider.shutdown()


def _asked(
    request: inference_pb2.GenerateRequest, operation: str, model: str, *, prompts: int
) -> dict[str, Any]:
    """What was asked for, as far as it says nothing of the prompt; checked later, so of any size here."""
    sampling = request.sampling
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
    }
    for name in ("max_tokens", "temperature", "top_p", "top_k"):
        if sampling.HasField(name):  # type: ignore[arg-type]
            attributes[f"gen_ai.request.{name}"] = getattr(sampling, name)
    choices = prompts * (request.n if request.HasField("n") else 1)
    if choices != 1:
        attributes["gen_ai.request.choice.count"] = choices
    if request.HasField("priority"):
        attributes["laps_sd.priority"] = request.priority
    return attributes
