"""Prometheus metrics of this process: one registry, one HTTP endpoint.

    ROUNDS = counter("laps_sd_worker_rounds_total", "Verification rounds run.")
    WAIT = histogram("laps_sd_queue_wait_seconds", "Acceptance until the first round.", buckets=SECONDS)
    server = serve_metrics(9090)

Names start with `laps_sd_`, and no label is a request id: a label value lives as long as the process.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import socket
import threading
from collections.abc import Iterable, Sequence
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from laps_sd.errors import StartupError

__all__ = [
    "REGISTRY",
    "SECONDS",
    "TOKENS",
    "CountHistogram",
    "MetricsServer",
    "count_histogram",
    "counter",
    "gauge",
    "histogram",
    "serve_metrics",
    "value",
]

REGISTRY = CollectorRegistry(auto_describe=True)
"""Metrics that this process exposes."""
prometheus_client.ProcessCollector(registry=REGISTRY)
prometheus_client.PlatformCollector(registry=REGISTRY)
prometheus_client.GCCollector(registry=REGISTRY)

SECONDS = (
    0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5,
    2.5, 4.0, 6.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0,
)  # fmt: skip
"""Buckets for durations, from one round to a long wait.

Each is at most twice the one before, and the error of a quantile is at most the same factor.
"""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Buckets for lengths."""


def _checked(name: str, labels: Sequence[str], ending: str = "") -> str:
    assert name.startswith(("laps_sd_", "vllm:")), f"metric {name} must start with laps_sd_"
    assert name.endswith(ending), f"counter {name} must end with {ending}"
    assert "request_id" not in labels, f"metric {name}: a request id is no label"
    return name


def counter(
    name: str, description: str, labels: Sequence[str] = (), *, registry: CollectorRegistry = REGISTRY
) -> Counter:
    """Return a metric that only grows; its name ends with `_total`."""
    return Counter(_checked(name, labels, "_total"), description, labels, registry=registry)


def gauge(
    name: str, description: str, labels: Sequence[str] = (), *, registry: CollectorRegistry = REGISTRY
) -> Gauge:
    """Return a metric of a present amount."""
    return Gauge(_checked(name, labels), description, labels, registry=registry)


def histogram(
    name: str,
    description: str,
    labels: Sequence[str] = (),
    *,
    buckets: Sequence[float] = SECONDS,
    registry: CollectorRegistry = REGISTRY,
) -> Histogram:
    """Return a metric of a distribution; its name ends with the unit."""
    return Histogram(_checked(name, labels), description, labels, buckets=buckets, registry=registry)


class CountHistogram(Histogram):
    """Distribution of small whole numbers, of which many are observed at once: `observe` takes 2 µs for each."""

    def observe_all(self, numbers: Iterable[int]) -> None:
        """Observe each of the numbers."""
        for number, count in collections.Counter(numbers).items():
            self._sum.inc(number * count)
            self._buckets[bisect.bisect_left(self._upper_bounds, number)].inc(count)


def count_histogram(name: str, description: str, *, buckets: Sequence[int]) -> CountHistogram:
    """Return a metric of a distribution of whole numbers; its name ends with the unit."""
    return CountHistogram(_checked(name, ()), description, buckets=buckets, registry=REGISTRY)


def value(name: str, labels: dict[str, str] | None = None, registry: CollectorRegistry = REGISTRY) -> float:
    """Return the present value of one sample, 0 if it has none yet."""
    return registry.get_sample_value(name, labels or {}) or 0.0


SCRAPES = threading.BoundedSemaphore(32)
"""Connections that are served at once, each by a thread; further ones are closed."""


class ScrapeHandler(WSGIRequestHandler):
    """One connection of the endpoint."""

    timeout = 10.0
    """Longest wait for bytes of the caller, or for it to read, in seconds; without it a thread would wait without end."""

    def handle(self) -> None:
        """Answer the request, unless too many connections are open."""
        if SCRAPES.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError):
                    super().handle()
            finally:
                SCRAPES.release()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the name of the base class
        """Log nothing."""


class MetricsServer:
    """HTTP endpoint of the metrics; it runs in a daemon thread and ends with the process."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    def close(self) -> None:
        """Stop the endpoint and free the port."""
        ending = threading.Thread(target=self._server.shutdown)
        ending.start()
        # The server looks whether it must end twice a second, and at each connection.
        host, port = self._server.server_address[:2]
        with contextlib.suppress(OSError):
            socket.create_connection((str(host), port), timeout=1.0).close()
        ending.join()
        self._server.server_close()
        self._thread.join()


def serve_metrics(
    port: int,
    host: str = "127.0.0.1",
    *,
    registry: CollectorRegistry = REGISTRY,
) -> MetricsServer:
    """Serve `/metrics`. Port 0 takes a free one, which is then in `MetricsServer.port`."""
    try:
        server, thread = prometheus_client.start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise StartupError(
            f"The metrics port {port} on {host} cannot be opened: {error.strerror}; "
            "choose another with LAPS_SD_METRICS_PORT."
        ) from error
    server.RequestHandlerClass = ScrapeHandler
    return MetricsServer(server, thread)
