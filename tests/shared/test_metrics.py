"""Metrics: the endpoint, and the rules for names."""

from __future__ import annotations

import socket
import threading
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from laps_sd.errors import StartupError
from laps_sd.service import metrics
from laps_sd.service.metrics import counter, gauge, histogram, serve_metrics, value
from tests.helpers import wait_until


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


def ended_by_the_server(connection: socket.socket) -> bool:
    """Return whether the endpoint closes a connection without an answer."""
    connection.settimeout(20.0)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_connection_that_sends_no_request_is_ended(monkeypatch, capfd):
    monkeypatch.setattr(metrics.ScrapeHandler, "timeout", 0.1)
    server = serve_metrics(0, registry=CollectorRegistry())
    try:
        for sent in (b"", b"GET /met", b"GET /metrics HTTP/1.1\r\nX: "):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(sent)
                assert ended_by_the_server(connection)
    finally:
        server.close()
    assert capfd.readouterr().err == ""


def test_few_connections_are_served_at_once(monkeypatch):
    monkeypatch.setattr(metrics, "SCRAPES", threading.BoundedSemaphore(1))
    server = serve_metrics(0, registry=CollectorRegistry())

    def scraped() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as reply:
                return reply.status == 200
        except OSError:
            return False

    try:
        with socket.create_connection(("127.0.0.1", server.port)) as first:
            first.sendall(b"GET /metrics HTTP/1.1\r\n")
            wait_until(lambda: metrics.SCRAPES._value == 0, description="the first one is served")
            with socket.create_connection(("127.0.0.1", server.port)) as second:
                assert ended_by_the_server(second)
        wait_until(scraped, description="there is room again")
    finally:
        server.close()
