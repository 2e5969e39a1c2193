"""Metrics: the endpoint, and the rules for names."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from laps_sd.errors import StartupError
from laps_sd.service.metrics import counter, gauge, histogram, serve_metrics, value


def test_what_was_counted_can_be_scraped():
    registry = CollectorRegistry()
    counter("laps_sd_rounds_total", "Rounds.", ["worker"], registry=registry).labels("w0").inc(3)
    histogram("laps_sd_wait_seconds", "Wait.", registry=registry).observe(0.2)
    server = serve_metrics(0, registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as reply:
            text = reply.read().decode()
    finally:
        server.close()

    assert 'laps_sd_rounds_total{worker="w0"} 3.0' in text
    assert value("laps_sd_wait_seconds_count", registry=registry) == 1


def test_names_and_labels_keep_the_rules():
    registry = CollectorRegistry()
    with pytest.raises(AssertionError, match="must start with laps_sd_"):
        gauge("queue_depth", "Depth.", registry=registry)
    with pytest.raises(AssertionError, match="must end with _total"):
        counter("laps_sd_rounds", "Rounds.", registry=registry)
    with pytest.raises(AssertionError, match="a request id is no label"):
        gauge("laps_sd_x", "X.", ["request_id"], registry=registry)


def test_a_port_in_use_is_one_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(
            StartupError, match=f"metrics port {port} .* choose another with LAPS_SD_METRICS_PORT"
        ):
            serve_metrics(port)
