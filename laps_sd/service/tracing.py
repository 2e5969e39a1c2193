"""OpenTelemetry: one trace for a call, with spans of all three services.

    chat laps-sd-demo             gateway    the call, from its arrival to its last message
      request                     scheduler  acceptance until the end; what happened to it as events
        queue                     scheduler  until its first round
        run                       scheduler  one for each lease to a worker
          paused                  scheduler  one for each preemption
          prefill                 worker     its context is computed
          rounds                  worker     one for each group of rounds, with what speculation did in them

The trace context is part of the request's specification, and so of the record: it reaches the request's
workers and survives a change of leader. Scheduler and worker emit a span only below a sampled parent, and
only after its end. The ids of the scheduler's spans follow from request and lease epoch: a worker's span
below a lease finds its parent, even if another scheduler emits that parent in the end.

    tracing = Tracing("scheduler", "http://127.0.0.1:4317")        # an empty endpoint: no spans, no library
    parent = parent_of(traceparent)                                # None if the trace is not recorded
    if tracing.on and parent is not None:
        span = tracing.emit("queue", parent, 0.0, 0.5, {"laps_sd.request_id": "s0.1"})
        tracing.emit("below", span, 0.1, 0.2, {})

Prompts and outputs never go into a span. The libraries are needed only if an endpoint is configured
(`pip install laps-sd[otel]`), and OTEL_* variables have their usual effect.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from laps_sd import __version__
from laps_sd.errors import StartupError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

__all__ = ["QUIET", "Happened", "Parent", "Tracing", "parent_of", "span_id_of", "valid_traceparent"]

NS = 10**9
TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})", re.ASCII
)
SAMPLED = 0x01
LAST_SPANS_S = 2.0
"""Seconds in which the spans of a process that stops must reach the collector; the exporter would try for 10."""

Attributes = Mapping[str, str | int | float | bool]


class Parent(NamedTuple):
    """Parent of other spans, in a trace that is recorded."""

    trace_id: int
    span_id: int

    @property
    def traceparent(self) -> str:
        """Notation of W3C Trace Context."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{SAMPLED:02x}"


class Happened(NamedTuple):
    """An event of a span."""

    at_s: float
    """Unix seconds."""
    what: str
    detail: str


def valid_traceparent(value: str) -> str:
    """Return the W3C trace context of a call, or an empty text if it is none: tracing never fails a call."""
    return value if TRACEPARENT.fullmatch(value) else ""


def parent_of(traceparent: str) -> Parent | None:
    """Return the parent of a request's spans; None for an unrecorded trace or an invalid trace context."""
    if not traceparent:
        return None
    parts = TRACEPARENT.fullmatch(traceparent)
    if parts is None or not int(parts[3], 16) & SAMPLED:
        return None
    return Parent(int(parts[1], 16), int(parts[2], 16))


def span_id_of(*names: object) -> int:
    """Return the id of the span with these names, the same in every process.

    It is never 0, which is not a valid id.
    """
    digest = blake2b("\n".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1


class Tracing:
    """Traces of a process; without an endpoint it emits none."""

    def __init__(self, service: str, endpoint: str) -> None:
        """Connect to the endpoint. Raises StartupError when the libraries are missing."""
        self.tracer: Tracer | None = None
        self._provider: Any = None
        self._ids: Any = None
        if not endpoint:
            return
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        except ImportError as error:
            raise StartupError(
                f"LAPS_SD_OTLP_ENDPOINT needs OpenTelemetry ({error.name} is missing): pip install 'laps-sd[otel]'."
            ) from error

        class Ids(RandomIdGenerator):
            """Random ids, except for a span whose id is given."""

            given: int | None = None

            def generate_span_id(self) -> int:
                given, self.given = self.given, None
                return super().generate_span_id() if given is None else given

        self._ids = Ids()
        resource = Resource.create({"service.name": f"laps-sd-{service}", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer(f"laps_sd.{service}", __version__)

    @property
    def on(self) -> bool:
        """Return whether spans are emitted."""
        return self.tracer is not None

    def emit(
        self,
        name: str,
        parent: Parent,
        began_s: float,
        ended_s: float,
        attributes: Attributes,
        *,
        span_id: int | None = None,
        events: Iterable[Happened] = (),
        error: str | None = None,
    ) -> Parent:
        """Emit an ended span, times in Unix seconds, and return it as the parent of spans below it.

        `error`: the reason, if it failed.
        """
        assert self.tracer is not None, "see `on`"
        from opentelemetry.trace import Status, StatusCode

        self._ids.given = span_id
        span = self.tracer.start_span(
            name, context=context_of(parent), start_time=_ns(began_s), attributes=attributes
        )
        for event in events:
            detail = {"detail": event.detail} if event.detail else None
            span.add_event(event.what, detail, timestamp=_ns(event.at_s))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(_ns(max(began_s, ended_s)))
        return Parent(parent.trace_id, span.get_span_context().span_id)

    def close(self) -> None:
        """Send the remaining spans, for LAST_SPANS_S at most. Blocks."""
        if self._provider is not None:
            closing = threading.Thread(target=self._provider.shutdown, name="laps-sd-last-spans", daemon=True)
            closing.start()
            closing.join(LAST_SPANS_S)


QUIET = Tracing("", "")
"""Tracing that emits nothing."""


def context_of(parent: Parent) -> Context:
    """Return a parent in the form that OpenTelemetry's functions take."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    within = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=TraceFlags(SAMPLED))
    return set_span_in_context(NonRecordingSpan(within))


def _ns(moment_s: float) -> int:
    return round(moment_s * NS)
