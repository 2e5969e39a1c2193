"""A collector of OpenTelemetry on loopback: keeps every span that comes over the wire."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class SeenSpan:
    """One span, as received."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    began_s: float
    ended_s: float
    attributes: dict[str, Any]
    events: tuple[str, ...]
    error: str


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """All received spans, in the order of arrival."""

    def __init__(self) -> None:
        self._spans: list[SeenSpan] = []
        self._lock = threading.Lock()
        self.endpoint = ""

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                service = values(resource.resource)["service.name"]
                for scope in resource.scope_spans:
                    self._spans += [_seen(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, trace: str | None = None, name: str | None = None) -> list[SeenSpan]:
        """Return the spans of a trace, or of a name."""
        with self._lock:
            return [span for span in self._spans if trace in (None, span.trace) and name in (None, span.name)]


def values(thing: Any) -> dict[str, Any]:
    """Return the attributes of a resource, a span or an event."""
    return {one.key: _value(one.value) for one in thing.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return (
        [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
    )


def _seen(service: str, span: Any) -> SeenSpan:
    return SeenSpan(
        service=service.removeprefix("laps-sd-"),
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        began_s=span.start_time_unix_nano / 1e9,
        ended_s=span.end_time_unix_nano / 1e9,
        attributes=values(span),
        events=tuple(event.name for event in span.events),
        error=span.status.message,
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector while the block lasts; `endpoint` is the value for LAPS_SD_OTLP_ENDPOINT."""
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)
